"""Arguments that tests call the operations of `thunder/ops/families/resample.py` with."""

from __future__ import annotations

from thunder.ops import LTORCH
from thunder.ops.families.resample import (
    affine_grid,
    channel_shuffle,
    grid_sample,
    interpolate,
    pixel_shuffle,
    pixel_unshuffle,
)


@interpolate.samples
def _(make):
    yield make(2, 3, 5), 8
    yield (make(2, 3, 5, 4),), {"scale_factor": 2}
    yield (make(2, 3, 5, 4),), {"scale_factor": (1.5, 2.5), "mode": "bilinear"}
    yield (make(2, 3, 5, 4), (7, 9)), {"mode": "bicubic", "align_corners": True}
    yield (make(2, 3, 5, 4), (3, 3)), {"mode": "bilinear", "antialias": True}
    yield (make(2, 3, 4), 6), {"mode": "linear"}
    yield (make(2, 3, 4, 4, 4), 6), {"mode": "trilinear"}
    yield (make(2, 3, 4, 4), 2), {"mode": "area"}
    yield (make(2, 3, 4, 4), 3), {"mode": "nearest-exact"}


@interpolate.error_samples
def _(make):
    yield (make(2, 3, 4),)
    yield (make(2, 3, 4, 4), 3), {"align_corners": True}


@grid_sample.samples
def _(make):
    yield (make(2, 3, 5, 4), make(2, 6, 7, 2, low=-1.0, high=1.0)), {"align_corners": False}


@affine_grid.samples
def _(make):
    yield (make(2, 2, 3), (2, 3, 4, 5)), {"align_corners": False}


@pixel_shuffle.samples
def _(make):
    yield make(2, 8, 3, 4), 2
    yield make(4, 3, 4), 2


@pixel_unshuffle.samples
def _(make):
    yield make(2, 2, 6, 4), 2


@channel_shuffle.samples
def _(make):
    yield make(2, 6, 3, 4), 3


def _grid_sampler(rank: int) -> None:
    symbol = LTORCH[f"grid_sampler_{rank}d"]

    @symbol.samples
    def _(make):
        a, grid = make(2, 3, *(5, 4, 3)[:rank]), make(2, *(4, 3, 2)[:rank], rank, low=-1.2, high=1.2)
        yield a, grid, 0, 0, False
        yield a, grid, 0, 1, True
        yield a, grid, 1, 2, False

    @symbol.error_samples
    def _(make):
        yield make(2, 3, *(5, 4, 3)[:rank]), make(1, *(4, 3, 2)[:rank], rank, low=-1.0, high=1.0), 0, 0, False


for _rank in (2, 3):
    _grid_sampler(_rank)
