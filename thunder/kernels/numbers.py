"""The symbolic numbers of a region, as extents and scalars that kernels compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thunder.core.proxies import NumberProxy, number_value
from thunder.core.regions import Region
from thunder.core.symbolic import Expression
from thunder.kernels.sizes import Atom, Extent

_ANY = -(2**63)  # the least number there is
LEAST = 2  # of a size: kernels are made for at least two elements
ROWS = 1 << 14  # by which kernels are chosen for data-dependent sizes


class Scalar(NamedTuple):
    """A float that kernels are given as a double, which they round to the type that they compute in, as PyTorch's
    do."""

    name: str


class Numbers:
    """names: what the numbers that a region is called with are called in kernels, whatever a program calls them.

    A polynomial of sizes is itself. Any other expression, and one of which it is not plain that it is large enough, is
    an atom of its own; see `derived`. Expressions of floats are computed as Python computes them: see `floats`.
    Nothing ensures that a data-dependent size is as large as its atom says: `assumed` are the bounds of such atoms.
    """

    def __init__(self, region: Region):
        numbers = region.numbers
        self.names = tuple(f"n{i}" for i in range(len(numbers)))
        name_of = {n.name: name for n, name in zip(numbers, self.names, strict=True)}
        self._new = {name: name_of[n.name] for name, n in region.number_names.items()}
        self._seen = {name: _value(n) for name, n in region.number_names.items()}
        atoms = {n.name: Atom(name_of[n.name], LEAST, _value(n)) for n in numbers if is_size(n)}
        self._assumed = [(atoms[n.name].name, LEAST) for n in numbers if n.name in atoms and n.unbacked]
        self.sizes = [Extent.of(atom) for atom in atoms.values()]
        self._sizes = {name: atoms[n.name] for name, n in region.number_names.items() if n.name in atoms}
        self._atoms: dict[tuple[Expression, int], Atom] = {}
        self._floats: dict[Expression, Scalar] = {}

    def extent(self, x: int | NumberProxy, least: int) -> int | Extent:
        """A number that is known to be at least `least`."""
        if not isinstance(x, NumberProxy):
            return x
        polynomial = self._polynomial(x.expression)
        if polynomial is not None and (polynomial if isinstance(polynomial, int) else polynomial.low) >= least:
            return polynomial
        key = x.expression, least
        if key not in self._atoms:
            atom = self._atoms[key] = Atom(f"m{len(self._atoms)}", least, self.seen(x))
            if x.unbacked and least > _ANY:
                self._assumed.append((atom.name, least))
        return Extent.of(self._atoms[key])

    def seen(self, x: NumberProxy) -> int | float:
        """What a number was when kernels were made; some float where it is one, by which nothing is laid out."""
        return 1.0 if x.python_type is float else x.expression.evaluate(self._seen)

    def evaluate(self, x: NumberProxy, numbers: Sequence) -> Any:
        """What an expression is where the region is called with these numbers."""
        return x.expression.renamed(self._new).evaluate(dict(zip(self.names, numbers, strict=True)))

    def number(self, x):
        """An operand as it is, a symbolic number of any sign as an extent or a scalar."""
        if not isinstance(x, NumberProxy):
            return x
        if x.python_type is float:
            return self._floats.setdefault(x.expression, Scalar(f"f{len(self._floats)}"))
        polynomial = self._polynomial(x.expression)
        return polynomial if polynomial is not None else self.extent(x, _ANY)

    def shape(self, shape: Sequence) -> tuple:
        return tuple(self.extent(n, 1) for n in shape)

    def _polynomial(self, expression: Expression) -> int | Extent | None:
        total: int | Extent = 0
        for monomial, c in expression.terms.items():
            if not all(isinstance(atom, str) and atom in self._sizes for atom in monomial):
                return None
            product: int | Extent = c
            for atom in monomial:
                product = product * Extent.of(self._sizes[atom])
            total = total + product
        return total

    def derived(self) -> list[tuple[str, str]]:
        """The atoms that are no sizes: name and expression of the numbers' names."""
        return [(atom.name, str(expression.renamed(self._new))) for (expression, _), atom in self._atoms.items()]

    def floats(self) -> list[tuple[str, str]]:
        """The scalars: name and expression of the numbers' names."""
        return [(scalar.name, str(expression.renamed(self._new))) for expression, scalar in self._floats.items()]

    def assumed(self) -> list[tuple[str, int]]:
        """Atoms of data-dependent sizes and the least values that kernels are right for: other calls run by
        operations."""
        return self._assumed

    def values(self, numbers: Sequence) -> Mapping[str, Any]:
        """What each atom is where the region is called with these numbers."""
        by_name = dict(zip(self.names, numbers, strict=True))
        return by_name | {
            atom.name: expression.renamed(self._new).evaluate(by_name) for (expression, _), atom in self._atoms.items()
        }


def is_size(number: NumberProxy) -> bool:
    """Whether a number is the size of a dimension, given as an argument or data-dependent."""
    if number.unbacked:
        return number.python_type is int and number.unbacked[0].facts.least.get(number.name, -1) >= 0
    return number.decisions.is_size(number.name)


def _value(number: NumberProxy) -> int | float:
    """What a number is while kernels are made; an estimate of a data-dependent one."""
    if number.unbacked and number.python_type is int and number.known() is None:
        return ROWS
    return number_value(number)
