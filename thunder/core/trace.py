"""Traces: straight-line programs over proxies. A transform reads one and returns another."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pickle
import re
import sys
import time
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from thunder.core.codegen import Printer, compile_source, function_source
from thunder.core.coloring import for_html, for_terminal
from thunder.core.pickling import dumps, pickled_or_marked
from thunder.core.proxies import Proxy, proxies_in
from thunder.core.symbol import BoundSymbol, Context, Names, Recorder, current_recorder, detached, recording


class TraceTag(enum.Enum):
    """What a trace is: a joint forward and backward, or one of the two."""

    JOINT = enum.auto()
    AUGMENTED_FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclasses.dataclass(frozen=True)
class RuleHits:
    """How often a rule replaced operations of a program. locations: of those operations. reason: why the attempt that
    went farthest replaced nothing, and the location of the operation that it ended at. at: the stage of the rule."""

    at: str = ""
    locations: tuple = ()
    reason: str = ""
    ended: Any = None


@dataclasses.dataclass(frozen=True)
class TraceInfo:
    """Facts about a program beside its bound symbols, by names of values.

    objects: by name, the objects in bound symbols that are text (prologue, epilogue). parameters: by argument, the name
    of the parameter or buffer. held: arguments that are parameters or buffers of other modules as well. written: by
    value that the program writes over an older one in place, the older value. copies: results of views that are copies,
    by their strides at capture. unseen: arguments that it writes to behind autograd's back. strides: by argument, those
    of the captured call, as a hint. row_major: arguments that are row-major, which the prologue guards. layouts: by
    value, how ranks hold it along axes of a mesh, where they hold parameters together. compiled: objects of executors
    that live as long as the program.

    backwards: the number of backwards in the program; contexts of bound symbols have the number of theirs. recomputed:
    by backward, the values of its forward that it recomputes. cut: the forward and the backward of a joint trace.
    cotangents: by the name of a cotangent, the one in text to be read. saved_as: of a backward, the saved tensors and
    other saved values of the forward that runs. missing: the missing cotangents of a backward. fusible: bound symbols
    that fusion executors may take. padded: matrices with padded rows in memory. disposable: saved values of a forward
    in memory that only its backward reads. rules: by name, the hits of rules. arguments: (args, kwargs) of the function
    that was traced -> the values of the program's arguments, where these are parts of those.
    """

    objects: dict[str, Any] = dataclasses.field(default_factory=dict)
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    held: Set[str] = frozenset()
    written: Mapping[str, str] = dataclasses.field(default_factory=dict)
    copies: Set[str] = frozenset()
    unseen: Set[str] = frozenset()
    strides: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    row_major: Set[str] = frozenset()
    layouts: Mapping[str, Mapping[Any, Any]] = dataclasses.field(default_factory=dict)
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    backwards: int = 0
    recomputed: Mapping[int, Set[Proxy]] = dataclasses.field(default_factory=dict)
    cut: ForwardBackward | None = None
    cotangents: Mapping[str, str] = dataclasses.field(default_factory=dict)
    saved_as: tuple = ((), ())
    missing: Set[Proxy] = frozenset()
    fusible: Set[BoundSymbol] = frozenset()
    padded: Set[Proxy] = frozenset()
    disposable: Set[Proxy] = frozenset()
    rules: Mapping[str, RuleHits] = dataclasses.field(default_factory=dict)
    arguments: Callable[[tuple, dict], list] | None = None

    @property
    def communicates(self) -> bool:
        """Whether the program has collectives of parameters or layers."""
        return bool(self.layouts)

    def replace(self, **changes) -> TraceInfo:
        """A copy with some of the fields changed."""
        return dataclasses.replace(self, **changes)


class Trace:
    """A program: `def name(args): bound_symbols; return output`. Immutable; `replace` returns a changed copy.

    Args:
        name: The name of the printed function.
        args: The proxies of the arguments; None if `signature` is printed instead.
        bound_symbols: The operations, in order.
        output: The result, a nested structure of proxies and constants.
        names: The names that are in use. All traces of a program share this object.
        provenance: The header line. It names the pass that returned the trace.
        signature: The printed parameters, if they differ from `args`.
        tags: Properties of the trace.
        info: Facts about the program that passes exchange.
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
        "info",
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
        info: TraceInfo | None = None,
    ):
        self.name, self.args, self.signature = name, tuple(args), signature
        self.bound_symbols: tuple[BoundSymbol, ...] = tuple(bound_symbols)
        self.output, self.names, self.provenance, self.tags = output, names, provenance, frozenset(tags)
        self.info = info or TraceInfo()
        self._callable: Callable | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_callable" and hasattr(self, "_callable"):
            raise AttributeError(f"a trace is never changed: trace.replace({name}=...) gives a changed copy")
        object.__setattr__(self, name, value)

    @property
    def output_proxies(self) -> list[Proxy]:
        return proxies_in(self.output, [])

    def replace(self, **changes) -> Trace:
        """Returns a copy with some of name, args, signature, bound_symbols, output, provenance, tags and info
        changed."""
        fields = ("name", "args", "bound_symbols", "output", "names", "provenance", "signature", "tags", "info")
        if unknown := changes.keys() - set(fields):
            raise TypeError(f"Trace.replace() has no {', '.join(sorted(unknown))}; valid: {', '.join(fields)}")
        fields_now = {k: changes.get(k, getattr(self, k)) for k in fields}
        return Trace(
            fields_now.pop("name"),
            fields_now.pop("args"),
            fields_now.pop("bound_symbols"),
            fields_now.pop("output"),
            fields_now.pop("names"),
            **fields_now,
        )

    # --- text
    def python(
        self,
        *,
        depth: int | None = None,
        print_depth: int = 1,
        include_decorators: bool = True,
        memory: bool = False,
    ) -> str:
        """Returns the program as Python text to be read by people: one line for each operation, with the types of its
        results, the user's line and the module."""
        return self._text(Printer(print_depth if depth is None else depth, memory=memory), include_decorators)

    def _text(self, printer: Printer, include_decorators: bool) -> str:
        return function_source(self, printer, include_decorators)

    def print_readable(self, *, depth: int = 1, memory: bool = False, colored: bool | None = None) -> None:
        """Prints `python(depth=depth, memory=memory)`. colored: whether to use colors; by default on a terminal."""
        text = self.python(depth=depth, memory=memory)
        print(for_terminal(text) if (sys.stdout.isatty() if colored is None else colored) else text)

    def _repr_html_(self) -> str:
        return for_html(self.python())

    @property
    def made_by(self) -> tuple[str, int | None]:
        """The name of the pass that returned the trace, and its time in milliseconds; ("as captured", None) for a
        captured trace."""
        match = re.fullmatch(r"Constructed by (.*) \(took (\d+) milliseconds\)", self.provenance)
        return (match[1], int(match[2])) if match else (self.provenance or "as captured", None)

    def python_ctx(self) -> dict[str, Any]:
        """The objects that the text refers to and does not import."""
        printer = Printer(print_depth=1)
        function_source(self, printer, include_decorators=False)
        return self.info.objects | printer.context

    def python_callable(self, *, include_decorators: bool = False) -> Callable:
        """Returns the program as a function. Tracebacks and debuggers show its source. The function of a trace of
        `thunder.trace` takes the arguments of the traced function."""
        if self._callable is None or include_decorators:
            printer = Printer(print_depth=1)
            source = function_source(self, printer, include_decorators)
            function = compile_source(source, self.name, self.info.objects | printer.context)
            if (flat := self.info.arguments) is not None:
                function = functools.wraps(function)(lambda *args, run=function, **kwargs: run(*flat(args, kwargs)))
            if include_decorators:
                return function
            self._callable = function
        return self._callable

    def save_trace(self, filename) -> None:
        """Writes the text to a file."""
        with open(filename, "w", encoding="utf-8") as file:
            file.write(str(self) + "\n")

    def __str__(self) -> str:
        return self.python(print_depth=-1, memory=True)

    __repr__ = __str__

    def __reduce__(self):
        """See `thunder.core.pickling`."""
        objects = {name: pickled_or_marked(x) for name, x in self.info.objects.items()}
        info = self.info.replace(objects=objects, compiled={}, cut=None, arguments=None)
        fields = (self.name, self.args, self.bound_symbols, self.output, self.names)
        others = {"provenance": self.provenance, "signature": self.signature, "tags": self.tags, "info": info}
        return _loaded, (dumps((fields, others)),)

    def __copy__(self) -> Trace:
        return self  # it does not change

    def __deepcopy__(self, memo: dict) -> Trace:
        return self

    # --- names that Lightning Thunder's users know
    def get_provenance(self) -> str:
        return self.provenance

    def siginfo(self) -> list[tuple[str, Any]]:
        return [(a.name, a) for a in self.args]

    def has_name(self, name: str) -> bool:
        return name in self.names.taken

    def make_name(self, name: str | None = None, *, prefix: str = "t") -> str:
        return self.names.claim(name) if name is not None else self.names.make(prefix)


def _loaded(pickled: bytes) -> Trace:
    fields, others = pickle.loads(pickled)
    return Trace(*fields, **others)


@dataclasses.dataclass(frozen=True)
class ForwardBackward:
    """A joint trace in two. forward: returns (outputs, (saved tensors, saved others)). backward:
    `backward_fn(saved_for_backward, cotangents)`, one gradient or None an argument.

    outputs: the distinct tensors, data-dependent numbers and values of host calls that the forward computes and the
    program returns, in order. cotangents: those of the outputs that require grad, which the backward takes. returned:
    the result of the program.
    """

    forward: Trace
    backward: Trace
    outputs: list
    cotangents: list
    saved_tensors: list
    saved_others: list
    returned: Any


class TraceBuilder:
    """An editable copy of a trace, for transforms that insert and remove operations: edit `bound_symbols`, `output` and
    the rest, return `trace()`.

    A pass may also return the builder itself: the pipeline seals it.
    """

    def __init__(self, base: Trace):
        self.base = base
        self.bound_symbols: list[BoundSymbol] = list(base.bound_symbols)
        self.name, self.args, self.output, self.names = base.name, list(base.args), base.output, base.names
        self.provenance, self.tags, self.info = base.provenance, set(base.tags), base.info

    def set_provenance(self, provenance) -> None:
        self.provenance = str(provenance)

    def add_bound_symbol(self, operation: BoundSymbol) -> None:
        self.bound_symbols.append(operation)

    def python(self, **options) -> str:
        return self.trace().python(**options)

    def python_callable(self, **options) -> Callable:
        return self.trace().python_callable(**options)

    def __str__(self) -> str:
        return self.python(print_depth=-1, memory=True)

    def trace(self) -> Trace:
        return self.base.replace(
            name=self.name, args=self.args, bound_symbols=self.bound_symbols, output=self.output,
            provenance=self.provenance, tags=self.tags, info=self.info
        )  # fmt: skip


class TraceCtx(ABC):  # noqa: B024  what isinstance says of traces and builders
    """`TraceCtx(fn)` returns an empty trace that can be filled, with the name of `fn`. All traces and trace builders
    are instances of TraceCtx."""

    def __new__(cls, fn: Callable | None = None) -> TraceBuilder:  # type: ignore[misc]
        name = fn.__name__ if fn is not None and fn.__name__.isidentifier() else "computation"
        return TraceBuilder(Trace(name, (), (), None, Names()))


TraceCtx.register(Trace)
TraceCtx.register(TraceBuilder)


def from_trace(trace: Trace) -> TraceBuilder:
    """An editable copy of `trace` without its operations, to be filled."""
    builder = TraceBuilder(trace)
    builder.bound_symbols = []
    return builder


@contextmanager
def tracectx(trace: Trace | TraceBuilder) -> Iterator[Recorder]:
    """Calls of symbols inside the block are recorded; for a builder they are appended to its operations."""
    recorder = Recorder(Context(trace.names))
    with recording(recorder):
        yield recorder
    if isinstance(trace, TraceBuilder):
        trace.bound_symbols.extend(recorder.bound_symbols)


detached_trace = detached


def is_tracing() -> bool:
    return current_recorder() is not None


def timed_pass(title: str, trace: Trace, run: Callable[[Trace], Trace | TraceBuilder]) -> Trace:
    """`run(trace)` with a header line that names the pass and its time."""
    start = time.perf_counter_ns()
    return headed(title, run(trace), start)


def headed(title: str, result: Trace | TraceBuilder, start: int) -> Trace:
    """The result of a pass with its header line. start: the time at which the pass began, by `time.perf_counter_ns`."""
    took = (time.perf_counter_ns() - start) // 1_000_000
    trace = result.trace() if isinstance(result, TraceBuilder) else result
    return trace.replace(provenance=f"Constructed by {title} (took {took} milliseconds)")
