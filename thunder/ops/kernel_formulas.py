"""What PyTorch's kernels for derivatives compute, in operations: for executors that make kernels of their own of them.

Beside `formula` (see `backward.py`), which is what is differentiated where a kernel is: here means, deviations and
results that were saved are read, not computed again.
"""

from __future__ import annotations

import math

from thunder.ops import backward
from thunder.ops.backward import in_operations, op
from thunder.ops.data import convert
from thunder.ops.define import PRIMS
from thunder.ops.normalization import _scale_and_shift, _whiten, compute_dtype
from thunder.ops.shape import reshape, unsqueeze

__all__: list[str] = []


@in_operations(backward.tanh_backward)
def _(g, y):
    return g * (1.0 - y * y)


@in_operations(backward.sigmoid_backward)
def _(g, y):
    return g * (1.0 - y) * y


@in_operations(backward.gelu_backward)
def _(g, x, *, approximate="none"):
    if approximate == "tanh":
        scale = math.sqrt(2.0 / math.pi)
        t = op("tanh")(scale * (x + 0.044715 * x * x * x))
        return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * scale * (1.0 + 3 * 0.044715 * x * x))
    cumulative = 0.5 * (1.0 + op("erf")(x * math.sqrt(0.5)))
    return g * (cumulative + x * op("exp")(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi)))


@in_operations(backward.threshold_backward)
def _(g, x, threshold):
    return op("where")(x <= threshold, 0.0, g)


@in_operations(backward.leaky_relu_backward)
def _(g, x, slope, of_result):
    return op("where")(x > 0, g, g * slope)


@in_operations(backward.elu_backward)
def _(g, alpha, scale, input_scale, of_result, x):
    if of_result:
        return None
    return op("where")(x <= 0, g * (input_scale * alpha * scale) * op("exp")(x * input_scale), g * scale)


@in_operations(backward.hardtanh_backward)
def _(g, x, low, high):
    return op("where")(op("logical_or")(x <= low, x >= high), 0.0, g)


@in_operations(backward.softplus_backward)
def _(g, x, beta, threshold):
    z = op("exp")(x * beta)
    return op("where")(x * beta > threshold, g, g * (z / (z + 1.0)))


@in_operations(backward.softmax_backward)
def _(g, y, dim, dtype):
    gy = g * y
    return gy - y * op("sum")(gy, dim, True)


@in_operations(backward.log_softmax_backward)
def _(g, y, dim, dtype):
    return g - op("exp")(y) * op("sum")(g, dim, True)


@in_operations(backward.slice_backward)
def _(g, sizes, dim, start, end, step):
    if step != 1:
        return None
    dim = dim % len(sizes)
    start, _, _ = slice(start, end).indices(sizes[dim])
    return PRIMS["pad"](
        g, 0, tuple((start, n - start - g.shape[d]) if d == dim else (0, 0) for d, n in enumerate(sizes))
    )


@in_operations(backward.select_backward)
def _(g, sizes, dim, index):
    dim = dim % len(sizes)
    before = index % sizes[dim]
    return PRIMS["pad"](
        unsqueeze(g, dim), 0, tuple((before, n - before - 1) if d == dim else (0, 0) for d, n in enumerate(sizes))
    )


@in_operations(backward.glu_backward)
def _(g, a, dim):
    left, right = op("chunk")(a, 2, dim)
    s = op("sigmoid")(right)
    return op("cat")((g * s, g * left * s * (1.0 - s)), dim)


@in_operations(backward.native_layer_norm)
def _(a, normalized_shape, weight, bias, eps):
    dims = tuple(range(len(a.shape) - len(normalized_shape), len(a.shape)))
    x, mean, rstd = _whiten(convert(a, compute_dtype(a.dtype)), dims, eps)
    kind = backward.native_layer_norm.meta(a, normalized_shape, weight, bias, eps)[1].dtype
    return convert(_scale_and_shift(x, weight, bias), a.dtype), convert(mean, kind), convert(rstd, kind)


@in_operations(backward.native_layer_norm_backward)
def _(g, a, normalized_shape, mean, rstd, weight, bias, mask):
    outer = len(a.shape) - len(normalized_shape)
    dims, rows = tuple(range(outer, len(a.shape))), tuple(range(outer))
    kind = compute_dtype(a.dtype)
    x, g, mean, rstd = (convert(t, kind) for t in (a, g, mean, rstd))
    normal = (x - mean) * rstd
    of_input = of_weight = of_bias = None
    if mask[0]:
        weighted = g if weight is None else g * convert(weight, kind)
        count = math.prod(normalized_shape)
        total, along = op("sum")(weighted, dims, True) / count, op("sum")(weighted * normal, dims, True) / count
        of_input = convert(rstd * (weighted - total - normal * along), a.dtype)
    if mask[1]:
        of_weight = convert(op("sum")(g * normal, rows) if rows else g * normal, weight.dtype)
    if mask[2]:
        of_bias = convert(op("sum")(g, rows) if rows else reshape(g, bias.shape), bias.dtype)
    return of_input, of_weight, of_bias
