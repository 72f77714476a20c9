"""The Triton kernels of the float8 executor. The file is text for `handwritten.py`, and not imported.

Kernels compute maxima on the bits of absolute values, in whose order NaN is the largest. So a scale is NaN if one of
its elements is NaN, and so are its products. A tensor of zeros has the scale of the smallest representable maximum.
"""

import triton
import triton.language as tl

SMALLEST = tl.constexpr(0x2B8CBCCC)  # the bits of 1e-12


@triton.jit
def _bits(x):
    """Of absolute values."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _scale(bits, largest: tl.constexpr):
    return tl.maximum(bits, SMALLEST).to(tl.float32, bitcast=True) / largest


@triton.jit
def _rounded(x, scale, largest: tl.constexpr, to: tl.constexpr, digits: tl.constexpr):
    """x / scale as float8. Devices round to the nearest number, and no larger than the largest; Triton's interpreter,
    which does neither, is told how many digits there are."""
    y = x.to(tl.float32) * (1.0 / scale)
    if digits:
        y = tl.where(y != y, y, tl.minimum(tl.maximum(y, -largest), largest))
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + ((1 << (22 - digits)) - 1 + ((bits >> (23 - digits)) & 1))) & -(1 << (23 - digits))
        y = tl.where(y != y, y, bits.to(tl.float32, bitcast=True))
    return y.to(to)


@triton.jit
def _write(
    x, amax, q, columns, scale, m, k, stride_m, stride_k, largest: tl.constexpr, to: tl.constexpr, digits: tl.constexpr,
    transposed: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One tile, rounded, and its transpose. The last ones first: they may be in the cache still from when their largest
    number was found."""
    s = _scale(_bits(tl.load(amax)), largest)
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    if tl.program_id(0) == 0:
        tl.store(scale, s)
    across = tl.cdiv(k, width)
    row = (at // across).to(tl.int64) * height + tl.arange(0, height)
    column = (at % across).to(tl.int64) * width + tl.arange(0, width)
    inside = (row[:, None] < m) & (column[None, :] < k)
    a = _rounded(
        tl.load(x + row[:, None] * stride_m + column[None, :] * stride_k, mask=inside, other=0.0),
        s,
        largest,
        to,
        digits,
    )
    tl.store(q + row[:, None] * k + column[None, :], a, mask=inside)
    if transposed:
        tl.store(
            columns + column[:, None] * m + row[None, :], tl.trans(a), mask=(column[:, None] < k) & (row[None, :] < m)
        )


@triton.jit
def _write_rows(
    x,
    q,
    scale,
    k: tl.constexpr,
    stride_m,
    stride_k,
    largest: tl.constexpr,
    to: tl.constexpr,
    digits: tl.constexpr,
    block: tl.constexpr,
):
    """One row with its scale: its largest number in one pass, in a second one, which finds the row in the cache, the
    result."""
    row = tl.program_id(0).to(tl.int64)
    extremes = tl.full((block,), SMALLEST, tl.int32)
    for start in range(0, k, block):
        column = start + tl.arange(0, block)
        extremes = tl.maximum(
            extremes, _bits(tl.load(x + row * stride_m + column * stride_k, mask=column < k, other=0.0))
        )
    s = _scale(tl.max(extremes, 0), largest)
    tl.store(scale + row, s)
    for start in range(0, k, block):
        column = start + tl.arange(0, block)
        a = tl.load(x + row * stride_m + column * stride_k, mask=column < k, other=0.0)
        tl.store(q + row * k + column, _rounded(a, s, largest, to, digits), mask=column < k)


@triton.jit
def _write_columns(
    x,
    columns,
    scale,
    m: tl.constexpr,
    k,
    stride_m,
    stride_k,
    largest: tl.constexpr,
    to: tl.constexpr,
    digits: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """Some columns, each with its scale, as rows of the transpose."""
    column = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    extremes = tl.full((tile, width), SMALLEST, tl.int32)
    for start in range(0, m, tile):
        row = start + tl.arange(0, tile)
        inside = (row[:, None] < m) & (column[None, :] < k)
        extremes = tl.maximum(
            extremes, _bits(tl.load(x + row[:, None] * stride_m + column[None, :] * stride_k, mask=inside, other=0.0))
        )
    s = _scale(tl.max(extremes, 0), largest)
    tl.store(scale + column, s, mask=column < k)
    for start in range(0, m, tile):
        row = start + tl.arange(0, tile)
        inside = (row[:, None] < m) & (column[None, :] < k)
        a = tl.load(x + row[:, None] * stride_m + column[None, :] * stride_k, mask=inside, other=0.0)
        a = _rounded(a, s[None, :], largest, to, digits)
        tl.store(
            columns + column[:, None] * m + row[None, :], tl.trans(a), mask=(column[:, None] < k) & (row[None, :] < m)
        )
