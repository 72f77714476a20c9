"""Activation functions of torch.nn.functional."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F

from thunder import compat
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import backward
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.data import convert
from thunder.ops.families.ternary import clamp, where
from thunder.ops.functionalize.inplace import overwriting
from thunder.ops.registry import LTORCH, composite, register_inplace
from thunder.ops.rules import kernels
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import require_fit

abs, erf, exp, log1p, sigmoid, tanh = (LTORCH[n] for n in ("abs", "erf", "exp", "log1p", "sigmoid", "tanh"))


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
        if "inplace" in symbol.parameters:
            overwriting(symbol)
        else:
            register_inplace(symbol, symbol.name)

        return symbol

    return define


@activation(*compat.functions_called("relu"))
def relu(a, inplace=False):
    return where(a > 0, a, 0) if a.dtype.category < 2 else LTORCH["maximum"](a, LTORCH["zeros_like"](a))


@activation(*compat.functions_called("relu6"))
def relu6(a, inplace=False):
    return clamp(a, 0, 6)


@activation(*compat.functions_called("leaky_relu"))
def leaky_relu(a, negative_slope=0.01, inplace=False):
    return where(a > 0, a, a * negative_slope)


@activation(*compat.functions_called("elu"))
def elu(a, alpha=1.0, inplace=False):
    return where(a > 0, a, alpha * LTORCH["expm1"](a))


@activation(*compat.functions_called("celu"))
def celu(a, alpha=1.0, inplace=False):
    return where(a > 0, a, alpha * LTORCH["expm1"](a / alpha))


# alpha and scale of Klambauer et al., "Self-Normalizing Neural Networks" (2017)
_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@activation(*compat.functions_called("selu"))
def selu(a, inplace=False):
    alpha, scale = _SELU
    return scale * where(a > 0, a, alpha * LTORCH["expm1"](a))


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
        weight = LTORCH["reshape"](weight, ())
    elif len(a.shape) > 1 and weight.shape != () and weight.shape[0] != 1:
        weight = LTORCH["reshape"](weight, (weight.shape[0], *(1,) * (len(a.shape) - 2)))
    return where(a > 0, a, weight * a)


@composite(*compat.functions_called("rrelu"), meta=_float_like, tags=(OpTags.RANDOM_OP,))
def rrelu(a, lower=1 / 8, upper=1 / 3, training=False, inplace=False):
    require(not training, "with training=True it draws random numbers, and has no decomposition")
    return where(a >= 0, a, a * ((lower + upper) / 2))


overwriting(rrelu)


@composite(*compat.functions_called("glu"))
def glu(a, dim=-1):
    require(a.shape and not a.shape[dim % len(a.shape)] % 2)
    left, right = LTORCH["chunk"](a, 2, dim)
    return left * sigmoid(right)


# --- derivatives: PyTorch's kernels; those of one kernel stand in kernel_derivatives.py


gradient_of_first(relu6, lambda g, y, a: backward.hardtanh_backward(g, a, 0, 6))
gradient_of_first(selu, lambda g, y, a: backward.elu_backward(g, _SELU[0], _SELU[1], 1, False, a))


@logsigmoid.vjp
def _(a):
    # the kernel for GPUs reads no exponentials
    y, exponentials = (logsigmoid(a), a) if a.device.type == "cuda" else backward.log_sigmoid_forward(a)
    g = yield y
    return (backward.log_sigmoid_backward(g, a, exponentials),)


@backward.log_sigmoid_forward.vjp
def _(a):
    y, exponentials = backward.log_sigmoid_forward(a)
    g, _ = yield y, exponentials
    return (backward.log_sigmoid_backward(g, a, exponentials),)


@prelu.vjp
def _(a, weight):
    if not a.shape:
        return NotImplemented
    w = LTORCH["reshape"](weight, (1, *((weight.numel_value,) if len(a.shape) > 1 else ()), *(1,) * (len(a.shape) - 2)))
    g = yield backward.prelu_kernel(a, w)
    ga, gw = backward.prelu_kernel_backward(g, a, w)
    return ga, LTORCH["reshape"](backward.sum_to(gw, w.shape), weight.shape)


@rrelu.vjp
def _(a, lower=1 / 8, upper=1 / 3, training=False):
    if training:
        return NotImplemented
    g = yield rrelu(a, lower, upper, training)
    return (backward.leaky_relu_backward(g, a, (lower + upper) / 2, False),)


kernels.layout.set("own", LTORCH["logsigmoid"])  # a kernel of its own
