"""Arguments that tests call the operations of `thunder/ops/families/joining.py` with."""

from __future__ import annotations

import torch

from thunder.ops import LTORCH
from thunder.ops.families.joining import (
    cat,
    chunk,
    column_stack,
    narrow,
    repeat_interleave,
    select,
    split,
    stack,
    tensor_split,
    unbind,
)


@cat.samples
def _(make):
    yield [make(2, 3), make(4, 3)], 0
    yield [make(2, 3), make(2, 1)], -1
    yield [make(2, dtype=torch.int64), make(3)], 0
    yield [make(0), make(2, 3)], 0
    yield ([make(2, 3)],)


@cat.error_samples
def _(make):
    yield [make(2, 3), make(2, 4)], 0
    yield [make(2, 3), make(2)], 0
    yield [make(), make()], 0
    yield ([],)


@stack.samples
def _(make):
    yield [make(2, 3), make(2, 3)], 0
    yield [make(2, 3), make(2, 3), make(2, 3)], -1
    yield ([make(), make()],)


@stack.error_samples
def _(make):
    yield [make(2, 3), make(2, 4)], 0


@column_stack.samples
def _(make):
    yield ([make(3), make(3, 2)],)


@split.samples
def _(make):
    yield make(7, 2), 3
    yield make(7, 2), [2, 5]
    yield make(2, 6), 2, -1


@split.error_samples
def _(make):
    yield make(7, 2), [2, 4]
    yield make(7, 2), 2, 2


@chunk.samples
def _(make):
    yield make(6, 2), 3
    yield make(7, 2), 3
    yield make(2, 5), 4, -1


@chunk.error_samples
def _(make):
    yield make(6, 2), 0


@tensor_split.samples
def _(make):
    yield make(7, 2), 3
    yield make(7, 2), (2, 5)
    yield make(2, 5), (1, -1), 1
    yield make(7, 2), (4, 2)


@unbind.samples
def _(make):
    yield make(3, 2), 0
    yield make(3, 2), -1


@unbind.error_samples
def _(make):
    yield make(), 0


@select.samples
def _(make):
    yield make(3, 2), 0, 1
    yield make(3, 2), -1, -2


@select.error_samples
def _(make):
    yield make(3, 2), 0, 3
    yield make(), 0, 0


@narrow.samples
def _(make):
    yield make(5, 2), 0, 1, 3
    yield make(5, 2), 0, -2, 2


@narrow.error_samples
def _(make):
    yield make(5, 2), 0, 3, 3


@repeat_interleave.samples
def _(make):
    yield make(3, 2), 2
    yield make(3, 2), 2, 0
    yield make(3, 2), 3, -1


for _name in ("hstack", "vstack", "dstack"):

    @LTORCH[_name].samples
    def _(make):
        yield ([make(3), make(3)],)
        yield ([make(2, 3), make(2, 3)],)


for _name in ("hsplit", "vsplit", "dsplit"):

    @LTORCH[_name].samples
    def _(make):
        yield make(4, 4, 4), 2
        yield make(4, 4, 4), (1, 3)
