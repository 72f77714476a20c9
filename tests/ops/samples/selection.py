"""Arguments that tests call the operations of `thunder/ops/families/selection.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.selection import (
    argwhere,
    bincount,
    masked_select,
    nonzero,
    nonzero_static,
    unique,
    unique_consecutive,
)


@nonzero.samples
def _(make):
    yield make(4, 3, dtype=torch.bool)
    yield (make(4, 3, dtype=torch.bool),), {"as_tuple": True}
    yield make(dtype=torch.int64, low=0, high=2)


@argwhere.samples
def _(make):
    yield make(4, 3, dtype=torch.bool)


@nonzero_static.samples
def _(make):
    yield (make(4, 3, dtype=torch.bool),), {"size": 20}
    yield (make(4, 3),), {"size": 2, "fill_value": 7}


@bincount.samples
def _(make):
    yield make(7, dtype=torch.int64, low=0, high=5)
    yield make(7, dtype=torch.int64, low=0, high=5), None, 9
    yield make(7, dtype=torch.int64, low=0, high=5), make(7)


@bincount.error_samples
def _(make):
    yield make(2, 3, dtype=torch.int64, low=0, high=5)
    yield make(7, dtype=torch.int64, low=0, high=5), make(6)
    yield make(7, dtype=torch.int64, low=0, high=5), None, -1


@masked_select.samples
def _(make):
    yield make(4, 3), make(4, 3, dtype=torch.bool)
    yield make(4, 3), make(3, dtype=torch.bool)
    yield make(3), make(4, 1, dtype=torch.bool)


@masked_select.error_samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(4, 3), make(2, dtype=torch.bool)


for _symbol in (unique, unique_consecutive):

    @_symbol.samples
    def _(make):
        yield make(4, 3, dtype=torch.int64, low=0, high=3)
        yield (make(4, 3, dtype=torch.int64, low=0, high=3),), {"return_inverse": True, "return_counts": True}
        yield (make(4, 2, dtype=torch.int64, low=0, high=2),), {"return_counts": True, "dim": 0}
