"""Arguments that tests call the operations of `thunder/ops/families/reductions.py`, `extremes.py`, `scans.py` and `vector_norms.py` with."""

from __future__ import annotations

import math

import torch

from thunder.ops.families.extremes import (
    aminmax,
    argmax,
    argmin,
    max_all,
    max_dim,
    median_all,
    median_dim,
    min_all,
    min_dim,
    mode_dim,
    nanmedian_all,
    nanmedian_dim,
)
from thunder.ops.families.reductions import (
    all,
    amax,
    amin,
    any,
    count_nonzero,
    logsumexp,
    mean,
    nanmean,
    nansum,
    prod,
    std,
    std_mean,
    sum,
    sum_to_size,
    var,
    var_mean,
)
from thunder.ops.families.scans import cummax, cummin, cumprod, cumsum, diff, logcumsumexp
from thunder.ops.families.vector_norms import dist, vector_norm


def _reduction_samples(make):
    yield make(4, 3)
    yield make(4, 3), 1
    yield make(4, 3, 2), (0, -1), True
    yield make()


sum.samples(_reduction_samples)


@sum_to_size.samples
def _(make):
    yield make(4, 3), (1, 3)
    yield make(2, 4, 3), 4, 1
    yield make(4, 3), (4, 3)
    yield make(4, 3), ()
    yield make(), ()


@sum_to_size.error_samples
def _(make):
    yield make(4, 3), (2, 3)
    yield make(4, 3), (1, 4, 3)


nansum.samples(_reduction_samples)


mean.samples(_reduction_samples)


nanmean.samples(_reduction_samples)


@prod.samples
def _(make):
    yield make(4, 3)
    yield make(4, 3), 1
    yield make(4, 3), 0, True


amax.samples(_reduction_samples)


amin.samples(_reduction_samples)


for _symbol in (max_dim, min_dim, median_dim, mode_dim, nanmedian_dim):

    @_symbol.samples
    def _(make):
        yield make(4, 3), 1
        yield make(4, 3), -2, True


for _symbol in (max_all, min_all, median_all, nanmedian_all):

    @_symbol.samples
    def _(make):
        yield make(4, 3)


@aminmax.samples
def _(make):
    yield make(4, 3)
    yield (make(4, 3),), {"dim": 1, "keepdim": True}


for _symbol in (argmax, argmin):

    @_symbol.samples
    def _(make):
        yield make(4, 3)
        yield make(4, 3), 1
        yield make(4, 3), -2, True


for _symbol in (all, any):

    @_symbol.samples
    def _(make):
        yield make(4, 3, dtype=torch.bool)
        yield make(4, 3, dtype=torch.bool), 1
        yield make(4, 3), -1, True
        yield make(0, 3)
        yield make(4, 0), 1


@count_nonzero.samples
def _(make):
    yield make(4, 3, low=-1.0, high=1.0)
    yield make(4, 3, dtype=torch.bool), 1


for _symbol in (var, std, var_mean, std_mean):

    @_symbol.samples
    def _(make):
        yield make(4, 3)
        yield make(4, 3), 1
        yield make(4, 3), False
        yield (make(4, 3), (0, 1)), {"correction": 0, "keepdim": True}


@logsumexp.samples
def _(make):
    yield make(4, 3), 1
    yield make(4, 3), (0, 1), True
    yield make(4, 0), 1


@vector_norm.samples
def _(make):
    yield make(4, 3)
    yield make(4, 3), 1, 1
    yield make(4, 3), 3, 0, True
    yield make(4, 3), math.inf, 1
    yield make(4, 3), -math.inf
    yield make(4, 3) * torch.tensor([1.0, 0.0, 1.0]), 0.5, 1
    yield make(4, 3), 1.5
    yield make(4, 3), -2.0, 0
    yield (make(4, 3),), {"dtype": torch.float64}


@dist.samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(4, 3), make(3), 1


for _symbol in (cumsum, cumprod, logcumsumexp):

    @_symbol.samples
    def _(make):
        yield make(4, 3), 1
        yield make(4, 3), -2


for _symbol in (cummax, cummin):

    @_symbol.samples
    def _(make):
        yield make(4, 3), 1


@diff.samples
def _(make):
    yield make(4, 5)
    yield make(4, 5), 2, 0
