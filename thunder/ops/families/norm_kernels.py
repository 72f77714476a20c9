"""Kernels of layer and group norm: each one symbol, by which programs call it and derivatives are computed, and
what it computes in operations. Derivatives of the backwards: `norm_formulas.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thunder import compat
from thunder.analysis import aliases
from thunder.core import dtypes
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import like
from thunder.core.symbol import OpTags, Symbol, primitive
from thunder.ops import backward, ltorch
from thunder.ops.backward import gradient_of_first, kernel
from thunder.ops.families.data import convert
from thunder.ops.families.shape import reshape
from thunder.ops.opaque import casts_inside
from thunder.ops.registry import composite, torch_prim
from thunder.ops.rules import derivatives, kernels
from thunder.ops.shape_rules import is_empty, require


def compute_dtype(d):
    """What PyTorch computes in: float32 for the types below it."""
    return dtypes.float32 if d.category == 2 and d.bytes < 4 else d


def in_rows(y):
    """As PyTorch's kernels lay out their results, whatever their argument's layout is."""
    return ltorch.contiguous(y)


def wanted(*parameters) -> list[bool]:
    """Which gradients a backward kernel is asked for."""
    return [p is not None and p.requires_grad for p in parameters]


def normalized_dims(a, normalized_shape, *parameters) -> tuple:
    """The dimensions normalized over."""
    shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    k = len(shape)
    require(k and len(a.shape) >= k and a.shape[-k:] == shape)
    for p in parameters:
        require(p is None or p.shape == shape)
    return tuple(range(len(a.shape) - k, len(a.shape)))


def whiten(x, dims, eps):
    """`x` less its mean, over the square root of its (biased) variance plus eps; the mean and that root's
    reciprocal."""
    centred, mean, variance = moments(x, dims)
    rstd = ltorch.rsqrt(variance + eps)
    return centred * rstd, mean, rstd


def moments(x, dims):
    """`x` less its mean; its mean and its (biased) variance."""
    mean = ltorch.mean(x, dims, True)
    centred = x - mean
    return centred, mean, ltorch.mean(centred * centred, dims, True)


def of_normalized(g, weight, normal, rstd, dims):
    """The gradient of what was normalized over `dims` and then multiplied by a weight."""
    count, weighted = math.prod(g.shape[d] for d in dims), g if weight is None else g * weight
    total, along = ltorch.sum(weighted, dims, True) / count, ltorch.sum(weighted * normal, dims, True) / count
    return rstd * (weighted - total - normal * along)


def scale_and_shift(x, weight, bias):
    x = x if weight is None else x * convert(weight, x.dtype)
    return x if bias is None else x + convert(bias, x.dtype)


def per_channel(a, p):
    """A parameter with one element for each channel, with as many dimensions as `a`."""
    return None if p is None else reshape(p, (1, p.shape[0], *(1,) * (len(a.shape) - 2)))


# as PyTorch's kernels lay out images: with channels last where these are last in memory, otherwise row-major
image_layout = Symbol(
    "image_layout",
    lambda a: like(a),
    id="prims.image_layout",
    is_prim=True,
    tags=(OpTags.VIEW,),
    fn=lambda a: a.contiguous(memory_format=backward.memory_format(a)),
)
aliases.may_copy.add(image_layout)


gradient_of_first(image_layout, lambda g, y, a: g)


def check_channels(a, *parameters) -> None:
    for p in parameters:
        require(p is None or p.shape == (a.shape[1],))


# ----------------------------------------------------------------------------------------------------------------
# layer norm


def _native_layer_norm_meta(a, normalized_shape, weight, bias, eps):
    """On a CPU, mean and deviation of a narrow type are float32 where weight and bias are, elsewhere always
    (ATen/native/layer_norm.cpp, cuda/layer_norm_kernel.cu)."""
    normalized_dims(a, normalized_shape, weight, bias)
    outer = a.shape[: len(a.shape) - len(normalized_shape)] + (1,) * len(normalized_shape)
    mixed = any(p is not None and p.dtype is float32 for p in (weight, bias))
    dtype = float32 if a.dtype in (bfloat16, float16) and (mixed or a.device.type != "cpu") else a.dtype
    return like(a), like(a, outer, dtype=dtype), like(a, outer, dtype=dtype)


@composite(
    *compat.operators("native_layer_norm"),
    meta=_native_layer_norm_meta,
    autocast="cuda:float32",
    tags=(OpTags.REDUCTION_OP,),
)
def native_layer_norm(a, normalized_shape, weight, bias, eps):
    dims = tuple(range(len(a.shape) - len(normalized_shape), len(a.shape)))
    x, mean, rstd = whiten(convert(a, compute_dtype(a.dtype)), dims, eps)
    kind = _native_layer_norm_meta(a, normalized_shape, weight, bias, eps)[1].dtype
    return convert(scale_and_shift(x, weight, bias), a.dtype), convert(mean, kind), convert(rstd, kind)


native_layer_norm.nondifferentiable = (1, 2)
native_layer_norm_backward = kernel(
    "native_layer_norm_backward", "default",
    lambda g, a, normalized_shape, mean, rstd, weight, bias, mask: (
        like(a) if mask[0] else None, like(weight) if mask[1] else None, like(bias) if mask[2] else None
    ),
)  # fmt: skip


@native_layer_norm.vjp
def _(a, normalized_shape, weight, bias, eps):
    y, mean, rstd = native_layer_norm(a, normalized_shape, weight, bias, eps)
    g, *_ = yield y, mean, rstd
    ga, gw, gb = native_layer_norm_backward(g, a, normalized_shape, mean, rstd, weight, bias, wanted(a, weight, bias))
    return ga, None, gw, gb


@native_layer_norm_backward.decomposed_by
def _(g, a, normalized_shape, mean, rstd, weight, bias, mask):
    outer = len(a.shape) - len(normalized_shape)
    dims, rows = tuple(range(outer, len(a.shape))), tuple(range(outer))
    kind = compute_dtype(a.dtype)
    x, g, mean, rstd = (convert(t, kind) for t in (a, g, mean, rstd))
    normal = (x - mean) * rstd
    of_input = of_weight = of_bias = None
    if mask[0]:
        weight_ = None if weight is None else convert(weight, kind)
        of_input = convert(of_normalized(g, weight_, normal, rstd, dims), a.dtype)
    if mask[1]:
        of_weight = convert(ltorch.sum(g * normal, rows) if rows else g * normal, weight.dtype)
    if mask[2]:
        of_bias = convert(ltorch.sum(g, rows) if rows else reshape(g, bias.shape), bias.dtype)
    return of_input, of_weight, of_bias


# ----------------------------------------------------------------------------------------------------------------
# group norm


def _laid_out(a, others, parameters):
    """In the layout that PyTorch's kernels of group norm, which do not look at strides, take them to be in."""
    layout = backward.memory_format(a) if a.device.type == "cpu" else torch.contiguous_format
    return *(t.contiguous(memory_format=layout) for t in (a, *others)), *(
        p if p is None else p.contiguous() for p in parameters
    )


def _run_group_norm(a, weight, bias, n, c, size, groups, eps):
    return backward.aten.native_group_norm.default(*_laid_out(a, (), (weight, bias)), n, c, size, groups, eps)


def parameters_meta(g, a, weight, bias, mask):
    return like(a) if mask[0] else None, like(weight) if mask[1] else None, like(bias) if mask[2] else None


def _native_group_norm_meta(a, weight, bias, N, C, HxW, group, eps):
    require(not C % group and not any(t is not None and t.shape != (C,) for t in (weight, bias)))
    narrow = like(
        a,
        (N, group),
        dtype=float32
        if a.device.type == "cpu" and any(t is not None and t.dtype is float32 for t in (weight, bias))
        else a.dtype,
    )
    return like(a), narrow, like(narrow)


native_group_norm = torch_prim(*compat.operators("native_group_norm"), name="native_group_norm", fn=_run_group_norm)(
    _native_group_norm_meta
)


@primitive(lambda g, a, mean, rstd, weight, n, c, size, groups, mask: parameters_meta(g, a, weight, weight, mask))
def native_group_norm_backward(g, a, mean, rstd, weight, n, c, size, groups, mask):
    a, g, mean, rstd, weight = _laid_out(a, (g,), (mean, rstd, weight))
    return backward.aten.native_group_norm_backward.default(g, a, mean, rstd, weight, n, c, size, groups, mask)


def _in_groups(a, groups):
    """The image with dimensions (N, groups, channels of a group, ...): a view, in whatever layout."""
    return reshape(a, (a.shape[0], groups, a.shape[1] // groups, *a.shape[2:]))


def _group_parameter(a, p, groups, kind):
    """A parameter as it is broadcast to an image in groups; or a number for each group."""
    if p is None:
        return None
    sizes = (1, groups, a.shape[1] // groups) if len(p.shape) == 1 else (*p.shape, 1)
    return reshape(convert(p, kind), (*sizes, *(1,) * (len(a.shape) - 2)))


def _in_group_norms_layout(y):
    """A result as PyTorch's kernel of group norm lays it out, which has channels last on a CPU alone."""
    return image_layout(y) if y.device.type == "cpu" else ltorch.contiguous(y)


def normalized_in_groups(a, weight, bias, groups, eps):
    """Group norm, and the means and deviations of groups."""
    kind, dims = compute_dtype(a.dtype), tuple(range(2, len(a.shape) + 1))
    normal, mean, rstd = whiten(_in_groups(convert(a, kind), groups), dims, eps)
    parameters = (_group_parameter(a, p, groups, kind) for p in (weight, bias))
    y = convert(reshape(scale_and_shift(normal, *parameters), a.shape), a.dtype)
    return _in_group_norms_layout(y), *(reshape(x, (a.shape[0], groups)) for x in (mean, rstd))


@native_group_norm.decomposed_by
def _(a, weight, bias, n, c, size, groups, eps):
    if is_empty(a):
        return None
    narrow = _native_group_norm_meta(a, weight, bias, n, c, size, groups, eps)[1].dtype
    y, mean, rstd = normalized_in_groups(a, weight, bias, groups, eps)
    return y, convert(mean, narrow), convert(rstd, narrow)


@native_group_norm_backward.decomposed_by
def _(g, a, mean, rstd, weight, n, c, size, groups, mask):
    if is_empty(a):
        return None
    kind, pixels = compute_dtype(a.dtype), tuple(range(3, len(a.shape) + 1))
    x, g = (_in_groups(convert(t, kind), groups) for t in (a, g))
    mean, rstd, weight_ = (_group_parameter(a, t, groups, kind) for t in (mean, rstd, weight))
    normal = (x - mean) * rstd
    # all sums are those of each channel of an image, which is one pass
    along, total = (ltorch.sum(t, pixels, True) if pixels else t for t in (g * normal, g))
    of_input = None
    if mask[0]:
        g, *sums = (t if weight is None else t * weight_ for t in (g, along, total))
        along_, total_ = (ltorch.sum(t, 2, True) / (c // groups * size) for t in sums)
        of_input = _in_group_norms_layout(convert(reshape((g - total_ - normal * along_) * rstd, a.shape), a.dtype))
    return of_input, *(
        convert(reshape(ltorch.sum(t, 0), (c,)), a.dtype if weight is None else weight.dtype) if needed else None
        for needed, t in zip(mask[1:], (along, total), strict=True)
    )


@native_group_norm.vjp
def _(a, weight, bias, n, c, size, groups, eps):
    """Unlike the other norms' kernels, it has derivatives of mean and deviation."""
    y, mean, rstd = native_group_norm(a, weight, bias, n, c, size, groups, eps)
    g, of_mean, of_rstd = yield y, mean, rstd
    ga, gw, gb = native_group_norm_backward(g, a, mean, rstd, weight, n, c, size, groups, wanted(a, weight, bias))
    if not a.requires_grad:
        return None, gw, gb
    count = c // groups * size
    of_mean, of_rstd, mean, rstd = (ltorch.unsqueeze(convert(x, a.dtype), -1) for x in (of_mean, of_rstd, mean, rstd))
    ga = ltorch.reshape(ga, (n, groups, count)) + of_mean / count
    ga = ga - of_rstd / count * (rstd * rstd * rstd) * (ltorch.reshape(a, (n, groups, count)) - mean)
    return ltorch.reshape(ga, a.shape), gw, gb


derivatives.inexact.add(native_group_norm)  # where mean and deviation have cotangents, too
casts_inside(*native_group_norm.torch_functions)


kernels.layout.set("as decomposition", native_group_norm, native_group_norm_backward)
kernels.layout.set("row-major", native_layer_norm, native_layer_norm_backward)
