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
    """w = held * scale, with `held` of int8 and a scale for each output, whose products stay within 127 steps.

    dynamic: whether each row of a layer's input is rounded so in each call, too, and the product is one of integers,
    summed exactly in int32. On GPUs that takes 17 rows or more, which are known, and sizes divisible by 8; on CPUs a
    product that is exact; other layers make their weight.
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
