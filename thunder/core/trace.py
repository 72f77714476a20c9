"""Traces: straight-line programs over proxies. A transform reads one and returns another."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from thunder.core.codegen import Printer, compile_source, function_source
from thunder.core.proxies import Proxy, proxies_in
from thunder.core.symbol import BoundSymbol, Context, Names, Recorder, current_recorder, detached, recording

__all__ = [
    "Trace",
    "TraceCtx",
    "TraceBuilder",
    "TraceTag",
    "from_trace",
    "tracectx",
    "detached_trace",
    "is_tracing",
    "timed_pass",
]


class TraceTag(enum.Enum):
    AUGMENTED_FORWARD = enum.auto()
    BACKWARD = enum.auto()


class Trace:
    """A program: `def name(args): bound_symbols; return output`. Never changed once made; `replace` gives a changed
    copy.

    args: proxies (or None where the printed `signature` says something else). names: the names taken, shared by every
    trace of the program. provenance: the header line that says which pass made it. tables: side tables of single
    subsystems, keyed by value name; "objects" are those that lines made of text (prologue, epilogue) name.
    """

    __slots__ = (
        "name",
        "args",
        "signature",
        "bound_symbols",
        "output",
        "names",
        "provenance",
        "tags",
        "tables",
        "_callable",
        "__weakref__",
    )

    def __init__(
        self,
        name: str,
        args,
        bound_symbols,
        output,
        names: Names,
        *,
        provenance: str = "",
        signature: str = "",
        tags=frozenset(),
        tables=None,
    ):
        self.name, self.args, self.signature = name, tuple(args), signature
        self.bound_symbols: tuple[BoundSymbol, ...] = tuple(bound_symbols)
        self.output, self.names, self.provenance, self.tags = output, names, provenance, frozenset(tags)
        self.tables: dict[str, dict] = tables or {}
        self._callable: Callable | None = None

    @property
    def output_proxies(self) -> list[Proxy]:
        return proxies_in(self.output, [])

    def replace(self, **changes) -> Trace:
        """A copy with some of name, args, signature, bound_symbols, output, provenance, tags, tables changed."""
        fields = ("name", "args", "bound_symbols", "output", "names", "provenance", "signature", "tags", "tables")
        kept = {k: changes.get(k, getattr(self, k)) for k in fields}
        return Trace(
            kept.pop("name"), kept.pop("args"), kept.pop("bound_symbols"), kept.pop("output"), kept.pop("names"), **kept
        )

    # --- text
    def python(self, *, print_depth: int = -1, include_decorators: bool = True) -> str:
        """The program as Python text. print_depth: 1 leaves decompositions out, -1 shows all of them as comments."""
        return function_source(self, Printer(print_depth), include_decorators)

    def python_ctx(self) -> dict[str, Any]:
        """The objects that the text names and does not import."""
        printer = Printer(print_depth=1)
        function_source(self, printer, include_decorators=False)
        return self.tables.get("objects", {}) | printer.context

    def python_callable(self, *, include_decorators: bool = False) -> Callable:
        """The program as a function. Its source can be read in tracebacks and debuggers."""
        if self._callable is None or include_decorators:
            printer = Printer(print_depth=1)
            source = function_source(self, printer, include_decorators)
            function = compile_source(source, self.name, self.tables.get("objects", {}) | printer.context)
            if include_decorators:
                return function
            self._callable = function
        return self._callable

    def save_trace(self, filename) -> None:
        """Writes the text to a file."""
        with open(filename, "w", encoding="utf-8") as file:
            file.write(str(self) + "\n")

    def __str__(self) -> str:
        return self.python()

    __repr__ = __str__

    # --- names that Lightning Thunder's users know
    def get_provenance(self) -> str:
        return self.provenance

    def siginfo(self) -> list[tuple[str, Any]]:
        return [(a.name, a) for a in self.args]

    def has_name(self, name: str) -> bool:
        return name in self.names.taken

    def make_name(self, name: str | None = None, *, prefix: str = "t") -> str:
        return self.names.claim(name) if name is not None else self.names.make(prefix)


TraceCtx = Trace


class TraceBuilder:
    """An editable copy of a trace, for transforms that insert and remove lines: edit `bound_symbols`, `output` and the
    rest, return `trace()`.

    A pass may also return the builder itself: the pipeline seals it.
    """

    def __init__(self, base: Trace):
        self.base = base
        self.bound_symbols: list[BoundSymbol] = list(base.bound_symbols)
        self.name, self.args, self.output, self.names = base.name, list(base.args), base.output, base.names
        self.provenance, self.tags, self.tables = base.provenance, set(base.tags), dict(base.tables)

    def set_provenance(self, provenance) -> None:
        self.provenance = str(provenance)

    def trace(self) -> Trace:
        return self.base.replace(
            name=self.name, args=self.args, bound_symbols=self.bound_symbols, output=self.output,
            provenance=self.provenance, tags=self.tags, tables=self.tables
        )  # fmt: skip


def from_trace(trace: Trace) -> TraceBuilder:
    """An editable copy of `trace` without its lines, to be filled."""
    builder = TraceBuilder(trace)
    builder.bound_symbols = []
    return builder


@contextmanager
def tracectx(trace: Trace | TraceBuilder) -> Iterator[Recorder]:
    """Calls of symbols inside the block are recorded; for a builder they are appended to its lines."""
    recorder = Recorder(Context(trace.names))
    with recording(recorder):
        yield recorder
    if isinstance(trace, TraceBuilder):
        trace.bound_symbols.extend(recorder.bound_symbols)


detached_trace = detached


def is_tracing() -> bool:
    return current_recorder() is not None


def timed_pass(title: str, trace: Trace, run: Callable[[Trace], Trace | TraceBuilder]) -> Trace:
    """`run(trace)` with the header line that says which pass made the result and how long it took."""
    start = time.perf_counter_ns()
    result = run(trace)
    if isinstance(result, TraceBuilder):
        result = result.trace()
    took = (time.perf_counter_ns() - start) // 1_000_000
    return result.replace(provenance=f"Constructed by {title} (took {took} milliseconds)")
