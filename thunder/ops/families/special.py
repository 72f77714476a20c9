"""Special functions that PyTorch computes in one piece, and statistics of samples: typed here, without a
decomposition."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags
from thunder.ops import ltorch
from thunder.ops.families.binary import binary
from thunder.ops.families.reductions import canonical_dims, reduced_shape
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.functionalize.overlap import check_overlap
from thunder.ops.promotion import Promotion, result_type, to_float
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import effects
from thunder.ops.shape_rules import require

for _name in (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
    "hermite_polynomial_h", "hermite_polynomial_he",
    "laguerre_polynomial_l", "legendre_polynomial_p", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
):  # fmt: skip
    binary(
        f"special_{_name}",
        getattr(torch.special, _name),
        promotes=Promotion.INT_TO_FLOAT,
        detached=True,
    )

_GAMMA = {"promotes": Promotion.INT_TO_FLOAT, "numbers": "none"}
igamma = binary("igamma", torch.igamma, torch.Tensor.igamma, torch.special.gammainc, **_GAMMA)
igammac = binary("igammac", torch.igammac, torch.Tensor.igammac, torch.special.gammaincc, **_GAMMA)


@torch_prim(torch.mvlgamma, torch.Tensor.mvlgamma, torch.special.multigammaln)
def mvlgamma(a, p):
    require(p >= 1)
    return like(a, dtype=to_float(a.dtype))


@alias(torch.Tensor.polygamma)
def polygamma_method(a, n):
    return ltorch.polygamma(n, a)


@alias(torch.Tensor.polygamma_)
def polygamma_(a, n):
    check_overlap(torch.Tensor.polygamma_, a, (a, n), {})
    return overwrite(a, ltorch.polygamma(n, a))


@composite(torch.isclose, torch.Tensor.isclose, tags=(OpTags.DETACHED,))
def isclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    require(a.dtype is b.dtype and rtol >= 0 and atol >= 0)
    equal, number = ltorch.eq(a, b), ltorch.isnan
    if equal_nan:
        equal = ltorch.logical_or(equal, ltorch.logical_and(number(a), number(b)))
    if (rtol == 0 and atol == 0) or a.dtype is dtypes.bool8:
        return equal
    x, y = (ltorch.to(t, dtype=to_float(t.dtype)) for t in (a, b))
    error, allowed = ltorch.abs(x - y), atol + ltorch.abs(rtol * y)
    return ltorch.logical_or(equal, ltorch.logical_and(ltorch.isfinite(error), error <= allowed))


def _quantile_meta(a, q, dim=None, keepdim=False, *, interpolation="linear"):
    require(a.dtype in (dtypes.float32, dtypes.float64))
    require(type(q) is not TensorProxy or (len(q.shape) <= 1 and q.dtype is a.dtype))
    require(type(q) is TensorProxy or 0 <= q <= 1)
    require(interpolation in ("linear", "lower", "higher", "midpoint", "nearest"))
    several = q.shape if type(q) is TensorProxy else ()
    return like(a, (*several, *reduced_shape(a, canonical_dims(a, dim), keepdim)))


quantile = torch_prim(torch.quantile, torch.Tensor.quantile, name="quantile", autocast="cpu:float32")(_quantile_meta)
nanquantile = torch_prim(torch.nanquantile, torch.Tensor.nanquantile, name="nanquantile", autocast="cpu:float32")(
    _quantile_meta
)


@torch_prim(torch.renorm, torch.Tensor.renorm, autocast="cuda:float32")
def renorm(a, p, dim, maxnorm):
    require(len(a.shape) >= 2)
    canonical_dims(a, dim)
    return like(a)


@torch_prim(torch.isin, tags=(OpTags.DETACHED,))
def isin(elements, test_elements, *, assume_unique=False, invert=False):
    result_type(elements, test_elements)
    t = elements if type(elements) is TensorProxy else test_elements
    return like(t, elements.shape if type(elements) is TensorProxy else (), dtypes.bool8)


effects.may_raise.add(quantile, nanquantile)  # places that are not in [0, 1]


def _takes_elements(a, *_, interpolation="linear", **__) -> bool:
    """Places then choose elements, and have no gradient."""
    return interpolation != "linear" and not a.requires_grad


quantile.detaches = nanquantile.detaches = _takes_elements
