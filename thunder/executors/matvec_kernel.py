"""The Triton kernels of the matvec executor. The file is text for `handwritten.py`, and not imported."""

import triton
import triton.language as tl


@triton.jit
def _one_row(
    x,
    weight,
    second,
    third,
    bias,
    out,
    second_starts,
    third_starts,
    N,
    K: tl.constexpr,
    weights: tl.constexpr,
    biased: tl.constexpr,
    even: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The columns of up to three weights, one after the other; a program has columns of one of them. The unrolled loop
    issues all loads of a program at once. Loads of the weight are evicted from the caches first, so that the row
    stays."""
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    starts = 0
    if weights > 1:
        if first >= second_starts:
            weight, starts = second, second_starts
    if weights > 2:
        if first >= third_starts:
            weight, starts = third, third_starts
    total = tl.zeros((BN, BK), tl.float32)
    for start in tl.static_range(0, K, BK):
        k = start + tl.arange(0, BK)
        at = weight + (n - starts)[:, None] * K + k[None, :]
        if even:
            w, row = tl.load(at, eviction_policy="evict_first"), tl.load(x + k)
        else:
            inside = (n[:, None] < N) & (k[None, :] < K)
            w, row = (
                tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first"),
                tl.load(x + k, mask=k < K, other=0.0),
            )
        total += w.to(tl.float32) * row.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if biased:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, result, mask=n < N)


@triton.jit
def _some_rows(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K: tl.constexpr,
    biased: tl.constexpr,
    even: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    stages: tl.constexpr,
):
    """Multiplies up to BM rows of x by BN rows of the weight, in steps of BK, and adds the bias."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    total = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, K, BK, num_stages=stages):
        k = start + tl.arange(0, BK)
        at, rows_at = weight + n[:, None] * K + k[None, :], x + m[None, :] * K + k[:, None]
        if even:
            w, rows = tl.load(at, eviction_policy="evict_first"), tl.load(rows_at, mask=m[None, :] < M, other=0.0)
        else:
            w = tl.load(at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
            rows = tl.load(rows_at, mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        total = tl.dot(w, rows, total)
    if biased:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m[None, :] * N + n[:, None], total, mask=(m[None, :] < M) & (n[:, None] < N))
