"""Buckets: parameters are gathered, and gradients reduced, several at once.

Before: `t_w = synchronize(t_w_shard, placement_w, True)`, ..., `t_b = synchronize(t_b_shard, placement_b, True)`, both
placements in one bucket. After:  `(t0, t1) = all_gather_together([t_w_shard, t_b_shard], group)`, `t_w = wait(t0)`,
`t_b = wait(t1)`, at the place of the first.

Gradients are reduced where the last of a bucket is there. Those of replicas fill buckets up to a size, in the order in
which the backward makes them. A large bucket of shards is communicated in pieces: what a block computes first does not
wait for all of it, and of the last gradients little is left to reduce when the backward ends. The backend starts the
collectives of a piece as one; nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.analysis.cost import nbytes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.distributed.placement import Placement
from thunder.distributed.synchronize import (
    prepared_gradient,
    prepared_shard,
    reduced_part,
    synchronize,
    synchronize_gradient,
    whole_of,
)
from thunder.ops.backward import embedding_backward, times_cotangent
from thunder.ops.families.collectives import all_gather_together, all_reduce_together, reduce_scatter_together, wait

# bytes of one rank, of at least 8 ranks: links are as fast as they get with these, and a piece takes a fraction of a
# millisecond on NVLink
PIECE = 16 * 2**20


def bucket(trace: Trace) -> Trace:
    """Parameters and gradients of one bucket are communicated together."""
    open_pieces: dict[tuple, list[BoundSymbol]] = {}
    gathers: dict[BoundSymbol, list[BoundSymbol]] = {}  # by any of them, the parameters that are gathered with it
    left: dict[tuple, int] = {}  # gradients to come
    for operation in trace.bound_symbols:
        if operation.sym is synchronize and (key := _key(operation)) is not None:
            piece = open_pieces.setdefault(key, [])
            if _too_large([one.output for one in piece], operation.output, operation.args[1]):
                piece = open_pieces[key] = []
            piece.append(operation)
            gathers[operation] = piece
        elif operation.sym is synchronize_gradient and (key := _key(operation)) is not None:
            left[key] = left.get(key, 0) + 1
    if not gathers and not left:
        return trace
    own = _own(trace)
    operations: list[BoundSymbol] = []
    held: dict[tuple, list[BoundSymbol]] = {}  # reductions that are not written yet
    made: dict[Proxy, tuple] = {}  # what they make
    for operation in trace.bound_symbols:
        for i in operation.inputs:
            if i in made and made[i] in held:
                operations += _reduced(held.pop(made[i]), own)
        key = _key(operation) if operation.sym in (synchronize, synchronize_gradient) else None
        if key is None:
            operations.append(operation)
        elif operation.sym is synchronize:
            if operation is gathers[operation][0]:
                operations += _gathered(gathers[operation])
        else:
            placement: Placement = operation.args[1]
            if placement.shards is not None and _too_large(
                [one.inputs[0] for one in held.get(key, ())], operation.inputs[0], placement
            ):
                operations += _reduced(held.pop(key), own)
            held.setdefault(key, []).append(operation)
            made[operation.output] = key
            left[key] -= 1
            limit = placement.bucket_bytes
            if not left[key] or limit and sum(nbytes(one.inputs[0]) for one in held[key]) >= limit:
                operations += _reduced(held.pop(key), own)
    return trace.replace(bound_symbols=operations)


def _own(trace: Trace) -> set[Proxy]:
    """Values that a reduction may overwrite: gradients of large weights that only one operation reads. What a fusion
    executor computes may be one with another value."""
    own: set[Proxy] = set()
    read: set[Proxy] = set()
    for operation in trace.bound_symbols:
        twice = read.intersection(operation.inputs)
        own -= twice
        read.update(operation.inputs)
        if OpTags.MATMUL_OP in operation.sym.tags or operation.sym in (embedding_backward, times_cotangent):
            own.update(operation.outputs)
    return own.difference(trace.output_proxies)


def _key(operation: BoundSymbol) -> tuple | None:
    """What operations that are communicated together have in common; None for a operation alone."""
    placement: Placement = operation.args[1]
    if operation.sym is synchronize:
        if placement.bucket is None or placement.shards is None:
            return None
        return (
            placement.shards,
            placement.bucket,
            placement.dtype,
            operation.context is not None and operation.context.backward,
        )
    if placement.bucket is None and not placement.bucket_bytes:
        return None
    return placement.shards, placement.replicas, placement.bucket, placement.reduce_dtype or placement.dtype


def _too_large(piece: list[TensorProxy], one: TensorProxy, placement: Placement) -> bool:
    return bool(piece) and sum(map(nbytes, piece)) + nbytes(one) > PIECE * max(8, placement.shards.size())


def _gathered(operations: list[BoundSymbol]) -> list[BoundSymbol]:
    def compute():
        futures = all_gather_together(
            [prepared_shard(operation.args[0], operation.args[1]) for operation in operations],
            operations[0].args[1].shards,
        )
        return [whole_of(wait(f), operation.args[1]) for f, operation in zip(futures, operations, strict=True)]

    return _written(operations, compute)


def _reduced(operations: list[BoundSymbol], own: set[Proxy]) -> list[BoundSymbol]:
    placement: Placement = operations[0].args[1]

    def compute():
        given = [operation.args[0] for operation in operations]
        found = [prepared_gradient(g, operation.args[1]) for g, operation in zip(given, operations, strict=True)]
        if placement.shards is not None:
            found = [wait(f) for f in reduce_scatter_together(found, "avg", placement.shards)]
        for group in placement.replicas:
            free = tuple(g is not before or g in own for g, before in zip(found, given, strict=True))
            found = [wait(f) for f in all_reduce_together(found, "avg", free, group)]
        return [reduced_part(g, operation.args[2]) for g, operation in zip(found, operations, strict=True)]

    return _written(operations, compute)


def _written(operations: list[BoundSymbol], compute: Callable[[], list]) -> list[BoundSymbol]:
    """The operations that `compute` records, which make what `operations` made."""
    with recording(Recorder(operations[0].context)) as recorder:
        result = compute()
    made, aliases = adopt(recorder.bound_symbols, result, [operation.output for operation in operations])
    assert not aliases, "a bucket computes each of its values"
    return made
