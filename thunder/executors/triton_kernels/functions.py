"""The elementwise primitives as Triton expressions. Types below float32 are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

from thunder.core.dtypes import BOOL, FLOAT, INTEGER

_ANY, _NUMBERS = (BOOL, INTEGER, FLOAT), (INTEGER, FLOAT)


class Function:
    """text: the expression, from those of the operands. categories: of operands' types that it is right for. in_double:
    right to double precision as well. work: instructions for an element, about."""

    __slots__ = ("text", "categories", "in_double", "work")

    def __init__(
        self, text: str | Callable[..., str], categories: tuple = (FLOAT,), in_double: bool = True, work: int = 1
    ):
        self.text = text.format if isinstance(text, str) else text
        self.categories, self.in_double, self.work = categories, in_double, work


def _power(a: str, exponent: str) -> str:
    n = float(exponent)
    if n in (0.5, -0.5):
        return f"_sqrt({a})" if n > 0 else f"_rsqrt({a})"
    if not n:
        return f"tl.where({a} == {a}, 1.0, 1.0)"  # of nan and infinity as well
    product = " * ".join([a] * int(abs(n)))
    return f"1.0 / ({product})" if n < 0 else product


def _quotient(a: str, b: str) -> str:
    """By a number, as of a mean, rounded to the nearest: numbers for doubles are no literals."""
    if not b.lstrip("-")[:1].isdigit():
        return f"{a} / {b}"
    mantissa, exponent = math.frexp(float(b))
    return f"{a} * {1 / float(b)!r}" if abs(mantissa) == 0.5 and -126 < exponent <= 126 else f"tl.div_rn({a}, {b})"


_INFINITY = "float('inf')"
FUNCTIONS: dict[str, Function] = {
    "abs": Function("tl.abs({})", _NUMBERS), "neg": Function("-{}"),
    # of an integer. ptxas 12.8 reads max(max(-a, -b), -c) as max(max(-a, b), -c) on capability 9.0: it is not shown
    # that the 0 is one
    "opposite": Function("tl.program_id(2).to({0}.dtype) - {0}", (INTEGER,)),
    "add": Function("{} + {}", _NUMBERS), "sub": Function("{} - {}", _NUMBERS), "mul": Function("{} * {}", _NUMBERS),
    "true_divide": Function(_quotient, work=8), "reciprocal": Function("1.0 / {}", work=8),
    "square": Function("{0} * {0}", _NUMBERS),
    "pow": Function(_power),
    "maximum": Function("tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)"),
    "minimum": Function("tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)"),
    "exp": Function("tl.exp({})", work=6), "exp2": Function("tl.exp2({})", work=4),
    "log": Function("tl.log({})", work=8),
    "log2": Function("tl.log2({})", work=6),
    "expm1": Function("_expm1({})", in_double=False, work=20),
    "log1p": Function("_log1p({})", in_double=False, work=20),
    "tanh": Function("_tanh({})", in_double=False, work=25),
    "sin": Function("tl.sin({})", work=40), "cos": Function("tl.cos({})", work=40),
    "erf": Function("tl.erf({})", work=25),
    "sigmoid": Function("1.0 / (1.0 + tl.exp(-{}))", work=12),
    "sqrt": Function("_sqrt({})", work=8), "rsqrt": Function("_rsqrt({})", work=6), "floor": Function("tl.floor({})"),
    "ceil": Function("tl.ceil({})"),
    "trunc": Function("tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))"),
    **dict.fromkeys(("sgn", "sign"), Function("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))")),  # 0 of nan
    "isnan": Function("{0} != {0}"), "isinf": Function("tl.abs({}) == " + _INFINITY),
    "isfinite": Function("tl.abs({}) < " + _INFINITY),
    "eq": Function("{} == {}", _ANY), "ne": Function("{} != {}", _ANY), "lt": Function("{} < {}", _NUMBERS),
    "le": Function("{} <= {}", _NUMBERS),
    "gt": Function("{} > {}", _NUMBERS), "ge": Function("{} >= {}", _NUMBERS),
    "logical_and": Function("({} != 0) & ({} != 0)", _ANY), "logical_or": Function("({} != 0) | ({} != 0)", _ANY),
    "logical_xor": Function("({} != 0) != ({} != 0)", _ANY),
    "logical_not": Function("{} == 0", _ANY),
    "bitwise_and": Function("{} & {}", (BOOL, INTEGER)), "bitwise_or": Function("{} | {}", (BOOL, INTEGER)),
    "bitwise_xor": Function("{} ^ {}", (BOOL, INTEGER)),
    # -1, which Triton writes ~ with, is no number of 8 bits without a sign to the interpreter of Triton 3.5
    "bitwise_not": Function("(~{0}.to(tl.int64)).to({0}.dtype)", (INTEGER,)),
    # by a number above 0
    "floor_divide": Function("_floor_divide({}, {})", (INTEGER,), work=8),
    "remainder": Function("_remainder({}, {})", (INTEGER,), work=8),
    # by a number of bits that the type has
    "bitwise_left_shift": Function("{} << {}", (INTEGER,)), "bitwise_right_shift": Function("{} >> {}", (INTEGER,)),
    # of integers
    "larger": Function("tl.maximum({}, {})", (INTEGER,)), "smaller": Function("tl.minimum({}, {})", (INTEGER,)),
    "isposinf": Function("{} == " + _INFINITY), "isneginf": Function("{} == -" + _INFINITY),
    "log10": Function("tl.log({}) * 0.4342944819032518", work=8),
    "fmax": Function("tl.maximum({}, {})"), "fmin": Function("tl.minimum({}, {})"),
    "where": Function("tl.where({}, {}, {})", _ANY),
}  # fmt: skip
