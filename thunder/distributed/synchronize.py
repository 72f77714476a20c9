"""Synchronisation: a program begins with what its rank holds of the parameters, and ends with gradients of that.

Before: `computation(x, t_fc_weight)`, `t0 = linear(x, t_fc_weight, None)`. After:  `computation(x, t_fc_weight_shard)`,
`t_fc_weight = synchronize(t_fc_weight_shard, placement, True)`, `t0 = linear(x, t_fc_weight, None)`.

`synchronize` is all_gather, wait and a view; its derivative `synchronize_gradient` is reduce_scatter, or all_reduce for
what every rank holds, and wait. Both are composites: they are decomposed when the program is made to run, and until
then passes know what belongs to which parameter.
"""

from __future__ import annotations

from typing import Any

from thunder.core import codegen
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Context, OpTags, Symbol, primitive
from thunder.core.trace import Trace
from thunder.distributed.placement import Placement, synchronizes
from thunder.distributed.tensor_parallel import join_ranks
from thunder.ops import LTORCH
from thunder.ops.families.collectives import all_gather, all_reduce, reduce_scatter, wait
from thunder.ops.rules import derivatives
from thunder.ops.torch_types import from_tensor_dtype

codegen.OBJECT_NAMES[Placement] = lambda placement: f"placement_{placement.name}"


def _typed_whole(held: TensorProxy, placement: Placement, synchronized: bool) -> TensorProxy:
    return TensorProxy(shape=placement.shape, dtype=from_tensor_dtype(placement.dtype), device=held.device)


def prepared_shard(held: TensorProxy, placement: Placement) -> TensorProxy:
    """What is gathered."""
    return LTORCH["to"](held, dtype=from_tensor_dtype(placement.dtype))


def whole_of(gathered: TensorProxy, placement: Placement) -> TensorProxy:
    """A gathered parameter without the padding."""
    return gathered if gathered.shape[0] == placement.shape[0] else LTORCH["narrow"](gathered, 0, 0, placement.shape[0])


def _gathered(held: TensorProxy, placement: Placement, synchronized: bool) -> TensorProxy:
    held = prepared_shard(held, placement)
    return held if placement.shards is None else whole_of(wait(all_gather(held, placement.shards, True)), placement)


def _typed_held(gradient: TensorProxy, placement: Placement, dtype) -> TensorProxy:
    return TensorProxy(shape=placement.held_shape, dtype=dtype, device=gradient.device)


def prepared_gradient(gradient: Any, placement: Placement) -> Any:
    """What is reduced: with as many rows as the ranks hold together. Of a value of a program, or outside of one of a
    tensor."""
    if placement.reduce_dtype is not None:
        gradient = LTORCH["to"](gradient, dtype=placement.reduce_dtype)
    missing = placement.shards is not None and placement.held_shape[0] * placement.shards.size() - placement.shape[0]
    return LTORCH["pad"](gradient, (*(0, 0) * (len(placement.shape) - 1), 0, missing)) if missing else gradient


def reduced_part(reduced: TensorProxy, dtype) -> TensorProxy:
    """The gradient of what a rank holds."""
    return LTORCH["to"](reduced, dtype=dtype)


def _reduced(gradient: TensorProxy, placement: Placement, dtype) -> TensorProxy:
    g = prepared_gradient(gradient, placement)
    if placement.shards is not None:
        g = wait(reduce_scatter(g, "avg", placement.shards, True))
    for group in placement.replicas:
        g = wait(all_reduce(g, "avg", group, True))
    return reduced_part(g, dtype)


synchronize = Symbol("synchronize", _typed_whole, module="ltorch", decomposition=_gathered)
derivatives.regathers.set(lambda operation: operation.args[1].again, synchronize)
synchronize_gradient = Symbol("synchronize_gradient", _typed_held, module="ltorch", decomposition=_reduced)


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
    if placement.shards is not None:
        left.gradient = (
            gradient.to(placement.reduce_dtype or gradient.dtype, copy=True)
            if left.gradient is None
            else left.gradient.add_(gradient)
        )


@synchronize.vjp
def _(held, placement, synchronized):
    g = yield synchronize(held, placement, synchronized)
    if synchronized:
        return (synchronize_gradient(g, placement, held.dtype),)
    leave_for_later(g, placement)
    return (g if placement.shards is None else None,)


def synchronize_parameters(computation: Trace, placements: dict[Proxy, Placement]) -> Trace:
    """The program on what the rank holds: each parameter is made whole right before its first use."""
    args = {a: held_proxy(computation, a, placements[a]) for a in computation.args if a in placements}
    context = next(
        (operation.context for operation in computation.bound_symbols if operation.context is not None), None
    ) or Context(computation.names)
    context = context.replace(grad_enabled=True, autocast=None, checkpoint=())
    waiting = dict(args)

    def whole(values) -> list[BoundSymbol]:
        return [
            operation
            for v in dict.fromkeys(values)
            if v in waiting
            for operation in _whole(v, waiting.pop(v), placements[v], computation, context)
        ]

    operations = []
    for operation in computation.bound_symbols:
        if not waiting.keys().isdisjoint(operation.inputs):
            operations += whole(operation.inputs)
        operations.append(operation)
    operations += whole(computation.output_proxies)
    paths = computation.info.parameters
    info = computation.info.replace(
        communicates=True,
        parameters={**paths, **{held.name: paths[a.name] for a, held in args.items() if a.name in paths}},
    )
    return computation.replace(
        args=[args.get(a, a) if isinstance(a, Proxy) else a for a in computation.args],
        bound_symbols=operations,
        info=info,
    )


def _whole(
    seen: TensorProxy, held: TensorProxy, placement: Placement, computation: Trace, context: Context
) -> list[BoundSymbol]:
    """The operations that make a parameter of what the rank holds."""
    part, synchronized = placement.slice, synchronizes(placement)
    if part is None:
        return [synchronize.bind(held, placement, synchronized, output=seen, context=context)]
    own = seen.replace(name=computation.names.claim(f"{seen.name}_part"), shape=placement.shape)
    return [
        synchronize.bind(held, placement, synchronized, output=own, context=context),
        join_ranks.bind(own, part.group, part.dim, output=seen, context=context),
    ]


def held_proxy(computation: Trace, whole: TensorProxy, placement: Placement) -> TensorProxy:
    name = computation.names.claim(f"{whole.name}_{'local' if placement.shards is None else 'shard'}")
    return whole.replace(name=name, shape=placement.held_shape, dtype=from_tensor_dtype(placement.held_dtype))
