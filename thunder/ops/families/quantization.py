"""Numbers of few bits: what rounds to them and stays in floating point, observers, and PyTorch's older quantized
products and those of integers."""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core.dtypes import bool8, float32, int8, int32, uint8
from thunder.core.proxies import TensorProxy, equal_shapes, like
from thunder.core.symbol import OpTags, user_location
from thunder.errors import CaptureError
from thunder.ops import autocast, backward, ltorch
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.shape_rules import require


def _rounded(a, scale, zero_point, quant_min, quant_max):
    """(the whole numbers that stand for `a`, within the range; whether they were in it)."""
    whole = zero_point + ltorch.round(a * (1.0 / scale))
    return ltorch.clamp(whole, quant_min, quant_max), ltorch.logical_and(whole >= quant_min, whole <= quant_max)


# ----------------------------------------------------------------------------------------------------------------
# rounding within floating point


@composite(torch.fake_quantize_per_tensor_affine, autocast="cpu:float32")
def fake_quantize_per_tensor_affine(a, scale, zero_point, quant_min, quant_max):
    require(quant_min <= quant_max)
    whole, _ = _rounded(a, scale, zero_point, quant_min, quant_max)
    return ltorch.to((whole - zero_point) * scale, dtype=a.dtype)


# with scale and zero point in tensors it is another kernel, which the CPU's list does not name
autocast.when.set(lambda kind, args, kwargs: not isinstance(args[1], TensorProxy), fake_quantize_per_tensor_affine)

_per_tensor_masked = backward.kernel(
    "fake_quantize_per_tensor_affine_cachemask", "default", lambda a, *options: (like(a), like(a, dtype=bool8))
)
_per_channel_masked = backward.kernel(
    "fake_quantize_per_channel_affine_cachemask", "default", lambda a, *options: (like(a), like(a, dtype=bool8))
)


@fake_quantize_per_tensor_affine.vjp
def _(a, scale, zero_point, quant_min, quant_max):
    if isinstance(scale, TensorProxy):
        return NotImplemented
    y, mask = _per_tensor_masked(a, scale, zero_point, quant_min, quant_max)
    g = yield y
    return (g * mask,)


@composite(torch.fake_quantize_per_channel_affine)
def fake_quantize_per_channel_affine(a, scale, zero_point, axis, quant_min, quant_max):
    require(quant_min <= quant_max and -len(a.shape) <= axis < len(a.shape))
    require(len(scale.shape) == 1 and scale.shape == zero_point.shape and scale.shape[0] == a.shape[axis])
    along = tuple(n if i == axis % len(a.shape) else 1 for i, n in enumerate(a.shape))
    scale, zero_point = ltorch.reshape(scale, along), ltorch.reshape(zero_point, along)
    whole, _ = _rounded(a, scale, zero_point, quant_min, quant_max)
    return ltorch.to((whole - zero_point) * scale, dtype=a.dtype)


@fake_quantize_per_channel_affine.vjp
def _(a, scale, zero_point, axis, quant_min, quant_max):
    y, mask = _per_channel_masked(a, scale, zero_point, axis, quant_min, quant_max)
    g = yield y
    return (g * mask,)


# ---------------------------------------------------------------------------------------------------------------- with
# an observer


def _run_observer(a, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, *options):
    state = [t.clone() for t in (running_min, running_max, scale, zero_point)]
    return torch.fused_moving_avg_obs_fake_quant(a, observer_on, fake_quant_on, *state, *options), *state


@torch_prim(fn=_run_observer, name="fused_moving_avg_obs_fake_quant")
def fused_moving_avg_obs_fake_quant(
    a,
    observer_on,
    fake_quant_on,
    running_min,
    running_max,
    scale,
    zero_point,
    averaging_const,
    quant_min,
    quant_max,
    ch_axis,
    per_row_fake_quant=False,
    symmetric_quant=False,
):
    """The rounded input, and what the observer's state becomes."""
    if per_row_fake_quant and any(
        t.shape != (a.shape[ch_axis],) for t in (running_min, running_max, scale, zero_point)
    ):
        raise CaptureError(
            "fused_moving_avg_obs_fake_quant would give its state one element for each row",
            location=user_location(),
            remedy="make the state of that size before the call",
        )
    return like(a), *(like(t) for t in (running_min, running_max, scale, zero_point))


fused_moving_avg_obs_fake_quant.nondifferentiable = (1, 2, 3, 4)


@alias(torch.fused_moving_avg_obs_fake_quant)
def _observing(a, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, *options, **named):
    out, *new = fused_moving_avg_obs_fake_quant(
        a, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, *options, **named
    )
    for target, value in zip((running_min, running_max, scale, zero_point), new, strict=True):
        overwrite(target, value)
    return out


@torch_prim(torch.choose_qparams_optimized)
def choose_qparams_optimized(a, numel, n_bins, ratio, bit_width):
    require(numel >= 0 and (not len(a.shape) or numel <= a.numel_value))
    return like(a, (1,)), like(a, (1,))


# ----------------------------------------------------------------------------------------------------------------
# products of packed matrices a packed matrix is a tensor of bytes that holds the address of an object: it says nothing
# of its sizes, which come from the bias or the matrix it was made of


def _product(a, columns):
    return like(a, (*a.shape[:-1], columns), float32)


def _fp16_meta(a, packed_weight, bias=None):
    if bias is None:
        raise CaptureError(
            "the number of columns of a packed matrix is not known without a bias",
            location=user_location(),
            remedy="pass a bias of zeros",
        )
    return _product(a, bias.shape[0])


def _int8_meta(a, weight, packed, col_offsets, weight_scale, weight_zero_point, bias):
    require(a.shape[-1] == weight.shape[1])
    return _product(a, weight.shape[0])


for _name, _meta in {
    "fbgemm_linear_fp16_weight": _fp16_meta, "fbgemm_linear_fp16_weight_fp32_activation": _fp16_meta,
    "fbgemm_linear_int8_weight": _int8_meta,
    "fbgemm_linear_int8_weight_fp32_activation": _int8_meta,
    "fbgemm_pack_gemm_matrix_fp16": lambda a: like(a, (8,), uint8),
    "fbgemm_pack_quantized_matrix": lambda a, K=None, N=None: like(a, (8,), uint8),
}.items():  # fmt: skip
    torch_prim(getattr(torch, _name), name=_name)(_meta)


@alias(torch.fbgemm_linear_quantize_weight)
def fbgemm_linear_quantize_weight(a):
    raise CaptureError(
        "fbgemm_linear_quantize_weight gives Python numbers that depend on the weight's values",
        location=user_location(),
        remedy="quantize the weight outside",
    )


@torch_prim(compat.int_mm, name="int_mm", tags=(OpTags.MATMUL_OP, OpTags.DETACHED), fn=compat.int_mm)
def int_mm(a, b):
    """A product of integers, summed exactly."""
    require(len(a.shape) == 2 and len(b.shape) == 2 and a.dtype is int8 and b.dtype is int8)
    require(equal_shapes(a.shape[1:], b.shape[:1]))
    return like(a, (a.shape[0], b.shape[1]), int32)
