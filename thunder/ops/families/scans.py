"""Sums, products and extremes up to each place, and differences of neighbours."""

from __future__ import annotations

import torch

from thunder.core import dtypes
from thunder.core.proxies import like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import backward, ltorch
from thunder.ops.families.extremes import values_indices
from thunder.ops.families.reductions import canonical_dims, sum_dtype
from thunder.ops.registry import composite, torch_prim
from thunder.ops.rules import batching, derivatives, effects, kernels, splitting
from thunder.ops.shape_rules import require

_TAGS = (OpTags.REDUCTION_OP,)  # an element combines others


def _scan_meta(a, dim, *, dtype=None):
    canonical_dims(a, dim)
    return like(a, dtype=sum_dtype(a, dtype))


@torch_prim(torch.cumsum, torch.Tensor.cumsum, autocast="cuda:float32", tags=_TAGS)
def cumsum(a, dim, *, dtype=None):
    return _scan_meta(a, dim, dtype=dtype)


@torch_prim(torch.cumprod, torch.Tensor.cumprod, autocast="cuda:float32", tags=_TAGS)
def cumprod(a, dim, *, dtype=None):
    return _scan_meta(a, dim, dtype=dtype)


@torch_prim(torch.logcumsumexp, torch.Tensor.logcumsumexp, tags=_TAGS)
def logcumsumexp(a, dim):
    canonical_dims(a, dim)
    return like(a)


def _scan_pair(name: str) -> Symbol:
    def meta(a, dim):
        canonical_dims(a, dim)
        return values_indices(name, a, a.shape)

    return torch_prim(getattr(torch, name), getattr(torch.Tensor, name), name=name, tags=_TAGS)(meta)


cummax, cummin = _scan_pair("cummax"), _scan_pair("cummin")


@composite(torch.diff, torch.Tensor.diff, meta=None)
def diff(a, n=1, dim=-1, prepend=None, append=None):
    """The decomposition of `diff`: n differences of neighbours along a dimension."""
    require(n >= 0)
    if n == 0:
        return ltorch.clone(a)
    parts = [x for x in (prepend, a, append) if x is not None]
    out = ltorch.cat(parts, dim) if len(parts) > 1 else a
    dim = dim % len(out.shape)
    for _ in range(n):
        size = out.shape[dim]
        if size == 0:
            break
        later, earlier = ltorch.narrow(out, dim, 1, size - 1), ltorch.narrow(out, dim, 0, size - 1)
        out = ltorch.logical_xor(later, earlier) if out.dtype is dtypes.bool8 else later - earlier
    return out


@cumsum.vjp
def _(a, dim, *, dtype=None):
    g = yield cumsum(a, dim, dtype=dtype)
    d = (canonical_dims(a, dim) or (0,))[0]
    if not a.shape or (type(a.shape[d]) is int and a.shape[d] == 1):
        return (g,)
    return (ltorch.flip(cumsum(ltorch.flip(g, (d,)), d), (d,)),)


cumprod_backward = backward.kernel("cumprod_backward", "default", lambda g, a, dim, y: like(a))
effects.synchronises.add(cumprod_backward)  # PyTorch asks whether an element is 0


@cumprod.vjp
def _(a, dim, *, dtype=None):
    y = cumprod(a, dim, dtype=dtype)
    g = yield y
    return (cumprod_backward(ltorch.to(g, dtype=a.dtype), a, dim, y),)


def _scan_pair_rule(symbol: Symbol):
    def rule(a, dim):
        y, indices = symbol(a, dim)
        g, _ = yield y, indices
        if not a.shape:
            return (g,)
        return (ltorch.scatter_add(ltorch.zeros_like(g), dim, indices, g),)

    symbol.vjp(rule)


_scan_pair_rule(cummax)
_scan_pair_rule(cummin)


kernels.no_loop_of_inductor.add(cumsum, cumprod, logcumsumexp, cummax, cummin)
kernels.layout.set("row-major", cumsum, cumprod, logcumsumexp, cummax, cummin, cumprod_backward)


# PyTorch composes it of the same operations
derivatives.composed.set(True, diff)


batching.rule.set(batching.along, cumsum, cumprod)


splitting.rule.set(splitting.along, cumsum)
