"""Weights of few bits as operations: what makes a weight of what is held of it, and layers that multiply in few bits.

`thunder/quantization/` writes them. `format` is a `thunder.quantization.QuantizedWeights`, and `parts` is what the
format holds of a weight: numbers or packed codes first, then scales.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import ltorch
from thunder.ops.backward import sum_to
from thunder.ops.rules import derivatives
from thunder.ops.torch_types import from_tensor_dtype, to_torch_dtype


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a kernel reads a weight (N, K): value(code) * scale + least, where the number of a code is itself, or stands
    in a table.

    halves: 1 where a byte holds a whole number, 2 where it holds codes of 4 bits: the first half of a row in the low
    bits, the second in the high ones. group: how many numbers of a row share a scale; 0 means all. The second part is
    the scale. double: it is a whole number itself, times the third part, plus the fourth, which rows have one of.
    least: the third part is what a group's numbers begin at.
    """

    halves: int = 1
    group: int = 0
    values: tuple[float, ...] = ()
    double: bool = False
    least: bool = False


def _typed(parts: tuple, format: Any, shape: tuple, dtype: torch.dtype) -> TensorProxy:
    return TensorProxy(shape=shape, dtype=from_tensor_dtype(dtype), device=parts[0].device)


dequantize = Symbol(
    "dequantize", _typed, module="ltorch",
    decomposition=lambda parts, format, shape, dtype: format.dequantize(*parts).to(dtype),
)  # fmt: skip
derivatives.regathers.set(lambda operation: True, dequantize)


def _quantized_linear(x, bias, parts: tuple, format: Any, shape: tuple, dtype: torch.dtype):
    rows = x if len(x.shape) == 2 else ltorch.reshape(x, (math.prod(x.shape[:-1]), shape[1]))
    out = format.product(rows, *parts).to(dtype)
    out = out if len(x.shape) == 2 else ltorch.reshape(out, (*x.shape[:-1], shape[0]))
    return out if bias is None else out + bias.to(dtype)


quantized_linear = Symbol(
    "quantized_linear",
    lambda x, bias, parts, format, shape, dtype: like(x, (*x.shape[:-1], shape[0]), from_tensor_dtype(dtype)),
    module="ltorch", decomposition=_quantized_linear, tags=(OpTags.MATMUL_OP,),
)  # fmt: skip


@quantized_linear.vjp
def _(x, bias, parts, format, shape, dtype):
    """Rounding the input passes gradients on as they are, and the weight has none."""
    g = yield quantized_linear(x, bias, parts, format, shape, dtype)
    gx = (g @ dequantize(parts, format, shape, dtype)).to(to_torch_dtype(x.dtype))
    return gx, None if bias is None else sum_to(g, bias.shape).to(to_torch_dtype(bias.dtype))
