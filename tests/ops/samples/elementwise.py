"""Arguments that tests call the operations of `thunder/ops/families/elementwise.py` and `binary.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.binary import div, rsub
from thunder.ops.families.elementwise import frexp, round


@round.samples
def _(make):
    yield make(4, 3)
    yield (make(4, 3),), {"decimals": 2}


@frexp.samples
def _(make):
    yield make(4, 3)


@rsub.samples
def _(make):
    yield make(4, 3), make(3)
    yield (make(4, 3), 2), {"alpha": 2}


@div.samples
def _(make):
    yield make(4, 3), make(4, 3, low=0.5)
    yield make(4, 3), 2
    yield make(4, dtype=torch.int64, low=1, high=9), make(4, dtype=torch.int64, low=1, high=4)
    yield (make(4, 3), make(4, 3, low=0.5)), {"rounding_mode": "floor"}
    yield (make(4, 3), make(4, 3, low=0.5)), {"rounding_mode": "trunc"}
