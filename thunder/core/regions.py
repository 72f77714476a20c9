"""Regions: groups of operations that may run as one.

A set of operations is convex when no path leads out of it and back in: everything it reads exists before it starts.
Fusion executors are given convex regions only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

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
from thunder.errors import ThunderError


class Region:
    """Operations to run as one, in order, with their live-in values (`inputs`) and live-out values (`outputs`).
    Symbolic numbers among the live-ins are in `numbers`.

    padded: values with padded rows in memory (`TraceInfo.padded`). parts: for a region of several joined ones, the
    places of the outputs of each.
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
        produced = {o for operation in operations for o in operation.outputs}
        self.inputs: tuple[Proxy, ...] = tuple(
            dict.fromkeys(
                i
                for operation in operations
                for i in operation.inputs
                if i not in produced and type(i) is not UnbackedNumber
            )
        )
        self.outputs: tuple[Proxy, ...] = tuple(
            dict.fromkeys(o for operation in operations for o in operation.outputs if o in needed_after)
        )
        self.padded: Set[Proxy] = padded & {*self.inputs, *produced} if padded else padded

    @property
    def numbers(self) -> tuple[NumberProxy, ...]:
        """The symbolic numbers of the region that have a name and are no expressions of others; of numbers that are
        equal in this program, one."""
        return tuple({n.name: n for n in self.number_names.values()}.values())

    @property
    def number_names(self) -> dict[str, NumberProxy]:
        """By the name of each number in an expression, the one of `numbers` that equals it."""
        by_name: dict[str, NumberProxy] = {}
        of: dict[str, NumberProxy] = {}  # by the name that stands for all that are equal
        for operation in self.bound_symbols:
            if has_numbers(operation.args) or has_numbers(operation.output) or has_numbers(operation.kwargs):
                for number in numbers_in((operation.args, operation.kwargs, operation.output), []):
                    for name in sorted(number.expression.symbols() - by_name.keys()):
                        by_name[name] = of.setdefault(number.decisions.equal(name), number.symbol(name))
        return by_name


class NativeKernels(NamedTuple):
    """The kernels of a region on the CPU as a function in C of the addresses of inputs, results and scratch memory.

    inputs, outputs: of each tensor the sizes, strides and PyTorch's dtype. shared, own: bytes of scratch memory, of all
    threads and of each.
    """

    address: int
    inputs: tuple[tuple, ...]
    outputs: tuple[tuple, ...]
    shared: int
    own: int


class NoScript(ThunderError):
    """No script runs the kernels of a region outside of its program. The message says why."""


class KernelScript(NamedTuple):
    """The kernels of a region as Python text for another process.

    text: defines `kernel`, called like the region, in a module that defines `operations`, the region in PyTorch's
    operations. strides: those of the inputs that the kernels are compiled for.
    """

    text: str
    strides: list[tuple[int, ...]]


class FusedFunction:
    """A function that runs a region, and its facts for passes and estimates.

    kernels: their number. source: their text, as far as it is known. scratch_bytes: allocated beside the results.
    over: by the place of a result, the place of the input that it overwrites, or may overwrite.
    """

    kernels: int = 1
    source: str = ""
    scratch_bytes: int = 0
    over: Mapping[int, int] = MappingProxyType({})

    @property
    def description(self) -> str:
        """What people read to understand the kernels: at least their text."""
        return self.source

    def layout(self, strides: tuple) -> list[tuple] | None:
        """The strides of the results for inputs of these strides; None where that is not known."""
        return None

    def native(self) -> NativeKernels | None:
        """The kernels of the last call, for launch loops; None where they are no such function."""
        return None

    def script(self, numbers: Sequence[Any]) -> KernelScript:
        """The kernels of the last call, for these symbolic numbers. Raises NoScript."""
        raise NoScript("its executor writes no script; TORCH_LOGS=output_code prints the kernels of Inductor")

    def measure_next(self) -> None:
        """Lets the next call measure kernels with several schedules, where there are, and take the fastest."""


def leading_to(
    operations: Sequence[BoundSymbol], results: Iterable, is_needed: Callable[[BoundSymbol], bool] | None = None
) -> list[BoundSymbol]:
    """The operations that `results` depend on, and those that `is_needed` accepts with their dependencies, in order."""
    needed, reversed_operations = {r for r in results if isinstance(r, Proxy)}, []
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs) or is_needed is not None and is_needed(operation):
            needed.update(operation.inputs)
            reversed_operations.append(operation)
    return reversed_operations[::-1]


def _consumers(operations: Sequence[BoundSymbol]) -> dict[Proxy, list[int]]:
    consumers: dict[Proxy, list[int]] = {}
    for i, operation in enumerate(operations):
        for value in dict.fromkeys(operation.inputs):
            consumers.setdefault(value, []).append(i)
    return consumers


# bound on the unfused operations between joined ones: results that wait for a distant consumer occupy memory
NEAR = 8
FAR = 64  # bound on the groups that the search for a join looks back on
MOST = 128  # bound on the operations of groups that join: a longer kernel takes too long to compile
SMALL = 1 << 16  # elements; a kernel over fewer takes less time than its launch
LARGE = 1 << 24  # bytes that a group moves, from which on a common launch is no gain
SHARE = 1 / 8  # of the bytes of the smaller of two large groups: the least that they share


def convex_regions(operations: Sequence[BoundSymbol], takes: Callable[[BoundSymbol], bool]) -> list[list[int]]:
    """Groups the operations that `takes` accepts into convex sets of indices. Nearby operations join.

    Every operation is in exactly one group. Operations that are not taken are groups of one, and operations with an
    effect never join and are never moved across. The groups are in an order in which they can run. One pass builds them
    in nearly linear time: a group has a higher level than every group that it reads from, so no path leads between two
    groups of one level. An operation joins the groups of its producers of the highest level, which become one group,
    when all of them are taken. A group without consumers may rise to any higher level, and joins as well. At the end
    groups that share tensors join, then small groups over one iteration space, which need one launch.
    """
    groups = _Groups()
    group_of: list[int] = []
    unfused = 0
    producer: dict[Proxy, int] = {}
    barrier = 0  # the lowest level of operations after the last effect
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
    ordered = groups_in_order(operations, [sorted(g) for g in groups.members if g], producer)
    for shared in (_tensors, _small_space):
        taken = [groups.taken[groups.current(group_of[g[0]])] for g in ordered]
        ordered = _join_sharing(operations, ordered, taken, producer, shared)
    return ordered


class _Groups:
    """Groups of operations while they grow, by number.

    members: places of operations; empty for a group that was merged into another one. taken: whether a group is a
    region. read: whether another group reads from it. first: the number of unfused operations before its first one.
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
        """The groups that an operation may join: near ones after the last effect, unless they are too large."""
        near = {g for g in groups if self.taken[g] and self.level[g] >= barrier and unfused - self.first[g] <= NEAR}
        return near if sum(len(self.members[g]) for g in near) < MOST else set()

    def merge(self, group: int, others: Iterable[int]) -> None:
        for other in others:
            self.members[group] += self.members[other]
            self.read[group] |= self.read[other]
            self.first[group] = min(self.first[group], self.first[other])
            self.members[other], self._into[other] = [], group


def _current(into: list[int], group: int) -> int:
    """The group that a group was finally merged into; paths to it are shortened."""
    while into[group] != group:
        into[group] = group = into[into[group]]
    return group


def _is_unfused(operation: BoundSymbol, taken: bool) -> bool:
    """Whether an operation counts as distance: numbers for the host, and tensors of one element, take no memory."""
    return (
        not taken
        and OpTags.SHAPE_OP not in operation.sym.tags
        and (not operation.outputs or any(isinstance(o, TensorProxy) and o.shape for o in operation.outputs))
    )


def _tensors(operations: Sequence[BoundSymbol]) -> set[Any]:
    """The tensors that operations read or write."""
    return {
        v for operation in operations for v in (*operation.inputs, *operation.outputs) if isinstance(v, TensorProxy)
    }


def _gain(group: Sequence[BoundSymbol], other: Sequence[BoundSymbol]) -> bool:
    """Whether groups gain by joining. Not where both are large, and share next to nothing: one would wait for the other
    with what it reads."""
    moved = _tensors(group), _tensors(other)
    least = min(sum(map(_bytes, m)) for m in moved)
    return least < LARGE or sum(map(_bytes, moved[0] & moved[1])) >= SHARE * least


def _bytes(value: Any) -> int:
    return element_count(value) * value.dtype.bytes


def _small_space(operations: Sequence[BoundSymbol]) -> set[Any]:
    """The element count and device that all results share, if the count is small. A CPU launches no kernels."""
    spaces = {
        (element_count(o), o.device)
        for operation in operations
        for o in operation.outputs
        if isinstance(o, TensorProxy)
    }
    return spaces if len(spaces) == 1 and all(n <= SMALL and device.type != "cpu" for n, device in spaces) else set()


def _place_of(group: int, placed: Sequence[int]) -> int | None:
    """Where a group stands among the last ones; None where it is too far away."""
    return next((n for n in range(len(placed) - 1, max(-1, len(placed) - FAR), -1) if placed[n] == group), None)


def _is_near(between: Sequence[int], unfused: Sequence[int], has_effect: Sequence[bool]) -> bool:
    return sum(unfused[g] for g in between) <= NEAR and not any(has_effect[g] for g in between)


def _join_sharing(
    operations: Sequence[BoundSymbol], ordered: Sequence[list[int]], taken: Sequence[bool], producer: dict[Proxy, int],
        shared: Callable[[Sequence[BoundSymbol]], set]
) -> list[list[int]]:  # fmt: skip
    """Joins near groups whose keys (`shared`) intersect, where no path leads from one to the other through a third.

    ordered: groups in an order in which they can run; so is the result. Groups between two groups that join move behind
    them where they depend on the first, otherwise before them.
    """
    group_of = {i: g for g, group in enumerate(ordered) for i in group}
    into = list(range(len(ordered)))
    members = [list(group) for group in ordered]
    # the producers of a group's inputs, its own operations among them
    made_by = [[producer[v] for i in group for v in operations[i].inputs if v in producer] for group in ordered]
    unfused = [sum(_is_unfused(operations[i], t) for i in group) for t, group in zip(taken, ordered, strict=True)]
    has_effect = [OpTags.DONT_DCE in operations[group[0]].sym.tags for group in ordered]
    latest: dict[Any, int] = {}  # by key, the last group with it
    placed: list[int] = []

    def reads(group: int, others: set[int]) -> bool:
        return not others.isdisjoint([_current(into, group_of[i]) for i in made_by[group]])

    def may_join(group: int, other: int, between: Sequence[int]) -> bool:
        ours, theirs = ([operations[i] for i in members[g]] for g in (group, other))
        return _is_near(between, unfused, has_effect) and len(ours) + len(theirs) <= MOST and _gain(ours, theirs)

    def consumers_of(group: int, among: Sequence[int]) -> set[int]:
        consuming = {group}
        for g in among:
            if reads(g, consuming):
                consuming.add(g)
        return consuming - {group}

    for group, own in enumerate(ordered):
        after: list[int] = []  # groups that move behind the joined one
        keys = shared([operations[i] for i in own]) if taken[group] else ()
        for other in sorted({_current(into, latest[k]) for k in keys if k in latest}, reverse=True):
            at = _place_of(other, placed)
            if at is None or not may_join(group, other, between := placed[at + 1 :]):
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


def groups_in_order(
    operations: Sequence[BoundSymbol], groups: list[list[int]], producer: dict[Proxy, int]
) -> list[list[int]]:
    """Groups in an order in which they can run, as close to program order as possible, which keeps lifetimes short.
    Effects stay in place."""
    stretch, stretch_of = 0, []  # the stretch of each operation: between two effects, or one effect
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
    """The regions of `groups`, which are in an order in which they can run, with their live-in and live-out values."""
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
    """A value of a region in a key: its number and its type, without its name."""


def region_key(region: Region):
    """A hashable key: equal for two regions that are the same program up to names, on values of the same types. A
    symbolic size is in the key by the places where it occurs, not by its value."""
    numbers: dict[Proxy, _Value] = {}
    places = {n.name: f"n{i}" for i, n in enumerate(region.numbers)}
    names = {name: places[n.name] for name, n in region.number_names.items()}

    def number(x):
        if isinstance(x, NumberProxy):
            return _Value((x.python_type, x.expression.renamed(names)))
        if not isinstance(x, Proxy):
            return x
        value = numbers.get(x)
        if value is None:
            facts = (tuple(map(number, x.shape)), x.dtype, x.device) if isinstance(x, TensorProxy) else (type(x), id(x))
            value = numbers[x] = _Value((len(numbers), *facts))
        return value

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
