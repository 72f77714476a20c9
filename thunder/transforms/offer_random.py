"""With `rng="fused"`: random operations that fusion executors may take, and draw numbers of their own for.

Before: `t0 = ltorch.rand_like(a)`, which goes to PyTorch. After: the same line, whose operation carries `OpTags.OFFERED`; a fusion executor that supports it may put it in a
region. Lines that draw from a generator of the user's are not offered, and none is in a program that repeats what it drew (a checkpoint, `memory_budget`) or that seeds, reads
or sets a generator itself: there PyTorch's generator decides what is drawn.
"""

from __future__ import annotations

from functools import lru_cache

from thunder.core.symbol import OpTags, Symbol
from thunder.core.trace import Trace
from thunder.ops import PRIMS, random

__all__ = ["offer_random"]


def offer_random(trace: Trace) -> Trace:
    """Marks the random operations of a program as offered to fusion executors."""
    lines = trace.bound_symbols
    if any(line.sym is PRIMS["get_rng_state"] or line.sym.id in random.holding for line in lines):
        return trace
    return trace.replace(bound_symbols=[line.replace(sym=_offered(line.sym)) if _may_be_offered(line) else line for line in lines])


def _may_be_offered(line) -> bool:
    return OpTags.RANDOM_OP in line.sym.tags and line.sym.executor is None and line.kwargs.get("generator") is None


@lru_cache(maxsize=256)
def _offered(symbol: Symbol) -> Symbol:
    made = Symbol(symbol.name, symbol.meta, id=symbol.id, module=symbol.module, decomposition=symbol.decomposition, is_prim=symbol.is_prim, fn=symbol.fn)
    made.tags = symbol.tags - {OpTags.DONT_DCE} | {OpTags.OFFERED}  # the generator stays behind eager's anyway
    made.info = symbol.info
    return made
