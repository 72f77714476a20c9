"""Dead code elimination."""

from __future__ import annotations

from thunder.core.regions import leading_to
from thunder.core.symbol import OpTags
from thunder.core.trace import Trace

__all__ = ["dce"]


def dce(trace: Trace) -> Trace:
    """Drops operations whose results are not used and that have no effect.

    Before: `t0 = sin(x)`, `t1 = cos(x)`, `return t1`. After: `t1 = cos(x)`, `return t1`.
    """
    return trace.replace(
        bound_symbols=leading_to(
            trace.bound_symbols, trace.output_proxies, lambda operation: OpTags.DONT_DCE in operation.sym.tags
        )
    )
