"""Arguments that tests call the operations of `thunder/ops/families/indexing.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.indexing import getitem, select_scatter, setitem, slice_scatter


@getitem.samples
def _(make):
    rows = make(2, 2, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), 1
    yield make(4, 3), -1
    yield make(4, 3), slice(1, 3)
    yield make(4, 3), slice(None, None, 2)
    yield make(4, 3), (slice(3, 1), 0)
    yield make(4, 3), (..., -1)
    yield make(4, 3), (None, slice(None), None, 0)
    yield make(4, 3, 2), (..., slice(-2, None))
    yield make(4, 3), ...
    yield make(4, 3), ()
    yield make(4, 3), (slice(None), slice(-10, 10))
    yield make(4, 3), rows
    yield make(4, 3, 2), (slice(None), rows)
    yield make(4, 3, 5), (rows, slice(None), rows)
    yield make(4, 3, 5), (rows, rows)
    yield make(4, 3, 5), (0, rows, slice(1, 4))
    yield make(4, 3, 5), (rows, 0, rows)
    yield make(4, 3), (None, rows)
    yield make(4, 3), make(dtype=torch.int64, low=0, high=3)


@getitem.error_samples
def _(make):
    yield make(4, 3), 4
    yield make(4, 3), (0, 0, 0)
    yield make(4, 3), slice(None, None, -1)
    yield make(4, 3), "a"
    yield make(), 0
    yield make(4, 3), make(2)


@setitem.samples
def _(make):
    rows = make(2, dtype=torch.int64, low=0, high=3)
    yield make(4, 3), 1, 2.0
    yield make(4, 3), (slice(None), 0), make(4)
    yield make(4, 3), (slice(1, 3), slice(None)), make(3)
    yield make(4, 3), rows, make(2, 3)
    yield make(4, 3), slice(0, 2), make(2, 3, dtype=torch.int64, low=0, high=9)
    yield make(4, 3), make(4, 3, dtype=torch.bool), 1.5
    yield make(4, 3), ..., make()


@setitem.error_samples
def _(make):
    yield make(4, 3), (slice(None), 0), make(3)
    yield make(4, 3), 5, 1.0


@slice_scatter.samples
def _(make):
    yield make(4, 3), make(2, 3), 0, 1, 3
    yield (make(4, 3), make(4, 2)), {"dim": 1, "step": 2}


@select_scatter.samples
def _(make):
    yield make(4, 3), make(3), 0, 1
    yield make(4, 3), make(4), -1, -1
