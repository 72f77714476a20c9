"""Values of a program while it is traced: the base class, and symbolic numbers.

A `NumberProxy` stands for a Python number whose value may differ from call to call. Its value is known to
`symbolic.Decisions` alone: `concrete` is the one way to it, and makes it a guard. A number that an operation computes
from data has no value at capture: it is an `UnbackedNumber`, and its relations are `Condition`s.
"""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable
from typing import Any

from thunder.core import symbolic
from thunder.core.recording import (
    Recorder,
    decided_by_data,
    errors_are_handled,
    made_by_program,
    note_look,
    user_location,
    why_undecided,
)
from thunder.core.symbolic import RELATIONS
from thunder.errors import DataDependentError

BINARY_DUNDERS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()


class Proxy:
    """A named value of a trace. Proxies are compared by identity. Transforms create new proxies instead of changing
    them."""

    __slots__ = ("name", "__weakref__")
    name: str

    def _type_text(self) -> str:
        """The type as traces print it."""
        return "Any"

    def __repr__(self) -> str:
        note_look()
        return f'<{type(self).__name__} {self.name or "unnamed"}: "{self._type_text()}">'


class UnbackedNumber(Proxy):
    """A number that an operation computes from data: the size of a result, or the value of a tensor. The program holds
    a `NumberProxy` of this name.

    origin: its source in words. facts: those about such numbers in this program.
    """

    __slots__ = ("python_type", "origin", "facts")
    requires_grad = None  # among outputs: that is a question for tensors

    def __init__(self, name: str, python_type: type, origin: str, facts: symbolic.Facts):
        self.name, self.python_type, self.origin, self.facts = name, python_type, origin, facts

    def number(self) -> NumberProxy | Condition:
        """The value that the program holds: a `NumberProxy`, or a `Condition` for a bool."""
        if self.python_type is bool:
            return Condition(number_of(symbolic.symbol(self.name), int, (self,)), "!=", 0, (self,))
        return number_of(symbolic.symbol(self.name), self.python_type, (self,))

    def _type_text(self) -> str:
        return self.python_type.__name__

    def replace(self) -> UnbackedNumber:
        return UnbackedNumber(self.name, self.python_type, self.origin, self.facts)


def made_number(recorder: Recorder, python_type: type, origin: str) -> tuple[UnbackedNumber, NumberProxy | Condition]:
    """A new number as the result of an operation, and the value that the program holds for it."""
    names = recorder.context.names
    number = UnbackedNumber(names.make("v" if python_type is float else "u"), python_type, origin, names.facts)
    return number, number.number()


def _undecided(what: str, unbacked: tuple[UnbackedNumber, ...]) -> DataDependentError:
    origins = ", ".join(f"{u.name} is {u.origin}" for u in unbacked)
    return DataDependentError(
        f"{what} is known only when the program runs ({origins}{why_undecided()})",
        location=user_location(),
        remedy="use operations that go without it (torch.where, masks, torch.nonzero_static); say what holds with "
        "torch._check(...); or compute it outside and pass it in",
    )


class Condition:
    """A relation of data-dependent numbers, which a program holds for a data-dependent bool. The program may return it,
    and `torch._check` takes it."""

    __slots__ = ("a", "relation", "b", "unbacked")

    def __init__(self, a, relation: str, b, unbacked: tuple[UnbackedNumber, ...]):
        self.a, self.relation, self.b, self.unbacked = a, relation, b, unbacked

    def __bool__(self) -> bool:
        answer = _decided(self.a, self.relation, self.b, self.unbacked)  # the program may have checked it since
        if answer is None:
            answer = decided_by_data("truth", self)
        if answer is None:
            raise _undecided(f"whether {self.text()}", self.unbacked)
        return answer

    def text(self) -> str:
        return f"{_expression(self.a)} {self.relation} {_expression(self.b)}"

    def assume(self, holds: bool = True) -> None:
        """The program goes on only where it holds, or where it does not."""
        if float in (_type_of(self.a), _type_of(self.b)):
            self.unbacked[0].facts.known[_expression(self.a), self.relation, _expression(self.b)] = holds
        else:
            told = self if holds else self.__sym_not__()
            told.unbacked[0].facts.assume(_expression(told.a), told.relation, _expression(told.b))

    def __sym_not__(self) -> Condition:
        return Condition(
            self.a,
            {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}[self.relation],
            self.b,
            self.unbacked,
        )


def _plain(x):
    return bool(x) if type(x) is Condition else x


_BINARY_OF_BOOLS = [n for n in BINARY_DUNDERS if n != "matmul"]
for _name in [
    "int",
    "index",
    "float",
    "str",
    "format",
    "hash",
    "neg",
    "abs",
    "invert",
    *"eq ne lt le gt ge".split(),
    *_BINARY_OF_BOOLS,
    *(f"r{n}" for n in _BINARY_OF_BOOLS),
]:
    setattr(
        Condition,
        f"__{_name}__",
        lambda self, *other, _name=_name: getattr(bool(self), f"__{_name}__")(*map(_plain, other)),
    )


class NumberProxy:
    """A symbolic Python number: an expression over arguments and data-dependent numbers. It is not a `Proxy`.

    Args:
        name: The name in the trace.
        decisions: The values of the numbers that the prologue passes in, and the relations that branches have recorded.
        expression: The expression over these numbers.
        unbacked: The data-dependent numbers in the expression. A number that contains one has neither a value nor a
            guard, and a branch on it raises an error unless arithmetic decides it.
    """

    __slots__ = ("name", "expression", "decisions", "unbacked", "__weakref__")
    python_type: type = int

    def __init__(
        self,
        name: str,
        decisions: symbolic.Decisions,
        expression: symbolic.Expression | None = None,
        unbacked: tuple[UnbackedNumber, ...] = (),
    ):
        self.name, self.decisions, self.unbacked = name, decisions, unbacked
        self.expression = symbolic.symbol(name) if expression is None else expression

    value = property(lambda self: self.concrete())

    def _type_text(self) -> str:
        """The type as traces print it, with the value at capture."""
        return self.python_type.__name__ if self.unbacked else f"{self.python_type.__name__} {_hint(self)!r}"

    def __deepcopy__(self, memo):
        return self

    def renamed(self, table: dict[Proxy, Any]) -> NumberProxy:
        """Returns the number with its data-dependent numbers replaced as `table` says."""
        if not any(u in table for u in self.unbacked):
            return self
        unbacked = tuple(table.get(u, u) for u in self.unbacked)
        return number_of(
            self.expression.renamed({old.name: new.name for old, new in zip(self.unbacked, unbacked)}),
            self.python_type,
            unbacked,
        )

    def symbol(self, name: str) -> NumberProxy:
        """Returns one of the numbers that occur in the expression."""
        if self.expression == symbolic.symbol(name):
            return self
        unbacked = next((u for u in self.unbacked if u.name == name), None)
        if unbacked is not None:
            return number_of(symbolic.symbol(name), unbacked.python_type, (unbacked,))
        return (FloatProxy if type(self.decisions.values[name]) is float else IntegerProxy)(name, self.decisions)

    def concrete(self) -> Any:
        """Returns the value and guards it, so that the program is valid for this value only. Raises
        DataDependentError for a data-dependent number."""
        if self.unbacked:
            constant = self.known()
            if constant is None:
                constant = decided_by_data("value", self)
            if constant is None:
                raise _undecided(f"the value of {self.expression}", self.unbacked)
            self.unbacked[0].facts.values[self.expression] = constant
            return constant
        value = _hint(self)
        if not self.expression.is_constant:
            self.decisions.decide(self.expression, "==", symbolic.constant(value))
        return value

    def known(self) -> Any:
        """Returns the value of a data-dependent number if the program has decided it, and None otherwise."""
        values = self.unbacked[0].facts.values
        if self.expression in values or not values:
            return values.get(self.expression)
        known: dict[str, Any] = {u.name: values.get(symbolic.symbol(u.name)) for u in self.unbacked}
        if None in known.values() or not self.expression.symbols() <= known.keys():
            return None
        return self.expression.evaluate(known)

    def __bool__(self) -> bool:
        return bool(_compare(self, 0, "!="))

    def __repr__(self) -> str:
        note_look()
        hint = "" if self.unbacked else f", {_hint(self)!r} at capture"
        return f"<{type(self).__name__} {self.expression}{hint}>"

    def __hash__(self) -> int:
        return hash(self.concrete())

    def __format__(self, spec: str) -> str:
        return format(self.concrete(), spec)

    def __str__(self) -> str:
        return str(self.concrete())

    def __int__(self) -> int:
        return int(self.concrete())

    def __float__(self) -> float:
        return float(self.concrete())

    def __complex__(self) -> complex:
        return complex(self.concrete())

    def __round__(self, digits=None):
        return application("round", self) if digits is None else application("round", self, digits)


class IntegerProxy(NumberProxy):
    """An int that stays symbolic."""

    __slots__ = ()
    python_type = int

    def __index__(self) -> int:
        return self.concrete()

    def __round__(self, digits=None):
        return self if digits is None else application("round", self, digits)


class FloatProxy(NumberProxy):
    """A float that stays symbolic."""

    __slots__ = ()
    python_type = float


# no classes derived from them, which have their own arithmetic
_NUMBERS = frozenset((bool, int, float, IntegerProxy, FloatProxy))


def _expression(x) -> symbolic.Expression:
    return x.expression if isinstance(x, NumberProxy) else symbolic.constant(x)


def _hint(x):
    return x.expression.evaluate(x.decisions.values) if isinstance(x, NumberProxy) else x


def application(name: str, *operands: Any):
    """A function of numbers, by its name in `symbolic.APPLICATIONS`, as a NumberProxy; as a plain number where the
    result does not depend on an input."""
    if _unbacked(operands):
        return _unbacked_application(name, operands)
    if name == "pow":  # an int, a float or a complex number, as signs say
        base, exponent = operands
        if _type_of(exponent) is int:
            bool(exponent >= 0)
        elif not base >= 0:
            return concrete(base) ** concrete(exponent)
    function = symbolic.APPLICATIONS[name][0]
    try:
        value = function(*map(_hint, operands))
    except (ArithmeticError, ValueError):  # for these numbers, which the program may go on with
        return function(*map(concrete, operands))
    expression = _expressed(name, operands, type(value))
    if expression.is_constant:
        return value
    decisions = next(x.decisions for x in operands if isinstance(x, NumberProxy))
    if name not in _TOTAL and errors_are_handled():
        decisions.require(expression)
    return (FloatProxy if type(value) is float else IntegerProxy)(str(expression), decisions, expression)


# applications that raise for no numbers
_TOTAL = frozenset(("add", "sub", "mul", "neg", "abs", "max", "min", "and", "or", "xor", "invert"))


def _expressed(name: str, operands: tuple, kind: type) -> symbolic.Expression:
    expressions = tuple(map(_expression, operands))
    if kind is int and name in ("add", "sub", "mul"):
        return getattr(operator, name)(*expressions)
    return symbolic.apply(name, *expressions, whole=kind is int)


def _unbacked(operands: tuple) -> tuple[UnbackedNumber, ...]:
    """The data-dependent numbers in operands."""
    of_operands = [x.unbacked for x in operands if isinstance(x, NumberProxy) and x.unbacked]
    return of_operands[0] if len(of_operands) == 1 else tuple(dict.fromkeys(u for each in of_operands for u in each))


def _type_of(x) -> type:
    return x.python_type if isinstance(x, NumberProxy) else type(x)


_BITWISE = ("and", "or", "xor", "lshift", "rshift", "invert")


def _result_kind(name: str, operands: tuple) -> type:
    """The type of the result for these operands in Python, int or float."""
    if name in _BITWISE:
        return type(symbolic.APPLICATIONS[name][0](*(_type_of(x)(1) for x in operands)))  # raises for floats
    if name in ("int", "math.trunc", "math.ceil", "math.floor") or name == "round" and len(operands) == 1:
        return int
    if name in ("truediv", "float") or any(_type_of(x) is float for x in operands):
        return float
    # of an int, a float where the exponent is negative
    if name == "pow" and not (isinstance(operands[1], int) and operands[1] >= 0):
        return int if operands[1] >= 0 else float
    return int


def _unbacked_application(name: str, operands: tuple):
    """`application` for numbers some of which have no value: those with one are numbers that the program computes."""
    operands = tuple(map(_beside_data, operands))
    if name in ("truediv", "floordiv", "mod") and isinstance(operands[1], NumberProxy) and errors_are_handled():
        bool(operands[1] != 0)  # the program goes on elsewhere
    kind = _result_kind(name, operands)
    expression = _expressed(name, operands, kind)
    return expression.constant if expression.is_constant else number_of(expression, kind, _unbacked(operands))


def _beside_data(x):
    """A number as an operand beside a data-dependent one."""
    if not isinstance(x, NumberProxy) or x.unbacked or x.expression.is_constant:
        return x
    number = made_by_program(x)
    if number is None:
        raise DataDependentError(f"what {x.expression} and a data-dependent number give", location=user_location())
    return number


_UNDECIDED = symbolic.Decisions()


def number_of(expression: symbolic.Expression, kind: type, unbacked: tuple[UnbackedNumber, ...]) -> NumberProxy:
    """A number that depends on data-dependent numbers."""
    return (FloatProxy if kind is float else IntegerProxy)(str(expression), _UNDECIDED, expression, unbacked)


def extreme(name: str, a, b):
    """max(a, b) or min(a, b) of numbers, without branching where they are of one type."""
    relation = ">" if name == "max" else "<"
    if _type_of(a) is not _type_of(b):
        return b if RELATIONS[relation](b, a) else a
    second = _known(b, relation, a)
    return application(name, a, b) if second is None else b if second else a


def _known(a, relation: str, b) -> bool | None:
    """Whether a relation holds for all numbers that the program fits; None where that depends on them."""
    if unbacked := _unbacked((a, b)):
        return _decided(a, relation, b, unbacked)
    decisions = next((x.decisions for x in (a, b) if isinstance(x, NumberProxy)), None)
    return RELATIONS[relation](a, b) if decisions is None else decisions.known(_expression(a), relation, _expression(b))


def _decided(a, relation: str, b, unbacked: tuple[UnbackedNumber, ...]) -> bool | None:
    """Whether a relation holds, by arithmetic or by earlier checks of the program; None where these do not decide."""
    facts = unbacked[0].facts
    if facts.values:
        known = [x.known() if isinstance(x, NumberProxy) and x.unbacked else x for x in (a, b)]
        if not any(x is None or isinstance(x, NumberProxy) for x in known):
            return RELATIONS[relation](*known)
    if float in (_type_of(a), _type_of(b)):
        return facts.known.get((_expression(a), relation, _expression(b)))
    return facts.decide(_expression(a), relation, _expression(b))


def _compare(a, b, relation: str) -> bool | Condition:
    unbacked = _unbacked((a, b))
    if unbacked:
        answer = _decided(a, relation, b, unbacked)
        return Condition(a, relation, b, unbacked) if answer is None else answer
    ea, eb = _expression(a), _expression(b)
    if (ea - eb).is_constant if _type_of(a) is _type_of(b) is int else ea == eb:
        return RELATIONS[relation](_hint(a), _hint(b))
    return next(x.decisions for x in (a, b) if isinstance(x, NumberProxy)).decide(ea, relation, eb)


def _binary_number(name: str, reflected: bool) -> Callable:
    """A special method of numbers, `__add__` or `__radd__`."""
    calculate = _divmod if name == "divmod" else functools.partial(application, name)

    def method(self, other, *modulus):
        if modulus:
            return pow(self.concrete(), concrete(other), concrete(*modulus))
        if type(other) in _NUMBERS:
            return calculate(other, self) if reflected else calculate(self, other)
        if isinstance(other, numbers.Number):  # a complex number, a fraction
            function = divmod if name == "divmod" else symbolic.APPLICATIONS[name][0]
            return function(other, self.concrete()) if reflected else function(self.concrete(), other)
        return NotImplemented

    return method


def _relation(relation: str) -> Callable:
    def method(self, other):
        if type(other) in _NUMBERS:
            return _compare(self, other, relation)
        return RELATIONS[relation](self.concrete(), other) if isinstance(other, numbers.Number) else NotImplemented

    return method


def _divmod(a, b):
    return application("floordiv", a, b), application("mod", a, b)


for _name in "add sub mul truediv floordiv mod divmod pow and or xor lshift rshift".split():
    setattr(NumberProxy, f"__{_name}__", _binary_number(_name, False))
    setattr(NumberProxy, f"__r{_name}__", _binary_number(_name, True))
for _stem, _symbol in zip("eq ne lt le gt ge".split(), RELATIONS, strict=True):
    setattr(NumberProxy, f"__{_stem}__", _relation(_symbol))
NumberProxy.__neg__ = lambda self: application("neg", self)  # type: ignore[method-assign, attr-defined]
NumberProxy.__invert__ = lambda self: application("invert", self)  # type: ignore[attr-defined]
NumberProxy.__abs__ = lambda self: application("abs", self)  # type: ignore[attr-defined]
NumberProxy.__pos__ = lambda self: self  # type: ignore[attr-defined]
for _name in ("trunc", "floor", "ceil"):
    setattr(
        NumberProxy,
        f"__{_name}__",
        lambda self, _name=f"math.{_name}": self if type(self) is IntegerProxy else application(_name, self),
    )


numbers.Integral.register(IntegerProxy)
numbers.Real.register(FloatProxy)


def concrete(x):
    """A plain number: a NumberProxy's value, which becomes a guard; anything else as it is."""
    return x.concrete() if isinstance(x, NumberProxy) else x


def settled(x):
    """`concrete(x)`; a data-dependent number stays as it is."""
    return x if isinstance(x, NumberProxy) and x.unbacked else concrete(x)


def converted(x, kind: type):
    """int(x) or float(x), where x may be a data-dependent number."""
    if not isinstance(x, NumberProxy):
        return kind(x)
    return x if x.python_type is kind else application(kind.__name__, x)


def number_value(x):
    """The value seen at capture, without making it a guard: for messages and estimates only. A data-dependent number
    counts as some."""
    if not isinstance(x, NumberProxy):
        return x
    if not x.unbacked:
        return _hint(x)
    return x.python_type(_ESTIMATE) if (known := x.known()) is None else known


_ESTIMATE = 64


def are_equal(a, b) -> bool:
    """Whether two sizes are equal by arithmetic alone, which decides nothing."""
    return a is b or _expression(a) == _expression(b)
