"""Reductions and scans."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable

import torch

from thunder.core import dtypes
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy, like, same_shape
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.ops import autocast, ltorch
from thunder.ops.backward import gradient_of_first, sum_to
from thunder.ops.families.data import convert
from thunder.ops.families.shape_prims import broadcast_in_dim
from thunder.ops.families.ternary import where
from thunder.ops.promotion import to_float
from thunder.ops.registry import composite, prim
from thunder.ops.rules import batching, derivatives, splitting
from thunder.ops.shape_rules import is_empty, require

REDUCES = (OpTags.REDUCTION_OP,)


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
    return prim(lambda a, dims: run(a, dims), name=name, tags=REDUCES)(
        lambda a, dims: like(a, reduced_shape(a, dims, False))
    )


def _prod_all(a, dims):
    for d in sorted(dims, reverse=True):
        a = torch.prod(a, d, dtype=a.dtype)
    return a


sum_prim = _reduce_prim("sum", lambda a, dims: torch.sum(a, dims, dtype=a.dtype) if dims else a.clone())
prod_prim = _reduce_prim("prod", _prod_all)
amax_prim = _reduce_prim("amax", lambda a, dims: torch.amax(a, dims) if dims else a.clone())
amin_prim = _reduce_prim("amin", lambda a, dims: torch.amin(a, dims) if dims else a.clone())


def _reduction(prim_symbol: Callable, a, dim, keepdim: bool, dtype) -> TensorProxy:
    dims = canonical_dims(a, dim)
    return _with_kept(a, prim_symbol(convert(a, dtype), dims), dims, keepdim)


def sum_dtype(a: TensorProxy, dtype):
    return to_dtype(dtype) if dtype is not None else dtypes.int64 if a.dtype.category < dtypes.FLOAT else a.dtype


def _sum_meta(a, dim=None, keepdim=False, *, dtype=None):
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), sum_dtype(a, dtype))


@composite(torch.sum, torch.Tensor.sum, meta=_sum_meta, tags=REDUCES, autocast="cuda:float32")
def sum(a, dim=None, keepdim=False, *, dtype=None):
    return _reduction(sum_prim, a, dim, keepdim, sum_dtype(a, dtype))


def _sum_to_size_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    a, *size = args
    size = kwargs["size"] if kwargs else size
    return (a, tuple(size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size)), {}


def _sum_to_size_meta(a, size):
    lead = len(a.shape) - len(size)
    require(
        lead >= 0 and not builtins.any((n == m) is False and (n == 1) is False for n, m in zip(size, a.shape[lead:]))
    )
    if size and same_shape(a.shape, size):  # to no dimensions PyTorch always adds up
        return a
    if a.dtype.category < dtypes.FLOAT:  # what is not added up keeps its type
        _decided(a.shape, size)
    return like(a, size, sum_dtype(a, None))


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


autocast.when.set(lambda kind, args, kwargs: not (args[1] and same_shape(args[0].shape, args[1])), sum_to_size)


gradient_of_first(sum_to_size, lambda g, y, a, size: ltorch.expand(g, a.shape))


@composite(torch.nansum, torch.Tensor.nansum, meta=_sum_meta, tags=REDUCES)
def nansum(a, dim=None, keepdim=False, *, dtype=None):
    return sum(where(ltorch.isnan(a), 0, a) if a.dtype.category >= 2 else a, dim, keepdim, dtype=dtype)


def _mean_meta(a, dim=None, keepdim=False, *, dtype=None):
    kind = to_dtype(dtype) if dtype is not None else a.dtype
    require(kind.category >= dtypes.FLOAT)
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), kind)


@composite(torch.mean, torch.Tensor.mean, meta=_mean_meta, tags=REDUCES)
def mean(a, dim=None, keepdim=False, *, dtype=None):
    dims = canonical_dims(a, dim)
    return sum(a, dims, keepdim, dtype=dtype) / math.prod(a.shape[d] for d in dims)


@composite(torch.nanmean, torch.Tensor.nanmean, meta=_mean_meta, tags=REDUCES)
def nanmean(a, dim=None, keepdim=False, *, dtype=None):
    count = sum(ltorch.logical_not(ltorch.isnan(a)), dim, keepdim)
    return nansum(a, dim, keepdim, dtype=dtype) / count


def _prod_meta(a, dim=None, keepdim=False, *, dtype=None):
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), sum_dtype(a, dtype))


@composite(torch.prod, torch.Tensor.prod, meta=_prod_meta, tags=REDUCES, autocast="float32")
def prod(a, dim=None, keepdim=False, *, dtype=None):
    return _reduction(prod_prim, a, dim, keepdim, sum_dtype(a, dtype))


def _check_not_empty(a: TensorProxy, dim, dims: tuple[int, ...]) -> None:
    """An extreme of nothing does not exist. Symbolic sizes are never 0."""
    if 0 in [n for n in a.shape if type(n) is int]:
        require(dim is not None and dim != ())
        for d in dims:
            require(type(a.shape[d]) is not int or a.shape[d] != 0)


def _extreme_meta(a, dim=(), keepdim=False):
    dims = canonical_dims(a, dim)
    _check_not_empty(a, dim, dims)
    return like(a, reduced_shape(a, dims, keepdim))


@composite(torch.amax, torch.Tensor.amax, meta=_extreme_meta, tags=REDUCES)
def amax(a, dim=(), keepdim=False):
    return _reduction(amax_prim, a, dim, keepdim, a.dtype)


@composite(torch.amin, torch.Tensor.amin, meta=_extreme_meta, tags=REDUCES)
def amin(a, dim=(), keepdim=False):
    return _reduction(amin_prim, a, dim, keepdim, a.dtype)


# --- values with indices


# --- truth


def _truth_meta(a, dim=None, keepdim=False):
    kind = dtypes.uint8 if a.dtype is dtypes.uint8 else dtypes.bool8
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), kind)


@composite(torch.all, torch.Tensor.all, meta=_truth_meta, tags=REDUCES)
def all(a, dim=None, keepdim=False):
    return ltorch.logical_not(any(ltorch.logical_not(a), dim, keepdim))


@composite(torch.any, torch.Tensor.any, meta=_truth_meta, tags=REDUCES)
def any(a, dim=None, keepdim=False):
    return convert(ltorch.ne(sum(ltorch.ne(a, 0), dim, keepdim), 0), _truth_meta(a, dim, keepdim).dtype)


@composite(
    torch.count_nonzero,
    torch.Tensor.count_nonzero,
    meta=lambda a, dim=None: like(a, reduced_shape(a, canonical_dims(a, dim), False), dtypes.int64),
)
def count_nonzero(a, dim=None):
    return sum(ltorch.ne(a, 0), dim)


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
    require(a.dtype.category >= dtypes.FLOAT)
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), dtypes.real_of(a.dtype))


def _var_pair_meta(a, dim, *, correction, keepdim):
    out = _var_meta(a, dim, correction=correction, keepdim=keepdim)
    return out, like(a, out.shape)


@composite(torch.var, torch.Tensor.var, meta=_var_meta, canonicalize=_var_arguments, tags=REDUCES)
def var(a, dim, *, correction, keepdim):
    dims = canonical_dims(a, dim)
    centred = a - mean(a, dims, True)
    count = math.prod(a.shape[d] for d in dims) - correction
    return sum(centred * centred, dims, keepdim) / (count if count > 0 else 0.0)


@composite(torch.std, torch.Tensor.std, meta=_var_meta, canonicalize=_var_arguments, tags=REDUCES)
def std(a, dim, *, correction, keepdim):
    return ltorch.sqrt(var(a, dim, correction=correction, keepdim=keepdim))


@composite(torch.var_mean, meta=_var_pair_meta, canonicalize=_var_arguments, tags=REDUCES)
def var_mean(a, dim, *, correction, keepdim):
    return var(a, dim, correction=correction, keepdim=keepdim), mean(a, canonical_dims(a, dim), keepdim)


@composite(torch.std_mean, meta=_var_pair_meta, canonicalize=_var_arguments, tags=REDUCES)
def std_mean(a, dim, *, correction, keepdim):
    return std(a, dim, correction=correction, keepdim=keepdim), mean(a, canonical_dims(a, dim), keepdim)


@composite(
    torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp, tags=REDUCES, autocast="cuda:float32",
    meta=lambda a, dim, keepdim=False: like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), to_float(a.dtype)),
)  # fmt: skip
def logsumexp(a, dim, keepdim=False):
    a = convert(a, to_float(a.dtype))
    dims = canonical_dims(a, dim)
    if is_empty(a):  # nothing has no largest
        return ltorch.log(sum(ltorch.exp(a), dims, keepdim))
    top = amax(a, dims, True)
    top = where(ltorch.isinf(top), 0.0, top)
    total = ltorch.log(sum(ltorch.exp(a - top), dims, True)) + top
    return total if keepdim else ltorch.squeeze(total, dims)


# --- scans


# ----------------------------------------------------------------------------------------------------------------
# derivatives


def unreduced(g, a, dim, keepdim: bool):
    """What a reduction made, or its cotangent, with the reduced dimensions restored as 1."""
    dims = canonical_dims(a, dim)
    if not keepdim and g.shape:
        for d in sorted(dims):
            g = ltorch.unsqueeze(g, d)
    return g


def _restored(g, a, dim, keepdim: bool):
    """A cotangent of a reduction's result stretched over the reduced dimensions."""
    return ltorch.expand(unreduced(g, a, dim, keepdim), a.shape)


def _arguments(dim=None, keepdim=False, *, dtype=None):
    return dim, keepdim


gradient_of_first(sum, lambda g, y, a, *args, **kwargs: _restored(g, a, *_arguments(*args, **kwargs)))


gradient_of_first(
    nansum,
    lambda g, y, a, *args, **kwargs: (
        _restored(g, a, *_arguments(*args, **kwargs)) * ltorch.logical_not(ltorch.isnan(a))
    ),
)


def _dims_of_part(split: splitting.Split, operation: BoundSymbol) -> tuple[splitting.Part | None, tuple[int, ...]]:
    """The part of what is reduced, and the dimensions that are."""
    a = operation.inputs[0]
    dims = canonical_dims(a, splitting.argument(operation, "dim"))
    return split.part(a) if len(operation.inputs) == 1 else None, dims


@splitting.rule(sum, mean, amax, amin, all, any, var, std, logsumexp)
def _reduced_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Reductions of other dimensions than that of parts."""
    part, dims = _dims_of_part(split, operation)
    if part is None or part.dim in dims:
        return None
    dim = part.dim - (0 if splitting.argument(operation, "keepdim") else len([d for d in dims if d < part.dim]))
    return split.computed(operation, {operation.inputs[0]: part.value}, part.axis, dim)


@splitting.total(sum, mean)
def _total_of_parts(split: splitting.Split, operation: BoundSymbol) -> TensorProxy | None:
    part, dims = _dims_of_part(split, operation)
    if part is None or part.dim not in dims:
        return None
    own = operation.sym(part.value, *operation.args[1:], **operation.kwargs)
    if operation.sym is mean:
        own = ltorch.true_divide(own, part.axis.size)
    return split.summed_over(own, part.axis)


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
        taken = ltorch.eq(unreduced(y, a, dim, keepdim), a)
        return (unreduced(g, a, dim, keepdim) * taken / sum(taken, canonical_dims(a, dim), True),)

    symbol.vjp(rule)


_shared(amax)
_shared(amin)


def _variance_gradient(g, a, dim, correction, keepdim: bool):
    """2 / (n - correction) * (a - mean(a))."""
    dims = canonical_dims(a, dim)
    rest = math.prod(a.shape[d] for d in dims) - correction
    g, centred = unreduced(g, a, dim, keepdim), a - mean(a, dims, True)
    if (dim is None or not a.shape) and rest <= 0:
        return g * ltorch.where(ltorch.eq(centred, 0), math.nan, math.inf)
    return (math.inf if rest == 0 else 2.0 / rest) * g * centred


def _deviation_gradient(g, y):
    """The variance's cotangent from that of its root `y`."""
    return ltorch.masked_fill(g / (y * 2), ltorch.eq(y, 0), 0)


gradient_of_first(var, lambda g, y, a, dim, *, correction, keepdim: _variance_gradient(g, a, dim, correction, keepdim))


gradient_of_first(
    std,
    lambda g, y, a, dim, *, correction, keepdim: _variance_gradient(
        _deviation_gradient(g, y), a, dim, correction, keepdim
    ),
)


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


gradient_of_first(
    logsumexp,
    lambda g, y, a, dim, keepdim=False: unreduced(g, a, dim, keepdim) * ltorch.exp(a - unreduced(y, a, dim, keepdim)),
)


# PyTorch composes it of the same operations
derivatives.composed.set(True, nanmean)
derivatives.of_complex.set("as written", var, std, var_mean, std_mean)


batching.rule.set(batching.along, logsumexp, var, std, var_mean)
batching.rule.set(batching.along, ltorch.sum, ltorch.mean, ltorch.amax, ltorch.amin, ltorch.all, ltorch.any)
