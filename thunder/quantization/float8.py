"""Weights in float8, and products of float8 where a layer's input is large enough for one."""

from __future__ import annotations

from typing import Any

import torch

from thunder.core.dtypes import float8_e4m3fn
from thunder.core.proxies import TensorProxy
from thunder.ops.families.float8 import LARGEST, has_products, product, quantized
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.quantization.weights import ScaledRows

MOST = LARGEST[float8_e4m3fn.name]
SMALLEST_SCALE = 1e-12


class Float8Weights(ScaledRows):
    """Stores weights in float8 (torch.float8_e4m3fn) with a scale for each output: `w = held * scale`.

    Each row of a layer's input is rounded to float8 in each call, and the matmul runs in float8, if PyTorch supports it
    (CPUs, and GPUs of compute capability 8.9 and newer) and both sizes of the weight are divisible by 16. Other layers
    dequantize their weight. For training use `Float8Transform`, which keeps weights in full precision.
    """

    executors = ("float8",)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = weight.float()
        scale = (wide.abs().amax(1, keepdim=True) / MOST).clamp(min=SMALLEST_SCALE)
        return (wide / scale).clamp(-MOST, MOST).to(to_torch_dtype(float8_e4m3fn)), scale

    def multiplies(self, x: TensorProxy, shape: tuple[int, int]) -> bool:
        device = to_torch_device(x.device)
        return not any(n % 16 for n in shape) and device is not None and has_products(device)

    def product(self, x: Any, held: Any, scale: Any) -> Any:  # type: ignore[override]
        quantized_input = quantized(x, float8_e4m3fn, True, False)
        return product(quantized_input.rows, quantized_input.scale, held, scale, x.dtype, True)
