"""Factorizations of matrices, and functions of one square matrix. PyTorch computes each in one piece; batches in the
leading dimensions.

Derivatives are those of Giles, "Collected matrix derivative results for forward and reverse mode algorithmic
differentiation" (2008), in the form that PyTorch's autograd computes them (torch/csrc/autograd/FunctionsManual.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.dtypes import complex_of, int32, real_of
from thunder.core.proxies import like
from thunder.core.symbol import Symbol, primitive
from thunder.ops import autocast, ltorch
from thunder.ops.backward import kernel, sum_to
from thunder.ops.families.shape import adjoint
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require

_CPU = "cpu:float32"
types = torch.return_types


def matrices(a, narrow: bool = False) -> tuple:
    """(batch, rows, columns) of a floating or complex matrix, or batches of them. narrow: types below 32 bits are
    taken."""
    require(len(a.shape) >= 2)
    require(a.dtype.category >= 2)
    require(narrow or real_of(a.dtype).bytes >= 4)
    return a.shape[:-2], a.shape[-2], a.shape[-1]


def square(a, narrow: bool = False) -> None:
    _, m, n = matrices(a, narrow)
    require(m is n or m == n)


def mT(a):
    return ltorch.transpose(a, -2, -1)


def product(a, b):
    return ltorch.matmul(a, b)


def _triangular(a, b, **options):
    return ltorch.linalg_solve_triangular(a, b, **options)


def _same(a):
    return like(a)


def _scalar(a):
    return like(a, a.shape[:-2])


def _values(a):
    return like(a, a.shape[:-1], real_of(a.dtype))


def _infos(a):
    """What LAPACK returned for each matrix."""
    return like(a, a.shape[:-2], int32)


def _signed(a):
    return types.linalg_slogdet((_scalar(a), like(a, a.shape[:-2], real_of(a.dtype))))


def of_square(
    name: str,
    result: Callable,
    *functions: Callable,
    autocast: str | None = None,
    options: tuple = (),
    info: tuple = (),
) -> Symbol:
    """A function of one square matrix; `result` types it. options: keywords,
    which do not change the type."""

    def meta(a, **keywords):
        unknown = next((k for k in keywords if k not in options), None)
        require(unknown is None)
        square(a, narrow=name == "matrix_exp")
        return result(a)

    symbol = torch_prim(*functions, name=name, autocast=autocast)(meta)
    symbol.nondifferentiable = info
    return symbol


inverse = of_square("linalg_inv", _same, torch.linalg.inv, torch.inverse, torch.Tensor.inverse, autocast=_CPU)
inverse_ex = of_square(
    "linalg_inv_ex",
    lambda a: types.linalg_inv_ex((_same(a), _infos(a))),
    torch.linalg.inv_ex,
    autocast=_CPU,
    options=("check_errors",),
    info=(1,),
)
det = of_square("linalg_det", _scalar, torch.linalg.det, torch.det, torch.Tensor.det)
logdet = of_square("logdet", _scalar, torch.logdet, torch.Tensor.logdet)
slogdet = of_square("linalg_slogdet", _signed, torch.linalg.slogdet)
matrix_exp = of_square("matrix_exp", _same, torch.linalg.matrix_exp, torch.matrix_exp, torch.Tensor.matrix_exp)


@alias(torch.slogdet, torch.Tensor.slogdet)
def slogdet_alias(a):
    return types.slogdet(slogdet(a))


def _power_meta(A, n):
    require(len(A.shape) >= 2 and A.shape[-1] == A.shape[-2])
    return like(A)


@composite(
    torch.linalg.matrix_power,
    torch.matrix_power,
    torch.Tensor.matrix_power,
    name="matrix_power",
    autocast="lower",
    meta=_power_meta,
)
def matrix_power(A, n):
    """By squaring, in PyTorch's order."""
    if n == 0:
        return ltorch.expand(ltorch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A.shape)
    power, result = A, None
    if n == 3:
        return product(product(A, A), A)
    while True:
        if n % 2:
            result = power if result is None else product(result, power)
        n //= 2
        if n == 0:
            return ltorch.clone(result) if result is A else result
        power = product(power, power)


@alias(*matrix_power.torch_functions, over=matrix_power)
def _power_call(A, n):
    """A negative power is one of the inverse, which autocast treats otherwise than products."""
    if n >= 0 or len(A.shape) < 2:
        return matrix_power(A, n)
    return inverse(A) if n == -1 else matrix_power(inverse(A), -n)


# PyTorch composes it of products, which are what autocast casts; the gradient of the power 0 is zeros
derivatives.composed.set(lambda A, n: n != 0, matrix_power)
autocast.when.set(lambda kind, args, kwargs: args[1] not in (0, 1), matrix_power)


def _of_inverse(symbol: Symbol, pair: bool) -> None:
    @symbol.vjp
    def _(a, **options):
        y = symbol(a, **options)
        inverted = y[0] if pair else y
        g = yield y
        return (ltorch.neg(product(mT(inverted), product(g[0] if pair else g, mT(inverted)))),)


_of_inverse(inverse, False)
_of_inverse(inverse_ex, True)


# ----------------------------------------------------------------------------------------------------------------
# Cholesky

cholesky = of_square("linalg_cholesky", _same, torch.linalg.cholesky, autocast=_CPU, options=("upper",))
cholesky_ex = of_square(
    "linalg_cholesky_ex", lambda a: types.linalg_cholesky_ex((_same(a), _infos(a))), torch.linalg.cholesky_ex,
    autocast=_CPU, options=("upper", "check_errors"),
    info=(1,),
)  # fmt: skip


@torch_prim(*compat.unless_removed("cholesky"), name="cholesky", autocast=_CPU)
def old_cholesky(a, upper=False):
    square(a)
    return like(a)


def _of_cholesky(symbol: Symbol, pair: bool) -> None:
    """Gives a Cholesky factorization its derivative. pair: it returns (factor, info)."""

    @symbol.vjp
    def _(a, upper=False, **options):
        """With A = L L', gA = L'^-1 sym(tril(L' gL)) L^-1 / 2, where sym repeats above the diagonal what is below
        (Murray, arXiv:1602.07527)."""
        y = symbol(a, upper) if symbol is old_cholesky else symbol(a, upper=upper, **options)
        g = yield y
        l, g = (y[0], g[0]) if pair else (y, g)
        l, g = (mT(l), mT(g)) if upper else (l, g)
        phi = ltorch.tril(product(mT(l), g))
        phi = (phi + mT(ltorch.tril(phi, -1))) * 0.5
        return (_triangular(l, _triangular(mT(l), phi, upper=True, left=True), upper=False, left=False),)


for _symbol in (cholesky, old_cholesky, cholesky_ex):
    _of_cholesky(_symbol, _symbol is cholesky_ex)


@torch_prim(torch.cholesky_inverse, torch.Tensor.cholesky_inverse, autocast=_CPU)
def cholesky_inverse(a, upper=False):
    """The inverse of the matrix whose Cholesky factor is `a`."""
    square(a)
    return like(a)


@cholesky_inverse.vjp
def _(a, upper=False):
    y = cholesky_inverse(a, upper)
    g = yield y
    common = product(y, product(g + mT(g), y))
    return (ltorch.neg(product(a, common) if upper else product(common, a)),)


@torch_prim(torch.cholesky_solve, torch.Tensor.cholesky_solve, autocast=_CPU)
def cholesky_solve(b, a, upper=False):
    """X with A X = B, `a` being the Cholesky factor of A."""
    square(a)
    batch, m, _ = matrices(b)
    require(m == a.shape[-1] and b.dtype is a.dtype)
    return like(b, (*broadcast_shapes(batch, a.shape[:-2]), *b.shape[-2:]))


@cholesky_solve.vjp
def _(b, a, upper=False):
    y = cholesky_solve(b, a, upper)
    g = yield y
    of_b = cholesky_solve(g, a, upper)
    common = product(of_b, mT(y))
    common = common + mT(common)
    return sum_to(of_b, b.shape), sum_to(ltorch.neg(product(a, common) if upper else product(common, a)), a.shape)


# ----------------------------------------------------------------------------------------------------------------
# eigenvalues


# differences of all pairs of values, infinite on the diagonal: what is divided by them is zero there
@primitive(lambda values: like(values, (*values.shape, values.shape[-1])))
def gaps(values):
    out = values.unsqueeze(-2) - values.unsqueeze(-1)
    out.diagonal(0, -2, -1).fill_(math.inf)
    return out


eigh = of_square(
    "linalg_eigh", lambda a: types.linalg_eigh((_values(a), _same(a))), torch.linalg.eigh, autocast=_CPU,
    options=("UPLO",)
)  # fmt: skip
eigvalsh = of_square("linalg_eigvalsh", _values, torch.linalg.eigvalsh, autocast=_CPU, options=("UPLO",))
eigh_kernel = kernel("_linalg_eigh", "default", lambda a, uplo, vectors: (_values(a), _same(a)))


def _complex_values(a):
    return like(a, a.shape[:-1], complex_of(a.dtype))


def _complex_matrix(a):
    return like(a, dtype=complex_of(a.dtype))


# results are complex: PyTorch's derivative
eig = of_square(
    "linalg_eig", lambda a: types.linalg_eig((_complex_values(a), _complex_matrix(a))), torch.linalg.eig, autocast=_CPU
)
eigvals = of_square("linalg_eigvals", _complex_values, torch.linalg.eigvals, autocast=_CPU)


@eigh.vjp
def _(a, UPLO="L"):
    """With A = V diag(l) V', gA = V (diag(gl) + skew(V' gV) / E) V', E the differences of eigenvalues."""
    values, vectors = y = eigh(a, UPLO=UPLO)
    gl, gv = yield y
    inner = product(mT(vectors), gv)
    inner = (inner - mT(inner)) * 0.5 / gaps(values)
    return (product(vectors, product(ltorch.diag_embed(gl) + inner, mT(vectors))),)


@eigvalsh.vjp
def _(a, UPLO="L"):
    values, vectors = eigh_kernel(a, UPLO, True)
    g = yield values
    return (product(vectors * ltorch.unsqueeze(g, -2), mT(vectors)),)


# ----------------------------------------------------------------------------------------------------------------
# singular values


def _svd_parts(a, full: bool) -> tuple:
    batch, m, n = matrices(a)
    k = min(m, n)
    return (
        like(a, (*batch, m, m if full else k)),
        like(a, (*batch, k), real_of(a.dtype)),
        like(a, (*batch, n if full else k, n)),
    )


def _run_svd(a, driver):
    return compat.kernel("_linalg_svd")(a, False, True, driver=driver)


# what PyTorch runs for singular values that are differentiated
svd_kernel = Symbol(
    "svd_with_vectors", lambda a, driver: _svd_parts(a, False), id="svd_with_vectors", is_prim=True, fn=_run_svd
)


@torch_prim(torch.linalg.svd, name="linalg_svd", autocast=_CPU)
def linalg_svd(A, full_matrices=True, *, driver=None):
    return types.linalg_svd(_svd_parts(A, full_matrices))


@torch_prim(torch.linalg.svdvals, name="linalg_svdvals", autocast=_CPU)
def svdvals(A, *, driver=None):
    return _svd_parts(A, False)[1]


@composite(torch.svd, torch.Tensor.svd, name="svd", autocast=_CPU)
def old_svd(a, some=True, compute_uv=True):
    if not compute_uv:
        batch, m, n = matrices(a)
        zeros = [ltorch.zeros(*batch, n, n, dtype=a.dtype, device=a.device) for n in (m, n)]
        return types.svd((zeros[0], svdvals(a), zeros[1]))
    u, s, vh = linalg_svd(a, not some)
    return types.svd((u, s, adjoint(vh)))


def of_svd(u, s, vh, gu, gs, gvh):
    """The gradient of A = U diag(s) V', from those of U, s and V' (Townsend, "Differentiating the singular value
    decomposition", 2016)."""
    m, k, n = u.shape[-2], s.shape[-1], vh.shape[-1]
    rows, columns = ltorch.unsqueeze(s, -2), ltorch.unsqueeze(s, -1)
    between = gaps(s * s)

    def skew(x):
        return x - mT(x)

    inner = skew(product(mT(u), gu)) / between * rows + columns * (skew(product(vh, mT(gvh))) / between)
    inner = inner + ltorch.diag_embed(gs)
    if m > k:
        scaled = gu / rows
        return product(product(u, inner) + (scaled - product(u, product(mT(u), scaled))), vh)
    if n > k:
        scaled = gvh / columns
        return product(u, product(inner, vh) + (scaled - product(product(scaled, mT(vh)), vh)))
    return product(u, product(inner, vh))


@linalg_svd.vjp
def _(A, full_matrices=True, *, driver=None):
    y = linalg_svd(A, full_matrices, driver=driver)
    gu, gs, gvh = yield y
    u, s, vh = y
    if full_matrices:  # the rest of an orthonormal basis is not determined
        k = s.shape[-1]
        u, gu, vh, gvh = (ltorch.narrow(x, d, 0, k) for x, d in ((u, -1), (gu, -1), (vh, -2), (gvh, -2)))
    return (of_svd(u, s, vh, gu, gs, gvh),)


@svdvals.vjp
def _(A, *, driver=None):
    u, s, vh = svd_kernel(A, driver)
    g = yield s
    if A.shape[-2] >= A.shape[-1]:
        return (product(u, ltorch.unsqueeze(g, -1) * vh),)
    return (product(u * ltorch.unsqueeze(g, -2), vh),)


# ----------------------------------------------------------------------------------------------------------------
# orthogonal and triangular


@torch_prim(torch.linalg.qr, name="linalg_qr", autocast=_CPU)
def linalg_qr(A, mode="reduced"):
    batch, m, n = matrices(A)
    require(mode in ("reduced", "complete", "r"))
    k = m if mode == "complete" else min(m, n)
    return types.linalg_qr((like(A, (0,)) if mode == "r" else like(A, (*batch, m, k)), like(A, (*batch, k, n))))


@composite(*compat.unless_removed("qr"), name="qr", autocast=_CPU)
def old_qr(a, some=True):
    return types.qr(linalg_qr(a, "reduced" if some else "complete"))


@linalg_qr.vjp
def _(A, mode="reduced"):
    """Of a matrix with no more columns than rows: gA = (gQ + Q sym(triu(M))) R'^-1 with M = gR R' - Q' gQ, where sym
    repeats below the diagonal what is above.

    Of a wide one: gA = Q (gR + [tril(M' - M, -1) R1'^-1, 0]), R1 being the square part of R. (Walter and Lehmann,
    "Algorithmic differentiation of linear algebra functions with application in optimum experimental design", 2010;
    Roberts and Roberts, arXiv:2009.10071.)
    """
    m, n = A.shape[-2], A.shape[-1]
    if mode == "r" or (mode == "complete" and m > n):
        return NotImplemented  # PyTorch refuses to differentiate these, in its own words
    q, r = y = linalg_qr(A, mode)
    gq, gr = yield y
    gr = gr if m >= n else ltorch.triu(gr)
    inner = product(gr, mT(r)) - product(mT(q), gq)
    if m >= n:
        inner = ltorch.triu(inner)
        return (_triangular(mT(r), gq + product(q, inner + mT(ltorch.triu(inner, 1))), upper=False, left=False),)
    inner = ltorch.tril(mT(inner) - inner, -1)
    inner = _triangular(mT(ltorch.narrow(r, -1, 0, m)), inner, upper=False, left=False)
    return (product(q, gr + ltorch.pad(inner, (0, n - m))),)


@torch_prim(torch.geqrf, torch.Tensor.geqrf, autocast=_CPU)
def geqrf(a):
    """Householder reflectors and their factors; PyTorch has no derivative."""
    batch, m, n = matrices(a)
    return types.geqrf((like(a), like(a, (*batch, min(m, n)))))


@torch_prim(
    torch.linalg.householder_product, torch.orgqr, torch.Tensor.orgqr, name="linalg_householder_product", autocast=_CPU
)
def householder_product(A, tau):
    batch, m, n = matrices(A)
    require(n <= m and tau.shape[:-1] == batch and tau.shape[-1:] <= (n,) and tau.dtype is A.dtype)
    return like(A)


@torch_prim(torch.ormqr, torch.Tensor.ormqr, autocast=_CPU)
def ormqr(a, tau, other, left=True, transpose=False):
    batch, m, _ = matrices(a)
    fits = (
        other.shape[:-2] == batch
        and tau.shape[:-1] == batch
        and len(other.shape) >= 2
        and other.shape[-2 if left else -1] == m
    )
    require(fits and tau.shape[-1] <= min(a.shape[-2:]) and not any(t.dtype is not a.dtype for t in (tau, other)))
    return like(other)


# PyTorch's derivative, which gives None where there are no reflectors


def _empty(*tensors) -> bool:
    return any(type(n) is int and n == 0 for t in tensors for n in t.shape)


@householder_product.vjp
def _(A, tau):
    if not _empty(A, tau):
        return NotImplemented
    yield householder_product(A, tau)
    return None, None


@ormqr.vjp
def _(a, tau, other, left=True, transpose=False):
    if not _empty(a, tau):
        return NotImplemented
    g = yield ormqr(a, tau, other, left, transpose)
    return None, None, ormqr(a, tau, g, left, not transpose)


# PyTorch composes these of the same operations
derivatives.composed.set(True, old_svd, old_qr)
# of complex matrices they choose phases, or read conjugates
derivatives.of_complex.set(
    "PyTorch's", old_cholesky, cholesky_inverse, cholesky_solve, old_svd, old_qr,
    ltorch.linalg_cholesky, ltorch.linalg_cholesky_ex, ltorch.linalg_eigh, ltorch.linalg_eigvalsh, ltorch.linalg_svd,
    ltorch.linalg_svdvals, ltorch.linalg_qr,
)  # fmt: skip
# rules that are PyTorch's formulas in another order; `tests/test_numerics_options.py` asks it of every operation
derivatives.inexact.add(ltorch.linalg_svd, old_svd)
# MAGMA and cuSOLVER are told sizes and tell errors on the host
effects.synchronises.add(
    ltorch.linalg_inv, ltorch.linalg_inv_ex, ltorch.linalg_det, ltorch.linalg_slogdet, ltorch.linalg_cholesky,
    ltorch.linalg_cholesky_ex, ltorch.linalg_eigh, ltorch.linalg_eigvalsh, ltorch.linalg_eig, ltorch.linalg_eigvals,
    ltorch.linalg_svd, ltorch.linalg_svdvals, ltorch.linalg_qr, ltorch.linalg_householder_product,
    ltorch.logdet, ltorch.cholesky, ltorch.cholesky_inverse, ltorch.cholesky_solve, ltorch.svd, ltorch.qr,
)  # fmt: skip
# matrices that are singular, not positive-definite or not finite
effects.may_raise.add(
    ltorch.linalg_inv, ltorch.linalg_cholesky, ltorch.linalg_eigh, ltorch.linalg_eigvalsh, ltorch.linalg_eig,
    ltorch.linalg_eigvals, ltorch.linalg_svd, ltorch.linalg_svdvals, old_cholesky, cholesky_inverse, old_svd,
)  # fmt: skip
