"""Linear equations, by triangles and in the sense of least squares. Batches in the leading dimensions.

Derivatives are in the form that PyTorch's autograd computes them (torch/csrc/autograd/FunctionsManual.cpp).
"""

from __future__ import annotations

import functools
import math

import torch

from thunder import compat
from thunder.core.dtypes import int32, int64, real_of
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, Symbol, current_recorder, primitive
from thunder.ops import ltorch
from thunder.ops.backward import kernel, sum_to
from thunder.ops.families.factorizations import _CPU, matrices, mT, product, square, types
from thunder.ops.families.shape import adjoint
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require, wrap_dim
from thunder.ops.signature import without_none
from thunder.ops.torch_types import to_torch_dtype

# ---------------------------------------------------------------------------------------------------------------- a
# square matrix


def _is_vector(A, B) -> bool:
    """Whether B is a vector, or a batch of them, and not of matrices."""
    return len(B.shape) == 1 or (len(B.shape) == len(A.shape) - 1 and B.shape == A.shape[:-1])


def _solution(A, B, left: bool):
    square(A)
    require(B.dtype is A.dtype)
    if _is_vector(A, B):
        require(left)
        return like(A, (*broadcast_shapes(A.shape[:-2], B.shape[:-1]), _fitting(A, B.shape[-1])))
    return like(A, (*broadcast_shapes(A.shape[:-2], B.shape[:-2]), *sides(A, B, left)))


def _fitting(A, n):
    require(A.shape[-1] is n or A.shape[-1] == n)
    return n


def sides(A, B, left: bool) -> tuple:
    require(len(B.shape) >= 2)
    _fitting(A, B.shape[-2 if left else -1])
    return B.shape[-2:]


@torch_prim(torch.linalg.solve, name="linalg_solve", autocast=_CPU)
def linalg_solve(A, B, *, left=True):
    return _solution(A, B, left)


@torch_prim(torch.linalg.solve_ex, name="linalg_solve_ex")
def solve_ex(A, B, *, left=True, check_errors=False):
    x = _solution(A, B, left)
    return types.linalg_solve_ex((x, like(A, x.shape[: len(x.shape) - (1 if _is_vector(A, B) else 2)], int32)))


solve_ex.nondifferentiable = (1,)


def _solve_parts(A, B, left, check_errors):
    x = _solution(A, B, left)
    batch = x.shape[: len(x.shape) - (1 if _is_vector(A, B) else 2)]
    return x, like(A, (*batch, *A.shape[-2:])), like(A, (*batch, A.shape[-1]), int32), like(A, batch, int32)


solve_kernel = Symbol(
    "solve_with_factors",
    _solve_parts,
    id="solve_with_factors",
    is_prim=True,
    fn=lambda A, B, left, check: compat.kernel("_linalg_solve_ex")(A, B, left=left, check_errors=check),
)
check_errors = kernel("_linalg_check_errors", "default", lambda info, name, *, is_matrix: None, tags=(OpTags.DONT_DCE,))


@functools.cache
def _factorizes_transposed(kind: str) -> bool:
    """Whether PyTorch factorizes the transposed of a contiguous matrix, which saves a copy: its versions differ."""
    a = torch.tensor([[1.0, 2.0], [4.0, 3.0]], device=kind)
    return not torch.equal(compat.kernel("_linalg_solve_ex")(a, a)[1], torch.linalg.lu_factor(a)[0])


# A' X = B, with the factors that solve_with_factors found; of complex numbers A' is the adjoint
@primitive(lambda A, LU, pivots, B, left: like(B))
def solve_transposed(A, LU, pivots, B, left):
    transposed = A.is_contiguous() and not A.is_complex() and _factorizes_transposed(A.device.type)
    return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=not transposed)


derivatives.conjugates.add(solve_transposed)


def _solved(g, A, B, x, left, transposed) -> tuple:
    """The gradients of A and B: A' gB = gX, gA = -gB X' (Giles 2008). `transposed(gX)` solves the first."""
    vector = _is_vector(A, B)
    g, x = (ltorch.unsqueeze(t, -1) if vector else t for t in (g, x))
    of_b = transposed(g)
    of_a = product(of_b, mT(x)) if left else product(mT(x), of_b)
    return sum_to(ltorch.neg(of_a), A.shape), sum_to(ltorch.squeeze(of_b, -1) if vector else of_b, B.shape)


def _solve_rules(symbol: Symbol, pair: bool) -> None:
    """Gives `solve` or `solve_ex` its derivative: a second system with the same factors. pair: it returns (x, info)."""

    @symbol.vjp
    def _(A, B, *, left=True, check_errors=False):
        x, LU, pivots, info = solve_kernel(A, B, left, check_errors)
        if pair:
            g, _ = yield types.linalg_solve_ex((x, info))
        else:
            _check("torch.linalg.solve", info, A)
            g = yield x
        return _solved(g, A, B, x, left, lambda g: solve_transposed(A, LU, pivots, g, left))

    def again(A, B, *, left=True, check_errors=False):
        """Where a second derivative may follow, the factors are not constants: the transposed equation is solved
        anew."""
        y = symbol(A, B, left=left, **({"check_errors": check_errors} if pair else {}))
        g = yield y
        x, g = (y[0], g[0]) if pair else (y, g)
        return _solved(g, A, B, x, left, lambda g: linalg_solve(mT(A), g, left=left))

    derivatives.functional.set(again, symbol)


def _check(name: str, info, A) -> None:
    check_errors(info, name, is_matrix=len(A.shape) == 2)


_solve_rules(linalg_solve, False)
_solve_rules(solve_ex, True)


# ----------------------------------------------------------------------------------------------------------------
# triangles


def _strict(x, upper: bool, unitriangular: bool):
    """The triangle of a gradient; without the diagonal where that is ones."""
    return ltorch.triu(x, int(unitriangular)) if upper else ltorch.tril(x, -int(unitriangular))


@torch_prim(torch.linalg.solve_triangular, name="linalg_solve_triangular")
def linalg_solve_triangular(A, B, *, upper, left=True, unitriangular=False):
    square(A)
    return like(A, (*broadcast_shapes(A.shape[:-2], B.shape[:-2]), *sides(A, B, left)))


@linalg_solve_triangular.vjp
def _(A, B, *, upper, left=True, unitriangular=False):
    x = linalg_solve_triangular(A, B, upper=upper, left=left, unitriangular=unitriangular)
    g = yield x
    of_b = linalg_solve_triangular(mT(A), g, upper=not upper, left=left, unitriangular=unitriangular)
    of_a = ltorch.neg(product(of_b, mT(x)) if left else product(mT(x), of_b))
    return sum_to(_strict(of_a, upper, unitriangular), A.shape), sum_to(of_b, B.shape)


@torch_prim(torch.triangular_solve, torch.Tensor.triangular_solve, autocast=_CPU)
def triangular_solve(b, A, upper=True, transpose=False, unitriangular=False):
    square(A)
    matrices(b)
    batch = broadcast_shapes(A.shape[:-2], b.shape[:-2])
    return types.triangular_solve((like(b, (*batch, *sides(A, b, True))), like(A, (*batch, *A.shape[-2:]))))


@triangular_solve.vjp
def _(b, A, upper=True, transpose=False, unitriangular=False):
    y = triangular_solve(b, A, upper, transpose, unitriangular)
    g, of_copy = yield y
    of_b = triangular_solve(g, A, upper, not transpose, unitriangular)[0]
    of_a = ltorch.neg(product(y[0], mT(of_b)) if transpose else product(of_b, mT(y[0])))
    return sum_to(of_b, b.shape), sum_to(_strict(of_a, upper, unitriangular) + of_copy, A.shape)


# ---------------------------------------------------------------------------------------------------------------- least
# squares


def _pinv_meta(A, rcond=None, hermitian=False, *, atol=None, rtol=None):
    if hermitian:
        square(A)
    batch, m, n = matrices(A)
    return like(A, (*batch, n, m))


@composite(torch.linalg.pinv, name="linalg_pinv", canonicalize=without_none, meta=_pinv_meta)
def pinv(A, rcond=None, hermitian=False, *, atol=None, rtol=None):
    """The inverses of the singular values, or eigenvalues, that are larger than the larger of atol and rtol times the
    largest; zeros for the others."""
    if 0 in A.shape[-2:]:
        return ltorch.zeros((*A.shape[:-2], A.shape[-1], A.shape[-2]), dtype=A.dtype, device=A.device)
    if hermitian:
        values, right = ltorch.linalg_eigh(A)
        sizes, left = ltorch.abs(values), right
    else:
        u, sizes, vh = ltorch.linalg_svd(A, False)
        values, left, right = sizes, adjoint(vh), u
    rtol, largest = rcond if rtol is None else rtol, ltorch.amax(sizes, -1, True)
    default = max(A.shape[-2:]) * torch.finfo(to_torch_dtype(A.dtype)).eps
    if isinstance(atol, TensorProxy) and rtol is None:
        rtol = ltorch.where(atol > 0, 0.0, default)
    rtol = (default if not atol else 0.0) if rtol is None else rtol
    bound = (ltorch.unsqueeze(rtol, -1) if isinstance(rtol, TensorProxy) else rtol) * largest
    if isinstance(atol, TensorProxy):
        bound = ltorch.maximum(ltorch.unsqueeze(atol, -1), bound)
    elif atol:
        bound = ltorch.clamp(bound, atol)
    inverted = ltorch.where(sizes > bound, ltorch.reciprocal(values), 0.0)
    return product(left * ltorch.unsqueeze(inverted, -2), adjoint(right))


@alias(torch.linalg.pinv, over=pinv)
def _pinv_call(*args, **kwargs):
    """Under autocast PyTorch casts the product that it ends in."""
    recorder = current_recorder()
    if recorder is None or recorder.context.autocast is None:
        return pinv(*args, **kwargs)
    pinv.meta(*args, **kwargs)
    return pinv.decomposition(*args, **kwargs)  # type: ignore[misc]


@composite(torch.pinverse, torch.Tensor.pinverse, autocast=_CPU)
def pinverse(a, rcond=1e-15):
    return pinv(a, rcond)


@pinv.vjp
def _(A, *options, **named):
    """(Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
    separate", 1973)"""
    y = pinv(A, *options, **named)
    g = mT((yield y))
    t = mT(y)
    if A.shape[-2] <= A.shape[-1]:
        k = product(g, y)
        right = product(k, t)
        return (right - mT(product(y, k)) - product(product(A, y), right) + product(product(t, y), g - product(k, A)),)
    k = product(y, g)
    left = product(t, k)
    return (left - mT(product(k, y)) + product(product(g - product(A, k), y), t) - product(product(left, y), A),)


@torch_prim(torch.linalg.lstsq, name="linalg_lstsq", autocast=_CPU)
def lstsq(A, b, rcond=None, *, driver=None):
    """Residuals are those of matrices of full rank: gelsd and gelss leave them out for others. PyTorch's derivative."""
    batch, m, n = matrices(A)
    require(len(A.shape) - len(b.shape) in (0, 1) and b.shape and b.dtype is A.dtype)
    vector = len(b.shape) == len(A.shape) - 1
    rows, columns = (b.shape[-1], ()) if vector else (b.shape[-2], b.shape[-1:])
    batch = broadcast_shapes(batch, b.shape[:-1] if vector else b.shape[:-2])
    allowed = ("gels", "gelsy", "gelsd", "gelss") if A.device.type == "cpu" else ("gels",)
    driver = driver or ("gelsy" if A.device.type == "cpu" else "gels")
    require(rows == m and driver in allowed)
    residuals = (*batch, *columns) if m > n and driver != "gelsy" else (0,)
    return types.linalg_lstsq((
        like(A, (*batch, n, *columns)), like(A, residuals, real_of(A.dtype)),
            like(A, batch if driver != "gels" else (0,), int64),
        like(A, (*batch, min(m, n)) if driver in ("gelsd", "gelss") else (0,), real_of(A.dtype)),
    ))  # fmt: skip


lstsq.nondifferentiable = (2, 3)


# ----------------------------------------------------------------------------------------------------------------
# tensors as matrices


@composite(torch.linalg.tensorinv, name="linalg_tensorinv", autocast=_CPU)
def tensorinv(A, ind=2):
    require(ind > 0)
    start, end = A.shape[:ind], A.shape[ind:]
    require(math.prod(start) == math.prod(end))
    matrix = ltorch.reshape(A, (math.prod(end), math.prod(start)))
    return ltorch.reshape(ltorch.linalg_inv(matrix), (*end, *start))


@composite(torch.linalg.tensorsolve, name="linalg_tensorsolve", autocast=_CPU)
def tensorsolve(A, B, dims=None):
    rank = len(A.shape)
    moved = [wrap_dim(d, rank) for d in dims or ()]
    A = ltorch.movedim(A, moved, list(range(rank - len(moved), rank))) if moved else A
    solution_shape = A.shape[len(B.shape) :]
    require(math.prod(solution_shape) == math.prod(B.shape))
    matrix = ltorch.reshape(A, (math.prod(B.shape), math.prod(solution_shape)))
    return ltorch.reshape(linalg_solve(matrix, ltorch.reshape(B, (math.prod(B.shape),))), solution_shape)


# ----------------------------------------------------------------------------------------------------------------
# a few eigenvalues, from random vectors


@torch_prim(torch.lobpcg, tags=(OpTags.RANDOM_OP, OpTags.DONT_DCE))
def lobpcg(
    A,
    k=None,
    B=None,
    X=None,
    n=None,
    iK=None,
    niter=None,
    tol=None,
    largest=None,
    method=None,
    tracker=None,
    ortho_iparams=None,
    ortho_fparams=None,
    ortho_bparams=None,
):
    """The types of the results of `torch.lobpcg`: eigenvalues and eigenvectors."""
    batch, m, _ = matrices(A)
    count = (1 if X is None else X.shape[-1]) if k is None else k
    require(m >= 3 * count)
    return like(A, (*batch, count)), like(A, (*batch, m, count))


# PyTorch composes these of the same operations
derivatives.composed.set(True, pinverse, tensorinv, tensorsolve)
derivatives.of_complex.set("PyTorch's", pinv)  # it reads conjugates
# a rule that is PyTorch's formula in another order; `tests/test_numerics_options.py` asks it of every operation
derivatives.inexact.add(pinv, pinverse)
effects.synchronises.add(
    ltorch.linalg_solve, ltorch.linalg_solve_ex, ltorch.linalg_solve_triangular, ltorch.linalg_lstsq,
    ltorch.linalg_tensorinv, ltorch.linalg_tensorsolve, pinv, pinverse,
)  # fmt: skip
# PyTorch composes it of others, which autocast casts
casts_inside(torch.linalg.pinv, torch.pinverse)
effects.may_raise.add(linalg_solve, ltorch.linalg_lstsq, pinv, tensorinv, tensorsolve)
