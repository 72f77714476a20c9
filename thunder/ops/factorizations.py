"""Functions of matrices: inverses, determinants, factorizations, norms. PyTorch computes each in one piece; batches in the leading dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder.core.dtypes import real_of
from thunder.core.proxies import like
from thunder.core.symbol import Symbol
from thunder.ops.define import LTORCH, alias, torch_prim
from thunder.ops.dims import wrap_dims
from thunder.ops.promotion import broadcast_shapes

_CPU = "cpu:float32"


def _square(name: str, a) -> None:
    if len(a.shape) < 2:
        raise RuntimeError(f"{name}: The input tensor A must have at least 2 dimensions.")
    if a.shape[-1] != a.shape[-2]:
        raise RuntimeError(f"{name}: A must be batches of square matrices, but they are {a.shape[-2]} by {a.shape[-1]} matrices")
    if a.dtype.category < 2:
        raise RuntimeError(f"{name}: Expected a floating point or complex tensor as input. Got {a.dtype}")


def _same(a):
    return like(a)


def _scalar(a):
    return like(a, a.shape[:-2])


def _values(a):
    return like(a, a.shape[:-1], real_of(a.dtype))


def square(name: str, result: Callable, *functions: Callable, autocast: str | None = None, definite: bool = False, options: tuple = ()) -> Symbol:
    """A function of one square matrix; `result` types it. definite: samples are positive definite. options: keywords, which do not change the type."""

    def meta(a, **given):
        unknown = next((k for k in given if k not in options), None)
        if unknown is not None:
            raise TypeError(f"{name}() got an unexpected keyword argument '{unknown}'")
        _square(name, a)
        return result(a)

    symbol = torch_prim(*functions, name=name, autocast=autocast)(meta)

    def well(make, *shape):
        x = make(*shape)
        return x @ x.mT + torch.eye(shape[-1]) if definite else x + 4 * torch.eye(shape[-1])

    @symbol.samples
    def _(make):
        yield (well(make, 3, 3),)
        yield (well(make, 2, 3, 3),)

    @symbol.error_samples
    def _(make):
        yield (make(3, 2),)

    return symbol


inverse = square("linalg_inv", _same, torch.linalg.inv, torch.inverse, torch.Tensor.inverse, autocast=_CPU)
det = square("linalg_det", _scalar, torch.linalg.det, torch.det, torch.Tensor.det)
logdet = square("logdet", _scalar, torch.logdet, torch.Tensor.logdet, definite=True)
slogdet = square("linalg_slogdet", lambda a: (_scalar(a), like(a, a.shape[:-2], real_of(a.dtype))), torch.linalg.slogdet)
matrix_exp = square("matrix_exp", _same, torch.linalg.matrix_exp, torch.matrix_exp, torch.Tensor.matrix_exp)
eigvalsh = square("linalg_eigvalsh", _values, torch.linalg.eigvalsh, autocast=_CPU, definite=True, options=("UPLO",))
_cholesky = square("linalg_cholesky", _same, torch.linalg.cholesky, autocast=_CPU, definite=True, options=("upper",))


@alias(torch.slogdet, torch.Tensor.slogdet)
def slogdet_alias(a):
    return slogdet(a)


@torch_prim(torch.linalg.solve, name="linalg_solve", autocast=_CPU)
def linalg_solve(A, B, *, left=True):
    _square("linalg.solve", A)
    if len(B.shape) == 1 or (len(B.shape) == len(A.shape) - 1 and B.shape == A.shape[:-1]):
        return like(A, (*broadcast_shapes(A.shape[:-2], B.shape[:-1]), B.shape[-1]))
    return like(A, (*broadcast_shapes(A.shape[:-2], B.shape[:-2]), *B.shape[-2:]))


@linalg_solve.samples
def _(make):
    yield make(3, 3) + 4 * torch.eye(3), make(3)
    yield make(2, 3, 3) + 4 * torch.eye(3), make(2, 3, 4)
    yield make(2, 3, 3) + 4 * torch.eye(3), make(2, 3)


@torch_prim(torch.linalg.solve_triangular, name="linalg_solve_triangular")
def linalg_solve_triangular(A, B, *, upper, left=True, unitriangular=False):
    _square("linalg.solve_triangular", A)
    return like(A, (*broadcast_shapes(A.shape[:-2], B.shape[:-2]), *B.shape[-2:]))


@linalg_solve_triangular.samples
def _(make):
    yield (make(3, 3) + 4 * torch.eye(3), make(3, 2)), {"upper": True}


@torch_prim(torch.linalg.matrix_norm, name="linalg_matrix_norm", autocast="cuda:float32")
def linalg_matrix_norm(A, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None):
    dims = wrap_dims(dim, len(A.shape))
    shape = tuple(1 if i in dims else n for i, n in enumerate(A.shape)) if keepdim else tuple(n for i, n in enumerate(A.shape) if i not in dims)
    return like(A, shape, real_of(LTORCH["to"].meta(A, dtype=dtype).dtype))


@linalg_matrix_norm.samples
def _(make):
    yield (make(3, 4),)
    yield make(2, 3, 4), "nuc"
    yield (make(2, 3, 4), 1), {"keepdim": True}


@torch_prim(torch.linalg.matrix_power, torch.matrix_power, torch.Tensor.matrix_power, name="matrix_power", autocast="lower")
def matrix_power(A, n):
    if len(A.shape) < 2 or A.shape[-1] != A.shape[-2]:
        raise RuntimeError("linalg.matrix_power: A must be batches of square matrices")
    return like(A)


# it is the products inside that are cast
matrix_power.info["autocast_when"] = lambda kind, args, kwargs: args[1] not in (0, 1)


@matrix_power.samples
def _(make):
    yield make(3, 3), 3
    yield make(2, 3, 3), 0
