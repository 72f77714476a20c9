"""`thunder.examine`: the operations, fusions and saved values of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.analysis.flow import producers
from thunder.api import jit
from thunder.capture.operations import NOT_OPERATIONS
from thunder.capture.policy import is_library
from thunder.core.proxies import CollectionProxy, NumberProxy, Proxy, TensorProxy, UnbackedNumber, type_string
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.tables import table
from thunder.core.trace import Trace
from thunder.errors import ThunderError, warn_user
from thunder.inspect.queries import last_entry, last_sharp_edges, last_traces
from thunder.ops import inplace_of, lookup

_DECISIONS = {getattr(torch.Tensor, f"__{n}__") for n in ("bool", "int", "float", "complex", "index", "contains")}


class _Calls(TorchFunctionMode):
    """Counts the torch functions that a program calls."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in NOT_OPERATIONS and func not in _DECISIONS:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def torch_calls(fn: Callable, *args, **kwargs) -> Counter:
    """Counts the calls of each torch function in a run of `fn` in eager PyTorch. Attributes (`x.shape`) do not
    count, unless they are operations (`x.T`)."""
    with torch.no_grad(), _Calls() as calls:
        fn(*args, **kwargs)
    return Counter(
        {f: n for f, n in calls.counts.items() if getattr(f, "__name__", "") != "__get__" or lookup(f) is not None}
    )


def get_fusions(trace: Trace, warn_if_fusions_unavailable: bool = True) -> list[tuple[str, Callable]]:
    """Returns a (name, function) pair for each region of a trace that a fusion executor runs. `source` of a function of
    the Triton fuser is the text of its kernels.

    Warns if the trace has no regions, for example because executors have not transformed it yet.
    """
    fusions = [(symbol.name, symbol.fn) for symbol in get_fusion_symbols(trace)]
    if not fusions and warn_if_fusions_unavailable:
        warn_user(
            "this trace has no fusions: is it the last of thunder.last_traces(...), of a program compiled with a "
            "fusion executor?",
            UserWarning,
        )
    return fusions  # type: ignore[return-value]


def get_fusion_symbols(trace: Trace) -> list[Symbol]:
    """Returns the fused operations of a trace."""
    return [b.sym for b in operations_in(trace) if b.sym.is_fusion]


def operations_in(trace: Trace) -> list[BoundSymbol]:
    """Returns the operations of a trace, including those inside CUDA graphs."""
    return [
        inner
        for b in trace.bound_symbols
        for inner in (b.subsymbols if b.sym.is_fusion and b.sym.executor is None else (b,))
    ]


def examine(fn: Callable, *args, **kwargs) -> None:
    """Runs `fn` in eager PyTorch and prints which operations it uses and which of them thunder does not define. Then
    compiles `fn` and prints the result."""
    try:
        counts = torch_calls(fn, *args, **kwargs)
    except Exception as error:  # noqa: BLE001  it is reported: bad input is what people examine
        print(f"The program fails in PyTorch itself, before thunder is asked: {type(error).__name__}: {error}")
        return
    known = {f: n for f, n in counts.items() if _is_known_function(f)}
    unknown = {f: n for f, n in counts.items() if f not in known}
    share = 100 * len(known) // max(len(counts), 1)
    print(f"Found {len(counts)} distinct operations, of which {len(known)} ({share}%) are supported")
    if unknown:
        print("These are taken as opaque operations: PyTorch runs them, thunder does not look inside:")
        for f, n in sorted(unknown.items(), key=lambda item: -item[1]):
            print(f"  {resolve_name(f) or getattr(f, '__name__', f)}, called {n} times")
    compiled = jit(fn)
    try:
        with torch.no_grad():
            compiled(*args, **kwargs)
    except ThunderError as error:
        print(f"It cannot be compiled: {error}")
        return
    traces = last_traces(compiled)
    print(
        f"The program was compiled and run: {len(traces[0].bound_symbols)} operations captured, see thunder.last_traces"
    )
    for edge in last_sharp_edges(compiled):
        print(f"  sharp edge: {edge}")


def _is_known_function(f: Callable) -> bool:
    """Whether thunder has an operation for a torch function, or interprets the Python code that it is."""
    interpreted = isinstance(f, FunctionType) and not is_library(f.__globals__.get("__name__"))
    return lookup(f) is not None or inplace_of(f) is not None or interpreted


@dataclass(frozen=True)
class SavedValue:
    """A value that the forward saves for the backward.

    Attributes:
        name: Its name in the trace.
        kind: Its type, as traces print it.
        nbytes: The bytes of its storage. 0 if the storage belongs to an argument or was counted before, None for an
            autograd graph of PyTorch and for a tensor of data-dependent size.
        operation: The operation that computed it; "argument" for an argument.
        location: (file, line, function, source line) in the user's code.
    """

    name: str
    kind: str
    nbytes: int | None
    operation: str
    location: tuple | None


class SavedValues(tuple):
    """The values that the last call of a compiled function saved for its backward, the largest first. Prints as a
    table."""

    @property
    def nbytes(self) -> int:
        """The total bytes of distinct storages, without those of arguments and of PyTorch's autograd graphs."""
        return sum(v.nbytes or 0 for v in self)

    def __str__(self) -> str:
        rows = [
            (v.name, v.kind, "?" if v.nbytes is None else f"{v.nbytes:,}", v.operation, _where(v.location))
            for v in self
        ]
        graphs = sum(v.nbytes is None and v.kind == "Any" for v in self)
        more = f", and {graphs} pieces of PyTorch's autograd graph" if graphs else ""
        by_data = sum(v.nbytes is None and v.kind != "Any" for v in self)
        more += f", and {by_data} tensors of data-dependent sizes" if by_data else ""
        printed = table(("value", "type", "bytes", "made by", "at"), rows, right={2})
        return f"{printed}\n{self.nbytes:,} bytes saved for the backward, without arguments{more}"


def _where(location: tuple | None) -> str:
    return f"{location[0]}:{location[1]}: {location[3].strip()}" if location is not None else ""


def _is_known(value: Proxy) -> bool:
    """Whether the size of a tensor does not depend on data."""
    return not any(isinstance(n, NumberProxy) and n.unbacked for n in value.shape)  # type: ignore[attr-defined]


def saved_for_backward(compiled: Callable) -> SavedValues:
    """Returns the values that the last call saved for its backward: name, type, bytes, the operation that computed the
    value and the user's line. Empty if no result required grad.

    Raises:
        TypeError: If `compiled` is not compiled or was not called.
    """
    entry = last_entry(compiled)
    if not entry.backward_traces:
        return SavedValues()
    trace = entry.computation_traces[-1]
    tensors, others = trace.output[1]
    operations = operations_in(trace)
    producer = producers(operations)
    bases, counted, values = alias_bases(operations), {a for a in trace.args if isinstance(a, TensorProxy)}, []
    saved = [
        v
        for value in (*tensors, *others)
        for v in (value.collection if isinstance(value, CollectionProxy) else (value,))
        if isinstance(v, Proxy)  # symbolic numbers take no memory
    ]
    for value in sorted(saved, key=lambda v: v in bases):  # before views of it, the value that owns the memory
        operation, base = producer.get(value), bases[value]
        size = (
            0
            if isinstance(value, UnbackedNumber) or base in counted
            else nbytes(base)
            if isinstance(value, TensorProxy) and _is_known(base)
            else None
        )
        counted.add(base)
        location = entry.captured.where(operation.location) if operation is not None and operation.location else None
        values.append(
            SavedValue(
                value.name,
                type_string(value),
                size,
                operation.sym.qualified_name if operation is not None else "argument",
                location,
            )
        )
    return SavedValues(sorted(values, key=lambda v: -(v.nbytes or 0)))
