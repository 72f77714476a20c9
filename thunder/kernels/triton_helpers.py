"""Functions in Triton that it has no name for, and that its interpreter knows as well."""

from __future__ import annotations

# Triton divides towards zero. tanh and expm1: a series where the closed form cancels (tanh's is fitted to the
# interval); log1p: the logarithm and what 1 + x lost; rsqrt: a step of Newton's method. tanh is within 2 ulp of
# float32, rsqrt within 1, log1p as near as the logarithm, expm1 within twice what the exponential is off. Square
# roots and quotients of which is not said how they are rounded are 1 and 2 ulp off. _nearest_bfloat16 is what the
# device does: the interpreter cuts digits off.
HELPERS: dict[str, str] = {
    # the numbers of `ops.families.random.uniform_philox`
    "_uniform": """
@triton.jit
def _uniform(seed, offset, element, page):
    zero = element * 0
    draw, _, _, _ = tl.philox(seed, zero + offset, zero, element, zero + page)
    return (draw >> 8).to(tl.float32) * 5.9604644775390625e-08
""",
    "_sqrt": """
@triton.jit
def _sqrt(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)
""",
    "_rsqrt": """
@triton.jit
def _rsqrt(x):
    near = tl.rsqrt(x)
    rest = 1 - x * near * near
    return tl.where(tl.abs(rest) < 0.5, near + near * (rest * 0.5), near)
""",
    "_expm1": """
@triton.jit
def _expm1(x):
    series = 1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320 + x * (1 / 362880))))
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * series))))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1)
""",
    "_log1p": """
@triton.jit
def _log1p(x):
    above = 1 + x
    lost = tl.where((above > 0) & (above < float("inf")), (x - (above - 1)) / above, 0.0)
    return tl.where(above == 1, x, tl.log(above) + lost)
""",
    "_nearest_bfloat16": """
@triton.jit
def _nearest_bfloat16(x):
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
""",
    "_floor_divide": """
@triton.jit
def _floor_divide(a, b):
    quotient = a // b
    return tl.where(quotient * b > a, quotient - 1, quotient)
""",
    "_remainder": """
@triton.jit
def _remainder(a, b):
    rest = a % b
    return tl.where(rest < 0, rest + b, rest)
""",
    "_tanh": """
@triton.jit
def _tanh(x):
    s = x * x
    series = -0.05374348908662796 + s * (0.020650558173656464 + s * -0.00571701442822814)
    series = x * (1 + s * (-0.3333328366279602 + s * (0.13331490755081177 + s * series)))
    e = tl.exp(-2 * tl.abs(x))
    closed = 1 - 2 * e / (1 + e)
    return tl.where(tl.abs(x) < 0.625, series, tl.where(x < 0, -closed, closed))
""",
}
