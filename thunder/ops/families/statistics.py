"""Statistics of samples: covariance, histograms and counts; integrals and slopes of what is sampled along a
dimension."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.ops import ltorch
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import result_type, to_float
from thunder.ops.registry import composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require, wrap_dim, wrap_dims
from thunder.ops.torch_types import named_results

# ----------------------------------------------------------------------------------------------------------------
# covariance


def _observations(a) -> tuple[int, int]:
    """(variables, observations): rows and columns of at most a matrix."""
    require(len(a.shape) <= 2)
    return (1, a.numel_value) if len(a.shape) < 2 else a.shape  # type: ignore[return-value]


def _cov_meta(a, *, correction=1, fweights=None, aweights=None):
    variables, observations = _observations(a)
    require(a.dtype is not dtypes.bool8)
    for w, integer in ((fweights, True), (aweights, False)):
        require(w is None or len(w.shape) <= 1 and (w.dtype.category < 2) is integer and w.numel_value == observations)
    dtype = to_float(a.dtype if aweights is None else result_type(a, aweights))
    return like(a, () if variables == 1 else (variables, variables), dtype)


@torch_prim(torch.cov, torch.Tensor.cov)
def cov(a, *, correction=1, fweights=None, aweights=None):
    return _cov_meta(a, correction=correction, fweights=fweights, aweights=aweights)


@torch_prim(torch.corrcoef, torch.Tensor.corrcoef)
def corrcoef(a):
    require(len(a.shape) <= 2)
    return _cov_meta(a)


# ----------------------------------------------------------------------------------------------------------------
# integrals and slopes


def _checked(y, x, dim) -> int:
    """The dimension to integrate along."""
    require(y.shape)
    d = wrap_dim(dim, len(y.shape))
    require(y.dtype is not dtypes.bool8 and (x is None or x.dtype is not dtypes.bool8))
    require(x is None or len(x.shape) != 1 or x.shape[0] == y.shape[d])
    return d


def _steps(x, rank: int, d: int):
    """The distances between the places `x` of samples, to be multiplied with what has `rank` dimensions."""
    shape = (
        (*(1,) * d, *x.shape, *(1,) * (rank - d - 1))
        if len(x.shape) == 1
        else (*(1,) * (rank - len(x.shape)), *x.shape)
    )
    x = ltorch.view(x, shape)
    d -= rank - len(shape)
    return ltorch.narrow(x, d, 1, shape[d] - 1) - ltorch.narrow(x, d, 0, shape[d] - 1)


def _neighbours(y, d: int):
    n = y.shape[d]
    return ltorch.narrow(y, d, 0, n - 1) + ltorch.narrow(y, d, 1, n - 1)


@composite(torch.trapezoid, torch.trapz)
def trapezoid(y, x=None, *, dx=1, dim=-1):
    """The sum of the areas of trapezoids between samples, `dx` or the differences of `x` apart."""
    d = _checked(y, x, dim)
    if y.shape[d] == 0:
        return ltorch.zeros((*y.shape[:d], *y.shape[d + 1 :]), device=y.device, dtype=y.dtype)
    if x is not None:
        return ltorch.sum(_neighbours(y, d) * _steps(x, len(y.shape), d), d) / 2.0
    return (ltorch.sum(y, d) - (ltorch.select(y, d, 0) + ltorch.select(y, d, -1)) * 0.5) * dx


@composite(torch.cumulative_trapezoid)
def cumulative_trapezoid(y, x=None, *, dx=1, dim=-1):
    """`trapezoid` up to each sample but the first."""
    d = _checked(y, x, dim)
    if y.shape[d] == 0:
        return ltorch.zeros_like(y)
    wide = _steps(x, len(y.shape), d) / 2.0 if x is not None else dx / 2.0
    return ltorch.cumsum(wide * _neighbours(y, d), d)


@torch_prim(torch.gradient)
def gradient(a, *, spacing=1, dim=None, edge_order=1):
    """The decomposition of `torch.gradient`: differences of neighbours, by the spacing of each dimension."""
    require(edge_order in (1, 2))
    dims = wrap_dims(tuple(range(len(a.shape))) if dim is None else dim, len(a.shape))
    if isinstance(spacing, (tuple, list)):
        require(len(spacing) == len(dims))
        for s in spacing:
            if type(s) is TensorProxy and s.device is not a.device:
                raise RuntimeError(
                    f"torch.gradient expected each tensor to be on the same device, but got devices {a.device} and "
                    f"{s.device}!"
                )
    require(not any(type(n := a.shape[d]) is int and n < edge_order + 1 for d in dims))
    return tuple(like(a, dtype=to_float(a.dtype)) for _ in dims)


# ----------------------------------------------------------------------------------------------------------------
# counts


@torch_prim(torch.histogram, torch.Tensor.histogram)
def histogram(a, bins, *, range=None, weight=None, density=False):
    if type(bins) is TensorProxy:
        return named_results("histogram", like(a, (bins.shape[0] - 1,)), like(a, bins.shape))
    return named_results("histogram", like(a, (bins,)), like(a, (bins + 1,)))


@torch_prim(torch.histogramdd)
def histogramdd(a, bins, range=None, weight=None, density=False):
    if type(bins) is int:
        bins = [bins] * a.shape[-1]
    require(len(bins) == a.shape[-1])
    counts = [b.shape[0] - 1 if type(b) is TensorProxy else b for b in bins]
    edges = [b if type(b) is TensorProxy else like(a, (b + 1,)) for b in bins]
    return named_results("histogramdd", like(a, tuple(counts)), tuple(edges))


effects.synchronises.add(ltorch.histogram, ltorch.histogramdd, ltorch.cov, ltorch.corrcoef)
effects.may_raise.add(ltorch.histogram, ltorch.histogramdd)


def _cov_under_autocast(lower: dict, a, **options):
    """The product of matrices inside is cast."""
    out = cov.meta(a, **options)  # type: ignore[misc]
    casts = a.device.type in lower and out.dtype.category == dtypes.FLOAT and out.dtype is not dtypes.float64
    return like(out, dtype=dtypes.to_dtype(lower[a.device.type])) if casts else out


casts_inside(torch.cov, torch.Tensor.cov, torch.corrcoef, torch.Tensor.corrcoef, typed=_cov_under_autocast)
casts_inside(*trapezoid.torch_functions, *cumulative_trapezoid.torch_functions)
derivatives.composed.set(True, trapezoid)
