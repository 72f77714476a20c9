"""A tensor multiplied in place by a number on the device, which is mostly 1: then nothing is read or written. A file of
its own, since Triton reads its environment when a kernel is decorated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["scale"]

BLOCK = 1024
PROGRAMS = 528


@triton.jit
def _scale(x, factor, n, block: tl.constexpr):
    f = tl.load(factor)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * block, n, tl.num_programs(0) * block):
            at = start + tl.arange(0, block)
            old = tl.load(x + at, mask=at < n)
            wide = tl.float64 if old.dtype == tl.float64 else tl.float32
            tl.store(x + at, (old.to(wide) * f.to(wide)).to(old.dtype), mask=at < n)


def scale(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x: any shape, its elements next to each other in memory in some order. factor: one number. Returns x."""
    n = x.numel()
    if n:
        with torch.cuda.device_of(x):
            _scale[(min(-(-n // BLOCK), PROGRAMS),)](x, factor, n, block=BLOCK)
    return x
