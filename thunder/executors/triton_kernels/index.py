"""Places in tensors: integer expressions over a kernel's loop variables, in a normal form that undoes what reshapes do and undo.

An `Index` is a sum of multiples of atoms and a constant; an atom is a variable, or the floor of another index over a number. A remainder is `e - n * (e // n)`, so that a
row-major place taken apart and put together again is itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Variable", "Index", "split", "join", "strides_of"]


class Variable:
    """A loop variable, or a number that a kernel has loaded: `0 <= name < size`. loaded: it is no loop variable."""

    __slots__ = ("name", "size", "loaded")

    def __init__(self, name: str, size: int, loaded: bool = False):
        self.name, self.size, self.loaded = name, size, loaded

    @property
    def low(self) -> int:
        return 0

    @property
    def high(self) -> int:
        return self.size - 1


class Floor:
    """`index // by`, one object for equal ones of a kernel (`Index.key` names them)."""

    __slots__ = ("index", "by", "key")

    def __init__(self, index: Index, by: int):
        self.index, self.by = index, by
        self.key = (index.key, by)

    low = property(lambda self: self.index.low // self.by)
    high = property(lambda self: self.index.high // self.by)

    def __eq__(self, other) -> bool:
        return isinstance(other, Floor) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


class Index:
    """An integer expression with the bounds it is known to have. Never changed once made."""

    __slots__ = ("terms", "constant", "low", "high", "key")

    def __init__(self, terms: dict, constant: int, low: int | None = None, high: int | None = None):
        self.terms = {atom: factor for atom, factor in terms.items() if factor}
        self.constant = constant
        own_low = constant + sum(f * (a.low if f > 0 else a.high) for a, f in self.terms.items())
        own_high = constant + sum(f * (a.high if f > 0 else a.low) for a, f in self.terms.items())
        self.low = own_low if low is None else max(low, own_low)
        self.high = own_high if high is None else min(high, own_high)
        self.key = (frozenset(self.terms.items()), constant)

    @staticmethod
    def of(x: Variable | int) -> Index:
        return Index({}, x) if isinstance(x, int) else Index({x: 1}, 0) if x.size > 1 else Index({}, 0)

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other, self.low + other, self.high + other)
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor
        return Index(terms, self.constant + other.constant, self.low + other.low, self.high + other.high)

    def __mul__(self, by: int) -> Index:
        low, high = sorted((self.low * by, self.high * by))
        return Index({a: f * by for a, f in self.terms.items()}, self.constant * by, low, high)

    def __floordiv__(self, by: int) -> Index:
        """What is divisible by the number is divided exactly: floor((n q + r) / n) = q + floor(r / n)."""
        if by == 1:
            return self
        low, high = self.low // by, self.high // by
        if low == high:
            return Index({}, low)
        whole = {a: f // by for a, f in self.terms.items() if f % by == 0}
        rest = Index({a: f for a, f in self.terms.items() if f % by}, self.constant % by)
        result = Index(whole, self.constant // by, None, None)
        if rest.low // by == rest.high // by:
            return Index(result.terms, result.constant + rest.low // by, low, high)
        if len(rest.terms) == 1 and not rest.constant and isinstance(atom := next(iter(rest.terms)), Floor) and rest.terms[atom] == 1:
            floor = Floor(atom.index, atom.by * by)
        else:
            for step in sorted({math.gcd(by, f) for f in rest.terms.values()} - {1}, reverse=True):
                small = Index({a: f for a, f in rest.terms.items() if f % step}, rest.constant % step)
                if small.low // step == small.high // step:  # floor((step a + s) / (step b)) = floor((a + floor(s / step)) / b)
                    large = {a: f // step for a, f in rest.terms.items() if f % step == 0}
                    divided = result + Index(large, rest.constant // step + small.low // step) // (by // step)
                    return Index(divided.terms, divided.constant, low, high)
            floor = Floor(rest, by)
        if floor.low == floor.high:
            return Index(result.terms, result.constant + floor.low, low, high)
        terms = dict(result.terms)
        terms[floor] = terms.get(floor, 0) + 1
        return Index(terms, result.constant, low, high)

    def __mod__(self, by: int) -> Index:
        if 0 <= self.low and self.high < by:
            return self
        rest = self + (self // by) * -by
        return Index(rest.terms, rest.constant, 0, by - 1)

    def is_variable(self, variable: Variable) -> bool:
        return self.key == Index.of(variable).key

    def variables(self) -> set[Variable]:
        found: set[Variable] = set()
        for atom in self.terms:
            found |= atom.index.variables() if isinstance(atom, Floor) else {atom}
        return found


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def split(linear: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The place in each dimension, of a row-major place in a tensor of this shape."""
    return tuple(Index.of(0) if n == 1 else linear // step % n if i else linear // step for i, (n, step) in enumerate(zip(shape, strides_of(shape), strict=True)))


def join(place: Sequence[Index], strides: Sequence[int]) -> Index:
    """The place in memory, from the place in each dimension."""
    total = Index.of(0)
    for index, step in zip(place, strides, strict=True):
        if step:
            total = total + index * step
    return total
