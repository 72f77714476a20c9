"""Sums over rows, and what follows them, as regions of their own: launches of those are shared with others.

Before: `t2 = ltorch.mul(g, x)`, `t3 = ltorch.sum(t2, 0)`, `t4 = ltorch.add(w, t3)`. After: a region of `t2 =
ltorch.mul(g, x)`, `t5 = ltorch.sum(t2, 0)`, `t6 = prims.partial_sums(t5, (264, 768), float32)`, which stores the
partial sums that its kernel has anyway, and one of `t3 = prims.sum_of_partials(t6, (768,), float32)`, `t4 =
ltorch.add(w, t3)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from thunder.analysis.flow import producers
from thunder.core.dtypes import float32
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol, Names
from thunder.executors.triton_kernels.values import Value
from thunder.ops import prims

Sums = Mapping[Proxy, Value]


def without_last_sums(
    region: Region,
    names: Names,
    reduces: Callable[[BoundSymbol], bool],
    is_map: Callable[[BoundSymbol], bool],
    partial_sums: Callable[[Region], Mapping[int, Value]],
) -> list[Region]:
    """A region that leaves partial sums, and those that add them up; none where nothing is added up last. names: of
    partial sums. partial_sums: the outputs of a region, by place, that a kernel of its own adds up, and of what."""
    operations = region.bound_symbols
    made_by = producers(operations).items()
    after = {o: _after(o, operations) for o, b in made_by if reduces(b) and _is_small(o, b)}
    after = {
        o: found
        for o, found in after.items()
        if all(is_map(b) and all(x.numel_value == o.numel_value for x in b.outputs) for b in found)
    }
    while after:
        head = _head(region, after)
        sums = {head.outputs[place]: partial for place, partial in partial_sums(head).items()}
        if sums.keys() >= after.keys():
            groups = _groups(after, sums)
            if len({b for found in after.values() for b in found}) == sum(len({*b}) for _, b in groups):
                return _cut(region, head, names, sums, groups)
            return []
        after = {o: found for o, found in after.items() if o in sums}
    return []


def _is_small(out: Proxy, operation: BoundSymbol) -> bool:
    read = [i.numel_value for i in operation.inputs if isinstance(i, TensorProxy)]
    return isinstance(out, TensorProxy) and 2 * out.numel_value <= max(read, default=0)


def _after(value: Proxy, operations: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The operations that depend on a value."""
    found, made = [], {value}
    for operation in operations:
        if not made.isdisjoint(operation.inputs):
            found.append(operation)
            made.update(operation.outputs)
    return found


def _head(region: Region, after: Mapping[Proxy, Sequence[BoundSymbol]]) -> Region:
    last = {b for found in after.values() for b in found}
    needed = {*region.outputs, *after, *(i for b in last for i in b.inputs)}
    return Region([b for b in region.bound_symbols if b not in last], needed, region.padded)


def _groups(
    after: Mapping[Proxy, Sequence[BoundSymbol]], sums: Sums
) -> list[tuple[list[Proxy], dict[BoundSymbol, None]]]:
    """The sums that one kernel adds up, and what follows them."""
    groups: dict[tuple, tuple[list[Proxy], dict[BoundSymbol, None]]] = {}
    for o, found in after.items():
        members, last = groups.setdefault((o.shape, sums[o].shape), ([], {}))  # type: ignore[attr-defined]
        members.append(o)
        last.update(dict.fromkeys(found))
    return list(groups.values())


def _cut(
    region: Region,
    head: Region,
    names: Names,
    sums: Sums,
    groups: Sequence[tuple[list[Proxy], dict[BoundSymbol, None]]],
) -> list[Region]:
    context = region.bound_symbols[0].context
    renamed: dict[Proxy, Proxy] = {}
    terms, made = [], []
    for members, last in groups:
        totals = []
        for o in members:
            assert isinstance(o, TensorProxy), "a sum is a tensor"
            renamed[o] = o.replace(name=names.make())
            wide = o.dtype if o.dtype.bytes == 8 else float32
            p = TensorProxy(names.make(), shape=sums[o].shape, device=o.device, dtype=wide)
            terms.append(prims.partial_sums.bind(renamed[o], p.shape, wide, output=p, context=context))
            totals.append(prims.sum_of_partials.bind(p, o.shape, o.dtype, output=o, context=context))
        ordered = [b for b in region.bound_symbols if b in last]
        made.append(Region([*totals, *ordered], {*region.outputs}, region.padded))
    first = [*(b.swap(renamed) for b in head.bound_symbols), *terms]
    left = {*head.outputs, *(b.output for b in terms)}.difference(renamed)
    return [Region(first, left, region.padded), *made]
