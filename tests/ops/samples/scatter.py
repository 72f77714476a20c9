"""Arguments that tests call the operations of `thunder/ops/families/scatter.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.scatter import (
    gather,
    index_add,
    index_copy,
    index_fill,
    index_put,
    index_reduce,
    index_select,
    masked_scatter,
    put,
    scatter,
    scatter_add,
    scatter_reduce,
    segment_reduce,
    take_along_dim,
    take_flat,
)


@index_select.samples
def _(make):
    yield make(4, 3), 0, make(5, dtype=torch.int64, low=0, high=4)
    yield make(4, 3), -1, make(2, dtype=torch.int32, low=0, high=3)
    yield make(4, 3), 1, make(dtype=torch.int64, low=0, high=3)


@index_select.error_samples
def _(make):
    yield make(4, 3), 0, make(2)
    yield make(4, 3), 0, make(2, 2, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), 2, make(2, dtype=torch.int64, low=0, high=3)


@gather.samples
def _(make):
    yield make(4, 3), 0, make(2, 3, dtype=torch.int64, low=0, high=4)
    yield make(4, 3), -1, make(4, 5, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), 1, make(2, 2, dtype=torch.int64, low=0, high=3)


@gather.error_samples
def _(make):
    yield make(4, 3), 0, make(2, 4, dtype=torch.int64, low=0, high=4)
    yield make(4, 3), 0, make(2, dtype=torch.int64, low=0, high=4)
    yield make(4, 3), 0, make(2, 3)


@take_along_dim.samples
def _(make):
    yield make(4, 3), make(4, 1, dtype=torch.int64, low=0, high=3), 1
    yield make(4, 3), make(1, 3, dtype=torch.int64, low=0, high=4), 0
    yield make(4, 3), make(5, dtype=torch.int64, low=0, high=12)


@take_flat.samples
def _(make):
    yield make(4, 3), make(2, 2, dtype=torch.int64, low=0, high=12)


@put.samples
def _(make):
    yield make(4, 3), torch.tensor([2, 7]), make(2)
    yield make(4, 3), torch.tensor([[2], [-1]]), make(2, 1), True


@scatter.samples
def _(make):
    index = make(2, 3, dtype=torch.int64, low=0, high=4)
    yield make(4, 3), 0, index[:1], make(2, 3)
    yield make(4, 3), 0, index, 2.0
    yield (make(4, 3), 0, index, 2.0), {"reduce": "multiply"}
    yield (make(4, 3), 1, make(4, 1, dtype=torch.int64, low=0, high=3)), {"value": 3.0}
    yield (make(4, 3), 1, make(4, 1, dtype=torch.int64, low=0, high=3)), {"src": make(4, 2)}


@scatter.error_samples
def _(make):
    yield make(4, 3), 0, make(2, 4, dtype=torch.int64, low=0, high=4), 2.0
    yield make(4, 3), 0, make(2, 3, dtype=torch.int64, low=0, high=4), make(1, 3)


@scatter_add.samples
def _(make):
    yield make(4, 3), 0, make(2, 3, dtype=torch.int64, low=0, high=4), make(2, 3)
    yield make(4, 3), -1, make(4, 2, dtype=torch.int64, low=0, high=3), make(4, 3)


@scatter_reduce.samples
def _(make):
    for how in ("sum", "prod", "mean", "amax", "amin"):
        yield make(4, 3), 0, make(2, 3, dtype=torch.int64, low=0, high=4), make(2, 3), how
    yield (make(4, 3), 0, make(2, 3, dtype=torch.int64, low=0, high=4), make(2, 3), "amax"), {"include_self": False}


@segment_reduce.samples
def _(make):
    yield (make(5, 3), "max"), {"lengths": torch.tensor([2, 0, 3]), "initial": -9.0}
    yield (make(5, 3), "sum"), {"offsets": torch.tensor([0, 1, 5])}
    yield (make(2, 4, 3), "mean"), {"lengths": torch.tensor([[1, 3], [2, 2]]), "axis": 1}


@segment_reduce.error_samples
def _(make):
    yield (make(5, 3), "sum"), {}
    yield (make(5, 3), "sum"), {"lengths": torch.tensor([2, 3]), "axis": 1}
    yield (make(5, 3), "median"), {"lengths": torch.tensor([2, 3])}


def _two_rows(make):
    yield make(4, 3), 0, torch.tensor([2, 0]), make(2, 3)
    yield make(4, 3), -1, torch.tensor([1]), make(4, 1)


def _misfits(make):
    yield make(4, 3), 0, torch.tensor([2, 0]), make(3, 3)


for _symbol in (index_add, index_copy):
    _symbol.samples(_two_rows)
    _symbol.error_samples(_misfits)


@index_fill.samples
def _(make):
    yield make(4, 3), 0, torch.tensor([2, 0]), 1.5
    yield make(4, 3), 1, torch.tensor([2]), make()


@index_reduce.samples
def _(make):
    yield make(4, 3), 0, torch.tensor([2, 0]), make(2, 3), "amax"


@masked_scatter.samples
def _(make):
    yield make(4, 3), make(4, 3, dtype=torch.bool), make(4, 3)


@index_put.samples
def _(make):
    at = torch.tensor([2, 0])
    yield make(4, 3), (at,), make(2, 3)
    yield make(4, 3), (at, at), make(2), True
    yield make(4, 3), (at, at), make()


@index_put.error_samples
def _(make):
    yield make(3), (torch.tensor([0]), torch.tensor([0])), make()
