"""Arguments that tests call the operations of `thunder/ops/pooling.py` with."""

from __future__ import annotations

import torch

from thunder.ops.pooling import _ADAPTIVE_AVERAGE, _MAXIMUM


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
