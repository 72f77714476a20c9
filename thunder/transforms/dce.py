"""Dead code elimination."""

from __future__ import annotations

from thunder.core.regions import leading_to
from thunder.core.symbol import OpTags
from thunder.core.trace import Trace
from thunder.core.unbacked import size_symbol

__all__ = ["dce"]


def dce(trace: Trace, sizes: bool = False) -> Trace:
    """Drops lines whose results nobody reads and that have no effect. sizes: those that data decides are kept with their tensors, for a derivative may read them.

    Before: `t0 = sin(x)`, `t1 = cos(x)`, `return t1`. After: `t1 = cos(x)`, `return t1`.
    """
    lines = leading_to(trace.bound_symbols, trace.output_proxies, lambda line: OpTags.DONT_DCE in line.sym.tags)
    if sizes and len(lines) < len(trace.bound_symbols):
        kept = set(lines)
        made = {o for line in lines for o in line.outputs}
        lines = [line for line in trace.bound_symbols if line in kept or line.sym is size_symbol and line.inputs[0] in made]
    return trace.replace(bound_symbols=lines)
