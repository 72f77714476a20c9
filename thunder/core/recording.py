"""The recorder that bound symbols are written to, and where in the user's code it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = [
    "RECORDER",
    "current_recorder",
    "decided_by_data",
    "recording",
    "undecided",
    "user_location",
    "why_undecided",
]

RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)


def current_recorder() -> Any:
    """The Recorder that calls of symbols are recorded in, None where nothing is traced."""
    return RECORDER.get()


def user_location() -> tuple | None:
    """(filename, line, function, source line) of the user's code that is being traced, where that is known."""
    recorder = RECORDER.get()
    return recorder.where() if recorder is not None and recorder.where is not None else None


def decided_by_data(kind: str, question: Any) -> Any:
    """The answer to a data-dependent question, where the program that is captured goes one of its ways; None
    where it cannot. kind: "truth" of a condition, or "value" of a number."""
    recorder = RECORDER.get()
    return None if recorder is None or recorder.decide is None else getattr(recorder.decide, kind)(question)


def why_undecided() -> str:
    """Why the program cannot go one of its ways, in words that follow a semicolon; empty where that is plain to see."""
    recorder = RECORDER.get()
    return "" if recorder is None or recorder.decide is None else recorder.decide.why


@contextmanager
def undecided() -> Iterator[None]:
    """Inside the block, what is data-dependent is a DataDependentError, which the caller has another way for."""
    recorder = RECORDER.get()
    if recorder is None:
        yield
        return
    outer, recorder.typing = recorder.typing, True
    try:
        yield
    finally:
        recorder.typing = outer


@contextmanager
def recording(recorder: Any) -> Iterator[Any]:
    """Calls of symbols are recorded in `recorder` inside the block."""
    token = RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        RECORDER.reset(token)
