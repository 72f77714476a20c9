"""Reductions that read another one of the same elements at each of them, in ranges: each range is read once, whatever
the other one is of all of them.

A variance reads a mean, and what a softmax is divided by a maximum. Of ranges s of T elements t each, with the sum or
maximum of a range for that of all:

    sum over r of (x - m)²       is sum over s of sum over t of (x - sum_s / T)² + T (sum_s / T - m)²
    sum over r of exp(x - m)     is sum over s of (sum over t of exp(x - max_s)) exp(max_s - m)

The first is that of Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thunder.core.dtypes import FLOAT, bool8
from thunder.kernels.index import Index, Variable
from thunder.kernels.ir import Combine, Graph, Node
from thunder.kernels.ranges import Ranges, elements_of
from thunder.kernels.schedule import above_reductions, elements


class Rule(NamedTuple):
    """combine: of the reduction that is read. operands: x and m of a body; None where it is another. body: of x and m.
    center: of a range, from its reduction and how many elements it has. joined: what is added up over ranges, of the
    sum of a range, its center, m and how many elements it has."""

    combine: Combine
    operands: Callable[[Node], Sequence[Node] | None]
    body: Callable[[Graph, Node, Node], Node]
    center: Callable[[Graph, Node, int], Node]
    joined: Callable[[Graph, Node, Node, Node, int], Node]


def _of_square(body: Node) -> Sequence[Node] | None:
    is_square = body.op == "mul" and body.args[0] is body.args[1] and body.args[0].op == "sub"
    return body.args[0].args if is_square else None


def _square(graph: Graph, x: Node, m: Node) -> Node:
    apart = graph.make("sub", (x, m), x.dtype)
    return graph.make("mul", (apart, apart), x.dtype)


def _mean(graph: Graph, total: Node, count: int) -> Node:
    return graph.make("true_divide", (total, _number(graph, count, total)), total.dtype)


def _with_apart(graph: Graph, squares: Node, mean: Node, m: Node, count: int) -> Node:
    others = graph.make("mul", (_square(graph, mean, m), _number(graph, count, mean)), mean.dtype)
    return graph.make("add", (squares, others), mean.dtype)


def _of_exponential(body: Node) -> Sequence[Node] | None:
    return body.args[0].args if body.op == "exp" and body.args[0].op == "sub" else None


def _exponential(graph: Graph, x: Node, m: Node) -> Node:
    return graph.make("exp", (graph.make("sub", (x, m), x.dtype),), x.dtype)


def _finite(graph: Graph, largest: Node, count: int) -> Node:
    """exp(inf - inf) would be nan, where m may be less than inf."""
    is_infinite = graph.make("eq", (largest, _number(graph, math.inf, largest)), bool8)
    return graph.make("where", (is_infinite, _number(graph, 0, largest), largest), largest.dtype)


def _scaled(graph: Graph, total: Node, largest: Node, m: Node, count: int) -> Node:
    """A range of nothing but -inf adds nothing, whatever it is divided by."""
    nothing = graph.make("eq", (largest, _number(graph, -math.inf, largest)), bool8)
    total = graph.make("where", (nothing, _number(graph, 0, total), total), total.dtype)
    return graph.make("mul", (total, _exponential(graph, largest, m)), total.dtype)


def _number(graph: Graph, value: float, like: Node) -> Node:
    return graph.make("constant", (), like.dtype, float(value))


RULES = [
    Rule(Combine.SUM, _of_square, _square, _mean, _with_apart),
    Rule(Combine.AMAX, _of_exponential, _exponential, _finite, _scaled),
]


class Pair(NamedTuple):
    """A reduction that reads another one, the first, of the same elements. axes: by the axes that it binds, those that
    the first one does."""

    rule: Rule
    first: Node
    axes: dict[Variable, Variable]

    def of_first(self, ranges: Sequence[Ranges]) -> list[Ranges]:
        """The ranges of the first one."""
        return [r._replace(axis=self.axes[r.axis]) for r in ranges]

    def of_second(self, ranges: Sequence[Ranges]) -> list[Ranges]:
        """The ranges of the second one by those of the first one."""
        own = {there: v for v, there in self.axes.items()}
        return [r._replace(axis=own[r.axis]) for r in ranges]

    def in_ranges(self, graph: Graph, node: Node, ranges: Sequence[Ranges]) -> Node:
        """The second one by that of each range."""
        operands, combine = self.rule.operands(node.args[0]), self.first.what[0]
        assert operands is not None, "it is of the rule at other indices as well"
        x, m = operands
        first = graph.substitute(x, {a: Index.of(b) for a, b in self.axes.items()})
        depth, own = x.depth + 1, self.of_first(ranges)
        first, before, bounds = elements_of(graph, first, self.first.what[1], own, depth, combine)
        x, parts, inner = elements_of(graph, x, node.what[1], ranges, depth + 1, combine)
        count = elements(inner)
        center = graph.make("reduce", (first,), x.dtype, (combine, bounds))
        center = graph.substitute(center, {a: Index.of(b) for a, b in zip(before, parts, strict=True)})
        center = self.rule.center(graph, center, count)
        total = graph.make("reduce", (self.rule.body(graph, x, center),), node.dtype, (Combine.SUM, inner))
        joined = self.rule.joined(graph, total, center, m, count)
        return graph.make("reduce", (joined,), node.dtype, (Combine.SUM, parts))


def pair_of(graph: Graph, node: Node) -> Pair | None:
    """What a reduction reads at each of its elements; None where that is no reduction of these."""
    combine, bound = node.what
    if combine != Combine.SUM or node.dtype.category != FLOAT:
        return None
    for rule in RULES:
        x, m = rule.operands(node.args[0]) or (None, None)
        if x is None or m is None or not m.axes.isdisjoint(bound) or x.axes.isdisjoint(bound):
            continue
        for n in above_reductions(m):
            if n.op != "reduce" or n.what[0] != rule.combine or [a.size for a in n.what[1]] != [a.size for a in bound]:
                continue
            axes = dict(zip(bound, n.what[1], strict=True))
            if graph.substitute(x, {a: Index.of(b) for a, b in axes.items()}) is n.args[0]:
                return Pair(rule, n, axes)
    return None
