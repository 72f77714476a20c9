"""The Triton kernels of the embedding_gradient executor. The file is text for `handwritten.py`, and not imported."""

import triton
import triton.language as tl


@triton.jit
def _sum(g, order, begin, end, out, row, width, column, tokens: tl.constexpr, block: tl.constexpr):
    total = tl.zeros([block], tl.float32)
    for at in range(begin, end, tokens):
        position = at + tl.arange(0, tokens)
        token = tl.load(order + position, mask=position < end, other=0)
        inside = (position < end)[:, None] & (column < width)[None, :]
        total += tl.sum(tl.load(g + token[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(out + row * width + column, total, mask=column < width)


@triton.jit
def _each_row(g, order, starts, out, width, padding, most: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    end = tl.where(row == padding, begin, end)
    if end - begin <= most:
        _sum(g, order, begin, end, out, row, width, tl.program_id(1) * block + tl.arange(0, block), tokens, block)


@triton.jit
def _long_rows(
    g, order, rows, starts, out, width, padding, most: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr
):
    """Of the programs whose `most` indices begin inside a row, the first sums all of it."""
    first = tl.program_id(0) * most
    row = tl.load(rows + first).to(tl.int64)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if (end - begin > most) & (first - begin < most) & (row != padding):
        _sum(g, order, begin, end, out, row, width, tl.program_id(1) * block + tl.arange(0, block), tokens, block)
