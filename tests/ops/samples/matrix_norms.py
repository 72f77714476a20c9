"""Arguments that tests call the operations of `thunder/ops/families/matrix_norms.py` with."""

from __future__ import annotations

import math

from thunder.ops.families.matrix_norms import (
    cond,
    frobenius_norm,
    linalg_norm,
    matrix_norm,
    matrix_rank,
    norm_except_dim,
    nuclear_norm,
)


@matrix_norm.samples
def _(make):
    yield (make(3, 4),)
    yield make(2, 3, 4), "nuc"
    yield (make(2, 3, 4), 1), {"keepdim": True}
    yield make(2, 3, 4), -math.inf, (0, 2)
    yield (make(2, 3, 4), 2, (0, 1), True), {}
    yield make(3, 4), -2


@linalg_norm.samples
def _(make):
    yield (make(2, 3, 4),)
    yield make(3, 4), "nuc"
    yield make(3, 4), 3, 1, True
    yield make(2, 3, 4), -1, (0, 2)


@nuclear_norm.samples
def _(make):
    yield (make(3, 4),)
    yield make(2, 3, 4), (0, 2), True


@frobenius_norm.samples
def _(make):
    yield make(3, 4), (0, 1)
    yield make(3, 4), [1], True


@norm_except_dim.samples
def _(make):
    for dim in (0, 1, 2, -1):
        yield make(2, 3, 4), 2, dim


@cond.samples
def _(make):
    yield (make(4, 3),)
    yield make(2, 3, 3), "fro"
    yield make(3, 3), -2


@matrix_rank.samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 3),), {"hermitian": True, "rtol": 0.5}
    yield make(3, 3), 0.5


@matrix_norm.error_samples
def _(make):
    yield (make(3),)
    yield make(3, 3), 3


@linalg_norm.error_samples
def _(make):
    yield make(2, 3, 4), 2


@cond.error_samples
def _(make):
    yield make(3, 4), "fro"


@matrix_rank.error_samples
def _(make):
    yield (make(3),)
