"""Elementwise operations: one row per op.

A row makes two symbols: the prim, which computes on operands of one shape and type, and the `ltorch` operation with
PyTorch's broadcasting and promotion.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder.core import dtypes
from thunder.core.proxies import METHODS, TensorProxy, like, same_shape
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import ltorch, prims
from thunder.ops.backward import gradient_of_first, sigmoid_backward, tanh_backward
from thunder.ops.corners import is_differentiated
from thunder.ops.families.data import convert
from thunder.ops.families.shape_prims import broadcast_in_dim
from thunder.ops.promotion import Promotion
from thunder.ops.registry import LTORCH, alias, composite, prim
from thunder.ops.rules import batching, derivatives, memory, views
from thunder.ops.shape_rules import require
from thunder.ops.torch_types import named_results


def broadcast_to(a: TensorProxy, shape: tuple) -> TensorProxy:
    """`a` with the shape that broadcasting gives it; `a` itself where it has it."""
    if same_shape(a.shape, shape):
        return a
    offset = len(shape) - len(a.shape)
    return broadcast_in_dim(a, shape, tuple(range(offset, len(shape))))


# ---------------------------------------------------------------------------------------------------------------- unary


def unary(
    name: str,
    *torch_functions: Callable,
    promotes: Callable = Promotion.KEEP,
    autocast: str | None = None,
    vjp: Callable | None = None,
    detached: bool = False,
) -> Symbol:
    """A row: name, the torch functions it is, how types follow.

    vjp: (cotangent, result, argument) -> the argument's cotangent; it saves what it reads, and no more. detached:
    PyTorch does not differentiate it.
    """
    run = torch_functions[0]
    primitive = prim(run, name=name)(lambda a: like(a, dtype=promotes(a.dtype)[1]))

    def meta(a):
        require(type(a) is TensorProxy)
        return like(a, dtype=promotes(a.dtype)[1])

    def decomposition(a):
        return primitive(convert(a, promotes(a.dtype)[0]))

    symbol = composite(
        *torch_functions, name=name, meta=meta, autocast=autocast, tags=(OpTags.DETACHED,) if detached else ()
    )(decomposition)

    symbol.elementwise = True
    memory.owns_result.add(symbol)
    if vjp is not None:
        gradient_of_first(symbol, vjp)
    return named_alike(symbol)


# other names of operations in PyTorch
SYNONYMS = {
    "abs": "absolute", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atanh": "arctanh", "trunc": "fix", "neg": "negative", "mul": "multiply", "div": "divide", "sub": "subtract",
    "atan2": "arctan2", "clamp": "clip", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}  # fmt: skip


def spellings_of(name: str) -> tuple[Callable, ...]:
    """torch.name and Tensor.name, where they exist, and the same of a synonym."""
    names = (name, SYNONYMS[name]) if name in SYNONYMS else (name,)
    functions = (getattr(space, n, None) for n in names for space in (torch, torch.Tensor))
    return tuple(f for f in functions if f is not None)


def named_alike(symbol: Symbol) -> Symbol:
    """An operation by its synonym as well."""
    if symbol.name in SYNONYMS:
        LTORCH[SYNONYMS[symbol.name]] = symbol
    return symbol


def _negated(d: dtypes.dtype) -> tuple[dtypes.dtype, dtypes.dtype]:
    require(d is not dtypes.bool8)
    return d, d


def subtracted_types(d: dtypes.dtype) -> tuple[dtypes.dtype, dtypes.dtype]:
    require(d is not dtypes.bool8)
    return d, d


_FLOAT = {"promotes": Promotion.INT_TO_FLOAT}
_FLOAT32 = {"promotes": Promotion.INT_TO_FLOAT, "autocast": "cuda:float32"}
BOOL = {"promotes": Promotion.BOOL_RESULT}
UNARY = {
    "abs": {"promotes": Promotion.COMPLEX_TO_REAL},
    "acos": _FLOAT32, "acosh": _FLOAT,
    "angle": {"promotes": Promotion.ANGLE},
    "asin": _FLOAT32, "asinh": _FLOAT, "atan": _FLOAT, "atanh": _FLOAT,
    "bitwise_not": {},
    "ceil": {}, "floor": {}, "trunc": {}, "frac": {},
    "conj_physical": {},
    "cos": _FLOAT, "cosh": _FLOAT32, "sin": _FLOAT, "sinh": _FLOAT32, "tan": _FLOAT32,
    "tanh": _FLOAT,
    "deg2rad": _FLOAT, "rad2deg": _FLOAT,
    "digamma": _FLOAT, "lgamma": _FLOAT,
    "erf": _FLOAT, "erfc": _FLOAT, "erfinv": _FLOAT32,
    "exp": _FLOAT32, "exp2": _FLOAT, "expm1": _FLOAT32,
    "i0": _FLOAT, "sinc": _FLOAT, "sigmoid": _FLOAT,
    "isfinite": BOOL, "isinf": BOOL, "isnan": BOOL, "isneginf": BOOL, "isposinf": BOOL, "isreal": BOOL,
    "signbit": BOOL, "logical_not": BOOL,
    "log": _FLOAT32, "log10": _FLOAT32, "log1p": _FLOAT32, "log2": _FLOAT32,
    "neg": {"promotes": _negated}, "positive": {},
    "reciprocal": _FLOAT32, "rsqrt": _FLOAT32, "sqrt": _FLOAT,
    "sgn": {}, "sign": {}, "square": {"promotes": Promotion.BOOL_TO_INT, "autocast": "cuda:float32"},
}  # fmt: skip
# derivatives of the rows, as (cotangent g, result y, argument x) -> cotangent of x
VJP: dict[str, Callable] = {
    "abs": lambda g, y, x: g * ltorch.sgn(x),
    "acos": lambda g, y, x: g * -ltorch.rsqrt(1 - x * x),
    "asin": lambda g, y, x: g * ltorch.rsqrt(1 - x * x),
    "atan": lambda g, y, x: g / (x * x + 1),
    "atanh": lambda g, y, x: g * 1 / (1 - x * x),
    "asinh": lambda g, y, x: g * ltorch.rsqrt(x * x + 1),
    "acosh": lambda g, y, x: g * ltorch.rsqrt(x * x - 1),
    "ceil": lambda g, y, x: ltorch.zeros_like(g),
    "floor": lambda g, y, x: ltorch.zeros_like(g),
    "trunc": lambda g, y, x: ltorch.zeros_like(g),
    "sign": lambda g, y, x: ltorch.zeros_like(g),
    "frac": lambda g, y, x: g,
    "cos": lambda g, y, x: g * -ltorch.sin(x),
    "sin": lambda g, y, x: g * ltorch.cos(x),
    "cosh": lambda g, y, x: g * ltorch.sinh(x),
    "sinh": lambda g, y, x: g * ltorch.cosh(x),
    "tan": lambda g, y, x: g * (1 + y * y),
    "deg2rad": lambda g, y, x: ltorch.deg2rad(g),
    "rad2deg": lambda g, y, x: ltorch.rad2deg(g),
    "erf": lambda g, y, x: 2.0 / math.sqrt(math.pi) * ltorch.exp(-(x * x)) * g,
    "erfc": lambda g, y, x: -2.0 / math.sqrt(math.pi) * ltorch.exp(-(x * x)) * g,
    "erfinv": lambda g, y, x: 0.5 * math.sqrt(math.pi) * ltorch.exp(ltorch.pow(ltorch.erfinv(x), 2)) * g,
    "conj_physical": lambda g, y, x: ltorch.conj_physical(g),
    "i0": lambda g, y, x: g * ltorch.special_i1(x),
    "sgn": lambda g, y, x: ltorch.zeros_like(g),
    "sinc": lambda g, y, x: g * _sinc_slope(x),
    "exp": lambda g, y, x: g * y,
    "exp2": lambda g, y, x: g * y * math.log(2.0),
    "expm1": lambda g, y, x: g * (y + 1),
    "log": lambda g, y, x: g / x,
    "log10": lambda g, y, x: g / (x * math.log(10.0)),
    "log1p": lambda g, y, x: g / (x + 1),
    "log2": lambda g, y, x: g / (x * math.log(2.0)),
    "digamma": lambda g, y, x: g * ltorch.polygamma(1, x),
    "lgamma": lambda g, y, x: g * ltorch.digamma(x),
    "neg": lambda g, y, x: -g,
    "positive": lambda g, y, x: g,
    "reciprocal": lambda g, y, x: -g * (y * y),
    "rsqrt": lambda g, y, x: -0.5 * g * ltorch.pow(y, 3),
    "sqrt": lambda g, y, x: g / (2 * y),
    "square": lambda g, y, x: g * (x * 2.0),
}


def _sinc_slope(x):
    """(pi x cos(pi x) - sin(pi x)) / (pi x**2), 0 at 0."""
    by_pi = x * math.pi
    square = x * x * math.pi
    return ltorch.masked_fill((by_pi * ltorch.cos(by_pi) - ltorch.sin(by_pi)) / square, ltorch.eq(square, 0.0), 0)


SPECIAL_VJP: dict[str, Callable] = {
    "entr": lambda g, y, x: g * -(1 + ltorch.log(x)),
    "erfcx": lambda g, y, x: (2.0 * x * y - 2.0 / math.sqrt(math.pi)) * g,
    "i0e": lambda g, y, x: g * (ltorch.special_i1e(x) - ltorch.sgn(x) * y),
    "ndtri": lambda g, y, x: g * math.sqrt(2.0 * math.pi) * ltorch.exp(ltorch.square(y) / 2),
}
_SPECIAL = {"sigmoid": ("expit", "sigmoid"), "digamma": ("digamma", "psi"), "lgamma": ("gammaln",)}
for _name, _options in UNARY.items():
    _special = [f for n in _SPECIAL.get(_name, (_name,)) if (f := getattr(torch.special, n, None)) is not None]
    _functional = [f for f in (getattr(torch.nn.functional, _name, None),) if f is not None]
    unary(_name, *spellings_of(_name), *_special, *_functional, vjp=VJP.get(_name), **_options)
for _name in (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "entr", "erfcx", "i0e", "i1", "i1e", "log_ndtr",
    "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1", "ndtr", "ndtri",
    "scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0",
):  # fmt: skip
    _function, _vjp = getattr(torch.special, _name), SPECIAL_VJP.get(_name)
    unary(
        f"special_{_name}",
        _function,
        promotes=Promotion.INT_TO_FLOAT,
        detached=not is_differentiated(_function),
        vjp=_vjp,
    )


def _positive(a):
    require(a.dtype is not dtypes.bool8)
    return a


def _no_complex_in_place(a):
    if a.dtype.category == 3:
        raise RuntimeError("In-place abs is not supported for complex tensors.")


derivatives.of_complex.set("as written", ltorch.abs, ltorch.conj_physical)
derivatives.of_complex.set("PyTorch's", ltorch.sgn)
ltorch.positive.typed_by(_positive)
ltorch.conj_physical.typed_by(lambda a: a if a.dtype.category < 3 else like(a))
views.check_in_place.set(_no_complex_in_place, ltorch.abs)
alias(torch.Tensor.__abs__)(ltorch.abs)
METHODS["__abs__"], METHODS["__neg__"], METHODS["__pos__"] = ltorch.abs, ltorch.neg, ltorch.positive
alias(torch.Tensor.__neg__)(ltorch.neg)


@alias(torch.Tensor.__invert__)
def inverted(a):
    if a.dtype.category >= 2:
        raise TypeError("~ (operator.invert) is only implemented on integer and Boolean-type tensors")
    return ltorch.bitwise_not(a)


METHODS["__invert__"] = inverted


@prim(lambda a, decimals: torch.round(a, decimals=decimals), name="round")
def round_prim(a, decimals):
    return like(a)


@composite(torch.round, torch.Tensor.round, torch.special.round, meta=lambda a, *, decimals=0: like(a))
def round(a, *, decimals=0):
    return round_prim(a, decimals) if decimals else _round_to_even(a)


_round_to_even = prim(torch.round, name="round_to_even")(lambda a: like(a))


gradient_of_first(round, lambda g, y, a, *, decimals=0: ltorch.zeros_like(g))


@prim(torch.real, tags=(OpTags.VIEW,))
def real_prim(a):
    return like(a, dtype=dtypes.real_of(a.dtype))


@composite(
    torch.real,
    meta=lambda a: a if a.dtype.category < 3 else like(a, dtype=dtypes.real_of(a.dtype)),
    properties=("real",),
    tags=(OpTags.VIEW,),
)
def real(a):
    return a if a.dtype.category < 3 else real_prim(a)


@prim(torch.imag, tags=(OpTags.VIEW,))
def imag_prim(a):
    return like(a, dtype=dtypes.real_of(a.dtype))


@composite(torch.imag, meta=lambda a: like(a, dtype=dtypes.real_of(a.dtype)), properties=("imag",), tags=(OpTags.VIEW,))
def imag(a):
    require(a.dtype.category >= 3)
    return imag_prim(a)


@composite(torch.conj, torch.Tensor.conj, meta=lambda a: a if a.dtype.category < 3 else like(a), tags=(OpTags.VIEW,))
def conj(a):
    return a if a.dtype.category < 3 else prims.conj_physical(a)


gradient_of_first(real, lambda g, y, a: g)


gradient_of_first(imag, lambda g, y, a: ltorch.complex(ltorch.zeros_like(g), g))


gradient_of_first(conj, lambda g, y, a: conj(g))


@prim(torch.frexp)
def frexp_prim(a):
    return like(a), like(a, dtype=dtypes.int32)


@composite(torch.frexp, torch.Tensor.frexp, meta=lambda a: named_results("frexp", like(a), like(a, dtype=dtypes.int32)))
def frexp(a):
    return named_results("frexp", *frexp_prim(a))


batching.rule.set(batching.elementwise, ltorch.round)


gradient_of_first(ltorch.tanh, lambda g, y, a: tanh_backward(g, y))
gradient_of_first(ltorch.sigmoid, lambda g, y, a: sigmoid_backward(g, y))
memory.owns_result.set(False, ltorch.positive, ltorch.conj_physical)  # what is not negative, or not complex, comes back
