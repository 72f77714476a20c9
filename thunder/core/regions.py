"""Regions: groups of lines that may run as one.

A set of lines is convex when no path leads out of it and back in: everything it reads exists before it starts. Fusion executors are given
convex regions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, OpTags

__all__ = ["Region", "convex_regions", "schedule"]


class Region:
    """Lines to run as one, in order, with the values they read from outside and those that are read after them."""

    __slots__ = ("lines", "inputs", "outputs")

    def __init__(self, lines: Sequence[BoundSymbol], needed_after: set[Proxy]):
        self.lines = tuple(lines)
        made = {o for line in lines for o in line.outputs}
        self.inputs: tuple[Proxy, ...] = tuple(dict.fromkeys(i for line in lines for i in line.inputs if i not in made))
        self.outputs: tuple[Proxy, ...] = tuple(dict.fromkeys(o for line in lines for o in line.outputs if o in needed_after))


def _readers(lines: Sequence[BoundSymbol]) -> dict[Proxy, list[int]]:
    found: dict[Proxy, list[int]] = {}
    for i, line in enumerate(lines):
        for value in dict.fromkeys(line.inputs):
            found.setdefault(value, []).append(i)
    return found


def convex_regions(lines: Sequence[BoundSymbol], takes: Callable[[BoundSymbol], bool]) -> list[list[int]]:
    """Groups the lines that `takes` accepts into convex sets of indices, each as large as joining along data flow makes it.

    Lines with an effect are never joined and never moved across. Every line is in exactly one group; lines not taken are groups of one.
    Groups are in an order in which they can run. One pass, linear in the edges: each group has a level (the longest chain of groups before it), and a
    line joins the group of a producer only when all its other producers lie on lower levels or in that group.
    """
    group_of: list[int] = []
    groups: list[list[int]] = []
    level: list[int] = []
    taken: list[bool] = []
    producer: dict[Proxy, int] = {}
    barrier = 0  # lowest level that a line after the last effect may have
    for i, line in enumerate(lines):
        accepts = takes(line) and OpTags.DONT_DCE not in line.sym.tags
        before = {group_of[producer[v]] for v in line.inputs if v in producer}
        lowest = max((level[g] for g in before), default=0)
        candidates = [g for g in before if accepts and taken[g] and level[g] == lowest and level[g] >= barrier]
        others = [g for g in before if level[g] == lowest]
        if len(candidates) >= 1 and len(others) == 1:
            group = candidates[0]
            groups[group].append(i)
        else:
            group = len(groups)
            groups.append([i])
            level.append(max(lowest + 1, barrier))
            taken.append(accepts)
        if OpTags.DONT_DCE in line.sym.tags:
            barrier = max(level, default=0) + 1
            level[group] = barrier
            barrier += 1
        group_of.append(group)
        for o in line.outputs:
            producer[o] = i
    order = sorted(range(len(groups)), key=lambda g: (level[g], groups[g][0]))
    return [groups[g] for g in order]


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
