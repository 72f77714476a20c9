"""What a saved tensor was stacked from is read out of it, not saved beside it.

Before: `return (y, (t2, t0, t1))`, with `t2 = ltorch.stack([t0, t1], 0)` among the operations. After: `return (y,
(t2,))`, and the backward begins with `t0 = ltorch.select(t2, 0, 0)`, `t1 = ltorch.select(t2, 0, 1)`. A scan that stacks
its states and reads them again saves them once. Only stacks: the parts of a concatenation, few and large, would be read
with gaps, which kernels of images copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.analysis.aliases import may_view
from thunder.analysis.flow import producers
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.ops import LTORCH

__all__ = ["unstack_saved"]


def unstack_saved(
    operations: Sequence[BoundSymbol], saved: list[TensorProxy], arguments: set[Proxy]
) -> tuple[list[TensorProxy], list[BoundSymbol]]:
    """Which tensors have to be saved instead of all of these, and the operations that make the others of them.
    Arguments live anyway, and so does what views them."""
    joins = [b for b in operations if b.sym is LTORCH["stack"]]
    if not joins:
        return saved, []
    views = {o: b for o, b in producers(operations).items() if may_view(b) and len(b.inputs) == 1}
    left: dict[Proxy, dict] = {}  # what is saved, by whose memory it may be
    for o in saved:
        left.setdefault(_base(o, views), {})[o] = None
    again: list[BoundSymbol] = []
    for join in reversed(joins):
        whole = join.outputs[0]
        users = left.get(whole)
        if not users:
            continue
        # a part is worth reading where its memory is kept for nothing else
        parts = [
            (part, operation)
            for part, operation in _parts(join)
            if _alone(part, left.get(base := _base(part, views))) and base not in arguments
        ]
        if not parts:
            continue
        for user in users:
            again += [operation for operation in _way(user, whole, views) if operation not in again]
        left[whole] = {whole: None}
        for part, operation in parts:
            if left.pop(_base(part, views), None) is not None:
                again.append(operation)
    return [o for kept in left.values() for o in kept], again


def _base(o: Proxy, views: dict[Proxy, BoundSymbol]) -> Proxy:
    """For what may be a view: whose memory it may be."""
    while o in views:
        o = views[o].inputs[0]
    return o


def _alone(o: Proxy, kept: dict[Proxy, None] | None) -> bool:
    """Whether `o` is all that is kept. Proxies are told apart by identity: == of two is an operation of the program."""
    return kept is not None and len(kept) == 1 and next(iter(kept)) is o


def _way(o: Proxy, base: Proxy, views: dict[Proxy, BoundSymbol]) -> list[BoundSymbol]:
    """The views that lead from `base` to `o`."""
    way = []
    while o is not base:
        way.append(views[o])
        o = views[o].inputs[0]
    return way[::-1]


def _parts(join: BoundSymbol):
    """(part, operation that reads it out of the stack) for the parts that are in it as they are."""
    tensors, dim = join.args[0], join.args[1] if len(join.args) > 1 else 0
    out = join.outputs[0]
    for i, part in enumerate(tensors):
        if part.dtype is out.dtype:
            yield part, LTORCH["select"].bind(out, dim, i, output=part, context=join.context)
