"""The Triton kernels of the few_bits executor. The file is text for `handwritten.py`, and not imported.

A byte of `held` is a whole number (halves == 1) or two codes of 4 bits, of which the low bits belong to the first half
of a row (halves == 2). `scale`: a number for each row (group == 0) or group of a row; with `double` it is a whole
number, times `second`, plus `third`, which are numbers of rows. With `least`, `second` is added to a group's numbers.
"""

import triton
import triton.language as tl


@triton.jit
def _numbers(codes, table, tabled: tl.constexpr):
    return tl.load(table + codes.to(tl.int32)) if tabled else codes.to(tl.float32)


@triton.jit
def _scales(scale, second, third, n, groups: tl.constexpr, at, within, inside, double: tl.constexpr):
    """Of the groups `at` of rows n, which broadcast. within: which rows there are; inside: which groups."""
    scales = tl.load(scale + n * groups + at, mask=inside, other=0).to(tl.float32)
    if double:
        scales = scales * tl.load(second + n, mask=within, other=0.0) + tl.load(third + n, mask=within, other=0.0)
    return scales


@triton.jit
def _one_row(
    x,
    held,
    scale,
    second,
    third,
    table,
    bias,
    out,
    N,
    K: tl.constexpr,
    halves: tl.constexpr,
    group: tl.constexpr,
    tabled: tl.constexpr,
    double: tl.constexpr,
    least: tl.constexpr,
    biased: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RUN: tl.constexpr,
):
    """Some columns of the result. A thread reads runs of 16 bytes, which lie in one group, so that it adds them up by
    itself before it multiplies by their scale."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    runs, places = tl.arange(0, BK // RUN), tl.arange(0, RUN)
    width: tl.constexpr = K // halves
    total = tl.zeros((BN, BK // RUN), tl.float32)
    for start in tl.static_range(0, width, BK):
        first = start + runs * RUN
        k = first[:, None] + places[None, :]
        inside = (n[:, None, None] < N) & (k[None, :, :] < width)
        at = held + n[:, None, None].to(tl.int64) * width + k[None, :, :]
        codes = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
        for half in tl.static_range(halves):
            own = codes if halves == 1 else (codes & 15 if half == 0 else codes >> 4)
            row = tl.load(x + half * width + k, mask=k < width, other=0.0).to(tl.float32)
            products = tl.sum(_numbers(own, table, tabled) * row[None, :, :], 2)
            if group > 0:
                of = half * (width // group) + first[None, :] // group
                there = (n[:, None] < N) & (first[None, :] < width)
                products *= _scales(scale, second, third, n[:, None], K // group, of, n[:, None] < N, there, double)
                if least:
                    lowest = tl.load(second + n[:, None] * (K // group) + of, mask=there, other=0.0).to(tl.float32)
                    products += lowest * tl.sum(row, 1)[None, :]
            total += products
    result = tl.sum(total, 1)
    if group == 0:
        result *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)
    if biased:
        result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, result, mask=n < N)


@triton.jit
def _some_rows(
    x,
    held,
    scale,
    second,
    third,
    table,
    bias,
    out,
    M,
    N,
    K: tl.constexpr,
    halves: tl.constexpr,
    group: tl.constexpr,
    tabled: tl.constexpr,
    double: tl.constexpr,
    least: tl.constexpr,
    biased: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    stages: tl.constexpr,
):
    """Products of tiles, whose BK bytes lie in so many groups. The weight's numbers are rounded to the dtype of x. A
    split sums up some of the tiles of its rows, for `_added`."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    width: tl.constexpr = K // halves
    total = tl.zeros((BN, BM), tl.float32)
    split = tl.program_id(1)
    for start in tl.range(split * BK, width, BK * SPLITS, num_stages=stages):
        k = start + tl.arange(0, BK)
        inside = (n[:, None] < N) & (k[None, :] < width)
        codes = tl.load(held + n[:, None].to(tl.int64) * width + k[None, :], mask=inside, other=0)
        for half in tl.static_range(halves):
            at = x + m[None, :] * K + half * width + k[:, None]
            rows = tl.load(at, mask=(m[None, :] < M) & (k[:, None] < width), other=0.0)
            own = codes if halves == 1 else (codes & 15 if half == 0 else codes >> 4)
            numbers = _numbers(own, table, tabled)
            if group > 0:
                first = start // group + tl.arange(0, GROUPS)
                of = half * (width // group) + first[None, :]
                there = (n[:, None] < N) & (first[None, :] < width // group)
                scales = _scales(scale, second, third, n[:, None], K // group, of, n[:, None] < N, there, double)
                numbers = tl.reshape(numbers, (BN, GROUPS, BK // GROUPS)) * scales[:, :, None]
                if least:
                    lowest = tl.load(second + n[:, None] * (K // group) + of, mask=there, other=0.0).to(tl.float32)
                    numbers += lowest[:, :, None]
                numbers = tl.reshape(numbers, (BN, BK))
            total = tl.dot(numbers.to(rows.dtype), rows, total)
    if group == 0:
        total *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if biased:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + split * M * N + m[None, :] * N + n[:, None], total, mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def _added(sums, bias, out, MN, N, SPLITS: tl.constexpr, biased: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + split * MN + at, mask=at < MN, other=0.0)
    if biased:
        total += tl.load(bias + at % N, mask=at < MN, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=at < MN)
