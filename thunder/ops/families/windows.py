"""Pools beside average and maximum: windows at random places, and what undoes a maximum.

PyTorch's Python code finds the sizes of results and draws the places of windows."""

from __future__ import annotations

import math

from thunder import compat
from thunder.core.dtypes import int64
from thunder.core.proxies import like
from thunder.core.symbol import Symbol
from thunder.ops import backward, ltorch
from thunder.ops.backward import gradient_of_first
from thunder.ops.registry import composite, torch_prim
from thunder.ops.rules import operands
from thunder.ops.shape_rules import pair, require
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

# ----------------------------------------------------------------------------------------------------------------
# windows at random places


def _fractional(rank: int) -> Symbol:
    """Defines `fractional_max_pool{rank}d`."""
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
    of_sizes = operands.of_sizes(rank)
    kernel = backward.kernel(f"{name}_backward", "default", lambda g, a, *options: like(a))
    operands.holds.set(
        lambda g, a, window, sizes, indices: (
            len(window) == len(sizes) == rank and g.shape[-rank:] == tuple(sizes) and of_sizes(g, a, indices)
        ),
        kernel,
    )
    operands.by_values.add(kernel)

    @symbol.vjp
    def _(a, kernel_size, output_size, random_samples):
        y, indices = symbol(a, kernel_size, output_size, random_samples)
        g, _ = yield y, indices
        return (kernel(g, a, list(pair(kernel_size, rank)), list(pair(output_size, rank)), indices),)

    return symbol


fractional_max_pool2d, fractional_max_pool3d = (_fractional(rank) for rank in (2, 3))


# ---------------------------------------------------------------------------------------------------------------- the
# places of maxima


def _max_unpool(rank: int) -> Symbol:
    """Defines `max_unpool{rank}d`: values are scattered to their indices in zeros."""
    name = f"max_unpool{rank}d"

    def meta(a, indices, output_size, stride=None, padding=None):
        require(indices.dtype is int64)
        require(len(a.shape) in (rank + 1, rank + 2) and a.shape == indices.shape)
        require(not any(type(n) is int and n < 0 for n in output_size))
        return like(a, (*a.shape[:-rank], *output_size))

    def flat(x):
        return ltorch.reshape(x, (*x.shape[:-rank], math.prod(x.shape[-rank:])))

    def decomposition(a, indices, output_size, stride=None, padding=None):
        shape = (*a.shape[:-rank], math.prod(output_size))
        zeros = ltorch.zeros(shape, dtype=to_torch_dtype(a.dtype), device=to_torch_device(a.device))
        unpooled = ltorch.scatter(zeros, -1, flat(indices), flat(a))
        return ltorch.reshape(unpooled, (*a.shape[:-rank], *output_size))

    function = getattr(compat.nn_bindings, name)
    symbol = composite(function, name=name, meta=meta, autocast="cpu:float32")(decomposition)
    gradient_of_first(
        symbol,
        lambda g, y, a, indices, *window: ltorch.reshape(ltorch.gather(flat(g), -1, flat(indices)), a.shape),
    )
    return symbol


max_unpool2d, max_unpool3d = (_max_unpool(rank) for rank in (2, 3))
