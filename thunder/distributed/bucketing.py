"""Buckets: parameters are gathered, and gradients reduced, several at once.

Before: `t_w = redistribute(t_w_shard, dp, S0, R, placement_w)`, ..., `t_b = redistribute(t_b_shard, dp, S0, R,
placement_b)`, both placements in one bucket. After:  `(t0, t1) = all_gather_together([t_w_shard, t_b_shard], group)`,
`t_w = wait(t0)`, `t_b = wait(t1)`, at the place of the first.

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
from thunder.distributed.layouts import P
from thunder.distributed.placement import Placement
from thunder.distributed.redistribute import redistribute, steps_of, with_padding, without_padding
from thunder.ops import ltorch
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
    keys = {operation: key for operation in trace.bound_symbols if (key := _key(operation)) is not None}
    for operation, key in keys.items():
        if _is_gradient(operation):
            left[key] = left.get(key, 0) + 1
            continue
        piece = open_pieces.setdefault(key, [])
        if _too_large([one.output for one in piece], operation.output, operation):
            piece = open_pieces[key] = []
        piece.append(operation)
        gathers[operation] = piece
    if not keys:
        return trace
    own = _own(trace)
    operations: list[BoundSymbol] = []
    held: dict[tuple, list[BoundSymbol]] = {}  # reductions that are not written yet
    key_of: dict[Proxy, tuple] = {}  # what they make
    for operation in trace.bound_symbols:
        for i in operation.inputs:
            if i in key_of and key_of[i] in held:
                operations += _reduced(held.pop(key_of[i]), own)
        key = keys.get(operation)
        if key is None:
            operations.append(operation)
        elif not _is_gradient(operation):
            if operation is gathers[operation][0]:
                operations += _gathered(gathers[operation])
        else:
            waiting = [one.inputs[0] for one in held.get(key, ())]
            if _steps(operation)[0][2].kind == "S" and _too_large(waiting, operation.inputs[0], operation):
                operations += _reduced(held.pop(key), own)
            held.setdefault(key, []).append(operation)
            key_of[operation.output] = key
            left[key] -= 1
            limit = operation.args[4].bucket_bytes
            if not left[key] or limit and sum(nbytes(one.inputs[0]) for one in held[key]) >= limit:
                operations += _reduced(held.pop(key), own)
    return trace.replace(bound_symbols=operations)


def _steps(operation: BoundSymbol) -> list:
    return steps_of(*operation.args[1:4])


def _is_gradient(operation: BoundSymbol) -> bool:
    return _steps(operation)[0][1] == P


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
    """What operations that are communicated together have in common; None for one alone."""
    if operation.sym is not redistribute or len(operation.args) < 5:
        return None
    of: Placement = operation.args[4]
    along = tuple((axis, src.kind, dst.kind) for axis, src, dst in _steps(operation))
    if any("S" in (src.kind, dst.kind) and src.dim + dst.dim for _, src, dst in _steps(operation)):
        return None  # parts along other dimensions than the first are copied
    if not _is_gradient(operation):
        is_backward = operation.context is not None and operation.context.backward
        is_gathered = sum(src == "S" for _, src, _ in along) == 1
        return (along, of.bucket, of.dtype, is_backward) if of.bucket is not None and is_gathered else None
    return (along, of.bucket, of.reduce_dtype or of.dtype) if of.bucket is not None or of.bucket_bytes else None


def _too_large(piece: list[TensorProxy], one: TensorProxy, operation: BoundSymbol) -> bool:
    ranks = next(axis.size for axis, src, dst in _steps(operation) if "S" in (src.kind, dst.kind))
    return bool(piece) and sum(map(nbytes, piece)) + nbytes(one) > PIECE * max(8, ranks)


def _gathered(operations: list[BoundSymbol]) -> list[BoundSymbol]:
    (axis,) = (axis for axis, src, _ in _steps(operations[0]) if src.kind == "S")

    def compute():
        shards = [ltorch.to(one.args[0], dtype=one.output.dtype) for one in operations]
        futures = all_gather_together(shards, axis.group)
        return [without_padding(wait(f), 0, one.output.shape[0]) for f, one in zip(futures, operations, strict=True)]

    return _written(operations, compute)


def _reduced(operations: list[BoundSymbol], own: set[Proxy]) -> list[BoundSymbol]:
    """Operations that reduce the gradients of one bucket together. own: gradients whose memory may be overwritten."""
    of: Placement = operations[0].args[4]

    def compute():
        gradients = [operation.args[0] for operation in operations]
        values = gradients if of.reduce_dtype is None else [ltorch.to(g, dtype=of.reduce_dtype) for g in gradients]
        for axis, _, dst in _steps(operations[0]):
            if dst.kind == "S":
                padded = [with_padding(g, axis, dst) for g in values]
                values = [wait(f) for f in reduce_scatter_together(padded, axis.reduction, axis.group)]
            else:
                free = tuple(g is not before or g in own for g, before in zip(values, gradients, strict=True))
                values = [wait(f) for f in all_reduce_together(values, axis.reduction, free, axis.group)]
        return [ltorch.to(g, dtype=one.output.dtype) for g, one in zip(values, operations, strict=True)]

    return _written(operations, compute)


def _written(operations: list[BoundSymbol], compute: Callable[[], list]) -> list[BoundSymbol]:
    """The operations that `compute` records, which make what `operations` made."""
    with recording(Recorder(operations[0].context)) as recorder:
        result = compute()
    written, aliases = adopt(recorder.bound_symbols, result, [operation.output for operation in operations])
    assert not aliases, "a bucket computes each of its values"
    return written
