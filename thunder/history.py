"""What a compiled function remembers of its calls: counters, times, programs, and why it was compiled again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from thunder.program import CacheEntry

__all__ = ["RECORDS", "Recompilation", "CompileStats"]

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
        return f"call {self.call}{where}: {self.reason}"


class CompileStats:
    """Counters and the traces of the last call. Times are in nanoseconds, of the last call that compiled."""

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
