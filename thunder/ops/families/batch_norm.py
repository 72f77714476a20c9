"""Batch norm: the function of PyTorch, its kernels, each one symbol by which programs call it and derivatives are
computed, and the parts of batch norm over several devices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core import dtypes
from thunder.core.definition import InPlaceForm
from thunder.core.dtypes import float32
from thunder.core.proxies import NumberProxy, like
from thunder.core.symbol import carries_out, primitive
from thunder.ops import backward, ltorch
from thunder.ops.backward import formula
from thunder.ops.families.data import convert
from thunder.ops.families.norm_formulas import in_full, of_input, standardized
from thunder.ops.families.norm_kernels import (
    check_channels,
    compute_dtype,
    image_layout,
    moments,
    parameters_meta,
    per_channel,
    scale_and_shift,
    wanted,
    whiten,
)
from thunder.ops.families.shape import reshape
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import derivatives, kernels, operands
from thunder.ops.shape_rules import is_empty, require


def batch_norm_meta(
    a, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):
    require(len(a.shape) >= 2)
    require(training or (running_mean is not None and running_var is not None))
    check_channels(a, running_mean, running_var, weight, bias)
    return like(a)


def _batch_norm_kernel_meta(a, weight, bias, running_mean, running_var, training, momentum, eps):
    shape = (a.shape[1],) if training else (0,)
    mixed = a.device.type != "cpu" or any(
        t is not None and t.dtype is dtypes.float32 for t in (weight, bias, running_mean, running_var)
    )
    kind = compute_dtype(a.dtype) if mixed else a.dtype
    return like(a), like(a, shape, kind), like(a, shape, kind)


def _native_batch_norm_meta(a, weight, bias, running_mean, running_var, training, momentum, eps):
    batch_norm_meta(a, running_mean, running_var, weight, bias, training)
    return _batch_norm_kernel_meta(a, weight, bias, running_mean, running_var, training, momentum, eps)


native_batch_norm = torch_prim(torch.native_batch_norm, name="native_batch_norm")(_native_batch_norm_meta)
native_batch_norm.nondifferentiable = (1, 2)
native_batch_norm.explain = None  # PyTorch's kernel does not look whether there are statistics


native_batch_norm_backward = backward.kernel(
    "native_batch_norm_backward", "default",
    lambda g, a, weight, running_mean, running_var, mean, rstd, training, eps, mask: parameters_meta(g, a, weight,
        weight, mask),
)  # fmt: skip
operands.holds.set(operands.of_batch_norm, native_batch_norm_backward)


def running(old, new, momentum):
    """What a running statistic becomes."""
    return None if old is None else convert(new * momentum + convert(old, new.dtype) * (1 - momentum), old.dtype)


def _in_batch_norms_layout(y):
    """A result as PyTorch's kernel of batch norm lays it out, which keeps its operand's strides on a GPU."""
    return image_layout(y) if y.device.type == "cpu" else y


def _over_images(a) -> tuple[int, ...]:
    return (0, *range(2, len(a.shape)))


def batch_norm_by_batch(a, running_mean, running_var, weight, bias, momentum, eps, kind) -> tuple:
    """Batch norm by the batch's own statistics: the result, its mean and deviation of type `kind`, and what running
    mean and variance become, where there are any."""
    dims = _over_images(a)
    count = math.prod(a.shape[d] for d in dims)
    centred, mean, variance = moments(convert(a, compute_dtype(a.dtype)), dims)
    rstd = ltorch.rsqrt(variance + eps)
    y = scale_and_shift(centred * rstd, per_channel(a, weight), per_channel(a, bias))
    y = _in_batch_norms_layout(convert(y, a.dtype))
    mean, variance, rstd = (reshape(x, (a.shape[1],)) for x in (mean, variance, rstd))
    unbiased = variance * count / (count - 1)
    new_statistics = (running(old, new, momentum) for old, new in ((running_mean, mean), (running_var, unbiased)))
    return y, convert(mean, kind), convert(rstd, kind), *new_statistics


@native_batch_norm.decomposed_by
def _(a, weight, bias, running_mean, running_var, training, momentum, eps):
    kind = _batch_norm_kernel_meta(a, weight, bias, running_mean, running_var, training, momentum, eps)[1].dtype
    if training:
        return batch_norm_by_batch(a, None, None, weight, bias, momentum, eps, kind)[:3]
    y = ltorch.batch_norm(a, running_mean, running_var, weight, bias, False, momentum, eps)
    return y, *(ltorch.zeros((0,), dtype=kind, device=a.device) for _ in range(2))


@native_batch_norm_backward.decomposed_by
def _(g, a, weight, running_mean, running_var, mean, rstd, training, eps, mask):
    if is_empty(a):
        return None
    kind, dims = compute_dtype(a.dtype), _over_images(a)
    x, g = convert(a, kind), convert(g, kind)
    if not training:
        mean, rstd = running_mean, ltorch.rsqrt(convert(running_var, kind) + eps)
    mean, rstd, weight_ = (p if p is None else per_channel(a, convert(p, kind)) for p in (mean, rstd, weight))
    normal, of_input = (x - mean) * rstd, None
    # a weight is one number where is summed up: the parameters' gradients are all sums there are
    total, along = ltorch.sum(g, dims, True), ltorch.sum(g * normal, dims, True)
    if mask[0]:
        count = math.prod(a.shape[d] for d in dims)
        of_input = g - total / count - normal * (along / count) if training else g
        of_input = convert(of_input * (rstd if weight is None else rstd * weight_), a.dtype)
        of_input = _in_batch_norms_layout(of_input)
    return of_input, *(
        convert(reshape(t, (a.shape[1],)), a.dtype if weight is None else weight.dtype) if needed else None
        for needed, t in zip(mask[1:], (along, total), strict=True)
    )


@native_batch_norm.vjp
def _(a, weight, bias, running_mean, running_var, training, momentum, eps):
    y, mean, rstd = native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps)
    g, _, _ = yield y, mean, rstd
    return native_batch_norm_backward(
        g, a, weight, running_mean, running_var, mean, rstd, training, eps, wanted(a, weight, bias)
    )


def _statistics_meta(a, running_mean, running_var, weight, bias, momentum, eps):
    out, save, _ = _batch_norm_kernel_meta(a, weight, bias, running_mean, running_var, True, momentum, eps)
    return out, save, like(save), like(running_mean), like(running_var)


@carries_out
def native_batch_norm_(a, running_mean, running_var, weight, bias, momentum, eps):
    out, mean, scale = compat.kernel("_native_batch_norm_legit")(
        a, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return out, mean, scale, running_mean, running_var


@primitive(_statistics_meta)
def native_batch_norm_functional(a, running_mean, running_var, weight, bias, momentum, eps):
    return compat.kernel("_native_batch_norm_legit_functional")(
        a, weight, bias, running_mean, running_var, True, momentum, eps
    )


@native_batch_norm_functional.decomposed_by
def _(a, running_mean, running_var, weight, bias, momentum, eps):
    kind = _statistics_meta(a, running_mean, running_var, weight, bias, momentum, eps)[1].dtype
    return batch_norm_by_batch(a, running_mean, running_var, weight, bias, momentum, eps, kind)


native_batch_norm_functional.nondifferentiable = (1, 2, 3, 4)  # means and deviations, running ones too
derivatives.statistics.set((1, 2), native_batch_norm_functional)
native_batch_norm_functional.in_place = InPlaceForm(native_batch_norm_, {3: 1, 4: 2})


@native_batch_norm_functional.vjp
def _(a, running_mean, running_var, weight, bias, momentum, eps):
    y, mean, rstd, new_mean, new_var = native_batch_norm_functional(
        a, running_mean, running_var, weight, bias, momentum, eps
    )
    g, *_ = yield y, mean, rstd, new_mean, new_var
    ga, gw, gb = native_batch_norm_backward(g, a, weight, None, None, mean, rstd, True, eps, wanted(a, weight, bias))
    return ga, None, None, gw, gb


@alias(*compat.operators("native_batch_norm"), over=native_batch_norm)
def _native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps):
    """In training mode the running statistics are written to."""
    if not training or running_mean is None:
        return native_batch_norm(a, weight, bias, running_mean, running_var, training, momentum, eps)
    out, mean, rstd, new_mean, new_var = native_batch_norm_functional(
        a, running_mean, running_var, weight, bias, momentum, eps
    )
    overwrite(running_mean, new_mean)
    overwrite(running_var, new_var)
    return out, mean, rstd


@alias(*compat.operators("_native_batch_norm_legit", "default", "no_stats"))
def _native_batch_norm_legit(a, weight, bias, *args):
    """With running statistics and without: `(training, momentum, eps)`."""
    statistics = args[:-3] or (None, None)
    return _native_batch_norm(a, weight, bias, *statistics, *args[-3:])


@alias(*compat.operators("_native_batch_norm_legit_functional"))
def _native_batch_norm_legit_functional(a, weight, bias, running_mean, running_var, training, momentum, eps):
    if training:
        return native_batch_norm_functional(a, running_mean, running_var, weight, bias, momentum, eps)
    return (
        *native_batch_norm(a, weight, bias, running_mean, running_var, False, momentum, eps),
        running_mean,
        running_var,
    )


# ----------------------------------------------------------------------------------------------------------------
# the function


def _is_one(n) -> bool:
    return type(n) is int and n == 1


@composite(F.batch_norm, meta=batch_norm_meta)
def batch_norm(a, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    x = convert(a, compute_dtype(a.dtype))
    if training:
        x, _, _ = whiten(x, (0, *range(2, len(a.shape))), eps)
    else:
        mean, var = (per_channel(a, convert(p, x.dtype)) for p in (running_mean, running_var))
        x = (x - mean) * ltorch.rsqrt(var + eps)
    return convert(scale_and_shift(x, per_channel(a, weight), per_channel(a, bias)), a.dtype)


def _update_statistics(a, running_mean, running_var, weight, bias, momentum, eps):
    out, _, _, mean, var = compat.kernel("_native_batch_norm_legit_functional")(
        a, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return out, mean, var


@torch_prim(fn=_update_statistics, name="batch_norm_update")
def batch_norm_update(a, running_mean, running_var, weight, bias, momentum, eps):
    """Batch norm by the batch's statistics: the result, and what running mean and variance become."""
    batch_norm_meta(a, running_mean, running_var, weight, bias, True)
    return like(a), like(running_mean), like(running_var)


def batch_norm_(a, running_mean, running_var, weight, bias, momentum, eps):
    return F.batch_norm(a, running_mean, running_var, weight, bias, True, momentum, eps), running_mean, running_var


@batch_norm_update.decomposed_by
def _(a, running_mean, running_var, weight, bias, momentum, eps):
    y, _, _, *new_statistics = batch_norm_by_batch(a, running_mean, running_var, weight, bias, momentum, eps, a.dtype)
    return y, *new_statistics


batch_norm_update.nondifferentiable = (1, 2)
derivatives.statistics.set((1, 2), batch_norm_update)
batch_norm_update.in_place = InPlaceForm(batch_norm_, {1: 1, 2: 2})


@alias(F.batch_norm, over=batch_norm)
def _batch_norm(a, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """In training mode the running statistics are written to."""
    if training and len(a.shape) > 1 and all(_is_one(n) for d, n in enumerate(a.shape) if d != 1):
        sizes = f"torch.Size({list(a.shape)})"
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}")
    # of no elements there are no statistics, and PyTorch writes none
    if not training or running_mean is None or is_empty(a):
        return batch_norm(a, running_mean, running_var, weight, bias, training, momentum, eps)
    if not isinstance(momentum, NumberProxy) and momentum == 0.0:
        return batch_norm(a, None, None, weight, bias, True, momentum, eps)
    out, mean, var = batch_norm_update(a, running_mean, running_var, weight, bias, momentum, eps)
    overwrite(running_mean, mean)
    overwrite(running_var, var)
    return out


@alias(torch.batch_norm)
def _batch_norm_builtin(a, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    return _batch_norm(a, running_mean, running_var, weight, bias, training, momentum, eps)


@batch_norm.vjp
def _(a, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """By PyTorch's own kernels, not by cuDNN's. For no elements it takes none, and the kernel divides by their
    number."""
    if is_empty(a) or weight is None and bias is not None or (training and running_mean is not None):
        return NotImplemented
    mean = rstd = None
    if training:
        y, mean, rstd = native_batch_norm(a, weight, bias, None, None, True, momentum, eps)
    else:
        y = batch_norm(a, running_mean, running_var, weight, bias, False, momentum, eps)
    g = yield y
    ga, gw, gb = native_batch_norm_backward(
        g, a, weight, running_mean, running_var, mean, rstd, training, eps, wanted(a, weight, bias)
    )
    return ga, None, None, gw, gb


@batch_norm_update.vjp
def _(a, running_mean, running_var, weight, bias, momentum, eps):
    if weight is None and bias is not None:
        return NotImplemented
    y, mean, rstd, new_mean, new_var = native_batch_norm_functional(
        a, running_mean, running_var, weight, bias, momentum, eps
    )
    g, _, _ = yield y, new_mean, new_var
    ga, gw, gb = native_batch_norm_backward(g, a, weight, None, None, mean, rstd, True, eps, wanted(a, weight, bias))
    return ga, None, None, gw, gb


kernels.layout.set(
    "as decomposition", batch_norm, batch_norm_update, native_batch_norm, native_batch_norm_functional,
    native_batch_norm_backward,
)  # fmt: skip


@formula(native_batch_norm_backward)
@in_full(0)
def _batch_norm_backward(g, a, weight, running_mean, running_var, mean, rstd, training, eps, mask):
    """The gradients of batch norm in operations. mask: for input, weight and bias, whether a gradient is needed."""
    dims = (0, *range(2, len(a.shape)))
    channel = (a.shape[1], *(1,) * (len(a.shape) - 2))
    weighted = g if weight is None else g * ltorch.reshape(weight, channel)
    if training:
        normal, inverse = standardized(a, dims, lambda variance: eps)
        gradient = of_input(weighted, normal, inverse, dims)
    else:
        inverse = ltorch.rsqrt(ltorch.reshape(running_var, channel) + eps)
        normal = (a - ltorch.reshape(running_mean, channel)) * inverse
        gradient = weighted * inverse
    return (
        gradient if mask[0] else None,
        ltorch.sum(g * normal, dims) if mask[1] else None,
        ltorch.sum(g, dims) if mask[2] else None,
    )


# ----------------------------------------------------------------------------------------------------------------
# over several devices: PyTorch has all but `batch_norm_update_stats` for CUDA alone


def _channels(a, dtype=None):
    return like(a, (a.shape[1],), compute_dtype(a.dtype) if dtype is None else dtype)


batch_norm_stats = torch_prim(torch.batch_norm_stats, name="batch_norm_stats")(
    lambda a, eps: (_channels(a), _channels(a))
)
batch_norm_elemt = torch_prim(torch.batch_norm_elemt, name="batch_norm_elemt")(
    lambda a, weight, bias, mean, invstd, eps: like(a)
)
batch_norm_backward_elemt = torch_prim(torch.batch_norm_backward_elemt, name="batch_norm_backward_elemt")(
    lambda grad_out, a, mean, invstd, weight, sum_dy, sum_dy_xmu, count: like(a)
)


@torch_prim(torch.batch_norm_backward_reduce)
def batch_norm_backward_reduce(grad_out, a, mean, invstd, weight, input_g, weight_g, bias_g):
    sums = (_channels(a), _channels(a)) if input_g else (None, None)
    return (
        *sums,
        (like(weight) if weight_g and weight is not None else None),
        (like(weight) if bias_g and weight is not None else None),
    )


def _gathered(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
    return _channels(a, mean.dtype), _channels(a, mean.dtype)


def _gather(name: str) -> None:
    """Defines the kernel of synchronized batch norm that combines the statistics of all ranks, as a function that
    writes to no argument."""
    function = getattr(torch, name)

    def run(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        running = [None if t is None else t.clone() for t in (running_mean, running_var)]
        return *function(a, mean, invstd, *running, momentum, eps, counts), *running

    def meta(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        return *_gathered(a, mean, invstd, running_mean, running_var, momentum, eps, counts), *(
            None if t is None else like(t) for t in (running_mean, running_var)
        )

    symbol = torch_prim(fn=run, name=name)(meta)

    @alias(function)
    def call(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        """The running statistics are written to."""
        mean_, invstd_, *new = symbol(a, mean, invstd, running_mean, running_var, momentum, eps, counts)
        for target, value in zip((running_mean, running_var), new, strict=True):
            if target is not None:
                overwrite(target, value)
        return mean_, invstd_


_gather("batch_norm_gather_stats")
_gather("batch_norm_gather_stats_with_counts")


def _run_update_stats(a, running_mean, running_var, momentum):
    running = [None if t is None else t.clone() for t in (running_mean, running_var)]
    return *torch.batch_norm_update_stats(a, *running, momentum), *running


@torch_prim(fn=_run_update_stats)
def batch_norm_update_stats(a, running_mean, running_var, momentum):
    """Mean and variance of the batch, and what the running ones become."""
    mixed = a.device.type != "cpu" or any(t is not None and t.dtype is float32 for t in (running_mean, running_var))
    statistic = _channels(a, None if mixed else a.dtype)
    return statistic, like(statistic), *(None if t is None else like(t) for t in (running_mean, running_var))


@alias(torch.batch_norm_update_stats)
def _batch_norm_update_stats(a, running_mean, running_var, momentum):
    mean, var, *new = batch_norm_update_stats(a, running_mean, running_var, momentum)
    for target, value in zip((running_mean, running_var), new, strict=True):
        if target is not None:
            overwrite(target, value)
    return mean, var
