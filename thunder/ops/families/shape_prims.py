"""Primitives that move or view data: what the shape operations and broadcasting decompose into."""

from __future__ import annotations

import torch

from thunder.core.proxies import like
from thunder.core.symbol import OpTags
from thunder.ops.registry import prim

VIEW = (OpTags.SHAPE_OP, OpTags.VIEW)


def _broadcast_in_dim(a, shape, dims):
    view = [1] * len(shape)
    for i, d in enumerate(dims):
        view[d] = a.shape[i]
    return a.reshape(view).expand(tuple(shape))


@prim(_broadcast_in_dim, tags=VIEW)
def broadcast_in_dim(a, shape, dims):
    """Dimension i of `a` becomes dimension dims[i] of the result; the others are new or stretched from 1."""
    return like(a, tuple(shape))


@prim(torch.reshape, tags=VIEW)
def reshape(a, shape):
    return like(a, tuple(shape))


@prim(torch.permute, tags=VIEW)
def transpose(a, permutation):
    """Dimension i of the result is dimension permutation[i] of `a`."""
    return like(a, tuple(a.shape[i] for i in permutation))


@prim(lambda a, dims: torch.squeeze(a, tuple(dims)), tags=VIEW)
def squeeze(a, dims):
    return like(a, tuple(n for i, n in enumerate(a.shape) if i not in dims))


@prim(lambda a, starts, ends, strides: a[tuple(slice(*s) for s in zip(starts, ends, strides, strict=True))], tags=VIEW)
def slice_prim(a, starts, ends, strides):
    """Elements starts[i], starts[i] + strides[i] ... below ends[i] of every dimension; 0 <= starts[i] <= ends[i] <=
    a.shape[i]."""
    return like(a, tuple((e - s + k - 1) // k for s, e, k in zip(starts, ends, strides, strict=True)))


@prim(torch.flip, tags=(OpTags.SHAPE_OP,))
def flip(a, dims):
    return like(a)


@prim(torch.cat, tags=(OpTags.SHAPE_OP,))
def cat(tensors, dim):
    first = tensors[0]
    total = first.shape[dim]
    for t in tensors[1:]:
        total = total + t.shape[dim]
    return like(first, (*first.shape[:dim], total, *first.shape[dim + 1 :]))


def _pad(a, value, padding):
    if not a.numel():  # before torch 2.11, PyTorch pads no dimension beside an empty one
        return a.new_full([lo + n + hi for n, (lo, hi) in zip(a.shape, padding, strict=True)], value)
    return torch.nn.functional.pad(a, [n for lo_hi in reversed(padding) for n in lo_hi], value=value)


@prim(_pad, tags=(OpTags.SHAPE_OP,))
def pad(a, value, padding):
    """`padding[i]` = (elements before, elements after) of dimension i; negative ones cut."""
    return like(a, tuple(lo + n + hi for n, (lo, hi) in zip(a.shape, padding, strict=True)))
