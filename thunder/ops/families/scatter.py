"""Elements at places that tensors name: index_select, gather, scatter and their kin."""

from __future__ import annotations

import math

import torch

from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.dtypes import FLOAT, float32
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, primitive
from thunder.ops import backward, ltorch, prims
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.shape import expand, reshape
from thunder.ops.promotion import broadcast_shapes, is_number
from thunder.ops.registry import by_example, composite, prim, torch_prim
from thunder.ops.rules import batching, derivatives, effects, kernels, splitting
from thunder.ops.shape_rules import by_mask, is_empty, require, wrap_dim
from thunder.ops.torch_types import to_torch_dtype

INTEGERS = ("int64", "int32")


def _check_index(index) -> None:
    require(isinstance(index, TensorProxy))
    require(index.dtype.name in INTEGERS or is_empty(index))


# ----------------------------------------------------------------------------------------------------------------
# reading


@prim(torch.index_select)
def take(a, dim, index):
    """Slices of dimension `dim` at the places of a 1-D integer tensor."""
    return like(a, (*a.shape[:dim], index.shape[0], *a.shape[dim + 1 :]))


def _index_select_meta(a, dim, index):
    d = wrap_dim(dim, len(a.shape))
    _check_index(index)
    require(len(index.shape) <= 1)
    return like(a, (*a.shape[:d], index.shape[0] if index.shape else 1, *a.shape[d + 1 :])) if a.shape else like(a)


@composite(torch.index_select, torch.Tensor.index_select, meta=_index_select_meta)
def index_select(a, dim, index):
    if not a.shape:
        return reshape(take(reshape(a, (1,)), 0, reshape(index, (1,))), ())
    return take(a, wrap_dim(dim, len(a.shape)), reshape(index, (1,)) if not index.shape else index)


def _fits(a, index, d: int) -> None:
    if is_empty(index):
        return
    require(len(a.shape or (1,)) == len(index.shape or (1,)))
    for i, (m, n) in enumerate(zip(index.shape, a.shape, strict=False)):
        require(i == d or m is n or m <= n)


@torch_prim(torch.gather, torch.Tensor.gather)
def gather(a, dim, index, *, sparse_grad=False):
    d = wrap_dim(dim, len(a.shape))
    _check_index(index)
    _fits(a, index, d)
    return like(a, index.shape)


def _take_along_meta(a, indices, dim=None):
    _check_index(indices)
    if dim is None:
        return like(a, (indices.numel_value,))
    d = wrap_dim(dim, len(a.shape))
    require(len(a.shape) == len(indices.shape))
    common = broadcast_shapes((*a.shape[:d], 1, *a.shape[d + 1 :]), (*indices.shape[:d], 1, *indices.shape[d + 1 :]))
    return like(a, (*common[:d], indices.shape[d], *common[d + 1 :]))


@composite(torch.take_along_dim, torch.Tensor.take_along_dim, meta=_take_along_meta)
def take_along_dim(a, indices, dim=None):
    if dim is None:
        return gather(reshape(a, (-1,)), 0, _from_front(reshape(indices, (-1,)), a.numel_value))
    d = wrap_dim(dim, len(a.shape))
    common = _take_along_meta(a, indices, dim).shape
    return gather(
        expand(a, (*common[:d], a.shape[d], *common[d + 1 :])), d, expand(_from_front(indices, a.shape[d]), common)
    )


def _from_front(index, n):
    """Negative indices counted from the end of n elements."""
    return ltorch.where(index < 0, index + n, index)


@composite(torch.take, torch.Tensor.take, name="take")
def take_flat(a, index):
    require(index.dtype.name == "int64")
    return reshape(index_select(reshape(a, (-1,)), 0, _from_front(reshape(index, (-1,)), a.numel_value)), index.shape)


# ----------------------------------------------------------------------------------------------------------------
# writing


put = by_example(torch.put, torch.Tensor.put)
index_reduce = by_example(torch.index_reduce, torch.Tensor.index_reduce)
segment_reduce = by_example(torch.segment_reduce)


def _check_source(a, index, src) -> None:
    require(src.dtype is a.dtype)
    require(len(index.shape or (1,)) == len(src.shape or (1,)))
    require(not any(m is not n and m > n for m, n in zip(index.shape, src.shape, strict=False)))


def _scatter_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """scatter(a, dim, index, src_or_value): the value where it says so, positional."""
    a, dim, index, *rest = args
    options = {k: v for k, v in kwargs.items() if k not in ("src", "value", "dim", "index") and v is not None}
    source = rest[0] if rest and rest[0] is not None else kwargs.get("value", kwargs.get("src"))
    return (a, dim, index, source), options


@torch_prim(torch.scatter, torch.Tensor.scatter, canonicalize=_scatter_arguments)
def scatter(a, dim, index, src=None, *, value=None, reduce=None):
    d = wrap_dim(dim, len(a.shape))
    _check_index(index)
    _fits(a, index, d)
    if isinstance(src, TensorProxy):
        _check_source(a, index, src)
    elif not is_number(src):
        raise TypeError(f"scatter(): argument 'src' must be Tensor or Number, not {type(src).__name__}")
    return like(a)


@torch_prim(torch.scatter_add, torch.Tensor.scatter_add, autocast="cuda:widest", tags=(OpTags.REDUCTION_OP,))
def scatter_add(a, dim, index, src):
    d = wrap_dim(dim, len(a.shape))
    _check_index(index)
    _fits(a, index, d)
    _check_source(a, index, src)
    return like(a)


@torch_prim(torch.scatter_reduce, torch.Tensor.scatter_reduce)
def scatter_reduce(a, dim, index, src, reduce, *, include_self=True):
    d = wrap_dim(dim, len(a.shape))
    _check_index(index)
    _fits(a, index, d)
    _check_source(a, index, src)
    require(reduce in ("sum", "prod", "mean", "amax", "amin"))
    return like(a)


def _along(a, dim, index, source) -> None:
    d = wrap_dim(dim, len(a.shape))
    _check_index(index)
    require(len(index.shape) <= 1)
    require(source.dtype is a.dtype)
    wanted = (*a.shape[:d], index.shape[0] if index.shape else 1, *a.shape[d + 1 :]) if a.shape else ()
    require(len(source.shape) != len(wanted) or source.shape == wanted)


@torch_prim(torch.index_add, torch.Tensor.index_add, tags=(OpTags.REDUCTION_OP,))
def index_add(a, dim, index, source, *, alpha=1):
    _along(a, dim, index, source)
    return like(a)


@torch_prim(torch.index_copy, torch.Tensor.index_copy, autocast="cpu:widest")
def index_copy(a, dim, index, source):
    _along(a, dim, index, source)
    require(index.dtype.name == "int64")
    return like(a)


@torch_prim(torch.index_fill, torch.Tensor.index_fill)
def index_fill(a, dim, index, value):
    wrap_dim(dim, len(a.shape))
    require(index.dtype.name == "int64")
    return like(a)


@torch_prim(torch.masked_scatter, torch.Tensor.masked_scatter)
def masked_scatter(a, mask, source):
    require(mask.dtype.category == 0 and source.dtype is a.dtype)
    return like(a, broadcast_shapes(a.shape, mask.shape))


@torch_prim(torch.index_put, torch.Tensor.index_put, autocast="cuda:widest")
def index_put(a, indices, values, accumulate=False):
    require(len(indices) <= len(a.shape))
    require(values.dtype is a.dtype)
    return like(a)


# ----------------------------------------------------------------------------------------------------------------
# derivatives


@primitive(lambda g, dim, index, shape: like(g, tuple(shape)), tags=(OpTags.REDUCTION_OP,))
def gather_backward(g, dim, index, shape):
    return g.new_zeros(shape).scatter_add_(dim, index, g)


@primitive(lambda g, dim, index, shape: like(g, tuple(shape)), tags=(OpTags.REDUCTION_OP,))
def index_select_backward(g, dim, index, shape):
    return g.new_zeros(shape).index_add_(dim, index, g)


@backward.index_backward.decomposed_by
def _(g, shape, indices, distinct=False):
    """The sum at the places of one index tensor, added up in float32 without the sort that gives PyTorch an order."""
    places = [d for d, i in enumerate(indices) if i is not None]
    if distinct or len(places) > 1 or g.dtype.category != FLOAT:
        return None
    (dim,) = places
    index = indices[dim]
    if len(index.shape) != 1:
        count = math.prod(index.shape)
        index, g = reshape(index, (count,)), reshape(g, (*shape[:dim], count, *shape[dim + 1 :]))
    index = ltorch.where(index < 0, index + shape[dim], index)
    if g.dtype.bytes >= 4:
        return index_select_backward(g, dim, index, shape)
    return ltorch.to(index_select_backward(ltorch.to(g, float32), dim, index, shape), g.dtype)


@gather.vjp
def _(a, dim, index, **options):
    if options.get("sparse_grad"):
        return NotImplemented
    g = yield gather(a, dim, index)
    return (gather_backward(g, dim, index, a.shape),)


gradient_of_first(index_select, lambda g, y, a, dim, index: index_select_backward(g, dim, index, a.shape))


@scatter.vjp
def _(a, dim, index, src=None, *, value=None, reduce=None):
    if reduce is not None:
        return NotImplemented
    g = yield scatter(a, dim, index, src)
    of_src = None
    if isinstance(src, TensorProxy):
        of_src = gather(g, dim, index)
        if src.shape != index.shape:  # what the index does not reach is not read
            of_src = ltorch.pad(
                of_src,
                tuple(n for m, k in zip(reversed(src.shape), reversed(index.shape), strict=True) for n in (0, m - k)),
            )
    return scatter(g, dim, index, 0) if a.requires_grad else None, None, None, of_src


@scatter_add.vjp
def _(a, dim, index, src):
    g = yield scatter_add(a, dim, index, src)
    of_src = gather(g, dim, index)
    if src.shape != index.shape:
        of_src = ltorch.pad(
            of_src,
            tuple(n for m, k in zip(reversed(src.shape), reversed(index.shape), strict=True) for n in (0, m - k)),
        )
    return g, None, None, of_src


@scatter_reduce.vjp
def _(a, dim, index, src, reduce, *, include_self=True):
    """PyTorch's (torch/csrc/autograd/FunctionsManual.cpp, scatter_reduce_backward): equal extremes share a gradient."""
    if reduce == "prod" or src.shape != index.shape or not a.shape:
        return NotImplemented
    y = scatter_reduce(a, dim, index, src, reduce, include_self=include_self)
    g = yield y
    if reduce == "sum":
        of_a, of_src = g, gather(g, dim, index)
    elif reduce == "mean":
        count = ltorch.ones_like(g) if include_self else ltorch.zeros_like(g)
        count = scatter_add(count, dim, index, ltorch.ones_like(src))
        count = ltorch.where(count == 0, 1, count)
        of_a, of_src = g / count, gather(g, dim, index) / gather(count, dim, index)
    else:
        is_src = ltorch.to(src == gather(y, dim, index), dtype=to_torch_dtype(src.dtype))
        is_a = ltorch.to(a == y, dtype=to_torch_dtype(a.dtype))
        shared = g / scatter_add(is_a, dim, index, is_src)
        of_a, of_src = is_a * shared, is_src * gather(shared, dim, index)
    return of_a if include_self or not a.requires_grad else scatter(of_a, dim, index, 0), None, None, of_src


@index_add.vjp
def _(a, dim, index, source, *, alpha=1):
    if not a.shape:
        return NotImplemented
    g = yield index_add(a, dim, index, source, alpha=alpha)
    of_source = index_select(g, dim, index)
    return g, None, None, of_source if alpha == 1 else of_source * alpha


@index_copy.vjp
def _(a, dim, index, source):
    if not a.shape:
        return NotImplemented
    g = yield index_copy(a, dim, index, source)
    return index_fill(g, dim, index, 0) if a.requires_grad else None, None, None, index_select(g, dim, index)


# what a value gets that was written to places of which some may be named twice
@primitive(lambda g, dim, index: like(g, ()))
def filled_value(g, dim, index):
    return g.index_select(dim, index.unique(sorted=False)).sum()


@index_fill.vjp
def _(a, dim, index, value):
    g = yield index_fill(a, dim, index, value)
    of_value = filled_value(g, dim, index) if isinstance(value, TensorProxy) and value.requires_grad else None
    return index_fill(g, dim, index, 0) if a.requires_grad else None, None, None, of_value


@index_put.vjp
def _(a, indices, values, accumulate=False):
    if any(i is not None and i.dtype.category == 0 for i in indices):
        return NotImplemented
    g = yield index_put(a, indices, values, accumulate)
    of_a = g if accumulate or not a.requires_grad else index_put(g, indices, ltorch.zeros_like(values))
    key = tuple(slice(None) if i is None else i for i in indices)
    return of_a, None, backward.sum_to(ltorch.getitem(g, key), values.shape) if values.requires_grad else None


effects.checks_data.add(ltorch.take, prims.take)
effects.checks_data.add(index_add, scatter_add, gather_backward, index_select_backward)
kernels.layout.set("row-major", index_add, scatter_add, gather_backward, index_select_backward)
kernels.layout.set("row-major", ltorch.gather, index_select, prims.take)
cost.rules.set(
    Cost(kernels=2), index_add, scatter_add, scatter, index_copy, index_put, index_select_backward, gather_backward
)
cost.rules.set(Cost(kernels=8), backward.index_backward, backward.embedding_backward)  # they sort
cost.rules.set(Cost(selects=True), ltorch.gather, ltorch.index_select, ltorch.take_along_dim)
effects.synchronises.add(ltorch.index_put, when=by_mask)
effects.synchronises.add(ltorch.segment_reduce)
effects.may_raise.add(
    ltorch.gather, ltorch.take_along_dim, ltorch.scatter, ltorch.scatter_reduce, ltorch.index_copy, ltorch.index_fill,
    ltorch.index_put, ltorch.index_reduce, ltorch.masked_scatter, ltorch.segment_reduce,
)  # fmt: skip


batching.unknown_to_vmap.add(
    index_select, when=lambda b: any(isinstance(x, TensorProxy) and not x.shape for x in b.args[1:])
)
derivatives.composed.set(True, take_along_dim)


splitting.rule.set(splitting.along, gather, scatter, scatter_add)
