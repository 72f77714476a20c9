"""Reuse Memory: a fused kernel or a single elementwise operation writes its result over an input that dies with it, and
gradients are accumulated in place.

Before: `t1 = torch.nn.functional.linear(x, w)`, `[t2] = TritonFusion0(t1, y)`, `return t2`. After: the same, with the
comment `t2 is written over t1`, and no memory for t2. Before: `t1 = torch.nn.functional.linear(x, w)`, `t2 =
torch.tanh(t1)`, `t3 = torch.nn.functional.linear(t2, v)`. After: the same, with `t2 = Tensor.tanh_(t1)`.

A value is written over only if nothing else can share its memory: a product or a fused kernel of the same program has
written it, only products and fused kernels have read it or its views, and the program neither returns nor saves it.
`FusionExecutor.writing_over` says whether a kernel reads each element before it writes there, and nowhere else. A large
saved value that only the backward reads is written over there: `t4 = unless_read_again(t0)`, `[t5] =
TritonFusion1(t4, g)`, where `t4` is `t0`, or a copy where autograd keeps the graph. The pass runs behind the transforms
of the user, whose reads count, and therefore apart from `reinplace`, whose in-place operations CUDA graphs record.
Memory inside of a CUDA graph is left alone: its pool reuses it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Set

import torch

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes, original_of
from thunder.analysis.lifetimes import last_uses
from thunder.core.definition import InPlaceForm
from thunder.core.proxies import Proxy, TensorProxy, like
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace, TraceTag
from thunder.extend.fusion import FusionExecutor, written_over
from thunder.ops.backward import is_read_again
from thunder.ops.families.parts import add_part, rearranges
from thunder.ops.rules import memory
from thunder.transforms.del_last_used import python_del
from thunder.transforms.phases import phase_of
from thunder.transforms.reinplace import in_place_form, may_hold, run_in_place

SMALLEST = 1 << 20  # bytes of a saved value that is worth writing over


def reuse_memory(trace: Trace, fused: bool) -> Trace:
    """The trace whose operations write over inputs that die with them: accumulations of gradients, fusions, and, where
    a fusion executor is used (`fused`), elementwise operations."""
    backward = _is_backward(trace)
    if not fused and not any(
        _adds_gradients(b) or backward and memory.accumulates.of(b.sym) for b in trace.bound_symbols
    ):
        return trace
    state, padded = _Lifetimes(trace), trace.info.padded
    saved = _Saved(trace)
    state.owned |= dict.fromkeys(saved.large, True)
    operations: list[BoundSymbol] = []
    for i, operation in enumerate(trace.bound_symbols):
        if operation.sym is python_del:
            operations.append(saved.deleted(operation))
            continue
        fuser, own = _fuser(operation), memory.owns_result.of(operation.sym)
        hidden = fuser is not None or OpTags.MATMUL_OP in operation.sym.tags
        accumulates = _adds_gradients(operation) or backward and memory.accumulates.of(operation.sym)
        if fuser is not None:
            dying = state.dying(i, operation)
            operation, over = written_over(operation, dying) if dying else (operation, {})
            operation, own = saved.taken(operation, [operation.inputs[n] for n in over.values()], operations), True
        elif (accumulates or fused and operation.sym.elementwise) and (form := _in_place_form(operation)):
            home = state.home(i, operation, rearranged=accumulates)
            # a linear layer returns a view of a base that nobody else has; an output of the forward must be no view
            may_be_view = backward or not state.leaves(operation)
            if home is not None and (may_be_view or not state.owned[home]) and _fits(operation, home, saved, padded):
                hidden, own = state.owned[home], True
                operation = saved.taken(run_in_place(operation, form), [home], operations)
        operations.append(operation)
        state.after(operation, own, hidden)
    disposable = state.disposable(trace) if TraceTag.AUGMENTED_FORWARD in trace.tags else frozenset()
    return trace.replace(bound_symbols=operations, info=trace.info.replace(disposable=disposable))


def _fits(operation: BoundSymbol, home: Proxy, saved: _Saved, padded: Set[Proxy]) -> bool:
    """Whether the memory of a value holds the result of an operation as it is: a large saved one is read as it is."""
    return (home not in saved.large or home is operation.args[0]) and (home not in padded or operation.output in padded)


class _Saved:
    """The saved values that a backward may write over. large: those that are worth asking whether a graph is kept."""

    def __init__(self, trace: Trace):
        self.names = trace.names
        self.large = {p for p in trace.info.disposable if nbytes(p) >= SMALLEST} if _is_backward(trace) else set()
        self._instead: dict[Proxy, TensorProxy] = {}  # by a value that is written over, what is

    def taken(self, operation: BoundSymbol, over: Iterable[Proxy], before: list[BoundSymbol]) -> BoundSymbol:
        """An operation that writes over values. Saved ones are copied right before it, where they are read again."""
        chosen: dict[Proxy, TensorProxy] = {}
        for value in dict.fromkeys(over):
            if isinstance(value, TensorProxy) and value in self.large:
                chosen[value] = value.replace(name=self.names.make())
                before.append(_unless_read_again.bind(value, output=chosen[value], context=operation.context))
        if not chosen:
            return operation
        self._instead |= chosen
        swapped = operation.swap(chosen)
        swapped.header = operation.header
        return swapped

    def deleted(self, operation: BoundSymbol) -> BoundSymbol:
        """A `python_del`; what stands for a value is deleted together with it."""
        new = [self._instead[p] for p in operation.args if p in self._instead] if self._instead else []
        if not new:
            return operation
        dead = (*operation.args, *new)
        return BoundSymbol(python_del, dead, {}, None, inputs=dead, outputs=())


def _own_or_copy(saved: torch.Tensor) -> torch.Tensor:
    return saved.clone() if is_read_again(saved) else saved


_unless_read_again = Symbol(
    "unless_read_again", lambda saved: like(saved), is_prim=True, tags=(OpTags.VIEW,), fn=_own_or_copy
)


def _is_backward(trace: Trace) -> bool:
    return TraceTag.BACKWARD in trace.tags


def _adds_gradients(operation: BoundSymbol) -> bool:
    return memory.accumulates.of(operation.sym) and (phase_of(operation) > 0 or original_of(operation).sym is add_part)


class _Lifetimes:
    """Values that die with an operation. owned: values that share their memory with no other value, and whether they
    may be views of a base outside of the program."""

    def __init__(self, trace: Trace):
        self.end, self.bases = len(trace.bound_symbols), alias_bases(trace.bound_symbols, maybe=True)
        self.rearranged = {b.outputs[0]: b for b in trace.bound_symbols if rearranges(b)}
        base, outputs = self.bases.__getitem__, trace.output_proxies
        self.last = last_uses(trace.bound_symbols, outputs, base, lambda b: b.sym is not python_del)
        self.owned: dict[Proxy, bool] = {}

    def dying(self, i: int, operation: BoundSymbol) -> list[int]:
        """The places of the inputs that die with an operation. An operation that also reads a view of an input would
        read it after it was written over."""
        read = collections.Counter(map(self.bases.__getitem__, operation.inputs))
        return [n for n, p in enumerate(operation.inputs) if p in self.owned and self.last[p] == i and read[p] == 1]

    def home(self, i: int, operation: BoundSymbol, rearranged: bool) -> Proxy | None:
        """The value in whose memory the first operand is, all of it, where it dies with the operation. rearranged: the
        operand may have the dimensions of that value in another order."""
        home = operation.args[0]
        while rearranged and (b := self.rearranged.get(home)) is not None:
            home = b.args[0]
        reads = sum(self.bases[p] is home for p in operation.inputs)
        return home if home in self.owned and self.last[home] == i and reads == 1 else None

    def disposable(self, trace: Trace) -> frozenset[Proxy]:
        """The saved values of a forward in memory that no other value shares."""
        outputs, (saved, _) = trace.output
        shared = collections.Counter(self.bases[p] for p in (*dict.fromkeys(saved), *outputs))
        return frozenset(p for p in saved if p in self.owned and shared[p] == 1)

    def leaves(self, operation: BoundSymbol) -> bool:
        return self.last.get(operation.outputs[0]) == self.end

    def after(self, operation: BoundSymbol, own: bool, hidden: bool) -> None:
        """Updates the owned values. An operation whose results are neither new memory nor known views may keep its
        inputs, or return them under other names."""
        if own:
            self.owned |= {o: hidden for o in operation.outputs if isinstance(o, TensorProxy)}
        elif not (operation.outputs and all(o in self.bases for o in operation.outputs)):
            for base in map(self.bases.__getitem__, operation.inputs):
                self.owned.pop(base, None)


def _fuser(operation: BoundSymbol) -> FusionExecutor | None:
    executor = operation.sym.executor
    is_fusion = isinstance(executor, FusionExecutor) and executor.owns_results and operation.sym.is_fusion
    return executor if is_fusion else None  # type: ignore[return-value]


def _in_place_form(operation: BoundSymbol) -> InPlaceForm | None:
    """The in-place form of an operation of PyTorch's whose first operand has the type and shape of the result."""
    form = in_place_form(operation) if OpTags.IN_PLACE not in operation.sym.tags else None
    return operation.sym.in_place if form is not None and may_hold(operation.args[0], operation.outputs[0]) else None
