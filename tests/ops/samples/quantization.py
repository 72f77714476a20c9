"""Arguments that tests call the operations of `thunder/ops/families/quantization.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.quantization import (
    choose_qparams_optimized,
    fake_quantize_per_channel_affine,
    fake_quantize_per_tensor_affine,
    fused_moving_avg_obs_fake_quant,
    int_mm,
)


@fake_quantize_per_tensor_affine.samples
def _(make):
    yield make(4, 3), 0.1, 2, -8, 7
    yield make(4, 3), torch.tensor(0.1), torch.tensor(2, dtype=torch.int32), 0, 15


@fake_quantize_per_tensor_affine.error_samples
def _(make):
    yield make(4, 3), 0.1, 2, 7, -8


@fake_quantize_per_channel_affine.samples
def _(make):
    yield make(4, 3), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2], dtype=torch.int32), 1, -8, 7
    yield make(4, 3), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 0], dtype=torch.int32), 0, -8, 7


@fake_quantize_per_channel_affine.error_samples
def _(make):
    yield make(4, 3), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2], dtype=torch.int32), 0, -8, 7


@fused_moving_avg_obs_fake_quant.samples
def _(make):
    state = torch.tensor([-0.1]), torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0], dtype=torch.int32)
    yield make(4, 3), torch.tensor([1]), torch.tensor([1]), *state, 0.1, 0, 255, 0


@choose_qparams_optimized.samples
def _(make):
    yield make(16), 16, 20, 0.16, 8


def _integers(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@int_mm.samples
def _(make):
    yield _integers(32, 16), _integers(16, 24)
    yield _integers(32, 16), _integers(24, 16).t()


@int_mm.error_samples
def _(make):
    yield _integers(32, 16), make(16, 24)
    yield _integers(32, 16), _integers(24, 16)
