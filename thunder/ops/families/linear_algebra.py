"""Factorizations of matrices, functions of one square matrix, linear equations. Batches in the leading dimensions.

PyTorch computes each in one piece, types it by example and differentiates it: rows. Norms are in `matrix_norms`,
products in `linalg`.
"""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core.dtypes import int64, real_of
from thunder.core.proxies import like
from thunder.core.symbol import OpTags
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, by_example, torch_prim
from thunder.ops.shape_rules import require
from thunder.ops.signature import without_none

_CPU = "cpu:float32"
_RANDOM = (OpTags.RANDOM_OP, OpTags.DONT_DCE)


def _row(*functions, name: str = "", autocast: str | None = None, **options):
    """MAGMA and cuSOLVER are told sizes and tell errors on the host."""
    symbol = by_example(*functions, name=name, autocast=autocast, **options)
    symbol.synchronises = True
    return symbol


# of torch.linalg alone, without autocast and with it
for (
    _name
) in "slogdet solve_ex solve_triangular lu_factor_ex lu_factor lu lu_solve ldl_factor ldl_factor_ex ldl_solve".split():
    _row(getattr(torch.linalg, _name), name=f"linalg_{_name}")
for _name in "inv_ex cholesky cholesky_ex eigh eigvalsh eig eigvals svd svdvals qr solve tensorinv tensorsolve".split():
    _row(getattr(torch.linalg, _name), name=f"linalg_{_name}", autocast=_CPU)
# of torch and of tensors
for _name in "cholesky_inverse cholesky_solve triangular_solve svd ormqr lu_solve".split():
    _row(getattr(torch, _name), getattr(torch.Tensor, _name), name=_name, autocast=_CPU)

_row(torch.linalg.inv, torch.inverse, torch.Tensor.inverse, name="linalg_inv", autocast=_CPU)
_row(torch.linalg.det, torch.det, torch.Tensor.det, name="linalg_det")
_row(torch.logdet, torch.Tensor.logdet)
_row(torch.slogdet, torch.Tensor.slogdet)
_row(torch.linalg.matrix_exp, torch.matrix_exp, torch.Tensor.matrix_exp, name="matrix_exp")
_row(
    torch.linalg.householder_product, torch.orgqr, torch.Tensor.orgqr, name="linalg_householder_product", autocast=_CPU
)
_row(
    torch.linalg.matrix_rank, name="linalg_matrix_rank", autocast=_CPU, tags=(OpTags.DETACHED,),
    canonicalize=without_none,
)  # fmt: skip
_row(*compat.unless_removed("cholesky"), name="cholesky", autocast=_CPU)
_row(*compat.unless_removed("qr"), name="qr", autocast=_CPU)
_row(torch.lu_unpack)
_lu = _row(torch.lu, torch.functional.lu, name="lu", autocast=_CPU)

# PyTorch composes these of others, which autocast casts
_matrix_power = (torch.linalg.matrix_power, torch.matrix_power, torch.Tensor.matrix_power)
_row(*_matrix_power, name="matrix_power")
_row(torch.linalg.pinv, name="linalg_pinv", canonicalize=without_none)
_row(torch.pinverse, torch.Tensor.pinverse)
casts_inside(*_matrix_power, torch.linalg.pinv, torch.pinverse, torch.Tensor.pinverse)

# of low rank, by random numbers
_row(torch.svd_lowrank, tags=_RANDOM)
_row(torch.pca_lowrank, tags=_RANDOM)


@alias(torch.Tensor.lu)
def lu_method(a, pivot=True, get_infos=False):
    return tuple(_lu(a, pivot, get_infos))


# ----------------------------------------------------------------------------------------------------------------
# what PyTorch cannot type by example


@torch_prim(torch.lobpcg, tags=_RANDOM)
def lobpcg(A, k=None, B=None, X=None, *options, **named):
    count = (1 if X is None else X.shape[-1]) if k is None else k
    require(len(A.shape) >= 2 and A.shape[-2] >= 3 * count)
    return like(A, (*A.shape[:-2], count)), like(A, (*A.shape[:-1], count))


@torch_prim(torch.linalg.lstsq, name="linalg_lstsq", autocast=_CPU)
def lstsq(A, b, rcond=None, *, driver=None):
    """Residuals are those of matrices of full rank: gelsd and gelss leave them out for others."""
    require(len(A.shape) >= 2 and len(A.shape) - len(b.shape) in (0, 1) and b.shape and b.dtype is A.dtype)
    m, n = A.shape[-2:]
    vector = len(b.shape) == len(A.shape) - 1
    rows, columns = (b.shape[-1], ()) if vector else (b.shape[-2], b.shape[-1:])
    batch = broadcast_shapes(A.shape[:-2], b.shape[:-1] if vector else b.shape[:-2])
    allowed = ("gels", "gelsy", "gelsd", "gelss") if A.device.type == "cpu" else ("gels",)
    driver = driver or ("gelsy" if A.device.type == "cpu" else "gels")
    require(rows == m and driver in allowed, f"rows and drivers that fit are expected, of drivers one of {allowed}")
    residuals = (*batch, *columns) if m > n and driver != "gelsy" else (0,)
    return torch.return_types.linalg_lstsq((
        like(A, (*batch, n, *columns)),
        like(A, residuals, real_of(A.dtype)),
        like(A, batch if driver != "gels" else (0,), int64),
        like(A, (*batch, min(m, n)) if driver in ("gelsd", "gelss") else (0,), real_of(A.dtype)),
    ))  # fmt: skip


@torch_prim(torch.geqrf, torch.Tensor.geqrf, autocast=_CPU)
def geqrf(a):
    require(len(a.shape) >= 2)
    return torch.return_types.geqrf((like(a), like(a, (*a.shape[:-2], min(a.shape[-2:])))))


lstsq.nondifferentiable = (2, 3)
lstsq.synchronises = True
