"""The Triton kernels of the matvec executor; a file of its own, since Triton reads its environment when a kernel is
decorated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thunder import compat
from thunder.executors.repeated_launch import RepeatedLaunch


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


_row, _rows = RepeatedLaunch(_one_row), RepeatedLaunch(_some_rows)


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (..., K), at most 16 rows, times the transpose of a dense weight (N, K), plus a bias (N,): (..., N) in the
    dtype of all."""
    n, k = weight.shape
    m = x.numel() // k
    if m == 1:
        return one_row(x, (weight,), bias)
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], n))

    def settings() -> tuple[int, tuple, int]:
        columns, inner, warps, stages = _blocks(m, n, k)
        known = bias is not None, n % columns == 0 and k % inner == 0
        return triton.cdiv(n, columns), (m, n, k, *known, 16, columns, inner, stages), warps

    _rows((m, n, k, x.dtype, bias is not None), (x, weight, out if bias is None else bias, out), settings)
    return out


def one_row(x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), one row, times the transposes of dense weights (N1, K), (N2, K), (N3, K), of even N where there are
    several, plus a bias: (..., N1 + N2 + N3) in the dtype of all."""
    sizes = tuple([w.shape[0] for w in weights])
    n, k = sum(sizes), x.shape[-1]
    x = x if x.is_contiguous() else x.contiguous()
    out = _empty_row(x, n)

    def settings() -> tuple[int, tuple, int]:
        columns, inner, warps, _ = _blocks(1, n, k)
        starts = sizes[0], sum(sizes[:2])
        known = len(sizes), bias is not None, n % columns == 0 and k % inner == 0
        return triton.cdiv(n, columns), (*starts, n, k, *known, columns, inner), warps

    given = x, *weights, *[weights[0]] * (3 - len(weights)), out if bias is None else bias, out
    _row((sizes, k, x.dtype, bias is not None), given, settings)
    return out


def _empty_row(x: torch.Tensor, n: int) -> torch.Tensor:
    """For n columns of the result of a dense row x."""
    shape = *x.shape[:-1], n
    if x.device.type != "cuda" or x.get_device() != compat.current_device():
        return x.new_empty(shape)
    return compat.empty_strided_cuda(shape, (*[n] * (len(shape) - 1), 1), x.dtype)


def _blocks(m: int, n: int, k: int) -> tuple[int, int, int, int]:
    """(columns of a program, elements of a row at a time, warps, stages), as measured on an H200 for bfloat16 weights
    of 8 to 250 MiB."""
    if m > 1:
        return 32 if 8192 <= n < 16384 else 64, 128, 4, 5
    if k <= 4096:
        inner = triton.next_power_of_2(k)
        return 1, inner, max(1, inner // 512), 1
    inner = max(1024, triton.next_power_of_2(triton.cdiv(k, 32)))  # the loop is unrolled at most 32 times
    return 2, inner, min(16, inner // 256), 1
