"""Rematerialization of cheap values in regions: a region computes them from inputs of its own, so that no other region
writes them to memory.

Before: region 1 is `t0 = cos(x)`, region 2 `t1 = mul(t0, y)`. After: region 2 is `t2 = cos(x)`, `t1 = mul(t2, y)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set

from thunder.core.proxies import Proxy, TensorProxy, element_count
from thunder.core.regions import Region, leading_to
from thunder.core.symbol import BoundSymbol, OpTags


def recompute_cheap(
    regions: Sequence[Region],
    output: Sequence[Proxy],
    takes: Callable[[BoundSymbol], bool],
    cheap: Callable[[BoundSymbol], bool],
) -> list[Region]:
    """Regions that recompute cheap values instead of reading them from other regions.

    regions: in an order in which they can run. takes: whether an operation runs in regions. cheap: whether an operation
    costs nothing beyond its reads. A region recomputes a value where the additional inputs for that have no more bytes
    than the value. It never does across an operation with an effect, which may write to those inputs.
    """
    taken = [all(map(takes, r.bound_symbols)) for r in regions]
    has_effect = [any(OpTags.DONT_DCE in operation.sym.tags for operation in r.bound_symbols) for r in regions]
    effects = list(itertools.accumulate(has_effect))
    home = {
        o: (n, operation) for n, r in enumerate(regions) for operation in r.bound_symbols for o in operation.outputs
    }

    def chains(n: int) -> Iterator[tuple[Proxy, int, tuple]]:
        """The inputs that a region may recompute: (value, region of the value, chain of its operations)."""
        for value in regions[n].inputs:
            at = home[value][0] if value in home else None
            if at is not None and taken[at] and effects[at] == effects[n]:
                if (chain := _chain(value, home, regions[at].bound_symbols, cheap)) is not None:
                    yield value, at, chain

    stored = {*output, *(v for t, r in zip(taken, regions, strict=True) if not t for v in r.inputs)}
    operations_of = [
        _with_copies(region, [*chains(n)], stored) if taken[n] else region.bound_symbols
        for n, region in enumerate(regions)
    ]
    read = {v for operations in operations_of for v in Region(operations, set()).inputs} | set(output)
    result = []
    for n, (region, operations) in enumerate(zip(regions, operations_of, strict=True)):
        needed = {o for o in region.outputs if o in read}
        members = leading_to(operations, needed) if taken[n] else operations
        if members:
            result.append(Region(members, needed))
    return result


def _with_copies(
    region: Region, chains: Sequence[tuple[Proxy, int, tuple]], stored: Set[Proxy]
) -> Sequence[BoundSymbol]:
    """The operations of a region, with copies of the producers of inputs where that takes no more reads. Values that
    are stored anyway are read, unless the copies together take fewer reads."""
    few, all_found = _copied(region, chains, stored), _copied(region, chains, frozenset())
    return min(few, all_found, key=lambda operations: sum(map(_bytes, Region(operations, set()).inputs)))


def _copied(region: Region, chains: Sequence[tuple[Proxy, int, tuple]], stored: Set[Proxy]) -> Sequence[BoundSymbol]:
    """The operations of a region behind copies of those that compute its inputs anew."""
    inputs, copies = set(region.inputs), {}
    fronts: list[tuple[int, list[BoundSymbol]]] = []
    for value, at, (chain, sources) in chains:
        if sum(_bytes(s) for s in sources if s not in inputs) > _bytes(value) - (value in stored):
            continue
        inputs |= sources
        fronts.append((at, [operation for operation in chain if operation.outputs[0] not in copies]))
        copies |= {o: _copy(o, operation) for operation in chain for o in operation.outputs if o not in copies}
    if not copies:
        return region.bound_symbols
    # a copy may read one of an earlier region
    front = [operation for _, chain in sorted(fronts, key=lambda f: f[0]) for operation in chain]
    return [operation.swap(copies) for operation in (*front, *region.bound_symbols)]


def _chain(
    value: Proxy, home: dict, home_operations: Sequence[BoundSymbol], cheap: Callable[[BoundSymbol], bool]
) -> tuple[list[BoundSymbol], set[Proxy]] | None:
    """The operations in the region of a value that it depends on, and the live-ins of these; None where one of them is
    not cheap."""
    region = home[value][0]
    chain: dict[BoundSymbol, None] = {}
    sources: set[Proxy] = set()
    waiting = [value]
    while waiting:
        v = waiting.pop()
        if v not in home or home[v][0] != region:
            sources.add(v)
            continue
        operation = home[v][1]
        if operation not in chain:
            if not cheap(operation):
                return None
            chain[operation] = None
            waiting += _read(operation)
    return [operation for operation in home_operations if operation in chain], sources


def _read(operation: BoundSymbol) -> Sequence[Proxy]:
    """The inputs whose elements an operation reads: `zeros_like` reads none."""
    if not operation.subsymbols:
        return operation.inputs
    read = {i for sub in operation.subsymbols for i in _read(sub)}.union(operation.aliases.values())
    return [i for i in operation.inputs if i in read]


def _bytes(value: Proxy) -> int:
    return element_count(value) * value.dtype.bytes if isinstance(value, TensorProxy) else 0


def _copy(value: Proxy, operation: BoundSymbol) -> Proxy:
    assert isinstance(value, TensorProxy) and operation.context is not None, "cheap operations compute tensors"
    return value.replace(name=operation.context.names.make())
