"""The elementwise functions of the kernel IR: what a node may compute. How each is written is said by the targets."""

from __future__ import annotations

from typing import NamedTuple

from thunder.core.dtypes import BOOL, FLOAT, INTEGER

_FLOATS, _NUMBERS, _ANY = (FLOAT,), (INTEGER, FLOAT), (BOOL, INTEGER, FLOAT)


class Function(NamedTuple):
    """categories: of operands' types. truth: whether the result is a truth value; otherwise it has the operands' type.
    rate: the class of operations that a machine is measured for (see `machine.RATES`); count: how many of these it
    takes for an element."""

    categories: tuple[int, ...] = _FLOATS
    truth: bool = False
    rate: str = "simple"
    count: float = 1


_TRUTH = {"truth": True}
FUNCTIONS: dict[str, Function] = {
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum", "abs", "neg"), Function(_NUMBERS)),
    **dict.fromkeys(("square", "sign"), Function(_NUMBERS)),
    **dict.fromkeys(("floor", "ceil", "trunc", "round_to_even", "fmax", "fmin", "copysign"), Function()),
    **dict.fromkeys(("true_divide", "reciprocal", "sqrt", "rsqrt"), Function(rate="divide")),
    # counts are those of PyTorch's library of vectors, to exp
    **dict.fromkeys(("exp", "exp2", "sigmoid"), Function(rate="exp")),
    **dict.fromkeys(("log", "log2", "log10", "sin", "cos", "tanh"), Function(rate="exp", count=2)),
    **dict.fromkeys(("expm1", "log1p", "erf", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "atanh"),
                    Function(rate="exp", count=4)),
    **dict.fromkeys(("pow", "erfc", "lgamma", "hypot", "fmod", "asinh", "acosh", "erfinv"),
                    Function(rate="exp", count=8)),
    **dict.fromkeys(("eq", "ne"), Function(_ANY, **_TRUTH)),
    **dict.fromkeys(("lt", "le", "gt", "ge"), Function(_NUMBERS, **_TRUTH)),
    **dict.fromkeys(("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit"), Function(_FLOATS, **_TRUTH)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "logical_not"), Function(_ANY, **_TRUTH)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), Function((BOOL, INTEGER))),
    # the second operand of these is a constant for which they are defined; see `lower`
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift"), Function((INTEGER,))),
    **dict.fromkeys(("floor_divide", "remainder"), Function((INTEGER,), rate="integer divide")),
    "where": Function(_ANY),
}  # fmt: skip
