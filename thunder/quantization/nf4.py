"""Weights in 4 bits, as one of 16 quantiles of a normal distribution: NF4 of "QLoRA" (Dettmers et al. 2023)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.proxies import Proxy
from thunder.core.symbol import Symbol
from thunder.ops import ltorch
from thunder.ops.families.few_bits import Encoding
from thunder.quantization.weights import QuantizedWeights, check_run, pack, unpack, why_no_runs

# appendix E of the paper
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _chosen(codes: Any) -> Any:
    """The value of each code, by halving: for fusion executors, which have no tables."""
    zeros = codes * 0.0  # of float32, whatever the type of numbers is

    def between(low: int, high: int) -> Any:
        middle = (low + high) // 2
        if high - low == 2:
            return ltorch.where(codes < middle, NF4[low], zeros + NF4[middle])
        return ltorch.where(codes < middle, between(low, middle), between(middle, high))

    return between(0, 16)


def _looked_up(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(NF4, dtype=torch.float32, device=codes.device)[codes.int()]


_value = Symbol("nf4_value", module="ltorch", decomposition=_chosen, fn=_looked_up)


class NF4Weights(QuantizedWeights):
    """Stores weights in the 4-bit NormalFloat format: `w = NF4[code] * absmax`, where `absmax` is the largest magnitude
    of each `block` of a row. Layers whose input size is not a multiple of `block` are not quantized.

    Args:
        block: The number of weights that share a magnitude.
        double: If True, magnitudes are stored in 8 bits, with a scale and a minimum for each row, which takes
            4 + 8 / block + 64 / inputs bits for each weight. Otherwise they are stored in float32.
        filter: `filter(module, path)` returns whether a layer is quantized.
    """

    def __init__(
        self, *, block: int = 64, double: bool = True, filter: Callable[[torch.nn.Module, str], bool] | None = None
    ):
        check_run(self, "block", block)
        super().__init__(filter=filter)
        self.block, self.double = block, double
        self.parts = ("absmax", "absmax_scale", "absmax_least") if double else ("absmax",)
        self.encoding = Encoding(halves=2, group=block, values=NF4, double=bool(double))

    def __repr__(self) -> str:
        return f"NF4Weights(block={self.block}, double={self.double})"

    def refusal(self, weight: torch.Tensor) -> str | None:
        return why_no_runs(weight, self.block)

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = weight.float().unflatten(1, (-1, self.block))
        magnitudes = self._magnitudes(blocks.abs().amax(-1))
        absmax = self._absmax(*magnitudes).clamp(min=torch.finfo(torch.float32).tiny)
        halves = [(a + b) / 2 for a, b in itertools.pairwise(NF4)]
        between = torch.tensor(halves, dtype=torch.float32, device=weight.device)
        codes = torch.bucketize(blocks / absmax.unsqueeze(-1), between)
        return pack(codes.flatten(1)), *magnitudes

    def _magnitudes(self, absmax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.double:
            return (absmax,)
        least = absmax.amin(1, keepdim=True)
        scale = (absmax.amax(1, keepdim=True) - least) / 255
        codes = (absmax - least) / scale.clamp(min=torch.finfo(torch.float32).tiny)
        return codes.round().to(torch.uint8), scale, least

    def _absmax(self, absmax: Any, scale: Any = None, least: Any = None) -> Any:
        return absmax if scale is None else absmax.to(torch.float32) * scale + least

    def dequantize(self, held: Any, *magnitudes: Any) -> Any:
        codes = unpack(held, torch.float32).reshape(held.shape[0], -1, self.block)
        values = _value(codes) if isinstance(codes, Proxy) else _looked_up(codes)
        return (values * self._absmax(*magnitudes).unsqueeze(-1)).reshape(held.shape[0], held.shape[1] * 2)
