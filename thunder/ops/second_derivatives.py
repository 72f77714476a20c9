"""Derivatives of PyTorch's backward kernels, in operations: a gradient inside of a program is differentiated again.

A row: a kernel, and the cotangents of its arguments as a function of the result's cotangent `c` and the arguments, the
first of which is the cotangent `g` of the forward. Where the forward is piecewise linear, its operand gets zeros, as in
PyTorch. Those of activations, softmax and convolutions stand in their families. Formulas follow from the kernels'
decompositions; `formula` is the other way. `INEXACT` rows round otherwise than PyTorch's second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.dtypes import COMPLEX
from thunder.core.proxies import TensorProxy
from thunder.ops import backward, ltorch
from thunder.ops.backward import KERNELS, sum_to
from thunder.ops.families.resample import UPSAMPLE
from thunder.ops.families.scatter import gather_backward, index_select_backward
from thunder.ops.registry import LTORCH
from thunder.ops.rules import derivatives

_REDUCTIONS = ("none", "mean", "sum")  # as kernels number them


def _zeros(x: TensorProxy) -> TensorProxy:
    return ltorch.zeros_like(x)


def _conj(x: TensorProxy) -> TensorProxy:
    return ltorch.conj(x) if x.dtype.category == COMPLEX else x


def _where(condition, x, y) -> TensorProxy:
    return ltorch.where(condition, x, y)


# ----------------------------------------------------------------------------------------------------------------
# activations


def _tanh(c, g, y):
    y = _conj(y)
    return KERNELS["tanh_backward"](c, y), _conj(c) * (-2.0 * y * g)


def _sigmoid(c, g, y):
    y = _conj(y)
    return KERNELS["sigmoid_backward"](c, y), _conj(c) * g * (-2.0 * y + 1.0)


# ----------------------------------------------------------------------------------------------------------------
# losses


def _mean(x: TensorProxy, a: TensorProxy, reduction: int) -> TensorProxy:
    return x / a.numel_value if _REDUCTIONS[reduction] == "mean" else x


def _of_difference(name: str, curvature: Callable) -> Callable:
    """A loss of a difference. curvature(x, difference, *options): x times the loss's second derivative."""

    def row(c, g, a, target, reduction, *options):
        first = sum_to(KERNELS[name](c, a, target, reduction, *options), g.shape)
        second = _mean(curvature(c * g, a - target, *options), a, reduction)
        return first, second, -second

    return row


def _within(x, difference, limit: float):
    return x * ltorch.to(ltorch.abs(difference) < limit, dtype=x.dtype)


def _soft_margin(c, g, a, target, reduction):
    first = sum_to(KERNELS["soft_margin_loss_backward"](c, a, target, reduction), g.shape)
    s = ltorch.sigmoid(target * a)
    return first, _mean(c * g * (target * target * s * (1.0 - s)), a, reduction)


def _binary_cross_entropy(c, g, a, target, weight, reduction):
    first = sum_to(KERNELS["binary_cross_entropy_backward"](c, a, target, weight, reduction), g.shape)
    variance = ltorch.clamp((1.0 - a) * a, 1e-12)
    second = c * g * ((a * a - 2.0 * a * target + target) / (variance * variance))
    return first, _mean(second if weight is None else second * weight, a, reduction)


def _likelihood(c, g, a, target, weight, reduction, ignore_index, total):
    # like PyTorch's, which counts the weights again
    return ltorch.nll_loss(c, target, weight, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction]), _zeros(a)


# ----------------------------------------------------------------------------------------------------------------
# pooling


def _at_maxima(rank: int) -> Callable:
    """What stands where a pooling kernel has taken the maxima from; indices are the last argument."""

    def row(c, g, a, *options):
        indices = options[-1]
        rows = ltorch.reshape(c, (*c.shape[:-rank], -1))
        taken = ltorch.gather(rows, -1, ltorch.reshape(indices, (*indices.shape[:-rank], -1)))
        return ltorch.reshape(taken, indices.shape), _zeros(a)

    return row


def _average(rank: int) -> Callable:
    return lambda c, g, a, *options: (LTORCH[f"avg_pool{rank}d"](c, *options), _zeros(a))


def _adaptive_average(rank: int) -> Callable:
    return lambda c, g, a: (LTORCH[f"adaptive_avg_pool{rank}d"](c, g.shape[-rank:]), _zeros(a))


def _border(mode: str) -> Callable:
    return lambda c, g, a, padding: (ltorch.pad(c, padding, mode), _zeros(a))


def _resized(mode: str, rank: int) -> Callable:
    """Options of a kernel: whether corners are aligned, but for "nearest", and for each dimension its scale or None."""

    def row(c, g, sizes, shape, *options):
        corners, scales = options[:-rank], options[-rank:]
        how = {"scale_factor": scales} if scales[0] is not None else {"size": tuple(sizes)}
        plain = mode.removesuffix(" antialias")
        corners = corners[0] if corners else None
        return (ltorch.interpolate(c, **how, mode=plain, align_corners=corners, antialias=plain != mode),)

    return row


# ----------------------------------------------------------------------------------------------------------------
# selections


def _rows(c, g, indices, count, padding_idx, scale):
    """`scale` divides by how often a row is read, which PyTorch's second derivative does not."""
    taken = ltorch.embedding(indices, c)
    if type(padding_idx) is not int or padding_idx >= 0:
        taken = ltorch.masked_fill(taken, ltorch.unsqueeze(indices == padding_idx, -1), 0.0)
    return (taken,)


def _sliced(c, g, sizes, dim, start, end, step):
    return (ltorch.getitem(c, (*(slice(None),) * (dim % len(sizes)), slice(start, end, step))),)


def _indexed(c, g, shape, indices, distinct=False):
    return (ltorch.getitem(c, tuple(slice(None) if i is None else i for i in indices)),)


ROWS: dict[str, Callable] = {
    "_adaptive_avg_pool2d_backward": _adaptive_average(2),
    "_adaptive_avg_pool3d_backward": _adaptive_average(3),
    "adaptive_max_pool2d_backward": _at_maxima(2),
    "adaptive_max_pool3d_backward": _at_maxima(3),
    "avg_pool2d_backward": _average(2),
    "avg_pool3d_backward": _average(3),
    "binary_cross_entropy_backward": _binary_cross_entropy,
    "diagonal_backward": lambda c, g, sizes, *dims: (ltorch.diagonal(c, *dims),),
    "embedding_dense_backward": _rows,
    "huber_loss_backward": _of_difference("huber_loss_backward", _within),
    "max_pool2d_with_indices_backward": _at_maxima(2),
    "max_pool3d_with_indices_backward": _at_maxima(3),
    "mse_loss_backward": _of_difference("mse_loss_backward", lambda x, difference: 2.0 * x),
    "nll_loss2d_backward": _likelihood,
    "nll_loss_backward": _likelihood,
    "reflection_pad1d_backward": _border("reflect"),
    "reflection_pad2d_backward": _border("reflect"),
    "reflection_pad3d_backward": _border("reflect"),
    "replication_pad1d_backward": _border("replicate"),
    "replication_pad2d_backward": _border("replicate"),
    "replication_pad3d_backward": _border("replicate"),
    "select_backward": lambda c, g, sizes, dim, index: (ltorch.select(c, dim, index),),
    "sigmoid_backward": _sigmoid,
    "slice_backward": _sliced,
    "smooth_l1_loss_backward": _of_difference(
        "smooth_l1_loss_backward", lambda x, difference, beta: _within(x, difference, beta) / beta
    ),
    "soft_margin_loss_backward": _soft_margin,
    "tanh_backward": _tanh,
    "unfold_backward": lambda c, g, sizes, *window: (ltorch.unfold(c, *window),),
}

ROWS |= {f"{name}_backward": _resized(mode, rank) for (mode, rank), name in UPSAMPLE.items()}

INEXACT = (
    "binary_cross_entropy_backward",
    "soft_margin_loss_backward",
)

OPERANDS = {
    "huber_loss_backward": (0, 1, 2),
    "mse_loss_backward": (0, 1, 2),
    "smooth_l1_loss_backward": (0, 1, 2),
}
"""Positions of the arguments that a row has cotangents for; of others the first two."""

derivatives.inexact.add(*(KERNELS[name] for name in INEXACT))
for _name, _row in ROWS.items():
    backward.gradients_of(KERNELS[_name], _row, OPERANDS.get(_name, (0, 1)))

backward.gradients_of(backward.index_backward, _indexed)
backward.gradients_of(backward.getitem_backward, lambda c, g, shape, key: (ltorch.getitem(c, key),))
backward.gradients_of(gather_backward, lambda c, g, dim, index, shape: (ltorch.gather(c, dim, index),))
backward.gradients_of(index_select_backward, lambda c, g, dim, index, shape: (ltorch.index_select(c, dim, index),))
