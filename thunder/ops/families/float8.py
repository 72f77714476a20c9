"""Linear layers in float8: what `thunder.transforms.float8` writes in their place, with its derivative.

A matrix is divided by a scale, so that its largest number is the largest that float8 holds, and rounded. One scale for
a matrix, or one for each row of each operand of a product. A product of A (m, k) and B (k, n) wants the rows of A and
the columns of B to lie together in memory, so that a matrix of two products, as all are in training, is needed as its
transpose, too.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from thunder import compat
from thunder.core.dtypes import bfloat16, dtype, float32
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import ltorch
from thunder.ops.torch_types import from_tensor_dtype, to_torch_dtype

LARGEST = {"float8_e4m3fn": torch.finfo(torch.float8_e4m3fn).max, "float8_e5m2": torch.finfo(torch.float8_e5m2).max}


class Quantized(NamedTuple):
    """A matrix (m, k) in float8 and the float32 scale to multiply it by, () or (m, 1); the same of its transpose, None
    where nothing reads it."""

    rows: TensorProxy
    scale: TensorProxy
    columns: TensorProxy | None
    columns_scale: TensorProxy | None


def has_products(device: torch.device) -> bool:
    """Whether PyTorch multiplies matrices in float8 there."""
    return device.type == "cpu" or device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _largest(x):
    """The largest absolute value, as a float32 ()."""
    return ltorch.amax(ltorch.abs(ltorch.to(x, dtype=float32)))


# an operation of its own, so that the kernel that computes a matrix can find it
largest = Symbol(
    "float8_largest", lambda x: like(x, (), float32), id="ltorch.float8_largest", module="ltorch",
    decomposition=_largest, tags=(OpTags.DETACHED,)
)  # fmt: skip


def _quantize(x, amax, to: dtype, transposed: bool):
    """(float8, scale), and for the transpose (float8,) with the same scale; where no amax is given each row has a
    scale, and the transpose (float8, scale)."""
    most = LARGEST[to.name]

    def rounded(a):
        a = ltorch.to(a, dtype=float32)
        largest_value = ltorch.amax(ltorch.abs(a), -1, True) if amax is None else amax
        scale = ltorch.maximum(largest_value, ltorch.full_like(largest_value, 1e-12)) / most
        return ltorch.contiguous(ltorch.to(ltorch.clamp(a / scale, -most, most), dtype=to_torch_dtype(to))), scale

    q, scale = rounded(x)
    if not transposed:
        return q, scale
    return (q, scale, *rounded(ltorch.t(x))) if amax is None else (q, scale, ltorch.contiguous(ltorch.t(q)))


def _quantize_meta(x, amax, to: dtype, transposed: bool):
    m, k = x.shape
    by_rows = amax is None
    results = [like(x, dtype=to), like(x, (m, 1) if by_rows else (), float32)]
    if transposed:
        results.append(like(x, (k, m), to))
        if by_rows:
            results.append(like(x, (k, 1), float32))
    return tuple(results)


quantize = Symbol(
    "float8_quantize", _quantize_meta, id="ltorch.float8_quantize", module="ltorch", decomposition=_quantize,
    tags=(OpTags.DETACHED,)
)  # fmt: skip


def quantized(x, to: dtype, by_rows: bool, transposed: bool) -> Quantized:
    """A matrix in float8, with its transpose where that is asked for."""
    results = quantize(x, None if by_rows else largest(x), to, transposed)
    if not transposed:
        return Quantized(*results, None, None)
    return Quantized(*results[:3], results[3] if by_rows else results[1])


def _product_meta(a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast):
    return like(a, (a.shape[0], b.shape[1]), from_tensor_dtype(out_dtype))


@functools.cache
def _multiplies_on_cpu() -> bool:
    """Whether PyTorch's kernel for CPUs runs here: not where oneDNN is held to fewer instructions than the processor
    has, which PyTorch does not know."""
    compat.has_avx512()  # behind the first question about the processor, PyTorch may choose another kernel
    a, one = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(())
    try:
        compat.scaled_mm(a, a.t(), one, one, None, None, torch.float32, False)
    except RuntimeError:
        return False
    return True


def _scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast):
    if a.device.type == "cpu" and not _multiplies_on_cpu():
        product = a.to(torch.float32) @ b.to(torch.float32) * scale_a * scale_b
        product = product if bias is None else product + bias
        return (product if scale_result is None else product * scale_result).to(out_dtype)
    if a.device.type == "cpu" and scale_a.ndim:  # before torch 2.13, PyTorch's kernel for CPUs takes no scales of rows
        one = torch.ones(())
        product = compat.scaled_mm(a, b, one, one, bias, scale_result, torch.float32, fast)
        return (product * scale_a * scale_b).to(out_dtype)
    return compat.scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast)


scaled_mm = Symbol(
    "scaled_mm", _product_meta, id="ltorch.scaled_mm", module="ltorch", is_prim=True,
    tags=(OpTags.MATMUL_OP, OpTags.DETACHED), fn=_scaled_mm
)  # fmt: skip


def product(a, scale_a, b, scale_b, to: dtype, fast: bool):
    """a @ b.T in dtype `to`, of matrices in float8 whose rows lie together."""
    by_rows = len(scale_a.shape) == 2
    written = bfloat16 if by_rows else to  # what PyTorch's kernel for scales of rows writes
    out = scaled_mm(
        a, ltorch.t(b), scale_a, ltorch.t(scale_b) if by_rows else scale_b, None, None, to_torch_dtype(written), fast
    )
    return out if written is to else ltorch.to(out, dtype=to_torch_dtype(to))


def _linear(x, weight, bias, qx: Quantized, qw: Quantized, gradient_dtype: dtype):
    out = product(qx[0], qx[1], qw[0], qw[1], x.dtype, True)
    out = out if len(x.shape) == 2 else ltorch.reshape(out, (*x.shape[:-1], weight.shape[0]))
    return out if bias is None else out + bias


def _linear_meta(x, weight, bias, qx, qw, gradient_dtype):
    return like(x, (*x.shape[:-1], weight.shape[0]))


# of x and weight, which are not read, it gives the gradients; `qx` and `qw` are what is read of them
float8_linear = Symbol(
    "float8_linear", _linear_meta, id="ltorch.float8_linear", module="ltorch", decomposition=_linear,
    tags=(OpTags.MATMUL_OP,)
)  # fmt: skip


@float8_linear.vjp
def _(x, weight, bias, qx, qw, gradient_dtype):
    """Rounding passes gradients on as they are. The sums of a backward's products are added up in more digits, as
    rounding errors of gradients add up."""
    g = yield float8_linear(x, weight, bias, qx, qw, gradient_dtype)
    rows = g if len(g.shape) == 2 else ltorch.reshape(g, (math.prod(g.shape[:-1]), g.shape[-1]))
    by_rows = len(qx[1].shape) == 2
    gx = gw = None
    if qw[2] is None and qx[2] is not None:
        q = quantized(ltorch.t(rows), gradient_dtype, by_rows, False)
        gw = product(q.rows, q.scale, qx[2], qx[3], weight.dtype, False)
    elif qw[2] is not None:
        q = quantized(rows, gradient_dtype, by_rows, qx[2] is not None)
        gx = product(q.rows, q.scale, qw[2], qw[3], x.dtype, False)
        gx = gx if len(x.shape) == 2 else ltorch.reshape(gx, x.shape)
        gw = None if qx[2] is None else product(q.columns, q.columns_scale, qx[2], qx[3], weight.dtype, False)
    return gx, gw, None if bias is None else ltorch.sum(rows, 0)
