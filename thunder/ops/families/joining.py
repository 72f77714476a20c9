"""Several tensors made one, and one made several."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from thunder.core import dtypes
from thunder.core.proxies import METHODS, TensorProxy, concrete, like, same_shape
from thunder.core.symbol import BoundSymbol
from thunder.core.unbacked import as_size, fresh_size
from thunder.ops import backward, ltorch, prims
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.data import convert
from thunder.ops.families.shape import MOVES, VIEW, expand, reshape, slice_dim, unsqueeze
from thunder.ops.promotion import same_device
from thunder.ops.registry import alias, composite, prim
from thunder.ops.rules import batching, derivatives, effects, kernels, splitting
from thunder.ops.shape_rules import ceil_div, require, wrap_dim

# ----------------------------------------------------------------------------------------------------------------
# joining


def _common_dtype(tensors):
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        if t.dtype is not dtype:
            dtype = dtypes.promote(dtype, t.dtype)
    return dtype


def _joined(tensors, dim) -> tuple[list, int]:
    """The tensors that count (1-D ones without elements are left out, as PyTorch does) and the dimension they are
    joined along."""
    require(len(tensors))
    for t in tensors:
        require(isinstance(t, TensorProxy) and t.shape)
    not_empty = [t for t in tensors if len(t.shape) != 1 or t.shape[0] != 0] or list(tensors)
    return not_empty, wrap_dim(dim, len(not_empty[0].shape))


def _cat_meta(tensors, dim=0):
    """The type of the result of `cat`. Raises PyTorch's errors where shapes do not fit."""
    not_empty, d = _joined(tensors, dim)
    first = not_empty[0]
    shape = first.shape
    total = shape[d]
    for t in not_empty[1:]:
        require(len(t.shape) == len(shape))
        for k, n in enumerate(t.shape):
            require(k == d or n is shape[k] or n == shape[k])
        total = total + t.shape[d]
    return like(first, (*shape[:d], total, *shape[d + 1 :]), _common_dtype(tensors), same_device(*tensors))


@composite(torch.cat, torch.concat, torch.concatenate, meta=_cat_meta, tags=MOVES, autocast="cpu:widest")
def cat(tensors, dim=0):
    not_empty, d = _joined(tensors, dim)
    target = _common_dtype(tensors)
    return prims.cat([convert(t, target) for t in not_empty], d)


def _stack_meta(tensors, dim=0):
    require(len(tensors))
    first = tensors[0]
    for t in tensors[1:]:
        require(t.shape == first.shape)
    d = wrap_dim(dim, len(first.shape) + 1)
    return like(
        first, (*first.shape[:d], len(tensors), *first.shape[d:]), _common_dtype(tensors), same_device(*tensors)
    )


@composite(torch.stack, meta=_stack_meta, tags=MOVES, autocast="cpu:widest")
def stack(tensors, dim=0):
    d = wrap_dim(dim, len(tensors[0].shape) + 1)
    return cat([unsqueeze(t, d) for t in tensors], d)


def _stacking(name: str, rank: int, dim: int, *functions) -> None:
    """hstack, vstack, dstack: at least `rank` dimensions each, joined along `dim`."""
    raise_rank = getattr(torch, f"atleast_{rank}d")

    @composite(*functions, name=name, tags=MOVES)
    def stacked(tensors):
        from thunder.ops.registry import lookup

        parts = list(lookup(raise_rank)(*tensors)) if len(tensors) > 1 else [lookup(raise_rank)(tensors[0])]
        return cat(parts, 0 if dim == 1 and len(parts[0].shape) == 1 else dim)


_stacking("hstack", 1, 1, torch.hstack)
_stacking("vstack", 2, 0, torch.vstack, torch.row_stack)
_stacking("dstack", 3, 2, torch.dstack)


@composite(torch.column_stack, tags=MOVES)
def column_stack(tensors):
    return cat([t if len(t.shape) > 1 else reshape(t, (t.shape[0], 1) if t.shape else (1, 1)) for t in tensors], 1)


# ----------------------------------------------------------------------------------------------------------------
# splitting


def _parts(a, dim: int, sizes) -> tuple:
    shape = a.shape
    return tuple([like(a, (*shape[:dim], n, *shape[dim + 1 :])) for n in sizes])


def _sliced_parts(a, dim: int, sizes) -> tuple:
    out, start = [], 0
    for n in sizes:
        out.append(slice_dim(a, dim, start, start + n))
        start = start + n
    return tuple(out)


def _split_sizes(a, size_or_sections, dim: int) -> list:
    """The sizes of the slices that `split` returns. Raises where they do not add up."""
    n = a.shape[dim]
    if isinstance(size_or_sections, Sequence):
        total = sum(size_or_sections)
        require(total is n or (total != n) is not True)
        require(not any(type(k) is int and k < 0 for k in size_or_sections))
        return list(size_or_sections)
    size = size_or_sections
    if size is n:
        return [n]
    require(size >= 0 and (size != 0 or n == 0))
    if size == 0:
        return [0]
    count = max(1, concrete(ceil_div(n, size)))
    return [size] * (count - 1) + [n - size * (count - 1)]


def _split_meta(a, split_size_or_sections, dim=0):
    require(a.shape)
    d = wrap_dim(dim, len(a.shape))
    return _parts(a, d, _split_sizes(a, split_size_or_sections, d))


def _split_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    for n in args[1] if len(args) > 1 and isinstance(args[1], Sequence) else ():
        as_size(n, "split_with_sizes expects split_sizes have only non-negative entries")
    return args, kwargs


@composite(
    torch.split, torch.functional.split, torch.unsafe_split, meta=_split_meta, canonicalize=_split_arguments, tags=VIEW
)
def split(a, split_size_or_sections, dim=0):
    d = wrap_dim(dim, len(a.shape))
    return _sliced_parts(a, d, _split_sizes(a, split_size_or_sections, d))


@alias(torch.Tensor.split, torch.Tensor.unsafe_split)
def split_method(a, split_size, dim=0):
    return split(a, split_size, dim)


@alias(
    torch.Tensor.split_with_sizes,
    torch.Tensor.unsafe_split_with_sizes,
    torch.split_with_sizes,
    torch.unsafe_split_with_sizes,
)
def split_with_sizes(a, split_sizes, dim=0):
    return split(a, split_sizes, dim)


def _chunk_sizes(a, chunks, dim: int) -> list:
    require(chunks > 0)
    n = a.shape[dim]
    if n % chunks == 0:
        return [n // chunks] * concrete(chunks)
    size = ceil_div(n, chunks)
    count = concrete(ceil_div(n, size))
    return [size] * (count - 1) + [n - size * (count - 1)]


def _chunk_meta(a, chunks, dim=0):
    require(a.shape)
    d = wrap_dim(dim, len(a.shape))
    return _parts(a, d, _chunk_sizes(a, chunks, d))


@composite(torch.chunk, torch.Tensor.chunk, torch.unsafe_chunk, torch.Tensor.unsafe_chunk, meta=_chunk_meta, tags=VIEW)
def chunk(a, chunks, dim=0):
    d = wrap_dim(dim, len(a.shape))
    return _sliced_parts(a, d, _chunk_sizes(a, chunks, d))


def _tensor_split_sizes(a, indices_or_sections, dim: int) -> list:
    """The bounds of the slices that `tensor_split` returns."""
    n = concrete(a.shape[dim])
    if isinstance(indices_or_sections, Sequence):
        bounds = [0, *indices_or_sections, n]
        clamped = [max(0, min(n, b + n if b < 0 else b)) for b in bounds[1:-1]]
        starts, ends = [0, *clamped], [*clamped, n]
        return [(s, max(s, e)) for s, e in zip(starts, ends, strict=True)]
    sections = indices_or_sections
    require(sections > 0)
    small, extra = divmod(n, sections)
    ends = [small * (i + 1) + min(i + 1, extra) for i in range(sections)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _tensor_split_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    for name in ("indices", "sections"):
        if name in kwargs:
            return (args[0], kwargs[name], *args[2:]), {}
    if len(args) > 1 and isinstance(args[1], TensorProxy):
        args = (args[0], METHODS["tolist"](args[1]), *args[2:])
    return args, kwargs


@composite(
    torch.tensor_split,
    torch.Tensor.tensor_split,
    canonicalize=_tensor_split_arguments,
    tags=VIEW,
)
def tensor_split(a, indices_or_sections=None, dim=0):
    d = wrap_dim(dim, len(a.shape))
    return tuple(slice_dim(a, d, s, e) for s, e in _tensor_split_sizes(a, indices_or_sections, d))


def _axis_split(name: str, rank: int, axis: int) -> None:
    """hsplit, vsplit, dsplit: tensor_split along one dimension, in equal parts where a number is given."""

    def apply(a, indices_or_sections):
        d = 0 if len(a.shape) == 1 else axis
        require(len(a.shape) >= rank)
        require(isinstance(indices_or_sections, Sequence) or a.shape[d] % indices_or_sections == 0)
        return tensor_split(a, indices_or_sections, d)

    def arguments(args, kwargs):
        return (*args, *(kwargs[k] for k in ("indices", "sections") if k in kwargs)), {}

    composite(getattr(torch, name), getattr(torch.Tensor, name), name=name, canonicalize=arguments, tags=VIEW)(apply)


_axis_split("hsplit", 1, 1)
_axis_split("vsplit", 2, 0)
_axis_split("dsplit", 3, 2)


def _unbind_meta(a, dim=0):
    require(a.shape)
    d = wrap_dim(dim, len(a.shape))
    shape = (*a.shape[:d], *a.shape[d + 1 :])
    return tuple([like(a, shape) for _ in range(concrete(a.shape[d]))])


@composite(torch.unbind, torch.Tensor.unbind, meta=_unbind_meta, tags=VIEW)
def unbind(a, dim=0):
    d = wrap_dim(dim, len(a.shape))
    return tuple(prims.squeeze(slice_dim(a, d, i, i + 1), (d,)) for i in range(concrete(a.shape[d])))


def _selected(a, dim, index) -> tuple:
    require(a.shape)
    d = wrap_dim(dim, len(a.shape))
    n = a.shape[d]
    require(index < n and index >= -n)
    return d, index + n if index < 0 else index


def _select_meta(a, dim, index):
    if isinstance(index, TensorProxy):
        d = wrap_dim(dim, len(a.shape))
    else:
        d, _ = _selected(a, dim, index)
    return like(a, (*a.shape[:d], *a.shape[d + 1 :]))


@composite(torch.select, torch.Tensor.select, meta=_select_meta, tags=VIEW)
def select(a, dim, index):
    if isinstance(index, TensorProxy):
        d = wrap_dim(dim, len(a.shape))
        return prims.squeeze(ltorch.index_select(a, d, reshape(index, (1,))), (d,))
    d, i = _selected(a, dim, index)
    return prims.squeeze(slice_dim(a, d, i, i + 1), (d,))


def _narrowed(a, dim, start, length) -> tuple:
    require(a.shape)
    d = wrap_dim(dim, len(a.shape))
    n = a.shape[d]
    require(type(start) is not int or type(n) is not int or -n <= start <= n)
    start = start + n if start < 0 else start
    require(length >= 0 and start + length <= n)
    return d, start


def _narrow_meta(a, dim, start, length):
    d, _ = _narrowed(a, dim, start, length)
    return like(a, (*a.shape[:d], length, *a.shape[d + 1 :]))


def _narrow_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if len(args) > 2 and isinstance(args[2], TensorProxy):
        if args[2].shape or args[2].dtype.category != 1:
            raise RuntimeError("start must be an 0-dim integral Tensor.")
        args = (*args[:2], METHODS["item"](args[2]), *args[3:])
    return args, kwargs


@composite(torch.narrow, torch.Tensor.narrow, meta=_narrow_meta, canonicalize=_narrow_arguments, tags=VIEW)
def narrow(a, dim, start, length):
    d, first = _narrowed(a, dim, start, length)
    return slice_dim(a, d, first, first + length)


# ----------------------------------------------------------------------------------------------------------------
# repeating elements


def _interleaved(a, repeats, dim, output_size):
    shape, d = ((a.numel_value,), 0) if dim is None else (a.shape, wrap_dim(dim, len(a.shape)))
    if isinstance(repeats, TensorProxy):
        return shape, d, output_size
    require(repeats >= 0)
    return shape, d, (shape[d] if shape else 1) * repeats


@prim(lambda repeats, output_size: torch.repeat_interleave(repeats, output_size=output_size))
def repeated_places(repeats, output_size):
    """0, 1, 2 ... each as often as `repeats` says, `output_size` numbers in all, which None leaves to the data."""
    return like(repeats, (fresh_size() if output_size is None else output_size,))


def _repeat_interleave_meta(a, repeats=None, dim=None, *, output_size=None):
    if repeats is None:
        return repeated_places.meta(a, output_size)  # type: ignore[misc]
    shape, d, n = _interleaved(a, repeats, dim, output_size)
    return like(a, (*shape[:d], fresh_size() if n is None else n, *shape[d + 1 :]))


@composite(torch.repeat_interleave, torch.Tensor.repeat_interleave, meta=_repeat_interleave_meta, tags=MOVES)
def repeat_interleave(a, repeats=None, dim=None, *, output_size=None):
    """The decomposition of `repeat_interleave`: an expanded view for one number, an index for a tensor of repeats."""
    if repeats is None:
        return repeated_places(a, output_size)
    shape, d, n = _interleaved(a, repeats, dim, output_size)
    a = a if same_shape(shape, a.shape) else prims.reshape(a, shape)
    if isinstance(repeats, TensorProxy):
        repeats = (
            repeats
            if len(repeats.shape) == 1 and repeats.shape[0] != 1
            else expand(reshape(repeats, (1,)), (a.shape[d],))
        )
        return ltorch.index_select(a, d, repeated_places(repeats, output_size))
    spread = expand(unsqueeze(a, d + 1), (*shape[: d + 1], repeats, *shape[d + 1 :]))
    return prims.reshape(spread, (*shape[:d], n, *shape[d + 1 :]))


# --- derivatives


@cat.vjp
def _(tensors, dim=0):
    g = yield cat(tensors, dim)
    d, start, parts = dim % len(g.shape), 0, []
    for x in tensors:
        if len(x.shape) != len(g.shape):  # an empty one-dimensional tensor, which cat passes over
            parts.append(ltorch.zeros_like(x))
            continue
        parts.append(narrow(g, d, start, x.shape[d]))
        start = start + x.shape[d]
    return (parts,)


gradient_of_first(stack, lambda g, y, tensors, dim=0: list(unbind(g, dim)))


def _rejoined(symbol):
    """split, chunk ...: the pieces' cotangents put together again."""

    def rule(a, *args, **kwargs):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        pieces = yield symbol(a, *args, **kwargs)
        return (cat(list(pieces), dim),)

    symbol.vjp(rule)


for _symbol in (split, chunk):
    _rejoined(_symbol)


@tensor_split.vjp
def _(a, indices_or_sections=None, dim=0):
    pieces = yield tensor_split(a, indices_or_sections, dim)
    d = wrap_dim(dim, len(a.shape))
    bounds = _tensor_split_sizes(a, indices_or_sections, d)
    if all(end == start for (_, end), (start, _) in zip(bounds, bounds[1:])):
        return (cat(list(pieces), d),)
    spread = (backward.slice_backward(g, a.shape, d, *bound, 1) for g, bound in zip(pieces, bounds))  # they overlap
    return (functools.reduce(ltorch.add, spread),)


gradient_of_first(unbind, lambda pieces, y, a, dim=0: stack(list(pieces), dim))


@narrow.vjp
def _(a, dim, start, length):
    g = yield narrow(a, dim, start, length)
    d = dim % len(a.shape)
    start = start % a.shape[d] if isinstance(start, int) and start < 0 else start
    return (backward.slice_backward(g, a.shape, d, start, start + length, 1),)


@repeat_interleave.vjp
def _(a, repeats, dim=None, *, output_size=None):
    if isinstance(repeats, TensorProxy):
        return NotImplemented
    g = yield repeat_interleave(a, repeats, dim, output_size=output_size)
    shape, d, _ = _interleaved(a, repeats, dim, output_size)
    summed = ltorch.sum(reshape(g, (*shape[:d], *(shape[d : d + 1] or (1,)), repeats, *shape[d + 1 :])), d + 1)
    return (summed if same_shape(summed.shape, a.shape) else reshape(summed, a.shape),)


kernels.layout.set("memory format", ltorch.cat, prims.cat)
kernels.layout.set("as decomposition", stack)
# PyTorch composes these of the same operations
derivatives.composed.set(
    True,
    column_stack,
    ltorch.hstack,
    ltorch.vstack,
    ltorch.dstack,
    ltorch.hsplit,
    ltorch.vsplit,
    ltorch.dsplit,
)
effects.may_raise.add(repeated_places)  # negative numbers, and another sum than `output_size`


@batching.rule(ltorch.cat, stack)
def _joined_of_batch(batch: batching.Batch, operation: BoundSymbol):
    tensors, dim = operation.args[0], operation.args[1] if len(operation.args) > 1 else 0
    if any(not isinstance(x, TensorProxy) or x.shape == (0,) for x in tensors):
        return None
    whole = [batch.at(x) if x in batch.moved else ltorch.expand(x, (batch.size, *x.shape)) for x in tensors]
    return operation.sym(whole, batching.shifted(dim, len(operation.output.shape)))


batching.unknown_to_vmap.add(column_stack)


@splitting.rule(repeat_interleave)
def _repeated_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Each element several times: repeat_interleave with a number and a dimension."""
    part = split.part(operation.inputs[0])
    if (
        part is None
        or len(operation.args) != 3
        or type(operation.args[1]) is not int
        or type(operation.args[2]) is not int
        or operation.kwargs
    ):
        return None
    return split.computed(operation, {operation.inputs[0]: part.value}, part.axis, part.dim)


@splitting.rule(ltorch.cat, prims.cat)
def _joined_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """cat along another dimension than that of the parts; what has no elements and one dimension plays no part in
    it."""
    tensors = [p for p in dict.fromkeys(operation.args[0]) if tuple(p.shape) != (0,)]
    parts = {p: part for p in tensors if (part := split.part(p)) is not None}
    dim = (operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)) % len(
        operation.output.shape
    )
    places = {(part.axis, part.dim) for part in parts.values()}
    if len(places) != 1 or (axis_and_dim := places.pop())[1] == dim:
        return None
    table = {p: parts[p].value if p in parts else split.cut(p, *axis_and_dim) for p in tensors}
    return split.computed(operation, table, *axis_and_dim)


splitting.several.set(splitting.several_along, ltorch.split, ltorch.chunk)
splitting.rule.set(splitting.along, narrow)

gradient_of_first(select, lambda g, y, a, dim, index: backward.select_backward(g, a.shape, dim, index))
