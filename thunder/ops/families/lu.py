"""The LU and LDL factorizations, and equations solved by them.

Derivatives are in the form that PyTorch's autograd computes them (torch/csrc/autograd/FunctionsManual.cpp).
"""

from __future__ import annotations

import torch

from thunder.core.dtypes import int32
from thunder.core.proxies import like
from thunder.core.symbol import Symbol
from thunder.ops import ltorch
from thunder.ops.backward import sum_to
from thunder.ops.families.equations import linalg_solve_triangular, sides
from thunder.ops.families.factorizations import _CPU, matrices, mT, of_square, product, square, types
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require


def _pivots(A):
    return like(A, (*A.shape[:-2], min(A.shape[-2:])), int32)


@torch_prim(torch.linalg.lu_factor_ex, name="linalg_lu_factor_ex")
def lu_factor_ex(A, *, pivot=True, check_errors=False):
    batch, *_ = matrices(A)
    return types.linalg_lu_factor_ex((like(A), _pivots(A), like(A, batch, int32)))


@torch_prim(torch.linalg.lu_factor, name="linalg_lu_factor")
def lu_factor(A, *, pivot=True):
    matrices(A)
    return types.linalg_lu_factor((like(A), _pivots(A)))


def _lu_parts(A) -> tuple:
    batch, m, n = A.shape[:-2], *A.shape[-2:]
    k = min(m, n)
    return like(A, (*batch, m, m)), like(A, (*batch, m, k)), like(A, (*batch, k, n))


@torch_prim(torch.linalg.lu, name="linalg_lu")
def linalg_lu(A, *, pivot=True):
    matrices(A)
    p, l, u = _lu_parts(A)
    return types.linalg_lu((p if pivot else like(A, (0,)), l, u))


linalg_lu.nondifferentiable = (0,)


@torch_prim(torch.lu_unpack)
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    require(LU_pivots.dtype is int32)
    require(len(LU_data.shape) >= 2)
    p, l, u = _lu_parts(LU_data)
    nothing = like(LU_data, (0,))
    return types.lu_unpack(
        (p if unpack_pivots else nothing, l if unpack_data else like(nothing), u if unpack_data else like(nothing))
    )


lu_unpack.nondifferentiable = (0,)


@composite(torch.lu, torch.functional.lu, name="lu", autocast=_CPU)
def old_lu(a, pivot=True, get_infos=False):
    LU, pivots, info = lu_factor_ex(a, pivot=pivot)
    return types._lu_with_info((LU, pivots, info)) if get_infos else (LU, pivots)


@alias(torch.Tensor.lu)
def lu_method(a, pivot=True, get_infos=False):
    return tuple(old_lu(a, pivot, get_infos))


def _of_lu(p, l, u, gl, gu):
    """The gradient of A = P L U.

    With square factors it is P L'^-1 (tril(L' gL, -1) + triu(gU U')) U'^-1. Of a wide matrix the further columns of U
    are L^-1 A2, of a tall one the further rows of L are A2 U^-1: they give gradients to A2 and to the square factors.
    """
    m, n = l.shape[-2], u.shape[-1]
    tril, triu, pad, solve = ltorch.tril, ltorch.triu, ltorch.pad, linalg_solve_triangular
    if m > n:
        gl, square_l = tril(gl, -1), ltorch.narrow(l, -2, 0, n)
        inner = triu(product(gu, mT(u)) - product(mT(l), gl))
        inner = gl + pad(solve(mT(square_l), inner, upper=True, unitriangular=True), (0, 0, 0, m - n))
        out = solve(mT(u), inner, upper=False, left=False)
    else:
        inner = product(mT(l), gl)
        if m < n:
            gu = triu(gu)
            inner = tril(inner - product(gu, mT(u)), -1)
            inner = gu + pad(solve(mT(ltorch.narrow(u, -1, 0, m)), inner, upper=False, left=False), (0, n - m))
        else:
            inner = solve(mT(u), tril(inner, -1) + triu(product(gu, mT(u))), upper=False, left=False)
        out = solve(mT(l), inner, upper=True, unitriangular=True)
    return out if p is None else product(p, out)


@linalg_lu.vjp
def _(A, *, pivot=True):
    p, l, u = y = linalg_lu(A, pivot=pivot)
    _, gl, gu = yield y
    return (_of_lu(p if pivot else None, l, u, gl, gu),)


def _first(x, dim: int, k):
    return x if x.shape[dim] == k else ltorch.narrow(x, dim, 0, k)


def _of_packed(symbol: Symbol) -> None:
    """Both factors in one matrix, the ones on the diagonal of L left out."""

    @symbol.vjp
    def _(A, **options):
        y = symbol(A, **options)
        g = (yield y)[0]
        pivot, k = options.get("pivot", True), min(A.shape[-2:])
        p, l, u = lu_unpack(y[0], y[1], True, pivot)
        return (_of_lu(p if pivot else None, l, u, _first(g, -1, k), _first(g, -2, k)),)


_of_packed(lu_factor)
_of_packed(lu_factor_ex)


@lu_unpack.vjp
def _(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    if not unpack_data:
        return NotImplemented
    _, gl, gu = yield lu_unpack(LU_data, LU_pivots, unpack_data, unpack_pivots)
    m, n = LU_data.shape[-2:]
    lower, upper = ltorch.tril(gl, -1), ltorch.triu(gu)
    lower = lower if m >= n else ltorch.pad(lower, (0, n - m))
    upper = upper if n >= m else ltorch.pad(upper, (0, 0, 0, m - n))
    return lower + upper, None


@torch_prim(torch.linalg.lu_solve, name="linalg_lu_solve")
def linalg_lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    square(LU)
    matrices(B)
    require(pivots.dtype is int32 and pivots.shape == LU.shape[:-1] and B.dtype is LU.dtype)
    return like(LU, (*broadcast_shapes(LU.shape[:-2], B.shape[:-2]), *sides(LU, B, left)))


@linalg_lu_solve.vjp
def _(LU, pivots, B, *, left=True, adjoint=False):
    x = linalg_lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
    g = yield x
    of_b = linalg_lu_solve(LU, pivots, g, left=left, adjoint=not adjoint)
    p, l, u = lu_unpack(LU, pivots, True, left == adjoint)
    ut = mT(u)
    if left != adjoint:  # P L U X = B: W = U'^-1 gX X', gU = -triu(W), gL = -tril(L'^-1 W U')
        of_u = linalg_solve_triangular(ut, product(g, mT(x)) if left else product(mT(g), x), upper=False)
        of_l = linalg_solve_triangular(mT(l), product(of_u, ut), upper=True, unitriangular=True)
    else:  # (P L U)' X = B: W = P' X gX' P L'^-1, gL = -tril(W), gU = -triu(L' W U'^-1)
        lt, x, gt = mT(l), x if left else mT(x), mT(g) if left else g
        of_l = linalg_solve_triangular(
            lt, product(product(mT(p), x), product(gt, p)), upper=True, left=False, unitriangular=True
        )
        of_u = linalg_solve_triangular(ut, product(lt, of_l), upper=False, left=False)
    return sum_to(ltorch.neg(ltorch.tril(of_l, -1) + ltorch.triu(of_u)), LU.shape), None, sum_to(of_b, B.shape)


@composite(torch.lu_solve, torch.Tensor.lu_solve, name="lu_solve", autocast=_CPU)
def old_lu_solve(b, LU_data, LU_pivots):
    return linalg_lu_solve(LU_data, LU_pivots, b)


# ---------------------------------------------------------------------------------------------------------------- LDL:
# PyTorch has no derivatives

ldl_factor = of_square(
    "linalg_ldl_factor",
    lambda a: types.linalg_ldl_factor((like(a), _pivots(a))),
    torch.linalg.ldl_factor,
    options=("hermitian",),
)
ldl_factor_ex = of_square(
    "linalg_ldl_factor_ex", lambda a: types.linalg_ldl_factor_ex((like(a), _pivots(a), like(a, a.shape[:-2], int32))),
    torch.linalg.ldl_factor_ex,
    options=("hermitian", "check_errors"),
)  # fmt: skip


@torch_prim(torch.linalg.ldl_solve, name="linalg_ldl_solve")
def ldl_solve(LD, pivots, B, *, hermitian=False):
    square(LD)
    require(pivots.shape == LD.shape[:-1] and B.dtype is LD.dtype and len(B.shape) >= 2)
    return like(B, (*broadcast_shapes(LD.shape[:-2], B.shape[:-2]), *sides(LD, B, True)))


# PyTorch composes these of the same operations
derivatives.composed.set(True, old_lu, old_lu_solve)
derivatives.of_complex.set("PyTorch's", linalg_lu_solve)  # the adjoint of complex factors is conjugated already
effects.synchronises.add(
    ltorch.linalg_ldl_factor, ltorch.linalg_ldl_factor_ex, ltorch.linalg_lu_factor_ex, ltorch.linalg_lu_factor,
    ltorch.linalg_lu, ltorch.linalg_lu_solve, ltorch.linalg_ldl_solve, old_lu, old_lu_solve,
)  # fmt: skip
effects.may_raise.add(lu_factor, ltorch.linalg_ldl_factor)
