"""Arguments that tests call the operations of `thunder/ops/families/statistics.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.statistics import (
    corrcoef,
    cov,
    cumulative_trapezoid,
    gradient,
    histogram,
    histogramdd,
    trapezoid,
)


@cov.samples
def _(make):
    yield make(3, 5)
    yield (make(3, 5),), {"correction": 0}
    yield (
        (make(2, 4),),
        {
            "fweights": torch.tensor([1, 2, 1, 3]),
            "aweights": torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        },
    )


@corrcoef.samples
def _(make):
    yield make(3, 5)


for _symbol in (trapezoid, cumulative_trapezoid):

    @_symbol.samples
    def _(make):
        yield make(3, 4)
        yield (make(3, 4),), {"dx": 0.5, "dim": 0}
        yield make(3, 4), make(4)
        yield (make(3, 4), make(3, 4)), {"dim": 0}


@gradient.samples
def _(make):
    yield make(4, 5)
    yield (make(4, 5),), {"spacing": 2.0, "dim": 1, "edge_order": 2}


@histogram.samples
def _(make):
    yield make(20), 5
    yield (make(20), torch.linspace(-2, 2, 5, dtype=torch.float64)), {"density": True}


@histogramdd.samples
def _(make):
    yield make(20, 2), [3, 4]
