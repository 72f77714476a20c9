"""Arguments that tests call the operations of `thunder/ops/families/elementwise.py` and `binary.py` with."""

from __future__ import annotations

import torch

from thunder.core.symbol import Symbol
from thunder.ops import LTORCH
from thunder.ops.families.binary import div, rsub
from thunder.ops.families.elementwise import frexp, round


@round.samples
def _(make):
    yield make(4, 3)
    yield (make(4, 3),), {"decimals": 2}


@frexp.samples
def _(make):
    yield make(4, 3)


@rsub.samples
def _(make):
    yield make(4, 3), make(3)
    yield (make(4, 3), 2), {"alpha": 2}


@div.samples
def _(make):
    yield make(4, 3), make(4, 3, low=0.5)
    yield make(4, 3), 2
    yield make(4, dtype=torch.int64, low=1, high=9), make(4, dtype=torch.int64, low=1, high=4)
    yield (make(4, 3), make(4, 3, low=0.5)), {"rounding_mode": "floor"}
    yield (make(4, 3), make(4, 3, low=0.5)), {"rounding_mode": "trunc"}


# where functions are defined, or have no poles; from -3 to 3 otherwise
INTERVALS = {
    "acos asin atanh erfinv": (-0.9, 0.9), "tan": (-1.4, 1.4), "log1p": (-0.5, 4.0), "sqrt": (0.0, 4.0),
    "acosh": (1.1, 4.0), "log log10 log2 rsqrt": (0.1, 4.0), "digamma lgamma": (0.2, 4.0), "reciprocal": (0.3, 4.0),
    "remainder floor_divide true_divide pow float_power xlogy fmod igamma igammac": (0.5, 3.0),
    "special_xlog1py special_zeta": (1.5, 3.0),
}  # fmt: skip
INTERVAL = {name: interval for names, interval in INTERVALS.items() for name in names.split()}
FLOATS = "frac hypot nextafter logaddexp logaddexp2 igamma igammac".split()
INTEGERS = "bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm".split()
OF_ONE_TYPE = ["heaviside", "ldexp"]
WITHOUT_NUMBERS = "maximum minimum fmax fmin atan2 logical_and logical_or logical_xor".split()


def _unary(symbol: Symbol) -> None:
    special = symbol.name.startswith("special_")
    low, high = INTERVAL.get(symbol.name, (0.1, 0.9) if special else (-3.0, 3.0))

    @symbol.samples
    def _(make):
        if symbol.name not in INTEGERS:
            yield make(4, 3, low=low, high=high)
            yield make(low=low, high=high)
            yield make(0, 2, low=low, high=high)
        if symbol.name not in FLOATS and not special:
            yield make(5, dtype=torch.int64, low=max(0, int(low)), high=2)


def _binary(symbol: Symbol) -> None:
    low, high = INTERVAL.get(symbol.name, (0.1, 3.0) if symbol.name.startswith("special_") else (-3.0, 3.0))
    typed = {"low": low, "high": high} | ({"dtype": torch.int64} if symbol.name in INTEGERS else {})

    @symbol.samples
    def _(make):
        for a, b in (((4, 3), (4, 3)), ((2, 1), (1, 5)), ((4, 3), (3,)), ((3,), ())):
            yield make(*a, **typed), make(*b, **typed)
        if symbol.name not in (*FLOATS, *INTEGERS, *OF_ONE_TYPE, *WITHOUT_NUMBERS):
            yield make(3, **typed), 2.0
            yield make(3, **typed), 2


for _symbol in {s.name: s for s in LTORCH.values() if s.decomposition is not None}.values():
    if _symbol.sampler is None and _symbol.decomposition.__qualname__.startswith("unary."):
        _unary(_symbol)
    elif _symbol.sampler is None and _symbol.decomposition.__qualname__.startswith("binary."):
        _binary(_symbol)


def _scaled(name: str) -> None:
    @LTORCH[name].samples
    def _(make):
        yield from LTORCH[f"plain_{name}"].sampler(make)
        yield (make(4, 3), make(4, 3)), {"alpha": 2}


_scaled("add")
_scaled("sub")
