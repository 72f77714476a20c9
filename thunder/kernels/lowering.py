"""The values of a region while they are lowered to the kernel IR: what the rows of `lower` make nodes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core.dtypes import BOOL, FLOAT, INTEGER, bool8, dtype, float32, float64, int64
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Variable, within
from thunder.kernels.ir import Buffer, Combine, Graph, Node, Scatter, Store, axis
from thunder.kernels.numbers import Numbers, Scalar
from thunder.kernels.sizes import Extent

Size = int | Extent


class Lowering:
    """The nodes of a region's values. numbers: its symbolic ones. stores_scans: for a target whose scans are stores,
    and no nodes."""

    def __init__(self, graph: Graph, numbers: Numbers, stores_scans: bool = False):
        self.graph, self.numbers, self.stores_scans = graph, numbers, stores_scans
        self.values: dict[Proxy, Node] = {}
        self.scratch: list[Store] = []

    def node(self, op: str, args: Sequence[Node], dtype: dtype, what: Any = None) -> Node:
        return self.graph.make(op, args, dtype, what)

    def shape(self, p: TensorProxy) -> tuple[Size, ...]:
        return self.numbers.shape(p.shape)

    def constant(self, number: Any, kind: dtype) -> Node:
        """A number, which may be symbolic, as an element of this type."""
        if isinstance(number, NumberProxy):
            number = self.numbers.number(number)
        if isinstance(number, Scalar):
            return self.cast(self.node("argument", (), float64, number), kind)
        if isinstance(number, Extent):
            return self.cast(self.node("index", (), int64, Index.of(number)), kind)
        category = kind.category
        value = bool(number) if category == BOOL else int(number) if category == INTEGER else float(number)
        return self.node("constant", (), kind, value)

    def cast(self, a: Node, kind: dtype) -> Node:
        return a if a.dtype is kind else self.node("cast", (a,), kind)

    def map(self, name: str, *args: Node) -> Node:
        kind = args[-1].dtype
        return self.node(name, args, bool8 if FUNCTIONS[name].truth else kind)

    def stored(self, a: Node, shape: Sequence[Size], scan: tuple[Combine, int] | None = None) -> Node:
        """A value of this shape, or its scan, read from memory."""
        buffer = Buffer("scratch", len(self.scratch), tuple(shape), a.dtype)
        self.scratch.append(Store(buffer, axes_of(shape), a, scan))
        return self.node("load", (), a.dtype, (buffer, here_of(shape), ()))

    def scattered(
        self,
        start: Node,
        shape: Sequence[Size],
        value: Node,
        size: Sequence[Size],
        index: Sequence[Node | Index],
        combine: Combine | None,
    ) -> Node:
        """A value of this shape, with another one of the shape `size` combined with it, or written over it, at an index
        over the axes of the latter. Sums of 16-bit floats are added up in float32."""
        buffer = Buffer("scratch", len(self.scratch), tuple(shape), start.dtype)
        self.scratch.append(Store(buffer, axes_of(shape), start))
        loaded = {d: axis("g", (buffer.number, "to", d), n) for d, n in enumerate(shape) if isinstance(index[d], Node)}
        at = tuple(Index.of(loaded[d]) if d in loaded else index[d] for d in range(len(shape)))
        at = tuple(inside(at, shape))  # type: ignore[arg-type]
        # an index of a dimension of 1 is checked as well
        values = self.node("tuple", (value, *(index[d] for d in loaded)), value.dtype)  # type: ignore[misc]
        scatter = Scatter(combine, at, tuple(loaded.values()))  # type: ignore[arg-type]
        self.scratch.append(Store(buffer, axes_of(size), values, None, scatter))
        return self.node("load", (), buffer.dtype, (buffer, here_of(shape), ()))

    def at(self, a: Node, index: Sequence[Index], shape: Sequence[Size]) -> Node:
        """A value of this shape at an index, which is inside even where sizes do not show it."""
        return self.graph.substitute(a, dict(zip(axes_of(shape), inside(index, shape), strict=True)))

    def like(self, p: TensorProxy, other: TensorProxy) -> Node:
        """A value over the axes of another one of the same sizes, which need not be the same expressions."""
        shape, there = self.shape(p), self.shape(other)
        if shape == there or not shape:
            return self.values[p]
        return self.at(self.values[p], here_of(there), shape)


def computed(kind: dtype) -> dtype:
    """The type that values of a type are computed in."""
    return float32 if kind.category == FLOAT and kind.bytes < 4 else kind


def axes_of(shape: Sequence[Size]) -> tuple[Variable, ...]:
    return tuple(axis("d", d, n) for d, n in enumerate(shape))


def here_of(shape: Sequence[Size]) -> tuple[Index, ...]:
    return tuple(map(Index.of, axes_of(shape)))


def inside(index: Sequence[Index], shape: Sequence[Size]) -> list[Index]:
    return [within(i, n) for i, n in zip(index, shape, strict=True)]
