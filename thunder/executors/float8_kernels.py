"""The Triton kernels of the float8 executor; a file of its own, since Triton reads its environment when a kernel is
decorated.

Kernels compute maxima on the bits of absolute values, in whose order NaN is the largest. So a scale is NaN if one of
its elements is NaN, and so are its products. A tensor of zeros has the scale of the smallest representable maximum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thunder.executors.repeated_launch import RepeatedLaunch

HEIGHT, WIDTH = 64, 128  # of a tile that is written, by 4 warps: a line of the cache, and half of one in the transpose
SEEN = 16, 512  # of a tile whose largest number is looked for, by 8 warps
PROGRAMS = 512  # that look for it, at most
COLUMNS, ROWS = 32, 128  # that a program scales, and sees at a time
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
def _largest_of(x, amax, m, k, stride_m, stride_k, steps: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    """The largest absolute value, of each program's tiles in turn, where a 0 stands before."""
    across = tl.cdiv(k, width)
    found = tl.zeros((height, width), tl.int32)
    for step in range(steps):
        at = tl.program_id(0) + step * tl.num_programs(0)
        row = (at // across).to(tl.int64) * height + tl.arange(0, height)[:, None]
        column = (at % across).to(tl.int64) * width + tl.arange(0, width)[None, :]
        found = tl.maximum(
            found, _bits(tl.load(x + row * stride_m + column * stride_k, mask=(row < m) & (column < k), other=0.0))
        )
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), tl.max(tl.max(found, 1), 0), sem="relaxed")


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


_find_largest, _write_both = RepeatedLaunch(_largest_of), RepeatedLaunch(_write)


def _of_type(to: torch.dtype) -> tuple:
    """What kernels are told of a float8 type."""
    name, digits = {torch.float8_e4m3fn: (tl.float8e4nv, 3), torch.float8_e5m2: (tl.float8e5, 2)}[to]
    return torch.finfo(to).max, name, digits if triton.knobs.runtime.interpret else 0


def largest_of(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of a matrix of any strides: float32 ()."""
    m, k = x.shape
    amax = x.new_zeros((), dtype=torch.float32)

    def settings() -> tuple[int, tuple, int]:
        tiles = triton.cdiv(m, SEEN[0]) * triton.cdiv(k, SEEN[1])
        programs = min(PROGRAMS, tiles)
        return programs, (m, k, *x.stride(), triton.cdiv(tiles, programs), *SEEN), 8

    _find_largest((m, k, x.stride(), x.dtype), (x, amax), settings)
    return amax


def whole(x: torch.Tensor, amax: torch.Tensor, to: torch.dtype, transposed: bool) -> tuple[torch.Tensor, ...]:
    """A matrix (m, k) of any strides with one scale, by its largest absolute value: float8 (m, k), scale (), and with
    `transposed` float8 (k, m)."""
    # Triton 3.6 turns such a tile as single bytes, and on an H200 some were wrong
    if transposed and x.element_size() > 2:
        return (*whole(x, amax, to, False), whole(x.t(), amax, to, False)[0])
    m, k = x.shape
    q, scale = x.new_empty((m, k), dtype=to), x.new_empty((), dtype=torch.float32)
    columns = x.new_empty((k, m), dtype=to) if transposed else q  # which is not written to then

    def settings() -> tuple[int, tuple, int]:
        return (
            triton.cdiv(m, HEIGHT) * triton.cdiv(k, WIDTH),
            (m, k, *x.stride(), *_of_type(to), transposed, HEIGHT, WIDTH),
            4,
        )

    _write_both((m, k, x.stride(), x.dtype, to, transposed), (x, amax, q, columns, scale), settings)
    return (q, scale, columns) if transposed else (q, scale)


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
    found = tl.full((block,), SMALLEST, tl.int32)
    for start in range(0, k, block):
        column = start + tl.arange(0, block)
        found = tl.maximum(found, _bits(tl.load(x + row * stride_m + column * stride_k, mask=column < k, other=0.0)))
    s = _scale(tl.max(found, 0), largest)
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
    found = tl.full((tile, width), SMALLEST, tl.int32)
    for start in range(0, m, tile):
        row = start + tl.arange(0, tile)
        inside = (row[:, None] < m) & (column[None, :] < k)
        found = tl.maximum(
            found, _bits(tl.load(x + row[:, None] * stride_m + column[None, :] * stride_k, mask=inside, other=0.0))
        )
    s = _scale(tl.max(found, 0), largest)
    tl.store(scale + column, s, mask=column < k)
    for start in range(0, m, tile):
        row = start + tl.arange(0, tile)
        inside = (row[:, None] < m) & (column[None, :] < k)
        a = tl.load(x + row[:, None] * stride_m + column[None, :] * stride_k, mask=inside, other=0.0)
        a = _rounded(a, s[None, :], largest, to, digits)
        tl.store(
            columns + column[:, None] * m + row[None, :], tl.trans(a), mask=(column[:, None] < k) & (row[None, :] < m)
        )


_write_each_row, _write_each_column = RepeatedLaunch(_write_rows), RepeatedLaunch(_write_columns)


def by_rows(x: torch.Tensor, to: torch.dtype, transposed: bool) -> tuple[torch.Tensor, ...]:
    """A matrix (m, k) of any strides with a scale for each row: float8 (m, k), scales (m, 1), and with `transposed` the
    same of its transpose: (k, m), (k, 1)."""
    m, k = x.shape
    strides = x.stride()
    key = m, k, strides, x.dtype, to
    q, scale = x.new_empty((m, k), dtype=to), x.new_empty((m, 1), dtype=torch.float32)
    _write_each_row(
        key, (x, q, scale), lambda: (m, (k, *strides, *_of_type(to), min(4096, triton.next_power_of_2(k))), 8)
    )
    if not transposed:
        return q, scale
    columns, columns_scale = x.new_empty((k, m), dtype=to), x.new_empty((k, 1), dtype=torch.float32)
    _write_each_column(
        key,
        (x, columns, columns_scale),
        lambda: (triton.cdiv(k, COLUMNS), (m, k, *strides, *_of_type(to), COLUMNS, ROWS), 8),
    )
    return q, scale, columns, columns_scale
