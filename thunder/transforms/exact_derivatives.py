"""With `numerics="eager"`: operations whose rule rounds otherwise than PyTorch's derivative are differentiated by
PyTorch.

Before: `t0 = ltorch.linalg_svd(a)`, which has a rule. After: the same, of an operation that has none, so that PyTorch's
own graph of it is what is saved and run.
"""

from __future__ import annotations

from functools import lru_cache

from thunder.core.symbol import Symbol
from thunder.core.trace import Trace

__all__ = ["exact_derivatives"]


def exact_derivatives(trace: Trace) -> Trace:
    """Leaves the rules out that are not exact (`Definition.exact_derivative`)."""
    return trace.replace(
        bound_symbols=[
            operation if operation.sym.exact_derivative else operation.replace(sym=_without_rule(operation.sym))
            for operation in trace.bound_symbols
        ]
    )


@lru_cache(maxsize=64)
def _without_rule(symbol: Symbol) -> Symbol:
    made = Symbol(
        symbol.name,
        symbol.meta,
        id=symbol.id,
        module=symbol.module,
        decomposition=symbol.decomposition,
        is_prim=symbol.is_prim,
        tags=tuple(symbol.tags),
        fn=symbol.fn,
    )
    made.take_facts(symbol)
    made.differentiate_decomposition, made.functional_derivative, made.formula = False, None, None
    return made
