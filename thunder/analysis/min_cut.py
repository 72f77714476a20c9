"""Minimum cuts of directed graphs, by Dinic's method (1970): shortest paths to the sink are filled until there is
none."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable


def sink_side(edges: Iterable[tuple[Hashable, Hashable, float]], source: Hashable, sink: Hashable) -> set:
    """The nodes behind the minimum cut that is nearest to the sink: those from which more could flow to it when as much
    flows as can.

    edges: (from, to, capacity). Raises ValueError where there is no limit to what flows.
    """
    number: dict[Hashable, int] = {source: 0, sink: 1}
    ends: list[int] = []  # edge e leads to ends[e], and e ^ 1 back
    left: list[float] = []  # what may flow still
    leaving: list[list[int]] = [[], []]
    for a, b, capacity in edges:
        for node in (a, b):
            if node not in number:
                number[node] = len(leaving)
                leaving.append([])
        leaving[number[a]].append(len(ends))
        leaving[number[b]].append(len(ends) + 1)
        ends += number[b], number[a]
        left += capacity, 0.0
    while (distance := _distances(ends, left, leaving))[0] >= 0:
        _fill(ends, left, leaving, distance)
    return {node for node, i in number.items() if distance[i] >= 0}


def _distances(ends: list[int], left: list[float], leaving: list[list[int]]) -> list[int]:
    """From each node to the sink, over edges that something may flow through; -1 where no path leads there."""
    distance = [-1] * len(leaving)
    distance[1] = 0
    waiting = deque([1])
    while waiting:
        node = waiting.popleft()
        for edge in leaving[node]:
            before = ends[edge]
            if distance[before] < 0 and left[edge ^ 1] > 0:
                distance[before] = distance[node] + 1
                waiting.append(before)
    return distance


def _fill(ends: list[int], left: list[float], leaving: list[list[int]], distance: list[int]) -> None:
    """Lets as much flow over shortest paths as can."""
    tried = [0] * len(leaving)  # how many edges of each node lead nowhere any more
    path: list[int] = []
    node = 0
    while True:
        if node == 1:
            flow = min(left[edge] for edge in path)
            if flow == math.inf:
                raise ValueError("a path without any limit leads from the source to the sink")
            for edge in path:
                left[edge] -= flow
                left[edge ^ 1] += flow
            full = next(i for i, edge in enumerate(path) if left[edge] <= 0)
            node = ends[path[full] ^ 1]
            del path[full:]
        edges, closer = leaving[node], distance[node] - 1
        at, count = tried[node], len(edges)
        while at < count and not (left[edges[at]] > 0 and distance[ends[edges[at]]] == closer):
            at += 1
        tried[node] = at
        if at < count:
            path.append(edges[at])
            node = ends[edges[at]]
        elif node == 0:
            return
        else:
            node = ends[path.pop() ^ 1]
            tried[node] += 1
