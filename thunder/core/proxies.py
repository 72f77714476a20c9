"""Proxies: the values of a program while it is traced.

A `TensorProxy` stands for a tensor: name, shape, dtype, device, requires_grad, nothing else. A `NumberProxy` stands for
a Python number whose value may differ from call to call. Its value is known to `symbolic.Decisions` alone: `concrete`
is the one way to it, and makes it a guard.

What `a + b` or `a.sin()` mean is not known here: `thunder.ops` fills `METHODS` when it is imported.
"""

from __future__ import annotations

import copy
import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from thunder.core import symbolic
from thunder.core.devices import Device, to_device
from thunder.core.dtypes import dtype, is_inexact, to_dtype
from thunder.core.recording import decided_by_data, undecided, user_location, why_undecided
from thunder.core.symbolic import RELATIONS
from thunder.errors import DataDependentError

__all__ = [
    "Proxy",
    "TensorProxy",
    "FutureTensorProxy",
    "NumberProxy",
    "IntegerProxy",
    "FloatProxy",
    "UnbackedNumber",
    "Condition",
    "AnyProxy",
    "CollectionProxy",
    "METHODS",
    "RELATIONS",
    "leaves",
    "like",
    "concrete",
    "settled",
    "number_value",
    "element_count",
    "type_string",
    "proxies_in",
    "has_numbers",
    "numbers_in",
    "extreme",
    "converted",
    "Size",
    "equal_counts",
    "equal_shapes",
    "same_shape",
    "map_structure",
]


class MethodTable(dict):
    """What attributes of tensor proxies mean: name -> function of the proxy, filled by `thunder.ops`.

    `properties` are called when they are read. `fallback(proxy, name)` answers for a name that nobody filled in, and
    `torch_function(function, args, kwargs)` for a torch function called on a proxy by code that runs natively.
    """

    def __init__(self):
        super().__init__()
        self.properties: dict[str, Callable] = {}
        self.fallback: Callable[[Any, str], Any] | None = None
        self.torch_function: Callable | None = None

    def call(self, name: str, *args, **kwargs):
        method = self.get(name)
        if method is not None:
            return method(*args, **kwargs)
        if self.fallback is None:
            raise TypeError(f"{name} of a proxy has no meaning before thunder.ops is imported")
        return self.fallback(args[0], name)(*args[1:], **kwargs)

    def attribute(self, proxy, name: str):
        method = self.get(name)
        if method is not None:
            return lambda *args, **kwargs: method(proxy, *args, **kwargs)
        getter = self.properties.get(name)
        if getter is not None:
            return getter(proxy)
        if self.fallback is None or name.startswith("__"):
            raise AttributeError(f"{type(proxy).__name__!r} object has no attribute {name!r}")
        return self.fallback(proxy, name)


METHODS = MethodTable()


class Proxy:
    """A named value of a trace. Compared by identity; a transform makes new ones instead of changing them."""

    __slots__ = ("name", "__weakref__")
    name: str

    def __repr__(self) -> str:
        return f'<{type(self).__name__} {self.name or "unnamed"}: "{type_string(self)}">'


def _torch_function(cls, function, types, args=(), kwargs=None):
    """PyTorch asks it what a function does that was called with a proxy in the place of a tensor."""
    if METHODS.torch_function is None:
        return NotImplemented
    return METHODS.torch_function(function, args, kwargs or {})


class AnyProxy(Proxy):
    """A value that traces only pass through: a generator, a sparse tensor, an object of the user's. `example` is the
    one seen at capture."""

    __slots__ = ("example",)
    requires_grad = None  # among outputs: that is a question for tensors

    def __init__(self, name: str, example: Any = None):
        self.name, self.example = name, example

    __torch_function__ = classmethod(_torch_function)


class CollectionProxy(Proxy):
    """A list or tuple that a trace unpacks, as `saved_for_backward` of a backward trace."""

    __slots__ = ("collection",)

    def __init__(self, collection: Iterable, name: str = ""):
        self.collection, self.name = collection, name


class TensorProxy(Proxy):
    """A tensor of a trace.

    `like=` copies shape, device, dtype and requires_grad of another tensor proxy, each of which the other arguments
    override. `shape` is a sequence of ints or IntegerProxies; dtype and device are anything that names one. A dtype
    without gradients (integers, bool) makes requires_grad False. The name is given when an operation that returns the
    proxy is recorded, unless the caller gives one.
    """

    __slots__ = ("shape", "dtype", "device", "requires_grad")
    shape: tuple
    dtype: dtype
    device: Device
    requires_grad: bool

    def __init__(
        self,
        name=None,
        *,
        like: TensorProxy | None = None,
        shape=None,
        device=None,
        dtype=None,
        requires_grad: bool | None = None,
    ):
        if like is None and (shape is None or device is None or dtype is None):
            raise ValueError("TensorProxy needs like=, or all of shape=, device= and dtype=")
        self.name = name or ""
        self.shape = like.shape if shape is None else tuple(shape)  # type: ignore[union-attr]
        self.device = like.device if device is None else to_device(device)  # type: ignore[union-attr, assignment]
        self.dtype = like.dtype if dtype is None else to_dtype(dtype)  # type: ignore[union-attr, assignment]
        wanted = (like.requires_grad if like is not None else False) if requires_grad is None else requires_grad
        self.requires_grad = wanted and is_inexact(self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel_value(self):
        """Number of elements, an int or IntegerProxy."""
        return math.prod(self.shape)

    true_dtype = property(lambda self: self.dtype)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def replace(self, **changes) -> TensorProxy:
        """A copy with some of name, shape, dtype, device, requires_grad changed."""
        return TensorProxy(changes.pop("name", self.name), like=self, **changes)

    def __getattr__(self, name: str):
        return METHODS.attribute(self, name)

    __torch_function__ = classmethod(_torch_function)

    def __array__(self, *args, **kwargs):
        return METHODS.call("numpy", self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return concrete(self.shape[0])

    def __iter__(self):
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(METHODS.call("unbind", self, 0))

    def __reversed__(self):
        return METHODS.call("flip", self, 0) if self.shape else self

    def __bool__(self):
        return METHODS.call("__bool__", self)

    def __int__(self):
        return METHODS.call("__int__", self)

    def __float__(self):
        return METHODS.call("__float__", self)

    def __index__(self):
        return METHODS.call("__index__", self)

    def __contains__(self, value):
        return METHODS.call("__contains__", self, value)

    def __reduce_ex__(self, protocol):
        return METHODS.call("__reduce_ex__", self, protocol)

    __hash__ = object.__hash__


class FutureTensorProxy(TensorProxy):
    """A tensor that a collective is still working on: `wait` makes it a tensor. Shape, dtype and device are those of
    that."""

    __slots__ = ()

    @classmethod
    def of(cls, tensor: TensorProxy, requires_grad: bool) -> FutureTensorProxy:
        """The future of an unnamed tensor that a meta rule made."""
        return cls(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=requires_grad)

    def replace(self, **changes) -> FutureTensorProxy:
        return FutureTensorProxy(changes.pop("name", self.name), like=self, **changes)


_BINARY_DUNDERS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()


def _forward(name: str) -> Callable:
    def operator_method(self, *args):
        return METHODS.call(name, self, *args)

    operator_method.__name__ = name
    return operator_method


for _stem in _BINARY_DUNDERS:
    # tensors have no `__imatmul__`
    for _name in (f"__{_stem}__", f"__r{_stem}__", *((f"__i{_stem}__",) if _stem != "matmul" else ())):
        setattr(TensorProxy, _name, _forward(_name))
for (
    _name
) in "__neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __getitem__ __setitem__".split():
    setattr(TensorProxy, _name, _forward(_name))


def like(
    t: TensorProxy, shape: tuple | None = None, dtype: dtype | None = None, device: Device | None = None
) -> TensorProxy:
    """A fresh unnamed tensor like `t`, for meta rules: no conversions, no checks, requires_grad False (recording sets
    it)."""
    out = TensorProxy.__new__(TensorProxy)
    out.name = ""
    out.shape = t.shape if shape is None else shape
    out.dtype = t.dtype if dtype is None else dtype
    out.device = t.device if device is None else device
    out.requires_grad = False
    return out


class UnbackedNumber(Proxy):
    """A number that an operation makes of data: the size of a result, or a tensor's value. The program has it in its
    hands as a `NumberProxy` of this name.

    origin: where it comes from, in words. facts: what is known of such numbers in this program.
    """

    __slots__ = ("python_type", "origin", "facts")
    requires_grad = None  # among outputs: that is a question for tensors

    def __init__(self, name: str, python_type: type, origin: str, facts: symbolic.Facts):
        self.name, self.python_type, self.origin, self.facts = name, python_type, origin, facts

    def number(self) -> NumberProxy | Condition:
        """What the program has in its hands."""
        if self.python_type is bool:
            return Condition(number_of(symbolic.symbol(self.name), int, (self,)), "!=", 0, (self,))
        return number_of(symbolic.symbol(self.name), self.python_type, (self,))

    def replace(self) -> UnbackedNumber:
        return UnbackedNumber(self.name, self.python_type, self.origin, self.facts)


def _undecided(what: str, unbacked: tuple[UnbackedNumber, ...]) -> DataDependentError:
    origins = ", ".join(f"{u.name} is {u.origin}" for u in unbacked)
    return DataDependentError(
        f"{what} is known only when the program runs ({origins}{why_undecided()})",
        location=user_location(),
        remedy="use operations that go without it (torch.where, masks, torch.nonzero_static); say what holds with "
        "torch._check(...); or compute it outside and pass it in",
    )


class Condition:
    """A relation of data-dependent numbers: what a program has in its hands for a data-dependent bool. It
    may return it, and `torch._check` takes it."""

    __slots__ = ("a", "relation", "b", "unbacked")

    def __init__(self, a, relation: str, b, unbacked: tuple[UnbackedNumber, ...]):
        self.a, self.relation, self.b, self.unbacked = a, relation, b, unbacked

    def __bool__(self) -> bool:
        found = _decided(self.a, self.relation, self.b, self.unbacked)  # the program may have checked it since
        if found is None:
            found = decided_by_data("truth", self)
        if found is None:
            raise _undecided(f"whether {self.text()}", self.unbacked)
        return found

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


_BINARY_OF_BOOLS = [n for n in _BINARY_DUNDERS if n != "matmul"]
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
    """A Python number that stays symbolic. Not a `Proxy`: it is an expression over numbers that are passed in, or that
    operations make of data.

    expression: what it is, in terms of the numbers the prologue passes in. decisions: where their values are, and where
    what they decide is noted. unbacked: the numbers in the expression that operations make of data; then there is no
    value and no guard, and what it decides is an error unless arithmetic tells.
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

    def __deepcopy__(self, memo):
        return self

    def renamed(self, table: dict[Proxy, Any]) -> NumberProxy:
        """The same made of other numbers of data: `table` maps those that others take the place of."""
        if not any(u in table for u in self.unbacked):
            return self
        unbacked = tuple(table.get(u, u) for u in self.unbacked)
        return number_of(
            self.expression.renamed({old.name: new.name for old, new in zip(self.unbacked, unbacked)}),
            self.python_type,
            unbacked,
        )

    def symbol(self, name: str) -> NumberProxy:
        """One of the numbers that this one is an expression of."""
        if self.expression == symbolic.symbol(name):
            return self
        made = next((u for u in self.unbacked if u.name == name), None)
        if made is not None:
            return number_of(symbolic.symbol(name), made.python_type, (made,))
        return (FloatProxy if type(self.decisions.values[name]) is float else IntegerProxy)(name, self.decisions)

    def concrete(self) -> Any:
        """The value, which is from now on guarded: the program holds for this value only. Raises DataDependentError
        where that is data-dependent."""
        if self.unbacked:
            found = self.known()
            if found is None:
                found = decided_by_data("value", self)
            if found is None:
                raise _undecided(f"the value of {self.expression}", self.unbacked)
            self.unbacked[0].facts.values[self.expression] = found
            return found
        value = _hint(self)
        if not self.expression.is_constant:
            self.decisions.decide(self.expression, "==", symbolic.constant(value))
        return value

    def known(self) -> Any:
        """The value of a number of data where the program goes on for one value only, else None."""
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
        return self if digits is None and self.python_type is int else round(self.concrete(), digits)


class IntegerProxy(NumberProxy):
    __slots__ = ()
    python_type = int

    def __index__(self) -> int:
        return self.concrete()

    def __round__(self, digits=None):
        return self if digits is None else round(self.concrete(), digits)


class FloatProxy(NumberProxy):
    __slots__ = ()
    python_type = float


# no classes derived from them, which have their own arithmetic
_NUMBERS = frozenset((bool, int, float, IntegerProxy, FloatProxy))


def _expression(x) -> symbolic.Expression:
    return x.expression if isinstance(x, NumberProxy) else symbolic.constant(x)


def _hint(x):
    return x.expression.evaluate(x.decisions.values) if isinstance(x, NumberProxy) else x


def _arithmetic(name: str, a, b: Any = None):
    """name(a, b) as a NumberProxy, or as a plain number where the result does not depend on an input."""
    operands = (a,) if b is None else (a, b)
    if unbacked := _unbacked(operands):
        return _unbacked_arithmetic(name, operands, unbacked)
    if name == "pow":  # an int, a float or a complex number, as signs say
        exponent = operands[-1]
        if _type_of(exponent) is int:
            bool(exponent >= 0)
        elif not a >= 0:
            return concrete(a) ** concrete(exponent)
    function = symbolic.APPLICATIONS[name][0]
    value = function(*map(_hint, operands))
    expressions = tuple(map(_expression, operands))
    if name in ("add", "sub", "mul") and type(value) is int:
        ea, eb = expressions
        expression = ea + eb if name == "add" else ea - eb if name == "sub" else ea * eb
    else:
        expression = symbolic.apply(name, *expressions, whole=type(value) is int)
    if expression.is_constant:
        return value
    decisions = next(x.decisions for x in operands if isinstance(x, NumberProxy))
    return (FloatProxy if type(value) is float else IntegerProxy)(str(expression), decisions, expression)


def _unbacked(operands: tuple) -> tuple[UnbackedNumber, ...]:
    """The numbers of data that operands are made of."""
    found = [x.unbacked for x in operands if isinstance(x, NumberProxy) and x.unbacked]
    return found[0] if len(found) == 1 else tuple(dict.fromkeys(u for each in found for u in each))


def _type_of(x) -> type:
    return x.python_type if isinstance(x, NumberProxy) else type(x)


_BITWISE = ("and", "or", "xor", "lshift", "rshift", "invert")


def _result_kind(name: str, operands: tuple) -> type:
    """int or float: what Python makes of these operands."""
    if name in _BITWISE:
        return type(symbolic.APPLICATIONS[name][0](*(_type_of(x)(1) for x in operands)))  # raises for floats
    if name in ("int", "round", "trunc", "ceil", "floor"):
        return int
    if name in ("truediv", "sqrt", "float") or any(_type_of(x) is float for x in operands):
        return float
    # of an int, a float where the exponent is negative
    if name == "pow" and not (isinstance(operands[1], int) and operands[1] >= 0):
        return int if operands[1] >= 0 else float
    return int


def _unbacked_arithmetic(name: str, operands: tuple, unbacked: tuple[UnbackedNumber, ...]):
    """As `_arithmetic`, of numbers without a value. Integers that have one are fixed by it."""
    operands = tuple(x.concrete() if isinstance(x, IntegerProxy) and not x.unbacked else x for x in operands)
    kind, expressions = _result_kind(name, operands), tuple(map(_expression, operands))
    if name in ("add", "sub", "mul") and kind is int:
        a, b = expressions
        expression = a + b if name == "add" else a - b if name == "sub" else a * b
    else:
        expression = symbolic.apply(name, *expressions, whole=kind is int)
    if expression.is_constant:
        return expression.constant
    return number_of(expression, kind, unbacked)


_UNDECIDED = symbolic.Decisions()


def number_of(expression: symbolic.Expression, kind: type, unbacked: tuple[UnbackedNumber, ...]) -> NumberProxy:
    """A number that is made of numbers of data."""
    return (FloatProxy if kind is float else IntegerProxy)(str(expression), _UNDECIDED, expression, unbacked)


def extreme(name: str, a, b):
    """max(a, b) or min(a, b) of numbers one of which is data-dependent, without branching where one type comes out."""
    second = b > a if name == "max" else b < a
    if isinstance(second, Condition) and _type_of(a) is _type_of(b):
        return _arithmetic(name, a, b)
    return b if second else a


def _decided(a, relation: str, b, unbacked: tuple[UnbackedNumber, ...]) -> bool | None:
    """Whether a relation holds that arithmetic, or what the program has checked, decides."""
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
        found = _decided(a, relation, b, unbacked)
        return Condition(a, relation, b, unbacked) if found is None else found
    ea, eb = _expression(a), _expression(b)
    if (ea - eb).is_constant if _type_of(a) is _type_of(b) is int else ea == eb:
        return RELATIONS[relation](_hint(a), _hint(b))
    return next(x.decisions for x in (a, b) if isinstance(x, NumberProxy)).decide(ea, relation, eb)


def _binary_number(name: str, reflected: bool) -> Callable:
    calculate = _divmod if name == "divmod" else functools.partial(_arithmetic, name)

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
    return _arithmetic("floordiv", a, b), _arithmetic("mod", a, b)


NumberProxy.__invert__ = lambda self: _arithmetic("invert", self)  # type: ignore[attr-defined]
for _name in "add sub mul truediv floordiv mod divmod pow and or xor lshift rshift".split():
    setattr(NumberProxy, f"__{_name}__", _binary_number(_name, False))
    setattr(NumberProxy, f"__r{_name}__", _binary_number(_name, True))
for _stem, _symbol in zip("eq ne lt le gt ge".split(), RELATIONS, strict=True):
    setattr(NumberProxy, f"__{_stem}__", _relation(_symbol))
NumberProxy.__neg__ = lambda self: _arithmetic("neg", self)  # type: ignore[method-assign, attr-defined]
NumberProxy.__invert__ = lambda self: _arithmetic("invert", self)  # type: ignore[attr-defined]
NumberProxy.__abs__ = lambda self: _arithmetic("abs", self)  # type: ignore[attr-defined]
NumberProxy.__pos__ = lambda self: self  # type: ignore[attr-defined]
for _name in ("trunc", "floor", "ceil"):
    setattr(
        NumberProxy,
        f"__{_name}__",
        lambda self, _name=_name: self if type(self) is IntegerProxy else _arithmetic(_name, self),
    )


numbers.Integral.register(IntegerProxy)
numbers.Real.register(FloatProxy)


def concrete(x):
    """A plain number: a NumberProxy's value, which becomes a guard; anything else as it is."""
    return x.concrete() if isinstance(x, NumberProxy) else x


def settled(x):
    """`concrete(x)`, but for a data-dependent number."""
    return x if isinstance(x, NumberProxy) and x.unbacked else concrete(x)


def converted(x, kind: type):
    """int(x) or float(x), where x may be a data-dependent number."""
    if not isinstance(x, NumberProxy):
        return kind(x)
    return x if x.python_type is kind else _arithmetic(kind.__name__, x) if x.unbacked else kind(x.concrete())


def number_value(x):
    """The value seen at capture, without making it a guard: for messages and estimates only. A data-dependent number
    counts as some."""
    if not isinstance(x, NumberProxy):
        return x
    if not x.unbacked:
        return _hint(x)
    return x.python_type(_ESTIMATE) if (known := x.known()) is None else known


_ESTIMATE = 64


def element_count(value: TensorProxy) -> int:
    """How many elements a tensor has, for estimates: see `number_value`."""
    return int(math.prod(map(number_value, value.shape)))


def _are_equal(a, b) -> bool:
    """Whether two sizes are equal by arithmetic alone, which decides nothing."""
    return a is b or _expression(a) == _expression(b)


def equal_shapes(a: tuple, b: tuple) -> bool:
    """Whether two shapes are equal by arithmetic alone."""
    return len(a) == len(b) and all(map(_are_equal, a, b))


def equal_counts(a: TensorProxy, b: TensorProxy) -> bool:
    """Whether two tensors have as many elements as each other, whatever the sizes that stay symbolic."""
    return _are_equal(math.prod(a.shape), math.prod(b.shape))


def same_shape(a: tuple, b: tuple) -> bool:
    """Whether two shapes are certainly equal, whatever data-dependent sizes are.

    Where constants tell them apart, nothing is decided about symbolic sizes.
    """
    if a is b or len(a) != len(b):
        return a is b
    open_sizes = False
    for m, n in zip(a, b):
        if type(m) is type(n) is int:
            if m != n:
                return False
        else:
            open_sizes |= m is not n
    if not open_sizes:
        return True
    try:
        with undecided():
            return a == b
    except DataDependentError:
        return False


def type_string(x) -> str:
    """How traces print the type of a value: `cpu f32[2, 2]`, `int 8`, `Collection`, `Any` ..."""
    if isinstance(x, TensorProxy):
        return (
            f"{'future of ' * isinstance(x, FutureTensorProxy)}{x.device.name} "
            f"{x.dtype.shortname}[{', '.join([str(getattr(n, 'expression', n)) for n in x.shape])}]"
        )
    if isinstance(x, NumberProxy):
        return x.python_type.__name__ if x.unbacked else f"{x.python_type.__name__} {_hint(x)!r}"
    if isinstance(x, UnbackedNumber):
        return x.python_type.__name__
    if isinstance(x, CollectionProxy):
        return "Collection"
    if isinstance(x, AnyProxy) or x is None:
        return "Any"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (bool, int, float, complex)) else type(x).__name__


class Size(tuple):
    """`torch.Size` with entries that stay symbolic, which PyTorch's own class takes for none."""

    def numel(self):
        """The product of the entries."""
        return math.prod(self)

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Size(found) if isinstance(index, slice) else found

    def __mul__(self, times):
        return Size(super().__mul__(times))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"torch.Size({[*map(concrete, self)]})"


def _children(value) -> Iterable | None:
    """The values directly inside a container; None for any other value."""
    t = type(value)
    if t is tuple or t is list:
        return value
    if isinstance(value, (tuple, list)):  # not by a method of the user's
        return tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value)
    if isinstance(value, dict):
        return dict.values(value)
    return (value.start, value.stop, value.step) if type(value) is slice else None


def numbers_in(value, found: list) -> list:
    """Appends the symbolic numbers in a structure, and in the shapes of its tensors, to `found`."""
    if isinstance(value, NumberProxy):
        found.append(value)
        return found
    for x in (value.shape if isinstance(value, TensorProxy) else _children(value)) or ():
        numbers_in(x, found)
    return found


def has_numbers(value) -> bool:
    """Whether there are symbolic numbers in a structure or in the shapes of its tensors."""
    t = type(value)
    if t is int or t is str or t is float or t is bool or value is None:
        return False
    if t is TensorProxy:
        value = value.shape
    elif (value := _children(within := value)) is None:
        return isinstance(within, NumberProxy)
    for x in value:
        if type(x) is not int and has_numbers(x):
            return True
    return False


_CONSTANTS = frozenset((int, float, bool, str, type(None)))  # most of what stands beside tensors in arguments


def proxies_in(value, found: list) -> list:
    """Appends the proxies in a structure, and those of its numbers, to `found`, in order, repetitions kept."""
    t = type(value)
    if t is TensorProxy:
        found.append(value)
    elif t is tuple or t is list:
        for x in value:
            t = type(x)
            if t is TensorProxy:
                found.append(x)
            elif t not in _CONSTANTS:
                proxies_in(x, found)
    elif isinstance(value, Proxy):
        found.append(value)
    elif t is IntegerProxy or t is FloatProxy:
        found.extend(value.unbacked)
    else:
        for x in _children(value) or ():
            proxies_in(x, found)
    return found


def map_structure(function: Callable, value) -> Any:
    """`value` with `function` applied to every leaf of its containers; the same object where nothing changed."""
    t = type(value)
    if t is slice:
        return slice(*[map_structure(function, x) for x in (value.start, value.stop, value.step)])
    if t is dict or isinstance(value, dict):
        new_dict = {k: map_structure(function, x) for k, x in dict.items(value)}
        return value if all(new_dict[k] is x for k, x in dict.items(value)) else _rebuilt(value, new_dict)
    if t is tuple or t is list or isinstance(value, (tuple, list)):
        new = [map_structure(function, x) for x in _children(value)]  # pyright: ignore[reportOptionalIterable]
        return value if all(a is b for a, b in zip(new, _children(value))) else _rebuilt(value, new)  # pyright: ignore
    return function(value)


def _rebuilt(value, content):
    """A container like `value` with other content. `torch.Size`, which takes ints only, becomes a `Size`."""
    t = type(value)
    if t is tuple or t is list or t is dict:
        return t(content) if t is tuple else content
    if isinstance(value, tuple):
        make = Size if t.__name__ == "Size" else getattr(value, "_make", t)
        return make(content)
    made = copy.copy(value)
    if isinstance(made, list):
        list.__setitem__(made, slice(None), content)
    else:
        for k, x in content.items():
            dict.__setitem__(made, k, x)
    return made


def leaves(value) -> list:
    """What a structure of tuples, lists and dicts holds, in order."""
    found: list = []
    pending = [value]
    while pending:
        x = pending.pop()
        if isinstance(x, (tuple, list)):
            pending += reversed(x)
        elif isinstance(x, dict):
            pending += reversed(x.values())
        else:
            found.append(x)
    return found
