"""Statistics of a compiled function: counters, times, programs, and reasons to compile again."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from thunder.cache.entry import CacheEntry
from thunder.compat.modes import MODES
from thunder.core.trace import Trace
from thunder.errors import help_page

# sections of the troubleshooting page, each with a pattern of its reasons; the first that fits
REASONS = (
    ("no-caching", r"^(no caching|first call)$"),
    ("another-path", r"^another path: "),
    ("other-modes", "^(" + "|".join(map(re.escape, MODES)) + ") was "),
    ("other-arguments", r"^(the number of positional|the set of keyword|the order of keyword) arguments"),
    ("other-dimensions", r" had \d+ dimensions, has "),
    ("other-sizes", r"\.shape\[\d+\]"),
    ("other-kinds-of-tensor", r"\.(dtype|device|requires_grad|layout|is_\w+\(\)|stride\(\)) was "
     r"| was a \w+, is | is another kind of tensor than "),
    ("other-types", r" was of type "),
    ("other-containers", r"^len\(|^the (keys|elements|content|subclasses) of | held .*, does not$| holds .* now$"),
    ("other-code", r"^(the code|a default argument) of "),
    ("another-object", r" is another object than before(: |$)"),
    ("come-or-gone", r" (exists now|is gone|is nothing)$| was nothing, is "),
    ("shared-memory", r" one object$|shared? memory|shares memory|as views of one memory$| is another leaf or view "),
    ("hooks", r" has hooks now$"),
    ("replaced-parameters", r"^other parameters of the compiled module"),
    ("failing-guards", r"^a question that the prologue asks raised "),
    ("other-values", ""),
)  # fmt: skip


def section_of_reason(reason: str) -> str:
    """Where the page about troubles tells of a reason to compile again."""
    return f"{help_page()}#{next(section for section, words in REASONS if re.search(words, reason))}"


RECORDS = 1000  # recompilations that are remembered


@dataclass(frozen=True)
class Recompilation:
    """A function was compiled again.

    reason: in words, why the program that ran last did not fit. location: (filename, line number, function name,
    source line) of the user's call, None where there is none. call: the number of the call, from 1. time: in seconds
    since the epoch.
    """

    reason: str
    location: tuple | None
    call: int
    time: float

    def __str__(self) -> str:
        where = "" if self.location is None else f", {self.location[0]}:{self.location[1]}, in {self.location[2]}"
        return f"call {self.call}{where}: {self.reason} (see {section_of_reason(self.reason)})"


class Traces(list[Trace]):
    """Traces in the order of the passes. Printed, a table of contents; `traces[-1]` prints the program that runs, and
    `traces[-1].python(depth=1)` prints it without decompositions."""

    def __str__(self) -> str:
        lines = []
        for i, trace in enumerate(self):
            title, took = trace.made_by
            time = "" if took is None else f"{took} ms"
            lines.append(f"{i:3}  {title:42}{len(trace.bound_symbols):6} bound symbols{time:>10}".rstrip())
        return "\n".join(lines)

    __repr__ = __str__


class CompileStats:
    """Counters and the traces of the last call. Times are in nanoseconds, of the last call that compiled. Printed, a
    table."""

    def __init__(self):
        self.calls = self.cache_hits = self.cache_misses = 0
        self.interpreter_cache: list[CacheEntry] = []
        self.last_entry: CacheEntry | None = None
        self.last_compile_reasons: list[str] = []
        self.recompilations: deque[Recompilation] = deque(maxlen=RECORDS)
        self.interpreted_instructions = self.bound_symbols_created = 0
        self.times: dict[str, tuple[int, int]] = {}
        self.loaded = 0  # programs that came from disk
        self.not_loaded: list[str] = []  # of the last call that looked there, why others did not fit

    def __str__(self) -> str:
        again = self.recompilations[-1].reason if self.recompilations else "never"
        rows = {
            "calls": self.calls, "cache hits": self.cache_hits, "cache misses": self.cache_misses,
            "programs": len(self.interpreter_cache), "compiled again, the last time because": again,
            "instructions interpreted": self.interpreted_instructions,
            "operations captured": self.bound_symbols_created,
        }  # fmt: skip
        times = {f"last {what}, ms": f"{(stop - start) / 1e6:.3f}" for what, (start, stop) in self.times.items()}
        return "\n".join(f"{name:40}{value}" for name, value in (rows | times).items())

    __repr__ = __str__

    last_traces = property(lambda self: self.last_entry.computation_traces if self.last_entry else [])
    last_backward_traces = property(lambda self: self.last_entry.backward_traces if self.last_entry else [])
    last_prologue_traces = property(lambda self: self.last_entry.prologue_traces if self.last_entry else [])
    last_epilogue_traces = property(lambda self: self.last_entry.epilogue_traces if self.last_entry else [])
    last_prologue = property(lambda self: self.last_entry.prologue_fn if self.last_entry else None)
    last_computation = property(lambda self: self.last_entry.computation_fn if self.last_entry else None)

    def _took(self, what: str) -> int:
        start, stop = self.times.get(what, (0, 0))
        return stop - start

    def last_cache_lookup_time(self) -> int:
        return self._took("lookup")

    def last_trace_construction_time(self) -> int:
        return self._took("construction")

    def last_prologue_transformation_time(self) -> int:
        return self._took("prologue")

    def last_prologue_execution_time(self) -> int:
        return self._took("prologue execution")

    def last_computation_execution_time(self) -> int:
        return self._took("computation execution")
