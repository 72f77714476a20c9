"""Regions: groups of operations that may run as one.

A set of operations is convex when no path leads out of it and back in: everything it reads exists before it starts.
Fusion executors are given convex regions only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from thunder.core.proxies import (
    NumberProxy,
    Proxy,
    TensorProxy,
    UnbackedNumber,
    element_count,
    has_numbers,
    map_structure,
    numbers_in,
)
from thunder.core.symbol import BoundSymbol, OpTags, hashable

__all__ = ["FusedFunction", "Region", "convex_regions", "schedule", "region_key", "leading_to", "recompute_cheap"]


class Region:
    """Operations to run as one, in order, with the values they read from outside and those that are read after them.
    Numbers that they read are in `numbers`.

    padded: values of it whose rows are apart where they are in memory (`TraceInfo.padded`). parts: places of outputs
    that do not depend on the others', of a region that several others joined to.
    """

    __slots__ = ("bound_symbols", "inputs", "outputs", "padded", "parts")

    def __init__(
        self,
        operations: Sequence[BoundSymbol],
        needed_after: set[Proxy],
        padded: Set[Proxy] = frozenset(),
        parts: tuple[tuple[int, ...], ...] = (),
    ):
        self.parts = parts
        self.bound_symbols = tuple(operations)
        made = {o for operation in operations for o in operation.outputs}
        self.inputs: tuple[Proxy, ...] = tuple(
            dict.fromkeys(
                i
                for operation in operations
                for i in operation.inputs
                if i not in made and type(i) is not UnbackedNumber
            )
        )
        self.outputs: tuple[Proxy, ...] = tuple(
            dict.fromkeys(o for operation in operations for o in operation.outputs if o in needed_after)
        )
        self.padded: Set[Proxy] = padded & {*self.inputs, *made} if padded else padded

    @property
    def numbers(self) -> tuple[NumberProxy, ...]:
        """What stays symbolic in it: numbers that have a name and are no expressions of others, each of which is one
        of those that are equal in this program."""
        return tuple({n.name: n for n in self.number_names.values()}.values())

    @property
    def number_names(self) -> dict[str, NumberProxy]:
        """By the name of each number in its expressions, the one of `numbers` that it is."""
        found: dict[str, NumberProxy] = {}
        of: dict[str, NumberProxy] = {}  # by the name that stands for all that are equal
        for operation in self.bound_symbols:
            if has_numbers(operation.args) or has_numbers(operation.output) or has_numbers(operation.kwargs):
                for number in numbers_in((operation.args, operation.kwargs, operation.output), []):
                    for name in sorted(number.expression.symbols() - found.keys()):
                        found[name] = of.setdefault(number.decisions.equal(name), number.symbol(name))
        return found


class FusedFunction:
    """A function that runs a region, and what passes and estimates ask of it.

    kernels: how many it launches. source: their text, as far as it is known. scratch_bytes: that it allocates beside
    its results. over: which results are written over which inputs, or may be, by their places.
    """

    kernels: int = 1
    source: str = ""
    scratch_bytes: int = 0
    over: Mapping[int, int] = MappingProxyType({})

    def layout(self, strides: tuple) -> list[tuple] | None:
        """The strides of the results for inputs of these strides; None where that is not known."""
        return None


def leading_to(
    operations: Sequence[BoundSymbol], results: Iterable, kept: Callable[[BoundSymbol], bool] | None = None
) -> list[BoundSymbol]:
    """The operations that `results` are made by, and those that `kept` says stay, with what these read, in their
    order."""
    needed, found = {r for r in results if isinstance(r, Proxy)}, []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs) or kept is not None and kept(operation):
            needed.update(operation.inputs)
            found.append(operation)
    return found[::-1]


def _consumers(operations: Sequence[BoundSymbol]) -> dict[Proxy, list[int]]:
    found: dict[Proxy, list[int]] = {}
    for i, operation in enumerate(operations):
        for value in dict.fromkeys(operation.inputs):
            found.setdefault(value, []).append(i)
    return found


# unfused operations, from first to last of what is joined: results that wait for a far consumer fill the memory
NEAR = 8
FAR = 64  # groups that are looked back on
MOST = 128  # operations of groups that join: a longer kernel takes too long to compile
SMALL = 1 << 16  # elements, of which a kernel takes less time than its launch


def convex_regions(operations: Sequence[BoundSymbol], takes: Callable[[BoundSymbol], bool]) -> list[list[int]]:
    """Groups the operations that `takes` accepts into convex sets of indices, each as large as joining what is near
    makes it.

    Operations with an effect are never joined and never moved across. Every operation is in exactly one group;
    operations not taken are groups of one. Groups are in an order in which they can run. One pass, nearly linear in the
    edges: each group has a level, more than that of every group it reads from, so that no path leads from one group to
    another of the same level. An operation joins the groups of its producers of the highest level, which become one,
    when all of them are taken. A group that nothing else reads from yet may rise to any higher level, and joins as
    well. In the end, groups that share tensors join, then small ones over one space, which are launched once.
    """
    groups = _Groups()
    group_of: list[int] = []
    unfused = 0
    producer: dict[Proxy, int] = {}
    barrier = 0  # lowest level that an operation after the last effect may have
    for i, operation in enumerate(operations):
        has_effect = OpTags.DONT_DCE in operation.sym.tags
        accepts = takes(operation) and not has_effect
        before = {groups.current(group_of[producer[v]]) for v in operation.inputs if v in producer}
        highest = max((groups.level[g] for g in before), default=0)
        nearest = [g for g in before if groups.level[g] == highest]
        may_join = groups.joinable(before, barrier, unfused) if accepts else set()
        joined = {g for g in may_join if not groups.read[g]}
        if nearest and may_join.issuperset(nearest):
            group = max(nearest, key=lambda g: len(groups.members[g]))
            joined = joined.union(nearest) - {group}
        else:
            group = groups.add(max(highest + 1, barrier), accepts, unfused)
        groups.merge(group, sorted(joined))
        groups.members[group].append(i)
        for other in before.difference(joined, {group}):
            groups.read[other] = True
        if has_effect:
            groups.level[group] = max(groups.level, default=0) + 1
            barrier = groups.level[group] + 1
        unfused += _is_unfused(operation, accepts)
        group_of.append(group)
        producer |= dict.fromkeys(operation.outputs, i)
    ordered = _in_order(operations, [sorted(g) for g in groups.members if g], producer)
    for shared in (_tensors, _small_space):
        taken = [groups.taken[groups.current(group_of[g[0]])] for g in ordered]
        ordered = _join_sharing(operations, ordered, taken, producer, shared)
    return ordered


class _Groups:
    """Groups of operations while they grow, by number.

    members: places of operations; none of a group that was merged into another one. taken: whether a group is a region.
    read: whether another group reads from it. first: how many unfused operations stand before its first one.
    """

    def __init__(self):
        self.members: list[list[int]] = []
        self.level: list[int] = []
        self.taken: list[bool] = []
        self.read: list[bool] = []
        self.first: list[int] = []
        self._into: list[int] = []

    def add(self, level: int, taken: bool, first: int) -> int:
        self._into.append(len(self.members))
        self.members.append([])
        self.level.append(level)
        self.taken.append(taken)
        self.read.append(False)
        self.first.append(first)
        return self._into[-1]

    def current(self, group: int) -> int:
        return _current(self._into, group)

    def joinable(self, groups: set[int], barrier: int, unfused: int) -> set[int]:
        """Those that an operation may join: near ones behind the last effect, if they are not too many operations."""
        near = {g for g in groups if self.taken[g] and self.level[g] >= barrier and unfused - self.first[g] <= NEAR}
        return near if sum(len(self.members[g]) for g in near) < MOST else set()

    def merge(self, group: int, others: Iterable[int]) -> None:
        for other in others:
            self.members[group] += self.members[other]
            self.read[group] |= self.read[other]
            self.first[group] = min(self.first[group], self.first[other])
            self.members[other], self._into[other] = [], group


def _current(into: list[int], group: int) -> int:
    """What a group was merged into in the end; paths to it are shortened."""
    while into[group] != group:
        into[group] = group = into[into[group]]
    return group


def _is_unfused(operation: BoundSymbol, taken: bool) -> bool:
    """Whether an operation counts as distance: numbers that the host reads, and tensors of one, fill no memory."""
    return (
        not taken
        and OpTags.SHAPE_OP not in operation.sym.tags
        and (not operation.outputs or any(isinstance(o, TensorProxy) and o.shape for o in operation.outputs))
    )


def _tensors(operations: Sequence[BoundSymbol]) -> set[Any]:
    """What operations read and make."""
    return {
        v for operation in operations for v in (*operation.inputs, *operation.outputs) if isinstance(v, TensorProxy)
    }


def _small_space(operations: Sequence[BoundSymbol]) -> set[Any]:
    """How many elements all that operations make has, and on which device, if they are few. On a CPU nothing is
    launched."""
    spaces = {
        (element_count(o), o.device)
        for operation in operations
        for o in operation.outputs
        if isinstance(o, TensorProxy)
    }
    return spaces if len(spaces) == 1 and all(n <= SMALL and device.type != "cpu" for n, device in spaces) else set()


def _join_sharing(
    operations: Sequence[BoundSymbol], ordered: Sequence[list[int]], taken: Sequence[bool], producer: dict[Proxy, int],
        shared: Callable[[Sequence[BoundSymbol]], set]
) -> list[list[int]]:  # fmt: skip
    """Joins near groups that have something of what `shared` says in common, where no path leads from one to the other
    through a third.

    ordered: groups in an order in which they can run, as is the result. What stood between two groups that join comes
    after them where it reads from the first, otherwise before.
    """
    group_of = {i: g for g, group in enumerate(ordered) for i in group}
    into = list(range(len(ordered)))
    members = [list(group) for group in ordered]
    # operations that a group reads from, its own among them
    made_by = [[producer[v] for i in group for v in operations[i].inputs if v in producer] for group in ordered]
    unfused = [sum(_is_unfused(operations[i], t) for i in group) for t, group in zip(taken, ordered, strict=True)]
    has_effect = [OpTags.DONT_DCE in operations[group[0]].sym.tags for group in ordered]
    latest: dict[Any, int] = {}  # the last group that has something
    placed: list[int] = []

    def reads(group: int, others: set[int]) -> bool:
        return not others.isdisjoint([_current(into, group_of[i]) for i in made_by[group]])

    def is_near(group: int, other: int, between: Sequence[int]) -> bool:
        return (
            sum(unfused[g] for g in between) <= NEAR
            and not any(has_effect[g] for g in between)
            and len(members[group]) + len(members[other]) <= MOST
        )

    def place_of(group: int) -> int | None:
        return next((n for n in range(len(placed) - 1, max(-1, len(placed) - FAR), -1) if placed[n] == group), None)

    def consumers_of(group: int, among: Sequence[int]) -> set[int]:
        found = {group}
        for g in among:
            if reads(g, found):
                found.add(g)
        return found - {group}

    for group, own in enumerate(ordered):
        after: list[int] = []  # what has to come after the group
        keys = shared([operations[i] for i in own]) if taken[group] else ()
        for other in sorted({_current(into, latest[k]) for k in keys if k in latest}, reverse=True):
            at = place_of(other)
            if at is None or not is_near(group, other, between := placed[at + 1 :]):
                continue
            consumers = consumers_of(other, between)
            if consumers and reads(group, consumers):
                continue
            placed[at:] = [g for g in between if g not in consumers]
            after = [g for g in between if g in consumers] + after
            members[group] += members[other]
            made_by[group] += made_by[other]
            into[other] = group
        placed += [group, *after]
        latest |= dict.fromkeys(keys, group)
    return [sorted(members[g]) for g in placed]


def _in_order(
    operations: Sequence[BoundSymbol], groups: list[list[int]], producer: dict[Proxy, int]
) -> list[list[int]]:
    """Groups in an order in which they can run, as near to that of the program as it goes: values live no longer than
    they must. Effects stay where they are."""
    stretch, stretch_of = 0, []  # stretches of operations between effects, which are stretches of their own
    for operation in operations:
        has_effect = OpTags.DONT_DCE in operation.sym.tags
        stretch_of.append(stretch + has_effect)
        stretch += 2 * has_effect
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    before = [
        {group_of[producer[v]] for i in group for v in operations[i].inputs if v in producer} - {g}
        for g, group in enumerate(groups)
    ]
    after: list[list[int]] = [[] for _ in groups]
    for g, needed in enumerate(before):
        for other in needed:
            after[other].append(g)
    missing = [len(needed) for needed in before]
    ready = [(stretch_of[group[0]], group[0], g) for g, group in enumerate(groups) if not missing[g]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, _, g = heapq.heappop(ready)
        ordered.append(groups[g])
        for other in after[g]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (stretch_of[groups[other][0]], groups[other][0], other))
    return ordered


def schedule(
    operations: Sequence[BoundSymbol], groups: Sequence[Sequence[int]], output: Sequence[Proxy]
) -> list[Region]:
    """The regions of `groups`, in an order in which they can run, each with its inputs and the outputs that are read
    later."""
    consumers = _consumers(operations)
    returned = set(output)
    regions = []
    for group in groups:
        inside = set(group)
        needed = {
            o
            for i in group
            for o in operations[i].outputs
            if o in returned or any(r not in inside for r in consumers.get(o, ()))
        }
        regions.append(Region([operations[i] for i in group], needed))
    return regions


class _Value(tuple):
    """A value of a region, by its number: what is left of a proxy when names do not count."""


def recompute_cheap(
    regions: Sequence[Region],
    output: Sequence[Proxy],
    takes: Callable[[BoundSymbol], bool],
    cheap: Callable[[BoundSymbol], bool],
) -> list[Region]:
    """Regions that recompute what is cheap, where they would read it from another region: writing and reading it
    costs more than reading what it is made of.

    regions: in an order in which they can run. takes: operations that are run as regions. cheap: those of them that
    cost nothing beside what they read. A value is copied where what it is made of, and the region does not read anyway,
    has no more bytes than the value. Never past an operation with an effect, which may write to what the copy would
    read.
    """
    taken = [all(map(takes, r.bound_symbols)) for r in regions]
    has_effect = [any(OpTags.DONT_DCE in operation.sym.tags for operation in r.bound_symbols) for r in regions]
    effects = list(itertools.accumulate(has_effect))
    home = {
        o: (n, operation) for n, r in enumerate(regions) for operation in r.bound_symbols for o in operation.outputs
    }

    def chains(n: int) -> Iterator[tuple[Proxy, int, tuple]]:
        """The inputs of a region that it may recompute: (value, its region, its chain)."""
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
        kept = leading_to(operations, needed) if taken[n] else operations
        if kept:
            result.append(Region(kept, needed))
    return result


def _with_copies(
    region: Region, chains: Sequence[tuple[Proxy, int, tuple]], stored: Set[Proxy]
) -> Sequence[BoundSymbol]:
    """The operations of a region, with copies of those that lead to its inputs where it reads no more for that. What is
    stored anyway is read, unless several copies together read less."""
    few, all_found = _copied(region, chains, stored), _copied(region, chains, frozenset())
    return min(few, all_found, key=lambda operations: sum(map(_bytes, Region(operations, set()).inputs)))


def _copied(region: Region, chains: Sequence[tuple[Proxy, int, tuple]], stored: Set[Proxy]) -> Sequence[BoundSymbol]:
    inputs, copies = set(region.inputs), {}
    fronts: list[tuple[int, list[BoundSymbol]]] = []
    for value, at, (made, sources) in chains:
        if sum(_bytes(s) for s in sources if s not in inputs) > _bytes(value) - (value in stored):
            continue
        inputs |= sources
        fronts.append((at, [operation for operation in made if operation.outputs[0] not in copies]))
        copies |= {o: _copy(o, operation) for operation in made for o in operation.outputs if o not in copies}
    if not copies:
        return region.bound_symbols
    # a copy may read one of an earlier region
    front = [operation for _, made in sorted(fronts, key=lambda f: f[0]) for operation in made]
    return [operation.swap(copies) for operation in (*front, *region.bound_symbols)]


def _chain(
    value: Proxy, home: dict, home_operations: Sequence[BoundSymbol], cheap: Callable[[BoundSymbol], bool]
) -> tuple[list[BoundSymbol], set[Proxy]] | None:
    """The operations of a value's own region that lead to it, and what they read from outside of it; None where one of
    them is not cheap."""
    region = home[value][0]
    found: dict[BoundSymbol, None] = {}
    sources: set[Proxy] = set()
    waiting = [value]
    while waiting:
        v = waiting.pop()
        if v not in home or home[v][0] != region:
            sources.add(v)
            continue
        operation = home[v][1]
        if operation not in found:
            if not cheap(operation):
                return None
            found[operation] = None
            waiting += _read(operation)
    return [operation for operation in home_operations if operation in found], sources


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


def region_key(region: Region):
    """A hashable key that is equal for two regions which are the same program up to names, on values of the same
    metadata. Sizes that stay symbolic are in it by where they occur, and not by their values."""
    numbers: dict[Proxy, _Value] = {}
    places = {n.name: f"n{i}" for i, n in enumerate(region.numbers)}
    names = {name: places[n.name] for name, n in region.number_names.items()}

    def number(x):
        if isinstance(x, NumberProxy):
            return _Value((x.python_type, x.expression.renamed(names)))
        if not isinstance(x, Proxy):
            return x
        found = numbers.get(x)
        if found is None:
            facts = (tuple(map(number, x.shape)), x.dtype, x.device) if isinstance(x, TensorProxy) else (type(x), id(x))
            found = numbers[x] = _Value((len(numbers), *facts))
        return found

    operations = [
        (
            operation.sym,
            *(hashable(map_structure(number, part)) for part in (operation.args, operation.kwargs, operation.output)),
        )
        for operation in region.bound_symbols
    ]
    sizes = tuple(n.decisions.is_size(n.name) for n in region.numbers)
    padded = frozenset(map(number, region.padded))
    inputs, outputs = tuple(map(number, region.inputs)), tuple(map(number, region.outputs))
    return tuple(operations), inputs, outputs, sizes, padded, region.parts
