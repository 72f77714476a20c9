"""Arguments that tests call the operations of `thunder/ops/convolution.py` with."""

from __future__ import annotations

from thunder.ops.convolution import col2im, conv_tbc, im2col


@conv_tbc.samples
def _(make):
    yield make(6, 2, 3), make(3, 3, 4), make(4)
    yield make(6, 2, 3), make(3, 3, 4), make(4), 1


@conv_tbc.error_samples
def _(make):
    yield make(6, 2, 3), make(3, 2, 4), make(4)


@im2col.samples
def _(make):
    yield make(2, 3, 5, 6), (2, 3)
    yield make(2, 3, 6, 6), 3, 2, 1, 2
    yield make(3, 5, 5), 2


@col2im.samples
def _(make):
    yield make(2, 12, 12), (4, 5), 2
    yield make(2, 12, 9), (6, 6), 2, 1, 0, 2
