"""Weights in 8 bits: a whole number and one scale for each row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.ops.families.few_bits import Encoding
from thunder.ops.families.quantization import int_mm
from thunder.quantization.weights import ScaledRows

STEPS = 127
TINY = torch.finfo(torch.float32).tiny
CUDA_ROWS = 17  # at least, of PyTorch's product of integers on GPUs


@functools.cache
def cpu_sums_exactly() -> bool:
    """Whether PyTorch's product of integers is exact on this CPU. oneDNN adds two products in 16 bits where it may not
    use the instructions that PyTorch finds (ONEDNN_MAX_CPU_ISA)."""
    largest = torch.full((CUDA_ROWS, 64), STEPS, dtype=torch.int8)
    products = [compat.int_mm(rows, largest.t()) for rows in (largest, largest[:1])]
    return all(bool((p == 64 * STEPS**2).all()) for p in products)


def _rounded(rows: Any) -> tuple[Any, Any]:
    """A matrix (m, n), of numbers or traced, as whole numbers of int8 and the scale of each row, (m, 1)."""
    wide = rows.to(torch.float32)
    scale = (wide.abs().amax(1, keepdim=True) / STEPS).clamp(min=TINY)
    return (wide / scale).round().to(torch.int8), scale


class Int8Weights(ScaledRows):
    """Stores weights in int8 with a scale for each output: `w = held * scale`.

    Args:
        dynamic: If True, each row of a layer's input is rounded to int8 in each call, too, and the matmul runs on
            integers with exact sums in int32. On GPUs this needs 17 or more rows, whose number is known, and sizes
            divisible by 8; on CPUs an exact integer matmul. Other layers dequantize their weight.
        filter: `filter(module, path)` returns whether a layer is quantized.
    """

    encoding = Encoding()

    def __init__(self, *, dynamic: bool = False, filter: Callable[[torch.nn.Module, str], bool] | None = None):
        super().__init__(filter=filter)
        self.dynamic = bool(dynamic)

    def __repr__(self) -> str:
        return f"Int8Weights({'dynamic=True' if self.dynamic else ''})"

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _rounded(weight)

    def multiplies(self, x: TensorProxy, shape: tuple[int, int]) -> bool:
        if not self.dynamic or x.device.type == "cpu":
            return self.dynamic and cpu_sums_exactly()
        rows = x.shape[:-1]
        enough = all(isinstance(n, int) for n in rows) and math.prod(rows) >= CUDA_ROWS
        return x.device.type == "cuda" and enough and not any(n % 8 for n in shape)

    def product(self, x: Any, held: Any, scale: Any) -> Any:  # type: ignore[override]
        whole, of_rows = _rounded(x)
        return int_mm(whole, held.t()).to(torch.float32) * of_rows * scale.t()
