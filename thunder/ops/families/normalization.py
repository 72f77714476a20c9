"""softmax and its kin, and normalizations by statistics: layer, RMS, group, batch and instance norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core import dtypes
from thunder.core.definition import InPlaceForm
from thunder.core.proxies import NumberProxy, like
from thunder.ops import backward
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.data import convert
from thunder.ops.families.norm_kernels import (
    batch_norm_by_batch,
    batch_norm_meta,
    check_channels,
    compute_dtype,
    moments,
    native_batch_norm,
    native_batch_norm_backward,
    native_batch_norm_functional,
    native_group_norm,
    native_group_norm_backward,
    native_layer_norm,
    native_layer_norm_backward,
    normalized_dims,
    normalized_in_groups,
    per_channel,
    running,
    scale_and_shift,
    wanted,
    whiten,
)  # fmt: skip
from thunder.ops.families.shape import expand
from thunder.ops.functionalize import inplace
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import LTORCH, alias, composite, torch_prim
from thunder.ops.rules import derivatives, kernels
from thunder.ops.shape_rules import is_empty, numel, require, wrap_dim

_EPS = {
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}


# ----------------------------------------------------------------------------------------------------------------
# softmax


def _softmax_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """softmax(a, dim, dtype=): what F.softmax and Tensor.softmax take besides is left out, its implicit dimension
    written down."""
    a, dim, *rest = (*args, None) if len(args) == 1 else args
    found = kwargs.get("dtype", next((x for x in reversed(rest) if x is not None and type(x) is not int), None))
    if unknown := kwargs.keys() - {"dtype", "_stacklevel"}:
        raise TypeError(f"softmax() got an unexpected keyword argument {min(unknown)!r}")
    if dim is None:
        dim = 0 if len(a.shape) in (0, 1, 3) else 1
    return (a, dim), {} if found is None else {"dtype": dtypes.to_dtype(found)}


def _softmax_meta(a, dim, *, dtype=None):
    wrap_dim(dim, len(a.shape))
    require(dtype is not None or a.dtype.category >= 2)
    return like(a, dtype=dtype)


def _exponentials(a, dim, dtype):
    """`a` less its maximum, and the dtype to compute in and to return."""
    out = dtype or a.dtype
    x = convert(convert(a, out), compute_dtype(out))
    return (x - LTORCH["amax"](x, dim, True) if _has_elements(a) else x), out


def _has_elements(a) -> bool:
    return not is_empty(a)


_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax)
_LOG_SOFTMAX = (torch.log_softmax, torch.Tensor.log_softmax, F.log_softmax, torch.special.log_softmax)


@composite(*_SOFTMAX, meta=_softmax_meta, canonicalize=_softmax_arguments, autocast="cuda:float32")
def softmax(a, dim=None, *, dtype=None):
    x, out = _exponentials(a, dim, dtype)
    e = LTORCH["exp"](x)
    return _in_rows(convert(e / LTORCH["sum"](e, dim, True), out))


@composite(*_LOG_SOFTMAX, meta=_softmax_meta, canonicalize=_softmax_arguments, autocast="cuda:float32")
def log_softmax(a, dim=None, *, dtype=None):
    x, out = _exponentials(a, dim, dtype)
    return _in_rows(convert(x - LTORCH["log"](LTORCH["sum"](LTORCH["exp"](x), dim, True)), out))


def _in_rows(y):
    """As PyTorch's kernels lay out their results, whatever their argument's layout is."""
    return LTORCH["contiguous"](y)


def _of_softmax(grad_output, output, dim, input_dtype):
    require(grad_output.shape == output.shape)
    return like(grad_output, dtype=dtypes.to_dtype(input_dtype))


softmax_backward = backward.kernel("_softmax_backward_data", "default", _of_softmax, public="softmax_backward")
log_softmax_backward = backward.kernel(
    "_log_softmax_backward_data", "default", _of_softmax, public="log_softmax_backward"
)


@softmax_backward.decomposed_by
def _(g, y, dim, dtype):
    gy = g * y
    return convert(gy - y * LTORCH["sum"](gy, dim, True), dtypes.to_dtype(dtype))


@log_softmax_backward.decomposed_by
def _(g, y, dim, dtype):
    return convert(g - LTORCH["exp"](y) * LTORCH["sum"](g, dim, True), dtypes.to_dtype(dtype))


def _exponential_rule(symbol, kernel):
    """softmax and log_softmax: the kernel reads the result; the cotangent returns to the argument's type."""

    def rule(a, dim=None, *, dtype=None):
        y = symbol(a, dim, dtype=dtype)
        g = yield y
        return (convert(kernel(g, y, wrap_dim(dim, len(a.shape)), y.dtype), a.dtype),)

    symbol.vjp(rule)


_exponential_rule(softmax, softmax_backward)
_exponential_rule(log_softmax, log_softmax_backward)


@composite(*compat.operators("_safe_softmax"))
def _safe_softmax(a, dim, dtype=None):
    """softmax, 0 where all of a row is -inf."""
    out = softmax(a, dim, dtype=dtype)
    hidden = LTORCH["all"](LTORCH["eq"](a, float("-inf")), dim, True)
    return LTORCH["where"](hidden, 0.0, out)


gradient_of_first(
    _safe_softmax, lambda g, y, a, dim, dtype=None: convert(softmax_backward(g, y, dim, y.dtype), a.dtype)
)


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
    x = x * LTORCH["rsqrt"](
        LTORCH["mean"](LTORCH["pow"](x, 2), dims, True) + (_EPS[x.dtype.name] if eps is None else eps)
    )
    return _in_rows(convert(x if weight is None else x * weight, a.dtype))


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


@composite(F.batch_norm, meta=batch_norm_meta)
def batch_norm(a, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    x = convert(a, compute_dtype(a.dtype))
    if training:
        x, _, _ = whiten(x, (0, *range(2, len(a.shape))), eps)
    else:
        mean, var = (per_channel(a, convert(p, x.dtype)) for p in (running_mean, running_var))
        x = (x - mean) * LTORCH["rsqrt"](var + eps)
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
    y, _, _, *kept = batch_norm_by_batch(a, running_mean, running_var, weight, bias, momentum, eps, a.dtype)
    return y, *kept


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
    if not training or running_mean is None or not _has_elements(a):
        return batch_norm(a, running_mean, running_var, weight, bias, training, momentum, eps)
    if not isinstance(momentum, NumberProxy) and momentum == 0.0:
        return batch_norm(a, None, None, weight, bias, True, momentum, eps)
    out, mean, var = batch_norm_update(a, running_mean, running_var, weight, bias, momentum, eps)
    inplace.overwrite(running_mean, mean)
    inplace.overwrite(running_var, var)
    return out


@alias(torch.batch_norm)
def _batch_norm_builtin(a, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    return _batch_norm(a, running_mean, running_var, weight, bias, training, momentum, eps)


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
    return _in_rows(convert(scale_and_shift(x, per_channel(a, weight), per_channel(a, bias)), a.dtype))


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
    y = scale_and_shift(centred * LTORCH["rsqrt"](variance + eps), per_channel(a, weight), per_channel(a, bias))
    of_channels = (LTORCH["mean"](x, (0, *dims)) for x in (mean, variance * count / (count - 1)))
    return _in_rows(convert(y, a.dtype)), *(
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
    norm = LTORCH["vector_norm"](a, p, dim, True)
    return a / LTORCH["clamp"](norm, eps)


@composite(F.cosine_similarity, autocast="cuda:float32")
def cosine_similarity(x1, x2, dim=1, eps=1e-8):
    shape = broadcast_shapes(x1.shape, x2.shape)
    d = wrap_dim(dim, len(shape))
    x1, x2 = expand(x1, shape), expand(x2, shape)
    lengths = [LTORCH["clamp"](LTORCH["vector_norm"](x, 2, d, True), eps) for x in (x1, x2)]
    return LTORCH["sum"](x1 / lengths[0] * (x2 / lengths[1]), d)


@composite(F.pairwise_distance, autocast="cuda:float32")
def pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False):
    return LTORCH["vector_norm"](x1 - x2 + eps, p, -1, keepdim)


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
    pairs = LTORCH["triu_indices"](a.shape[0], a.shape[0], 1, device=a.device)
    rows = [LTORCH["index_select"](a, 0, LTORCH["select"](pairs, 0, i)) for i in (0, 1)]
    return LTORCH["vector_norm"](rows[0] - rows[1], p, -1)


@pdist.vjp
def _(a, p=2.0):
    a = LTORCH["contiguous"](a)
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


@batch_norm.vjp
def _(a, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """By PyTorch's own kernels, not by cuDNN's. For no elements it takes none, and the kernel divides by their
    number."""
    if not _has_elements(a) or weight is None and bias is not None or (training and running_mean is not None):
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


kernels.layout.set("as decomposition", batch_norm_update)
kernels.layout.set("row-major", softmax, log_softmax, layer_norm, softmax_backward, log_softmax_backward)
# PyTorch composes these of the same operations
derivatives.composed.set(True, normalize, pairwise_distance)
derivatives.composed.set(lambda a, *args, **kwargs: a.device.type == "cpu", rms_norm)  # elsewhere it is one kernel
