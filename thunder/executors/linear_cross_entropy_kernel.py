"""The Triton kernels of the linear_cross_entropy executor; a file of its own, since Triton reads its environment when a
kernel is decorated."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: from it infinite numbers may be subtracted


@triton.jit
def _over_rows(
    logits,
    target,
    keep,
    chosen,
    scale,
    losses,
    classes: tl.constexpr,
    stride,
    gradient: tl.constexpr,
    block: tl.constexpr,
):
    """One row for each program: maximum and sum of exponentials in one pass, of what each thread sees first; in a
    second one the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest, total = tl.full([block], LOWEST, tl.float32), tl.zeros([block], tl.float32)
    for start in range(0, classes, block):
        column = start + tl.arange(0, block)
        z = tl.load(logits + column, mask=column < classes, other=-float("inf")).to(tl.float32)
        apart = tl.exp(-tl.abs(z - highest))  # either z or what was highest is 0 from the new one
        total = tl.where(z > highest, total * apart + 1.0, total + apart)
        highest = tl.maximum(highest, z)
    best = tl.max(highest, 0)
    lse = best + tl.log(tl.sum(total * tl.exp(highest - best), 0))
    kept = tl.load(keep + row) != 0
    tl.store(losses + row, tl.where(kept, lse - tl.load(chosen + row).to(tl.float32), 0.0))
    if gradient:
        index = tl.load(target + row)
        factor = tl.where(kept, tl.load(scale).to(tl.float32), 0.0)
        for start in range(0, classes, block):
            column = start + tl.arange(0, block)
            z = tl.load(logits + column, mask=column < classes, other=0.0).to(tl.float32)
            slope = tl.exp(z - lse) - tl.where(column == index, 1.0, 0.0)
            tl.store(logits + column, tl.where(kept, slope * factor, 0.0), mask=column < classes)


def over_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
    chosen: torch.Tensor,
    scale: torch.Tensor,
    losses: torch.Tensor,
    gradient: bool,
) -> None:
    """Losses (N,) in float32 of logits (N, C), rows of which lie together; with `gradient` their gradients, times
    `scale` (), over the logits. Rows not kept are 0."""
    rows, classes = logits.shape
    block = min(2048, triton.next_power_of_2(classes))
    if rows:
        with torch.cuda.device_of(logits):
            _over_rows[(rows,)](
                logits,
                target,
                keep,
                chosen,
                scale,
                losses,
                classes,
                logits.stride(0),
                gradient=gradient,
                block=block,
                num_warps=8 if block == 2048 else 4,
            )
