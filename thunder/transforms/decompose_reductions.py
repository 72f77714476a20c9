"""Decompose Reductions: decompose fusible operations that contain reductions, such as softmax, where a backward reads
their results.

Before: `t0 = ltorch.softmax(x, -1)`, and a backward that reads t0. After: `t1 = ltorch.amax(x, -1, True)`, `t2 =
ltorch.sub(x, t1)`, `t3 = ltorch.exp(t2)`, `t4 = ltorch.sum(t3, -1, True)`, `t0 = ltorch.true_divide(t3, t4)`. Now the
save plan can save two numbers for each row, and the kernel that reads t0 recomputes it in one pass.
"""

from __future__ import annotations

from thunder.core.symbol import BoundSymbol, OpTags
from thunder.extend.rules import EVERY, JOINT, Match, Rule
from thunder.transforms.phases import phase_of


def _is_saved(*_, match: Match, **__) -> bool:
    """Whether a fusion executor takes an operation that contains a reduction, and a later backward reads its
    results."""
    b, flow = match.operation, match.flow
    phase = phase_of(b)
    return (
        any(phase_of(c) not in (0, phase) for o in b.outputs for c in flow.consumers(o))
        and _reduces_inside(b)
        and flow.lowering.fuses(b)
    )


def _reduces_inside(operation: BoundSymbol) -> bool:
    if (
        operation.sym.decomposition is None
        or operation.sym.tags & {OpTags.REDUCTION_OP, OpTags.MATMUL_OP}
        or operation.sym.elementwise
    ):
        return False
    return any(OpTags.REDUCTION_OP in sub.sym.tags for sub in operation.subsymbols)


def _parts(*args, match: Match, **kwargs):
    return match.operation.sym.decomposition(*args, **kwargs)  # type: ignore[misc]


DECOMPOSE_REDUCTIONS = Rule(
    "Decompose Reductions", EVERY, _parts, _is_saved, JOINT, exact=True,
    where=lambda flow: flow.trace.info.backwards > 0 and bool(flow.lowering.fusers),
)  # fmt: skip
