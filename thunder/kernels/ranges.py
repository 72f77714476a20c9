"""Reductions in two steps: of ranges of their axes, and of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from thunder.kernels.combining import neutral
from thunder.kernels.index import Index, Variable, within
from thunder.kernels.ir import Combine, Graph, Node, axis
from thunder.kernels.sizes import Extent, divides, hint, rounded_up

Size = int | Extent


class Ranges(NamedTuple):
    """The ranges of an axis: how many there are, and how many elements each has but for the last."""

    axis: Variable
    count: int
    length: Size


def ranges_of(bound: Sequence[Variable], wanted: int) -> list[Ranges]:
    """The ranges of a split reduction, at most `wanted` in all. bound: the axes, the slowest in memory first. Each
    index of the first ones is a range, and the axis after them is cut."""
    ranges: list[Ranges] = []
    for a in bound:
        size, left = hint(a.size), wanted // math.prod(r.count for r in ranges)
        if left < 2 or size == 1:
            break
        count = min(left, size)
        count = next((n for n in range(count, count // 2, -1) if divides(n, a.size)), count)
        length = rounded_up(a.size, count)
        # for smaller sizes some may be empty
        ranges.append(Ranges(a, count if isinstance(length, Extent) else -(-size // length), length))
        if length != 1:
            break
    return ranges


def exact_ranges(bound: Sequence[Variable], width: int, most: int) -> list[Ranges]:
    """As few ranges of a reduction as have at most so many elements, all as many; none where there are no such."""
    least = -(-width // most)
    for wanted in range(least, 2 * least + 1) if least > 1 else ():
        ranges = ranges_of(bound, wanted)
        count = math.prod(r.count for r in ranges)
        if least <= count < width and all(r.length * r.count == r.axis.size for r in ranges):
            return ranges
    return []


def in_ranges(graph: Graph, node: Node, ranges: Sequence[Ranges]) -> Node:
    """A reduction of reductions over ranges of its axes."""
    combine, bound = node.what
    inner, parts, bounds = elements_of(graph, node.args[0], bound, ranges, node.depth, combine)
    partial = graph.make("reduce", (inner,), node.dtype, (combine, bounds)) if bounds else inner
    return graph.make("reduce", (partial,), node.dtype, (combine, parts))


def elements_of(
    graph: Graph, value: Node, bound: Sequence[Variable], ranges: Sequence[Ranges], depth: int, combine: Combine
) -> tuple[Node, tuple[Variable, ...], tuple[Variable, ...]]:
    """A value, over these axes, as one of the number of a range and of elements in it, and the axes of both; where the
    last range has fewer elements, what changes no combination. depth: of the names of axes."""
    parts: list[Variable] = []
    rest = [a for a in bound if all(a is not r.axis for r in ranges)]
    for number, (whole, count, length) in enumerate(ranges):
        part, own = axis("r", (depth, "range", number), count), axis("r", (depth, "in", number), length)
        at = Index.of(part) * length + Index.of(own)
        value = graph.substitute(value, {whole: within(at, whole.size)})
        if length * count != whole.size:
            nothing = graph.make("constant", (), value.dtype, neutral(combine, value.dtype))
            value = graph.make("concat", (value, nothing), value.dtype, (at, (0, whole.size), count * length))
        parts.append(part)
        rest.append(own)
    return value, tuple(parts), tuple(a for a in rest if a.size != 1)
