"""Images at other sizes and places: interpolate, grid_sample, pixels and channels rearranged."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder.core.proxies import like
from thunder.ops import autocast, backward
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.shape import MOVES, permute, reshape
from thunder.ops.opaque import casts_inside
from thunder.ops.registry import alias, composite, lookup, torch_prim
from thunder.ops.rules import kernels
from thunder.ops.shape_rules import pair, require

_RANKS = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
    "area": (1, 2, 3),
}


@torch_prim(F.interpolate, autocast="cuda:float32")
def interpolate(
    a, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False
):
    """The meta rule of `interpolate`. Raises PyTorch's errors where size, scale and mode do not fit."""
    rank = len(a.shape) - 2
    require(mode in _RANKS and rank in _RANKS[mode])
    require((size is None) != (scale_factor is None))
    require(align_corners is None or mode not in ("nearest", "area", "nearest-exact"))
    if size is not None:
        return like(a, (*a.shape[:2], *pair(size, rank)))
    return like(
        a,
        (
            *a.shape[:2],
            *(
                n * s if type(s) is int else math.floor(n * s)
                for n, s in zip(a.shape[2:], pair(scale_factor, rank), strict=True)
            ),
        ),
    )


autocast.when.set(lambda kind, args, kwargs: len(args) < 4 or args[3] != "area", interpolate)


@torch_prim(F.grid_sample, autocast="cpu:float32 cuda:widest")
def grid_sample(a, grid, mode="bilinear", padding_mode="zeros", align_corners=None):
    require(len(a.shape) == len(grid.shape) and a.shape[0] == grid.shape[0] and grid.shape[-1] == len(a.shape) - 2)
    return like(a, (*a.shape[:2], *grid.shape[1:-1]))


@alias(torch.grid_sampler)
def _grid_sampler(a, grid, interpolation_mode, padding_mode, align_corners):
    return grid_sample(a, grid, _MODES[interpolation_mode], _PADDINGS[padding_mode], align_corners)


_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


def _grid_sampler_kernel(rank: int):
    """Defines `grid_sampler_{rank}d`, the kernel of `grid_sample`, with its derivative."""
    function = getattr(torch, f"grid_sampler_{rank}d")

    def meta(a, grid, interpolation_mode, padding_mode, align_corners):
        return grid_sample.meta(a, grid)

    symbol = torch_prim(function, name=f"grid_sampler_{rank}d", autocast="cpu:float32 cuda:widest")(meta)

    @symbol.vjp
    def _(a, grid, interpolation_mode, padding_mode, align_corners):
        g = yield symbol(a, grid, interpolation_mode, padding_mode, align_corners)
        mask = [a.requires_grad, grid.requires_grad]
        return _GRID_BACKWARD[rank](g, a, grid, interpolation_mode, padding_mode, align_corners, mask)

    return symbol


grid_sampler_2d, grid_sampler_3d = (_grid_sampler_kernel(rank) for rank in (2, 3))


@torch_prim(F.affine_grid)
def affine_grid(theta, size, align_corners=None):
    rank = len(size) - 2
    require(theta.shape == (size[0], rank, rank + 1))
    return like(theta, (size[0], *size[2:], rank))


@alias(torch.affine_grid_generator)
def _affine_grid_generator(theta, size, align_corners):
    return lookup(F.affine_grid)(theta, size, align_corners)


_affine_grid_backward = backward.kernel(
    "affine_grid_generator_backward", "default",
    lambda g, size, align_corners: like(g, (size[0], len(size) - 2, len(size) - 1))
)  # fmt: skip


gradient_of_first(
    affine_grid, lambda g, y, theta, size, align_corners=None: _affine_grid_backward(g, list(size), bool(align_corners))
)


@composite(F.pixel_shuffle, torch.pixel_shuffle, tags=MOVES)
def pixel_shuffle(a, upscale_factor):
    r = upscale_factor
    require(len(a.shape) >= 3 and a.shape[-3] % (r * r) == 0)
    *batch, c, h, w = a.shape
    k = len(batch)
    x = reshape(a, (*batch, c // (r * r), r, r, h, w))
    return reshape(permute(x, (*range(k), k, k + 3, k + 1, k + 4, k + 2)), (*batch, c // (r * r), h * r, w * r))


@composite(F.pixel_unshuffle, torch.pixel_unshuffle, tags=MOVES)
def pixel_unshuffle(a, downscale_factor):
    r = downscale_factor
    require(len(a.shape) >= 3 and a.shape[-1] % r == 0 and a.shape[-2] % r == 0)
    *batch, c, h, w = a.shape
    k = len(batch)
    x = reshape(a, (*batch, c, h // r, r, w // r, r))
    return reshape(permute(x, (*range(k), k, k + 2, k + 4, k + 1, k + 3)), (*batch, c * r * r, h // r, w // r))


@composite(F.channel_shuffle, torch.channel_shuffle, torch.native_channel_shuffle, tags=MOVES)
def channel_shuffle(a, groups):
    require(len(a.shape) >= 3 and a.shape[1] % groups == 0)
    n, c, *rest = a.shape
    x = reshape(a, (n, groups, c // groups, *rest))
    return reshape(permute(x, (0, 2, 1, *range(3, len(x.shape)))), a.shape)


# ----------------------------------------------------------------------------------------------------------------
# derivatives


def _upsample_kernel(name: str):
    return backward.kernel(f"{name}_backward", "default", lambda g, sizes, shape, *options: like(g, tuple(shape)))


UPSAMPLE = {
    ("nearest", 1): "upsample_nearest1d", ("nearest", 2): "upsample_nearest2d", ("nearest", 3): "upsample_nearest3d",
        ("nearest-exact", 1): "_upsample_nearest_exact1d",
    ("nearest-exact", 2): "_upsample_nearest_exact2d", ("nearest-exact", 3): "_upsample_nearest_exact3d",
        ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d", ("bicubic", 2): "upsample_bicubic2d",
        ("trilinear", 3): "upsample_trilinear3d", ("bilinear antialias", 2): "_upsample_bilinear2d_aa",
    ("bicubic antialias", 2): "_upsample_bicubic2d_aa",
}  # fmt: skip
_UPSAMPLE_BACKWARD = {key: _upsample_kernel(name) for key, name in UPSAMPLE.items()}
kernels.layout.set("memory format", interpolate, *_UPSAMPLE_BACKWARD.values())


@interpolate.vjp
def _(
    a, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False
):
    rank = len(a.shape) - 2
    kernel = _UPSAMPLE_BACKWARD.get((f"{mode} antialias" if antialias else mode, rank))
    if kernel is None:
        return NotImplemented
    g = yield interpolate(a, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    scales = (
        (None,) * rank
        if scale_factor is None or recompute_scale_factor
        else tuple(map(float, pair(scale_factor, rank)))
    )
    corners = () if mode.startswith("nearest") else (bool(align_corners),)
    return (kernel(g, list(g.shape[2:]), list(a.shape), *corners, *scales),)


gradient_of_first(pixel_shuffle, lambda g, y, a, upscale_factor: pixel_unshuffle(g, upscale_factor))


gradient_of_first(pixel_unshuffle, lambda g, y, a, downscale_factor: pixel_shuffle(g, downscale_factor))


gradient_of_first(channel_shuffle, lambda g, y, a, groups: channel_shuffle(g, a.shape[1] // groups))


_GRID_BACKWARD = {
    rank: backward.kernel(f"grid_sampler_{rank}d_backward", "default",
        lambda g, a, grid, *options: (like(a) if options[-1][0] else None, like(grid)))
    for rank in (2, 3)
}  # fmt: skip


@grid_sample.vjp
def _(a, grid, mode="bilinear", padding_mode="zeros", align_corners=None):
    rank = len(a.shape) - 2
    if a.device.type != "cpu":  # cuDNN's sampler has a backward of its own
        return NotImplemented
    g = yield grid_sample(a, grid, mode, padding_mode, align_corners)
    options = _MODES.index(mode), _PADDINGS.index(padding_mode), bool(align_corners)
    return _GRID_BACKWARD[rank](g, a, grid, *options, [a.requires_grad, grid.requires_grad])


# PyTorch composes it of others, which autocast casts
casts_inside(F.affine_grid)
