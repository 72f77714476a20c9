"""Arguments that tests call the operations of `thunder/ops/families/windows.py` with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder.ops import LTORCH


def _lp_pool(rank: int) -> None:
    symbol, extent = LTORCH[f"lp_pool{rank}d"], (7, 6, 5)[:rank]

    @symbol.samples
    def _(make):
        yield make(2, 3, *extent, low=0.1, high=2.0), 2.0, 2
        yield make(3, *extent, low=0.1, high=2.0), 3, 3, 2, True
        yield make(2, 3, *extent), math.inf, 2

    @symbol.error_samples
    def _(make):
        yield make(2, 3, *(2,) * rank), 2.0, 5


for _rank in (1, 2, 3):
    _lp_pool(_rank)


def _fractional(rank: int) -> None:
    symbol, extent = LTORCH[f"fractional_max_pool{rank}d"], (7, 6, 5)[:rank]

    @symbol.samples
    def _(make):
        yield make(2, 3, *extent), [2] * rank, [3] * rank, make(2, 3, rank, low=0.0, high=1.0)
        yield make(3, *extent), [2] * rank, [3] * rank, make(1, 3, rank, low=0.0, high=1.0)

    @symbol.error_samples
    def _(make):
        yield make(2, 3, *extent), [2] * rank, [9] * rank, make(2, 3, rank, low=0.0, high=1.0)


for _rank in (2, 3):
    _fractional(_rank)


def _max_unpool(rank: int) -> None:
    symbol = LTORCH[f"max_unpool{rank}d"]

    @symbol.samples
    def _(make):
        a = make(2, 3, *(6,) * rank)
        if a.is_floating_point():
            for pool in (2, 3):
                y, indices = getattr(F, f"max_pool{rank}d")(a, pool, return_indices=True)
                yield make(*y.shape), indices, pool
            yield (make(*y.shape), indices, 3), {"output_size": (7,) * rank}

    @symbol.error_samples
    def _(make):
        indices = torch.zeros(2, 3, *(3,) * rank, dtype=torch.int64)
        yield (make(2, 3, *(3,) * rank), indices, 2), {"output_size": (9,) * rank}
        yield make(2, 3, *(3,) * rank), indices.int(), 2


for _rank in (1, 2, 3):
    _max_unpool(_rank)
