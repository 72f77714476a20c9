"""Arguments that tests call the operations of `thunder/ops/families/windows.py` with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder.ops import LTORCH


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
            for pool, sizes in ((2, (6,) * rank), (3, (6,) * rank), (3, (7,) * rank)):
                y, indices = getattr(F, f"max_pool{rank}d")(a, pool, return_indices=True)
                yield (make(*y.shape), indices, sizes, *(((pool,) * rank, (0,) * rank) if rank == 3 else ()))

    @symbol.error_samples
    def _(make):
        window = ((2,) * rank, (0,) * rank) if rank == 3 else ()
        yield make(2, 3, *(3,) * rank), torch.zeros(2, 3, *(3,) * rank, dtype=torch.int32), (6,) * rank, *window


for _rank in (2, 3):
    _max_unpool(_rank)
