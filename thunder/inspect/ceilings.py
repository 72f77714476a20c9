"""What a device reaches: the rate at which it copies, and that of a matmul in a dtype.

A roofline (S. Williams et al. 2009) holds an operation against both: it can take no less than its bytes at the one rate
and its arithmetic at the other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

ROUNDS = 20  # of which the fastest counts


class Ceilings(NamedTuple):
    """bytes: read and written in a second by a copy that fits into no cache. flops: of a large matmul, by dtype."""

    bytes: float
    flops: dict[torch.dtype, float]

    def seconds(self, moved: float, flops: float, dtype: torch.dtype) -> float:
        """The least time for an operation that moves these bytes and has this arithmetic."""
        rate = self.flops.get(dtype)
        return max(moved / self.bytes, flops / rate if rate else 0.0)


@functools.cache
def ceilings(device: torch.device, dtypes: frozenset[torch.dtype]) -> Ceilings:
    """Measured on a device, in about a fifth of a second: once in a process."""
    on_gpu = device.type == "cuda"
    source = torch.empty((2**29 if on_gpu else 2**26) // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    n = 4096 if on_gpu else 512
    flops = {}
    for dtype in sorted(dtypes, key=str):
        a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
        flops[dtype] = 2 * n**3 / _seconds(functools.partial(torch.mm, a, b), device)
    return Ceilings(moved, flops)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
