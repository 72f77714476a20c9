"""The Triton kernels of the linear_cross_entropy executor. The file is text for `handwritten.py`, and not imported."""

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
    is_counted = tl.load(keep + row) != 0
    tl.store(losses + row, tl.where(is_counted, lse - tl.load(chosen + row).to(tl.float32), 0.0))
    if gradient:
        index = tl.load(target + row)
        factor = tl.where(is_counted, tl.load(scale).to(tl.float32), 0.0)
        for start in range(0, classes, block):
            column = start + tl.arange(0, block)
            z = tl.load(logits + column, mask=column < classes, other=0.0).to(tl.float32)
            slope = tl.exp(z - lse) - tl.where(column == index, 1.0, 0.0)
            tl.store(logits + column, tl.where(is_counted, slope * factor, 0.0), mask=column < classes)
