"""Arguments that tests call the operations of `thunder/ops/families/creation.py` with."""

from __future__ import annotations

import torch

from thunder.ops import LTORCH
from thunder.ops.families.creation import (
    arange,
    complex,
    eye,
    full,
    full_like,
    linspace,
    logspace,
    one_hot,
    ones,
    tensor,
    tril_indices,
    triu_indices,
    vander,
    zeros,
)


@full.samples
def _(make):
    yield ((2, 3), 1.5), {}
    yield ((2,), 3), {"dtype": torch.float64}


for _symbol in (zeros, ones):

    @_symbol.samples
    def _(make):
        yield ((2, 3),), {}
        yield (2, 3), {"dtype": torch.int64}


@full_like.samples
def _(make):
    yield make(2, 3), 2.0


@arange.samples
def _(make):
    yield (5,), {}
    yield (2, 9, 3), {}
    yield (0, 1, 0.25), {}
    yield (5, 0, -2), {"dtype": torch.float32}


@logspace.samples
def _(make):
    yield (0, 1, 5), {}
    yield (0, 3, 4, 2.0), {"dtype": torch.float64}


@linspace.samples
def _(make):
    yield (0, 1, 5), {}


@eye.samples
def _(make):
    yield (3,), {}
    yield (3, 4), {}


@tensor.samples
def _(make):
    yield (2.5,), {}
    yield ([[1, 2], [3, 4]],), {}


for _symbol in (tril_indices, triu_indices):

    @_symbol.samples
    def _(make):
        yield (4, 5), {}
        yield (4, 3, 1), {}


@one_hot.samples
def _(make):
    yield make(5, dtype=torch.int64, low=0, high=3), 4


@vander.samples
def _(make):
    yield (make(4),)
    yield (make(2, 3),), {"N": 5}


@vander.error_samples
def _(make):
    yield (make(4),), {"N": 1}
    yield (make(4, dtype=torch.bool),), {}


@complex.samples
def _(make):
    yield make(4), make(4)
    yield make(4, 1), make(3)


@LTORCH["zeros_like"].samples
@LTORCH["ones_like"].samples
def _(make):
    yield make(2, 3)
    yield (make(2, 3),), {"dtype": torch.float64}


for _name in ("tril", "triu"):

    @LTORCH[_name].samples
    def _(make):
        yield make(4, 5)
        yield make(2, 4, 4), -1
        yield make(3, 3, dtype=torch.bool), 1
