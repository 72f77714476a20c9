"""Arguments that tests call the operations of `thunder/ops/families/rearrange.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.rearrange import (
    as_strided,
    diag,
    diag_embed,
    diagflat,
    diagonal,
    flip,
    repeat,
    roll,
    rot90,
    tile,
    unfold,
    view_as_complex,
    view_as_real,
)


@repeat.samples
def _(make):
    yield make(2, 3), (2, 2)
    yield make(3), (4, 2)
    yield make(2), (0,)
    yield make(), (3,)


@repeat.error_samples
def _(make):
    yield make(2, 3), (2,)


@tile.samples
def _(make):
    yield make(2, 3), (2,)
    yield make(2, 3), (2, 1, 2)


@flip.samples
def _(make):
    yield make(2, 3), (0,)
    yield make(2, 3, 4), (0, -1)


@flip.error_samples
def _(make):
    yield make(2, 3), (0, 0)
    yield make(2, 3), (2,)


@roll.samples
def _(make):
    yield make(4, 3), 1
    yield make(4, 3), -1, 0
    yield make(4, 3), (1, 2), (0, 1)


@rot90.samples
def _(make):
    for k in range(4):
        yield make(2, 3), k, (0, 1)


@view_as_real.samples
def _(make):
    yield make(2, 3, dtype=torch.complex64)


@view_as_complex.samples
def _(make):
    yield make(3, 2)


@view_as_complex.error_samples
def _(make):
    yield make(3, 3)


@as_strided.samples
def _(make):
    yield make(4, 3), (2, 2), (1, 2), 1


@unfold.samples
def _(make):
    yield make(7, 2), 0, 3, 2
    yield make(2, 5), -1, 2, 1


@unfold.error_samples
def _(make):
    yield make(3, 2), 0, 4, 1


@diagonal.samples
def _(make):
    yield make(3, 4)
    yield make(3, 4), 2
    yield make(2, 3, 4), -1, 0, 2


@diag_embed.samples
def _(make):
    yield make(2, 3)
    yield make(2, 3), 1, 0, 2


@diag.samples
def _(make):
    yield make(3)
    yield make(3, 4), 1


@diag.error_samples
def _(make):
    yield make(2, 3, 4)


@diagflat.samples
def _(make):
    yield make(2, 3)
    yield make(3), -1
