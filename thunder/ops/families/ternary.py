"""Elementwise operations of three operands, and those made of them: choice, bounds, filling, interpolation."""

from __future__ import annotations

import math

import torch

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.ops import ltorch, prims
from thunder.ops.backward import gradient_of_first, logit_backward, sum_to
from thunder.ops.corners import drops_far_bounds, kept_at_bounds
from thunder.ops.families.data import convert
from thunder.ops.families.elementwise import broadcast_to, named_alike, spellings_of
from thunder.ops.promotion import broadcast_shapes, result_type, same_device, to_float
from thunder.ops.registry import LTORCH, alias, composite, prim
from thunder.ops.rules import batching, kernels, splitting
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import require_fit, to_torch_dtype

isnan = ltorch.isnan


def _elementwise_meta(*operands) -> TensorProxy:
    """The type of an elementwise result of tensors and numbers."""
    tensors = [x for x in operands if type(x) is TensorProxy]
    return like(
        tensors[0], broadcast_shapes(*(t.shape for t in tensors)), result_type(*operands), same_device(*tensors)
    )


@prim(torch.where, name="where")
def where_prim(condition, a, b):
    t = a if type(a) is TensorProxy else b if type(b) is TensorProxy else condition
    return like(t, condition.shape, result_type(a, b), condition.device)


def _where_meta(condition, input=None, other=None):
    if input is None and other is None:
        return ltorch.nonzero.meta(condition, as_tuple=True)  # type: ignore[misc]
    require(input is not None and other is not None)
    require(condition.dtype is dtypes.bool8 or condition.dtype is dtypes.uint8)
    tensors = [x for x in (condition, input, other) if type(x) is TensorProxy]
    kind = result_type(input, other)
    require_fit(kind, input, other)
    return like(condition, broadcast_shapes(*(t.shape for t in tensors)), kind, same_device(*tensors))


@composite(torch.where, meta=_where_meta)
def where(condition, input=None, other=None):
    if input is None:
        return ltorch.nonzero(condition, as_tuple=True)
    shape = broadcast_shapes(*(t.shape for t in (condition, input, other) if type(t) is TensorProxy))
    kind = result_type(input, other)
    a, b = (broadcast_to(convert(x, kind), shape) if type(x) is TensorProxy else x for x in (input, other))
    return where_prim(broadcast_to(convert(condition, dtypes.bool8), shape), a, b)


@where.vjp
def _(condition, input=None, other=None):
    g = yield where(condition, input, other)
    branches = tuple(x if type(x) is TensorProxy else None for x in (input, other))
    left = sum_to(where(condition, g, 0.0), branches[0].shape) if branches[0] is not None else None
    return None, left, sum_to(where(condition, 0.0, g), branches[1].shape) if branches[1] is not None else None


@alias(torch.Tensor.where)
def where_method(a, condition, other):
    return where(condition, a, other)


def _masked_fill_meta(a, mask, value):
    require(mask.dtype is dtypes.bool8)
    kind = result_type(a, value) if a.dtype.category < dtypes.COMPLEX else a.dtype
    require(type(value) is not TensorProxy or not value.shape)
    if kind.category == dtypes.COMPLEX and a.dtype.category < dtypes.COMPLEX:
        raise RuntimeError(f"value cannot be converted to type {a.dtype.name} without overflow")
    require_fit(a.dtype, value)
    return like(a, broadcast_shapes(a.shape, mask.shape))


@composite(torch.masked_fill, torch.Tensor.masked_fill, meta=_masked_fill_meta)
def masked_fill(a, mask, value):
    filled = convert(value, a.dtype) if type(value) is TensorProxy else value
    return convert(where(mask, filled, a), a.dtype)


@masked_fill.vjp
def _(a, mask, value):
    g = yield masked_fill(a, mask, value)
    filled = sum_to(where(mask, g, 0.0), value.shape) if type(value) is TensorProxy else None
    return sum_to(masked_fill(g, mask, 0), a.shape), None, filled


def _clamp_meta(a, min=None, max=None):
    require(type(a) is TensorProxy)
    require(min is not None or max is not None)
    result = _elementwise_meta(a, *(x for x in (min, max) if x is not None))
    if result.dtype.category == dtypes.INTEGER:
        if not drops_far_bounds():
            require_fit(result.dtype, min, max)
        elif _beyond(result.dtype, min) > 0 or _beyond(result.dtype, max) < 0:
            raise RuntimeError(f"clamp: the bounds {min}, {max} leave no number of type {result.dtype.name}")
    return result


def _beyond(kind: dtypes.dtype, bound) -> int:
    """-1 for a number below all of an integer type, 1 for one above, 0 for others."""
    if kind.category != dtypes.INTEGER or type(bound) is not int:
        return 0
    limits = torch.iinfo(to_torch_dtype(kind))
    return (bound > limits.max) - (bound < limits.min)


@composite(*spellings_of("clamp"), meta=_clamp_meta)
def clamp(a, min=None, max=None):
    """The decomposition of `clamp`, in the type of the operand and its bounds."""
    kind = _elementwise_meta(a, *(x for x in (min, max) if x is not None)).dtype
    out = convert(a, kind)  # an integer would wrap a bound around that a float has
    for bound, compare, extreme in ((min, ltorch.lt, ltorch.maximum), (max, ltorch.gt, ltorch.minimum)):
        if _beyond(kind, bound) and drops_far_bounds():
            continue
        if type(bound) is TensorProxy:
            out = extreme(out, convert(bound, kind))
        elif type(bound) is float and math.isnan(bound):  # it is taken by all, as by the extremes
            out = ltorch.full_like(out, bound)
        elif bound is not None:
            out = where(compare(out, bound), bound, out)
    return out


named_alike(clamp)


def _both(a, b):
    """Where two conditions hold; None stands for one that always does."""
    return ltorch.logical_and(a, b) if a is not None and b is not None else b if a is None else a


def _inside(a, min, max, strictly: bool = False):
    """Where a value is not below or above its bounds, nor at them if `strictly`."""
    compares = ("gt", "lt") if strictly else ("ge", "le")
    return _both(
        *(
            None if bound is None else LTORCH[compare](a, bound)
            for bound, compare in zip((min, max), compares, strict=True)
        )
    )


def _clamped(g, a, min, max):
    """The cotangent of a value between bounds: what PyTorch leaves to it."""
    tensors = type(min) is TensorProxy or type(max) is TensorProxy
    share = kept_at_bounds(tensors)
    if share == 1.0 or not tensors:
        return where(_inside(a, min, max, strictly=share != 1.0), g, 0.0)
    gradient, apart = g, ltorch.lt(min, max) if min is not None and max is not None else None
    for bound, compare in ((min, "lt"), (max, "gt")):
        if bound is not None:
            gradient = where(_both(ltorch.eq(a, bound), apart), g * share, gradient)
            gradient = masked_fill(gradient, LTORCH[compare](a, bound), 0)
    return gradient


def _taken(g, a, bound, other, compare: str):
    """The cotangent of a bound that is a tensor: where the value is beyond it, and what the value at it does not keep.
    The upper bound is taken where the two cross."""
    left = 1.0 - kept_at_bounds(True)
    if left and other is None:
        inside = (ltorch.gt if compare == "lt" else ltorch.lt)(a, bound)
        return sum_to(masked_fill(where(ltorch.eq(a, bound), g * left, g), inside, 0), bound.shape)
    low, high = (bound, other) if compare == "lt" else (other, bound)
    beyond = LTORCH[compare](a, bound)
    if other is not None and (left or compare == "lt"):
        beyond = _both(beyond, (ltorch.le if left else ltorch.lt)(low, high))
    if other is not None and compare == "gt":
        beyond = ltorch.logical_or(beyond, ltorch.lt(high, low))
    rest = where(_both(ltorch.eq(a, bound), ltorch.lt(low, high)), g * left, 0.0) if left else 0.0
    return sum_to(where(beyond, g, rest), bound.shape)


def _clamp_rule(symbol: Symbol, bounds) -> None:
    """The cotangent where a value is kept; to a bound that is a tensor where it is taken, the upper one where the two
    cross."""

    def rule(a, *args, **kwargs):
        low, high = bounds(*args, **kwargs)
        g = yield symbol(a, *args, **kwargs)
        of_a = sum_to(_clamped(g, a, low, high), a.shape) if a.requires_grad else None
        of_low = _taken(g, a, low, high, "lt") if type(low) is TensorProxy and low.requires_grad else None
        of_high = _taken(g, a, high, low, "gt") if type(high) is TensorProxy and high.requires_grad else None
        by_name = dict(zip(("min", "max"), (of_low, of_high), strict=True))
        return of_a, *(
            by_name[name]
            for name in (("min", "max") if symbol is clamp else (("min",) if symbol is clamp_min else ("max",)))
        )

    symbol.vjp(rule)


_clamp_rule(clamp, lambda min=None, max=None: (min, max))


@composite(torch.clamp_min, torch.Tensor.clamp_min, meta=lambda a, min: _clamp_meta(a, min))
def clamp_min(a, min):
    return clamp(a, min, None)


@composite(torch.clamp_max, torch.Tensor.clamp_max, meta=lambda a, max: _clamp_meta(a, None, max))
def clamp_max(a, max):
    return clamp(a, None, max)


_clamp_rule(clamp_min, lambda min: (min, None))
_clamp_rule(clamp_max, lambda max: (None, max))


@composite(
    torch.addcmul,
    torch.Tensor.addcmul,
    meta=lambda a, b, c, *, value=1: _elementwise_meta(a, b, c),
    autocast="cuda:widest",
)
def addcmul(a, b, c, *, value=1):
    return a + _times(b * c, value)


def _times(a, value):
    return a if (value == 1) is True else a * value  # of a data-dependent number it is neither


def _of(f, x: TensorProxy):
    """The cotangent of an operand, where it has one, summed to its shape."""
    return sum_to(f(), x.shape) if type(x) is TensorProxy and x.requires_grad else None


@addcmul.vjp
def _(a, b, c, *, value=1):
    g = yield addcmul(a, b, c, value=value)
    return _of(lambda: g, a), _of(lambda: g * _times(c, value), b), _of(lambda: g * _times(b, value), c)


@composite(
    torch.addcdiv, torch.Tensor.addcdiv, meta=lambda a, b, c, *, value=1: _elementwise_meta(a, b, c),
        autocast="cuda:widest",
)  # fmt: skip
def addcdiv(a, b, c, *, value=1):
    return a + _times(b / c, value)


@addcdiv.vjp
def _(a, b, c, *, value=1):
    g = yield addcdiv(a, b, c, value=value)
    return _of(lambda: g, a), _of(lambda: g * (value / c), b), _of(lambda: -g * (_times(b, value) / (c * c)), c)


@composite(
    torch.lerp,
    torch.Tensor.lerp,
    meta=lambda start, end, weight: _elementwise_meta(start, end, *(w for w in (weight,) if type(w) is TensorProxy)),
)
def lerp(start, end, weight):
    if type(weight) is not TensorProxy:
        return start + (end - start) * weight if weight < 0.5 else end - (end - start) * (1 - weight)
    return where(ltorch.abs(weight) < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@lerp.vjp
def _(start, end, weight):
    g = yield lerp(start, end, weight)
    return _of(lambda: g * (1 - weight), start), _of(lambda: g * weight, end), _of(lambda: g * (end - start), weight)


# --- made of them


@composite(torch.nan_to_num, torch.Tensor.nan_to_num)
def nan_to_num(a, nan=0.0, posinf=None, neginf=None):
    if a.dtype.category < dtypes.FLOAT:
        return ltorch.clone(a)
    low, high = finite_range(a.dtype)
    out = where(isnan(a), 0.0 if nan is None else nan, a)
    out = where(ltorch.isposinf(a), high if posinf is None else posinf, out)
    return where(ltorch.isneginf(a), low if neginf is None else neginf, out)


gradient_of_first(nan_to_num, lambda g, y, a, nan=0.0, posinf=None, neginf=None: g * ltorch.isfinite(a))


def finite_range(d: dtypes.dtype) -> tuple[float, float]:
    """The least and the greatest finite value of a float type."""
    info = torch.finfo(to_torch_dtype(dtypes.real_of(d)))  # type: ignore[arg-type]
    return info.min, info.max


@composite(torch.logit, torch.Tensor.logit, torch.special.logit)
def logit(a, eps=None):
    x = convert(a, to_float(a.dtype))
    if eps is not None:
        x = where(ltorch.lt(x, eps), eps, clamp(x, None, 1.0 - eps))  # the lower bound where the two cross
    return ltorch.log(x / (1.0 - x))


kernels.converts_numbers.set((1, 2), where)
kernels.layout.set("row-major", ltorch.masked_fill)  # a copy is filled


@batching.rule(where)
def _where_of_batch(batch: batching.Batch, operation: BoundSymbol):
    """The type of the condition is not that of the result."""
    tensors = [x for x in operation.args if type(x) is TensorProxy]
    if len({x.dtype for x in tensors if x is not operation.args[0]}) > 1:
        return None
    return batching.broadcast(batch, operation, tensors)


batching.rule.set(batching.elementwise, ltorch.addcmul, ltorch.addcdiv, ltorch.lerp, ltorch.clamp)
batching.rule.set(batching.same, ltorch.masked_fill, nan_to_num)
splitting.rule.set(splitting.elementwise, where, prims.where, ltorch.masked_fill, ltorch.clamp)


gradient_of_first(logit, lambda g, y, a, eps=None: logit_backward(g, a, eps))
