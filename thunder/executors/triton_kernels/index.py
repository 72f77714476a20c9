"""Places in tensors: integer expressions over a kernel's loop variables, in a normal form that undoes what reshapes do
and undo.

An `Index` is a sum of multiples of atoms and a constant; an atom is a variable, or the quotient or remainder of another
index, which is never negative. A row-major place that is taken apart and put together again is itself: `4 * (r // 4) +
r % 4` is `r`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Variable", "Part", "Index", "within", "opened", "split", "join", "strides_of"]


class Variable:
    """A loop variable, or a number that a kernel has loaded: `0 <= name < size`. loaded: it is no loop variable."""

    __slots__ = ("name", "size", "loaded", "low", "high")

    def __init__(self, name: str, size: int, loaded: bool = False):
        self.name, self.size, self.loaded = name, size, loaded
        self.low, self.high = 0, size - 1


class Part:
    """`index // by`, or `index % by`, or where remainder is None, `index`, which is known to be in 0 .. by - 1: one
    atom for equal ones."""

    __slots__ = ("index", "by", "remainder", "key", "low", "high")

    def __init__(self, index: Index, by: int, remainder: bool | None):
        self.index, self.by, self.remainder = index, by, remainder
        self.key = (index.key, by, remainder)
        self.low, self.high = (index.low // by, index.high // by) if remainder is False else (0, by - 1)

    def __eq__(self, other) -> bool:
        return isinstance(other, Part) and other.key == self.key

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
        total = Index(terms, self.constant + other.constant, self.low + other.low, self.high + other.high)
        return total._rejoined()

    def _rejoined(self) -> Index:
        """n * (e // n) + e % n is e."""
        for atom, factor in self.terms.items():
            if isinstance(atom, Part) and atom.remainder:
                quotient = atom.index // atom.by
                if len(quotient.terms) == 1 and not quotient.constant:
                    ((other, one),) = quotient.terms.items()
                    if self.terms.get(other) == one * factor * atom.by:
                        rest = Index(
                            {a: f for a, f in self.terms.items() if a is not atom and a != other}, self.constant
                        )
                        joined = rest + atom.index * factor
                        return Index(joined.terms, joined.constant, self.low, self.high)
        return self

    def __mul__(self, by: int) -> Index:
        low, high = sorted((self.low * by, self.high * by))
        return Index({a: f * by for a, f in self.terms.items()}, self.constant * by, low, high)

    def _divided(self, by: int) -> tuple[Index, Index]:
        """(q, r) with self = by * q + r, r made of what is not divisible, and not negative."""
        rest = Index({a: f for a, f in self.terms.items() if f % by}, self.constant % by)
        shift = -(rest.low // by) if rest.low < 0 else 0
        return Index(
            {a: f // by for a, f in self.terms.items() if f % by == 0}, self.constant // by - shift
        ), rest + shift * by

    def _stepped(self, by: int) -> tuple[Index, int, Index] | None:
        """(a, step, s) with self = step * a + s, 0 <= s < step, and step a divisor of `by`: what is small takes no part
        in a division."""
        for step in sorted({math.gcd(by, f) for f in self.terms.values()} - {1}, reverse=True):
            small = Index({a: f for a, f in self.terms.items() if f % step}, self.constant % step)
            if small.low >= 0 and small.high < step:
                return (
                    Index({a: f // step for a, f in self.terms.items() if f % step == 0}, self.constant // step),
                    step,
                    small,
                )
        return None

    def _only(self) -> Part | None:
        """The quotient or remainder that this is, where it is nothing else."""
        if len(self.terms) != 1 or self.constant:
            return None
        ((atom, factor),) = self.terms.items()
        return atom if factor == 1 and isinstance(atom, Part) and atom.remainder is not None else None

    def __floordiv__(self, by: int) -> Index:
        low, high = self.low // by, self.high // by
        if by == 1:
            return self
        if low == high:
            return Index({}, low)
        whole, rest = self._divided(by)
        if rest.high < by:
            part = Index.of(0)
        elif (stepped := rest._stepped(by)) is not None:
            part = stepped[0] // (by // stepped[1])
        elif (only := rest._only()) is not None and not only.remainder:
            part = Index({Part(only.index, only.by * by, False): 1}, 0)
        elif only is not None and only.by % by == 0:
            part = only.index // by % (only.by // by)
        else:
            part = Index({Part(rest, by, False): 1}, 0)
        total = whole + part
        return Index(total.terms, total.constant, low, high)

    def __mod__(self, by: int) -> Index:
        if 0 <= self.low and self.high < by:
            return self
        if by == 1:
            return Index.of(0)
        rest = self._divided(by)[1]
        if rest.high < by:
            return rest
        if (stepped := rest._stepped(by)) is not None:
            large, step, small = stepped
            return large % (by // step) * step + small
        if (only := rest._only()) is not None and only.remainder and only.by % by == 0:
            return only.index % by
        return Index({Part(rest, by, True): 1}, 0)

    def is_variable(self, variable: Variable) -> bool:
        return self.key == Index.of(variable).key


def within(index: Index, n: int) -> Index:
    """An index that is known to be in 0 .. n - 1, whatever its terms say."""
    return index if index.low >= 0 and index.high < n else Index({Part(index, n, None): 1}, 0)


def opened(index: Index) -> Index:
    """The same number, of terms that may say less of how large it is, and fit together."""
    known = [
        (atom, factor) for atom, factor in index.terms.items() if isinstance(atom, Part) and atom.remainder is None
    ]
    total = (
        Index({atom: factor for atom, factor in index.terms.items() if (atom, factor) not in known}, index.constant)
        if known
        else index
    )
    for atom, factor in known:
        total = total + opened(atom.index) * factor
    return total


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def split(linear: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The place in each dimension, of a row-major place in a tensor of this shape."""
    return tuple(
        Index.of(0) if n == 1 else linear // step % n if i else linear // step
        for i, (n, step) in enumerate(zip(shape, strides_of(shape), strict=True))
    )


def join(place: Sequence[Index], strides: Sequence[int]) -> Index:
    """The place in memory, from the place in each dimension."""
    total = Index.of(0)
    for index, step in zip(place, strides, strict=True):
        if step:
            total = total + index * step
    return total
