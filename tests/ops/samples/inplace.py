"""Arguments that tests call the operations of `thunder/ops/functionalize/inplace.py` with."""

from __future__ import annotations

import torch

from thunder.ops.functionalize.inplace import copied_into, fill


@copied_into.samples
def _(make):
    yield make(3, 4), make(3, 4)
    yield make(3, 4), make(4)
    yield make(3, 4), make(3, 1, dtype=torch.int64, low=0, high=9)


@fill.samples
def _(make):
    yield make(3, 4), 2
    yield make(3, 4), make()
