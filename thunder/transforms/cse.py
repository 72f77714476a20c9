"""Common subexpression elimination."""

from __future__ import annotations

from thunder.core.proxies import map_structure, proxies_in
from thunder.core.symbol import OpTags
from thunder.core.trace import Trace

__all__ = ["cse"]

_NEVER = {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE}


def cse(trace: Trace) -> Trace:
    """Computes equal expressions once. Meant for regions that a fusion executor takes: what PyTorch runs op by op is left as the user wrote it.

    Before: `t0 = sin(x)`, `t1 = sin(x)`, `t2 = add(t0, t1)`. After: `t0 = sin(x)`, `t2 = add(t0, t0)`.
    """
    seen: dict = {}
    table: dict = {}
    kept = []
    for line in trace.bound_symbols:
        line = line.swap(table) if table else line
        if _NEVER.isdisjoint(line.sym.tags):
            first = seen.setdefault(line.rhs, line)
            if first is not line:
                table.update(zip(proxies_in(line.output, []), proxies_in(first.output, []), strict=True))
                continue
        kept.append(line)
    output = map_structure(lambda x: table.get(x, x) if x in table else x, trace.output) if table else trace.output
    return trace.replace(bound_symbols=kept, output=output)
