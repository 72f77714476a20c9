"""Arithmetic on symbolic sizes and numbers: one small expression type.

An `Expression` is a polynomial with integer coefficients over atoms; an atom is an input symbol (a str: the name of a
number that the prologue passes in) or an application such as ("floordiv", a, b) of expressions. Polynomials are kept in
normal form, so that two sizes that are always equal are the same expression, and comparing them needs no guard.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

RELATIONS: dict[str, Callable] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

# functions of `math` that give one number, or a bool, for numbers, which are an expression's as they are
MATH: dict[str, Callable] = {
    f"math.{name}": function
    for name, function in vars(math).items()
    if isinstance(function, types.BuiltinFunctionType)
    and name not in ("dist", "frexp", "fsum", "modf", "prod", "sumprod")  # of sequences, or to tuples
}
# name -> (its meaning, how it is written)
APPLICATIONS: dict[str, tuple[Callable, str]] = {
    "add": (operator.add, "({} + {})"),  # of floats: kept in the order written, since float addition does not associate
    "sub": (operator.sub, "({} - {})"),
    "mul": (operator.mul, "({} * {})"),
    "floordiv": (operator.floordiv, "({} // {})"),
    "mod": (operator.mod, "({} % {})"),
    "truediv": (operator.truediv, "({} / {})"),
    "pow": (operator.pow, "({} ** {})"),
    "and": (operator.and_, "({} & {})"),
    "or": (operator.or_, "({} | {})"),
    "xor": (operator.xor, "({} ^ {})"),
    "lshift": (operator.lshift, "({} << {})"),
    "rshift": (operator.rshift, "({} >> {})"),
    "invert": (operator.invert, "(~{})"),
    "neg": (operator.neg, "(-{})"),
    # of floats, which Python 3.12 compensates for what rounding loses; the first is the start
    "total": (lambda start, *values: sum(values, start), "sum([{values}], {})"),
    **{name: (function, "") for name, function in MATH.items()},  # "": as a call of the name
    **{function.__name__: (function, "") for function in (abs, max, min, int, float, round)},
}


class Computed:
    """A number that a program computes of symbolic numbers and constants alone, by operations: the name of an
    application. function: of the symbols' values. What it gave is remembered."""

    __slots__ = ("name", "function", "known")
    _count = itertools.count()

    def __init__(self, function: Callable[..., int]):
        self.name, self.function = f"computed_{next(self._count)}", function
        self.known: dict[tuple, int] = {}

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *values) -> int:
        result = self.known.get(values)
        if result is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            result = self.known[values] = self.function(*values)
        return result

    def of(self, names: Iterable[str]) -> Expression:
        return Expression({((self, *map(symbol, names)),): 1})


_REMEMBERED = 1024  # values of a computed number


class Expression:
    """`terms` maps a sorted tuple of atoms (a monomial; () is the constant) to its coefficient, which is never 0."""

    __slots__ = ("terms", "key")

    def __init__(self, terms: dict):
        self.terms = terms
        self.key = tuple(sorted(terms.items(), key=repr))

    def __eq__(self, other):
        return type(other) is Expression and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    @property
    def is_constant(self) -> bool:
        return not self.terms or (len(self.terms) == 1 and () in self.terms)

    @property
    def constant(self):
        return self.terms.get((), 0)

    def __add__(self, other: Expression) -> Expression:
        terms = dict(self.terms)
        for mono, c in other.terms.items():
            total = terms.get(mono, 0) + c
            if total == 0:
                terms.pop(mono, None)
            else:
                terms[mono] = total
        return Expression(terms)

    def __sub__(self, other: Expression) -> Expression:
        return self + Expression({m: -c for m, c in other.terms.items()})

    def __mul__(self, other: Expression) -> Expression:
        out = Expression({})
        for m1, c1 in self.terms.items():
            out = out + Expression({tuple(sorted(m1 + m2, key=repr)): c1 * c2 for m2, c2 in other.terms.items()})
        return out

    def symbols(self) -> set[str]:
        """Names of the input symbols that occur."""
        names: set[str] = set()
        for mono in self.terms:
            for atom in mono:
                names.update((atom,) if isinstance(atom, str) else set().union(*(a.symbols() for a in atom[1:])))
        return names

    def computed(self) -> set[Computed]:
        """The computed numbers that occur."""
        functions: set[Computed] = set()
        for atom in (atom for mono in self.terms for atom in mono if not isinstance(atom, str)):
            functions.update((atom[0],) if isinstance(atom[0], Computed) else (), *(a.computed() for a in atom[1:]))
        return functions

    def evaluate(self, values: dict[str, int | float]) -> Any:
        """The number this stands for where `values` gives each symbol's."""
        total = None
        for mono, c in self.terms.items():
            for atom in mono:
                named = isinstance(atom, str)
                x = values[atom] if named else _meaning(atom[0])(*(a.evaluate(values) for a in atom[1:]))
                c = x if type(c) is int and c == 1 else c * x  # a number from outside as it is
            total = c if total is None else total + c  # not 0 + c, which loses the sign of -0.0
        return 0 if total is None else total

    @property
    def is_choice(self) -> bool:
        """Whether it is a function that may give an operand itself."""
        return any(atom[0] in ("abs", "max", "min") for mono in self.terms for atom in mono if type(atom) is tuple)

    def renamed(self, names: dict[str, str]) -> Expression:
        """The same of other input symbols."""

        def atom(a):
            return names.get(a, a) if isinstance(a, str) else (a[0], *(x.renamed(names) for x in a[1:]))

        return Expression({tuple(sorted(map(atom, mono), key=repr)): c for mono, c in self.terms.items()})

    def divide_exactly(self, other: Expression) -> Expression | None:
        """The quotient when it is plain to see: division of every term by one common monomial, else None."""
        if len(other.terms) != 1:
            return constant(1) if self == other else None
        ((mono, c),) = other.terms.items()
        terms = {}
        for m, k in self.terms.items():
            rest = list(m)
            for atom in mono:
                if atom not in rest:
                    return None
                rest.remove(atom)
            if type(k) is not int or type(c) is not int or k % c:
                return None
            terms[tuple(rest)] = k // c
        return Expression(terms)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        return " + ".join(_monomial(m, c) for m, c in self.key).replace("+ -", "- ")

    __repr__ = __str__


def _meaning(name: str | Computed) -> Callable:
    return name if isinstance(name, Computed) else APPLICATIONS[name][0]


def _monomial(mono: tuple, c) -> str:
    factors = [a if isinstance(a, str) else _application(*a) for a in mono]
    if not factors:
        return repr(c) if math.isfinite(c) else f"math.{c}" if c != -math.inf else "(-math.inf)"
    product = "*".join(factors)
    return product if c == 1 else f"-{product}" if c == -1 else f"{c!r}*{product}"


def _application(name: str | Computed, *operands: Expression) -> str:
    texts = list(map(_operand, operands))
    written = "" if isinstance(name, Computed) else APPLICATIONS[name][1]
    return written.format(*texts, values=", ".join(texts[1:])) if written else f"{name}({', '.join(texts)})"


def _operand(e: Expression) -> str:
    text = str(e)
    return text if text.isidentifier() or e.is_constant and text[0] != "-" else f"({text})"


def symbol(name: str) -> Expression:
    return Expression({(name,): 1})


def constant(value) -> Expression:
    return Expression({(): value} if value != 0 or type(value) is float else {})


def apply(name: str, *args: Expression, whole: bool = True) -> Expression:
    """An application, simplified where it is plain: constants fold, an exact quotient of `whole` numbers loses its
    division."""
    if all(a.is_constant for a in args):
        return constant(APPLICATIONS[name][0](*(a.constant for a in args)))
    if name == "neg":
        return constant(0) - args[0]
    if name == "floordiv" and whole and (q := args[0].divide_exactly(args[1])) is not None:
        return q
    if name == "mod" and whole and args[0].divide_exactly(args[1]) is not None:
        return constant(0)
    return Expression({((name, *args),): 1})


class Decisions:
    """The relations between symbolic numbers that a program was decided by, and the only place with their values.

    values: those of the input symbols, at capture.
    relations: (a, relation, b) -> whether it holds, in the order they were decided. A program fits other values where
    the same relations hold. Once `close`d, the decisions are checked by a program that is written: a new one is an
    error. places: where the program stood when it decided, as `where` said.
    """

    __slots__ = ("values", "relations", "closed", "places", "where", "_of_sizes", "_lock")

    def __init__(self, values: dict[str, int | float] | None = None):
        self.values = values or {}
        self.relations: dict[tuple, bool] = {}
        self.places: dict[tuple, Any] = {}
        self.where: Callable[[], Any] | None = None
        self.closed = False
        self._of_sizes = Facts()
        self._lock = threading.RLock()

    def add_size(self, name: str) -> None:
        """A symbol is a size of a tensor that is at least 2."""
        self.decide(symbol(name), ">", constant(1))
        self._of_sizes.least[name] = 2

    def is_size(self, name: str) -> bool:
        """Whether a symbol is a size, which is at least 2."""
        return name in self._of_sizes.least

    def known(self, a: Expression, relation: str, b: Expression) -> bool | None:
        """Whether a relation holds for all sizes; None where that depends on them."""
        return self._of_sizes.decide(a, relation, b)

    def is_one_value(self, e: Expression) -> bool:
        """Whether the program fits one value of an expression only."""
        return e.is_constant or self.relations.get((e, "==", constant(e.evaluate(self.values))), False)

    def least(self, e: Expression) -> float:
        """The least value that an expression may have, as sizes alone say."""
        return self._of_sizes.lower(e)

    def decide(self, a: Expression, relation: str, b: Expression) -> bool:
        """Whether a relation holds, from now on for the whole program."""
        known = self.known(a, relation, b)
        if known is not None:
            return known
        outcome = RELATIONS[relation](a.evaluate(self.values), b.evaluate(self.values))
        if (a, relation, b) not in self.relations:
            assert not self.closed, f"{a} {relation} {b} is decided after the checks of the program were written"
            self.relations[a, relation, b] = outcome
            self.places[a, relation, b] = self.where() if self.where is not None else None
        return outcome

    def require(self, e: Expression) -> None:
        """The program fits where `e` has a value: a guard that raises does not hold."""
        value = e.evaluate(self.values)
        self.relations[e, "==", e] = value == value

    def equal(self, name: str) -> str:
        """One name for all symbols that are equal where the program fits."""
        pairs = [
            sorted(m[0] for m in terms)
            for (a, relation, b), outcome in self.relations.items()
            if relation == "==" and outcome and _is_difference(terms := (a - b).terms)
        ]
        representative = name
        while lower := next(
            (first for first, second in pairs if second == representative and first != representative), None
        ):
            representative = lower
        return representative

    def close(self) -> None:
        self.closed, self.where, self.places = True, None, {}

    @contextlib.contextmanager
    def anew(self, values: dict[str, int | float]) -> Iterator[dict[tuple, bool]]:
        """Decides for other values that fit inside the block. Yields the relations which that adds."""
        with self._lock:
            before = self.values, self.relations, self.closed
            self.values, self.relations, self.closed = self.values | values, {}, False
            try:
                yield (relations := self.relations)
                for known in relations.keys() & before[1].keys():
                    del relations[known]
            finally:
                self.values, self.relations, self.closed = before


def _is_difference(terms: dict) -> bool:
    """Whether a polynomial is a multiple of the difference of two symbols."""
    return len(terms) == 2 and not sum(terms.values()) and all(len(m) == 1 and isinstance(m[0], str) for m in terms)


def hold(relations: dict[tuple, bool], values: dict[str, int | float]) -> bool:
    """Whether values agree with decisions."""
    return all(
        RELATIONS[r](a.evaluate(values), b.evaluate(values)) is outcome for (a, r, b), outcome in relations.items()
    )


class Facts:
    """The facts about the data-dependent numbers of one program.

    least: the least value of each number that has one, by name; sizes have 0. The other facts are what the program
    itself has checked (`torch._check`, decisions): polynomials that are at least 0, those that are not 0, relations of
    floats, and values of expressions.
    """

    __slots__ = ("least", "at_least_0", "not_0", "known", "values")

    def __init__(self):
        self.least: dict[str, int] = {}
        self.at_least_0: list[Expression] = []
        self.not_0: set[Expression] = set()
        self.known: dict[tuple[Expression, str, Expression], bool] = {}
        self.values: dict[Expression, int | float] = {}

    def decide(self, a: Expression, relation: str, b: Expression) -> bool | None:
        """Whether a relation of integers holds; None where it depends on the data."""
        if relation in ("<", "<="):
            a, b, relation = b, a, ">" if relation == "<" else ">="
        difference, opposite = a - b, b - a
        if relation == ">":
            return True if self._reaches(difference, 1) else False if self._reaches(opposite, 0) else None
        if relation == ">=":
            return True if self._reaches(difference, 0) else False if self._reaches(opposite, 1) else None
        if self._reaches(difference, 0) and self._reaches(opposite, 0):
            return relation == "=="
        apart = (
            self._reaches(difference, 1)
            or self._reaches(opposite, 1)
            or difference in self.not_0
            or opposite in self.not_0
        )
        return relation == "!=" if apart else None

    def assume(self, a: Expression, relation: str, b: Expression) -> None:
        """The program continues only where this relation of integers holds."""
        if relation == "!=":
            self.not_0.add(a - b)
        if relation in (">", ">=", "=="):
            self._assume_at_least_0(a - b - constant(int(relation == ">")))
        if relation in ("<", "<=", "=="):
            self._assume_at_least_0(b - a - constant(int(relation == "<")))

    def _assume_at_least_0(self, e: Expression) -> None:
        names = [m[0] for m, c in e.terms.items() if len(m) == 1 and isinstance(m[0], str) and c == 1]
        if len(names) == 1 and len(e.terms) <= 2 and (len(e.terms) == 1 or () in e.terms):
            least: int = -e.terms.get((), 0)
            self.least[names[0]] = max(least, self.least.get(names[0], least))
        else:
            self.at_least_0.append(e)

    def _reaches(self, e: Expression, n: int) -> bool:
        """Whether `e` is at least `n`: by itself, or because it is so much more than something that is at least 0."""
        return self.lower(e) >= n or any(self.lower(e - fact) >= n for fact in self.at_least_0)

    def lower(self, e: Expression) -> float:
        """The least value of an expression; -inf where nothing is known."""
        total: float = 0
        for mono, c in e.terms.items():
            if mono == ():
                total += c
                continue
            bounds = [self._lower_of_atom(a) for a in mono]
            if c < 0 or min(bounds) < 0 and len(mono) > 1:
                return -math.inf
            total += c * math.prod(bounds)
        return total

    def _lower_of_atom(self, atom) -> float:
        """The least value of a number, or of a function of expressions."""
        if isinstance(atom, str):
            return self.least.get(atom, -math.inf)
        name, *operands = atom
        bounds = [self.lower(x) for x in operands]
        if name in ("max", "min"):
            return max(bounds) if name == "max" else min(bounds)
        if (
            name == "abs"
            or name == "mod"
            and bounds[1] >= 1
            or name == "floordiv"
            and bounds[0] >= 0
            and bounds[1] >= 1
        ):
            return 0
        return -math.inf
