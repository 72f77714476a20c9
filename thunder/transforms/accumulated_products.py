"""Accumulate Products: products that a backward only adds up are added up where the first one lies.

Before: `t3 = mm(g0, x0)`, `t4 = mm(g1, x1)`, `t5 = add(t3, t4)`. After: `t3 = mm(g0, x0)`, `t5 = addmm(t3, g1, x1)`,
which `reuse_memory` runs in place.

A layer that a loop calls has one such gradient for each call. A fused kernel would add up several of them at a time,
and have as many in memory. Where a fused kernel reads the sum, it may as well add up its terms.
"""

from __future__ import annotations

from typing import Any

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend.patterns import Flow
from thunder.extend.rules import CUT, Match, Rule
from thunder.ops import ltorch
from thunder.transforms.phases import phase_of


def _sum(total, a, b):
    return ltorch.add(total, ltorch.mm(a, b))


def _stays_a_sum(total, a, b, *, match: Match) -> bool:
    flow, addition = match.flow, match.operation
    terms = _terms(addition, flow)
    return terms is not None and terms[0] is total and _is_added_up(addition, flow)


def _terms(b: BoundSymbol | None, flow: Flow) -> tuple[Proxy, Proxy] | None:
    """The terms of a sum of products in a backward, that of the product computed last behind the other; None of another
    operation."""
    known = flow.answers.setdefault(_terms, {})
    if b in known or b is None:
        return known.get(b)
    chain: list[tuple[BoundSymbol, tuple[Proxy, Proxy] | None]] = []
    while b is not None and b not in known and b.sym is not ltorch.mm:
        terms = _two_terms(b, flow)
        chain.append((b, terms))
        b = None if terms is None else flow.producer(terms[0])
    is_sum = b is not None and (b.sym is ltorch.mm or known[b] is not None)
    for b, terms in reversed(chain):
        is_sum = is_sum and terms is not None
        known[b] = terms if is_sum else None
    return known.get(chain[0][0]) if chain else None


def _two_terms(b: BoundSymbol, flow: Flow) -> tuple[Proxy, Proxy] | None:
    if b.sym is not ltorch.add or phase_of(b) == 0 or b.kwargs:
        return None
    terms: list[Any] = [x for x in b.args if isinstance(x, TensorProxy) and flow.producer(x) and flow.uses(x) == 1]
    if len(terms) < 2 or any((x.dtype, x.shape) != (b.output.dtype, b.output.shape) for x in terms):
        return None
    first, last = sorted(terms, key=flow.defined_at)
    return (first, last) if flow.producers[last].sym is ltorch.mm else None


def _is_added_up(addition: BoundSymbol, flow: Flow) -> bool:
    """Whether neither a fused kernel reads a sum, nor another addition but one of the same chain for which this
    holds."""
    while True:
        total = addition.output
        consumers = flow.consumers(total)
        additions = [c for c in consumers if c.sym is ltorch.add and phase_of(c) > 0]
        if any(flow.lowering.fuses(c) for c in consumers if c not in additions):
            return False
        if not additions:
            return True
        terms = _terms(additions[0], flow)
        if len(additions) > 1 or terms is None or terms[0] is not total:
            return False
        addition = additions[0]


def _has_backwards(flow: Flow) -> bool:
    return bool(flow.lowering.fusers) and any(phase_of(b) > 0 for b in flow.by_symbol.get(ltorch.add, ()))


ACCUMULATE_PRODUCTS = Rule("Accumulate Products", _sum, ltorch.addmm, _stays_a_sum, CUT, where=_has_backwards)
