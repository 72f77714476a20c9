"""The Triton kernels of the embedding_gradient executor; a file of its own, since Triton reads its environment when a
kernel is decorated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST = 64  # indices that a program for a row sums up; where there are more, others share the columns


@triton.jit
def _sum(g, order, begin, end, out, row, width, column, tokens: tl.constexpr, block: tl.constexpr):
    total = tl.zeros([block], tl.float32)
    for at in range(begin, end, tokens):
        place = at + tl.arange(0, tokens)
        token = tl.load(order + place, mask=place < end, other=0)
        inside = (place < end)[:, None] & (column < width)[None, :]
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


def summed_by_index(g: torch.Tensor, indices: torch.Tensor, count: int, padding: int) -> torch.Tensor:
    """The sums (count, D) of those rows of g (..., D) that have the same of the indices (...), which are integers from
    0 to count - 1. The row `padding` is 0."""
    width = g.shape[-1]
    rows, order = torch.sort(indices.reshape(-1), stable=True)
    starts = torch.searchsorted(rows, torch.arange(count + 1, device=rows.device, dtype=rows.dtype), out_int32=True)
    out = g.new_empty((count, width))
    g = g.contiguous()
    block = min(4096, triton.next_power_of_2(width))
    with torch.cuda.device_of(g):
        _each_row[(count, triton.cdiv(width, block))](
            g, order, starts, out, width, padding, most=MOST, tokens=4, block=block, num_warps=4
        )
        block = min(32, block)
        _long_rows[(triton.cdiv(rows.numel(), MOST), triton.cdiv(width, block))](
            g, order, rows, starts, out, width, padding, most=MOST, tokens=256, block=block, num_warps=4
        )
    return out
