"""Reductions and scans."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable

import torch

from thunder.core import dtypes
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy, like, same_shape
from thunder.core.symbol import OpTags, Symbol
from thunder.ops.backward import sum_to
from thunder.ops.data import convert
from thunder.ops.define import LTORCH, PRIMS, alias, composite, declare, prim, torch_prim
from thunder.ops.dims import is_empty
from thunder.ops.promotion import broadcast_shapes, same_device, to_float
from thunder.ops.shape_prims import broadcast_in_dim
from thunder.ops.ternary import where
from thunder.ops.torch_types import named_results, to_torch_dtype

__all__ = ["canonical_dims", "reduced_shape", "values_indices"]

_RED = (OpTags.REDUCTION_OP,)


def canonical_dims(a: TensorProxy, dim) -> tuple[int, ...]:
    """Dimensions as non-negative ints; None and () mean all. Raises IndexError as PyTorch does."""
    rank = len(a.shape)
    if type(dim) is int and -rank <= dim < rank:
        return (dim % rank,)
    if dim is None or dim == ():
        return tuple(range(rank))
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    out = []
    for d in dims:
        if not -(rank or 1) <= d < (rank or 1):
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-(rank or 1)}, {(rank or 1) - 1}], but got {d})"
            )
        d = d % (rank or 1)
        if d in out:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
        out.append(d)
    return tuple(out) if rank else ()


def reduced_shape(a: TensorProxy, dims: tuple[int, ...], keepdim: bool) -> tuple:
    if keepdim:
        return tuple([1 if i in dims else n for i, n in enumerate(a.shape)])
    return tuple([n for i, n in enumerate(a.shape) if i not in dims])


def _with_kept(a: TensorProxy, out: TensorProxy, dims: tuple[int, ...], keepdim: bool) -> TensorProxy:
    """The reduced dimensions again, as 1, where they are kept."""
    if not keepdim or not dims:
        return out
    rest = tuple(i for i in range(len(a.shape)) if i not in dims)
    return broadcast_in_dim(out, reduced_shape(a, dims, True), rest)


def _reduce_prim(name: str, run: Callable) -> Symbol:
    return prim(lambda a, dims: run(a, dims), name=name, tags=_RED)(
        lambda a, dims: like(a, reduced_shape(a, dims, False))
    )


def _sum_all(a, dims):
    return torch.sum(a, dims, dtype=a.dtype) if dims else a.clone()


def _prod_all(a, dims):
    for d in sorted(dims, reverse=True):
        a = torch.prod(a, d, dtype=a.dtype)
    return a


sum_prim = _reduce_prim("sum", _sum_all)
prod_prim = _reduce_prim("prod", _prod_all)
amax_prim = _reduce_prim("amax", lambda a, dims: torch.amax(a, dims) if dims else a.clone())
amin_prim = _reduce_prim("amin", lambda a, dims: torch.amin(a, dims) if dims else a.clone())


def _reduction(prim_symbol: Callable, a, dim, keepdim: bool, dtype) -> TensorProxy:
    dims = canonical_dims(a, dim)
    return _with_kept(a, prim_symbol(convert(a, dtype), dims), dims, keepdim)


def _sum_dtype(a: TensorProxy, dtype):
    return to_dtype(dtype) if dtype is not None else dtypes.int64 if a.dtype.category < dtypes.FLOAT else a.dtype


def _sum_meta(a, dim=None, keepdim=False, *, dtype=None):
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), _sum_dtype(a, dtype))


@composite(torch.sum, torch.Tensor.sum, meta=_sum_meta, tags=_RED, autocast="cuda:float32")
def sum(a, dim=None, keepdim=False, *, dtype=None):
    return _reduction(sum_prim, a, dim, keepdim, _sum_dtype(a, dtype))


def _sum_to_size_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    a, *size = args
    size = kwargs["size"] if kwargs else size
    return (a, tuple(size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)), {}


def _sum_to_size_meta(a, size):
    lead = len(a.shape) - len(size)
    if lead < 0 or builtins.any((n == m) is False and (n == 1) is False for n, m in zip(size, a.shape[lead:])):
        raise RuntimeError(f"size {{{list(size)}}} is not expandable to size {{{list(a.shape)}}}.")
    if size and same_shape(a.shape, size):  # to no dimensions PyTorch always adds up
        return a
    if a.dtype.category < dtypes.FLOAT:  # what is not added up keeps its type
        _decided(a.shape, size)
    return like(a, size, _sum_dtype(a, None))


def _decided(a: tuple, b: tuple) -> bool:
    """Whether two shapes are equal. Raises DataDependentError where that is data-dependent."""
    return len(a) == len(b) and builtins.all([bool(n == m) for n, m in zip(a, b)])


@composite(
    torch.Tensor.sum_to_size, meta=_sum_to_size_meta, canonicalize=_sum_to_size_arguments, autocast="cuda:float32"
)
def sum_to_size(a, size):
    """The sum over what was stretched from `size`; the tensor itself where nothing was."""
    if not size:
        return sum(a)
    return a if _decided(a.shape[len(a.shape) - len(size) :], size) and len(a.shape) == len(size) else sum_to(a, size)


sum_to_size.autocast_when = lambda kind, args, kwargs: not (args[1] and same_shape(args[0].shape, args[1]))


@sum_to_size.vjp
def _(a, size):
    g = yield sum_to_size(a, size)
    return (LTORCH["expand"](g, a.shape),)


@composite(torch.nansum, torch.Tensor.nansum, meta=_sum_meta, tags=_RED)
def nansum(a, dim=None, keepdim=False, *, dtype=None):
    return sum(where(LTORCH["isnan"](a), 0, a) if a.dtype.category >= 2 else a, dim, keepdim, dtype=dtype)


def _mean_meta(a, dim=None, keepdim=False, *, dtype=None):
    kind = to_dtype(dtype) if dtype is not None else a.dtype
    if kind.category < dtypes.FLOAT:
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype."
        )
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), kind)


@composite(torch.mean, torch.Tensor.mean, meta=_mean_meta, tags=_RED)
def mean(a, dim=None, keepdim=False, *, dtype=None):
    dims = canonical_dims(a, dim)
    return sum(a, dims, keepdim, dtype=dtype) / math.prod(a.shape[d] for d in dims)


@composite(torch.nanmean, torch.Tensor.nanmean, meta=_mean_meta, tags=_RED)
def nanmean(a, dim=None, keepdim=False, *, dtype=None):
    count = sum(LTORCH["logical_not"](LTORCH["isnan"](a)), dim, keepdim)
    return nansum(a, dim, keepdim, dtype=dtype) / count


def _prod_meta(a, dim=None, keepdim=False, *, dtype=None):
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), _sum_dtype(a, dtype))


@composite(torch.prod, torch.Tensor.prod, meta=_prod_meta, tags=_RED, autocast="float32")
def prod(a, dim=None, keepdim=False, *, dtype=None):
    return _reduction(prod_prim, a, dim, keepdim, _sum_dtype(a, dtype))


def _check_not_empty(name: str, a: TensorProxy, dim, dims: tuple[int, ...]) -> None:
    """An extreme of nothing does not exist. Symbolic sizes are never 0."""
    if 0 in [n for n in a.shape if type(n) is int]:
        if dim is None or dim == ():
            raise RuntimeError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim "
                "with the 'dim' argument."
            )
        for d in dims:
            if type(a.shape[d]) is int and a.shape[d] == 0:
                raise IndexError(f"{name}(): Expected reduction dim {d} to have non-zero size.")


def _extreme_meta(a, dim=(), keepdim=False):
    dims = canonical_dims(a, dim)
    _check_not_empty("amax", a, dim, dims)
    return like(a, reduced_shape(a, dims, keepdim))


@composite(torch.amax, torch.Tensor.amax, meta=_extreme_meta, tags=_RED)
def amax(a, dim=(), keepdim=False):
    return _reduction(amax_prim, a, dim, keepdim, a.dtype)


@composite(torch.amin, torch.Tensor.amin, meta=_extreme_meta, tags=_RED)
def amin(a, dim=(), keepdim=False):
    return _reduction(amin_prim, a, dim, keepdim, a.dtype)


# --- values with indices


def values_indices(function: str, a: TensorProxy, shape: tuple):
    """What sort, topk, max ... return: values of `a`, and where they stand."""
    return named_results(function, like(a, shape), like(a, shape, dtypes.int64))


def _with_indices(name: str, function: Callable) -> Symbol:
    """max, min, median ... along one dimension: (values, indices)."""

    def meta(a, dim, keepdim=False):
        return values_indices(name, a, reduced_shape(a, canonical_dims(a, dim), keepdim))

    return torch_prim(name=f"{name}_dim", fn=function, tags=_RED)(meta)


max_dim, min_dim = _with_indices("max", torch.max), _with_indices("min", torch.min)
median_dim, mode_dim, nanmedian_dim = (
    _with_indices("median", torch.median),
    _with_indices("mode", torch.mode),
    _with_indices("nanmedian", torch.nanmedian),
)


def _full_reduction(name: str, function: Callable) -> Symbol:
    """max(a), min(a), median(a): one value."""
    return torch_prim(name=f"{name}_all", fn=function, tags=_RED)(lambda a: like(a, ()))


max_all, min_all = _full_reduction("max", torch.max), _full_reduction("min", torch.min)
median_all, nanmedian_all = _full_reduction("median", torch.median), _full_reduction("nanmedian", torch.nanmedian)


def _extreme(whole: Symbol, along: Symbol, binary: Symbol | None) -> Callable:
    name = whole.name.partition("_")[0]

    def function(input, dim=None, keepdim=False, other=None):
        if type(input) is not TensorProxy:
            raise TypeError(
                f"{name}() received an invalid combination of arguments - got ({type(input).__name__}, "
                f"{type(dim).__name__})"
            )
        if isinstance(dim, TensorProxy) or other is not None:
            return binary(input, dim if other is None else other)  # type: ignore[misc]
        return whole(input) if dim is None else along(input, dim, keepdim)

    return function


max = alias(torch.max, torch.Tensor.max)(_extreme(max_all, max_dim, LTORCH["maximum"]))
min = alias(torch.min, torch.Tensor.min)(_extreme(min_all, min_dim, LTORCH["minimum"]))
median = alias(torch.median, torch.Tensor.median)(_extreme(median_all, median_dim, None))
nanmedian = alias(torch.nanmedian, torch.Tensor.nanmedian)(_extreme(nanmedian_all, nanmedian_dim, None))


@alias(torch.mode, torch.Tensor.mode)
def mode(input, dim=-1, keepdim=False):
    return mode_dim(input, dim, keepdim)


def _aminmax_meta(a, *, dim=None, keepdim=False):
    dims = canonical_dims(a, dim)
    if 0 in [a.shape[d] for d in dims if type(a.shape[d]) is int]:
        raise RuntimeError(
            "aminmax(): cannot compute aminmax over an empty dimension as the operation has no identity."
        )
    shape = reduced_shape(a, dims, keepdim)
    return named_results("aminmax", like(a, shape), like(a, shape))


@composite(torch.aminmax, torch.Tensor.aminmax, meta=_aminmax_meta, tags=_RED)
def aminmax(a, *, dim=None, keepdim=False):
    return named_results(
        "aminmax", amin(a, () if dim is None else dim, keepdim), amax(a, () if dim is None else dim, keepdim)
    )


def _index_meta(a, dim=None, keepdim=False):
    dims = tuple(range(len(a.shape))) if dim is None else canonical_dims(a, dim)
    return like(a, reduced_shape(a, dims, keepdim), dtypes.int64)


@torch_prim(torch.argmax, torch.Tensor.argmax, tags=_RED)
def argmax(a, dim=None, keepdim=False):
    return _index_meta(a, dim, keepdim)


@torch_prim(torch.argmin, torch.Tensor.argmin, tags=_RED)
def argmin(a, dim=None, keepdim=False):
    return _index_meta(a, dim, keepdim)


# --- truth


def _truth_meta(a, dim=None, keepdim=False):
    kind = dtypes.uint8 if a.dtype is dtypes.uint8 else dtypes.bool8
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), kind)


@composite(torch.all, torch.Tensor.all, meta=_truth_meta, tags=_RED)
def all(a, dim=None, keepdim=False):
    return LTORCH["logical_not"](any(LTORCH["logical_not"](a), dim, keepdim))


@composite(torch.any, torch.Tensor.any, meta=_truth_meta, tags=_RED)
def any(a, dim=None, keepdim=False):
    return convert(LTORCH["ne"](sum(LTORCH["ne"](a, 0), dim, keepdim), 0), _truth_meta(a, dim, keepdim).dtype)


@composite(
    torch.count_nonzero,
    torch.Tensor.count_nonzero,
    meta=lambda a, dim=None: like(a, reduced_shape(a, canonical_dims(a, dim), False), dtypes.int64),
)
def count_nonzero(a, dim=None):
    return sum(LTORCH["ne"](a, 0), dim)


# --- variance and norms


def _var_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """torch.var's overloads as one: var(a, dim, correction=, keepdim=)."""
    a, *rest = args
    kwargs = dict(kwargs)
    unbiased, dim = kwargs.pop("unbiased", None), kwargs.pop("dim", kwargs.pop("axis", None))
    for i, x in enumerate(rest):
        if isinstance(x, bool):
            if unbiased is None and i < 2:
                unbiased = x
            else:
                kwargs["keepdim"] = x
        elif x is not None:
            dim = x
    correction = kwargs.get("correction")
    return (a, dim), {
        "correction": (1 if unbiased in (None, True) else 0) if correction is None else correction,
        "keepdim": kwargs.get("keepdim", False),
    }


def _var_meta(a, dim, *, correction, keepdim):
    if a.dtype.category < dtypes.FLOAT:
        raise RuntimeError("std and var only support floating point and complex dtypes")
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), dtypes.real_of(a.dtype))


def _var_pair_meta(a, dim, *, correction, keepdim):
    out = _var_meta(a, dim, correction=correction, keepdim=keepdim)
    return out, like(a, out.shape)


@composite(torch.var, torch.Tensor.var, meta=_var_meta, canonicalize=_var_arguments, tags=_RED)
def var(a, dim, *, correction, keepdim):
    dims = canonical_dims(a, dim)
    centred = a - mean(a, dims, True)
    count = math.prod(a.shape[d] for d in dims) - correction
    return sum(centred * centred, dims, keepdim) / (count if count > 0 else 0.0)


@composite(torch.std, torch.Tensor.std, meta=_var_meta, canonicalize=_var_arguments, tags=_RED)
def std(a, dim, *, correction, keepdim):
    return LTORCH["sqrt"](var(a, dim, correction=correction, keepdim=keepdim))


@composite(torch.var_mean, meta=_var_pair_meta, canonicalize=_var_arguments, tags=_RED)
def var_mean(a, dim, *, correction, keepdim):
    return var(a, dim, correction=correction, keepdim=keepdim), mean(a, canonical_dims(a, dim), keepdim)


@composite(torch.std_mean, meta=_var_pair_meta, canonicalize=_var_arguments, tags=_RED)
def std_mean(a, dim, *, correction, keepdim):
    return std(a, dim, correction=correction, keepdim=keepdim), mean(a, canonical_dims(a, dim), keepdim)


@composite(
    torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp, tags=_RED, autocast="cuda:float32",
    meta=lambda a, dim, keepdim=False: like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), to_float(a.dtype)),
)  # fmt: skip
def logsumexp(a, dim, keepdim=False):
    a = convert(a, to_float(a.dtype))
    dims = canonical_dims(a, dim)
    if is_empty(a):  # nothing has no largest
        return LTORCH["log"](sum(LTORCH["exp"](a), dims, keepdim))
    top = amax(a, dims, True)
    top = where(LTORCH["isinf"](top), 0.0, top)
    total = LTORCH["log"](sum(LTORCH["exp"](a - top), dims, True)) + top
    return total if keepdim else LTORCH["squeeze"](total, dims)


def _vector_norm_meta(a, ord=2, dim=None, keepdim=False, *, dtype=None):
    kind = to_dtype(dtype) if dtype is not None else a.dtype
    if kind.category < dtypes.FLOAT:
        raise RuntimeError("linalg.vector_norm: Expected a floating point or complex tensor as input.")
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), dtypes.real_of(kind))


@composite(torch.linalg.vector_norm, meta=_vector_norm_meta, tags=_RED, autocast="cuda:float32")
def vector_norm(a, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = LTORCH["abs"](a if dtype is None else convert(a, to_dtype(dtype)))
    dims = canonical_dims(x, dim)
    if ord == math.inf:
        return amax(x, dims, keepdim)
    if ord == -math.inf:
        return amin(x, dims, keepdim)
    if ord == 0:
        return sum(convert(LTORCH["ne"](x, 0), x.dtype), dims, keepdim)
    if ord == 2:
        return LTORCH["sqrt"](sum(x * x, dims, keepdim))
    return LTORCH["pow"](sum(LTORCH["pow"](x, ord), dims, keepdim), 1.0 / ord)


def _nuclear_meta(a, dim, keepdim, dtype):
    kind = to_dtype(dtype) if dtype is not None else a.dtype
    dims = canonical_dims(a, dim)
    if len(dims) != 2 or kind.category < dtypes.FLOAT:
        raise RuntimeError(f"linalg.matrix_norm: dim must be a 2-tuple. Got {list(dims)}")
    return like(a, reduced_shape(a, dims, keepdim), dtypes.real_of(kind))


@prim(lambda a, dim, keepdim, dtype: torch.norm(a, "nuc", dim, keepdim, dtype=to_torch_dtype(dtype)), tags=_RED)
def nuclear_norm(a, dim, keepdim, dtype):
    """The sum of the singular values."""
    return _nuclear_meta(a, dim, keepdim, dtype)


def _norm_meta(a, p="fro", dim=None, keepdim=False, dtype=None):
    if p == "nuc":
        return _nuclear_meta(a, dim, keepdim, dtype)
    if p not in ("fro", None) and not isinstance(p, (int, float)):
        raise RuntimeError(f"norm: order {p!r} is not supported")
    return _vector_norm_meta(a, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@composite(torch.norm, torch.Tensor.norm, meta=_norm_meta, tags=_RED, autocast="cuda:float32")
def norm(a, p="fro", dim=None, keepdim=False, *, dtype=None):
    if p == "nuc":
        return nuclear_norm(a, dim, keepdim, dtype)
    return vector_norm(a, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@alias(torch.Tensor.norm, over=norm)
def _norm_method(a, p="fro", dim=None, keepdim=False, dtype=None):
    return norm(a, p, dim, keepdim, dtype=dtype)


def _dist_meta(a, b, p=2):
    broadcast_shapes(a.shape, b.shape)
    return like(a, (), dtypes.real_of(a.dtype), same_device(a, b))


@composite(torch.dist, torch.Tensor.dist, meta=_dist_meta, autocast="cuda:float32")
def dist(a, b, p=2):
    return vector_norm(a - b, p)


# --- scans


def _scan_meta(a, dim, *, dtype=None):
    canonical_dims(a, dim)
    return like(a, dtype=_sum_dtype(a, dtype))


@torch_prim(torch.cumsum, torch.Tensor.cumsum, autocast="cuda:float32")
def cumsum(a, dim, *, dtype=None):
    return _scan_meta(a, dim, dtype=dtype)


@torch_prim(torch.cumprod, torch.Tensor.cumprod, autocast="cuda:float32")
def cumprod(a, dim, *, dtype=None):
    return _scan_meta(a, dim, dtype=dtype)


@torch_prim(torch.logcumsumexp, torch.Tensor.logcumsumexp)
def logcumsumexp(a, dim):
    canonical_dims(a, dim)
    return like(a)


def _scan_pair(name: str) -> Symbol:
    def meta(a, dim):
        canonical_dims(a, dim)
        return values_indices(name, a, a.shape)

    return torch_prim(getattr(torch, name), getattr(torch.Tensor, name), name=name)(meta)


cummax, cummin = _scan_pair("cummax"), _scan_pair("cummin")


@composite(torch.diff, torch.Tensor.diff, meta=None)
def diff(a, n=1, dim=-1, prepend=None, append=None):
    if n < 0:
        raise RuntimeError(f"order must be non-negative but got {n}")
    if n == 0:
        return LTORCH["clone"](a)
    parts = [x for x in (prepend, a, append) if x is not None]
    out = LTORCH["cat"](parts, dim) if len(parts) > 1 else a
    dim = dim % len(out.shape)
    for _ in range(n):
        size = out.shape[dim]
        if size == 0:
            break
        later, earlier = LTORCH["narrow"](out, dim, 1, size - 1), LTORCH["narrow"](out, dim, 0, size - 1)
        out = LTORCH["logical_xor"](later, earlier) if out.dtype is dtypes.bool8 else later - earlier
    return out


# ----------------------------------------------------------------------------------------------------------------
# derivatives


def _unreduced(g, a, dim, keepdim: bool):
    """What a reduction made, or its cotangent, with the reduced dimensions restored as 1."""
    dims = canonical_dims(a, dim)
    if not keepdim and g.shape:
        for d in sorted(dims):
            g = LTORCH["unsqueeze"](g, d)
    return g


def _restored(g, a, dim, keepdim: bool):
    """A cotangent of a reduction's result stretched over the reduced dimensions."""
    return LTORCH["expand"](_unreduced(g, a, dim, keepdim), a.shape)


def _arguments(dim=None, keepdim=False, *, dtype=None):
    return dim, keepdim


@sum.vjp
def _(a, *args, **kwargs):
    g = yield sum(a, *args, **kwargs)
    return (_restored(g, a, *_arguments(*args, **kwargs)),)


@nansum.vjp
def _(a, *args, **kwargs):
    g = yield nansum(a, *args, **kwargs)
    return (_restored(g, a, *_arguments(*args, **kwargs)) * LTORCH["logical_not"](LTORCH["isnan"](a)),)


@mean.vjp
def _(a, *args, **kwargs):
    g = yield mean(a, *args, **kwargs)
    dim, keepdim = _arguments(*args, **kwargs)
    return (_restored(g, a, dim, keepdim) / math.prod(a.shape[d] for d in canonical_dims(a, dim)),)


def _shared(symbol: Symbol):
    """amax, amin: the extremes share the cotangent."""

    def rule(a, dim=(), keepdim=False):
        y = symbol(a, dim, keepdim)
        g = yield y
        taken = LTORCH["eq"](_unreduced(y, a, dim, keepdim), a)
        return (_unreduced(g, a, dim, keepdim) * taken / sum(taken, canonical_dims(a, dim), True),)

    symbol.vjp(rule)


_shared(amax)
_shared(amin)


def _run_evenly(g, a, y):
    if a.device.type != "cpu":  # without a look at the value, which would wait for the device
        taken = (a == y).logical_or_(a.isnan().logical_and_(y.isnan()))
        return taken * (g / taken.sum())
    taken = a.isnan() if y.isnan() else a == y
    return torch.where(taken, g / taken.sum(), 0)


# the cotangent of an extreme of all elements, shared by those that are it
evenly_distributed = Symbol(
    "evenly_distributed", lambda g, a, y: like(a), id="evenly_distributed", is_prim=True, fn=_run_evenly
)


def _run_placed(g, indices, dim: int, shape: tuple):
    return g.new_zeros(shape).scatter_(dim, indices, g)


# zeros of a shape with the cotangent at the places, along one dimension, that values were taken from
placed = Symbol(
    "placed", lambda g, indices, dim, shape: like(g, tuple(shape)), id="placed", is_prim=True, fn=_run_placed
)


def _whole_rule(symbol: Symbol):
    def rule(a):
        y = symbol(a)
        g = yield y
        return (evenly_distributed(g, a, y),)

    symbol.vjp(rule)


def _along_rule(symbol: Symbol):
    def rule(a, dim, keepdim=False):
        y, indices = symbol(a, dim, keepdim)
        g, _ = yield y, indices
        d = canonical_dims(a, dim)
        if not d:
            return (g,)
        return (placed(_unreduced(g, a, dim, keepdim), _unreduced(indices, a, dim, keepdim), d[0], a.shape),)

    symbol.vjp(rule)


for _symbol in (max_all, min_all, median_all, nanmedian_all):
    _whole_rule(_symbol)
for _symbol in (max_dim, min_dim, median_dim, mode_dim, nanmedian_dim):
    _along_rule(_symbol)


def _variance_gradient(g, a, dim, correction, keepdim: bool):
    """2 / (n - correction) * (a - mean(a))."""
    dims = canonical_dims(a, dim)
    rest = math.prod(a.shape[d] for d in dims) - correction
    g, centred = _unreduced(g, a, dim, keepdim), a - mean(a, dims, True)
    if (dim is None or not a.shape) and rest <= 0:
        return g * LTORCH["where"](LTORCH["eq"](centred, 0), math.nan, math.inf)
    return (math.inf if rest == 0 else 2.0 / rest) * g * centred


def _deviation_gradient(g, y):
    """The variance's cotangent from that of its root `y`."""
    return LTORCH["masked_fill"](g / (y * 2), LTORCH["eq"](y, 0), 0)


@var.vjp
def _(a, dim, *, correction, keepdim):
    g = yield var(a, dim, correction=correction, keepdim=keepdim)
    return (_variance_gradient(g, a, dim, correction, keepdim),)


@std.vjp
def _(a, dim, *, correction, keepdim):
    y = std(a, dim, correction=correction, keepdim=keepdim)
    g = yield y
    return (_variance_gradient(_deviation_gradient(g, y), a, dim, correction, keepdim),)


def _with_mean(symbol: Symbol, spread: Symbol):
    """var_mean, std_mean: the sum of what the spread and the mean give."""

    def rule(a, dim, *, correction, keepdim):
        y, centre = symbol(a, dim, correction=correction, keepdim=keepdim)
        g, h = yield y, centre
        g = g if spread is var else _deviation_gradient(g, y)
        of_mean = _restored(h, a, dim, keepdim) / math.prod(a.shape[d] for d in canonical_dims(a, dim))
        return (_variance_gradient(g, a, dim, correction, keepdim) + of_mean,)

    symbol.vjp(rule)


_with_mean(var_mean, var)
_with_mean(std_mean, std)


@logsumexp.vjp
def _(a, dim, keepdim=False):
    y = logsumexp(a, dim, keepdim)
    g = yield y
    return (_unreduced(g, a, dim, keepdim) * LTORCH["exp"](a - _unreduced(y, a, dim, keepdim)),)


@cumsum.vjp
def _(a, dim, *, dtype=None):
    g = yield cumsum(a, dim, dtype=dtype)
    d = (canonical_dims(a, dim) or (0,))[0]
    if not a.shape or (type(a.shape[d]) is int and a.shape[d] == 1):
        return (g,)
    return (LTORCH["flip"](cumsum(LTORCH["flip"](g, (d,)), d), (d,)),)


def _scan_pair_rule(symbol: Symbol):
    def rule(a, dim):
        y, indices = symbol(a, dim)
        g, _ = yield y, indices
        if not a.shape:
            return (g,)
        return (LTORCH["scatter_add"](LTORCH["zeros_like"](g), dim, indices, g),)

    symbol.vjp(rule)


_scan_pair_rule(cummax)
_scan_pair_rule(cummin)


def _norm_gradient(g, y, a, order, dim, keepdim: bool):
    """PyTorch's subgradients: 0 where the norm is 0, below order 1 where an element is; an infinite norm's is shared by
    those that reach it. None for order 0, which counts."""
    g, y = _unreduced(g, a, dim, keepdim), _unreduced(y, a, dim, keepdim)
    if order == 0:
        return None
    if order == 1:
        return LTORCH["sgn"](a) * g
    if order == 2:
        return g * LTORCH["masked_fill"](a / y, LTORCH["eq"](y, 0), 0)
    if abs(order) == math.inf:
        reached = LTORCH["eq"](LTORCH["abs"](a), y)
        return LTORCH["sgn"](a) * (reached / sum(reached, canonical_dims(a, dim), True)) * g
    sizes = LTORCH["abs"](a)
    if order < 1:
        return (
            LTORCH["sgn"](a)
            * LTORCH["masked_fill"](LTORCH["pow"](sizes, order - 1), LTORCH["eq"](a, 0), 0)
            * g
            * LTORCH["pow"](y, 1 - order)
        )
    scaled = LTORCH["sgn"](a) * LTORCH["pow"](sizes, order - 1) if order < 2 else a * LTORCH["pow"](sizes, order - 2)
    return scaled * LTORCH["masked_fill"](g / LTORCH["pow"](y, order - 1), LTORCH["eq"](y, 0), 0)


def _norm_rule(symbol: Symbol, order_of) -> None:
    def rule(a, *args, **kwargs):
        order, dim, keepdim = order_of(*args, **kwargs)
        if order != 0 and (order is None or 0 in [n for n in a.shape if type(n) is int]):
            return NotImplemented
        y = symbol(a, *args, **kwargs)
        g = yield y
        of_a = _norm_gradient(g, y, a, order, dim, keepdim)
        return (of_a if of_a is None else convert(of_a, a.dtype),)

    symbol.vjp(rule)
    symbol.complex_derivative = lambda a, *args, **kwargs: order_of(*args, **kwargs)[0] == 0


def _norm_arguments(p="fro", dim=None, keepdim=False, *, dtype=None):
    return 2 if p in ("fro", None) else None if p == "nuc" else p, dim, keepdim


_norm_rule(vector_norm, lambda ord=2, dim=None, keepdim=False, *, dtype=None: (ord, dim, keepdim))
_norm_rule(norm, _norm_arguments)

# PyTorch composes these of the same operations
declare(diff, nanmean, differentiate_decomposition=True)
declare(
    *(LTORCH[name] for name in ("norm", "median_dim", "nanmedian_dim", "mode_dim", "median_all", "nanmedian_all")),
    PRIMS["nuclear_norm"], inductor_loops=False,
)  # fmt: skip
