"""Symbolic sizes of kernels: polynomials over named numbers, which are arguments of the kernels.

An `Extent` is no int: it equals another one if both are equal for all numbers, and has no order. Results must be right
for all sizes, so rules ask for certain facts (`at_least`, `divides`). Choices that only affect speed use the `hint`,
the size at compile time."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence


class Undecided(Exception):
    """Raised where a kernel depends on an unknown fact about a size."""


class Atom:
    """A number that kernels are given, which is at least `low`. of: (n, by) of a quotient `n / by`, rounded up."""

    __slots__ = ("name", "low", "hint", "of")

    def __init__(self, name: str, low: int, hint: int, of: tuple[Extent, int] | None = None):
        self.name, self.low, self.hint, self.of = name, low, hint, of

    def __lt__(self, other: Atom) -> bool:  # the order of factors
        return self.name < other.name


class Extent:
    """`terms` maps a sorted tuple of atoms (() is the constant) to its coefficient, which is never 0. Never changed."""

    __slots__ = ("terms", "_hash", "_low")

    def __init__(self, terms: dict[tuple[Atom, ...], int]):
        self.terms = terms
        self._hash = hash(frozenset(terms.items()))
        self._low: float | None = None

    @staticmethod
    def of(atom: Atom) -> Extent:
        return Extent({(atom,): 1})

    def __eq__(self, other) -> bool:
        return isinstance(other, Extent) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return text(self)

    def __add__(self, other: int | Extent) -> int | Extent:
        terms = dict(self.terms)
        for monomial, c in _terms(other):
            terms[monomial] = terms.get(monomial, 0) + c
        return _from_terms(terms)

    def __mul__(self, other: int | Extent) -> int | Extent:
        terms: dict = {}
        for m, c in self.terms.items():
            for n, d in _terms(other):
                monomial = tuple(sorted(m + n)) if m and n else m or n
                terms[monomial] = terms.get(monomial, 0) + c * d
        return _from_terms(terms)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> int | Extent:
        return self * -1

    def __sub__(self, other: int | Extent) -> int | Extent:
        return self + -other

    def __rsub__(self, other: int) -> int | Extent:
        return -self + other

    @property
    def low(self) -> float:
        """A lower bound: exact if no coefficient is negative when each atom is at its own."""
        if self._low is None:
            total: int | Extent = 0
            for monomial, c in self.terms.items():
                product: int | Extent = c
                for atom in monomial:
                    product = product * Extent({(atom,): 1, **({(): atom.low} if atom.low else {})})
                total = total + product
            terms = dict(_terms(total))
            constant = terms.pop((), 0)
            self._low = -math.inf if any(c < 0 for c in terms.values()) else constant
        return self._low


def _terms(n: int | Extent):
    return n.terms.items() if isinstance(n, Extent) else (((), n),) if n else ()


def _from_terms(terms: dict) -> int | Extent:
    nonzero = {m: c for m, c in terms.items() if c}
    return nonzero.get((), 0) if not nonzero or nonzero.keys() == {()} else Extent(nonzero)


def at_least(a: int | Extent, b: int | Extent) -> bool:
    """Whether a >= b for all values of the atoms."""
    if type(a) is int and type(b) is int:
        return a >= b
    difference = a - b
    return difference >= 0 if isinstance(difference, int) else difference.low >= 0


def _leading(n: int | Extent) -> tuple[tuple, int]:
    return max(_terms(n), key=lambda t: (len(t[0]), [a.name for a in t[0]]))


def _divided(n: int | Extent, by: int | Extent) -> tuple[int | Extent, int | Extent]:
    """(q, r) with n = q * by + r, by the division of polynomials."""
    lead, c = _leading(by)
    whole: int | Extent = 0
    rest: int | Extent = 0
    while n:
        monomial, k = _leading(n)
        quotient_monomial = _without(monomial, lead)
        if quotient_monomial is None or not k // c:
            term = _from_terms({monomial: k})
            rest, n = rest + term, n - term
        else:
            term = _from_terms({quotient_monomial: k // c})
            whole, n = whole + term, n - by * term
            if k % c:
                left = _from_terms({monomial: k % c})
                rest, n = rest + left, n - left
    return whole, rest


def _without(monomial: tuple, factors: tuple) -> tuple | None:
    left = list(monomial)
    for atom in factors:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def quotient(n: int | Extent, by: int | Extent) -> int | Extent | None:
    """n / by, where that is whole for all numbers; else None."""
    if type(n) is int and type(by) is int:
        return None if n % by else n // by
    if isinstance(by, int):
        assert isinstance(n, Extent)
        return None if any(c % by for c in n.terms.values()) else _from_terms({m: c // by for m, c in n.terms.items()})
    whole, rest = _divided(n, by)
    return None if rest else whole


def divides(by: int | Extent, n: int | Extent) -> bool:
    return n % by == 0 if isinstance(n, int) and isinstance(by, int) else quotient(n, by) is not None


def exact(n: int | Extent, by: int | Extent) -> int | Extent:
    """n / by, which is known to be whole."""
    whole = quotient(n, by)
    assert whole is not None, f"{by} does not divide {n}"
    return whole


def rounded_up(n: int | Extent, by: int) -> int | Extent:
    """n / by, rounded up: a number that kernels are given where it is no polynomial. n is at least 1."""
    if isinstance(n, int):
        return -(-n // by)
    whole = quotient(n, by)
    return whole if whole is not None else Extent.of(_rounded_up(n, by))


@functools.lru_cache(maxsize=1024)
def _rounded_up(n: Extent, by: int) -> Atom:
    name = "_".join(["up", *re.findall(r"\w+|[-+*]", text(n)), str(by)])
    for sign, word in (("+", "plus"), ("-", "minus"), ("*", "by")):
        name = name.replace(sign, word)
    return Atom(name, 1, -(-hint(n) // by), (n, by))


def least(ns: Iterable[int | Extent]) -> int | Extent:
    """The least one. Raises Undecided where that depends on the numbers."""
    best, *others = ns
    for n in others:
        if not at_least(n, best):
            if not at_least(best, n):
                raise Undecided
            best = n
    return best


def largest(ns: Iterable[int | Extent]) -> int | Extent:
    """The largest one. Raises Undecided where that depends on the numbers."""
    return -least(-n for n in ns)


def floor(n: int | Extent, by: int | Extent) -> int | Extent | None:
    """n // by, where it is the same expression for all numbers; else None."""
    if type(n) is int and type(by) is int:
        return n // by
    whole, rest = _divided(n, by)
    for k in (0, -1, 1):
        if at_least(rest, by * k) and at_least(by * (k + 1) - 1, rest):
            return whole + k
    return None


def common(a: int | Extent, b: int | Extent) -> int | Extent:
    """A common divisor, the greatest one where the terms show it."""
    if isinstance(a, int) and isinstance(b, int):
        return math.gcd(a, b)
    for one, other in ((a, b), (b, a)):
        if divides(one, other):
            return one
    terms = [*_terms(a), *_terms(b)]
    shared, left = [], [list(m) for m, _ in terms]
    for atom in terms[0][0]:
        if all(atom in m for m in left):
            shared.append(atom)
            for m in left:
                m.remove(atom)
    return _from_terms({tuple(shared): math.gcd(*(c for _, c in terms))})


def value_of(n: int | Extent, values: Mapping[str, int]) -> int:
    return sum(c * math.prod(values[a.name] for a in m) for m, c in _terms(n))


def hint(n: int | Extent) -> int:
    """The size at compile time, for choices that affect speed only."""
    return n if isinstance(n, int) else sum(c * math.prod(a.hint for a in m) for m, c in n.terms.items())


def power_of_two(n: int | Extent) -> int:
    """The least power of two that is not less, for a size as it came in first."""
    return 1 << (hint(n) - 1).bit_length()


def text(n: int | Extent) -> str:
    """An expression of the atoms' names, for kernels and for Python."""
    if isinstance(n, int):
        return str(n)
    parts = [" * ".join([*(a.name for a in m), *([str(c)] if c != 1 or not m else [])]) for m, c in n.terms.items()]
    return " + ".join(parts)


def factor_text(n: int | Extent) -> str:
    """The same as an operand."""
    words = text(n)
    return words if isinstance(n, int) or words.isidentifier() else f"({words})"


def atoms_of(ns: Iterable[int | Extent]) -> list[Atom]:
    """The atoms that occur, each once."""
    return [*dict.fromkeys(a for n in ns if isinstance(n, Extent) for m in n.terms for a in m)]


def tuple_text(ns: Sequence[int | Extent]) -> str:
    return f"({', '.join(map(text, ns))}{',' * (len(ns) == 1)})"
