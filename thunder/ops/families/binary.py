"""Functions of two operands, element by element, after type promotion and broadcasting."""

from __future__ import annotations

import cmath
import math
import operator as python_operator
from collections.abc import Callable

import numpy
import torch

from thunder import compat
from thunder.core import dtypes
from thunder.core.proxies import METHODS, FloatProxy, NumberProxy, TensorProxy, like, same_shape
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import ltorch, prims
from thunder.ops.backward import sum_to
from thunder.ops.corners import kept_at_tie, turns_at_origin
from thunder.ops.families.data import convert
from thunder.ops.families.elementwise import BOOL, broadcast_to, named_alike, spellings_of, subtracted_types
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import Promotion, broadcast_shapes, is_number, result_type, same_device, to_float
from thunder.ops.registry import LTORCH, alias, composite, prim
from thunder.ops.rules import algebra, batching, effects, kernels, memory, splitting, views
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import scalar_type


def _operand(x):
    """What is no proxy and no number, as an operand of an operator: numpy's scalars are numbers."""
    if isinstance(x, numpy.generic):
        return x.item()
    return x if isinstance(x, (torch.Tensor, numpy.ndarray)) else NotImplemented


def operator_methods(symbol: Callable, operator: str) -> None:
    """Makes `symbol` what a Python operator (`"add"`: `__add__` and `__radd__`) does with proxies.

    As PyTorch does, `2 * x` is computed as `x * 2`, whose roundings differ below float32, and `2 / x` as
    `x.reciprocal() * 2`. An operand that is no tensor and no number has a say itself (`__radd__` of a user's class, `x
    == None`).
    """

    def plain(a, b):
        if type(b) is not TensorProxy and not is_number(b):
            b = _operand(b)
        return b if b is NotImplemented else symbol(a, b)

    def reflected(b, a):
        if type(a) is not TensorProxy and not is_number(a):
            a = _operand(a)
        if a is NotImplemented:
            return a
        if operator in ("add", "mul"):
            return symbol(b, a)
        if operator == "truediv":
            return ltorch.mul(ltorch.reciprocal(b), a)
        return symbol(a, b)

    for name, function in ((f"__{operator}__", plain), (f"__r{operator}__", reflected)):
        METHODS[name] = function
        if name in vars(compat.TensorBase) or hasattr(torch.Tensor, name):
            alias(getattr(torch.Tensor, name))(function)


def binary(
    name: str,
    *torch_functions: Callable,
    promotes: Callable = Promotion.KEEP,
    python: Callable | None = None,
    operator: str | None = None,
    prim_name: str | None = None,
    autocast: str | None = None,
    left: Callable | None = None,
    right: Callable | None = None,
    numbers: str = "both",
    detached: bool = False,
    fn: Callable | None = None,
) -> Symbol:
    """A row: name, torch functions, how types follow, what it is on Python numbers, and the Python operator (`"add"`
    for `__add__`) it implements.

    numbers: which operands may be Python numbers: "both" (one at a time, or together where `python` says what that is),
    "right" or "none". left, right: (cotangent, result, a, b) -> the cotangent of a, of b, before broadcasting is
    undone. fn: what computes it, where it is the meaning of no torch function.
    """
    run = fn or torch_functions[0]

    def prim_meta(a, b):
        t = a if type(a) is TensorProxy else b
        return like(t, dtype=promotes(t.dtype)[1])

    primitive = prim(run, name=prim_name or name)(prim_meta)

    def decomposition(a, b):
        if is_number(a) and is_number(b):
            return python(a, b)
        compute = promotes(result_type(a, b))[0]
        tensors = [x for x in (a, b) if type(x) is TensorProxy]
        shape = broadcast_shapes(*(t.shape for t in tensors))
        a, b = (broadcast_to(convert(x, compute), shape) if type(x) is TensorProxy else x for x in (a, b))
        return primitive(a, b)

    meta, tags = _binary_meta(name, promotes, numbers, python), (OpTags.DETACHED,) if detached else ()
    symbol = composite(*torch_functions, name=name, meta=meta, autocast=autocast, tags=tags, fn=run)(decomposition)
    if operator is not None:
        operator_methods(symbol, operator)
    symbol.elementwise = True
    memory.owns_result.add(symbol)
    if left is not None or right is not None:
        symbol.vjp(_binary_rule(symbol, left, right))
    return named_alike(symbol)


def _binary_meta(name: str, promotes: Callable, numbers: str, python: Callable | None) -> Callable:
    """The meta rule of an elementwise function of two operands. numbers, python: as of `binary`."""

    def meta(a, b):
        if type(a) is TensorProxy and type(b) is TensorProxy:
            if a.dtype is b.dtype and a.device is b.device and same_shape(a.shape, b.shape):
                return like(a, dtype=promotes(a.dtype)[1])
            return like(a, broadcast_shapes(a.shape, b.shape), promotes(result_type(a, b))[1], same_device(a, b))
        if numbers != "none" and type(a) is TensorProxy and is_number(b):
            return like(a, dtype=promotes(result_type(a, b))[1])
        if numbers == "both" and is_number(a):
            if type(b) is TensorProxy:
                return like(b, dtype=promotes(result_type(a, b))[1])
            if python is not None and is_number(b):
                return python(a, b)
        raise TypeError(
            f"{name}(): arguments must be Tensors or numbers, not {type(a).__name__} and {type(b).__name__}"
        )

    return meta


def _binary_rule(symbol: Symbol, left: Callable | None, right: Callable | None) -> Callable:
    """The derivative of a function of two operands. left, right: (gradient, result, a, b) -> the gradient of that
    operand, before it is summed to its shape."""

    def rule(a, b, **kwargs):
        y = symbol(a, b, **kwargs)
        g = yield y
        return tuple(
            sum_to(f(g, y, a, b, **kwargs), x.shape)
            if f is not None and type(x) is TensorProxy and x.requires_grad
            else None
            for f, x in ((left, a), (right, b))
        )

    return rule


def _pow_left(g, y, a, b):
    if type(b) is not TensorProxy:
        if type(b) in (int, float) and b == 2:
            return g * (b * a)
        return ltorch.zeros_like(a) if b == 0 else g * (b * ltorch.pow(a, b - 1))
    return ltorch.where(ltorch.eq(b, 0.0), 0.0, g * (b * ltorch.pow(a, b - 1)))


def _pow_right(g, y, a, b):
    """g * y * log(a); 0 where 0 is raised to a power that is not negative."""
    if type(a) is TensorProxy:
        slope = g * (y * ltorch.log(convert(a, y.dtype)))
        return ltorch.where(ltorch.logical_and(ltorch.eq(a, 0), _not_negative(b)), 0.0, slope)
    slope = g * (y * _log(a, y.dtype.category == dtypes.COMPLEX))
    return ltorch.where(_not_negative(b), 0.0, slope) if a == 0 else slope


def _not_negative(b):
    if b.dtype.category < dtypes.COMPLEX:
        return ltorch.ge(b, 0)
    return ltorch.logical_and(ltorch.eq(ltorch.imag(b), 0), ltorch.ge(ltorch.real(b), 0))


def _log(a, of_complex: bool):
    if a == 0:
        return -math.inf
    return cmath.log(a) if of_complex else math.log(a) if a > 0 else math.nan


def _copysign_left(g, y, a, b):
    """The sign that `a` was given: y / a, 0 where `a` is 0."""
    return g * ltorch.masked_fill(y / a, ltorch.eq(a, 0), 0)


def _wins(g, a, b, compare: str):
    """The cotangent where `a` is taken: it compares so with `b`, or b is NaN."""
    taken = ltorch.logical_or(LTORCH[compare](a, b), ltorch.isnan(b))
    return ltorch.masked_fill(g, ltorch.logical_not(taken), 0)


def _loses(g, a, b, compare: str):
    taken = ltorch.logical_or(LTORCH[compare](a, b), ltorch.isnan(b))
    return ltorch.masked_fill(g, taken, 0)


def _first_extreme(extreme: Callable, compare: str):
    """The cotangent of the first operand of fmax or fmin, and of the second: what PyTorch gives to each where they are
    equal."""

    def left(g, y, a, b):
        share = kept_at_tie(extreme)
        return (
            _wins(g, a, b, compare)
            if share == 1.0
            else ltorch.where(ltorch.eq(a, b), g * share, _wins(g, a, b, compare))
        )

    def right(g, y, a, b):
        share = kept_at_tie(extreme)
        return (
            _loses(g, a, b, compare)
            if share == 1.0
            else ltorch.where(ltorch.eq(a, b), g * (1.0 - share), _loses(g, a, b, compare))
        )

    return {"left": left, "right": right}


def _xlogy_left(g, y, a, b):
    slope = ltorch.xlogy(g, b)
    nothing = ltorch.eq(a, 0.0)
    if type(b) is TensorProxy:
        nothing = ltorch.logical_and(nothing, ltorch.le(b, 0.0))
    return slope if type(b) is not TensorProxy and b > 0 else ltorch.masked_fill(slope, nothing, 0.0)


def _truncated(a, b, mode: str):
    return ltorch.div(a, b, rounding_mode=mode)


_F = {"promotes": Promotion.INT_TO_FLOAT}
_TENSORS = {"numbers": "none"}
BINARY: dict[str, dict] = {
    "mul": {"operator": "mul", "python": python_operator.mul, "left": lambda g, y, a, b: b * g,
    "right": lambda g, y, a, b: a * g},
    "maximum": _TENSORS, "minimum": _TENSORS,
    "fmax": _TENSORS | _first_extreme(torch.fmax, "ge"),
    "fmin": _TENSORS | _first_extreme(torch.fmin, "le"),
    "atan2": _F | _TENSORS | {"autocast": "cuda:widest"},
    "copysign": _F | {"numbers": "right", "left": _copysign_left, "right": lambda g, y, a, b: ltorch.zeros_like(g)},
    "hypot": _TENSORS | {"left": lambda g, y, a, b: g * a / y,
    "right": lambda g, y, a, b: g * b / y},
    "nextafter": _TENSORS, "heaviside": _TENSORS,
    "logaddexp": _TENSORS | {"left": lambda g, y, a, b: g / (1 + ltorch.exp(b - a)),
    "right": lambda g, y, a, b: g / (1 + ltorch.exp(a - b))},
    "logaddexp2": _TENSORS | {"left": lambda g, y, a, b: g / (1 + ltorch.exp2(b - a)),
    "right": lambda g, y, a, b: g / (1 + ltorch.exp2(a - b))},
    "fmod": {"numbers": "right", "left": lambda g, y, a, b: g,
    "right": lambda g, y, a, b: -g * _truncated(a, b, "trunc")},
    "remainder": {"operator": "mod", "left": lambda g, y, a, b: g,
    "right": lambda g, y, a, b: -g * _truncated(a, b, "floor")},
    "floor_divide": {"operator": "floordiv", "python": python_operator.floordiv},
    "gcd": _TENSORS, "lcm": _TENSORS,
    "bitwise_and": {"operator": "and"}, "bitwise_or": {"operator": "or"},
    "bitwise_xor": {"operator": "xor"},
    "bitwise_left_shift": {"operator": "lshift"}, "bitwise_right_shift": {"operator": "rshift"},
    "logical_and": BOOL | _TENSORS, "logical_or": BOOL | _TENSORS, "logical_xor": BOOL | _TENSORS,
    "true_divide": _F | {"python": python_operator.truediv,
    "prim_name": "true_divide"},
    "pow": {"operator": "pow", "autocast": "cuda:float32", "left": _pow_left,
    "right": _pow_right},
    "float_power": {"promotes": Promotion.TO_DOUBLE},
    "ldexp": _F | _TENSORS,
    "xlogy": _F | {"left": _xlogy_left, "right": lambda g, y, a, b: g * a / b},
}  # fmt: skip
for _name, _options in BINARY.items():
    _extra = [f for f in (getattr(torch.special, _name, None),) if f is not None]
    binary(_name, *spellings_of(_name), *_extra, **_options)
if compat.composed("ldexp.Tensor"):  # of pow, which autocast casts on CUDA
    casts_inside(*ltorch.ldexp.torch_functions)


def _double_in_place(a, b):
    """Raises the error of `float_power_` for a base that is not of the result's type."""
    wanted = (
        dtypes.complex128
        if any(type(x) is complex or type(x) is TensorProxy and x.dtype.category == 3 for x in (a, b))
        else dtypes.float64
    )
    if a.dtype is not wanted:
        raise RuntimeError(
            f"the base given to float_power_ has dtype {scalar_type(a.dtype)} but the operation's result requires "
            f"dtype {scalar_type(wanted)}"
        )


views.check_in_place.set(_double_in_place, ltorch.float_power)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    binary(_name, *spellings_of(_name), operator=_name, promotes=Promotion.BOOL_RESULT, numbers="right")


def _angle_rule(symbol: Symbol) -> None:
    """Gives `atan2` its derivative, which this PyTorch may set to 0 at the origin."""

    def rule(a, b):
        g = yield symbol(a, b)
        squares = a * a + b * b
        inverse = ltorch.reciprocal(squares)
        if turns_at_origin():
            inverse = ltorch.masked_fill(inverse, ltorch.eq(squares, 0), 0)
        return tuple(
            sum_to(g * slope() * inverse, x.shape) if x.requires_grad else None
            for x, slope in ((a, lambda: b), (b, lambda: -a))
        )

    symbol.vjp(rule)


def _extreme_rule(symbol: Symbol, loses: str) -> None:
    """Half of the cotangent where two operands tie, all of it where one wins, none where it loses."""

    def rule(a, b):
        g = yield symbol(a, b)
        halved = ltorch.where(ltorch.eq(a, b), g / 2, g)
        return tuple(
            sum_to(ltorch.masked_fill(halved, LTORCH[loses](x, other), 0), x.shape) if x.requires_grad else None
            for x, other in ((a, b), (b, a))
        )

    symbol.vjp(rule)


_extreme_rule(ltorch.maximum, "lt")
_extreme_rule(ltorch.minimum, "gt")
_angle_rule(ltorch.atan2)
for _name in ("xlog1py", "zeta"):
    binary(f"special_{_name}", getattr(torch.special, _name), promotes=Promotion.INT_TO_FLOAT)


def _is_one(x) -> bool:
    """Whether a number surely is 1, which decides nothing of one that stays symbolic, or is a tensor's."""
    return not isinstance(x, (NumberProxy, TensorProxy)) and x == 1


def _scaled(name: str, python: Callable) -> Symbol:
    """add and sub: `a + alpha * b`."""
    plain = binary(
        f"plain_{name}",
        fn=getattr(torch, name),
        prim_name=name,
        python=python,
        promotes=Promotion.KEEP if name == "add" else subtracted_types,
    )

    def meta(a, b, *, alpha=1):
        return plain.meta(a, b)

    def decomposition(a, b, *, alpha=1):
        if not _is_one(alpha):
            is_float = type(alpha) in (float, FloatProxy)
            b = convert(b * alpha, b.dtype) if type(b) is TensorProxy and not is_float else b * alpha
        return plain.decomposition(a, b)

    symbol = composite(*spellings_of(name), name=name, meta=meta)(decomposition)
    operator_methods(symbol, name)
    sign = 1 if name == "add" else -1

    def right(g, y, a, b, *, alpha=1):
        return g if _is_one(sign * alpha) else -g if _is_one(-sign * alpha) else g * (sign * alpha)

    symbol.vjp(_binary_rule(symbol, lambda g, y, a, b, *, alpha=1: g, right))
    return named_alike(symbol)


add = _scaled("add", python_operator.add)
sub = _scaled("sub", python_operator.sub)


def _rsub_meta(a, b, *, alpha=1):
    require(type(a) is TensorProxy)
    return sub.meta(b, a)


@composite(torch.rsub, meta=_rsub_meta)
def rsub(a, b, *, alpha=1):
    return sub(b, a if _is_one(alpha) else a * alpha)


rsub.vjp(
    _binary_rule(
        rsub, lambda g, y, a, b, *, alpha=1: -g if _is_one(alpha) else g * -alpha, lambda g, y, a, b, *, alpha=1: g
    )
)


def _div_meta(a, b, *, rounding_mode=None):
    if rounding_mode is None:
        return true_divide.meta(a, b)
    require(rounding_mode in ("trunc", "floor"))
    return ltorch.floor_divide.meta(a, b)


true_divide = ltorch.true_divide


@composite(*spellings_of("div"), meta=_div_meta)
def div(a, b, *, rounding_mode=None):
    if rounding_mode is None:
        return true_divide.decomposition(a, b)
    if rounding_mode == "floor":
        return ltorch.floor_divide(a, b)
    exact = true_divide(a, b)
    return convert(ltorch.trunc(exact), result_type(a, b)) if type(exact) is TensorProxy else int(exact)


named_alike(div)


def _div_rule(symbol: Symbol) -> Callable:
    def left(g, y, a, b, *, rounding_mode=None):
        return g / b if rounding_mode is None else ltorch.zeros_like(g)

    def right(g, y, a, b, *, rounding_mode=None):
        return -g * ((a / b) / b) if rounding_mode is None else ltorch.zeros_like(g)

    return _binary_rule(symbol, left, right)


for _symbol in (div, true_divide):
    _symbol.vjp(_div_rule(_symbol))
operator_methods(div, "truediv")


@prim(torch.polygamma)
def polygamma_prim(n, a):
    return like(a, dtype=to_float(a.dtype))


@composite(torch.polygamma, torch.special.polygamma, meta=lambda n, a: like(a, dtype=to_float(a.dtype)))
def polygamma(n, a):
    return polygamma_prim(n, a)


@polygamma.vjp
def _(n, a):
    g = yield polygamma(n, a)
    return None, g * polygamma(n + 1, a)


algebra.commutes.add(
    ltorch.mul, ltorch.eq, ltorch.ne, ltorch.maximum, ltorch.minimum, ltorch.logical_and, ltorch.logical_or,
    ltorch.logical_xor, ltorch.bitwise_and, ltorch.bitwise_or, ltorch.bitwise_xor,
    prims.add, prims.mul, prims.eq, prims.ne, prims.maximum, prims.minimum, prims.bitwise_and, prims.bitwise_or,
    prims.bitwise_xor,
)  # fmt: skip
algebra.commutes.add(ltorch.add, when=lambda operation: _is_one(operation.kwargs.get("alpha", 1)))


def _divides_integers(operation) -> bool:
    """By zero, that is PyTorch's error; the processor stops the program for it."""
    return all(p.dtype.category <= dtypes.INTEGER for p in operation.outputs)


effects.checks_data.add(ltorch.div, ltorch.remainder, ltorch.fmod, ltorch.floor_divide, when=_divides_integers)
effects.checks_data.add(prims.remainder, prims.fmod, prims.floor_divide, when=_divides_integers)
# not pow, which computes the powers of some numbers otherwise
kernels.converts_numbers.set(
    (1,), ltorch.add, ltorch.sub, ltorch.rsub, ltorch.mul, ltorch.div, ltorch.true_divide, ltorch.floor_divide,
    ltorch.fmod, ltorch.remainder, ltorch.copysign, ltorch.xlogy, ltorch.eq, ltorch.ne, ltorch.lt, ltorch.le,
    ltorch.gt, ltorch.ge,
)  # fmt: skip
# Inductor's results differ, for infinities and below float32
kernels.no_loop_of_inductor.add(ltorch.floor_divide, prims.floor_divide, ltorch.nextafter, prims.nextafter)
kernels.layout.set("second operand first", ltorch.rsub)


batching.rule.set(batching.elementwise, ltorch.add, ltorch.sub, ltorch.div, ltorch.true_divide)
batching.in_type_of_result.add(ltorch.add, ltorch.sub, ltorch.mul, ltorch.div, ltorch.true_divide)
splitting.rule.set(
    splitting.elementwise, ltorch.add, ltorch.sub, ltorch.div, ltorch.true_divide,
    prims.add, prims.sub, prims.true_divide,
)  # fmt: skip
