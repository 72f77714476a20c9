"""Thin products: those with a dimension of 1, which no tensor core helps, are elementwise operations and sums.

Before: `t2 = ltorch.mm(t0, t1)` of (4096, 1) and (1, 512). After: `t2 = ltorch.mul(t0, t1)`, which is fused with what
reads it: the gradient of a layer's input where the layer has one output. A product of which the result has one row or
column is a sum: the gradient of that layer's weight. Sums are added up in float32 at least.
"""

from __future__ import annotations

import math
from typing import Any

from thunder.core.dtypes import dtype, float32
from thunder.core.proxies import TensorProxy
from thunder.ops import ltorch
from thunder.ops.torch_types import to_torch_dtype

# A sum over rows that stands alone takes longer than cuBLAS's where it reads more elements than that, unless the rows
# are many for each column: gradients of weights are such sums, fused with the gradient of their input. Measured
# (docs/lab_log.md).
MOST, LONG = 1 << 21, 16


def is_thin_product(a: TensorProxy, b: TensorProxy) -> bool:
    """Of matrices (m, k) and (k, n) of real numbers."""
    return _is_thin(a.dtype, math.prod(a.shape[:-1]), a.shape[-1], b.shape[1])


def is_thin_layer(x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
    """Of a linear layer with one input or output; one row is the matvec executor's."""
    if len(weight.shape) != 2 or not _is_thin(x.dtype, math.prod(x.shape[:-1]), weight.shape[1], weight.shape[0]):
        return False
    return 1 in weight.shape


def _is_thin(kind: dtype, m: Any, k: Any, n: Any) -> bool:
    if kind.category != 2 or not all(isinstance(size, int) and size > 0 for size in (m, k, n)):
        return False
    return k == 1 or n == 1 or m == 1 and (k * n <= MOST or k >= LONG * n)


def thin_product(a: Any, b: Any) -> Any:
    """a @ b where `is_thin_product`."""
    if a.shape[1] == 1:
        return _to(_wide(a) * _wide(b), a.dtype)
    if a.shape[0] == 1:
        return _to(ltorch.sum(_wide(ltorch.t(a)) * _wide(b), 0, True), a.dtype)
    return _to(ltorch.sum(_wide(a) * _wide(ltorch.t(b)), 1, True), a.dtype)


def thin_layer(x: Any, weight: Any, bias: Any = None) -> Any:
    """linear(x, weight, bias) where `is_thin_layer`."""
    product = _wide(x) * _wide(ltorch.reshape(weight, (-1,)))
    if weight.shape[1] > 1:
        product = ltorch.sum(product, -1, True)
    return _to(product if bias is None else product + _wide(bias), x.dtype)


def _wide(x: Any) -> Any:
    return _to(x, float32 if x.dtype.bytes < float32.bytes else x.dtype)


def _to(x: Any, to: dtype) -> Any:
    return x if x.dtype is to else ltorch.to(x, dtype=to_torch_dtype(to))
