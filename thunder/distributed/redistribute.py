"""`redistribute(x, axis, src, dst)`: the one operation that moves values between ranks. It changes how the ranks of an
axis hold a value (`thunder.distributed.layouts`); what it does follows from the two layouts.

    src  dst   computes                   src  dst   computes               src  dst   computes
    S    R, I  all-gather                 R    S     this rank's part       I    S     this rank's part
    S    S'    all-to-all                 R    V     nothing                I    R     nothing
    S    P     zeros elsewhere            R    I     nothing                I    P     zeros on all ranks but one
    P    S     reduce-scatter             R    P     zeros on all but one   V    P     nothing
    P    R, I  all-reduce                 S    V     nothing                V    S     this rank's share of a mean

The derivative is the table read with duals: the gradient of `redistribute(x, axis, src, dst)` is `redistribute(g, axis,
dst.dual, src.dual)`. So what is gathered from S to R has a gradient that is reduced and scattered from P to S, and what
goes from I to R, where nothing moves, one that is summed from P to I.

With tuples in the place of an axis and of layouts a value is redistributed along one axis after the other. Before:
`computation(x, t_w)`, `y = linear(x, t_w, None)`. After:  `computation(x, t_w_shard)`, `t_w = redistribute(t_w_shard,
dp, S0, R)`, `y = linear(x, t_w, None)`, and behind the derivative `d_t_w_shard = redistribute(d_t_w, dp, P, S0)`.

The operation is a composite of starts and waits of collectives. It is decomposed when the program is made to run, and
until then passes know what moves, and for which parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import codegen
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy, like
from thunder.core.symbol import BoundSymbol, Context, OpTags, Recorder, Symbol, adopt, primitive, recording
from thunder.core.trace import Trace
from thunder.distributed.layouts import Axis, I, Layout, P, outside_axis
from thunder.distributed.placement import Placement, gathers_once, synchronizes
from thunder.ops import ltorch
from thunder.ops.families.collectives import Future, all_gather, all_reduce, all_to_all, reduce_scatter, wait
from thunder.ops.rules import derivatives, effects, splitting
from thunder.ops.torch_types import from_tensor_dtype

codegen.OBJECT_NAMES[Placement] = lambda placement: f"placement_{placement.name}"

# ----------------------------------------------------------------------------------------------------------------
# one axis


def _sized(x: TensorProxy, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _whole_size(x: TensorProxy, axis: Axis, src: Layout) -> int:
    """Of the dimension that a value is sharded along."""
    return src.size if src.size is not None else x.shape[src.dim] * axis.size


def shape_after(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> tuple[int, ...]:
    """The shape of a rank's value."""
    if {src.kind, dst.kind} == {"S", "V"}:
        return tuple(x.shape)
    shape = tuple(x.shape) if src.kind != "S" else _sized(x, src.dim, _whole_size(x, axis, src))
    if dst.kind != "S":
        return shape
    whole = shape[dst.dim]
    assert whole == dst.size or whole % axis.pieces == 0, f"{dst} of {whole} elements in {axis.pieces} pieces"
    return (*shape[: dst.dim], math.ceil(whole / axis.size), *shape[dst.dim + 1 :])


def without_padding(x: TensorProxy, dim: int, size: int) -> TensorProxy:
    return x if x.shape[dim] == size else ltorch.narrow(x, dim, 0, size)


def with_padding(x: Any, axis: Axis, dst: Layout) -> Any:
    """As many elements along the dimension of parts as the ranks have together. Of a value of a program, or outside of
    one of a tensor."""
    size = x.shape[dst.dim]
    missing = -size % axis.size
    return ltorch.pad(x, (*(0, 0) * (len(x.shape) - 1 - dst.dim), 0, missing)) if missing else x


def _each_sequence(x: TensorProxy, axis: Axis, dim: int, move: Callable[[TensorProxy, int], TensorProxy]):
    """`move(x, dim)`, for each of the sequences that are in a row along a dimension."""
    if axis.groups == 1:
        return move(x, dim)
    x = move(ltorch.unflatten(x, dim, (axis.groups, x.shape[dim] // axis.groups)), dim + 1)
    return ltorch.flatten(x, dim, dim + 1)


def _in_order_of_ranks(x: TensorProxy, axis: Axis, dim: int) -> TensorProxy:
    """A whole sequence with the pieces of rank 0 first."""
    if not axis.folded:
        return x
    pieces = ltorch.chunk(x, 2 * axis.size, dim)
    return ltorch.cat([pieces[i] for rank in range(axis.size) for i in (rank, 2 * axis.size - 1 - rank)], dim)


def _in_order_of_positions(x: TensorProxy, axis: Axis, dim: int) -> TensorProxy:
    if not axis.folded:
        return x
    pieces = ltorch.chunk(x, 2 * axis.size, dim)
    return ltorch.cat([*pieces[::2], *pieces[::-2]], dim)


def _joined(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    def joined(x: TensorProxy, dim: int) -> TensorProxy:
        return _in_order_of_positions(wait(all_gather(x, axis.group, True, *((dim,) if dim else ()))), axis, dim)

    return without_padding(_each_sequence(x, axis, src.dim, joined), src.dim, _whole_size(x, axis, src))


def _part(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    def part(x: TensorProxy, dim: int) -> TensorProxy:
        pieces = [ltorch.narrow(x, dim, end - size, size) for end, size in axis.ends(x.shape[dim])]
        return pieces[0] if len(pieces) == 1 else ltorch.cat(pieces, dim)

    return _each_sequence(with_padding(x, axis, dst), axis, dst.dim, part)


def _reduced(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    return wait(all_reduce(x, axis.reduction, axis.group, True))


def _reduced_part(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    def part(x: TensorProxy, dim: int) -> TensorProxy:
        x = _in_order_of_ranks(x, axis, dim)
        return wait(reduce_scatter(x, axis.reduction, axis.group, True, *((dim,) if dim else ())))

    return _each_sequence(with_padding(x, axis, dst), axis, dst.dim, part)


def _exchanged(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    if src == dst:
        return x
    assert src.size is None and dst.size is None, "parts of different sizes are gathered"
    assert axis.pieces == axis.size, "parts in another order than that of ranks are gathered"
    sent = ltorch.cat(ltorch.chunk(x, axis.size, dst.dim), 0)
    return ltorch.cat(ltorch.chunk(wait(all_to_all(sent, axis.group, True)), axis.size, 0), src.dim)


def _summand(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    """Of which the reduction over ranks makes the value."""
    if axis.reduction == "avg":
        x = ltorch.mul(x, axis.size)
    if src.kind == "S":

        def padded(x: TensorProxy, dim: int) -> TensorProxy:
            size = x.shape[dim]
            before, after = axis.rank * size, (axis.size - 1 - axis.rank) * size
            x = ltorch.pad(x, (*(0, 0) * (len(x.shape) - 1 - dim), before, after))
            return _in_order_of_positions(x, axis, dim)

        return without_padding(_each_sequence(x, axis, src.dim, padded), src.dim, _whole_size(x, axis, src))
    return x if axis.rank == 0 else ltorch.zeros_like(x)


def _same(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    return x


def _own_share(x: TensorProxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
    """The reduction over ranks of what this rank alone has a summand of."""
    return ltorch.true_divide(x, axis.size) if axis.reduction == "avg" else x


TABLE = {
    ("S", "R"): _joined, ("S", "I"): _joined, ("S", "S"): _exchanged, ("S", "P"): _summand,
    ("R", "S"): _part, ("R", "V"): _same, ("R", "I"): _same, ("R", "P"): _summand,
    ("I", "S"): _part, ("I", "R"): _same, ("I", "P"): _summand, ("I", "I"): _same,
    ("P", "S"): _reduced_part, ("P", "R"): _reduced, ("P", "I"): _reduced, ("V", "P"): _same,
    ("S", "V"): _same, ("V", "S"): _own_share,
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------
# the operation


def steps_of(axis, src, dst) -> list[tuple[Axis, Layout, Layout]]:
    """(axis, from, to), in order, of a redistribution along one axis or several."""
    return [(axis, src, dst)] if isinstance(axis, Axis) else list(zip(axis, src, dst, strict=True))


def spelled(steps: Sequence[tuple[Axis, Layout, Layout]], of: Placement | None = None) -> tuple:
    """The arguments behind the first one. of: the parameter that is redistributed, or whose gradient is, where its
    collectives are not as others: dtypes, buckets, whether it is gathered again."""
    along = steps[0] if len(steps) == 1 else tuple(zip(*steps, strict=True))
    return along if of is None else (*along, of)


def dual(steps: Sequence[tuple[Axis, Layout, Layout]]) -> list[tuple[Axis, Layout, Layout]]:
    """The steps of gradients."""
    return [(axis, to.dual, src.dual) for axis, src, to in reversed(steps)]


def _dtypes(x: TensorProxy, steps: list, of: Placement | None) -> tuple:
    """(dtype that a value is communicated in, dtype of the result)."""
    if of is None:
        return x.dtype, x.dtype
    if steps[0][1] == P:
        communicated = x.dtype if of.reduce_dtype is None else from_tensor_dtype(of.reduce_dtype)
        return communicated, from_tensor_dtype(of.held_dtype)
    return (from_tensor_dtype(of.dtype),) * 2


def _typed(x: TensorProxy, axis, src, dst, of: Placement | None = None) -> TensorProxy:
    steps = steps_of(axis, src, dst)
    for one in steps:
        x = like(x, shape_after(x, *one))
    return x.replace(dtype=_dtypes(x, steps, of)[1])


def _moved(x: TensorProxy, axis, src, dst, of: Placement | None = None) -> TensorProxy:
    steps = steps_of(axis, src, dst)
    communicated, result = _dtypes(x, steps, of)
    x = ltorch.to(x, dtype=communicated)
    for one in steps:
        x = TABLE[one[1].kind, one[2].kind](x, *one)
    return ltorch.to(x, dtype=result)


redistribute = Symbol("redistribute", _typed, module="ltorch", decomposition=_moved)


@redistribute.vjp
def _(x, axis, src, dst, *of):
    g = yield redistribute(x, axis, src, dst, *of)
    return (redistribute(g, *spelled(dual(steps_of(axis, src, dst))), *of),)


@splitting.rule(redistribute)
def _moved_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """What moves over other ranks, along another dimension."""
    x, axis, src, dst, *of = operation.args
    part = split.part(x)
    if part is None or of or not isinstance(axis, Axis) or axis.group is part.axis.group:
        return None
    if any(one.kind == "S" and one.dim == part.dim for one in (src, dst)):
        return None
    return splitting.Part(redistribute(part.value, axis, src, dst), part.axis, part.dim)


def _gathers_again(operation: BoundSymbol) -> bool:
    _, _, src, _, *of = operation.args
    return bool(of) and of[0].again and P not in (src if isinstance(src, tuple) else (src,))


derivatives.regathers.set(_gathers_again, redistribute)

# ----------------------------------------------------------------------------------------------------------------
# parameters


@primitive(lambda gradient, placement: None, tags=(OpTags.DONT_DCE,), module="ltorch")
def leave_for_later(gradient, placement: Placement) -> None:
    """The gradient of one backward without synchronisation. Where the rank holds a shard, whose `.grad` has no place
    for it, it is added up beside it."""
    if synchronizes(placement):
        raise RuntimeError(
            f"the gradient of {placement.name} would stay that of this rank: the module was called under no_sync, "
            "and its backward runs outside. Run both inside of one block"
        )
    left = placement.accumulated
    left.pending = True
    if placement.is_sharded:
        left.gradient = (
            gradient.to(placement.reduce_dtype or gradient.dtype, copy=True)
            if left.gradient is None
            else left.gradient.add_(gradient)
        )


effects.leaves_gradient.add(leave_for_later)

without_synchronization = Symbol(
    "without_synchronization", lambda x, placement: like(x), module="ltorch", decomposition=lambda x, placement: x
)


@without_synchronization.vjp
def _(x, placement):
    g = yield without_synchronization(x, placement)
    leave_for_later(g, placement)
    return (None if placement.is_sharded else g,)


@primitive(
    lambda held, placement, *groups: FutureTensorProxy.of(
        held.replace(shape=_averaged_shape(placement), dtype=from_tensor_dtype(placement.dtype)),
        held.requires_grad,
    ),
    module="ltorch",
)
def gathered_once(held, placement: Placement, *groups):
    """The future of a sharded parameter, whole over the ranks that have data of their own, which the first call of a
    block gathers (`no_sync(gather_once=True)`). groups: those that it is gathered in."""
    left = placement.accumulated
    if left.gathered is None or left.gathered[0] != held._version:
        left.gathered = held._version, _gathering(held, placement)
    return left.gathered[1]


@gathered_once.vjp
def _(held, placement, *groups):
    yield gathered_once(held, placement, *groups)
    return (None,)  # the gradient is left for later


def _averaged_shape(placement: Placement) -> tuple[int, ...]:
    """The shape of a parameter that only ranks that share data hold parts of."""
    shape = list(placement.shape)
    for axis, layout, _ in placement.joining:
        if layout.kind == "S":
            shape[layout.dim] = math.ceil(shape[layout.dim] / axis.size)
    return tuple(shape)


def _gathering(held, placement: Placement) -> Future:
    held, steps = held.detach(), [step for step in placement.averaging if step[1].kind == "S"]
    for step in steps[:-1]:
        held = redistribute(held, *step)
    axis, src, dst = steps[-1]
    gathered = all_gather.fn(held.to(placement.dtype), axis.group, True, src.dim)
    size = _whole_size(held, axis, src)
    return Future(gathered.started, lambda: gathered.finish().narrow(src.dim, 0, size))


def whole(held: TensorProxy, placement: Placement) -> TensorProxy:
    """A parameter as programs see it, of what the rank holds. It is made whole over the ranks that have data of their
    own first, and over those that split layers then."""
    steps = placement.averaging
    if steps and synchronizes(placement):
        held = redistribute(held, *spelled(steps, placement.communicated_as))
    elif steps:
        if placement.is_sharded and gathers_once(placement):
            held = wait(gathered_once(held, placement, *(axis.group for axis, src, _ in steps if src.kind == "S")))
        elif placement.is_sharded:
            held = redistribute(held, *spelled(steps, placement.communicated_as))
        held = without_synchronization(ltorch.to(held, dtype=from_tensor_dtype(placement.dtype)), placement)
    for axis, layout, _ in placement.joining:
        held = redistribute(held, axis, layout, I)
    return held


def gradient_of_held(g: TensorProxy, placement: Placement) -> TensorProxy:
    """The gradient of what the rank holds, of that of a parameter as programs see it."""
    duals = dual(placement.averaging)
    return redistribute(g, *spelled(duals, placement.communicated_as)) if duals else g


def redistribute_parameters(computation: Trace, placements: dict[Proxy, Placement]) -> Trace:
    """The program on what the rank holds: each parameter is made whole right before its first use."""
    args = {
        a: held_proxy(computation, a, placements[a])
        for a in computation.args
        if a in placements and (placements[a].averaging or placements[a].joining)
    }
    context = next(
        (operation.context for operation in computation.bound_symbols if operation.context is not None), None
    ) or Context(computation.names)
    context = context.replace(grad_enabled=True, autocast=None, checkpoint=())
    waiting, written = dict(args), _written_to(computation, args)

    def made_whole(values) -> list[BoundSymbol]:
        return [
            operation
            for v in dict.fromkeys(values)
            if v in waiting
            for operation in _written(v, waiting.pop(v), placements[v], context)
        ]

    operations = []
    for operation in computation.bound_symbols:
        target = operation.args[0] if operation.sym.tags >= {OpTags.IN_PLACE, OpTags.DONT_DCE} else None
        if isinstance(target, Proxy) and target in written:
            operations += _written_back(operation, args[target], placements[target], context)
            continue
        if effects.of_held.holds(operation):
            operations.append(operation.swap({**args}))
            continue
        if not waiting.keys().isdisjoint(operation.inputs):
            operations += made_whole(operation.inputs)
        operations.append(operation)
    operations += made_whole(computation.output_proxies)
    paths = computation.info.parameters
    memory = {name: name for name in computation.info.written.values()}
    memory |= {a.name: held.name for a, held in args.items() if not placements[a].is_split}
    known = {held.name: paths[a.name] for a, held in args.items() if a.name in paths}
    return computation.replace(
        args=[args.get(a, a) if isinstance(a, Proxy) else a for a in computation.args],
        bound_symbols=operations,
        info=computation.info.replace(
            parameters={**paths, **known},
            written={name: memory[target] for name, target in computation.info.written.items()},
        ),
    )


def _written_to(computation: Trace, args: dict[Any, TensorProxy]) -> set[Proxy]:
    """The tensors that a program writes to at its end, and of which a rank holds a part."""
    return {
        b.args[0]
        for b in computation.bound_symbols
        if b.sym.tags >= {OpTags.IN_PLACE, OpTags.DONT_DCE} and isinstance(b.args[0], Proxy) and b.args[0] in args
    }


def _written_back(
    operation: BoundSymbol, held: TensorProxy, placement: Placement, context: Context
) -> list[BoundSymbol]:
    """The write to a tensor, as that to what the rank holds."""
    _, *values = operation.args
    with recording(Recorder(context.replace(grad_enabled=False))) as recorder:
        for q in placement.axes:
            if q.layout.kind == "S":
                values = [redistribute(x, outside_axis(q.axis), I, q.layout) for x in values]
    return [*recorder.bound_symbols, operation.replace(args=(held, *values))]


def _written(seen: TensorProxy, held: TensorProxy, placement: Placement, context: Context) -> list[BoundSymbol]:
    """The operations that make a parameter of what the rank holds."""
    with recording(Recorder(context)) as recorder:
        result = whole(held, placement)
    written, aliases = adopt(recorder.bound_symbols, result, seen)
    assert not aliases, "a parameter is made whole by an operation"
    return written


def held_proxy(computation: Trace, seen: TensorProxy, placement: Placement) -> TensorProxy:
    name = computation.names.claim(f"{seen.name}_{'shard' if placement.is_split else 'local'}")
    return seen.replace(name=name, shape=placement.held_shape, dtype=from_tensor_dtype(placement.held_dtype))
