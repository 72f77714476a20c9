"""Dead code elimination."""

from __future__ import annotations

from thunder.core.symbol import OpTags
from thunder.core.trace import Trace
from thunder.core.unbacked import size_symbol

__all__ = ["dce"]


def dce(trace: Trace, sizes: bool = False) -> Trace:
    """Drops lines whose results nobody reads and that have no effect. sizes: those that data decides are kept with their tensors, for a derivative may read them.

    Before: `t0 = sin(x)`, `t1 = cos(x)`, `return t1`. After: `t1 = cos(x)`, `return t1`.
    """
    needed = set(trace.output_proxies)
    kept = []
    for line in reversed(trace.bound_symbols):
        if OpTags.DONT_DCE in line.sym.tags or not needed.isdisjoint(line.outputs) or sizes and line.sym is size_symbol and line.inputs[0] in needed:
            needed.update(line.inputs)
            kept.append(line)
    return trace.replace(bound_symbols=kept[::-1])
