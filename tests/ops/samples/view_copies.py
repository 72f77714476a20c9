"""Arguments that tests call the operations of `thunder/ops/view_copies.py` with."""

from __future__ import annotations

from thunder.ops.view_copies import as_strided_scatter, detach_copy, diagonal_scatter


@detach_copy.samples
def _(make):
    yield make(2, 3)


@diagonal_scatter.samples
def _(make):
    yield make(3, 4), make(3)
    yield make(2, 4, 4), make(2, 3), 1, 1, 2


@as_strided_scatter.samples
def _(make):
    yield make(4, 3), make(2, 2), (2, 2), (1, 2), 1
