"""Accumulate Products: products that a backward only adds up are added up where the first one lies.

Before: `t3 = mm(g0, x0)`, `t4 = mm(g1, x1)`, `t5 = add(t3, t4)`. After: `t3 = mm(g0, x0)`, `t5 = addmm(t3, g1, x1)`,
which `reuse_memory` runs in place.

A layer that a loop calls has one such gradient for each call. A fused kernel would add up several of them at a time,
and have as many in memory. Where a fused kernel reads the sum, it may as well add up its terms.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.analysis.flow import producers, uses
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import LTORCH
from thunder.transforms.phases import phase_of

__all__ = ["accumulated_products"]


def accumulated_products(trace: Trace, fuses: Callable[[BoundSymbol], bool]) -> Trace:
    """The trace whose backwards add products to sums that nothing else reads. fuses: whether a fusion executor takes an
    operation."""
    additions = {b.output: b for b in trace.bound_symbols if b.sym is LTORCH["add"] and phase_of(b) > 0}
    if not additions:
        return trace
    producer, used = producers(trace), uses(trace.bound_symbols, trace.output_proxies)
    read_by_kernels = {i for b in trace.bound_symbols if b.output not in additions and fuses(b) for i in b.inputs}
    of_sums = {i for b in additions.values() for i in b.inputs}

    def product(value: Proxy, like: TensorProxy) -> BoundSymbol | None:
        """The product that computes a term."""
        b = producer.get(value)
        same = isinstance(value, TensorProxy) and (value.dtype, value.shape) == (like.dtype, like.shape)
        return b if same and b is not None and b.sym is LTORCH["mm"] and used[value] == 1 else None

    sums: dict[Proxy, BoundSymbol] = {}  # by sum of products alone, the product that is added last
    for value, b in additions.items():
        terms = [x for x in b.args[:2] if isinstance(x, TensorProxy)]
        if len(terms) < 2 or len(b.args) > 2 or b.kwargs.get("alpha", 1) != 1:
            continue
        last = product(terms[1], value)
        if last is not None and (product(terms[0], value) is not None or terms[0] in sums and used[terms[0]] == 1):
            sums[value] = last
    goes_on = {b.args[0]: total for total, b in additions.items() if isinstance(b.args[0], Proxy)}
    for value in reversed(list(sums)):  # what a kernel reads, it adds up
        if value in read_by_kernels or value in of_sums and goes_on.get(value) not in sums:
            del sums[value]
    if not sums:
        return trace
    gone = set(sums.values())

    def rule(b: BoundSymbol, out: Rewriter) -> None:
        last = sums.get(b.output) if b.sym is LTORCH["add"] else None
        if last is not None:
            out.trace(lambda total, *_, **__: LTORCH["addmm"](total, *last.args), b)
        elif b not in gone:
            out.write(b)

    return rewrite(trace, rule)
