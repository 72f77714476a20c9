"""Arguments that tests call the operations of `thunder/ops/families/ternary.py` with."""

from __future__ import annotations

import math

import torch

from thunder.ops.families.ternary import (
    addcdiv,
    addcmul,
    clamp,
    clamp_max,
    clamp_min,
    lerp,
    logit,
    masked_fill,
    nan_to_num,
    where,
)


@where.samples
def _(make):
    yield make(4, 3, dtype=torch.bool), make(4, 3), make(4, 3)
    yield make(4, 1, dtype=torch.bool), make(3), 0.0
    yield make(4, 3, dtype=torch.bool), 1.0, 2.0


@masked_fill.samples
def _(make):
    yield make(4, 3), make(4, 3, dtype=torch.bool), 0.5
    yield make(4, 3), make(3, dtype=torch.bool), -1
    yield make(4, 3), make(4, 1, dtype=torch.bool), make()


for _symbol in (clamp,):

    @_symbol.samples
    def _(make):
        yield make(4, 3), -0.5, 0.5
        yield (make(4, 3),), {"min": 0}
        yield make(4, 3), make(3), make(4, 1, low=3, high=4)
        yield make(4, 3), -0.5, math.nan
        yield make(4, 3), make(3) * torch.tensor([1, math.nan, 1]), make(4, 1)


for _symbol in (clamp_min, clamp_max):

    @_symbol.samples
    def _(make):
        yield make(4, 3), 0.5
        yield make(4, 3), make(3)


@addcmul.samples
def _(make):
    yield make(4, 3), make(4, 3), make(3)
    yield (make(4, 3), make(4, 1), make(3)), {"value": 2}


@addcdiv.samples
def _(make):
    yield make(4, 3), make(4, 3), make(3, low=0.5)
    yield (make(4, 3), make(4, 1), make(3, low=0.5)), {"value": 2}


@lerp.samples
def _(make):
    yield make(4, 3), make(4, 3), 0.3
    yield make(4, 3), make(4, 3), make(3)


@nan_to_num.samples
def _(make):
    yield make(4, 3)
    yield make(4, 3), 0.0, 1.0, -1.0


@logit.samples
def _(make):
    yield make(4, 3, low=0.1, high=0.9)
    yield make(4, 3, low=0.1, high=0.9), 0.2
