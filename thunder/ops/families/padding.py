"""Borders around tensors, tensors spread over grids, blocks on a diagonal."""

from __future__ import annotations

import math

import torch

from thunder import compat
from thunder.core.proxies import like
from thunder.ops import autocast, backward, ltorch, opaque, prims
from thunder.ops.families.joining import cat
from thunder.ops.families.shape import MOVES, expand, reshape, slice_dim
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import derivatives, kernels
from thunder.ops.shape_rules import require


def _padding(a, pad) -> list[tuple]:
    """(before, after) for each dimension."""
    require(not len(pad) % 2 and len(pad) <= 2 * len(a.shape))
    out = [(0, 0)] * len(a.shape)
    for i in range(len(pad) // 2):
        out[-1 - i] = (pad[2 * i], pad[2 * i + 1])
    return out


def _pad_meta(a, pad, mode="constant", value=None):
    """The type of the result of `pad`. Raises PyTorch's errors where a mode does not take the padding."""
    spread = _padding(a, pad)
    require(mode in ("constant", "reflect", "replicate", "circular"))
    if mode != "constant":
        require(len(a.shape) >= 2 and len(pad) in (2 * len(a.shape) - 2, 2 * len(a.shape) - 4))
        for n, (lo, hi) in zip(a.shape, spread, strict=True):
            require(
                (mode != "reflect" or (lo < n and hi < n) or (not lo and not hi))
                and (mode != "circular" or (lo <= n and hi <= n))
            )
    out = tuple([lo + n + hi for n, (lo, hi) in zip(a.shape, spread, strict=True)])
    require(
        not any(
            n < 0
            for (lo, hi), n in zip(spread, out, strict=True)
            if (type(lo) is int and lo < 0) or (type(hi) is int and hi < 0)
        )
    )
    return like(a, out)


def _bordered(a, dim: int, lo, hi, mode: str):
    """The tensor with `lo` elements before and `hi` behind along one dimension, as a mode other than "constant" gives
    them."""
    n = a.shape[dim]
    if mode == "reflect":
        before, after = (
            prims.flip(slice_dim(a, dim, 1, 1 + lo), (dim,)),
            prims.flip(slice_dim(a, dim, n - 1 - hi, n - 1), (dim,)),
        )
    elif mode == "circular":
        before, after = slice_dim(a, dim, n - lo, n), slice_dim(a, dim, 0, hi)
    else:
        shape = a.shape
        before = expand(slice_dim(a, dim, 0, 1), (*shape[:dim], lo, *shape[dim + 1 :]))
        after = expand(slice_dim(a, dim, n - 1, n), (*shape[:dim], hi, *shape[dim + 1 :]))
    return prims.cat([before, a, after], dim)


@composite(*compat.functions_called("pad"), meta=_pad_meta, tags=MOVES, autocast="cpu:float32")
def pad(a, pad, mode="constant", value=None):
    """The decomposition of `pad`. Negative padding cuts elements off."""
    spread = _padding(a, pad)
    if mode == "constant":
        return prims.pad(a, 0 if value is None else value, tuple(spread))
    out = a
    for d, (lo, hi) in enumerate(spread):
        for step in ("cut", "add") if mode == "circular" else ("add", "cut"):
            if step == "add" and (lo > 0 or hi > 0):
                out = _bordered(out, d, max(lo, 0), max(hi, 0), mode)
            if step == "cut" and (lo < 0 or hi < 0):
                out = slice_dim(out, d, max(-lo, 0), out.shape[d] - max(-hi, 0))
    return prims.pad(out, 0, ((0, 0),) * len(a.shape)) if out is a else out


def _pads_by_kernel(kind: str, args: tuple, kwargs: dict) -> bool:
    """The borders that autocast's list for the CPU names: all of "replicate", "reflect" but for three dimensions."""
    return len(args) > 2 and (args[2] == "replicate" or (args[2] == "reflect" and len(args[1]) < 6))


autocast.when.set(_pads_by_kernel, pad)


@alias(torch.constant_pad_nd)
def constant_pad_nd(a, pad_, value=0):
    if isinstance(value, complex):  # which torch.nn.functional.pad does not take
        return opaque.symbol_for(torch.constant_pad_nd)(a, pad_, value)
    return pad(a, pad_, "constant", value)


# ---------------------------------------------------------------------------------------------------------------- grids


@alias(torch.meshgrid, torch.functional.meshgrid, compat.VF_meshgrid)
def meshgrid(*tensors, indexing=None):
    """Each vector spread over a grid with one dimension for each; indexing="xy" swaps the first two."""
    tensors = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    if indexing not in (None, "ij", "xy"):
        raise RuntimeError(f'torch.meshgrid: indexing must be one of "xy" or "ij", but received: {indexing}')
    swap = indexing == "xy" and len(tensors) > 1
    tensors = (tensors[1], tensors[0], *tensors[2:]) if swap else tensors
    shape = tuple(t.numel_value for t in tensors)
    grids = [
        expand(reshape(t, tuple(n if i == k else 1 for k in range(len(shape)))), shape)
        for i, (t, n) in enumerate(zip(tensors, shape, strict=True))
    ]
    if swap:
        grids[0], grids[1] = grids[1], grids[0]
    return tuple(grids)


@composite(torch.cartesian_prod, torch.functional.cartesian_prod, tags=MOVES)
def cartesian_prod(*tensors):
    for t in tensors:
        require(len(t.shape) == 1)
    if len(tensors) == 1:
        return tensors[0]
    return ltorch.stack([reshape(grid, (-1,)) for grid in meshgrid(*tensors)], 1)


@torch_prim(torch.combinations)
def combinations(a, r=2, with_replacement=False):
    """All choices of r elements, one in a row, in the order of itertools."""
    require(len(a.shape) == 1)
    require(r >= 0)
    if r == 0:
        return like(a, (0,))
    n = a.shape[0] + (r - 1 if with_replacement else 0)
    return like(a, (math.prod(n - i for i in range(r)) // math.factorial(r), r))


derivatives.composed.set(True, cartesian_prod)
kernels.layout.set("as decomposition", ltorch.pad)
kernels.layout.set("memory format", prims.pad)


@composite(torch.block_diag, torch.functional.block_diag, tags=MOVES)
def block_diag(*tensors):
    blocks = [reshape(t, (1,) * (2 - len(t.shape)) + t.shape) for t in tensors]
    require(not any(len(t.shape) > 2 for t in blocks))
    columns = sum(t.shape[1] for t in blocks)
    rows, before = [], 0
    for t in blocks:
        rows.append(pad(t, (before, columns - before - t.shape[1])))
        before = before + t.shape[1]
    return cat(rows, 0)


# ----------------------------------------------------------------------------------------------------------------
# derivative

_BORDERS = {
    (mode, rank): backward.kernel(f"{name}_pad{rank}d_backward", "default", lambda g, a, padding: like(a))
    for mode, name in (("reflect", "reflection"), ("replicate", "replication")) for rank in (1, 2, 3)
}  # fmt: skip


@pad.vjp
def _(a, pad_, mode="constant", value=None):
    if mode == "constant":
        g = yield pad(a, pad_, mode, value)
        return (pad(g, tuple(-n for n in pad_)),)
    kernel = _BORDERS.get((mode, len(pad_) // 2))
    if kernel is None:  # "circular" is slices put together
        return NotImplemented
    g = yield pad(a, pad_, mode, value)
    return (kernel(g, a, list(pad_)),)
