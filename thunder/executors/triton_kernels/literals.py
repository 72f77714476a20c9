"""Types and numbers as Triton text."""

from __future__ import annotations

import struct

from thunder.core.dtypes import BOOL, FLOAT, dtype

# of float32: where a maximum begins from which other numbers, which may be infinite, are subtracted
LOWEST = "-3.4028234663852886e38"
_INTEGER_BOUNDS = {"uint8": (0, 255), **{f"int{n}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)}}


def compute_type(d: dtype) -> str:
    """The Triton type that values of a type are computed in."""
    return "tl.float32" if d.category == FLOAT and d.bytes < 4 else "tl.int1" if d.category == BOOL else f"tl.{d.name}"


def neutral(how: str, d: dtype) -> str:
    """What a reduction begins with, and what it reads in the place of what there is none of."""
    if how in ("sum", "squares"):
        return "0.0" if d.category == FLOAT else "0"
    if d.category == FLOAT:
        return 'float("-inf")' if how == "amax" else 'float("inf")'
    return str(_INTEGER_BOUNDS[d.name][how == "amin"])


def bracketed(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def literal(x, d: dtype) -> str:
    """A number as a value of a type: those of float32 and below rounded to float32."""
    if d.category == BOOL:
        return str(bool(x))
    if d.category != FLOAT:
        # as PyTorch wraps numbers around
        return str((int(x) - _INTEGER_BOUNDS[d.name][0]) % 2 ** (8 * d.bytes) + _INTEGER_BOUNDS[d.name][0])
    x = float(x)
    if d.bytes <= 4:
        try:
            x = struct.unpack("f", struct.pack("f", x))[0]
        except OverflowError:
            x = float("inf") if x > 0 else float("-inf")
        if 0 < abs(x) < 2.0**-126:  # which Triton would take for a double
            x = 0.0
    return repr(x) if x - x == 0 else f'float("{x}")'
