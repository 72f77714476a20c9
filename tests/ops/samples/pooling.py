"""Arguments that tests call the operations of `thunder/ops/families/pooling.py` with."""

from __future__ import annotations

import torch

from thunder.ops import LTORCH
from thunder.ops.families.pooling import _ADAPTIVE_AVERAGE, _MAXIMUM


@_MAXIMUM[2].samples
def _(make):
    a = make(1, 2, 4, 4)
    if a.is_floating_point():
        y, indices = torch.nn.functional.max_pool2d(a, 2, return_indices=True)
        yield make(*y.shape), a, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


@_ADAPTIVE_AVERAGE[2].samples
def _(make):
    yield make(2, 3, 2, 2), make(2, 3, 5, 4)


@_MAXIMUM[3].samples
def _(make):
    a = make(1, 2, 4, 4, 4)
    if a.is_floating_point():
        y, indices = torch.nn.functional.max_pool3d(a, 2, return_indices=True)
        yield make(*y.shape), a, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, indices


@_ADAPTIVE_AVERAGE[3].samples
def _(make):
    yield make(2, 3, 2, 2, 2), make(2, 3, 5, 4, 3)


def _avg_pool(rank: int) -> None:
    symbol, extent = LTORCH[f"avg_pool{rank}d"], (7, 6, 5)[:rank]

    @symbol.samples
    def _(make):
        yield make(2, 3, *extent), 2
        yield make(3, *extent), 3, 2, 1
        yield (make(2, 3, *extent), (2,) * rank), {"stride": 3, "ceil_mode": True, "count_include_pad": False}

    @symbol.error_samples
    def _(make):
        yield make(2, 3, *(2,) * rank), 5


for _rank in (1, 2, 3):
    _avg_pool(_rank)


def _max_pool(rank: int) -> None:
    values, both = LTORCH[f"max_pool{rank}d"], LTORCH[f"max_pool{rank}d_with_indices"]
    extent = (7, 6, 5)[:rank]

    @values.samples
    @both.samples
    def _(make):
        yield make(2, 3, *extent), 2
        yield make(3, *extent), 3, 2, 1
        yield (make(2, 3, *extent), (2,) * rank), {"stride": 3, "ceil_mode": True}
        yield (make(2, 3, *extent), 2), {"stride": 1, "dilation": 2}

    @values.error_samples
    def _(make):
        yield make(2, 3, *(2,) * rank), 5


for _rank in (1, 2, 3):
    _max_pool(_rank)


def _adaptive_avg_pool(rank: int) -> None:
    symbol = LTORCH[f"adaptive_avg_pool{rank}d"]

    @symbol.samples
    def _(make):
        yield make(2, 3, *(7, 6, 5)[:rank]), 2
        yield make(3, *(7, 6, 5)[:rank]), (3,) * rank
        if rank > 1:
            yield make(2, 3, *(7, 6, 5)[:rank]), (None, *(2,) * (rank - 1))


for _rank in (1, 2, 3):
    _adaptive_avg_pool(_rank)


def _adaptive_max_pool(rank: int) -> None:
    both = LTORCH[f"adaptive_max_pool{rank}d_with_indices"]

    @both.samples
    def _(make):
        yield make(2, 3, *(7, 6, 5)[:rank]), 2
        yield make(3, *(7, 6, 5)[:rank]), (3,) * rank


for _rank in (1, 2, 3):
    _adaptive_max_pool(_rank)
