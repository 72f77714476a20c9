"""The Triton kernel of `copies.py`. The file is text for `handwritten.py`, and not imported."""

import triton
import triton.language as tl


@triton.jit
def _copies(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15,
    t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Copies 16 sources to 16 targets; a program has a block of one of them. Of a tensor of n elements the number is
    2 n + 3: it is never 1 and no multiple of 16, so that one kernel takes all sizes. Whole blocks have no mask, which
    would make narrow loads; the last one is copied in parts, whose code is short."""
    sources = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    targets = (t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15)
    numbers = (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15)
    block = tl.program_id(0)
    inside = tl.arange(0, BLOCK)
    for i in tl.static_range(16):
        n = (numbers[i] - 3) // 2
        blocks = (n + BLOCK - 1) // BLOCK
        if (block >= 0) & (block < blocks):
            start = block.to(tl.int64) * BLOCK
            source, target = sources[i] + start, targets[i] + start
            if start + BLOCK <= n:
                tl.store(target + inside, tl.load(source + inside))
            else:
                for at in range(0, BLOCK, PART):
                    here = at + tl.arange(0, PART)
                    mask = start + here < n
                    tl.store(target + here, tl.load(source + here, mask=mask), mask=mask)
        block -= blocks
