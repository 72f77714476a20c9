"""Weights in 8 bits: a whole number and one scale for each row."""

from __future__ import annotations

from typing import Any

import torch

from thunder.quantization.weights import QuantizedWeights

__all__ = ["Int8Weights"]


class Int8Weights(QuantizedWeights):
    """w = held * scale, with `held` of int8 and a scale for each output, whose products stay within 127 steps."""

    parts = ("scale",)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = weight.float()
        scale = (wide.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        return (wide / scale).round().to(torch.int8), scale

    def dequantize(self, held: Any, scale: Any) -> Any:  # type: ignore[override]
        return held.to(torch.float32) * scale
