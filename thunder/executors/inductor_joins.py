"""Inductor joins: rewrite elementwise operations of concatenations as concatenations of elementwise operations.

On a CPU Inductor stores each concatenation before it computes with it, and evaluates a condition for each element of a
padded tensor. Rotary embeddings are such concatenations, and their gradients such paddings. This pass runs the graph of
a region once more and moves joins behind the operations that read them:

Before: `cat = cat([-b, a], -1)`, `out = x * c + cat * s`. After: `out = cat([x1 * c1 + -b * s1, x2 * c2 + a * s2],
-1)`, where x1 and x2 are parts of x.

A join with permuted dimensions that is copied is a join in the new order. Results do not change: elementwise operations
are applied to parts of their operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from thunder import compat

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim)
_NARROWEST = 16  # numbers of a part of a row: a vector of float32 on most processors
_MOST = 8  # parts: each is a loop


def joined_by_parts(graph: torch.fx.GraphModule) -> Callable | None:
    """A function equal to the graph that moves joins behind their consumers; None where no operation reads a join. The
    values of nodes are in their `meta["val"]`."""
    run = _ByParts(graph)
    return run.run if run.roots else None


class _ByParts(Interpreter):
    """roots: nodes that become joins of parts, with their rules. made: the parts of other nodes so far."""

    def __init__(self, graph: torch.fx.GraphModule):
        super().__init__(graph, garbage_collect_values=False)
        self.parts: dict[tuple, torch.Tensor] = {}
        self.roots: dict[Node, Callable[[], torch.Tensor]] = {}
        for node in graph.graph.nodes:
            if (make := self._copy_of_join(node) or self._computed_of_joins(node)) is not None:
                self.roots[node] = make

    def run_node(self, n: Node):
        return self.roots[n]() if n in self.roots else super().run_node(n)

    def _computed_of_joins(self, node: Node) -> Callable | None:
        """An elementwise operation that is not the operand of one other elementwise operation alone."""
        if not _is_elementwise(node) or len(node.users) == 1 and _is_elementwise(next(iter(node.users))):
            return None
        for dim in range(-1, -_rank(node) - 1, -1):
            cuts = _cuts_of_inputs(node, dim)
            if cuts and (places := _places(cuts, _shape(node)[dim], dim)):
                return lambda: _laid_out_alike([self._computed(node, dim, *bounds) for bounds in places], dim, node)
        return None

    def _copy_of_join(self, node: Node) -> Callable | None:
        """`clone(permute(cat(parts)))`; where the parts are joins along the next dimension, their parts are parts of
        the result."""
        permute = (
            node.args[0]
            if node.target is _ATEN.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format
            else None
        )
        join = (
            permute.args[0]
            if isinstance(permute, Node) and permute.target is _ATEN.permute.default and len(permute.users) == 1
            else None
        )
        if not isinstance(join, Node) or not _is_join(join) or len(join.users) != 1:
            return None
        rank, shape, order, parts = _rank(node), _shape(node), _order(permute), join.args[0]
        at = order.index(_dim(join) % rank)
        inner = at + 1
        if inner < rank and all(_shape(p)[order[at]] == 1 for p in parts):
            dim = order[inner] - rank
            places = _places(set().union(*(_cuts(p, dim) for p in parts)), shape[inner], inner - rank, len(parts))
            if len(places) > 1 and len({hi - lo for lo, hi in places}) == 1:
                return lambda: torch.cat(
                    [self._part(p, dim, *bounds).permute(order) for p in parts for bounds in places], at
                ).reshape(shape)
        return lambda: torch.cat([self.env[p].permute(order) for p in parts], at)

    def _part(self, node, dim: int, lo: int, hi: int):
        """The slice from `lo` to `hi` of a node's value, along a dimension counted from the last one."""
        if not isinstance(node, Node) or _size(node, dim) == 1:
            return self.env[node] if isinstance(node, Node) else node
        key = node, dim, lo, hi
        if key not in self.parts:
            self.parts[key] = self._new_part(*key)
        return self.parts[key]

    def _new_part(self, node: Node, dim: int, lo: int, hi: int) -> torch.Tensor:
        """The slice lo to hi along dim of a node of a graph, computed by other operations than the node."""
        if len(node.users) == 1:
            if _is_elementwise(node):
                return self._computed(node, dim, lo, hi)
            for part, start, end, origin in _members(node, dim):
                if start <= lo and hi <= end:
                    return self._part(part, dim, lo - origin, hi - origin)
            if (shown := _shown(node, dim)) is not None:
                part = self._part(*shown, lo, hi)
                permuted = node.target is _ATEN.permute.default
                return (
                    part.permute(_order(node))
                    if permuted
                    else part.view([hi - lo if d - _rank(node) == dim else n for d, n in enumerate(_shape(node))])
                )
        return torch.narrow(self.env[node], dim, lo, hi - lo)

    def _computed(self, node: Node, dim: int, lo: int, hi: int) -> torch.Tensor:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Held(self._part(n, dim, lo, hi)))
        return node.target(*map(_released, args), **{k: _released(v) for k, v in kwargs.items()})


def _laid_out_alike(parts: list[torch.Tensor], dim: int, node: Node) -> torch.Tensor:
    """The join of parts, with the dimensions in memory in the order of the node's result."""
    strides = node.meta["val"].stride()
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    joined = torch.cat([part.permute(order) for part in parts], order.index(dim % len(order)))
    return joined.permute([order.index(d) for d in range(len(order))])


class _Held:
    """A tensor in the place of a node."""

    def __init__(self, value):
        self.value = value


def _released(x):
    return x.value if isinstance(x, _Held) else x


def _cuts(node: Node, dim: int) -> set[int]:
    """The starts of the parts of joins along a dimension, among the operands of a node that have no other consumer."""
    if _size(node, dim) == 1 or len(node.users) != 1:
        return set()
    if _is_elementwise(node):
        return _cuts_of_inputs(node, dim)
    if members := _members(node, dim):
        return (
            {origin + cut for part, _, _, origin in members for cut in _cuts(part, dim)}
            | {start for _, start, _, _ in members}
        ) - {0}
    return _cuts(*shown) if (shown := _shown(node, dim)) is not None else set()


def _cuts_of_inputs(node: Node, dim: int) -> set[int]:
    return set().union(*(_cuts(n, dim) for n in node.all_input_nodes))


def _members(node: Node, dim: int) -> list[tuple[Node, int, int, int]]:
    """The members of a join along a dimension: (part, start, end, place of the part's first element). A padded tensor
    is such a join, too."""
    size = _size(node, dim)
    if _is_join(node) and _dim(node) == dim:
        ends = list(itertools.accumulate(_size(part, dim) for part in node.args[0]))
        return [(part, start, end, start) for part, start, end in zip(node.args[0], [0, *ends], ends, strict=False)]
    if node.target is _ATEN.slice_scatter.default and node.args[0].target is _ATEN.full.default:
        whole, part, at, start, _, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 2 :])
        if at % _rank(node) - _rank(node) == dim and step == 1:
            start = start % size
            end = start + _size(part, dim)
            return [m for m in ((whole, 0, start, 0), (part, start, end, start), (whole, end, size, 0)) if m[1] < m[2]]
    return []


def _places(cuts: set[int], size: int, dim: int, times: int = 1) -> list[tuple[int, int]]:
    """The start and end of each part; none where the parts are too many or too narrow."""
    ends = [*sorted(cuts), size]
    places = list(zip([0, *ends], ends, strict=False))
    narrow = dim == -1 and min(hi - lo for lo, hi in places) < _NARROWEST
    return [] if narrow or times * len(places) > _MOST else places


def _shown(node: Node, dim: int) -> tuple[Node, int] | None:
    """For a view that permutes dimensions, or inserts or drops those of size 1: its base, and the dimension of the base
    for a larger one of the view."""
    if node.target is _ATEN.permute.default:
        return node.args[0], _order(node)[dim] - _rank(node)
    if node.target not in _VIEWS:
        return None
    source = node.args[0]
    large, shown = ([d - _rank(n) for d, size in enumerate(_shape(n)) if size != 1] for n in (source, node))
    alike = [_shape(source)[d] for d in large] == [_shape(node)[d] for d in shown]
    return (source, large[shown.index(dim)]) if alike else None


def _order(permute: Node) -> list[int]:
    return [d % _rank(permute) for d in permute.args[1]]


def _is_elementwise(node: Node) -> bool:
    return (
        isinstance(node.target, compat.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _is_join(node: Node) -> bool:
    """An empty tensor of one dimension may be joined with any others."""
    return node.target is _ATEN.cat.default and all(_rank(part) == _rank(node) for part in node.args[0])


def _dim(join: Node) -> int:
    """The dimension of a join, counted from the last one."""
    dim = join.args[1] if len(join.args) > 1 else 0
    return dim if dim < 0 else dim - _rank(join)


def _shape(node: Node) -> tuple:
    return tuple(node.meta["val"].shape)


def _rank(node: Node) -> int:
    return node.meta["val"].dim()


def _size(node: Node, dim: int) -> int:
    shape = _shape(node)
    return shape[dim] if len(shape) >= -dim else 1
