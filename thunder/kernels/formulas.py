"""Elementwise functions of floating numbers that the kernel IR has no node for, as formulas of those that it has.

They are PyTorch's own formulas where it has one, so that infinities, nan and zeros come out alike.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable

from thunder.core.dtypes import bool8, float32
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index
from thunder.kernels.ir import Graph, Node, axis, in_order


class Writer:
    """Makes nodes. A number is a constant of the type of the operand beside it."""

    def __init__(self, graph: Graph):
        self._graph = graph

    def __getattr__(self, name: str) -> Callable[..., Node]:
        """`w.add(x, 1.0)`: the node of a function of `FUNCTIONS`."""
        if name not in FUNCTIONS:
            raise AttributeError(name)

        def make(*args: Node | float) -> Node:
            kind = next(a.dtype for a in reversed(args) if isinstance(a, Node))
            nodes = [a if isinstance(a, Node) else self._graph.make("constant", (), kind, float(a)) for a in args]
            return self._graph.make(name, nodes, bool8 if FUNCTIONS[name].truth else kind)

        return make


def _remainder(w: Writer, a: Node, b: Node) -> Node:
    rest = w.fmod(a, b)
    other_sign = w.logical_and(w.ne(rest, 0), w.logical_xor(w.lt(rest, 0), w.lt(b, 0)))
    return w.where(other_sign, w.add(rest, b), rest)


def _floor_divide(w: Writer, a: Node, b: Node) -> Node:
    rest, divided = w.fmod(a, b), w.true_divide(a, b)
    whole = w.true_divide(w.sub(a, rest), b)
    other_sign = w.logical_and(w.ne(rest, 0), w.logical_xor(w.lt(rest, 0), w.lt(b, 0)))
    whole = w.where(other_sign, w.sub(whole, 1), whole)
    floor = w.floor(whole)
    floor = w.where(w.gt(w.sub(whole, floor), 0.5), w.add(floor, 1), floor)
    floor = w.where(w.eq(whole, 0), w.copysign(0.0, divided), floor)
    return w.where(w.eq(b, 0), divided, floor)


def _logarithm_of_sum(exponential: str, scale: float) -> Callable[[Writer, Node, Node], Node]:
    def formula(w: Writer, a: Node, b: Node) -> Node:
        larger, distance = w.maximum(a, b), w.abs(w.sub(a, b))
        small = w.log1p(getattr(w, exponential)(w.neg(distance)))
        total = w.add(larger, small if scale == 1.0 else w.mul(small, scale))
        return w.where(w.logical_and(w.isinf(a), w.eq(a, b)), a, total)

    return formula


def _times_logarithm(logarithm: str) -> Callable[[Writer, Node, Node], Node]:
    def formula(w: Writer, a: Node, b: Node) -> Node:
        product = w.where(w.eq(a, 0), 0.0, w.mul(a, getattr(w, logarithm)(b)))
        return w.where(w.isnan(b), math.nan, product)

    return formula


def _sinc(w: Writer, x: Node) -> Node:
    scaled = w.mul(x, math.pi)
    return w.where(w.eq(x, 0), 1.0, w.true_divide(w.sin(scaled), scaled))


def _entropy(w: Writer, x: Node) -> Node:
    inside = w.where(w.eq(x, 0), 0.0, w.where(w.gt(x, 0), w.mul(w.neg(x), w.log(x)), -math.inf))
    return w.where(w.isnan(x), x, inside)


def _ndtr(w: Writer, x: Node) -> Node:
    """The distribution function of the normal distribution."""
    scaled = w.mul(x, math.sqrt(0.5))
    return w.where(
        w.lt(scaled, -1), w.mul(w.erfc(w.neg(scaled)), 0.5), w.mul(w.add(w.erf(scaled), 1), 0.5)
    )  # fmt: skip


def _heaviside(w: Writer, x: Node, at_zero: Node) -> Node:
    return w.where(w.eq(x, 0), at_zero, w.sign(w.maximum(w.where(w.isnan(x), 0.0, x), 0.0)))


def _angle(w: Writer, x: Node) -> Node:
    return w.where(w.lt(x, 0), math.pi, w.where(w.isnan(x), x, 0.0))


def _digamma(w: Writer, x: Node) -> Node:
    """By reflection to positive numbers, the recurrence to numbers of at least 10, and the asymptotic series there
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 6.3)."""
    rest = w.sub(x, w.trunc(x))
    near = w.where(w.lt(rest, -0.5), w.add(rest, 1), rest)  # whose tangent is the same
    reflected = w.true_divide(-math.pi, w.tan(w.mul(near, math.pi)))
    total = w.where(w.lt(x, 0), w.where(w.eq(rest, 0), math.nan, reflected), 0.0)
    at = w.where(w.lt(x, 0), w.sub(1, x), x)
    for _ in range(10):
        is_small = w.lt(at, 10)
        total = w.where(is_small, w.sub(total, w.reciprocal(at)), total)
        at = w.where(is_small, w.add(at, 1), at)
    z = w.reciprocal(w.mul(at, at))
    series = z
    for number in (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12):
        series = w.mul(z, number) if series is z else w.mul(z, w.add(series, number))
    large = w.add(w.sub(w.sub(w.log(at), w.true_divide(0.5, at)), series), total)
    return w.where(w.eq(x, 0), w.copysign(math.inf, w.neg(x)), w.where(w.eq(x, -math.inf), math.nan, large))


FORMULAS: dict[str, Callable[..., Node]] = {
    "remainder": _remainder, "floor_divide": _floor_divide,
    "logaddexp": _logarithm_of_sum("exp", 1.0), "logaddexp2": _logarithm_of_sum("exp2", 1.0 / math.log(2.0)),
    "xlogy": _times_logarithm("log"), "special_xlog1py": _times_logarithm("log1p"),
    "sinc": _sinc, "special_entr": _entropy, "special_ndtr": _ndtr, "heaviside": _heaviside, "angle": _angle,
    "digamma": _digamma, "frac": lambda w, x: w.sub(x, w.trunc(x)),
    "deg2rad": lambda w, x: w.mul(x, math.pi / 180.0), "rad2deg": lambda w, x: w.mul(x, 180.0 / math.pi),
    "ldexp": lambda w, x, power: w.mul(x, w.exp2(power)), "float_power": lambda w, x, power: w.pow(x, power),
}  # fmt: skip


@functools.cache
def functions_in(name: str) -> frozenset[str]:
    """The functions that a formula is made of."""
    graph = Graph()
    count = len(inspect.signature(FORMULAS[name]).parameters) - 1
    operands = [graph.make("index", (), float32, Index.of(axis("d", d, 2))) for d in range(count)]
    return frozenset(n.op for n in in_order([FORMULAS[name](Writer(graph), *operands)]) if n.op in FUNCTIONS)
