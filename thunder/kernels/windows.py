"""Pooling and nearest neighbours of images in the kernel IR: rows of `lower`.

A small window is unrolled: an element of the result is computed of all elements of its window, in PyTorch's order, so
that it fuses with its neighbours as an elementwise function does. What is outside of the operand is a piece of a
concatenation. A large window that overlaps no other one is a reduction over its axes. Gradients are gathered: an
element gets its parts from all windows that it is in, and nothing is scattered. That of an image that is enlarged by
whole factors is a sum over windows that are apart.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thunder.core.dtypes import FLOAT, dtype, int32, int64
from thunder.core.proxies import TensorProxy, has_numbers, number_value
from thunder.core.symbol import BoundSymbol
from thunder.kernels.index import Index, join, strides_of, within
from thunder.kernels.ir import Combine, Node, axis
from thunder.kernels.lowering import Lowering, Size, here_of
from thunder.kernels.sizes import at_least

UNROLLED = 25  # elements of a window, at most


class Windows(NamedTuple):
    """The windows of a pool, by dimension. size: of the operand; count: of windows."""

    size: tuple[int, ...]
    count: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.kernel)

    @property
    def are_apart(self) -> bool:
        """Whether each element of the operand is in at most one window, and windows have nothing else."""
        dims = zip(self.size, self.count, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return all(k <= s and p == 0 and d == 1 and (m - 1) * s + k <= n for n, m, k, s, p, d in dims)

    def candidates(self) -> tuple[int, ...]:
        """By dimension, how many windows an element may be in."""
        return tuple(
            -(-(d * (k - 1) + 1) // s) for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)
        )


class Pool(NamedTuple):
    """A pool, or its gradient. source: the operand, or the cotangent. divisor: of an average, where it is one number;
    divisors: by dimension, that of each window, where it is not."""

    windows: Windows
    source: TensorProxy
    divisor: tuple[float, ...] = ()
    divisors: tuple[tuple[int, ...], ...] = ()


# ------------------------------------------------------------------------------------------------ arguments


def _numbers(x: Any, rank: int) -> tuple[int, ...]:
    return tuple(x) * (rank if len(x) == 1 else 1) if isinstance(x, (tuple, list)) else (x,) * rank


def _windows(a: TensorProxy, out: TensorProxy, rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1):
    strides = kernel if stride is None or stride == () or stride == [] else stride
    each = (_numbers(x, rank) for x in (kernel, strides, padding, dilation))
    return Windows(tuple(a.shape[-rank:]), tuple(out.shape[-rank:]), *each)  # type: ignore[arg-type]


def _average(source: TensorProxy, w: Windows, count_include_pad: bool, divisor_override: int | None) -> Pool:
    """How a pool averages: by one divisor, or by those of each dimension where windows reach beyond the edge."""
    if divisor_override is not None:
        return Pool(w, source, (float(divisor_override),))
    divisors = []
    for n, m, k, s, p in zip(w.size, w.count, w.kernel, w.stride, w.padding, strict=True):
        starts = [i * s - p for i in range(m)]
        if count_include_pad:
            divisors.append(tuple(min(at + k, n + p) - at for at in starts))
        else:
            divisors.append(tuple(min(at + k, n) - max(at, 0) for at in starts))
    if all(len({*each}) == 1 for each in divisors):
        return Pool(w, source, (float(math.prod(each[0] for each in divisors)),))
    return Pool(w, source, (), tuple(divisors))


def _adaptive(a: TensorProxy, out: TensorProxy, source: TensorProxy, rank: int) -> Pool:
    """Where sizes are divided; other windows differ, and have the kernel 0."""
    sizes = [(n, m) for n, m in zip(a.shape[-rank:], out.shape[-rank:], strict=True)]
    kernel = tuple(n // m if n % m == 0 else 0 for n, m in sizes)
    is_mean = all(m == 1 for _, m in sizes)
    divisor = (float(math.prod(kernel)),) if is_mean else tuple(float(k) for k in kernel if k != 1)
    return Pool(_windows(a, out, rank, kernel, None, 0), source, divisor or (1.0,))


def _pool_of_average(rank: int) -> Callable[[BoundSymbol], Pool]:
    def read(a, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        return kernel_size, stride, padding, count_include_pad, divisor_override

    def pool(b: BoundSymbol) -> Pool:
        kernel, stride, padding, includes, override = read(*b.args, **b.kwargs)
        return _average(b.args[0], _windows(b.args[0], b.outputs[0], rank, kernel, stride, padding), includes, override)

    return pool


def _pool_of_average_gradient(rank: int) -> Callable[[BoundSymbol], Pool]:
    def pool(b: BoundSymbol) -> Pool:
        g, a, kernel, stride, padding, _, includes, override = b.args
        return _average(g, _windows(a, g, rank, kernel, stride, padding), includes, override)

    return pool


def _pool_of_maximum(rank: int) -> Callable[[BoundSymbol], Pool]:
    def read(a, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
        return kernel_size, stride, padding, dilation

    def pool(b: BoundSymbol) -> Pool:
        return Pool(_windows(b.args[0], b.outputs[0], rank, *read(*b.args, **b.kwargs)), b.args[0])

    return pool


def _pool_of_maximum_gradient(rank: int) -> Callable[[BoundSymbol], Pool]:
    def pool(b: BoundSymbol) -> Pool:
        g, a, kernel, stride, padding, dilation, _, _ = b.args
        return Pool(_windows(a, g, rank, kernel, stride, padding, dilation), g)

    return pool


def _adaptive_pool(rank: int) -> Callable[[BoundSymbol], Pool]:
    return lambda b: _adaptive(b.args[0], b.outputs[0], b.args[0], rank)


def _adaptive_gradient(rank: int) -> Callable[[BoundSymbol], Pool]:
    return lambda b: _adaptive(b.args[1], b.args[0], b.args[0], rank)


class Nearest(NamedTuple):
    """An image with the nearest elements of another: the sizes of both, and whether PyTorch finds these elements at
    `i * size // count`, which it computes with rounded numbers."""

    size: tuple[int, ...]
    count: tuple[int, ...]
    is_exact: bool


def _nearest(size: Sequence[int], count: Sequence[int], scales: Sequence[float | None]) -> Nearest:
    is_exact = all(type(n) is int for n in (*size, *count)) and all(
        _is_at_quotients(n, m, 1.0 / scale if scale else n / m) for n, m, scale in zip(size, count, scales, strict=True)
    )
    return Nearest(tuple(size), tuple(count), is_exact)


@functools.lru_cache(256)
def _is_at_quotients(n: int, m: int, scale: float) -> bool:
    at = torch.arange(m)
    return n == m or torch.equal((at.float() * scale).floor().long().clamp(max=n - 1), at * n // m)


def _enlarged(b: BoundSymbol) -> Nearest | None:
    """The arguments of an interpolation; None where it is not to nearest elements."""

    def read(a, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute=None, antialias=False):
        return scale_factor, mode, recompute, antialias

    factor, mode, recompute, antialias = read(*b.args, **b.kwargs)
    size, count = b.args[0].shape[2:], b.outputs[0].shape[2:]
    if mode != "nearest" or antialias or has_numbers(factor):
        return None
    scales = (None,) * len(size) if factor is None or recompute else _numbers(factor, len(size))
    return _nearest(size, count, scales)


def _enlarged_gradient(b: BoundSymbol) -> Pool:
    """Windows whose kernels are 0 where a factor is no whole number, or elements are not those of their quotients."""
    g, count, shape, *scales = b.args
    size, count = tuple(shape[2:]), tuple(g.shape[2:])
    nearest = _nearest(size, count, scales or (None,) * len(size))
    is_whole = nearest.is_exact and all(m % n == 0 for n, m in zip(size, count, strict=True))
    kernel = tuple(m // n if is_whole else 0 for n, m in zip(size, count, strict=True))
    return Pool(Windows(count, size, kernel, kernel, (0,) * len(size), (1,) * len(size)), g)


# ------------------------------------------------------------------------------------------------ nodes


def _inside_or(to: Lowering, value: Node, outside: Node, index: Sequence[Index], shape: Sequence[Size]) -> Node:
    """A value where an index is inside of a shape, and another one elsewhere."""
    for i, n in reversed([*zip(index, shape, strict=True)]):
        before, behind = not at_least(i.low, 0), not at_least(n - 1, i.high)
        if not before and not behind:
            continue
        pieces = [(i.low, outside)] * before + [(0, value)] + [(n, outside)] * behind
        starts, end = tuple(start for start, _ in pieces), i.high + 1 if behind else n
        value = to.node("concat", [piece for _, piece in pieces], value.dtype, (i, starts, end))
    return value


def _at(to: Lowering, a: TensorProxy, index: Sequence[Index], outside: Node | None = None) -> Node:
    """A value at an index; outside: what it is where that is not inside of the value."""
    value = to.at(to.values[a], index, to.shape(a))
    return value if outside is None else _inside_or(to, value, outside, index, to.shape(a))


def _by_number(to: Lowering, numbers: Sequence[float], along: Index, kind: dtype) -> Node:
    """The number at an index, as a concatenation of the runs of equal ones."""
    starts = [0] + [i for i, (n, m) in enumerate(itertools.pairwise(numbers), 1) if n != m]
    pieces = [to.constant(numbers[start], kind) for start in starts]
    if len(pieces) == 1:
        return pieces[0]
    return to.node("concat", pieces, kind, (within(along, len(numbers)), tuple(starts), len(numbers)))


def _divided(to: Lowering, value: Node, pool: Pool, window: Sequence[Index], is_part: bool = False) -> Node:
    """A sum divided as PyTorch does: by one number, by one after the other, or by that of a window. is_part: it is one
    of several parts of an element, each of which is multiplied by the inverse where windows have different divisors: a
    division takes as long as reading two elements."""
    kind = value.dtype
    for number in pool.divisor:
        value = to.map("true_divide", value, to.constant(number, kind))
    if not pool.divisors:
        return value
    numbers = [[1.0 / n for n in each] if is_part else [float(n) for n in each] for each in pool.divisors]
    each = [_by_number(to, n, at, kind) for n, at in zip(numbers, window, strict=True)]
    divisor = functools.reduce(lambda a, b: to.map("mul", a, b), each)
    return to.map("mul" if is_part else "true_divide", value, divisor)


def _elements(pool: Pool, here: Sequence[Index]) -> Iterator[tuple[tuple[int, ...], list[Index]]]:
    """The elements of the window of a result, by their numbers in the window, with their index in the operand."""
    w, rank = pool.windows, len(pool.windows.size)
    for offsets in itertools.product(*map(range, w.kernel)):
        index = [
            i * s + (o * d - p)
            for i, o, s, p, d in zip(here[-rank:], offsets, w.stride, w.padding, w.dilation, strict=True)
        ]
        yield offsets, [*here[:-rank], *index]


def _reduced(to: Lowering, pool: Pool, here: Sequence[Index], combine: Combine) -> Node:
    """A reduction over the axes of windows that are apart."""
    w, rank, node = pool.windows, len(pool.windows.size), to.values[pool.source]
    bound = [axis("r", (node.depth + 1, i), k) for i, k in enumerate(w.kernel)]
    index = [i * s + Index.of(r) for i, s, r in zip(here[-rank:], w.stride, bound, strict=True)]
    body = to.at(node, [*here[:-rank], *index], to.shape(pool.source))
    return to.node("reduce", (body,), body.dtype, (combine, tuple(r for r in bound if r.size != 1)))


def _average_row(to: Lowering, pool: Pool, here: tuple[Index, ...]) -> Node:
    kind = to.values[pool.source].dtype
    zero = total = to.constant(0.0, kind)
    if pool.windows.elements > UNROLLED:
        total = _reduced(to, pool, here, Combine.SUM)
    else:
        for _, index in _elements(pool, here):
            total = to.map("add", total, _at(to, pool.source, index, zero))
    return _divided(to, total, pool, here[-len(pool.windows.size) :])


def _maximum_row(to: Lowering, pool: Pool, here: tuple[Index, ...]) -> Node:
    kind = to.values[pool.source].dtype
    least = best = to.constant(-math.inf, kind)
    if pool.windows.elements > UNROLLED:
        return _reduced(to, pool, here, Combine.AMAX)
    for _, index in _elements(pool, here):
        best = to.map("maximum", best, _at(to, pool.source, index, least))
    return best


def _indexed_maximum_row(to: Lowering, pool: Pool, here: tuple[Index, ...]) -> tuple[Node, Node]:
    """The maximum and its number in the operand's last dimensions: that of the first maximum, of the last NaN, and of
    the window's first element where all are -inf. Selected is the distance from the window's start."""
    w, rank = pool.windows, len(pool.windows.size)
    steps, window, kind = strides_of(w.size), here[-rank:], to.values[pool.source].dtype
    least = best = to.constant(-math.inf, kind)
    number = to.constant(0, int32)
    for m, s, p, d, step, at in zip(w.count, w.stride, w.padding, w.dilation, steps, window, strict=True):
        firsts = [-(-max(0, p - i * s) // d) * d * step for i in range(m)]
        number = to.map("add", number, _by_number(to, firsts, at, int32))
    for offsets, index in _elements(pool, here):
        value = _at(to, pool.source, index, least)
        own = sum(o * d * step for o, d, step in zip(offsets, w.dilation, steps, strict=True))
        is_larger = to.map("logical_or", to.map("gt", value, best), to.map("isnan", value))
        best = to.map("where", is_larger, value, best)
        number = to.map("where", is_larger, to.constant(own, int32), number)
    starts = [at * s + -p for at, s, p in zip(window, w.stride, w.padding, strict=True)]
    return best, to.map("add", to.cast(number, int64), to.node("index", (), int64, join(starts, steps)))


def _gathering(pool: Pool, here: Sequence[Index]) -> Iterator[tuple[list[tuple[Index, Index]], list[Index]]]:
    """The windows that an element may be in, in PyTorch's order: by dimension the index in the operand from the first
    window's start and that of the window; and the index in the cotangent, which may be outside."""
    w, rank = pool.windows, len(pool.windows.size)
    for back in itertools.product(*(reversed(range(m)) for m in w.candidates())):
        index, window = [], []
        for i, t, s, p in zip(here[-rank:], back, w.stride, w.padding, strict=True):
            index.append((i + p) // s + -t)
            window.append(((i + p) % s + t * s, index[-1]))
        yield window, [*here[:-rank], *index]


def _average_gradient_row(to: Lowering, pool: Pool, here: tuple[Index, ...]) -> Node:
    """An element's parts: the cotangents of its windows, each divided."""
    w, shape, kind = pool.windows, to.shape(pool.source), to.values[pool.source].dtype
    zero = total = to.constant(0.0, kind)
    for window, index in _gathering(pool, here):
        numbers = [within(at, m) for (_, at), m in zip(window, w.count, strict=True)]
        part = _divided(to, _at(to, pool.source, index), pool, numbers, is_part=True)
        part = _inside_or(to, part, zero, index, shape)
        for (offset, _), k in zip(window, w.kernel, strict=True):
            part = _inside_or(to, part, zero, [offset], [k])
        total = to.map("add", total, part)
    return total


def _maximum_gradient_row(to: Lowering, pool: Pool, here: tuple[Index, ...], indices: TensorProxy) -> Node:
    """The cotangents of the windows of which an element is the maximum."""
    w, rank, shape = pool.windows, len(pool.windows.size), to.shape(pool.source)
    kind = to.values[pool.source].dtype
    zero = total = to.constant(0.0, kind)
    number = to.node("index", (), int64, join(here[-rank:], strides_of(w.size)))
    for _, index in _gathering(pool, here):
        is_own = to.map("eq", _at(to, indices, index), number)
        part = to.map("where", is_own, _at(to, pool.source, index), zero)
        total = to.map("add", total, _inside_or(to, part, zero, index, shape))
    return total


def nearest_row(to: Lowering, b: BoundSymbol) -> Node:
    nearest, here = _enlarged(b), here_of(to.shape(b.outputs[0]))
    assert nearest is not None, "it has a row"
    index = [i * n // m for i, n, m in zip(here[2:], nearest.size, nearest.count, strict=True)]
    return to.at(to.values[b.args[0]], [*here[:2], *index], to.shape(b.args[0]))


# ------------------------------------------------------------------------------------------------ the table


class _Row(NamedTuple):
    """pool: reads an operation's arguments. lower: its node; of two results, their nodes. may_reduce: whether a large
    window is a reduction."""

    pool: Callable[[BoundSymbol], Pool]
    lower: Callable[..., Node | tuple[Node, Node]]
    may_reduce: bool = False
    is_gradient: bool = False


_ROWS: dict[str, _Row] = {}
for _rank in (1, 2, 3):
    _maximum, _average_pool = _pool_of_maximum(_rank), _pool_of_average(_rank)
    _ROWS |= {
        f"ltorch.avg_pool{_rank}d": _Row(_average_pool, _average_row, True),
        f"ltorch.adaptive_avg_pool{_rank}d": _Row(_adaptive_pool(_rank), _average_row, True),
        f"ltorch.max_pool{_rank}d": _Row(_maximum, _maximum_row, True),
        f"ltorch.max_pool{_rank}d_with_indices": _Row(_maximum, _indexed_maximum_row),
        f"ltorch.adaptive_max_pool{_rank}d_with_indices": _Row(_adaptive_pool(_rank), _indexed_maximum_row),
        f"aten.avg_pool{_rank}d_backward.default": _Row(
            _pool_of_average_gradient(_rank), _average_gradient_row, is_gradient=True
        ),
        f"aten.adaptive_max_pool{_rank}d_backward.default": _Row(
            _adaptive_gradient(_rank), _maximum_gradient_row, is_gradient=True
        ),
    }
for _rank in (2, 3):  # the gradients of pools of one dimension are those of two
    _ROWS |= {
        f"ltorch.adaptive_avg_pool{_rank}d_backward": _Row(
            _adaptive_gradient(_rank), _average_gradient_row, is_gradient=True
        ),
        f"ltorch.max_pool{_rank}d_with_indices_backward": _Row(
            _pool_of_maximum_gradient(_rank), _maximum_gradient_row, is_gradient=True
        ),
    }


def lowered(to: Lowering, b: BoundSymbol) -> Node | tuple[Node, Node]:
    """The row of a pool or its gradient."""
    row, indices = _ROWS[b.sym.id], [x for x in b.args[2:] if isinstance(x, TensorProxy)]
    return row.lower(to, row.pool(b), here_of(to.shape(b.outputs[0])), *indices)


_ROWS |= {
    f"aten.upsample_nearest{rank}d_backward.default": _Row(_enlarged_gradient, _average_row, True) for rank in (1, 2, 3)
}
OPERATIONS = frozenset(_ROWS)


def is_enlarged(b: BoundSymbol) -> bool:
    """Whether an interpolation has a row: to nearest elements, at quotients of indices."""
    nearest = _enlarged(b)
    return nearest is not None and nearest.is_exact


def has_two_results(b: BoundSymbol) -> bool:
    return _ROWS[b.sym.id].lower is _indexed_maximum_row


def is_lowered(b: BoundSymbol) -> bool:
    """Whether a pool has a row: of floats, of known sizes beside the batch, and with windows that are unrolled or
    apart."""
    row, (first, *_), out = _ROWS[b.sym.id], b.args, b.outputs[0]
    tensors = [x for x in b.args if isinstance(x, TensorProxy)]
    floats = [t for t in (*tensors, out) if t.dtype is not int64]
    if any(t.dtype.category != FLOAT or t.dtype is not first.dtype for t in floats):
        return False
    rank = int(next(c for c in b.sym.id if c.isdigit()))
    if any(type(n) is not int for t in (*tensors, out) for n in t.shape[-rank:]):
        return False
    windows = row.pool(b).windows
    if 0 in windows.kernel or math.prod(windows.size) >= 1 << 31:
        return False
    count = math.prod(windows.candidates()) if row.is_gradient else windows.elements
    return count <= UNROLLED or row.may_reduce and windows.are_apart


def visits(b: BoundSymbol) -> int:
    """How many elements of windows PyTorch's kernel of a pool or its gradient visits."""
    pool = _ROWS[b.sym.id].pool(b)
    gradient = _ROWS[b.sym.id].lower is _maximum_gradient_row
    size = b.args[0].shape if _ROWS[b.sym.id].is_gradient else b.outputs[0].shape  # type: ignore[union-attr]
    return math.prod(map(number_value, size)) * (1 if gradient else pool.windows.elements)
