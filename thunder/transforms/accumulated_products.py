"""Accumulate Products: products that a backward only adds up are added up where the first one lies.

Before: `t3 = mm(g0, x0)`, `t4 = mm(g1, x1)`, `t5 = add(t3, t4)`. After: `t3 = mm(g0, x0)`, `t5 = addmm(t3, g1, x1)`,
which `reuse_memory` runs in place.

A layer that a loop calls has one such gradient for each call. A fused kernel would add up several of them at a time,
and have as many in memory. Where a fused kernel reads the sum, it may as well add up its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thunder.analysis.flow import positions, producers, uses
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import ltorch
from thunder.transforms.phases import phase_of

__all__ = ["accumulated_products"]


def accumulated_products(trace: Trace, fuses: Callable[[BoundSymbol], bool]) -> Trace:
    """The trace whose backwards add products to sums that nothing else reads. fuses: whether a fusion executor takes an
    operation."""
    additions = {b.output: b for b in trace.bound_symbols if b.sym is ltorch.add and phase_of(b) > 0}
    if not additions:
        return trace
    producer, added = producers(trace), set(additions.values())
    sums, goes_on = _sums_of_products(trace, additions, producer)
    read_by_kernels = {i for b in trace.bound_symbols if b not in added and fuses(b) for i in b.inputs}
    of_sums = {i for b in added for i in b.inputs}
    for total in reversed(list(sums)):  # what a kernel reads, it adds up
        if total in read_by_kernels or total in of_sums and goes_on.get(total) not in sums:
            del sums[total]
    if not sums:
        return trace
    gone = set(sums.values())

    def rule(b: BoundSymbol, out: Rewriter) -> None:
        last = sums.get(b.output) if b.sym is ltorch.add else None
        if last is not None:
            first = next(x for x in b.args if producer[x] is not last)
            out.trace(lambda *_: ltorch.addmm(first, *last.args), b)
        elif b not in gone:
            out.write(b)

    return rewrite(trace, rule, optional=True)


def _sums_of_products(
    trace: Trace, additions: dict[Proxy, BoundSymbol], producer: Mapping[Proxy, BoundSymbol]
) -> tuple[dict[Proxy, BoundSymbol], dict[Proxy, Proxy]]:
    """By sum of products alone, the product that is added last; by sum or first product, what it is a term of."""
    used, place = uses(trace.bound_symbols, trace.output_proxies), positions(trace.bound_symbols)
    sums: dict[Proxy, BoundSymbol] = {}
    goes_on: dict[Proxy, Proxy] = {}
    for total, b in additions.items():
        terms = [x for x in b.args if isinstance(x, TensorProxy) and x in producer and used[x] == 1]
        if len(terms) < 2 or b.kwargs or any((x.dtype, x.shape) != (total.dtype, total.shape) for x in terms):
            continue
        first, last = sorted(terms, key=place.__getitem__)
        if producer[last].sym is ltorch.mm and (first in sums or producer[first].sym is ltorch.mm):
            sums[total], goes_on[first] = producer[last], total
    return sums, goes_on
