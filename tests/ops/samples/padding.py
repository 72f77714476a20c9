"""Arguments that tests call the operations of `thunder/ops/families/padding.py` with."""

from __future__ import annotations

from thunder.ops.families.padding import block_diag, cartesian_prod, combinations, pad


@pad.samples
def _(make):
    yield make(2, 3), (1, 2)
    yield make(2, 3), (1, 2, -1, 1), "constant", 2.5
    yield make(2, 3, 4), (1, 2), "reflect"
    yield make(2, 3, 4), (1, 2), "replicate"
    yield make(2, 3, 4, 5), (1, 2, 0, 1), "circular"


@pad.error_samples
def _(make):
    yield make(2, 3), (1,)
    yield make(2, 3, 4), (4, 0), "reflect"


@cartesian_prod.samples
def _(make):
    yield make(3), make(2)
    yield make(2), make(1), make(3)


@combinations.samples
def _(make):
    yield make(4)
    yield make(3), 2, True


@block_diag.samples
def _(make):
    yield make(2, 3), make(1, 2), make(3)
