"""Weights in 4 bits, by groups of a row: a whole number, a scale and the least value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder.ops.families.few_bits import Encoding
from thunder.quantization.weights import QuantizedWeights, check_run, pack, unpack, why_no_runs


class Int4Weights(QuantizedWeights):
    """Stores weights in 4-bit integers: `w = code * scale + least`. Each `group` of a row has a scale and a minimum
    (`least`) in bfloat16. Layers whose input size is not a multiple of `group` are not quantized."""

    parts = ("scale", "least")

    def __init__(self, *, group: int = 64, filter: Callable[[torch.nn.Module, str], bool] | None = None):
        check_run(self, "group", group)
        super().__init__(filter=filter)
        self.group = group
        self.encoding = Encoding(halves=2, group=group, least=True)

    def __repr__(self) -> str:
        return f"Int4Weights(group={self.group})"

    def refusal(self, weight: torch.Tensor) -> str | None:
        return why_no_runs(weight, self.group)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = weight.float().unflatten(1, (-1, self.group))
        least = groups.amin(-1).to(torch.bfloat16)
        scale = ((groups.amax(-1) - least.float()) / 15).to(torch.bfloat16).clamp(min=2.0**-120)
        codes = ((groups - least.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp(0, 15)
        return pack(codes.flatten(1)), scale, least

    def dequantize(self, held: Any, scale: Any, least: Any) -> Any:  # type: ignore[override]
        codes = unpack(held, torch.float32).reshape(held.shape[0], -1, self.group)
        groups = codes * scale.to(torch.float32).unsqueeze(-1) + least.to(torch.float32).unsqueeze(-1)
        return groups.reshape(held.shape[0], held.shape[1] * 2)
