"""From the operations of a region to the kernel IR: a table with a row for each primitive.

A value is a node over the axes of its dimensions ("d0", "d1" ...). A row gives the node of its result: elementwise
functions combine those of the operands, views replace axes by indices. Values of 16-bit floats are computed in float32;
they are rounded where the program converts and where they are stored.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from thunder.analysis.cost import tensors_in
from thunder.compat.torch_settings import tensor_cores_multiply_float32
from thunder.core.dtypes import BOOL, FLOAT, INTEGER, dtype, float32, float64, int32, int64
from thunder.core.proxies import (
    FloatProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
    UnbackedNumber,
    has_numbers,
    numbers_in,
)
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.extend.fusion import fusible, of_integers
from thunder.kernels import windows
from thunder.kernels.formulas import FORMULAS, Writer
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Variable, split, strides_of, within
from thunder.kernels.index import join as joined
from thunder.kernels.ir import (
    SCANS,
    Buffer,
    Combine,
    Graph,
    Node,
    Program,
    Store,
    axis,
    in_order,
    variables_of,
)
from thunder.kernels.lowering import Lowering, Size, axes_of, computed, here_of
from thunder.kernels.numbers import Numbers
from thunder.kernels.rules import rewrite
from thunder.kernels.sizes import Extent, Undecided, at_least, hint
from thunder.ops.families.data import half_gradient
from thunder.ops.families.indexing import indexed

TYPES = {"bfloat16", "float16", "float32", "float64", "bool8", "uint8", "int8", "int16", "int32", "int64"}


# ------------------------------------------------------------------------------------------------ the rows


def _elementwise(to: Lowering, b: BoundSymbol) -> Node:
    tensors = [x for x in b.args if isinstance(x, TensorProxy)]
    kind = computed(tensors[-1].dtype if b.sym.name != "where" else _out(b).dtype)
    args = [to.like(x, _out(b)) if isinstance(x, TensorProxy) else to.constant(x, kind) for x in b.args]
    if b.sym.name in ("eq", "ne"):  # as a saved extreme is, which is compared with recomputed values
        args = [_rounded(to, a, x) for a, x in zip(args, b.args, strict=True)]
    if is_formula(b):
        return FORMULAS[b.sym.name](Writer(to.graph), *args)
    return to.map(NAMES.get(b.sym.name, b.sym.name), *args)


def _rounded(to: Lowering, a: Node, x: Any) -> Node:
    """A value as its type holds it: one of 16 bits is computed in more of them."""
    return to.cast(to.cast(a, x.dtype), a.dtype) if isinstance(x, TensorProxy) else a


def is_formula(b: BoundSymbol) -> bool:
    """Whether a formula computes it: some functions have a node for integers alone."""
    tensors = [x for x in b.args if isinstance(x, TensorProxy)]
    return b.sym.name in FORMULAS and all(t.dtype.category == FLOAT for t in tensors)


NAMES = {"sgn": "sign"}


def _cast(to: Lowering, b: BoundSymbol) -> Node:
    kind = _out(b).dtype
    narrow = to.cast(to.like(b.args[0], _out(b)), kind)  # rounds a 16-bit float
    return to.cast(narrow, computed(kind))


def _same(to: Lowering, b: BoundSymbol) -> Node:
    return to.like(b.args[0], _out(b))


def _full(to: Lowering, b: BoundSymbol) -> Node:
    return to.constant(b.args[1], computed(_out(b).dtype))


def _iota(to: Lowering, b: BoundSymbol) -> Node:
    kind, start, step = computed(_out(b).dtype), b.kwargs["start"], b.kwargs["step"]
    (at,) = here_of(to.shape(_out(b)))
    if isinstance(start, NumberProxy):
        start = to.numbers.number(start)
    if isinstance(start, int | Extent) and type(step) is int:
        return to.cast(to.node("index", (), int64, at * step + start if step else Index.of(start)), kind)
    wide = float64
    scaled = to.map("mul", to.cast(to.node("index", (), int64, at), wide), to.constant(step, wide))
    return to.cast(to.map("add", scaled, to.constant(start, wide)), kind)


def _random(to: Lowering, b: BoundSymbol) -> Node:
    out, seed, (low, high) = _out(b), b.kwargs["seed"], _bounds(b)
    drawn = to.values[seed] if isinstance(seed, TensorProxy) else to.constant(seed, int64)
    element = to.node("index", (), int64, joined(here_of(to.shape(out)), strides_of(to.shape(out))))
    node = to.node("random", (drawn, element), float32, b.kwargs["offset"])
    if (low, high) != (0.0, 1.0):  # rounded once
        scaled = to.map("mul", to.cast(node, float64), to.constant(high - low, float64))
        node = to.map("add", scaled, to.constant(low, float64))
    return to.cast(to.cast(node, out.dtype), computed(out.dtype))


def _bounds(b: BoundSymbol) -> tuple[float, float]:
    low, high = (*b.args[1:], *(0.0, 1.0)[len(b.args) - 1 :])
    return low, high


def _view(
    index: Callable[[Lowering, BoundSymbol, tuple[Index, ...]], Sequence[Index]],
) -> Callable[[Lowering, BoundSymbol], Node]:
    """A row of a view. index: in the operand, from the one in the result."""

    def row(to: Lowering, b: BoundSymbol) -> Node:
        a = b.args[0]
        return to.at(to.values[a], index(to, b, here_of(to.shape(_out(b)))), to.shape(a))

    return row


def _broadcast_index(to: Lowering, b: BoundSymbol, here: tuple[Index, ...]) -> list[Index]:
    return [Index.of(0) if n == 1 else here[d] for n, d in zip(to.shape(b.args[0]), b.args[2], strict=True)]


def _reshape_index(to: Lowering, b: BoundSymbol, here: tuple[Index, ...]) -> tuple[Index, ...]:
    return split(joined(here, strides_of(to.shape(_out(b)))), to.shape(b.args[0]))


def _permuted_index(to: Lowering, b: BoundSymbol, here: tuple[Index, ...]) -> list[Index]:
    inverse = {d: i for i, d in enumerate(b.args[1])}
    return [here[inverse[d]] for d in range(len(here))]


def _sliced_index(to: Lowering, b: BoundSymbol, here: tuple[Index, ...]) -> list[Index]:
    starts = [to.numbers.extent(n, 0) for n in b.args[1]]
    return [i * step + n for i, n, step in zip(here, starts, b.args[3], strict=True)]


def _flipped_index(to: Lowering, b: BoundSymbol, here: tuple[Index, ...]) -> list[Index]:
    dims, shape = {d % len(here) for d in b.args[1] if here}, to.shape(b.args[0])
    return [i * -1 + (n - 1) if d in dims else i for d, (i, n) in enumerate(zip(here, shape, strict=True))]


def _shifts(b: BoundSymbol) -> dict[int, int] | None:
    """By dimension, how far a roll moves elements; None where it is of a flat tensor, or sizes are symbolic."""
    shifts, dims = b.args[1], b.args[2] if len(b.args) > 2 else b.kwargs.get("dims", ())
    shifts, dims = (tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in (shifts, dims))
    shape = b.args[0].shape
    if not dims or any(type(n) is not int for n in (*shifts, *dims, *shape)):
        return None
    by: dict[int, int] = {}
    for shift, d in zip(shifts, dims, strict=True):
        by[d % len(shape)] = by.get(d % len(shape), 0) + shift
    return by


def _rolled_index(to: Lowering, b: BoundSymbol, here: tuple[Index, ...]) -> list[Index]:
    by, shape = _shifts(b), b.args[0].shape
    assert by is not None, "a primitive roll has dimensions"
    return [(i + -by[d] % shape[d]) % shape[d] if d in by else i for d, i in enumerate(here)]


def _cat(to: Lowering, b: BoundSymbol) -> Node:
    """The row of `prims.cat`: one node that chooses a piece by the index."""
    tensors, dim = b.args[0], b.args[1]
    here, kind = here_of(to.shape(_out(b))), computed(_out(b).dtype)
    pieces, starts, start = [], list[Size](), 0
    for t in tensors:
        shape = to.shape(t)
        if shape[dim] == 0:
            continue
        at = [*here[:dim], within(here[dim] + -start, shape[dim]), *here[dim + 1 :]]
        pieces.append(to.at(to.values[t], at, shape))
        starts.append(start)
        start = start + shape[dim]
    if len(pieces) == 1:
        return pieces[0]
    return to.node("concat", pieces, kind, (within(here[dim], start), tuple(starts), start))


def _pad(to: Lowering, b: BoundSymbol) -> Node:
    """One dimension after the other: what is before, the operand, what is behind."""
    a, value, padding = b.args
    node, kind = to.values[a], computed(_out(b).dtype)
    outside, shape = to.constant(value, kind), [*to.shape(a)]
    for d, pair in enumerate(padding):
        low, high = (to.numbers.extent(n, 0) for n in pair)
        if low == high == 0:
            continue
        n = shape[d]
        before = shape[:]
        shape[d] = low + n + high
        here = here_of(shape)
        has_low, has_high = (n != 0 and at_least(n, 0) for n in (low, high))
        first, last = low if has_low else 0, low + n if has_high else shape[d]
        at = [*here[:d], within(here[d] + -low, n), *here[d + 1 :]]
        inner = to.at(node, at, before)
        parts = [(0, outside)] * has_low + [(first, inner)] + [(last, outside)] * has_high
        if len(parts) == 1:
            node = inner
        else:
            node = to.node("concat", [p for _, p in parts], kind, (here[d], tuple(s for s, _ in parts), shape[d]))
    return to.at(node, here_of(to.shape(_out(b))), shape)


def _reduce(to: Lowering, b: BoundSymbol) -> Node:
    """The row of reductions: over axes of their own, without those of one element."""
    a, dims = b.args
    shape = to.shape(a)
    node, dims = to.values[a], sorted(d % len(shape) for d in dims)
    rest = iter(axes_of(to.shape(_out(b))))
    depth = node.depth + 1
    bound = tuple(axis("r", (depth, i), shape[d]) for i, d in enumerate(dims))
    own = iter(bound)
    index = [Index.of(next(own) if d in dims else next(rest)) for d in range(len(shape))]
    body = to.at(node, index, shape)
    bound = tuple(v for v in bound if v.size != 1)
    return to.node("reduce", (body,), body.dtype, (Combine(b.sym.name), bound)) if bound else body


def _scan(to: Lowering, b: BoundSymbol) -> Node:
    """The row of scans: a node along one axis, or memory that a kernel of scans has written."""
    a, dim = b.args
    shape = to.shape(a)
    value, d = to.cast(to.values[a], computed(_out(b).dtype)), dim % len(shape)
    if shape[d] == 1:
        return value
    if to.stores_scans:
        return to.stored(value, shape, (_SCANS[b.sym.id], d))
    bound, here = axis("r", (value.depth + 1, 0), shape[d]), here_of(shape)
    body = to.at(value, [*here[:d], Index.of(bound), *here[d + 1 :]], shape)
    return to.node("scan", (body,), body.dtype, (_SCANS[b.sym.id], bound, here[d], False))


def _product_gradient(to: Lowering, b: BoundSymbol) -> Node:
    """The gradient of a cumulative product: the product of the elements before one, times the sum over those from it
    on, `s = g + (the next element) * (the next s)`. Nothing is divided, so that an element may be 0."""
    g, a, dim, y = b.args
    d, kind, n = dim % len(a.shape), computed(_out(b).dtype), a.shape[dim]
    here = here_of(a.shape)
    cotangent, element, product = (to.cast(to.values[x], kind) for x in (g, a, y))
    if n == 1:
        return cotangent
    bound = axis("r", (max(x.depth for x in (cotangent, element, product)) + 1, 0), n)
    one = to.constant(1, kind)

    def at(x: Node, index: Index) -> Node:
        return to.at(x, [*here[:d], index, *here[d + 1 :]], a.shape)

    ahead = at(element, within(Index.of(bound) + 1, n))
    ahead = to.node("concat", (ahead, one), kind, (Index.of(bound), (0, n - 1), n))
    body = to.node("tuple", (ahead, at(cotangent, Index.of(bound))), kind)
    sums = to.node("scan", (body,), kind, ("linear", bound, here[d], True))
    before = to.node("concat", (one, at(product, within(here[d] + -1, n))), kind, (here[d], (0, 1), n))
    return to.map("mul", before, sums)


def _extremes(to: Lowering, b: BoundSymbol) -> tuple[Node, Node]:
    """The extreme so far, and the number of the last element that is one."""
    a, dim = b.args
    value, d, n = to.values[a], dim % len(a.shape), a.shape[dim]
    if n == 1:
        return value, to.constant(0, int64)
    combine, bound, here = b.sym.name.removeprefix("cum"), axis("r", (value.depth + 1, 0), n), here_of(a.shape)
    body = to.at(value, [*here[:d], Index.of(bound), *here[d + 1 :]], a.shape)
    numbered = to.node("tuple", (body, to.node("index", (), int64, Index.of(bound))), int64)
    extreme = to.node("scan", (body,), body.dtype, (Combine(f"a{combine}"), bound, here[d], False))
    return extreme, to.node("scan", (numbered,), int64, (f"arg{combine}", bound, here[d], False))


# ------------------------------------------------------------------------------------------------ products


def _matmul(to: Lowering, b: BoundSymbol) -> Node:
    x, y = b.args
    *batch, row, column = here_of(to.shape(_out(b)))

    def own(t: TensorProxy) -> list[Index]:
        """The index in the dimensions of the batch, which are broadcast."""
        sizes = to.shape(t)[:-2]
        return [Index.of(0) if n == 1 else i for n, i in zip(sizes, batch[len(batch) - len(sizes) :], strict=True)]

    return _dot(to, (x, [*own(x), row]), (y, [*own(y)]), [column])


def _linear(to: Lowering, b: BoundSymbol) -> Node:
    x, weight, bias = b.args
    *rows, column = here_of(to.shape(_out(b)))
    product = _dot(to, (x, rows), (weight, [column]))
    if bias is None:
        return product
    return to.map("add", product, to.cast(to.at(to.values[bias], [column], to.shape(bias)), product.dtype))


def _dot(
    to: Lowering,
    x: tuple[TensorProxy, list[Index]],
    y: tuple[TensorProxy, list[Index]],
    behind: Sequence[Index] = (),
) -> Node:
    """The product of two values of one type, each with its index in front of the dimension that is contracted; behind:
    the second one's index behind it. Operands are rounded to their type, as PyTorch's are."""
    (a, before), (b, other) = x, y
    bound = axis("r", (max(to.values[p].depth for p in (a, b)) + 1, 0), to.shape(a)[-1])
    k = Index.of(bound)
    operands = [
        to.cast(to.at(to.values[p], [*index, k, *rest], to.shape(p)), p.dtype)
        for p, index, rest in ((a, before, ()), (b, other, behind))
    ]
    is_rounded = a.dtype is float32 and tensor_cores_multiply_float32()
    return to.node("dot", operands, float32, (bound, is_rounded))


def is_product(b: BoundSymbol) -> bool:
    """Whether a primitive is a matrix product, which has a kernel of its own."""
    return b.sym.id in PRODUCTS


def _is_multiplied(b: BoundSymbol) -> bool:
    """Whether a product has a row: of matrices of known sizes, with one type of at most 32 bits."""
    x, y, *rest = b.args
    if has_numbers([t.shape for t in tensors_in((*b.inputs, *b.outputs))]):
        return False
    one_type = x.dtype is y.dtype is _out(b).dtype and x.dtype.category == FLOAT and x.dtype.bytes <= 4
    return (
        one_type
        and len(x.shape) >= 2
        and len(y.shape) >= 2
        and x.shape[-1] > 1
        and all(t is None or isinstance(t, TensorProxy) and t.dtype.category == FLOAT for t in rest)
    )


PRODUCTS = {"prims.matmul": _matmul, "prims.linear": _linear}
_SCANS = {"ltorch.cumsum": Combine.SUM, "ltorch.cumprod": Combine.PROD, "ltorch.logcumsumexp": "logsumexp"}


def is_of_elements(b: BoundSymbol) -> bool:
    """Whether each element of a primitive's result is computed of a few elements, which may be at other indices."""
    row = ROWS.get(b.sym.id)
    return (
        row is not None
        and row not in (_reduce, _scan, _product_gradient, _extremes, windows.lowered)
        and not (is_product(b) or is_scatter(b))
    )


def is_multiple(b: BoundSymbol) -> bool:
    """Whether a primitive keeps the order of rows, and is a multiple of its operand, element by element."""
    if b.sym.id == "prims.where":
        return any(type(a) in (int, float) and a == 0 for a in b.args[1:])
    return b.sym.id in ("prims.mul", "prims.reshape", "prims.broadcast_in_dim") or ROWS.get(b.sym.id) in (_cast, _same)


def is_map_or_view(b: BoundSymbol) -> bool:
    """Whether a primitive computes elements of elements at the same index, or reads them at another one."""
    return is_map(b) or b.sym.id in _READ_ELSEWHERE


_READ_ELSEWHERE = {
    "prims.broadcast_in_dim", "prims.reshape", "prims.squeeze", "prims.transpose", "prims.slice_prim", "prims.iota",
}  # fmt: skip


def has_batch(product: BoundSymbol) -> bool:
    """Whether both operands of a product have dimensions of a batch."""
    return PRODUCTS[product.sym.id] is _matmul and len(product.args[1].shape) > 2


def is_map(b: BoundSymbol) -> bool:
    """Whether a primitive computes each element of elements at the same index."""
    return ROWS[b.sym.id] in (_elementwise, _cast, _full, _same)


def is_scan(b: BoundSymbol) -> bool:
    """Whether a primitive is a scan, which not every target has."""
    return ROWS[b.sym.id] in (_scan, _product_gradient, _extremes)


def _is_scanned(b: BoundSymbol) -> bool:
    """Whether a scan has a row: not of one number, and other ones than sums and products have known sizes."""
    a, row = b.args[0], ROWS[b.sym.id]
    if row is _scan or not a.shape or has_numbers(a.shape):
        return row is _scan and len(a.shape) > 0
    if row is _extremes:
        return a.dtype.category != BOOL
    return all(x.dtype.category == FLOAT for x in b.inputs)  # type: ignore[union-attr]


def is_stored_scan(b: BoundSymbol) -> bool:
    """Whether a scan can be a store."""
    return _SCANS.get(b.sym.id) in SCANS


def _gathered(to: Lowering, a: TensorProxy, index: Sequence[Node | Index], depth: int) -> Node:
    """Elements of a value at indices of which some are nodes. depth: of gathers in these. Elements of what the region
    computes are computed at the indices, or read from memory where they are more than the value has."""
    node, shape = to.values[a], to.shape(a)
    kind = node.dtype
    computed_there = _computed_at(to, node, a, index, depth)
    if computed_there is not None:
        return computed_there
    if node.op == "cast" and node.args[0].op == "load" and not node.args[0].args:
        node = node.args[0]  # converted behind the gather
    if node.op != "load" or node.args:
        node = to.stored(node, shape)
    loaded = {d: axis("g", (node.number, depth, d), shape[d]) for d, i in enumerate(index) if isinstance(i, Node)}
    at = [Index.of(loaded[d]) if d in loaded else i for d, i in enumerate(index)]
    node = to.at(node, at, shape)  # type: ignore[arg-type]
    buffer, indices, _ = node.what
    nodes = tuple(index[d] for d in loaded)  # an index of a dimension of 1 is checked as well
    node = to.node("load", nodes, node.dtype, (buffer, indices, tuple(loaded.values())))  # type: ignore
    return to.cast(node, kind)


def _computed_at(to: Lowering, node: Node, a: TensorProxy, index: Sequence[Node | Index], depth: int) -> Node | None:
    """A value of elementwise functions at indices, by reading what it is computed of there: the loss of a class is that
    of one logit. None where it is read itself, or where the indices matter to more than what is read."""
    if node.op == "load" or node.op == "cast" and node.args[0].op == "load":
        return None
    shape = to.shape(a)
    if any(isinstance(i, Node) and n == 1 for i, n in zip(index, shape, strict=True)):
        return None  # nothing would read the index, and check it
    nodes = {axis("g", (node.number, depth, d), shape[d]): i for d, i in enumerate(index) if isinstance(i, Node)}
    at = [
        i if isinstance(i, Index) else Index.of(axis("g", (node.number, depth, d), shape[d]))
        for d, i in enumerate(index)
    ]
    there = to.at(node, at, shape)
    below = [n for n in in_order([there]) if not n.axes.isdisjoint(nodes)]
    if any(n.op in ("reduce", "scan", "concat", "index") for n in below):
        return None
    over = frozenset[Variable]().union(*(i.axes if isinstance(i, Node) else variables_of(i) for i in index))
    reads = sum(n.op == "load" for n in below)
    if hint(math.prod(v.size for v in over)) * reads > hint(math.prod(shape)):
        return None

    def read(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op != "load":
            return to.node(n.op, args, n.dtype, n.what)
        buffer, own, variables = n.what
        new = [v for v in nodes if any(v in variables_of(i) for i in own)]
        return to.node("load", (*args, *(nodes[v] for v in new)), n.dtype, (buffer, own, (*variables, *new)))

    return to.graph.transform(there, read, lambda n: not n.axes.isdisjoint(nodes))


def _along(to: Lowering, b: BoundSymbol) -> Node:
    """gather: the index is as large as the result."""
    a, dim, at = b.args[:3]
    index: list[Node | Index] = [*here_of(to.shape(at))]
    index[dim % len(a.shape)] = to.cast(to.values[at], int64)
    return _gathered(to, a, index, to.values[at].depth)


def _take(to: Lowering, b: BoundSymbol) -> Node:
    a, dim, at = b.args
    here = here_of(to.shape(_out(b)))
    index: list[Node | Index] = [*here]
    index[dim] = to.at(to.cast(to.values[at], int64), here[dim : dim + 1], to.shape(at))
    return _gathered(to, a, index, to.values[at].depth)


def _index(to: Lowering, b: BoundSymbol) -> Node:
    a, indices = b.args
    index = _at_indices(to, indices, to.shape(a), here_of(to.shape(_out(b))))
    return _gathered(to, a, index, max(to.values[i].depth for i in indices if i is not None))


def _at_indices(to: Lowering, indices: Sequence, shape: Sequence[Size], here: tuple[Index, ...]) -> list[Node | Index]:
    """The index in a tensor of this shape that index tensors read, from the one in the result."""
    where, first, count = indexed(indices)
    rest = (i for d, i in enumerate(here) if not first <= d < first + count)
    index: list[Node | Index] = []
    for d, n in enumerate(shape):
        if d not in where:
            index.append(next(rest))
            continue
        at = indices[d]
        there = to.shape(at)
        own = here[first + count - len(there) : first + count]
        own = [Index.of(0) if m == 1 else i for i, m in zip(own, there, strict=True)]
        node = to.at(to.cast(to.values[at], int64), own, there)
        size = to.constant(n, int64)
        below = to.map("lt", node, to.constant(0, int64))
        index.append(to.map("where", below, to.map("add", node, size), node))
    return index


# ------------------------------------------------------------------------------------------------ scatters


def _into(
    to: Lowering,
    b: BoundSymbol,
    start: Node | None,
    value: Node,
    size: Sequence[Size],
    index: Sequence[Node | Index],
    combine: Combine | None = Combine.SUM,
) -> Node:
    """A result that begins as `start`, or as zeros, and gets values of the shape `size` at an index."""
    out = _out(b)
    kind = out.dtype
    if combine is not None:  # there is an atomic operation for it
        kind = computed(kind) if kind.category != INTEGER or kind.bytes >= 4 else int32
    start = to.constant(0, kind) if start is None else to.cast(start, kind)
    return to.cast(to.scattered(start, to.shape(out), to.cast(value, kind), size, index, combine), computed(out.dtype))


def _added_along(to: Lowering, b: BoundSymbol) -> Node:
    """index_add, index_copy, the gradient of a read along a dimension: the index has one dimension, or none."""
    is_gradient = b.sym.id == "index_select_backward"
    source, at = (b.args[0] if is_gradient else b.args[3]), b.args[2]
    size, value = to.shape(source), to.values[source]
    dim, here = b.args[1] % len(size), here_of(size)
    index: list[Node | Index] = [*here]
    index[dim] = to.at(to.cast(to.values[at], int64), here[dim : dim + 1] if at.shape else (), to.shape(at))
    if (alpha := b.kwargs.get("alpha", 1)) != 1:
        value = to.map("mul", value, to.constant(alpha, value.dtype))
    combine = None if b.sym.id == "ltorch.index_copy" else Combine.SUM
    return _into(to, b, None if is_gradient else to.values[b.args[0]], value, size, index, combine)


def _added_at(to: Lowering, b: BoundSymbol) -> Node:
    """scatter, scatter_add, the gradient of gather: there is an index for each element that is written."""
    is_gradient = b.sym.id == "gather_backward"
    source, at = (b.args[0] if is_gradient else b.args[3]), b.args[2]
    size = to.shape(at)
    dim, here = b.args[1] % len(size), here_of(size)
    out = to.shape(_out(b))
    if is_gradient and (*out[:dim], 1, *out[dim + 1 :]) == size:
        return _only_element(to, b, dim)
    index: list[Node | Index] = [*here]
    index[dim] = to.cast(to.values[at], int64)
    if isinstance(source, TensorProxy):
        value = to.at(to.values[source], here, to.shape(source))
    else:
        value = to.constant(source, computed(_out(b).dtype))
    combine = None if b.sym.id == "ltorch.scatter" else Combine.SUM
    return _into(to, b, None if is_gradient else to.values[b.args[0]], value, size, index, combine)


def _only_element(to: Lowering, b: BoundSymbol, dim: int) -> Node:
    """The gradient of a gather of one element of each row, as a loss does of its class: `where(i == index, g, 0)`. The
    gather has checked the index. A sum of 0 and -0.0 is 0."""
    g, at, out = to.values[b.args[0]], to.cast(to.values[b.args[2]], int64), _out(b)
    zero = to.constant(0, computed(out.dtype))
    along = to.node("index", (), int64, here_of(to.shape(out))[dim])
    return to.map("where", to.map("eq", along, at), to.map("add", to.cast(g, zero.dtype), zero), zero)


def _put(to: Lowering, b: BoundSymbol) -> Node:
    """index_put, and the gradient of a read by index tensors."""
    is_gradient = b.sym.id == "index_backward"
    source, indices = (b.args[0], b.args[2]) if is_gradient else (b.args[2], b.args[1])
    shape, there = to.shape(_out(b)), to.shape(source)
    where, first, count = indexed(indices)
    common = _broadcast([to.shape(indices[d]) for d in where])
    rest = [n for d, n in enumerate(shape) if d not in where]
    size = (*rest[:first], *common, *rest[first:])
    here = here_of(size)
    index = _at_indices(to, indices, shape, here)
    lead = len(size) - len(there)
    own = [Index.of(0) if n == 1 else i for n, i in zip(there, here[lead:], strict=True)]
    value = to.at(to.values[source], own, there)
    if is_gradient:
        combine = None if any(b.args[3:]) or b.kwargs.get("distinct") else Combine.SUM
    else:
        combine = Combine.SUM if any(b.args[3:]) or b.kwargs.get("accumulate") else None
    return _into(to, b, None if is_gradient else to.values[b.args[0]], value, size, index, combine)


def _broadcast(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The common shape of shapes that PyTorch broadcasts."""
    rows = zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    return tuple(next((n for n in row if n != 1), 1) for row in rows)[::-1]


def _embedded(to: Lowering, b: BoundSymbol) -> Node:
    """The gradient of an embedding. What the padding's row gets is not added."""
    g, indices, _, padding, _ = b.args
    node, here = to.cast(to.values[indices], int64), here_of(to.shape(g))
    value = to.values[g]
    if padding >= 0:
        is_padding = to.map("eq", node, to.constant(padding, int64))
        value = to.map("where", is_padding, to.constant(0, value.dtype), value)
    return _into(to, b, None, value, to.shape(g), [node, here[-1]])


_SCATTERS = {
    "ltorch.index_add": _added_along, "ltorch.index_copy": _added_along, "index_select_backward": _added_along,
    "ltorch.scatter_add": _added_at, "ltorch.scatter": _added_at, "gather_backward": _added_at,
    "ltorch.index_put": _put, "index_backward": _put, "aten.embedding_dense_backward.default": _embedded,
}  # fmt: skip


def is_scatter(b: BoundSymbol) -> bool:
    """Whether a primitive writes at indices that are read, which not every target can."""
    return b.sym.id in _SCATTERS


def is_pool(b: BoundSymbol) -> bool:
    """Whether a primitive computes elements of windows, or is the gradient of one that does."""
    return ROWS.get(b.sym.id) is windows.lowered


def _is_scattered(b: BoundSymbol) -> bool:
    """Whether a scatter has a row: with one type, no truth values, and what is written of the shape that the rows
    expect."""
    out, row = _out(b), ROWS[b.sym.id]
    if not out.shape or out.dtype.category == BOOL:
        return False
    if row is _embedded:
        return b.args[4] is False and type(b.args[3]) is int and b.args[1].dtype.category == INTEGER
    if row is _added_along:
        a, dim, at, *_ = b.args
        source = b.args[3] if b.sym.id != "index_select_backward" else a
        size = (*out.shape[: dim % len(out.shape)], *(at.shape or (1,)), *out.shape[dim % len(out.shape) + 1 :])
        alpha = b.kwargs.get("alpha", 1)
        return tuple(source.shape) == size and _is_element(alpha, out.dtype)
    if row is _added_at:
        source, at = (b.args[3] if b.sym.id != "gather_backward" else b.args[0]), b.args[2]
        is_value = isinstance(source, TensorProxy) or _is_element(source, out.dtype)
        return is_value and len(at.shape) == len(out.shape) and not b.kwargs.get("reduce")
    indices = b.args[2] if b.sym.id == "index_backward" else b.args[1]
    those = [i for i in indices if i is not None]
    return bool(those) and all(i.dtype.category == INTEGER and i.dtype.bytes >= 4 for i in those)


def _out(b: BoundSymbol) -> TensorProxy:
    return b.outputs[0]  # type: ignore[return-value]


ROWS: dict[Any, Callable[[Lowering, BoundSymbol], Node | tuple[Node, ...]]] = {
    **{f"prims.{name}": _elementwise for name in (*FUNCTIONS, *FORMULAS, *NAMES)},
    **{f"prims.{name}": _same for name in ("clone_prim", "detach_prim", "image_layout", "stride_order", "positive")},
    **{f"prims.{name}": _reduce for name in Combine},
    "prims.convert_element_type": _cast, "prims.full": _full, "prims.iota": _iota,
    "prims.broadcast_in_dim": _view(_broadcast_index), "prims.reshape": _view(_reshape_index),
    "prims.squeeze": _view(_reshape_index), "prims.transpose": _view(_permuted_index),
    "prims.slice_prim": _view(_sliced_index), "prims.flip": _view(_flipped_index),
    "ltorch.roll": _view(_rolled_index),
    "prims.cat": _cat, "prims.pad": _pad, "ltorch.uniform_philox": _random,
    "ltorch.gather": _along, "prims.take": _take, "prims.index": _index, **dict.fromkeys(_SCANS, _scan),
    **_SCATTERS, **PRODUCTS, "aten.cumprod_backward.default": _product_gradient,
    "ltorch.cummax": _extremes, "ltorch.cummin": _extremes, **dict.fromkeys(windows.OPERATIONS, windows.lowered),
    "ltorch.interpolate": windows.nearest_row,
}  # fmt: skip
_OF_INPUTS = {"ltorch.gather", "prims.take", "prims.index"}  # elements at indices, of inputs of a region alone


DEAR_ROWS = {
    _reduce, _along, _take, _index, _scan, _product_gradient, _extremes, *_SCATTERS.values(), windows.lowered,
}  # fmt: skip

# ------------------------------------------------------------------------------------------------ which operations

_known: weakref.WeakKeyDictionary[BoundSymbol, bool] = weakref.WeakKeyDictionary()


def is_primitive(b: BoundSymbol) -> bool:
    """Whether a row lowers an operation."""
    answer = _known.get(b)
    if answer is None:
        answer = _known[b] = _is_primitive(b)
    return answer


def _is_primitive(b: BoundSymbol) -> bool:
    """Whether the operation has a row that takes its types, sizes and arguments."""
    if b.sym.id not in ROWS:
        return False
    tensors = [p for p in (*b.inputs, *b.outputs) if isinstance(p, TensorProxy)]
    row = ROWS[b.sym.id]
    if len(b.outputs) != (2 if row is _extremes or is_pool(b) and windows.has_two_results(b) else 1):
        return False
    if any(t.dtype.name not in TYPES or 0 in t.shape for t in tensors) or not _knows_numbers(b):
        return False
    if row is _elementwise:
        return _is_function(b)
    if is_product(b):
        return _is_multiplied(b)
    if b.sym.id == "ltorch.roll":
        return _shifts(b) is not None
    if row in (_scan, _extremes, _product_gradient):
        return _is_scanned(b)
    if is_scatter(b):
        return _is_scattered(b)
    if is_pool(b):
        return windows.is_lowered(b)
    if row is windows.nearest_row:
        return windows.is_enlarged(b)
    if row is _reduce:
        return b.args[0].dtype.category != BOOL and len(b.args[1]) > 0
    if row is _random:
        return _draws(b)
    if row is _full or row is _pad:
        return _is_number(b.args[1])
    return b.sym.id not in _OF_INPUTS or len(b.args[0].shape) > 0


def _draws(b: BoundSymbol) -> bool:
    """Whether numbers are drawn by a seed of 64 bits and a known offset."""
    seed, offset, numbers = b.kwargs["seed"], b.kwargs["offset"], _bounds(b)
    is_seed = seed.dtype is int64 and not seed.shape if isinstance(seed, TensorProxy) else _is_number_of(seed, 63)
    are_bounds = all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
    return is_seed and _is_number_of(offset, 31) and are_bounds and _out(b).dtype.category == FLOAT


def _is_number_of(x: Any, bits: int) -> bool:
    return type(x) is int and 0 <= x < 1 << bits


def _is_number(x: Any) -> bool:
    return isinstance(x, NumberProxy) or type(x) in (bool, int, float)


# the places of arguments that may be symbolic sizes; of other primitives, tensors alone have such sizes
_OF_SIZES: dict[str, tuple[int, ...]] = {
    "prims.reshape": (1,), "prims.broadcast_in_dim": (1,), "prims.slice_prim": (1, 2), "ltorch.uniform_philox": (0,),
    "gather_backward": (3,), "index_select_backward": (3,), "index_backward": (1,),
    "aten.embedding_dense_backward.default": (2,),
}  # fmt: skip


def _knows_numbers(b: BoundSymbol) -> bool:
    """Whether what is symbolic says how large something is or where it begins, or is a number that elements are
    combined with, or are."""
    if not has_numbers((b.args, b.kwargs)):
        return True
    row = ROWS[b.sym.id]
    if row is _elementwise:
        return not has_numbers(b.kwargs)
    if row is _full:
        return not isinstance(b.args[1], FloatProxy) or _out(b).dtype.category == FLOAT
    if not all(map(of_integers, numbers_in((b.args, b.kwargs), []))):
        return False
    if row is _pad:
        padding = [n for pair in b.args[2] for n in pair]
        return not has_numbers(b.args[1]) and all(not n.unbacked and n >= 0 for n in numbers_in(padding, []))
    if row is _iota:
        return not has_numbers(b.kwargs["step"]) and not isinstance(b.kwargs["start"], FloatProxy)
    others = [x for i, x in enumerate(b.args) if i not in _OF_SIZES.get(b.sym.id, ())]
    return not has_numbers(_without_tensors((*others, *b.kwargs.values())))


def _without_tensors(x: Any) -> Any:
    if isinstance(x, TensorProxy):
        return None
    return [*map(_without_tensors, x)] if isinstance(x, (list, tuple)) else x


# numbers that a function of integers takes in C, by the bits of these
_LIMITS = {
    "floor_divide": lambda bits: range(1, 1 << (bits - 1)), "remainder": lambda bits: range(1, 1 << (bits - 1)),
    "bitwise_left_shift": range, "bitwise_right_shift": range,
}  # fmt: skip


def _is_function(b: BoundSymbol) -> bool:
    """Whether a function or formula of the IR computes an elementwise operation for its types and numbers."""
    name = NAMES.get(b.sym.name, b.sym.name)
    tensors = [x for x in b.args if isinstance(x, TensorProxy)]
    numbers = [x for x in b.args if not isinstance(x, TensorProxy)]
    if not tensors or not all(map(_is_number, numbers)):
        return False
    if is_formula(b):
        return all(_fits(x, tensors[0].dtype) for x in numbers if type(x) is int)
    if name not in FUNCTIONS:
        return False
    function = FUNCTIONS[name]
    if any(t.dtype.category not in function.categories for t in tensors):
        return False
    if name in _LIMITS:
        return len(numbers) == 1 and type(b.args[1]) is int and b.args[1] in _LIMITS[name](8 * tensors[0].dtype.bytes)
    return all(_is_operand(x, name, [t.dtype for t in tensors]) for x in numbers)


def _is_operand(number: Any, name: str, kinds: Sequence[dtype]) -> bool:
    """Whether a function takes a number beside tensors of these types: a symbolic one may not fit into small ones."""
    if isinstance(number, NumberProxy) and any(k.category == INTEGER and k is not int64 for k in kinds):
        return False
    if type(number) is float or isinstance(number, FloatProxy):
        return name == "where" or kinds[-1].category == FLOAT
    return type(number) is not int or all(_fits(number, k) for k in kinds)


def _is_element(number: Any, kind: dtype) -> bool:
    """Whether a number can be an element of a type."""
    if type(number) is float:
        return kind.category == FLOAT
    return type(number) in (bool, int) and _fits(number, kind)


def _fits(number: int, kind: dtype) -> bool:
    if kind.category != INTEGER:
        return abs(number) <= 1 << 53 or kind.category == FLOAT
    bits = 8 * kind.bytes
    return -(1 << (bits - 1)) <= number < 1 << (bits - 1) if kind.signed else 0 <= number < 1 << bits


def lowers(
    b: BoundSymbol, computes: Callable[[BoundSymbol], bool], numbers: bool = False, products: bool = False
) -> bool:
    """Whether an operation, or each one of its decomposition, has a row. computes: whether the target has what a
    primitive is lowered to; numbers: whether it takes symbolic numbers; products: whether it takes matrix products."""
    if is_primitive(b):
        return (products or not is_product(b)) and computes(b)
    values = *b.inputs, *b.outputs
    if b.sym.decomposition is None or not all(isinstance(p, (TensorProxy, UnbackedNumber)) for p in values):
        return False
    return bool(b.subsymbols) and all(
        fusible(sub, numbers) and lowers(sub, computes, numbers, products) for sub in b.subsymbols
    )


def is_elementwise(b: BoundSymbol) -> bool:
    """Whether an operation is a primitive that computes each element from those at the same index."""
    return is_primitive(b) and ROWS[b.sym.id] is _elementwise


def primitives(b: BoundSymbol) -> list[BoundSymbol]:
    """The operations with rows that an operation is made of."""
    return [b] if is_primitive(b) else [p for sub in b.subsymbols for p in primitives(sub)]


# ------------------------------------------------------------------------------------------------ a region


def lowered(region: Region, numbers: Numbers | None = None, stores_scans: bool = False) -> Program:
    """The program of a region: inputs and outputs in its order. numbers: its symbolic ones. stores_scans: see
    `Lowering`. Raises Undecided."""
    to = Lowering(Graph(rewrite), numbers if numbers is not None else Numbers(region), stores_scans)
    inputs = []
    for i, p in enumerate(region.inputs):
        assert isinstance(p, TensorProxy), "regions of kernels read tensors"
        buffer = Buffer("input", i, to.shape(p), p.dtype)
        inputs.append(buffer)
        to.values[p] = _wide_load(to, buffer)
    for b in region.bound_symbols:
        _lower(to, b)
        for p in b.outputs:
            if isinstance(p, TensorProxy) and p in to.values:
                to.graph.set_stored_dtype(to.values[p], p.dtype)
    stores = []
    for i, p in enumerate(region.outputs):
        assert isinstance(p, TensorProxy), "regions of kernels make tensors"
        value = to.cast(to.values[p], p.dtype)
        if not _is_in_memory(to, value, i, to.shape(p)):
            stores.append(Store(Buffer("output", i, to.shape(p), p.dtype), axes_of(to.shape(p)), value))
    return Program(to.graph, inputs, [*to.scratch, *stores])


def _is_in_memory(to: Lowering, value: Node, number: int, shape: Sequence[Size]) -> bool:
    """Makes the memory of a scan or a scatter that of an output of this shape, where that is all that the output is."""
    if value.op != "load" or value.args:
        return False
    buffer, index, _ = value.what
    if buffer.kind != "scratch" or [i.key for i in index] != [i.key for i in here_of(buffer.shape)]:
        return False
    if tuple(buffer.shape) != tuple(shape):  # dimensions of 1 have an index of 0 in any shape
        return False
    if all(s.buffer is not buffer or s.scan is s.scatter is None for s in to.scratch):
        return False
    buffer.kind, buffer.number = "output", number
    return True


def _wide_load(to: Lowering, buffer: Buffer) -> Node:
    load = to.node("load", (), buffer.dtype, (buffer, here_of(buffer.shape), ()))
    return to.cast(load, computed(buffer.dtype))


def _lower(to: Lowering, b: BoundSymbol) -> None:
    """Adds the nodes of an operation's results to `to.values`: by its row, or by the operations it consists of."""
    if is_primitive(b):
        result = ROWS[b.sym.id](to, b)
        results = result if isinstance(result, tuple) else (result,)
        to.values |= dict(zip(b.outputs, results, strict=True))
        for out in b.outputs:
            _check_axes(to, out)
        return
    for sub in b.subsymbols:
        _lower(to, sub)
    for old, new in b.aliases.items():
        if isinstance(new, Proxy):
            to.values[old] = to.values[new]
        elif isinstance(old, TensorProxy):
            to.values[old] = to.constant(new, computed(old.dtype))
    for out in b.outputs:
        _check_axes(to, out)  # type: ignore[arg-type]
        value = to.values[out]  # type: ignore[index]
        if out.dtype.bytes == 2 and value.op == "cast" and (inner := value.args[0]).op == "cast":  # type: ignore
            if (
                inner.dtype is out.dtype
                and inner.args[0].dtype is float32
                and (  # type: ignore[union-attr]
                    b.sym is half_gradient or any(map(_computes, primitives(b)))
                )
            ):
                to.values[out] = inner.args[0]  # rounded where it is stored: the program does not convert


def _check_axes(to: Lowering, p: TensorProxy) -> None:
    """Raises Undecided where a value has an axis of a size that only the program knows to be that of its shape."""
    if not to.values[p].axes <= {*axes_of(to.shape(p))}:
        raise Undecided


def _computes(b: BoundSymbol) -> bool:
    return OpTags.SHAPE_OP not in b.sym.tags and b.sym.id != "prims.convert_element_type"
