"""Norms of matrices, and what follows from singular values: rank and condition. Norms of vectors are reductions."""

from __future__ import annotations

import math

import torch

from thunder.core.dtypes import int64, to_dtype
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags
from thunder.ops import ltorch
from thunder.ops.families.data import convert
from thunder.ops.families.factorizations import _CPU, matrices, square
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require, wrap_dim, wrap_dims
from thunder.ops.signature import without_none

_CUDA = "cuda:float32"
ORDERS = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)


@composite(torch.linalg.matrix_norm, name="linalg_matrix_norm", autocast=_CUDA)
def matrix_norm(A, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None):
    """The decomposition of `torch.linalg.matrix_norm`, by singular values or sums of absolute values."""
    require(len(A.shape) >= 2 and ord in ORDERS)
    rows, columns = wrap_dims(dim, len(A.shape))
    A = A if dtype is None else convert(A, to_dtype(dtype))
    if ord == "fro":
        return ltorch.vector_norm(A, 2, (rows, columns), keepdim)
    if ord in ("nuc", 2, -2):
        values = ltorch.linalg_svdvals(ltorch.movedim(A, (rows, columns), (-2, -1)))
        out = (ltorch.sum if ord == "nuc" else ltorch.amax if ord == 2 else ltorch.amin)(values, -1, keepdim)
        return out if not keepdim else ltorch.movedim(ltorch.unsqueeze(out, -1), (-2, -1), (rows, columns))
    summed, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
    other -= not keepdim and other > summed
    return (ltorch.amax if ord > 0 else ltorch.amin)(ltorch.vector_norm(A, 1, summed, keepdim), other, keepdim)


@composite(torch.linalg.norm, name="linalg_norm", autocast=_CUDA)
def linalg_norm(A, ord=None, dim=None, keepdim=False, *, dtype=None):
    """A norm of a matrix where two dimensions and an order are given, or a matrix and an order; otherwise of a
    vector."""
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else None if dim is None else (dim,)
    if ord is not None and (len(dims) if dims is not None else len(A.shape)) == 2:
        return matrix_norm(A, ord, (0, 1) if dims is None else dims, keepdim, dtype=dtype)
    require(not isinstance(ord, str) and (ord is None or dims is not None or len(A.shape) == 1))
    return ltorch.vector_norm(A, 2 if ord is None else ord, dims, keepdim, dtype=dtype)


@composite(torch.nuclear_norm, autocast=_CUDA, name="matrix_nuclear_norm")
def nuclear_norm(a, dim=(-2, -1), keepdim=False):
    dim, keepdim = ((-2, -1), dim) if isinstance(dim, bool) else (dim, keepdim)
    return matrix_norm(a, "nuc", dim, keepdim)


@composite(torch.frobenius_norm)
def frobenius_norm(a, dim, keepdim=False):
    return ltorch.vector_norm(a, 2, dim, keepdim)


@composite(torch.norm_except_dim)
def norm_except_dim(v, pow=2, dim=0):
    """The norms of slices along one dimension, or, for -1, of all; what weight normalization divides by."""
    if dim == -1:
        return ltorch.vector_norm(v, pow)
    rank, dim = len(v.shape), wrap_dim(dim, len(v.shape))
    if dim not in (0, rank - 1):
        return ltorch.transpose(norm_except_dim(ltorch.transpose(v, 0, dim), pow, 0), 0, dim)
    n = v.shape[dim]
    rows = ltorch.view(ltorch.contiguous(v), (n, -1) if dim == 0 else (-1, n))
    return ltorch.view(
        ltorch.vector_norm(rows, pow, 1 if dim == 0 else 0), tuple(n if i == dim else 1 for i in range(rank))
    )


@composite(torch.linalg.cond, name="linalg_cond", autocast=_CPU)
def cond(A, p=None):
    """The norm of a matrix times that of its inverse."""
    if p is None or p in (2, -2):
        values = ltorch.linalg_svdvals(A)
        largest, smallest = (ltorch.select(values, -1, i) for i in (0, -1))
        return smallest / largest if p == -2 else largest / smallest
    square(A)
    require(p in ORDERS)
    inverse, info = ltorch.linalg_inv_ex(A)
    singular = ltorch.unsqueeze(ltorch.unsqueeze(ltorch.gt(info, 0), -1), -1)
    return matrix_norm(A, p) * matrix_norm(ltorch.masked_fill(inverse, singular, math.inf), p)


@torch_prim(
    torch.linalg.matrix_rank,
    name="linalg_matrix_rank",
    autocast=_CPU,
    tags=(OpTags.DETACHED,),
    canonicalize=without_none,
)
def matrix_rank(A, tol=None, hermitian=False, *, atol=None, rtol=None):
    if hermitian:
        square(A)
    batch, *_ = matrices(A)
    return like(A, broadcast_shapes(batch, *(t.shape for t in (tol, atol, rtol) if isinstance(t, TensorProxy))), int64)


# PyTorch composes these of the same operations
derivatives.composed.set(True, matrix_norm, linalg_norm, nuclear_norm, frobenius_norm, norm_except_dim, cond)
effects.synchronises.add(matrix_norm, linalg_norm, cond, matrix_rank)
# PyTorch composes it of others, which autocast casts
casts_inside(*frobenius_norm.torch_functions, *norm_except_dim.torch_functions)
