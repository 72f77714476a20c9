"""Arguments that tests call the operations of `thunder/ops/families/special.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.special import isclose, isin, mvlgamma, nanquantile, quantile, renorm
from thunder.ops.registry import LTORCH


@mvlgamma.samples
def _(make):
    yield make(4, 3, low=3.0, high=5.0), 2


@LTORCH["polygamma"].samples
def _(make):
    yield 1, make(4, 3, low=0.5, high=3.0)
    yield 2, make(4, 3, low=0.5, high=3.0)


@isclose.samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield (make(4, 1), make(3)), {"atol": 0.5}


for _symbol in (quantile, nanquantile):

    @_symbol.samples
    def _(make):
        yield make(4, 3), 0.4
        yield (make(4, 3), make(2, low=0.0, high=1.0), 1), {"keepdim": True}


@renorm.samples
def _(make):
    yield make(4, 3), 2, 0, 1.0


@isin.samples
def _(make):
    yield make(4, dtype=torch.int64), make(3, dtype=torch.int64)
    yield (make(4, dtype=torch.int64), 1), {"invert": True}
