"""Checkpoints (`torch.utils.checkpoint`): the backward recomputes their operations, and writes to tensors again, as
eager PyTorch's second run does.

A tensor that the operations in a checkpoint write to is read by `present`, whose copy in the backward gives what it
holds then. The results of the checkpoint pass `repeated`, whose derivative writes:

    t0 = untracked(m_num_batches_tracked)  # forward
    t1 = present(t0)                       # in the checkpoint
    t2 = add(t1, 1)                        # in the checkpoint
    y = repeated(t3, ("m_weight",), (t0,), (t2,), ("t0",))    # in the checkpoint: t3 itself
    bw_t1 = present(t0)                    # backward
    bw_t2 = add(bw_t1, 1)
    run_again(t4, ("m_weight",), ("t0",), 1, t0, bw_t2)       # writes; t4 is the cotangent of y
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from thunder.analysis import aliases
from thunder.capture import containers
from thunder.core.proxies import NumberProxy, TensorProxy, concrete, like, proxies_in
from thunder.core.regions import leading_to
from thunder.core.rewrite import renamed_operation, renamed_value
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, primitive
from thunder.ops.rules import derivatives, effects
from thunder.runtime.wanted import wants
from thunder.transforms.autodiff import Linearization
from thunder.transforms.derivative import Derivative


def call(c, f, args, kwargs):
    """Operations inside are marked: the backward recomputes their results, which are not saved."""
    if kwargs.get("use_reentrant") is not False:  # PyTorch's Python checks the rest, and applies CheckpointFunction
        return c.enter(inspect.unwrap(f), args, kwargs)
    options = set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters) - {"function", "args", "kwargs"} | {
        "preserve_rng_state"
    }
    kwargs = {k: v for k, v in kwargs.items() if k not in options}
    return _recomputed(c, args[0], args[1:], kwargs, stops_early=True)


def reentrant(c, function, args):
    """`torch.utils.checkpoint(use_reentrant=True)`. It is one autograd function of its arguments: where none of them
    requires grad nothing inside has a gradient, and where one does every result has."""
    c.enter(torch.utils.checkpoint.check_backward_validity, (args,), {})
    if not torch.is_grad_enabled() or not any(
        type(a) is TensorProxy and c.recorder.latest(a).requires_grad for a in args
    ):
        return c.enter(torch.no_grad()(function), args, {})
    result = _recomputed(c, function, args, {}, stops_early=False)
    for value in result if isinstance(result, tuple) else (result,):
        tensors = proxies_in(value, [])
        if any(t is not value for t in tensors) or any(
            not t.requires_grad and t.dtype.category >= 2 for t in tensors if type(t) is TensorProxy
        ):
            c.refuse(
                "torch.utils.checkpoint with use_reentrant=True gives tensors in a structure, or tensors without a "
                "gradient, which get another one there",
                "pass use_reentrant=False",
            )
    return result


def _recomputed(c, function, args, kwargs, stops_early: bool):
    recorder, outer, before = c.recorder, c.recorder.context.checkpoint, _repeatable(c)
    start, written = len(recorder.bound_symbols), set(c.tensors.mutated)
    recorder.context = recorder.context.replace(checkpoint=(*outer, object()))
    try:
        result = c.call(function, args, kwargs)
        tensors = [p for p in proxies_in(result, []) if type(p) is TensorProxy and p.requires_grad]
        if tensors and (after := _repeatable(c)) != before:
            if after[1:] != before[1:]:
                _refuse(c, "changes numbers or containers")
            new = [b for b in c.tensors.mutated if before[0].get(b) != after[0][b]]
            if outer or written.intersection(new):
                _refuse(c, "writes to a tensor that was written to before, or in a checkpoint of a checkpoint")
            _Repeated(c, start, tensors, new, stops_early)
    finally:
        recorder.context = recorder.context.replace(checkpoint=outer)
    return result


def _refuse(c, what: str) -> Any:
    return c.refuse(
        f"what runs in a checkpoint {what}, which eager PyTorch does once more in the backward",
        "leave it out of the checkpoint",
    )


def _repeatable(c) -> tuple:
    """What a checkpoint that runs again in the backward would do again, and which would not come out the same: writes
    to tensors, to numbers that the program has read, and to containers of numbers or of a number of elements."""
    tensors = {base: id(c.recorder.memory.latest(base)) for base in c.tensors.mutated}
    written = ((key, v) for key, v in c.writes.overlay.items() if _is_number(v) and _was_read(c, *key))
    numbers = {key: id(v) if isinstance(v, NumberProxy) else v for key, v in written}
    changed = [_described(*change) for change in containers.changes(c)]
    return tensors, numbers, [change for change in changed if change is not None]


def _described(kind: str, original, source, key, value) -> tuple | None:
    """A change of a container from outside, to compare; None for an entry that would be the same the second time."""
    if kind == "item" and not _is_number(value):
        return None
    sized = isinstance(value, (list, set, dict))
    return kind, id(original), key, len(value) if sized else concrete(value) if _is_number(value) else None


def _is_number(value) -> bool:
    return type(value) in (int, float, bool) or isinstance(value, NumberProxy)


def _was_read(c, owner: int, name) -> bool:
    """Whether the program has looked for an attribute that it writes, also where its class has the value."""
    source = c.sources.get(owner)
    if source is None or name is None:
        return False
    places = (source, source.attr("__dict__"))
    return source.attr(name) in c.values or any(s.key == name and s.base in places for s, _, _ in c.observed)


# ---------------------------------------------------------------- writes that a backward does again


@primitive(lambda a: like(a), tags=(OpTags.VIEW, OpTags.DETACHED), module="ltorch")
def untracked(a: torch.Tensor) -> torch.Tensor:
    """The tensor under another version counter: autograd may keep it while it is written to."""
    return a.data


@primitive(lambda a: like(a), tags=(OpTags.DETACHED,), module="ltorch")
def present(a: torch.Tensor) -> torch.Tensor:
    """What a tensor holds when this runs."""
    return a.clone()


derivatives.statistics.set((0,), present)


def again(
    gradient: torch.Tensor, inputs: tuple[str, ...], names: tuple[str, ...], count: int, *tensors: torch.Tensor
) -> None:
    """Write the second half of `tensors` to the first half, where autograd wants the gradient of one of the inputs.
    Each result of a checkpoint has such an operation, and all write the same. names: of the targets."""
    if wants(inputs):
        for target, value in zip(tensors[:count], tensors[count:], strict=True):
            target.data.copy_(value)


@functools.cache
def _run_again(count: int) -> Symbol:
    symbol = Symbol(
        "run_again", lambda gradient, *rest: None, module="ltorch", id="run_again", is_prim=True,
        tags=(OpTags.DONT_DCE,), fn=again,
    )  # fmt: skip
    derivatives.statistics.set(tuple(range(4, 4 + count)), symbol)
    effects.asks_autograd.add(symbol)
    derivatives.once_differentiable.set("a checkpoint writes to tensors, and its backward does so once more", symbol)
    return symbol


repeated = Symbol(
    "repeated", lambda result, *rest: like(result), module="ltorch", id="repeated",
    is_prim=True, tags=(OpTags.VIEW,), fn=lambda result, *rest: result.view_as(result),
)  # fmt: skip


def _derivative(result, inputs, targets, values, names):
    gradient = yield result
    _run_again(len(targets))(gradient, inputs, names, len(targets), *targets, *values)
    return (gradient,)


repeated.grad_rule = _derivative
aliases.shows.set(0, repeated)


class _Repeated:
    """The writes of one checkpoint's operations to tensors from outside, which a backward does again."""

    def __init__(self, c, start: int, results: Sequence[TensorProxy], written: list[TensorProxy], stops_early: bool):
        self.c, self.written, memory = c, written, c.recorder.memory
        self.start = start
        self.ran = 0  # the number of the last backward inside of the program that wrote again
        self.region = c.recorder.bound_symbols[start:]
        values = [memory.latest(b) for b in written]
        self.slice = leading_to(self.region, values)
        made = {o for operation in self.region for o in operation.outputs}
        self.results = list(dict.fromkeys(r for r in map(memory.latest, results) if r in made))
        if not self.results:
            self._note(self.region)
            return
        self._check(values, stops_early)
        context = c.recorder.context
        around = context.replace(checkpoint=context.checkpoint[:-1])
        targets = [self._named(b) for b in written]
        now = [self._named(b) for b in written]
        first = [untracked.bind(b, output=t, context=around) for b, t in zip(written, targets, strict=True)]
        first += [present.bind(t, output=p, context=context) for t, p in zip(targets, now, strict=True)]
        below = {r: renamed_value(r, context.names.make()) for r in self.results}
        table = dict(zip(written, now, strict=True)) | below
        region = [operation.swap(table) for operation in self.region]
        inputs, names = self._inputs(), tuple(t.name for t in targets)
        ends = [
            repeated.bind(below[r], inputs, tuple(targets), tuple(values), names, output=r, context=context.afterwards)
            for r in self.results
        ]
        for operation in (*first, *ends):
            operation.location = c.own_location()
        self.slice = leading_to(region, values)
        self.now, self.values = dict(zip(now, written, strict=True)), values
        c.recorder.rewrite([*c.recorder.bound_symbols[:start], *first, *region, *ends])
        c.engine.repeated[names] = self
        self._note(region)

    def _note(self, region: Sequence[BoundSymbol]) -> None:
        """The values of these operations stay in the checkpoint: see `check_left`."""
        token, made = self.c.recorder.context.checkpoint[-1], (o for operation in region for o in operation.outputs)
        self.c.engine.inside |= {o: token for o in made if isinstance(o, TensorProxy) and o.requires_grad}

    def _inputs(self) -> tuple[str, ...]:
        """Names of the program's inputs that the gradient goes to."""
        read = {i for operation in leading_to(self.c.recorder.bound_symbols, self.results) for i in operation.inputs}
        return tuple(p.name for p in self.c.tensors.real if p in read and p.requires_grad)

    def _named(self, p: TensorProxy) -> TensorProxy:
        made = like(p)
        made.name, made.requires_grad = self.c.recorder.context.names.make(), False
        return made

    def _check(self, values: list[TensorProxy], stops_early: bool) -> None:
        c, memory = self.c, self.c.recorder.memory
        for b, value in zip(self.written, values, strict=True):
            plain = b not in memory.view_of and not memory.views.get(b) and b not in memory.rearranged
            no_grad = not b.requires_grad and not value.requires_grad
            moved = b in c.tensors.rebound or any(b is inner for inner in c.tensors.rebound.values())
            if not plain or not no_grad or b in c.tensors.placements or moved or c.outer_recorders:
                _refuse(c, "writes to a view, a parameter, or a tensor that ranks share")
        made = {o for operation in self.region for o in operation.outputs}
        if any(operation in c.engine.known for operation in self.region) or not made.isdisjoint(c.engine.heads):
            _refuse(c, "writes to a tensor, and has a backward or a hook of a tensor")
        self._check_reads()
        if stops_early:
            places = {o: i for i, operation in enumerate(self.region) for o in operation.outputs}
            last = max(places.get(value, 0) for value in values)
            if not any(_keeps(c, operation) for operation in reversed(self.region[last:])):
                c.refuse(
                    "what runs in a checkpoint writes to a tensor after all that the backward needs, where eager "
                    "PyTorch's second run stops",
                    "leave it out of the checkpoint",
                )

    def _check_reads(self) -> None:
        """Refuse where the written tensors' values go into other results: the second run's are others."""
        changing = set(self.written)
        for operation in self.region:
            unread = derivatives.statistics.of(operation.sym)
            reads = changing.intersection(operation.inputs)
            if not reads:
                continue
            if any(not any(operation.args[i] is value for i in unread) for value in reads):
                if operation not in self.slice:
                    _refuse(self.c, "reads a tensor that it writes to")
                changing.update(operation.outputs)
            else:
                changing.update(o for i, o in enumerate(operation.outputs) if i in operation.sym.nondifferentiable)
        if not changing.isdisjoint(self.results):
            _refuse(self.c, "gives a tensor that it writes to")


def _keeps(c, operation: BoundSymbol) -> bool:
    """Whether the derivative of an operation needs values of the forward, so that eager PyTorch keeps some."""
    if not any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs):
        return False
    steps = Linearization([operation], c.request.options.executors).steps
    return any(isinstance(step, Derivative) and step.saves for step in steps)


def reached(operations: Sequence[BoundSymbol], needed: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The `needed` operations of a backward, and the writes of the checkpoints that they come through."""
    read = {i for operation in needed for i in operation.inputs}
    kept = set(needed)
    return [b for b in operations if b in kept or b.sym.id == "run_again" and b.args[0] in read]


def run(c, operation: BoundSymbol) -> None:
    """`run_again` in a backward inside of the program, where the writes are the program's own."""
    memory, region = c.recorder.memory, c.engine.repeated[operation.args[2]]
    if region.ran == c.engine.backwards:
        return
    region.ran = c.engine.backwards
    table = {p: memory.latest(b) for p, b in region.now.items()}
    for one in region.slice:
        if one.sym not in (present, untracked):
            made = renamed_operation(one, table, lambda o: c.recorder.context.names.make())
            c.recorder.bound_symbols.append(made)
    with torch.no_grad():
        c.synchronize()
        for b, value in zip(region.written, region.values, strict=True):
            memory.write(b, table.get(value, value))
    c.synchronize()


def check_left(c, results) -> None:
    """Refuses where values in a checkpoint that writes to tensors are used outside by other ways than its results."""
    inside = c.engine.inside
    if not inside:
        return
    used = [(None, p) for p in proxies_in(results, [])]
    used += [(b.context, p) for b in c.recorder.bound_symbols for p in b.inputs]
    for context, p in used:
        token = inside.get(p)
        if token is not None and (context is None or token not in context.checkpoint):
            _refuse(c, "writes to a tensor, and keeps another one that is used outside")
