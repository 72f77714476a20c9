"""Sorting, selection and search."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags
from thunder.ops.define import alias, torch_prim
from thunder.ops.reductions import ValuesIndices, canonical_dims, reduced_shape

__all__ = ["topk", "sort", "argsort"]


def _pair(a: TensorProxy, shape: tuple) -> ValuesIndices:
    return ValuesIndices(like(a, shape), like(a, shape, dtypes.int64))


@torch_prim(torch.topk, torch.Tensor.topk)
def topk(a, k, dim=-1, largest=True, sorted=True):
    (d,) = canonical_dims(a, dim) or (0,)
    if a.shape and not 0 <= k <= a.shape[d]:
        raise RuntimeError("selected index k out of range")
    return _pair(a, (*a.shape[:d], k, *a.shape[d + 1 :]) if a.shape else ())


@topk.samples
def _(make):
    yield make(4, 6), 3
    yield make(4, 6), 2, 0
    yield (make(4, 6), 2), {"largest": False}


sort_dim = torch_prim(name="sort_dim", fn=lambda a, dim, descending, stable: torch.sort(a, dim=dim, descending=descending, stable=stable))(
    lambda a, dim, descending, stable: _pair(a, a.shape)
)


@alias(torch.sort, torch.Tensor.sort)
def sort(input, dim=-1, descending=False, stable=False):
    canonical_dims(input, dim)
    return sort_dim(input, dim, descending, stable)


@torch_prim(torch.argsort, torch.Tensor.argsort)
def argsort(a, dim=-1, descending=False, stable=False):
    canonical_dims(a, dim)
    return like(a, dtype=dtypes.int64)


@argsort.samples
def _(make):
    yield make(4, 6)
    yield make(4, 6), 0, True


@torch_prim(torch.msort, torch.Tensor.msort)
def msort(a):
    return like(a)


@torch_prim(torch.kthvalue, torch.Tensor.kthvalue)
def kthvalue(a, k, dim=-1, keepdim=False):
    return _pair(a, reduced_shape(a, canonical_dims(a, dim), keepdim))


@kthvalue.samples
def _(make):
    yield make(4, 6), 2
    yield make(4, 6), 2, 0, True


@torch_prim(torch.searchsorted)
def searchsorted(sorted_sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    kind = dtypes.int32 if out_int32 else dtypes.int64
    return like(values, dtype=kind) if type(values) is TensorProxy else like(sorted_sequence, (), kind)


@searchsorted.samples
def _(make):
    yield torch.tensor([1.0, 2.0, 3.0]), make(4)


@torch_prim(torch.histc, torch.Tensor.histc, tags=(OpTags.DETACHED,))
def histc(a, bins=100, min=0, max=0):
    return like(a, (bins,))


@histc.samples
def _(make):
    yield make(20), 5, -1, 1


@torch_prim(torch.bucketize)
def bucketize(a, boundaries, *, out_int32=False, right=False):
    kind = dtypes.int32 if out_int32 else dtypes.int64
    return like(a, dtype=kind) if type(a) is TensorProxy else like(boundaries, (), kind)


@bucketize.samples
def _(make):
    yield make(4), torch.tensor([-1.0, 0.0, 1.0])
