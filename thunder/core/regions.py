"""Regions: groups of lines that may run as one.

A set of lines is convex when no path leads out of it and back in: everything it reads exists before it starts. Fusion executors are given
convex regions only.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Sequence

from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol, OpTags, hashable

__all__ = ["Region", "convex_regions", "schedule", "region_key", "leading_to"]


class Region:
    """Lines to run as one, in order, with the values they read from outside and those that are read after them."""

    __slots__ = ("lines", "inputs", "outputs")

    def __init__(self, lines: Sequence[BoundSymbol], needed_after: set[Proxy]):
        self.lines = tuple(lines)
        made = {o for line in lines for o in line.outputs}
        self.inputs: tuple[Proxy, ...] = tuple(dict.fromkeys(i for line in lines for i in line.inputs if i not in made))
        self.outputs: tuple[Proxy, ...] = tuple(dict.fromkeys(o for line in lines for o in line.outputs if o in needed_after))


def leading_to(lines: Sequence[BoundSymbol], results: Iterable, kept: Callable[[BoundSymbol], bool] | None = None) -> list[BoundSymbol]:
    """The lines that `results` are made by, and those that `kept` says stay, with what these read, in their order."""
    needed, found = {r for r in results if isinstance(r, Proxy)}, []
    for line in reversed(lines):
        if not needed.isdisjoint(line.outputs) or kept is not None and kept(line):
            needed.update(line.inputs)
            found.append(line)
    return found[::-1]


def _readers(lines: Sequence[BoundSymbol]) -> dict[Proxy, list[int]]:
    found: dict[Proxy, list[int]] = {}
    for i, line in enumerate(lines):
        for value in dict.fromkeys(line.inputs):
            found.setdefault(value, []).append(i)
    return found


def convex_regions(lines: Sequence[BoundSymbol], takes: Callable[[BoundSymbol], bool]) -> list[list[int]]:
    """Groups the lines that `takes` accepts into convex sets of indices, each as large as joining along data flow makes it.

    Lines with an effect are never joined and never moved across. Every line is in exactly one group; lines not taken are groups of one.
    Groups are in an order in which they can run. One pass, nearly linear in the edges: each group has a level, more than that of every group it reads from, so that
    no path leads from one group to another of the same level. A line joins the groups of its producers of the highest level, which become one, when all of
    them are taken. A group that nothing else reads from yet may rise to any higher level, and joins as well. In the end, groups that read the same values join where
    they have one level, or rise to it: what they share is read once.
    """
    group_of: list[int] = []
    groups: list[list[int]] = []
    merged_into: list[int] = []
    level: list[int] = []
    taken: list[bool] = []
    read: list[bool] = []  # by lines of other groups
    producer: dict[Proxy, int] = {}
    barrier = 0  # lowest level that a line after the last effect may have

    def current(group: int) -> int:
        while merged_into[group] != group:
            merged_into[group] = group = merged_into[merged_into[group]]
        return group

    for i, line in enumerate(lines):
        has_effect = OpTags.DONT_DCE in line.sym.tags
        accepts = takes(line) and not has_effect
        before = {current(group_of[producer[v]]) for v in line.inputs if v in producer}
        highest = max((level[g] for g in before), default=0)
        nearest = [g for g in before if level[g] == highest]
        joined = {g for g in before if taken[g] and not read[g] and level[g] >= barrier} if accepts else set()
        if accepts and nearest and highest >= barrier and all(taken[g] for g in nearest):
            group = max(nearest, key=lambda g: len(groups[g]))
            joined = joined.union(nearest) - {group}
        else:
            group = len(groups)
            groups.append([])
            merged_into.append(group)
            level.append(max(highest + 1, barrier))
            taken.append(accepts)
            read.append(False)
        for other in sorted(joined):
            groups[group] += groups[other]
            read[group] |= read[other]
            groups[other], merged_into[other] = [], group
        groups[group].append(i)
        for other in before.difference(joined):
            if other != group:
                read[other] = True
        if has_effect:
            level[group] = max(level, default=0) + 1
            barrier = level[group] + 1
        group_of.append(group)
        for o in line.outputs:
            producer[o] = i
    _join_readers(lines, groups, level, [t and not r for t, r in zip(taken, read, strict=True)], taken)
    return _in_order(lines, [sorted(g) for g in groups if g], producer)


def _join_readers(lines: Sequence[BoundSymbol], groups: list[list[int]], level: list[int], last: list[bool], taken: list[bool]) -> None:
    """Joins groups that are taken and read a value from outside that another one reads, at its level; from a lower one where it is the `last` to hold its results."""
    effects = [i for i, line in enumerate(lines) if OpTags.DONT_DCE in line.sym.tags]
    reader: dict[tuple[int, Proxy], int] = {}  # by stretch between effects, and value: the latest group, of the highest level so far
    into = list(range(len(groups)))
    for g in sorted((g for g, group in enumerate(groups) if group and taken[g]), key=level.__getitem__):
        stretch = bisect.bisect(effects, min(groups[g]))
        made = {o for i in groups[g] for o in lines[i].outputs}
        inputs = dict.fromkeys((stretch, v) for i in groups[g] for v in lines[i].inputs if v not in made and isinstance(v, TensorProxy))
        for key in inputs:
            other = reader.get(key, g)
            while into[other] != other:
                into[other] = other = into[into[other]]
            if other != g and (level[other] == level[g] or last[other]):
                groups[g] += groups[other]
                last[g] &= last[other]
                groups[other], into[other] = [], g
        reader |= dict.fromkeys(inputs, g)


def _in_order(lines: Sequence[BoundSymbol], groups: list[list[int]], producer: dict[Proxy, int]) -> list[list[int]]:
    """Groups in an order in which they can run, as near to that of the program as it goes: values live no longer than they must. Effects stay where they are."""
    stretch, stretch_of = 0, []  # stretches of lines between effects, which are stretches of their own
    for line in lines:
        has_effect = OpTags.DONT_DCE in line.sym.tags
        stretch_of.append(stretch + has_effect)
        stretch += 2 * has_effect
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    before = [{group_of[producer[v]] for i in group for v in lines[i].inputs if v in producer} - {g} for g, group in enumerate(groups)]
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


def schedule(lines: Sequence[BoundSymbol], groups: Sequence[Sequence[int]], output: Sequence[Proxy]) -> list[Region]:
    """The regions of `groups`, in an order in which they can run, each with its inputs and the outputs that are read later."""
    readers = _readers(lines)
    returned = set(output)
    regions = []
    for group in groups:
        inside = set(group)
        needed = {o for i in group for o in lines[i].outputs if o in returned or any(r not in inside for r in readers.get(o, ()))}
        regions.append(Region([lines[i] for i in group], needed))
    return regions


class _Value(tuple):
    """A value of a region, by its number: what is left of a proxy when names do not count."""


def region_key(region: Region):
    """A hashable key that is equal for two regions which are the same program up to names, on values of the same metadata."""
    numbers: dict[Proxy, _Value] = {}

    def number(x):
        if not isinstance(x, Proxy):
            return x
        found = numbers.get(x)
        if found is None:
            facts = (tuple(x.shape), x.dtype, x.device) if isinstance(x, TensorProxy) else (type(x), id(x))
            found = numbers[x] = _Value((len(numbers), *facts))
        return found

    lines = [(line.sym, *(hashable(map_structure(number, part)) for part in (line.args, line.kwargs, line.output))) for line in region.lines]
    return (tuple(lines), tuple(map(number, region.inputs)), tuple(map(number, region.outputs)))
