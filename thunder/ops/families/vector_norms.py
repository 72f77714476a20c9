"""Norms of vectors, along dimensions and of whole tensors, with their derivatives."""

from __future__ import annotations

import math

import torch

from thunder.core import dtypes
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import like
from thunder.ops import ltorch
from thunder.ops.families.data import convert
from thunder.ops.families.reductions import REDUCES, amax, amin, canonical_dims, reduced_shape, sum, unreduced
from thunder.ops.registry import alias, composite
from thunder.ops.rules import derivatives
from thunder.ops.shape_rules import require


def _vector_norm_meta(a, ord=2, dim=None, keepdim=False, *, dtype=None):
    kind = to_dtype(dtype) if dtype is not None else a.dtype
    require(kind.category >= dtypes.FLOAT)
    return like(a, reduced_shape(a, canonical_dims(a, dim), keepdim), dtypes.real_of(kind))


@composite(torch.linalg.vector_norm, meta=_vector_norm_meta, tags=REDUCES, autocast="cuda:float32")
def vector_norm(a, ord=2, dim=None, keepdim=False, *, dtype=None):
    """The decomposition of `torch.linalg.vector_norm`, by the order of the norm."""
    x = ltorch.abs(a if dtype is None else convert(a, to_dtype(dtype)))
    dims = canonical_dims(x, dim)
    if ord == math.inf:
        return amax(x, dims, keepdim)
    if ord == -math.inf:
        return amin(x, dims, keepdim)
    if ord == 0:
        return sum(convert(ltorch.ne(x, 0), x.dtype), dims, keepdim)
    if ord == 2:
        return ltorch.sqrt(sum(x * x, dims, keepdim))
    return ltorch.pow(sum(ltorch.pow(x, ord), dims, keepdim), 1.0 / ord)


@alias(torch.norm, torch.Tensor.norm)
def norm(a, p="fro", dim=None, keepdim=False, dtype=None):
    """PyTorch's older name of two norms, the Frobenius norm where no order is given."""
    dims = canonical_dims(a, dim)
    if isinstance(p, str) and (p != "fro" or dim is not None and len(dims) > 2):
        return ltorch.linalg_matrix_norm(a, p, dims, keepdim, dtype=dtype)
    return vector_norm(a, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@composite(torch.dist, torch.Tensor.dist, autocast="cuda:float32")
def dist(a, b, p=2):
    return vector_norm(a - b, p)


def _norm_gradient(g, y, a, order, dim, keepdim: bool):
    """PyTorch's subgradients: 0 where the norm is 0, below order 1 where an element is; an infinite norm's is shared by
    those that reach it. None for order 0, which counts."""
    g, y = unreduced(g, a, dim, keepdim), unreduced(y, a, dim, keepdim)
    if order == 0:
        return None
    if order == 1:
        return ltorch.sgn(a) * g
    if order == 2:
        return g * ltorch.masked_fill(a / y, ltorch.eq(y, 0), 0)
    if abs(order) == math.inf:
        reached = ltorch.eq(ltorch.abs(a), y)
        return ltorch.sgn(a) * (reached / sum(reached, canonical_dims(a, dim), True)) * g
    sizes = ltorch.abs(a)
    if order < 1:
        return (
            ltorch.sgn(a)
            * ltorch.masked_fill(ltorch.pow(sizes, order - 1), ltorch.eq(a, 0), 0)
            * g
            * ltorch.pow(y, 1 - order)
        )
    scaled = ltorch.sgn(a) * ltorch.pow(sizes, order - 1) if order < 2 else a * ltorch.pow(sizes, order - 2)
    return scaled * ltorch.masked_fill(g / ltorch.pow(y, order - 1), ltorch.eq(y, 0), 0)


@vector_norm.vjp
def _(a, ord=2, dim=None, keepdim=False, *, dtype=None):
    if ord != 0 and 0 in [n for n in a.shape if type(n) is int]:
        return NotImplemented
    y = vector_norm(a, ord, dim, keepdim, dtype=dtype)
    g = yield y
    of_a = _norm_gradient(g, y, a, ord, dim, keepdim)
    return (of_a if of_a is None else convert(of_a, a.dtype),)


derivatives.of_complex.set("as written", vector_norm)
