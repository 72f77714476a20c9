"""A tensor multiplied in place by a number on the device, which is mostly 1: then nothing is read or written. A file of
its own, since Triton reads its environment when a kernel is decorated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
PROGRAMS = 528


@triton.jit
def _scale(x, factor, n, columns, gap, block: tl.constexpr):
    f = tl.load(factor)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * block, n, tl.num_programs(0) * block):
            at = start + tl.arange(0, block)
            offset = at + at // columns * gap
            old = tl.load(x + offset, mask=at < n)
            wide = tl.float64 if old.dtype == tl.float64 else tl.float32
            tl.store(x + offset, (old.to(wide) * f.to(wide)).to(old.dtype), mask=at < n)


def scale(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x: a matrix, the elements of its rows next to each other in memory. factor: one number. Returns x."""
    n, columns = x.numel(), x.shape[1]
    if n:
        with torch.cuda.device_of(x):
            _scale[(min(-(-n // BLOCK), PROGRAMS),)](x, factor, n, columns, x.stride(0) - columns, block=BLOCK)
    return x
