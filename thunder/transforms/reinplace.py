"""Reinplace: the in-place operations of a program run in place again, where the old value is dead.

Capture functionalizes `x.add_(1)` into `t0 = add(x, 1)` and, for an x from outside, `copy_(x, t0)` at the end. This
pass makes one in-place operation of the two, and runs in-place operations on temporaries in place as well, so that a
program copies no more than in eager PyTorch. Several writes to one argument all take place in its memory.

Before: `t0 = torch.add(x, 1)`, `t1 = torch.sin(t0)`, `Tensor.copy_(x, t0)`. After: `t0 = Tensor.add_(x, 1)`, `t1 =
torch.sin(t0)`.

Where the old value has later consumers, the new one gets the strides of the old: `t0 = torch.cumsum(x, 0)`, `t1 =
laid_out_like(t0, x)`.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder.analysis import aliases
from thunder.analysis.aliases import alias_bases
from thunder.core.definition import InPlaceForm
from thunder.core.paths import last_decision
from thunder.core.proxies import Proxy, TensorProxy, like, same_shape
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, carries_out
from thunder.core.trace import Trace
from thunder.extend.fusion import written_over
from thunder.ops import ltorch
from thunder.ops.functionalize.inplace import also_written, copy_unless_there, write_back, writes_back
from thunder.ops.registry import LTORCH, torch_path


def reinplace(trace: Trace) -> Trace:
    """The trace whose operations run in place where the program overwrites a value that is not read afterwards."""
    written = trace.info.written
    if not written:
        return trace
    operations = list(trace.bound_symbols)
    state = _State(trace, operations, written)
    in_place: list[BoundSymbol] = []
    for i, operation in enumerate(operations):
        if i in state.dropped:
            continue
        if i in state.arrived:
            in_place.append(run_in_place(operation, InPlaceForm(copy_unless_there, {0: 0})))
            continue
        if operation.sym.is_fusion:
            in_place += state.fusion(i, operation)
            continue
        form = in_place_form(operation)
        if form is not None and state.fits(i, operation, form[1]):
            in_place.append(state.in_place(operation, form[1]))
        else:
            in_place += state.as_it_is(operation)
    return trace.replace(bound_symbols=in_place)


def in_place_form(operation: BoundSymbol) -> tuple[Callable, dict[int, Any]] | None:
    """The in-place form of an operation that PyTorch executes: (callable, {place of a result: overwritten tensor})."""
    if operation.sym.executor is None or operation.sym.executor.name != "torch" or not operation.subsymbols:
        return None
    symbol = operation.sym
    if symbol.in_place is None:
        return None
    function, pairs = symbol.in_place
    if callable(pairs):
        targets = pairs(operation)
        return (function, targets) if targets else None
    # a view computes nothing: its in-place form (detach_, t_) changes what a tensor is, and not what it holds
    if symbol.tags & {OpTags.RANDOM_OP, OpTags.VIEW}:
        return None
    return function, {o: operation.args[a] for o, a in pairs.items()}


def may_hold(target, result) -> bool:
    """Whether a tensor has the shape and type of a result, so that its memory can hold the result."""
    tensors = isinstance(target, TensorProxy) and isinstance(result, TensorProxy)
    return tensors and result.dtype is target.dtype and same_shape(result.shape, target.shape)


def run_in_place(operation: BoundSymbol, form: InPlaceForm) -> BoundSymbol:
    """The bound symbol with the in-place form of its operation."""
    function = form.function
    module, name = torch_path(function) or (None, function.__name__)
    in_place_symbol = Symbol(
        name,
        id=f"inplace.{name}",
        module=module,
        is_prim=True,
        tags=(OpTags.IN_PLACE, OpTags.DONT_DCE),
        fn=function,
        executor=operation.sym.executor,
    )
    in_place_symbol.in_place = form
    return operation.replace(sym=in_place_symbol, subsymbols=operation.subsymbols)


def overwritten(operation: BoundSymbol) -> list[tuple[Proxy | None, Proxy]]:
    """The tensors that an operation with the tag IN_PLACE writes to, each with the result that is in its memory."""
    form = operation.sym.in_place
    if writes_back(operation):
        pairs = {0: operation.args[0]}
    elif form is None:  # all that it may write to
        return [(o, target) for target in operation.inputs for o in (*operation.outputs, None)]
    elif callable(form.overwrites):
        pairs = form.overwrites(operation)
    else:
        pairs = {o: operation.args[a] for o, a in form.overwrites.items()}
    results = dict(enumerate(operation.outputs))
    return [(results.get(o), target) for o, target in pairs.items() if isinstance(target, Proxy)]


class _State:
    """The uses of values by their places, and the operations that write back to arguments."""

    def __init__(self, trace: Trace, operations: list[BoundSymbol], written: dict):
        self.written = written
        self.bases, self.views = alias_bases(operations, maybe=True), alias_bases(operations)
        self.arguments = {a for a in trace.args if isinstance(a, TensorProxy)}
        self.reads: dict[Proxy, list[int]] = {}
        self.copies: dict[Proxy, tuple[Proxy, int]] = {}  # argument -> (value that is written back to it, place)
        self.home: dict[Proxy, Proxy] = {a: a for a in self.arguments}  # value -> the argument in whose memory it is
        self.dropped: set[int] = set()
        self.arrived: set[int] = set()  # places of write-backs of values that a kernel may have written there already
        # arguments that are views of others
        beside = {self.bases[operation.args[0]] for operation in operations if operation.sym.id == _ALSO_WRITTEN}
        for i, operation in enumerate(operations):
            if operation.sym.id == _WRITE_BACK:
                self.copies[operation.args[0]] = operation.args[1], i
                self.reads.setdefault(self.bases[operation.args[1]], []).append(i)
                continue
            for value in operation.inputs:
                self.reads.setdefault(self.bases[value], []).append(i)
        # a read through a view sees the values before the first write
        through = (
            [
                i
                for i, operation in enumerate(operations)
                if operation.sym.id != _ALSO_WRITTEN
                and not beside.isdisjoint(map(self.bases.__getitem__, operation.inputs))
            ]
            if beside
            else []
        )
        # before the last decision, the call may still change to the program of another path
        self.last_beside = max(through[-1] if through else -1, last_decision(operations))
        for value in trace.output_proxies:
            self.reads.setdefault(self.bases[value], []).append(len(operations))

    def fits(self, i: int, operation: BoundSymbol, pairs: dict[int, Any]) -> bool:
        read = collections.Counter(map(self.bases.__getitem__, operation.inputs))
        return all(
            self._fits(i, operation.outputs[o], target, read)
            for o, target in pairs.items()
            if o < len(operation.outputs) or _raise(operation)
        )

    def _fits(self, i: int, result: Proxy, target, read: collections.Counter) -> bool:
        """Whether a result may be written over a target, which nothing reads later."""
        if not may_hold(target, result):
            return False
        home, reads = self.home.get(target), self.reads.get(self.bases[target], ())
        if read[self.bases[target]] > 1 or target in self.views and home is None:
            return False
        if home is None:
            return result.name in self.written and self.bases[target] not in self.home and not any(r > i for r in reads)
        if i < self.last_beside:
            return False
        last, at = self.copies.get(home, (None, -1))  # after which the argument itself is read as what it is then
        # a saved value would be overwritten by the last value
        if last is not result and any(r > at for r in self.reads.get(self.bases[result], ())):
            return False
        return (
            self.written.get(result.name) == home.name
            and i < at
            and not any(i < r and (r < at or target is not home) for r in reads)
        )

    def fusion(self, i: int, operation: BoundSymbol) -> list[BoundSymbol]:
        """A fusion that writes the last value of an argument into the memory of the argument, if its strides are those
        that the kernels expect. Otherwise `copy_unless_there` copies it."""
        read, homes = collections.Counter(map(self.bases.__getitem__, operation.inputs)), {}
        for o, result in enumerate(operation.outputs):
            for n, target in enumerate(operation.inputs):
                home = self.home.get(target)
                last = home is not None and self.copies.get(home, (None,))[0] is result
                if last and n not in homes and self._fits(i, result, target, read):
                    homes[n] = o
        overwriting, over = written_over(operation, (), homes) if homes else (operation, {})
        for o, n in over.items():
            home = self.home[operation.outputs[o]] = self.home[operation.inputs[n]]
            self.arrived.add(self.copies[home][1])
        return [overwriting] if over else self.as_it_is(operation)

    def as_it_is(self, operation: BoundSymbol) -> list[BoundSymbol]:
        """An operation that does not run in place, and behind it one that gives the result the strides of the value
        that it replaces. A detached value is in the memory of its source."""
        if operation.sym.id == _DETACH and (home := self.home.get(operation.inputs[0])) is not None:
            self._at_home(operation.outputs[0], home)
        target = _overwrites(operation) if operation.outputs and operation.outputs[0].name in self.written else None
        if target is None:
            return [operation]
        result = operation.outputs[0]
        copied = result.replace(name=operation.context.names.make())  # type: ignore[union-attr]
        return [
            operation.swap({result: copied}),
            _laid_out_like(operation.sym.executor).bind(copied, target, output=result, context=operation.context),
        ]

    def _at_home(self, value: Proxy, home: Proxy) -> None:
        self.home[value] = home
        last, at = self.copies.get(home, (None, -1))
        if last is value:
            self.dropped.add(at)

    def in_place(self, operation: BoundSymbol, pairs: dict[int, Any]) -> BoundSymbol:
        for o, target in pairs.items():
            home = self.home.get(target)
            if home is not None:
                self._at_home(operation.outputs[o], home)
        assert operation.sym.in_place is not None, "it has an in-place form"
        return run_in_place(operation, operation.sym.in_place)


def _overwrites(operation: BoundSymbol) -> TensorProxy | None:
    """The overwritten tensor of an operation whose result need not have the strides of its first argument."""
    original, args = (operation.subsymbols[0] if operation.subsymbols else operation).sym, operation.args
    if type(original.id) is tuple and original.id[0] == "with_graph":
        name, args = original.id[1], operation.args[1]
        original = LTORCH.get(str(name).removeprefix("ltorch."))
    if (
        original is None
        or original.elementwise
        or original.tags & {OpTags.RANDOM_OP, OpTags.VIEW}
        or original.in_place is None
        or original.in_place.overwrites != {0: 0}
    ):
        return None
    target, result = args[0] if args else None, operation.outputs[0]
    return target if may_hold(target, result) and len(result.shape) > 1 else None


@carries_out
def _lay_out_like(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return result if result.stride() == target.stride() else torch.empty_like(target).copy_(result)


@functools.cache
def _laid_out_like(executor) -> Symbol:
    """The operation that gives a tensor the strides of another one."""
    symbol = Symbol(
        "laid_out_like",
        lambda result, target: like(result),
        is_prim=True,
        tags=(OpTags.VIEW,),
        fn=_lay_out_like,
        executor=executor,
    )
    aliases.shows.set(0, symbol)
    aliases.may_copy.add(symbol)
    return symbol


def _raise(operation: BoundSymbol):
    raise AssertionError(f"the in-place form of {operation.sym.name} names a result that it does not have")


_WRITE_BACK = f"torch.{write_back.id}"
_ALSO_WRITTEN = f"torch.{also_written.id}"
_DETACH = f"torch.{ltorch.detach.id}"
