"""Common subexpression elimination."""

from __future__ import annotations

from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace

__all__ = ["cse"]

_NEVER = {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE}


def cse(trace: Trace) -> Trace:
    """Computes equal expressions once. Meant for regions that a fusion executor takes: what PyTorch runs op by op is
    left as the user wrote it.

    Before: `t0 = sin(x)`, `t1 = sin(x)`, `t2 = add(t0, t1)`. After: `t0 = sin(x)`, `t2 = add(t0, t0)`.
    """
    seen: dict = {}

    def once(operation: BoundSymbol, out: Rewriter) -> None:
        first = seen.setdefault(operation.rhs, operation) if _NEVER.isdisjoint(operation.sym.tags) else operation
        if first is operation:
            out.write(operation)
        else:
            out.alias(dict(zip(operation.outputs, first.outputs, strict=True)))

    return rewrite(trace, once)
