"""Logs of compilations, through Python's `logging`: `THUNDER_LOGS=recompiles,guards,passes,output_code,fallbacks`.

Each topic is a logger, `thunder.recompiles` and so on. The variable has them written to stderr; a program that sets up
`logging` itself gives them the level INFO.
"""

from __future__ import annotations

import functools
import logging

from thunder.cache.entry import CacheEntry
from thunder.cache.history import Recompilation, Traces
from thunder.errors import OptionError
from thunder.options import LOGS

TOPICS = ("recompiles", "guards", "passes", "output_code", "fallbacks")
RECOMPILES, GUARDS, PASSES, OUTPUT_CODE, FALLBACKS = (logging.getLogger(f"thunder.{topic}") for topic in TOPICS)


@functools.cache
def configure(topics: str) -> None:
    """Has topics, separated by commas, written to stderr. Raises OptionError for another topic."""
    chosen = {topic.strip() for topic in topics.split(",") if topic.strip()}
    if not chosen <= set(TOPICS):
        raise OptionError(f"{LOGS.name}={topics} is not an option; valid: {', '.join(TOPICS)}, separated by commas")
    for topic in chosen:
        logger, handler = logging.getLogger(f"thunder.{topic}"), logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False


def log_recompilation(name: str, record: Recompilation) -> None:
    RECOMPILES.info("%s, %s", name, record)


def log_fallback(name: str, text: str) -> None:
    """text: what of a function is not compiled, and why."""
    FALLBACKS.info("%s: %s", name, text)


def log_program(name: str, entry: CacheEntry) -> None:
    """Guards, passes and code of a program that was compiled."""
    if GUARDS.isEnabledFor(logging.INFO):
        text = entry.prologue.python(depth=1)
        GUARDS.info("%s asks %d questions before each call\n%s", name, entry.captured.guard_count, text)
    if PASSES.isEnabledFor(logging.INFO):
        for kind, traces in (("forward", entry.computation_traces), ("backward", entry.backward_traces)):
            if traces:
                PASSES.info("%s, %s\n%s", name, kind, Traces(traces))
    if OUTPUT_CODE.isEnabledFor(logging.INFO):
        for kind, traces in (("forward", entry.computation_traces), ("backward", entry.backward_traces)):
            if traces:
                OUTPUT_CODE.info("%s, %s\n%s", name, kind, traces[-1])
