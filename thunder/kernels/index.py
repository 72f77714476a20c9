"""The index algebra: places in tensors as integer expressions over the loop variables of a kernel, in a normal form in
which inverse reshapes cancel.

An `Index` is a sum of multiples of atoms and a constant. An atom is a variable, or the quotient or remainder of another
index, which is never negative. A row-major place that is split and joined again is itself: `4 * (r // 4) + r % 4` is
`r`. Where sizes are extents (`sizes.py`), simplifications hold for all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.kernels.sizes import (
    Extent,
    Undecided,
    at_least,
    common,
    divides,
    exact,
    floor,
    hint,
    quotient,
)


class Variable:
    """A loop variable, or a number that a kernel has loaded: `0 <= name < size`. loaded: it is no loop variable."""

    __slots__ = ("name", "size", "loaded", "low", "high")

    def __init__(self, name: str, size: int | Extent, loaded: bool = False):
        self.name, self.size, self.loaded = name, size, loaded
        self.low, self.high = 0, size - 1


class Part:
    """`index // by`, or `index % by`, or where remainder is None, `index`, which is known to be in 0 .. by - 1: one
    atom for equal ones."""

    __slots__ = ("index", "by", "remainder", "key", "low", "high")

    def __init__(self, index: Index, by: int | Extent, remainder: bool | None):
        self.index, self.by, self.remainder = index, by, remainder
        self.key = (index.key, by, remainder)
        self.low, self.high = _bounds_of_quotient(index, by) if remainder is False else (0, by - 1)

    def __eq__(self, other) -> bool:
        return isinstance(other, Part) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def _bounds_of_quotient(index: Index, by: int | Extent) -> tuple:
    low, high = floor(index.low, by), floor(index.high, by)
    if low is None and at_least(index.low, 0):
        low = 0
    if high is None and at_least(index.high, 0):
        high = index.high
    if low is None or high is None:
        raise Undecided
    return low, high


def _bound(n: int | Extent, other: int | Extent, larger: bool) -> int | Extent:
    """The better one of two bounds, where that is certain."""
    if type(n) is int and type(other) is int:
        return n if (n > other) is larger else other
    return n if at_least(*((n, other) if larger else (other, n))) else other


def _positive(factor: int | Extent) -> bool:
    if isinstance(factor, int):
        return factor > 0
    if at_least(factor, 0):
        return True
    if at_least(0, factor):
        return False
    raise Undecided


class Index:
    """An integer expression with the bounds it is known to have. Never changed once made."""

    __slots__ = ("terms", "constant", "low", "high", "key")

    def __init__(
        self, terms: dict, constant: int | Extent, low: int | Extent | None = None, high: int | Extent | None = None
    ):
        self.terms = {atom: factor for atom, factor in terms.items() if factor}
        self.constant = constant
        own_low = own_high = constant
        for a, f in self.terms.items():
            if f > 0 if type(f) is int else _positive(f):
                own_low, own_high = own_low + f * a.low, own_high + f * a.high
            else:
                own_low, own_high = own_low + f * a.high, own_high + f * a.low
        self.low = own_low if low is None or low is own_low else _bound(own_low, low, True)
        self.high = own_high if high is None or high is own_high else _bound(own_high, high, False)
        self.key = (frozenset(self.terms.items()), constant)

    @staticmethod
    def of(x: Variable | int | Extent) -> Index:
        return Index({}, x) if not isinstance(x, Variable) else Index({x: 1}, 0) if x.size != 1 else Index({}, 0)

    def __add__(self, other: Index | int | Extent) -> Index:
        if not isinstance(other, Index):
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

    def __mul__(self, by: int | Extent) -> Index:
        low, high = self.low * by, self.high * by
        if not _positive(by):
            low, high = high, low
        return Index({a: f * by for a, f in self.terms.items()}, self.constant * by, low, high)

    def _divided(self, by: int | Extent) -> tuple[Index, Index]:
        """(q, r) with self = by * q + r, r made of what is not divisible, and not negative."""
        whole, rest = self._parted(by)
        if type(rest.low) is int and type(by) is int:
            shift = -(rest.low // by) if rest.low < 0 else 0
        else:
            shift = next((n for n in range(_SHIFTS) if at_least(rest.low + by * n, 0)), None)
            if shift is None:
                raise Undecided
        return (whole + -shift, rest + by * shift) if shift else (whole, rest)

    def _parted(self, by: int | Extent) -> tuple[Index, Index]:
        """(q, r) with self = by * q + r, where r has the terms that are not divisible."""
        divided, others = {}, {}
        for a, f in self.terms.items():
            divided_factor = quotient(f, by)
            if divided_factor is None:
                others[a] = f
            else:
                divided[a] = divided_factor
        constant = floor(self.constant, by)
        constant = 0 if constant is None else constant
        return Index(divided, constant), Index(others, self.constant - by * constant)

    def _stepped(self, by: int | Extent) -> tuple[Index, int | Extent, Index] | None:
        """(a, step, s) with self = step * a + s, 0 <= s < step, and step a divisor of `by`: what is small takes no part
        in a division."""
        for step in sorted({common(by, f) for f in self.terms.values()} - {1}, key=hint, reverse=True):
            large, small = self._parted(step)
            if at_least(small.low, 0) and at_least(step - 1, small.high):
                return large, step, small
        return None

    def _only(self) -> Part | None:
        """The quotient or remainder that this is, where it is nothing else."""
        if len(self.terms) != 1 or self.constant:
            return None
        ((atom, factor),) = self.terms.items()
        return atom if factor == 1 and isinstance(atom, Part) and atom.remainder is not None else None

    def __floordiv__(self, by: int | Extent) -> Index:
        if by == 1:
            return self
        low, high = floor(self.low, by), floor(self.high, by)
        if low is not None and low == high:
            return Index({}, low)
        whole, rest = self._divided(by)
        if at_least(by - 1, rest.high):
            part = Index.of(0)
        elif (stepped := rest._stepped(by)) is not None:
            part = stepped[0] // exact(by, stepped[1])
        elif (only := rest._only()) is not None and not only.remainder:
            part = Index({Part(only.index, only.by * by, False): 1}, 0)
        elif only is not None and divides(by, only.by):
            part = only.index // by % exact(only.by, by)
        else:
            part = Index({Part(rest, by, False): 1}, 0)
        total = whole + part
        return Index(total.terms, total.constant, low, high)

    def __mod__(self, by: int | Extent) -> Index:
        if at_least(self.low, 0) and at_least(by - 1, self.high):
            return self
        if by == 1:
            return Index.of(0)
        rest = self._divided(by)[1]
        if at_least(by - 1, rest.high):
            return rest
        if (stepped := rest._stepped(by)) is not None:
            large, step, small = stepped
            return large % exact(by, step) * step + small
        if (only := rest._only()) is not None and only.remainder and divides(by, only.by):
            return only.index % by
        return Index({Part(rest, by, True): 1}, 0)

    def is_inside(self, low: int | Extent, end: int | Extent) -> bool:
        """Whether it is in low .. end - 1 for all sizes."""
        return at_least(self.low, low) and at_least(end - 1, self.high)

    def is_variable(self, variable: Variable) -> bool:
        return self.key == Index.of(variable).key


_SHIFTS = 3  # of a size that something may be below 0


def within(index: Index, n: int | Extent) -> Index:
    """An index that is known to be in 0 .. n - 1, whatever its terms say."""
    inside = at_least(index.low, 0) and at_least(n - 1, index.high)
    return index if inside else Index({Part(index, n, None): 1}, 0)


def opened(index: Index) -> Index:
    """An equal index whose terms may have wider bounds, so that more of them combine."""
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


def bare(index: Index) -> Index:
    """An equal index that has the bounds of its variables alone, also in its quotients and remainders."""
    total = Index.of(index.constant)
    for atom, factor in index.terms.items():
        if not isinstance(atom, Part):
            inner = Index.of(atom)
        else:
            inner = bare(atom.index)
            if atom.remainder is not None:
                inner = inner % atom.by if atom.remainder else inner // atom.by
        total = total + inner * factor
    return total


def strides_of(shape: Sequence[int | Extent]) -> tuple:
    """Row-major strides."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def split(linear: Index, shape: Sequence[int | Extent]) -> tuple[Index, ...]:
    """The place in each dimension, of a row-major place in a tensor of this shape."""
    return tuple(
        Index.of(0) if n == 1 else linear // step % n if i else linear // step
        for i, (n, step) in enumerate(zip(shape, strides_of(shape), strict=True))
    )


def join(indices: Sequence[Index], strides: Sequence[int | Extent]) -> Index:
    """The place in memory, from the place in each dimension."""
    total = Index.of(0)
    for index, step in zip(indices, strides, strict=True):
        if step:
            total = total + index * step
    return total
