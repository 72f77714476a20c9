"""Losses. `size_average` and `reduce`, PyTorch's older spellings of `reduction`, are accepted and written as
`reduction`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch.nn.functional as F

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like, same_shape
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.ops import backward, ltorch
from thunder.ops.backward import sum_to
from thunder.ops.families.data import convert
from thunder.ops.families.norm_kernels import compute_dtype
from thunder.ops.families.shape import reshape, unsqueeze
from thunder.ops.families.softmax import log_softmax
from thunder.ops.promotion import broadcast_shapes, result_type, to_float
from thunder.ops.registry import composite
from thunder.ops.rules import derivatives, effects, kernels, operands, splitting
from thunder.ops.shape_rules import is_empty, require

_REDUCTIONS = ("none", "mean", "sum")


def _reduction(reduction: str, size_average, reduce) -> str:
    if size_average is None and reduce is None:
        require(reduction in _REDUCTIONS)
        return reduction
    size_average, reduce = size_average is not False, reduce is not False
    return "mean" if size_average and reduce else "sum" if reduce else "none"


def reduced(values, reduction: str):
    return values if reduction == "none" else (ltorch.mean if reduction == "mean" else ltorch.sum)(values)


# ---------------------------------------------------------------------------------------------------------------- of
# two tensors of one shape


def pointwise(
    name: str, function: Callable, formula: Callable, *, options: tuple[tuple[str, object], ...] = (),
        floats: bool = False, real: bool = False
) -> Symbol:  # fmt: skip
    """A loss that is a formula of input and target, element by element, then reduced.

    options: parameters between target and reduction with their defaults, in PyTorch's order. floats: integers give a
    float. real: complex numbers give their absolute value's type.
    """
    order = [n for n, _ in options]
    defaults = dict(options)

    def spread(args: tuple, kwargs: dict) -> dict:
        return {**defaults, **dict(zip(order, args, strict=False)), **kwargs}

    def meta(a, target, *args, **kwargs):
        values = spread(args, kwargs)
        how = _reduction(values["reduction"], values.get("size_average"), values.get("reduce"))
        shape = broadcast_shapes(a.shape, target.shape)
        dtype = dtypes.real_of(result_type(a, target)) if real else result_type(a, target)
        return like(a, shape if how == "none" else (), to_float(dtype) if floats else dtype)

    def decomposition(a, target, *args, **kwargs):
        values = spread(args, kwargs)
        how = _reduction(values.pop("reduction"), values.pop("size_average", None), values.pop("reduce", None))
        return reduced(formula(a, target, **values), how)

    return composite(function, name=name, meta=meta, autocast="float32")(decomposition)


_LEGACY = (("size_average", None), ("reduce", None), ("reduction", "mean"))


def _where(condition, a, b):
    return ltorch.where(condition, a, b)


def _smooth_l1(a, target, beta=1.0):
    d = ltorch.abs(a - target)
    return d if beta == 0.0 else _where(d < beta, 0.5 * d * d / beta, d - 0.5 * beta)


def _huber(a, target, delta=1.0, weight=None):
    d = ltorch.abs(a - target)
    out = _where(d <= delta, 0.5 * d * d, delta * (d - 0.5 * delta))
    return out if weight is None else out * weight


def _mse(a, target, weight=None):
    d = a - target
    return d * d if weight is None else d * d * weight


def _l1(a, target, weight=None):
    d = ltorch.abs(a - target)
    return d if weight is None else d * weight


mse_loss = pointwise("mse_loss", F.mse_loss, _mse, options=(*_LEGACY, ("weight", None)))
l1_loss = pointwise("l1_loss", F.l1_loss, _l1, options=(*_LEGACY, ("weight", None)), real=True)
smooth_l1_loss = pointwise("smooth_l1_loss", F.smooth_l1_loss, _smooth_l1, options=(*_LEGACY, ("beta", 1.0)))
huber_loss = pointwise(
    "huber_loss", F.huber_loss, _huber, options=(("reduction", "mean"), ("delta", 1.0), ("weight", None))
)
soft_margin_loss = pointwise(
    "soft_margin_loss", F.soft_margin_loss, lambda a, target: ltorch.log1p(ltorch.exp(-target * a)), options=_LEGACY
)


def _poisson(a, target, log_input=True, full=False, eps=1e-8):
    out = ltorch.exp(a) - target * a if log_input else a - target * ltorch.log(a + eps)
    if full:
        stirling = target * ltorch.log(target) - target + 0.5 * ltorch.log(2 * math.pi * target)
        out = out + _where(target <= 1, 0.0, stirling)
    return out


poisson_nll_loss = pointwise(
    "poisson_nll_loss", F.poisson_nll_loss, _poisson, floats=True,
    options=(("log_input", True), ("full", False), ("size_average", None), ("eps", 1e-8), ("reduce", None),
        ("reduction", "mean")),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- of
# probabilities


@composite(F.binary_cross_entropy, autocast="cpu:float32 cuda:banned")
def binary_cross_entropy(a, target, weight=None, size_average=None, reduce=None, reduction="mean"):
    require(a.shape == target.shape)
    logs = [ltorch.clamp(ltorch.log(x), -100.0) for x in (a, 1.0 - a)]
    out = (target - 1.0) * logs[1] - target * logs[0]
    return reduced(out if weight is None else out * weight, _reduction(reduction, size_average, reduce))


@composite(F.binary_cross_entropy_with_logits, autocast="float32")
def binary_cross_entropy_with_logits(
    a, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None
):
    require(a.shape == target.shape)
    log_sigmoid = -(ltorch.log1p(ltorch.exp(-ltorch.abs(a))) + ltorch.clamp(-a, 0.0))
    if pos_weight is not None:
        out = (1 - target) * a - ((pos_weight - 1) * target + 1) * log_sigmoid
    else:
        out = (1 - target) * a - log_sigmoid
    return reduced(out if weight is None else out * weight, _reduction(reduction, size_average, reduce))


@composite(F.kl_div, autocast="float32")
def kl_div(a, target, size_average=None, reduce=None, reduction="mean", log_target=False):
    if log_target:
        out = ltorch.exp(target) * (target - a)
    else:
        out = ltorch.xlogy(target, target) - target * a
    if reduction == "batchmean" and a.shape:
        return ltorch.sum(out) / a.shape[0]
    return reduced(out, "mean" if reduction == "batchmean" else _reduction(reduction, size_average, reduce))


# ---------------------------------------------------------------------------------------------------------------- of
# classes


def _check_classes(a, weight) -> None:
    require(a.shape)
    classes = a.shape[1] if len(a.shape) > 1 else a.shape[0]
    require(weight is None or weight.shape == (classes,))


def _index_shape(a) -> tuple:
    """The shape of a target of class indices for scores `a`."""
    return () if len(a.shape) == 1 else (a.shape[0], *a.shape[2:])


def _nll_meta(a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    _check_classes(a, weight)
    require(target.shape == _index_shape(a))
    require(target.dtype.name in ("int64", "uint8"))
    return like(a, target.shape if _reduction(reduction, size_average, reduce) == "none" else ())


def _picked(a, target, weight, ignore_index):
    """-weight * a at the target classes, 0 where the target is ignored; and those weights."""
    d = 1 if len(a.shape) > 1 else 0
    is_counted = ltorch.ne(target, ignore_index)
    index = _where(is_counted, target, 0)
    values = ltorch.squeeze(ltorch.gather(a, d, unsqueeze(index, d)), d)
    weights = convert(is_counted, a.dtype)
    if weight is not None:
        weights = _where(is_counted, reshape(ltorch.index_select(weight, 0, reshape(index, (-1,))), target.shape), 0.0)
    return _where(is_counted, -values * weights, 0.0), weights


@composite(F.nll_loss, meta=_nll_meta, autocast="float32")
def nll_loss(a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    values, weights = _picked(a, target, weight, ignore_index)
    how = _reduction(reduction, size_average, reduce)
    return ltorch.sum(values) / ltorch.sum(weights) if how == "mean" else reduced(values, how)


def _is_index_target(a, target) -> bool:
    return target.dtype.category < 2 or not same_shape(target.shape, a.shape)


def _cross_entropy_meta(
    a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    _check_classes(a, weight)
    how = _reduction(reduction, size_average, reduce)
    if not _is_index_target(a, target):
        return like(a, _index_shape(a) if how == "none" else ())
    require(target.dtype.name in ("int64", "uint8"))
    require(target.shape == _index_shape(a))
    return like(a, target.shape if how == "none" else ())


@composite(F.cross_entropy, meta=_cross_entropy_meta, autocast="float32")
def cross_entropy(
    a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    """The decomposition of `cross_entropy`: a log-softmax, and the loss for class indices or for probabilities."""
    how = _reduction(reduction, size_average, reduce)
    d = 1 if len(a.shape) > 1 else 0
    logs = log_softmax(convert(a, compute_dtype(a.dtype)), d)
    if not _is_index_target(a, target):
        out = _soft_cross_entropy(logs, target, weight, label_smoothing, how, d)
    elif label_smoothing == 0.0:
        out = nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=how)
    else:
        out = _smoothed(logs, target, weight, ignore_index, label_smoothing, how, d)
    return convert(out, a.dtype)


@splitting.total(cross_entropy)
def _loss_of_parts(split: splitting.Split, operation: BoundSymbol) -> TensorProxy | None:
    """Losses of this rank's rows, whose targets are numbers of classes: their sum, by the number of all targets that
    count, or by the sum of their weights."""
    named = functools.partial(splitting.argument, operation)
    a, target, weight, ignored = (named(n) for n in ("a", "target", "weight", "ignore_index"))
    part, how = split.part(a), _reduction(named("reduction"), named("size_average"), named("reduce"))
    classes = 1 if len(a.shape) > 1 else 0
    if part is None or how == "none" or not _is_index_target(a, target):
        return None
    if part.dim == classes:
        is_plain = weight is None and not named("label_smoothing") and len(a.shape) == 2 and split.part(target) is None
        is_even = part.value.shape[1] * part.axis.size == a.shape[1]
        return _loss_of_classes(split, part, target, ignored, how) if is_plain and is_even else None
    rows = 0 if part.dim == 0 else part.dim - 1
    known = split.part(target)
    if known is not None and (known.axis, known.dim) != (part.axis, rows):
        return None
    own = split.cut(target, part.axis, rows) if known is None else known.value
    weight = None if weight is None else split.copied(weight, part.axis)
    smoothing = named("label_smoothing")
    losses = cross_entropy(part.value, own, weight, ignore_index=ignored, reduction="sum", label_smoothing=smoothing)
    total = split.summed_over(losses, part.axis)
    if how == "sum":
        return total
    weights = _picked(part.value, own, weight, ignored)[1]
    return ltorch.to(ltorch.div(total, split.summed_over(ltorch.sum(weights), part.axis)), dtype=a.dtype)


def _loss_of_classes(split: splitting.Split, part: splitting.Part, target, ignored: int, how: str) -> TensorProxy:
    """Losses where each rank has the logits of some of the classes (M. Shoeybi et al. 2019, "Megatron-LM", section 3):
    what the ranks exchange are the largest logit of each row, the sum of exponentials and the logit of the target. A
    target that is none of the classes has no weight, and raises on every rank."""
    logits, dtype, count = part.value, part.value.dtype, part.value.shape[1]
    logits = ltorch.to(logits, dtype=compute_dtype(dtype))
    is_counted = ltorch.ne(target, ignored)
    ones = ltorch.full((count * part.axis.size,), 1.0, dtype=logits.dtype, device=target.device)
    weights = _where(is_counted, ltorch.index_select(ones, 0, _where(is_counted, target, 0)), 0.0)
    largest = split.largest_over(ltorch.amax(ltorch.detach(logits), 1, True), part.axis)
    shifted = ltorch.sub(logits, largest)
    places = ltorch.arange(part.axis.rank * count, (part.axis.rank + 1) * count, device=target.device)
    is_target = ltorch.eq(ltorch.unsqueeze(target, 1), places)
    own = [ltorch.exp(shifted), _where(is_target, shifted, 0.0)]
    sums = split.summed_over(ltorch.stack([ltorch.sum(x, 1) for x in own]), part.axis)
    total, picked = (ltorch.squeeze(x, 0) for x in ltorch.chunk(sums, 2, 0))
    loss = ltorch.sum(_where(is_counted, ltorch.sub(ltorch.log(total), picked), 0.0) * weights)
    loss = loss if how == "sum" else ltorch.div(loss, ltorch.sum(weights))
    return ltorch.to(loss, dtype=dtype)


def _along_classes(weight, logs, d: int):
    return reshape(weight, tuple(logs.shape[d] if i == d else 1 for i in range(len(logs.shape))))


def _soft_cross_entropy(logs, target, weight, smoothing, how: str, d: int):
    if smoothing > 0.0:
        target = target * (1 - smoothing) + smoothing / logs.shape[d]
    out = logs * target
    out = -ltorch.sum(out if weight is None else out * _along_classes(weight, logs, d), d)
    return ltorch.sum(out) / (logs.numel_value // logs.shape[d]) if how == "mean" else reduced(out, how)


def _smoothed(logs, target, weight, ignore_index, smoothing, how: str, d: int):
    values, weights = _picked(logs, target, weight, ignore_index)
    spread = -ltorch.sum(logs if weight is None else logs * _along_classes(weight, logs, d), d)
    spread = _where(ltorch.ne(target, ignore_index), spread, 0.0)
    if how == "mean":
        total = ltorch.sum(weights)
        values, spread = ltorch.sum(values) / total, ltorch.sum(spread) / total
    else:
        values, spread = reduced(values, how), reduced(spread, how)
    return (1 - smoothing) * values + smoothing / logs.shape[d] * spread


# ---------------------------------------------------------------------------------------------------------------- of
# pairs and triples


@composite(F.margin_ranking_loss, autocast="float32")
def margin_ranking_loss(input1, input2, target, margin=0.0, size_average=None, reduce=None, reduction="mean"):
    return reduced(ltorch.clamp(-target * (input1 - input2) + margin, 0.0), _reduction(reduction, size_average, reduce))


@composite(F.hinge_embedding_loss, autocast="float32")
def hinge_embedding_loss(a, target, margin=1.0, size_average=None, reduce=None, reduction="mean"):
    apart = _where(ltorch.ne(target, 1), ltorch.clamp(margin - a, 0.0), 0.0)
    return reduced(apart + _where(ltorch.ne(target, -1), a, 0.0), _reduction(reduction, size_average, reduce))


@composite(F.cosine_embedding_loss, autocast="float32")
def cosine_embedding_loss(input1, input2, target, margin=0.0, size_average=None, reduce=None, reduction="mean"):
    d = len(target.shape)
    products = [ltorch.sum(x * y, d) for x, y in ((input1, input2), (input1, input1), (input2, input2))]
    cosine = products[0] / ltorch.sqrt((products[1] + 1e-12) * (products[2] + 1e-12))
    out = _where(ltorch.eq(target, 1), 1.0 - cosine, 0.0) + _where(
        ltorch.eq(target, -1), ltorch.clamp(cosine - margin, 0.0), 0.0
    )
    return reduced(out, _reduction(reduction, size_average, reduce))


@composite(F.triplet_margin_loss, autocast="float32")
def triplet_margin_loss(
    anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False, size_average=None, reduce=None, reduction="mean"
):
    """The decomposition of `triplet_margin_loss`."""

    def distance(x, y):
        return ltorch.pairwise_distance(x, y, p, eps)

    far = distance(anchor, negative)
    if swap:
        far = ltorch.minimum(far, distance(positive, negative))
    return reduced(
        ltorch.clamp(distance(anchor, positive) - far + margin, 0.0), _reduction(reduction, size_average, reduce)
    )


# ----------------------------------------------------------------------------------------------------------------
# derivatives: PyTorch's kernels


def _pointwise_kernel(name: str):
    return backward.kernel(name, "default", lambda g, a, target, *options: like(a))


_KERNELS = {
    n: _pointwise_kernel(f"{n}_backward")
    for n in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
}


def _per_element(g, a, reduction: int):
    """The cotangent of each element's loss."""
    return g / a.numel_value if _REDUCTIONS[reduction] == "mean" else g


@_KERNELS["mse_loss"].decomposed_by
def _(g, a, target, reduction):
    return (a - target) * _per_element(2.0 * g, a, reduction)


@_KERNELS["smooth_l1_loss"].decomposed_by
def _(g, a, target, reduction, beta):
    return _bounded(a - target, beta) / beta * _per_element(g, a, reduction)


@_KERNELS["huber_loss"].decomposed_by
def _(g, a, target, reduction, delta):
    return _bounded(a - target, delta) * _per_element(g, a, reduction)


@_KERNELS["binary_cross_entropy"].decomposed_by
def _(g, a, target, weight, reduction):
    slope = (a - target) / ltorch.clamp((1.0 - a) * a, 1e-12)
    return (slope if weight is None else slope * weight) * _per_element(g, a, reduction)


def _bounded(x, limit: float):
    return _where(x <= -limit, -limit, _where(x >= limit, limit, x))


def _kernel_rule(symbol: Symbol, options: Callable, symmetric: bool = True) -> None:
    """A loss of two tensors of one type whose kernel gives the cotangent of either. options: (values by name) -> what
    the kernel takes besides, None: another way."""
    defaults = {"size_average": None, "reduce": None, "reduction": "mean"}
    name = symbol.name
    order = {
        "mse_loss": (*_LEGACY, ("weight", None)),
        "smooth_l1_loss": (*_LEGACY, ("beta", 1.0)),
        "soft_margin_loss": _LEGACY,
    }.get(name, (("reduction", "mean"), ("delta", 1.0), ("weight", None)))

    def rule(a, target, *args, **kwargs):
        values = {**defaults, **dict(order), **dict(zip((n for n, _ in order), args, strict=False)), **kwargs}
        extra = options(values)
        how = _reduction(values["reduction"], values["size_average"], values["reduce"])
        if extra is None or a.dtype is not target.dtype or (target.requires_grad and not symmetric):
            return NotImplemented
        g = yield symbol(a, target, *args, **kwargs)
        shape = broadcast_shapes(a.shape, target.shape)
        x, y = (t if same_shape(t.shape, shape) else ltorch.expand(t, shape) for t in (a, target))
        gradients = [
            sum_to(_KERNELS[name](g, one, other, _REDUCTIONS.index(how), *extra), t.shape) if t.requires_grad else None
            for t, one, other in ((a, x, y), (target, y, x))
        ]
        return tuple(gradients)

    symbol.vjp(rule)


_kernel_rule(mse_loss, lambda values: () if values["weight"] is None else None)
_kernel_rule(smooth_l1_loss, lambda values: (values["beta"],) if values["beta"] != 0.0 else None)
_kernel_rule(huber_loss, lambda values: (values["delta"],) if values["weight"] is None else None)
_kernel_rule(soft_margin_loss, lambda values: (), symmetric=False)


@binary_cross_entropy.vjp
def _(a, target, weight=None, size_average=None, reduce=None, reduction="mean"):
    if target.requires_grad or (weight is not None and weight.requires_grad) or target.dtype is not a.dtype:
        return NotImplemented
    g = yield binary_cross_entropy(a, target, weight, size_average, reduce, reduction)
    if weight is not None and weight.shape != a.shape:
        weight = ltorch.expand(weight, a.shape)
    how = _reduction(reduction, size_average, reduce)
    return (_KERNELS["binary_cross_entropy"](g, a, target, weight, _REDUCTIONS.index(how)),)


@binary_cross_entropy_with_logits.vjp
def _(a, target, weight=None, size_average=None, reduce=None, reduction="mean", pos_weight=None):
    if any(t is not None and t.requires_grad for t in (target, weight, pos_weight)):
        return NotImplemented
    g = yield binary_cross_entropy_with_logits(a, target, weight, size_average, reduce, reduction, pos_weight)
    if pos_weight is None:
        slope = ltorch.sigmoid(a) - target
    else:
        positive = pos_weight * target
        slope = (positive + 1 - target) * ltorch.sigmoid(a) - positive
    slope = slope * g if weight is None else slope * g * weight
    return (slope / a.numel_value if _reduction(reduction, size_average, reduce) == "mean" else slope,)


def _nll_forward_meta(a, target, weight, reduction, ignore_index):
    return like(a, target.shape if reduction == 0 else ()), like(a, ())


def _nll_backward_meta(g, a, target, weight, reduction, ignore_index, total):
    return like(a)


_NLL = {
    flat: (
        backward.kernel(f"{name}_forward", "default", _nll_forward_meta, tags=(OpTags.REDUCTION_OP,)),
        backward.kernel(f"{name}_backward", "default", _nll_backward_meta, public=f"{name}_backward"),
    )
    for flat, name in ((True, "nll_loss"), (False, "nll_loss2d"))
}
for _, _backward in _NLL.values():
    operands.holds.set(operands.of_classes, _backward)
    operands.by_values.add(_backward)


def _forward_rule(forward: Symbol, back: Symbol) -> None:
    def rule(a, target, weight, reduction, ignore_index):
        loss, total = forward(a, target, weight, reduction, ignore_index)
        g, _ = yield loss, total
        return (back(g, a, target, weight, reduction, ignore_index, total),)

    forward.vjp(rule)
    forward.nondifferentiable = (1,)  # the sum of the weights


for _symbols in _NLL.values():
    _forward_rule(*_symbols)


@_NLL[True][0].decomposed_by
def _(a, target, weight, reduction, ignore_index):
    values, weights = _picked(a, target, weight, ignore_index)
    total = ltorch.sum(weights)
    loss = values if reduction == 0 else ltorch.sum(values)
    return loss / total if _REDUCTIONS[reduction] == "mean" else loss, total


@_NLL[True][1].decomposed_by
def _(g, a, target, weight, reduction, ignore_index, total):
    if weight is not None:
        return None
    classes = ltorch.arange(0, a.shape[-1], 1, device=a.device, dtype=target.dtype)
    here = ltorch.logical_and(ltorch.eq(classes, unsqueeze(target, -1)), ltorch.ne(unsqueeze(target, -1), ignore_index))
    g = -g / total if _REDUCTIONS[reduction] == "mean" else -g
    return _where(here, unsqueeze(g, -1) if g.shape else g, 0.0)


def _likelihood(a, target, weight, how: str, ignore_index: int):
    """PyTorch's nll_loss of any rank: (the loss, a function from its cotangent to that of `a`). Other ranks than 1, 2
    and 4 are made four dimensions."""
    reduction = _REDUCTIONS.index(how)
    forward, back = _NLL[len(a.shape) <= 2]
    x, t = a, target
    if len(a.shape) > 2 and len(a.shape) != 4:
        x, t = reshape(a, (a.shape[0], a.shape[1], 1, -1)), reshape(target, (target.shape[0], 1, -1))
    out, total = forward(x, t, weight, reduction, ignore_index)
    shaped = x is not a and how == "none"

    def gradient(g):
        gradient_of_x = back(reshape(g, t.shape) if shaped else g, x, t, weight, reduction, ignore_index, total)
        return gradient_of_x if x is a else reshape(gradient_of_x, a.shape)

    return reshape(out, target.shape) if shaped else out, gradient


def _has_kernel(a, weight) -> bool:
    return not (weight is not None and weight.requires_grad) and not is_empty(a)


@nll_loss.vjp
def _(a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"):
    if not _has_kernel(a, weight):
        return NotImplemented
    out, gradient = _likelihood(a, target, weight, _reduction(reduction, size_average, reduce), ignore_index)
    g = yield out
    return (gradient(g),)


@cross_entropy.vjp
def _(a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):
    if not _is_index_target(a, target) or label_smoothing != 0.0 or not _has_kernel(a, weight):
        return NotImplemented
    d = 1 if len(a.shape) > 1 else 0
    logs = log_softmax(a, d)
    out, gradient = _likelihood(logs, target, weight, _reduction(reduction, size_average, reduce), ignore_index)
    g = yield out
    return (ltorch.log_softmax_backward(gradient(g), logs, d, a.dtype),)


# PyTorch composes these of the same operations
derivatives.composed.set(
    True, l1_loss, poisson_nll_loss, margin_ranking_loss, hinge_embedding_loss, cosine_embedding_loss
)
effects.checks_data.add(ltorch.binary_cross_entropy, *(forward for forward, _ in _NLL.values()))
kernels.layout.set("row-major", *(symbol for both in _NLL.values() for symbol in both))
kernels.layout.set("own", kl_div)
for _loss in (ltorch.nll_loss, ltorch.cross_entropy):  # classes that are out of range
    effects.may_raise.add(_loss, when=lambda operation: all(i.dtype.category < 2 for i in operation.inputs[1:2]))
