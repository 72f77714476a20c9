"""Extremes, medians and modes, with the places that they come from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import Symbol, primitive
from thunder.ops import ltorch
from thunder.ops.families.reductions import REDUCES, amax, amin, canonical_dims, reduced_shape, unreduced
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import kernels
from thunder.ops.torch_types import named_results

# of a row: a kernel that writes the row compares each of its elements with these; and so many comparisons for a row
FEW_PLACES, FEW_COMPARISONS = 8, 4096


def values_indices(function: str, a: TensorProxy, shape: tuple):
    """What sort, topk, max ... return: values of `a`, and where they stand."""
    return named_results(function, like(a, shape), like(a, shape, dtypes.int64))


def _with_indices(name: str, function: Callable) -> Symbol:
    """max, min, median ... along one dimension: (values, indices)."""

    def meta(a, dim, keepdim=False):
        return values_indices(name, a, reduced_shape(a, canonical_dims(a, dim), keepdim))

    return torch_prim(name=f"{name}_dim", fn=function, tags=REDUCES)(meta)


max_dim, min_dim = _with_indices("max", torch.max), _with_indices("min", torch.min)
median_dim, mode_dim, nanmedian_dim = (
    _with_indices("median", torch.median),
    _with_indices("mode", torch.mode),
    _with_indices("nanmedian", torch.nanmedian),
)


def _full_reduction(name: str, function: Callable) -> Symbol:
    """max(a), min(a), median(a): one value."""
    return torch_prim(name=f"{name}_all", fn=function, tags=REDUCES)(lambda a: like(a, ()))


max_all, min_all = _full_reduction("max", torch.max), _full_reduction("min", torch.min)
median_all, nanmedian_all = _full_reduction("median", torch.median), _full_reduction("nanmedian", torch.nanmedian)


def _extreme(whole: Symbol, along: Symbol, binary: Symbol | None) -> Callable:
    """PyTorch's `max` or `min`: of all elements, along a dimension, or of two tensors, as its arguments say."""
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


max = alias(torch.max, torch.Tensor.max)(_extreme(max_all, max_dim, ltorch.maximum))
min = alias(torch.min, torch.Tensor.min)(_extreme(min_all, min_dim, ltorch.minimum))
median = alias(torch.median, torch.Tensor.median)(_extreme(median_all, median_dim, None))
nanmedian = alias(torch.nanmedian, torch.Tensor.nanmedian)(_extreme(nanmedian_all, nanmedian_dim, None))


@alias(torch.mode, torch.Tensor.mode)
def mode(input, dim=-1, keepdim=False):
    return mode_dim(input, dim, keepdim)


@composite(torch.aminmax, torch.Tensor.aminmax, tags=REDUCES)
def aminmax(a, *, dim=None, keepdim=False):
    dims = () if dim is None else dim
    return named_results("aminmax", amin(a, dims, keepdim), amax(a, dims, keepdim))


def _index_meta(a, dim=None, keepdim=False):
    dims = tuple(range(len(a.shape))) if dim is None else canonical_dims(a, dim)
    return like(a, reduced_shape(a, dims, keepdim), dtypes.int64)


@torch_prim(torch.argmax, torch.Tensor.argmax, tags=REDUCES)
def argmax(a, dim=None, keepdim=False):
    return _index_meta(a, dim, keepdim)


@torch_prim(torch.argmin, torch.Tensor.argmin, tags=REDUCES)
def argmin(a, dim=None, keepdim=False):
    return _index_meta(a, dim, keepdim)


# the cotangent of an extreme of all elements, shared by those that are it
@primitive(lambda g, a, y: like(a))
def evenly_distributed(g, a, y):
    if a.device.type != "cpu":  # without a look at the value, which would wait for the device
        taken = (a == y).logical_or_(a.isnan().logical_and_(y.isnan()))
        return taken * (g / taken.sum())
    taken = a.isnan() if y.isnan() else a == y
    return torch.where(taken, g / taken.sum(), 0)


# ----------------------------------------------------------------------------------------------------------------
# what kernels compute, in operations

MOST_PLACES = 1 << 24  # that float32 counts


def first_place(a, extreme, positions, dim: int, free=None):
    """The first place of each row, in float32, where it is its extreme. positions: see `places_of`. free: of which
    places, by default of all."""
    count = a.shape[dim]
    is_extreme = ltorch.logical_or(a == extreme, a != a)  # where a row has a NaN, that is its extreme
    is_extreme = is_extreme if free is None else ltorch.logical_and(is_extreme, free)
    return amin(ltorch.where(is_extreme, positions, float(count)), (dim,), True)


def places_of(shape: tuple, dim: int, device, kind=dtypes.float32):
    """0, 1, ... along a dimension."""
    positions = ltorch.arange(shape[dim], device=device, dtype=kind)
    return ltorch.reshape(positions, tuple(n if d == dim else 1 for d, n in enumerate(shape)))


def counts_places(a, dim: int) -> bool:
    """Whether kernels find places of extremes along a dimension."""
    return a.dtype.category == dtypes.FLOAT and type(a.shape[dim]) is int and 0 < a.shape[dim] <= MOST_PLACES


def _found_by(symbol: Symbol, extreme: Callable, function: str | None) -> None:
    """Decomposes an operation that finds extremes, and with the name of a function returns them as well."""

    @symbol.decomposed_by
    def _(a, dim=None, keepdim=False):
        dims = () if dim is None else canonical_dims(a, dim)
        if len(dims) != 1 or not counts_places(a, dims[0]):
            return None
        values = extreme(a, dims, True)
        positions = places_of(a.shape, dims[0], a.device)
        places = ltorch.to(first_place(a, values, positions, dims[0]), dtypes.int64)
        if not keepdim:
            values, places = (ltorch.squeeze(x, dims[0]) for x in (values, places))
        return places if function is None else named_results(function, values, places)


_found_by(argmax, amax, None)
_found_by(argmin, amin, None)
_found_by(max_dim, amax, "max")
_found_by(min_dim, amin, "min")


# zeros of a shape with the cotangent at the places, along one dimension, that values were taken from
@primitive(lambda g, indices, dim, shape: like(g, tuple(shape)))
def placed(g, indices, dim: int, shape: tuple):
    return g.new_zeros(shape).scatter_(dim, indices, g)


@placed.decomposed_by
def _(g, indices, dim: int, shape: tuple):
    """Few places of a row, which the elements of the row are compared with."""
    count = g.shape[dim]
    if type(count) is not int or not 0 < count <= FEW_PLACES:
        return None
    if count > 1 and (type(shape[dim]) is not int or count * shape[dim] > FEW_COMPARISONS):
        return None
    positions, out = places_of(shape, dim, g.device, dtypes.int64), 0
    for i in range(count):
        at, value = (ltorch.narrow(x, dim, i, 1) for x in (indices, g))
        out = ltorch.where(positions == at, value, out)
    return out


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
        return (placed(unreduced(g, a, dim, keepdim), unreduced(indices, a, dim, keepdim), d[0], a.shape),)

    symbol.vjp(rule)


for _symbol in (max_all, min_all, median_all, nanmedian_all):
    _whole_rule(_symbol)
for _symbol in (max_dim, min_dim, median_dim, mode_dim, nanmedian_dim):
    _along_rule(_symbol)

kernels.no_loop_of_inductor.add(
    placed, ltorch.median_dim, ltorch.nanmedian_dim, ltorch.mode_dim, ltorch.median_all, ltorch.nanmedian_all
)
