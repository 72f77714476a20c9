"""Sorting, selection and search."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags
from thunder.ops import ltorch
from thunder.ops.families.extremes import counts_places, first_place, placed, places_of, values_indices
from thunder.ops.families.reductions import canonical_dims, reduced_shape
from thunder.ops.registry import torch_prim
from thunder.ops.rules import effects, kernels, splitting
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import named_results


@torch_prim(torch.topk, torch.Tensor.topk)
def topk(a, k, dim=-1, largest=True, sorted=True):
    (d,) = canonical_dims(a, dim) or (0,)
    require(not a.shape or 0 <= k <= a.shape[d])
    return values_indices("topk", a, (*a.shape[:d], k, *a.shape[d + 1 :]) if a.shape else ())


MOST_OF_ROW, MOST_PICKED = 1024, 8  # rows that kernels pick so many extremes from, one after the other


@topk.decomposed_by
def _(a, k, dim=-1, largest=True, sorted=True):
    if not a.shape or not largest or not (type(k) is int and 0 < k <= MOST_PICKED):
        return None
    (d,) = canonical_dims(a, dim)
    if not counts_places(a, d) or a.shape[d] > MOST_OF_ROW:
        return None
    positions = places_of(a.shape, d, a.device)
    rest, free, values, places = a, None, [], []
    for _ in range(k):
        values.append(ltorch.amax(rest, (d,), True))
        places.append(first_place(rest, values[-1], positions, d, free))
        others = positions != places[-1]
        free = others if free is None else ltorch.logical_and(free, others)
        rest = ltorch.where(others, rest, float("-inf"))
    results = ltorch.cat(values, d), ltorch.to(ltorch.cat(places, d), dtypes.int64)
    return named_results("topk", *results)


splitting.several.set(splitting.several_along, topk)
kernels.no_loop_of_inductor.add(topk)  # which of several equal ones it picks, nobody says


def _order_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The overloads of sort as one: sort(a, dim=, descending=), with stable= where it is asked for."""
    kwargs = {"dim" if k == "axis" else k: v for k, v in kwargs.items() if v is not None}
    a, *rest = args if args else (kwargs.pop("input"),)
    options = dict(zip(("dim", "descending"), rest, strict=False))
    if len(rest) == 3:  # sort(a, stable, dim, descending), as torch.sort's second overload can be called
        options = dict(zip(("stable", "dim", "descending"), rest, strict=True))
    both = options | kwargs
    out = {"dim": both.pop("dim", -1), "descending": both.pop("descending", False)}
    return (a,), out | {k: v for k, v in both.items() if k != "stable" or v}


@torch_prim(torch.sort, torch.Tensor.sort, canonicalize=_order_arguments)
def sort(a, *, dim, descending, stable=False):
    canonical_dims(a, dim)
    return values_indices("sort", a, a.shape)


@torch_prim(torch.argsort, torch.Tensor.argsort, canonicalize=_order_arguments, tags=(OpTags.DETACHED,))
def argsort(a, *, dim, descending, stable=False):
    canonical_dims(a, dim)
    return like(a, dtype=dtypes.int64)


@torch_prim(torch.msort, torch.Tensor.msort)
def msort(a):
    return like(a)


@torch_prim(torch.kthvalue, torch.Tensor.kthvalue)
def kthvalue(a, k, dim=-1, keepdim=False):
    dims = canonical_dims(a, dim)
    require(1 <= k <= (a.shape[dims[0]] if dims else 1))
    return values_indices("kthvalue", a, reduced_shape(a, dims, keepdim))


@torch_prim(torch.searchsorted)
def searchsorted(sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None):
    kind = dtypes.int32 if out_int32 else dtypes.int64
    return like(input, dtype=kind) if type(input) is TensorProxy else like(sorted_sequence, (), kind)


@torch_prim(torch.histc, torch.Tensor.histc, tags=(OpTags.DETACHED,))
def histc(a, bins=100, min=0, max=0):
    return like(a, (bins,))


@torch_prim(torch.bucketize)
def bucketize(a, boundaries, *, out_int32=False, right=False):
    require(len(boundaries.shape) == 1)
    kind = dtypes.int32 if out_int32 else dtypes.int64
    return like(a, dtype=kind) if type(a) is TensorProxy else like(boundaries, (), kind)


# ----------------------------------------------------------------------------------------------------------------
# derivatives: back to where the values stood


def _selected(symbol, dimension):
    """A rule for an operation that gives values and their indices along one dimension, which stays."""

    def rule(a, *args, **kwargs):
        values, indices = symbol(a, *args, **kwargs)
        g, _ = yield values, indices
        return (placed(g, indices, canonical_dims(a, dimension(*args, **kwargs))[0], a.shape) if a.shape else g,)

    symbol.vjp(rule)


_selected(topk, lambda k, dim=-1, largest=True, sorted=True: dim)
_selected(sort, lambda *, dim, descending, stable=False: dim)


@kthvalue.vjp
def _(a, k, dim=-1, keepdim=False):
    values, indices = kthvalue(a, k, dim, keepdim)
    g, _ = yield values, indices
    if not a.shape:
        return (g,)
    (d,) = canonical_dims(a, dim)
    if not keepdim:
        g, indices = (ltorch.unsqueeze(x, d) for x in (g, indices))
    return (placed(g, indices, d, a.shape),)


@msort.vjp
def _(a):
    values, indices = sort(a, dim=0)
    g = yield values
    return (placed(g, indices, 0, a.shape) if a.shape else g,)


def _looks_for_the_range(operation) -> bool:
    """Whether histc takes the least and the greatest value, since its bounds are equal."""
    bounds = dict(zip(("bins", "min", "max"), operation.args[1:], strict=False)) | operation.kwargs
    return bounds.get("min", 0) == bounds.get("max", 0)


effects.may_raise.add(ltorch.histc)
effects.synchronises.add(ltorch.histc, when=_looks_for_the_range)


splitting.several.set(splitting.several_along, sort)
