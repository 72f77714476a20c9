"""Arguments that tests call the operations of `thunder/ops/families/shape.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.shape import (
    expand,
    flatten,
    movedim,
    permute,
    reshape,
    squeeze,
    t,
    transpose,
    unflatten,
    unsqueeze,
    view,
)


@reshape.samples
def _(make):
    yield make(4, 3), (2, 6)
    yield make(4, 3), (-1,)
    yield make(4, 3), (2, -1, 3)
    yield make(), (1, 1)
    yield make(0, 3), (3, 0)


@reshape.error_samples
def _(make):
    yield make(4, 3), (5, 2)
    yield make(4, 3), (-1, -1)
    yield make(4, 3), (-1, 5)


@view.samples
def _(make):
    yield make(4, 3), (2, 6)
    yield make(4, 3), (-1, 2)
    yield make(4, 3), torch.int32
    yield make(4, 4), torch.float64
    yield make(4, 4), torch.int16


@view.error_samples
def _(make):
    yield make(4, 3), (5, 2)


@flatten.samples
def _(make):
    yield make(2, 3, 4)
    yield make(2, 3, 4), 1
    yield make(2, 3, 4, 2), 1, -2
    yield make()


@flatten.error_samples
def _(make):
    yield make(2, 3), 1, 0
    yield make(2, 3), 5


@unflatten.samples
def _(make):
    yield make(2, 6), 1, (2, 3)
    yield make(2, 6), -1, (-1, 2)


@unflatten.error_samples
def _(make):
    yield make(2, 6), 1, (4, 2)


@permute.samples
def _(make):
    yield make(2, 3, 4), (2, 0, 1)
    yield make(2, 3, 4), (-1, 0, -2)
    yield make(), ()


@permute.error_samples
def _(make):
    yield make(2, 3), (0, 0)
    yield make(2, 3), (0,)


@transpose.samples
def _(make):
    yield make(2, 3, 4), 0, 2
    yield make(2, 3, 4), -1, -2
    yield make(2, 3), 1, 1


@transpose.error_samples
def _(make):
    yield make(2, 3), 0, 2


@t.samples
def _(make):
    yield make(2, 3)
    yield make(3)


@t.error_samples
def _(make):
    yield make(2, 3, 4)


@movedim.samples
def _(make):
    yield make(2, 3, 4), 0, -1
    yield make(2, 3, 4), (0, 1), (2, 0)


@unsqueeze.samples
def _(make):
    yield make(2, 3), 0
    yield make(2, 3), -1
    yield make(), 0


@unsqueeze.error_samples
def _(make):
    yield make(2, 3), 4


@squeeze.samples
def _(make):
    yield make(1, 2, 1)
    yield make(1, 2, 1), 0
    yield make(1, 2, 1), 1
    yield make(1, 2, 1), (0, -1)
    yield make(), 0


@squeeze.error_samples
def _(make):
    yield make(1, 2), 3


@expand.samples
def _(make):
    yield make(2, 1), (2, 3)
    yield make(2, 1), (4, -1, 3)
    yield make(), (2,)


@expand.error_samples
def _(make):
    yield make(2, 3), (2, 4)
    yield make(2, 3), (3,)
    yield make(3), (-1, 3)
