"""softmax and its kin, and normalizations by statistics: layer, RMS, group, batch and instance norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core.definition import InPlaceForm
from thunder.core.proxies import like
from thunder.core.symbol import BoundSymbol
from thunder.ops import backward, ltorch
from thunder.ops.families.batch_norm import batch_norm, running
from thunder.ops.families.data import convert
from thunder.ops.families.norm_kernels import (
    check_channels,
    compute_dtype,
    in_rows,
    moments,
    native_group_norm,
    native_group_norm_backward,
    native_layer_norm,
    native_layer_norm_backward,
    normalized_dims,
    normalized_in_groups,
    per_channel,
    scale_and_shift,
    wanted,
    whiten,
)  # fmt: skip
from thunder.ops.families.shape import expand
from thunder.ops.functionalize import inplace
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, composite, torch_prim
from thunder.ops.rules import batching, derivatives, kernels, splitting
from thunder.ops.shape_rules import is_empty, numel, require, wrap_dim

_EPS = {
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}


# ---------------------------------------------------------------------------------------------------------------- by
# the last dimensions


def _layer_norm_meta(a, normalized_shape, weight=None, bias=None, eps=1e-5):
    normalized_dims(a, normalized_shape, weight, bias)
    require(a.dtype.category >= 2)
    return like(a)


@composite(
    F.layer_norm,
    torch.layer_norm,
    meta=_layer_norm_meta,
    canonicalize=lambda args, kwargs: (args[:5], {}),
    autocast="cuda:float32",
)
def layer_norm(a, normalized_shape, weight=None, bias=None, eps=1e-5):
    dims = normalized_dims(a, normalized_shape, weight, bias)
    x, _, _ = whiten(convert(a, compute_dtype(a.dtype)), dims, eps)
    return convert(scale_and_shift(x, weight, bias), a.dtype)


def _rms_norm_meta(a, normalized_shape, weight=None, eps=None):
    normalized_dims(a, normalized_shape, weight)
    return like(a)


# torch 2.11 does not cast it
@composite(
    F.rms_norm,
    torch.rms_norm,
    meta=_rms_norm_meta,
    autocast="cuda:float32" if compat.autocast_casts("rms_norm", "cuda") else None,
)
def rms_norm(a, normalized_shape, weight=None, eps=None):
    dims = normalized_dims(a, normalized_shape, weight)
    x = convert(a, compute_dtype(a.dtype))
    x = x * ltorch.rsqrt(ltorch.mean(ltorch.pow(x, 2), dims, True) + (_EPS[x.dtype.name] if eps is None else eps))
    return in_rows(convert(x if weight is None else x * weight, a.dtype))


# ---------------------------------------------------------------------------------------------------------------- by
# channels


def _group_norm_meta(a, num_groups, weight=None, bias=None, eps=1e-5):
    require(len(a.shape) >= 2)
    require(a.shape[1] % num_groups == 0)
    check_channels(a, weight, bias)
    return like(a)


@composite(
    F.group_norm,
    torch.group_norm,
    meta=_group_norm_meta,
    canonicalize=lambda args, kwargs: (args[:5], {}),
    autocast="cuda:float32",
)
def group_norm(a, num_groups, weight=None, bias=None, eps=1e-5):
    return normalized_in_groups(a, weight, bias, num_groups, eps)[0]


def _is_one(n) -> bool:
    return type(n) is int and n == 1


def _instance_norm_meta(
    a, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    require(not use_input_stats or not all(map(_is_one, a.shape[2:])))
    check_channels(a, running_mean, running_var, weight, bias)
    return like(a)


@composite(F.instance_norm, meta=_instance_norm_meta)
def instance_norm(
    a, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    if not use_input_stats:
        return batch_norm(a, running_mean, running_var, weight, bias, False, momentum, eps)
    x, _, _ = whiten(convert(a, compute_dtype(a.dtype)), tuple(range(2, len(a.shape))), eps)
    return in_rows(convert(scale_and_shift(x, per_channel(a, weight), per_channel(a, bias)), a.dtype))


def _instance_norm_updated(a, running_mean, running_var, weight, bias, momentum, eps):
    running_mean, running_var = running_mean.clone(), running_var.clone()
    return F.instance_norm(a, running_mean, running_var, weight, bias, True, momentum, eps), running_mean, running_var


@torch_prim(fn=_instance_norm_updated, name="instance_norm_update")
def instance_norm_update(a, running_mean, running_var, weight, bias, momentum, eps):
    """Instance norm by each image's statistics: the result, and what running mean and variance become."""
    _instance_norm_meta(a, running_mean, running_var, weight, bias)
    return like(a), like(running_mean), like(running_var)


def instance_norm_(a, running_mean, running_var, weight, bias, momentum, eps):
    return F.instance_norm(a, running_mean, running_var, weight, bias, True, momentum, eps), running_mean, running_var


@instance_norm_update.decomposed_by
def _(a, running_mean, running_var, weight, bias, momentum, eps):
    dims = tuple(range(2, len(a.shape)))
    count = math.prod(a.shape[d] for d in dims)
    centred, mean, variance = moments(convert(a, compute_dtype(a.dtype)), dims)
    y = scale_and_shift(centred * ltorch.rsqrt(variance + eps), per_channel(a, weight), per_channel(a, bias))
    of_channels = (ltorch.mean(x, (0, *dims)) for x in (mean, variance * count / (count - 1)))
    return in_rows(convert(y, a.dtype)), *(
        running(old, new, momentum) for old, new in zip((running_mean, running_var), of_channels, strict=True)
    )


instance_norm_update.nondifferentiable = (1, 2)
instance_norm_update.in_place = InPlaceForm(instance_norm_, {1: 1, 2: 2})


@alias(F.instance_norm, over=instance_norm)
def _instance_norm(
    a, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    """By the statistics of the images the running ones are written to."""
    if not use_input_stats or running_mean is None:
        return instance_norm(a, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    out, mean, var = instance_norm_update(a, running_mean, running_var, weight, bias, momentum, eps)
    inplace.overwrite(running_mean, mean)
    inplace.overwrite(running_var, var)
    return out


@alias(torch.instance_norm)
def _instance_norm_builtin(
    a, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True
):
    return _instance_norm(a, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


# ---------------------------------------------------------------------------------------------------------------- by
# norms, similarities


@composite(F.normalize, meta=lambda a, p=2.0, dim=1, eps=1e-12: like(a), autocast="cuda:float32")
def normalize(a, p=2.0, dim=1, eps=1e-12):
    norm = ltorch.vector_norm(a, p, dim, True)
    return a / ltorch.clamp(norm, eps)


@composite(F.cosine_similarity, autocast="cuda:float32")
def cosine_similarity(x1, x2, dim=1, eps=1e-8):
    shape = broadcast_shapes(x1.shape, x2.shape)
    d = wrap_dim(dim, len(shape))
    x1, x2 = expand(x1, shape), expand(x2, shape)
    lengths = [ltorch.clamp(ltorch.vector_norm(x, 2, d, True), eps) for x in (x1, x2)]
    return ltorch.sum(x1 / lengths[0] * (x2 / lengths[1]), d)


@composite(F.pairwise_distance, autocast="cuda:float32")
def pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    return ltorch.vector_norm(x1 - x2 + eps, p, -1, keepdim)


def _cdist_meta(x1, x2, p=2.0, compute_mode="use_mm_for_euclid_dist_if_necessary"):
    require(len(x1.shape) >= 2 and len(x2.shape) >= 2 and x1.shape[-1] == x2.shape[-1])
    return like(x1, (*broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-2]))


@torch_prim(torch.cdist, torch.functional.cdist, autocast="float32")
def cdist(x1, x2, p=2.0, compute_mode="use_mm_for_euclid_dist_if_necessary"):
    return _cdist_meta(x1, x2, p)


@composite(torch.pdist, F.pdist, autocast="cuda:float32")
def pdist(a, p=2.0):
    """The distances of each row to those after it."""
    require(len(a.shape) == 2 and a.dtype.category == 2 and p >= 0)
    pairs = ltorch.triu_indices(a.shape[0], a.shape[0], 1, device=a.device)
    rows = [ltorch.index_select(a, 0, ltorch.select(pairs, 0, i)) for i in (0, 1)]
    return ltorch.vector_norm(rows[0] - rows[1], p, -1)


@pdist.vjp
def _(a, p=2.0):
    a = ltorch.contiguous(a)
    y = pdist(a, p)
    g = yield y
    return (backward.pdist_backward(g, a, p, y),)


@layer_norm.vjp
def _(a, normalized_shape, weight=None, bias=None, eps=1e-5):
    y, mean, rstd = native_layer_norm(a, list(normalized_shape), weight, bias, eps)
    g = yield y
    ga, gw, gb = native_layer_norm_backward(
        g, a, list(normalized_shape), mean, rstd, weight, bias, wanted(a, weight, bias)
    )
    return ga, None, gw, gb


@group_norm.vjp
def _(a, num_groups, weight=None, bias=None, eps=1e-5):
    if is_empty(a) or weight is None and bias is not None:
        return NotImplemented
    sizes = (a.shape[0], a.shape[1], numel(a.shape[2:]), num_groups)
    y, mean, rstd = native_group_norm(a, weight, bias, *sizes, eps)
    g = yield y
    ga, gw, gb = native_group_norm_backward(g, a, mean, rstd, weight, *sizes, wanted(a, weight, bias))
    return ga, None, gw, gb


kernels.layout.set("row-major", layer_norm)
kernels.layout.set("as decomposition", group_norm, instance_norm, instance_norm_update)
# PyTorch composes these of the same operations
derivatives.composed.set(True, normalize, pairwise_distance)
derivatives.composed.set(lambda a, *args, **kwargs: a.device.type == "cpu", rms_norm)  # elsewhere it is one kernel


batching.rule.set(batching.same, layer_norm)


@splitting.rule(layer_norm, rms_norm)
def _normalized_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Norms over other dimensions than that of the parts."""
    part = split.part(operation.inputs[0])
    if part is None or part.dim >= len(operation.output.shape) - len(operation.args[1]):
        return None
    table = {p: split.copied(p, part.axis) for p in operation.inputs[1:]} | {operation.inputs[0]: part.value}
    return split.computed(operation, table, part.axis, part.dim)
