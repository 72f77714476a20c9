"""Exact Derivatives: under `numerics="eager"` PyTorch differentiates operations whose rule rounds otherwise than its
own derivative.

Before: `t0 = ltorch.linalg_svd(a)`, which has a rule. After: the same operation without a rule, so that PyTorch's graph
of it is saved and run.
"""

from __future__ import annotations

from functools import lru_cache

from thunder.core.symbol import Symbol
from thunder.core.trace import Trace
from thunder.ops.rules import derivatives


def exact_derivatives(trace: Trace) -> Trace:
    """The trace without the derivative rules that are not exact (`derivatives.inexact`)."""
    return trace.replace(
        bound_symbols=[
            operation.replace(sym=_without_rule(operation.sym)) if derivatives.inexact.of(operation.sym) else operation
            for operation in trace.bound_symbols
        ]
    )


@lru_cache(maxsize=64)
def _without_rule(symbol: Symbol) -> Symbol:
    """The operation without its derivative rule, so that its decomposition is differentiated."""
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
    for table in (derivatives.composed, derivatives.functional, derivatives.formula):
        table.set(table.default, made)
    return made
