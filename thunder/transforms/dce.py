"""Dead code elimination."""

from __future__ import annotations

from thunder.core.symbol import OpTags
from thunder.core.trace import Trace

__all__ = ["dce"]


def dce(trace: Trace) -> Trace:
    """Drops lines whose results nobody reads and that have no effect.

    Before: `t0 = sin(x)`, `t1 = cos(x)`, `return t1`. After: `t1 = cos(x)`, `return t1`.
    """
    needed = set(trace.output_proxies)
    kept = []
    for line in reversed(trace.bound_symbols):
        if OpTags.DONT_DCE in line.sym.tags or not needed.isdisjoint(line.outputs):
            needed.update(line.inputs)
            kept.append(line)
    return trace.replace(bound_symbols=kept[::-1])
