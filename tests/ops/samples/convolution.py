"""Arguments that tests call the operations of `thunder/ops/families/convolution.py` with."""

from __future__ import annotations

from thunder.ops import LTORCH
from thunder.ops.families.convolution import col2im, conv_tbc, im2col


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


def _conv(rank: int) -> None:
    symbol, extent = LTORCH[f"conv{rank}d"], (6, 5, 4)[:rank]

    @symbol.samples
    def _(make):
        kernel = (3, 2, 2)[:rank]
        yield make(2, 4, *extent), make(6, 4, *kernel), make(6)
        yield make(4, *extent), make(6, 4, *kernel)
        yield make(2, 4, *extent), make(6, 2, *kernel), None, 2, 1, 1, 2
        yield (make(2, 4, *extent), make(6, 4, *kernel)), {"padding": "same"}
        yield (make(2, 4, *extent), make(6, 4, *kernel)), {"padding": "valid", "stride": (2,) * rank}

    @symbol.error_samples
    def _(make):
        yield make(2, 3, *extent), make(6, 4, *(1,) * rank)
        yield make(2, 4, *extent), make(6, 4, *(9,) * rank)
        yield (make(2, 4, *extent), make(6, 4, *(1,) * rank)), {"padding": "same", "stride": 2}


for _rank in (1, 2, 3):
    _conv(_rank)


def _conv_transpose(rank: int) -> None:
    symbol, extent = LTORCH[f"conv_transpose{rank}d"], (6, 5, 4)[:rank]

    @symbol.samples
    def _(make):
        yield make(2, 4, *extent), make(4, 3, *(2,) * rank), make(3)
        yield make(4, *extent), make(4, 3, *(2,) * rank)
        yield (
            (make(2, 4, *extent), make(4, 3, *(3,) * rank)),
            {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
        )


for _rank in (1, 2, 3):
    _conv_transpose(_rank)
