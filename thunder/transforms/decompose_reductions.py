"""Decompose Reductions: decompose fusible operations that contain reductions, such as softmax, where a backward reads
their results.

Before: `t0 = ltorch.softmax(x, -1)`, and a backward that reads t0. After: `t1 = ltorch.amax(x, -1, True)`, `t2 =
ltorch.sub(x, t1)`, `t3 = ltorch.exp(t2)`, `t4 = ltorch.sum(t3, -1, True)`, `t0 = ltorch.true_divide(t3, t4)`. Now the
save plan can save two numbers for each row, and the kernel that reads t0 recomputes it in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.rewrite import decomposed
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.transforms.phases import phases


def decompose_reductions(trace: Trace, fusers: Sequence) -> Trace:
    """The trace with the decompositions of operations that contain reductions, that one of `fusers` takes, and whose
    results a later backward reads."""
    chosen = set[BoundSymbol]()
    for number in range(1, trace.info.backwards + 1):
        forward, _, backward, _, _ = phases(trace, number)
        read = {i for operation in backward for i in operation.inputs}
        chosen |= {
            operation
            for operation in forward
            if not read.isdisjoint(operation.outputs)
            and _reduces_inside(operation)
            and any(f.takes(operation) for f in fusers)
        }
    return decomposed(trace, chosen)


def _reduces_inside(operation: BoundSymbol) -> bool:
    if (
        operation.sym.decomposition is None
        or operation.sym.tags & {OpTags.REDUCTION_OP, OpTags.MATMUL_OP}
        or operation.sym.elementwise
    ):
        return False
    return any(OpTags.REDUCTION_OP in sub.sym.tags for sub in operation.subsymbols)
