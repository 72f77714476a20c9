"""Pools beside average and maximum: power averages, windows at random places, and what undoes a maximum."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core.dtypes import int64
from thunder.core.proxies import like
from thunder.core.symbol import Symbol
from thunder.ops import backward
from thunder.ops.backward import gradient_of_first
from thunder.ops.opaque import casts_inside
from thunder.ops.registry import LTORCH, alias, composite, torch_prim
from thunder.ops.shape_rules import pair, require
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


def _op(name: str, *args, **kwargs):
    return LTORCH[name](*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------- power
# averages


# as the largest of a window; before torch 2.13 it was a power like others
_KNOWS_INFINITY = F.lp_pool1d(torch.full((1, 1, 1), 2.0), math.inf, 1).item() == 2.0


def _lp_pool(rank: int) -> Symbol:
    """(sum of the windows' p-th powers) ** (1 / p), as PyTorch composes it."""

    def lp_pool(a, norm_type, kernel_size, stride=None, ceil_mode=False):
        if norm_type in (math.inf, -math.inf) and _KNOWS_INFINITY:
            largest = LTORCH[f"max_pool{rank}d"]
            size = _op("abs", a)
            return (
                largest(size, kernel_size, stride, 0, 1, ceil_mode)
                if norm_type > 0
                else -largest(-size, kernel_size, stride, 0, 1, ceil_mode)
            )
        out = LTORCH[f"avg_pool{rank}d"](
            _op("pow", a, norm_type), kernel_size, kernel_size if stride is None else stride, 0, ceil_mode
        )
        count = kernel_size if rank == 1 else math.prod(pair(kernel_size, rank))
        return _op("pow", _op("mul", _op("sign", out) * _op("relu", _op("abs", out)), count), 1.0 / norm_type)

    symbol = composite(getattr(F, f"lp_pool{rank}d"), name=f"lp_pool{rank}d")(lp_pool)
    symbol.differentiate_decomposition = True
    casts_inside(*symbol.torch_functions)

    return symbol


lp_pool1d, lp_pool2d, lp_pool3d = (_lp_pool(rank) for rank in (1, 2, 3))


# ----------------------------------------------------------------------------------------------------------------
# windows at random places


def _fractional(rank: int) -> Symbol:
    name = f"fractional_max_pool{rank}d"
    function = getattr(compat.nn_bindings, name)

    def meta(a, kernel_size, output_size, random_samples):
        k, sizes = pair(kernel_size, rank), pair(output_size, rank)
        require(
            len(a.shape) in (rank + 1, rank + 2)
            and not any(n + w - 1 > m for n, w, m in zip(sizes, k, a.shape[-rank:], strict=True))
        )
        require(random_samples.dtype is a.dtype)
        require(random_samples.shape == (1 if len(a.shape) == rank + 1 else a.shape[0], a.shape[-rank - 1], rank))
        shape = (*a.shape[:-rank], *sizes)
        return like(a, shape), like(a, shape, int64)

    symbol = torch_prim(function, name=name, autocast="cpu:float32")(meta)
    symbol.nondifferentiable = (1,)
    kernel = backward.kernel(f"{name}_backward", "default", lambda g, a, *options: like(a))

    @symbol.vjp
    def _(a, kernel_size, output_size, random_samples):
        y, indices = symbol(a, kernel_size, output_size, random_samples)
        g, _ = yield y, indices
        return (kernel(g, a, list(pair(kernel_size, rank)), list(pair(output_size, rank)), indices),)

    @alias(getattr(F, f"{name}_with_indices"))
    def with_indices(a, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None):
        """Where windows are is drawn by an operation of its own."""
        if output_size is None and output_ratio is None:
            raise ValueError(f"{name} requires specifying either an output_size or an output_ratio")
        if output_size is None:
            output_size = [int(n * ratio) for n, ratio in zip(a.shape[-rank:], pair(output_ratio, rank), strict=True)]
        if _random_samples is None:
            images = 1 if len(a.shape) == rank + 1 else a.shape[0]
            _random_samples = torch_rand((images, a.shape[-rank - 1], rank), a)
        return symbol(a, kernel_size, output_size, _random_samples)

    @alias(getattr(F, name), getattr(F, f"_{name}"))
    def without(a, kernel_size, output_size=None, output_ratio=None, return_indices=False, _random_samples=None):
        found = with_indices(a, kernel_size, output_size, output_ratio, return_indices, _random_samples)
        return found if return_indices else found[0]

    return symbol


def torch_rand(shape: tuple, a):
    """Numbers for `a`, of its type and place."""
    return _op("rand", *shape, dtype=to_torch_dtype(a.dtype), device=to_torch_device(a.device))


fractional_max_pool2d, fractional_max_pool3d = (_fractional(rank) for rank in (2, 3))


# ---------------------------------------------------------------------------------------------------------------- the
# places of maxima


def _unpooled_sizes(a, kernel_size, stride, padding, output_size, rank: int) -> tuple:
    k, p = pair(kernel_size, rank), pair(padding, rank)
    s = k if stride is None or (isinstance(stride, (tuple, list)) and not stride) else pair(stride, rank)
    sizes = tuple((n - 1) * s[i] + k[i] - 2 * p[i] for i, n in enumerate(a.shape[-rank:]))
    if output_size is None:
        return sizes
    wanted = tuple(output_size)[2:] if len(output_size) == rank + 2 else tuple(output_size)
    require(len(wanted) == rank)
    for i, n in enumerate(wanted):
        require(sizes[i] - s[i] < n < sizes[i] + s[i])
    return wanted


def _max_unpool(rank: int) -> Symbol:
    name = f"max_unpool{rank}d"

    def meta(a, indices, kernel_size, stride=None, padding=0, output_size=None):
        require(indices.dtype.name == "int64")
        require(len(a.shape) in (rank + 1, rank + 2) and a.shape == indices.shape)
        sizes = _unpooled_sizes(a, kernel_size, stride, padding, output_size, rank)
        require(not any(type(n) is int and n < 0 for n in sizes))
        return like(a, (*a.shape[:-rank], *sizes))

    def flat(x):
        return _op("reshape", x, (*x.shape[:-rank], math.prod(x.shape[-rank:])))

    def decomposition(a, indices, kernel_size, stride=None, padding=0, output_size=None):
        shape = (*a.shape[:-rank], *_unpooled_sizes(a, kernel_size, stride, padding, output_size, rank))
        zeros = _op(
            "zeros",
            (*a.shape[:-rank], math.prod(shape[-rank:])),
            dtype=to_torch_dtype(a.dtype),
            device=to_torch_device(a.device),
        )
        return _op("reshape", _op("scatter", zeros, -1, flat(indices), flat(a)), shape)

    symbol = composite(getattr(F, name), name=name, meta=meta, autocast="cpu:float32")(decomposition)

    gradient_of_first(
        symbol,
        lambda g, y, a, indices, kernel_size, stride=None, padding=0, output_size=None: _op(
            "reshape", _op("gather", flat(g), -1, flat(indices)), a.shape
        ),
    )

    return symbol


max_unpool1d, max_unpool2d, max_unpool3d = (_max_unpool(rank) for rank in (1, 2, 3))
