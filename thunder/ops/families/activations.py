"""Activation functions of torch.nn.functional."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F

from thunder import compat
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import backward, ltorch
from thunder.ops.backward import formula, gradient_of_first, kernel
from thunder.ops.families.data import convert
from thunder.ops.families.ternary import clamp, where
from thunder.ops.functionalize.inplace import overwriting
from thunder.ops.registry import composite, register_inplace
from thunder.ops.rules import derivatives, kernels, memory
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import require_fit

abs, erf, exp, log1p, sigmoid, tanh = ltorch.abs, ltorch.erf, ltorch.exp, ltorch.log1p, ltorch.sigmoid, ltorch.tanh


def _float_like(a, *args, **kwargs) -> TensorProxy:
    require(type(a) is TensorProxy)
    return like(a)


def activation(
    *torch_functions: Callable, meta: Callable | None = None, autocast: str | None = None
) -> Callable[[Callable], Symbol]:
    """A composite of one tensor and numbers, typed like the tensor; `inplace=True`
    overwrites."""

    def define(decomposition: Callable) -> Symbol:
        symbol = composite(*torch_functions, meta=meta or _float_like, autocast=autocast)(decomposition)
        symbol.elementwise = True
        memory.owns_result.add(symbol)
        if "inplace" in symbol.parameters:
            overwriting(symbol)
        else:
            register_inplace(symbol, symbol.name)

        return symbol

    return define


@activation(*compat.functions_called("relu"))
def relu(a, inplace=False):
    return where(a > 0, a, 0) if a.dtype.category < 2 else ltorch.maximum(a, ltorch.zeros_like(a))


@activation(*compat.functions_called("relu6"))
def relu6(a, inplace=False):
    return clamp(a, 0, 6)


@activation(*compat.functions_called("leaky_relu"))
def leaky_relu(a, negative_slope=0.01, inplace=False):
    return where(a > 0, a, a * negative_slope)


@activation(*compat.functions_called("elu"))
def elu(a, alpha=1.0, inplace=False):
    return where(a > 0, a, alpha * ltorch.expm1(a))


@activation(*compat.functions_called("celu"))
def celu(a, alpha=1.0, inplace=False):
    return where(a > 0, a, alpha * ltorch.expm1(a / alpha))


# alpha and scale of Klambauer et al., "Self-Normalizing Neural Networks" (2017)
_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@activation(*compat.functions_called("selu"))
def selu(a, inplace=False):
    alpha, scale = _SELU
    return scale * where(a > 0, a, alpha * ltorch.expm1(a))


def _gelu_meta(a, *, approximate="none"):
    require(approximate in ("none", "tanh"))
    return _float_like(a)


@activation(*compat.functions_called("gelu"), meta=_gelu_meta)
def gelu(a, *, approximate="none"):
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a * a * a)
        return 0.5 * a * (1 + tanh(inner))
    return a * 0.5 * (1 + erf(a * (1 / math.sqrt(2))))


@activation(*compat.functions_called("silu"))
def silu(a, inplace=False):
    return a * sigmoid(a)


@activation(*compat.functions_called("mish"))
def mish(a, inplace=False):
    return a * tanh(softplus(a))


@activation(*compat.functions_called("softplus"), autocast="cuda:float32")
def softplus(a, beta=1.0, threshold=20.0):
    scaled = a * beta
    return where(scaled > threshold, a, log1p(exp(clamp(scaled, None, threshold))) / beta)


def _hardtanh_meta(a, min_val=-1.0, max_val=1.0):
    require(min_val <= max_val)
    return _float_like(a)


@activation(*compat.functions_called("hardtanh"), meta=_hardtanh_meta)
def hardtanh(a, min_val=-1.0, max_val=1.0, inplace=False):
    return convert(clamp(a, min_val, max_val), a.dtype)


@activation(*compat.functions_called("hardsigmoid"))
def hardsigmoid(a, inplace=False):
    return clamp(a + 3, 0, 6) / 6


@activation(*compat.functions_called("hardswish"))
def hardswish(a, inplace=False):
    return a * clamp(a + 3, 0, 6) / 6


@activation(*compat.functions_called("hardshrink"))
def hardshrink(a, lambd=0.5):
    return where(abs(a) <= lambd, 0.0, a)


def _softshrink_meta(a, lambd=0.5):
    require(lambd >= 0)
    return _float_like(a)


@activation(*compat.functions_called("softshrink"), meta=_softshrink_meta)
def softshrink(a, lambd=0.5):
    return where(a > lambd, a - lambd, where(a < -lambd, a + lambd, a * 0))


@activation(F.logsigmoid, *compat.functions_called("log_sigmoid"))
def logsigmoid(a):
    return clamp(a, None, 0.0) - log1p(exp(-abs(a)))


@composite(*compat.functions_called("threshold"))
def threshold(a, threshold, value, inplace=False):
    require_fit(a.dtype, threshold, value)
    return convert(where(a <= threshold, value, a), a.dtype)


overwriting(threshold)


@composite(*compat.functions_called("prelu"), autocast="lower")
def prelu(a, weight):
    require(len(weight.shape) <= 1)
    channels = a.shape[1] if len(a.shape) > 1 else 1
    require(not weight.shape or weight.shape[0] == 1 or (a.shape and weight.shape[0] == channels))
    if not a.shape:
        weight = ltorch.reshape(weight, ())
    elif len(a.shape) > 1 and weight.shape != () and weight.shape[0] != 1:
        weight = ltorch.reshape(weight, (weight.shape[0], *(1,) * (len(a.shape) - 2)))
    return where(a > 0, a, weight * a)


@composite(*compat.functions_called("rrelu"), meta=_float_like, tags=(OpTags.RANDOM_OP,))
def rrelu(a, lower=1 / 8, upper=1 / 3, training=False, inplace=False):
    require(not training, "with training=True it draws random numbers, and has no decomposition")
    return where(a >= 0, a, a * ((lower + upper) / 2))


overwriting(rrelu)


@composite(*compat.functions_called("glu"))
def glu(a, dim=-1):
    require(a.shape and not a.shape[dim % len(a.shape)] % 2)
    left, right = ltorch.chunk(a, 2, dim)
    return left * sigmoid(right)


# ----------------------------------------------------------------------------------------------------------------
# PyTorch's backward kernels


gelu_backward = kernel("gelu_backward")
silu_backward = kernel("silu_backward")
threshold_backward = kernel("threshold_backward")
leaky_relu_backward = kernel("leaky_relu_backward")
elu_backward = kernel("elu_backward")
hardswish_backward = kernel("hardswish_backward")
hardsigmoid_backward = kernel("hardsigmoid_backward")
hardtanh_backward = kernel("hardtanh_backward")
softplus_backward = kernel("softplus_backward")
mish_backward = kernel("mish_backward")
hardshrink_backward = kernel("hardshrink_backward")
softshrink_backward = kernel("softshrink_backward")
glu_backward = kernel("glu_backward", "default", lambda g, a, dim: like(a))
log_sigmoid_forward = kernel("log_sigmoid_forward", "default", lambda a: (like(a), like(a)))
log_sigmoid_forward.nondifferentiable = (1,)  # a buffer
log_sigmoid_backward = kernel("log_sigmoid_backward")
prelu_kernel = kernel("_prelu_kernel", "default", lambda a, weight: like(a))
prelu_kernel_backward = kernel("_prelu_kernel_backward", "default", lambda g, a, weight: (like(a), like(a)))


@gelu_backward.decomposed_by
def _(g, x, *, approximate="none"):
    if approximate == "tanh":
        scale = math.sqrt(2.0 / math.pi)
        t = ltorch.tanh(scale * (x + 0.044715 * x * x * x))
        return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3 * 0.044715 * x * x))
    cumulative = 0.5 * (1.0 + ltorch.erf(x * math.sqrt(0.5)))
    return g * (cumulative + x * ltorch.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi)))


@threshold_backward.decomposed_by
def _(g, x, threshold):
    return ltorch.where(x <= threshold, 0.0, g)


@leaky_relu_backward.decomposed_by
def _(g, x, slope, of_result):
    return ltorch.where(x > 0, g, g * slope)


# the operand decides, and not the cotangent, which comes first
kernels.layout.set("as decomposition", threshold_backward, leaky_relu_backward)


@elu_backward.decomposed_by
def _(g, alpha, scale, input_scale, of_result, x):
    if of_result:
        return None
    return ltorch.where(x <= 0, g * (input_scale * alpha * scale) * ltorch.exp(x * input_scale), g * scale)


@hardtanh_backward.decomposed_by
def _(g, x, low, high):
    return ltorch.where(ltorch.logical_or(x <= low, x >= high), 0.0, g)


@softplus_backward.decomposed_by
def _(g, x, beta, threshold):
    z = ltorch.exp(x * beta)
    return ltorch.where(x * beta > threshold, g, g * (z / (z + 1.0)))


@log_sigmoid_backward.decomposed_by
def _(g, x, exponentials):
    z = ltorch.exp(-ltorch.abs(x))
    z = z / (1.0 + z)
    return ltorch.where(x < 0, g * (1.0 - z), g * z)


@glu_backward.decomposed_by
def _(g, a, dim):
    left, right = ltorch.chunk(a, 2, dim)
    s = ltorch.sigmoid(right)
    return ltorch.cat((g * s, g * left * s * (1.0 - s)), dim)


@silu_backward.decomposed_by
@formula(silu_backward)
def _silu_backward(g, x):
    s = ltorch.sigmoid(x)
    return g * s * (1 + x * (1 - s))


@hardsigmoid_backward.decomposed_by
@formula(hardsigmoid_backward)
def _hardsigmoid_backward(g, x):
    return ltorch.where((x > -3.0) & (x < 3.0), g * (1.0 / 6.0), 0.0)


@mish_backward.decomposed_by
@formula(mish_backward)
def _mish_backward(g, x):
    t = ltorch.tanh(ltorch.softplus(x))
    return g * (t + x * ltorch.sigmoid(x) * (1 - t * t))


# ----------------------------------------------------------------------------------------------------------------
# derivatives: a test compares those that are one kernel with PyTorch's own file of derivatives


gradient_of_first(celu, lambda g, y, a, alpha=1.0: elu_backward(g, alpha, 1, 1.0 / alpha, False, a))
gradient_of_first(elu, lambda g, y, a, alpha=1.0: elu_backward(g, alpha, 1, 1, False, a))
gradient_of_first(gelu, lambda g, y, a, *, approximate="none": gelu_backward(g, a, approximate=approximate))
gradient_of_first(glu, lambda g, y, a, dim=-1: glu_backward(g, a, dim))
gradient_of_first(hardshrink, lambda g, y, a, lambd=0.5: hardshrink_backward(g, a, lambd))
gradient_of_first(hardsigmoid, lambda g, y, a: hardsigmoid_backward(g, a))
gradient_of_first(hardswish, lambda g, y, a: hardswish_backward(g, a))
gradient_of_first(hardtanh, lambda g, y, a, min_val=-1.0, max_val=1.0: hardtanh_backward(g, a, min_val, max_val))
gradient_of_first(leaky_relu, lambda g, y, a, negative_slope=0.01: leaky_relu_backward(g, a, negative_slope, False))
gradient_of_first(mish, lambda g, y, a: mish_backward(g, a))
gradient_of_first(relu, lambda g, y, a: threshold_backward(g, y, 0))
gradient_of_first(silu, lambda g, y, a: silu_backward(g, a))
gradient_of_first(softplus, lambda g, y, a, beta=1.0, threshold=20.0: softplus_backward(g, a, beta, threshold))
gradient_of_first(softshrink, lambda g, y, a, lambd=0.5: softshrink_backward(g, a, lambd))
gradient_of_first(threshold, lambda g, y, a, threshold, value: threshold_backward(g, a, threshold))


gradient_of_first(relu6, lambda g, y, a: hardtanh_backward(g, a, 0, 6))
gradient_of_first(selu, lambda g, y, a: elu_backward(g, _SELU[0], _SELU[1], 1, False, a))


@logsigmoid.vjp
def _(a):
    # the kernel for GPUs reads no exponentials
    y, exponentials = (logsigmoid(a), a) if a.device.type == "cuda" else log_sigmoid_forward(a)
    g = yield y
    return (log_sigmoid_backward(g, a, exponentials),)


@log_sigmoid_forward.vjp
def _(a):
    y, exponentials = log_sigmoid_forward(a)
    g, _ = yield y, exponentials
    return (log_sigmoid_backward(g, a, exponentials),)


@prelu.vjp
def _(a, weight):
    if not a.shape:
        return NotImplemented
    w = ltorch.reshape(weight, (1, *((weight.numel_value,) if len(a.shape) > 1 else ()), *(1,) * (len(a.shape) - 2)))
    g = yield prelu_kernel(a, w)
    ga, gw = prelu_kernel_backward(g, a, w)
    return ga, ltorch.reshape(backward.sum_to(gw, w.shape), weight.shape)


@rrelu.vjp
def _(a, lower=1 / 8, upper=1 / 3, training=False):
    if training:
        return NotImplemented
    g = yield rrelu(a, lower, upper, training)
    return (leaky_relu_backward(g, a, (lower + upper) / 2, False),)


kernels.layout.set("own", ltorch.logsigmoid)  # a kernel of its own


# ----------------------------------------------------------------------------------------------------------------
# derivatives of the backward kernels


def _of_piecewise_linear(symbol: Symbol) -> None:
    """The operand of a piecewise linear function gets zeros, as in PyTorch."""
    backward.gradients_of(symbol, lambda c, g, x, *options: (symbol(c, x, *options), ltorch.zeros_like(x)))


for _symbol in (hardshrink_backward, hardtanh_backward, leaky_relu_backward, softshrink_backward, threshold_backward):
    _of_piecewise_linear(_symbol)


def _elu_twice(c, g, alpha, scale, input_scale, of_result, x):
    below = ltorch.to(x < 0.0, dtype=x.dtype)
    if of_result:
        second = c * g * input_scale * below
    else:
        second = elu_backward(c * g * input_scale, alpha, scale, input_scale, False, x) * below
    return elu_backward(c, alpha, scale, input_scale, of_result, x), None, None, None, None, second


def _hardswish_twice(c, g, x):
    inside = ltorch.logical_and(x > -3.0, x < 3.0)
    return hardswish_backward(c, x), where(inside, c * g / 3.0, 0.0)


def _softplus_twice(c, g, x, beta, threshold):
    scaled = x * beta
    second = backward.sigmoid_backward(c * g, ltorch.sigmoid(scaled))
    second = second * ltorch.to(scaled < threshold, dtype=x.dtype) * beta
    return softplus_backward(c, x, beta, threshold), second


def _log_sigmoid_twice(c, g, x, exponentials):
    z = ltorch.sigmoid(x)
    return log_sigmoid_backward(c, x, exponentials), c * g * (z * (z - 1.0))


def _gelu_twice(c, g, x, *, approximate="none"):
    first = gelu_backward(c, x, approximate=approximate)
    if approximate == "none":  # the density of the normal distribution, times 2 - x^2
        density = ltorch.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))
        return first, c * g * (density * (2.0 - x * x))
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    t = ltorch.tanh(scale * (x + cubic * x * x * x))
    slope, bend = scale * (1.0 + 3 * cubic * x * x), 6 * scale * cubic * x  # of the argument of tanh
    return first, c * g * ((1.0 - t * t) * (slope + 0.5 * x * (bend - 2.0 * t * slope * slope)))


def _glu_twice(c, g, a, dim):
    left, right = ltorch.chunk(a, 2, dim)
    of_left, of_right = ltorch.chunk(c, 2, dim)
    s = ltorch.sigmoid(right)
    slope = s * (1.0 - s)
    of_g = of_left * s + of_right * left * slope
    of_a = of_right * g * slope, of_left * g * slope + of_right * g * left * slope * (1.0 - 2.0 * s)
    return of_g, ltorch.cat(of_a, dim)


def _prelu_twice(c, g, x, weight):
    of_x, of_weight = c
    positive = x >= 0.0
    of_g = where(positive, of_x, of_x * weight + of_weight * x)
    return of_g, where(positive, 0.0, g * of_weight), where(positive, 0.0, g * of_x)


backward.gradients_of(prelu_kernel, lambda c, x, weight: prelu_kernel_backward(c, x, weight))
backward.gradients_of(prelu_kernel_backward, _prelu_twice, (0, 1, 2))
backward.gradients_of(elu_backward, _elu_twice, (0, 5))
backward.gradients_of(gelu_backward, _gelu_twice)
backward.gradients_of(glu_backward, _glu_twice)
backward.gradients_of(hardswish_backward, _hardswish_twice)
backward.gradients_of(log_sigmoid_backward, _log_sigmoid_twice)
backward.gradients_of(softplus_backward, _softplus_twice)
derivatives.inexact.add(gelu_backward, glu_backward, log_sigmoid_backward)  # they round otherwise than PyTorch
