"""Stand-ins: what native code is given where it would sort, iterate over, or call what is written in Python.

    sorted([a, b])   # list.sort would call a.__lt__ natively
    sorted over stand-ins of a and b, whose __lt__ is host.compare("<", ...); the result is a and b again

CPython's own code runs, so that comparisons come in its order and errors are its own.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections import deque
from typing import Any

from thunder.interpreter.attributes import BUILTINS, call_special, in_python, parts_of, type_attribute
from thunder.interpreter.binding import of
from thunder.interpreter.instructions import NULL, PLAIN
from thunder.interpreter.operators import COMPARE_METHOD
from thunder.interpreter.sequences import Steps
from thunder.interpreter.tables import VERSION

COMPARED = {method: symbol for symbol, method in COMPARE_METHOD.items()}
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
# special methods that native code calls of its arguments
CALLED = frozenset(
    {
        *(f"__{prefix}{name}__" for name in _ARITHMETIC.split() for prefix in ("", "r", "i")),
        *COMPARED,
        *(f"__{name}__" for name in (
            "neg pos invert abs round floor ceil trunc index int float complex bool len length_hint iter next contains "
            "getitem setitem delitem reversed call format str repr hash bytes fspath missing getattr getattribute "
            "dir instancecheck subclasscheck array buffer sizeof reduce reduce_ex getstate setstate "
            "getnewargs getnewargs_ex copy deepcopy class_getitem").split()),
    }
)  # fmt: skip


class StandIn:
    """The object `value` for native code."""

    __slots__ = ("host", "value")

    def __init__(self, host, value):
        self.host, self.value = host, value


class CalledBack(StandIn):
    """A function that native code calls: the call comes back to the machine."""

    __slots__ = ()

    def __call__(self, *args, **kwargs):
        return self.host.call(self.value, list(args), kwargs)

    def __reduce__(self):  # of a map, of which a copy is made
        return original, (self.value,)


class Decided(CalledBack):
    """A function whose result native code asks for the truth."""

    __slots__ = ()

    def __call__(self, *args, **kwargs):
        return self.host.truth(CalledBack.__call__(self, *args, **kwargs))


class Compared(StandIn):
    """An object that native code sorts, or takes the least or the largest of."""

    __slots__ = ()

    def __lt__(self, other):
        return self.host.truth(self.host.compare("<", self.value, original(other)))

    def __gt__(self, other):
        if not isinstance(other, StandIn):  # of `other < self`, of which a key is a number
            return self.host.truth(self.host.compare("<", other, self.value))
        return self.host.truth(self.host.compare(">", self.value, original(other)))


class Sorted(Compared):
    """An element of a list that is sorted, all of one class: a comparison that its method declines begins again."""

    __slots__ = ()

    def __lt__(self, other):
        method = self.host.lookup(type(self.value), "__lt__")
        if in_python(method):
            result = call_special(self.host, method, self.value, [original(other)], "__lt__")
            if result is not NotImplemented:
                return self.host.truth(result)
        return Compared.__lt__(self, other)


class Iterated(StandIn):
    """An iterable for native code, which words the error of what does not iterate."""

    __slots__ = ()
    __length_hint__ = Steps.__length_hint__

    def __iter__(self):
        return iter(self.host.steps(self.value))


class Listed(Iterated):
    """An iterable that native code makes a list of (PySequence_Fast), which asks the iterator for one, and a length."""

    __slots__ = ()

    def __iter__(self):
        has_items = self.host.lookup(type(self.value), "__iter__") is NULL  # which are asked for the length themselves
        return iter(self.host.steps(self.value if has_items else self.host.iterate(self.value)))


def original(value) -> Any:
    return value.value if isinstance(value, StandIn) else value


# ---------------------------------------------------------------- functions that add, and that ask for the truth


def _sum(host, function, args, kwargs):
    """`sum`, whose additions are the program's."""
    if not 1 <= len(args) + len(kwargs) <= 2 or kwargs.keys() - {"start"} or not args:
        return function(*args, **kwargs)  # raises
    values, start = args[0], args[1] if len(args) > 1 else kwargs.get("start", 0)
    if type(values) in (list, tuple) and set(map(type, host.materialize(values))) <= PLAIN:
        return host.call_native(function, args, kwargs)
    if isinstance(start, (str, bytes, bytearray)):
        return function((), start)  # raises
    numbers: list | None = [start]  # first, of which native code makes one sum
    for value in host.steps(values):
        if numbers is not None and {host.pattern_type(value), host.pattern_type(start)} <= _SUMMED:
            numbers.append(value)
            continue
        if numbers is not None:
            start, numbers = host.sum_of_numbers(numbers), None
        start = host.binary("+", start, value)
    return start if numbers is None else host.sum_of_numbers(numbers)


_SUMMED = {int, float, bool}


@of(1)
def _any(host, values):
    for value in host.steps(values):  # no generator, which makes a RuntimeError of StopIteration
        if host.truth(value):
            return True
    return False


@of(1)
def _all(host, values):
    for value in host.steps(values):
        if not host.truth(value):
            return False
    return True


def _iter(host, function, args, kwargs):
    if len(args) == 1 and not kwargs:
        return host.iterate(args[0])
    return host.call_native(function, *with_functions(host, function, args, kwargs))


CALLS = {sum: _sum, any: _any, all: _all, iter: _iter}


# ---------------------------------------------------------------- functions that call an argument

_KEY_FUNCTION = (-1, "key")
# the place and the name of the function among the arguments
_CALLING: dict[Any, tuple[int, str]] = {
    iter: (0, ""), map: (0, ""), filter: (0, ""), functools.reduce: (0, ""), functools.cmp_to_key: (0, "mycmp"),
    sorted: _KEY_FUNCTION, min: _KEY_FUNCTION, max: _KEY_FUNCTION, list.sort: _KEY_FUNCTION,
    itertools.accumulate: (1, "func"), itertools.groupby: (1, "key"), itertools.dropwhile: (0, ""),
    itertools.takewhile: (0, ""), itertools.filterfalse: (0, ""), itertools.starmap: (0, ""),
    re.Pattern.sub: (0, "repl"), re.Pattern.subn: (0, "repl"),
}  # fmt: skip
CALLING = {id(function): position for function, position in _CALLING.items()}


def with_functions(host, f, args, kwargs) -> tuple:
    """The arguments of native code, with functions that it calls in a form that comes back to the machine."""
    method, _ = descriptor(f)
    entry = CALLING.get(id(method))
    if entry is None:
        return args, kwargs
    position, name = entry
    position += type(f) is types.MethodDescriptorType  # which takes the object first
    kind = Decided if id(method) in _DECIDING else CalledBack
    if id(method) in _FILTERING and args and args[0] is None:
        return [host.truth, *args[1:]], kwargs
    return (
        [kind(host, a) if i == position and _is_function(a) else a for i, a in enumerate(args)],
        {k: kind(host, a) if k == name and _is_function(a) else a for k, a in kwargs.items()},
    )


def _is_function(value) -> bool:
    return callable(value) and not isinstance(value, StandIn)


_FILTERING = set(map(id, (filter, itertools.filterfalse)))  # without a function, they ask elements themselves
_DECIDING = {*_FILTERING, id(itertools.takewhile), id(itertools.dropwhile)}


# ---------------------------------------------------------------- functions that compare their arguments

_SORTING = {id(sorted), id(min), id(max), id(list.sort)}
_HOLDERS = (list, tuple, deque)


def compares(f) -> bool:
    """Whether a function does nothing with elements but sort them, or take one of them."""
    return id(descriptor(f)[0]) in _SORTING


def descriptor(f):
    """The method of a class in C that a bound one is, and the object; a function by itself, and NULL."""
    if type(f) in BUILTINS and not isinstance(f.__self__, (types.ModuleType, type, types.NoneType)):
        method = type_attribute(type(f.__self__), f.__name__)
        if type(method) is types.MethodDescriptorType:
            return method, f.__self__
    return f, NULL


def compares_in_python(host, values) -> bool:
    """Whether one of the values, or something in the containers among them, compares in Python."""
    kinds = set(map(type, parts_of(*values, keys=False)))
    return any(host.compares(kind) or in_python(host.lookup(kind, name)) for kind in kinds for name in COMPARED)


def _with_key(host, kwargs: dict) -> dict:
    """The keyword arguments of a function that sorts, over stand-ins."""
    if VERSION >= (3, 12) and "reverse" in kwargs:  # before, it is a number
        kwargs = kwargs | {"reverse": host.truth(kwargs["reverse"])}
    key = kwargs.get("key")
    return kwargs if key is None else kwargs | {"key": _key(host, key)}


def run(host, f, args, kwargs) -> Any:
    """The call of a function that sorts, over stand-ins; NULL where no element compares in Python, or the function is
    another. An iterator in `args` is a list afterwards."""
    function, owner = descriptor(f)
    if id(function) not in _SORTING or not args and owner is NULL:
        return NULL
    several = function in (min, max) and len(args) > 1
    first: Any = args[0] if owner is NULL else owner
    if not several and function is not list.sort and type(first) not in _HOLDERS:
        values = host.steps(first)  # of which only `sorted` asks for the length
        first = args[0] = list(values) if function is sorted else [x for x in values]
    if not several and not isinstance(first, _HOLDERS):
        return NULL
    base: Any = next((b for b in _HOLDERS if isinstance(first, b)), list)
    elements = args if several else list(base.__iter__(host.materialize(first)))
    if kwargs.get("key") is None and not compares_in_python(host, elements):
        return NULL
    kwargs = _with_key(host, kwargs)
    alike = function in (sorted, list.sort) and len(set(map(type, elements))) == 1
    stand_ins = [(Sorted if alike else Compared)(host, x) for x in elements]
    if several:
        return original(function(*stand_ins, **kwargs))
    if function is list.sort:
        return _sort(base, first, stand_ins, elements, args if owner is not NULL else args[1:], kwargs)
    result = function(stand_ins, *args[1:], **kwargs)
    return [original(x) for x in result] if function is sorted else original(result)


def _sort(base: type, target: Any, stand_ins: list, elements: list, args, kwargs) -> None:
    """`list.sort`, which leaves the list in some order where a comparison raises."""
    try:
        list.sort(stand_ins, *args, **kwargs)
    finally:
        if not all(x.value is y for x, y in zip(stand_ins, elements, strict=True)):
            base.clear(target)
            base.extend(target, map(original, stand_ins))


_KEY = type(functools.cmp_to_key(lambda a, b: 0))  # which compares by the program's function


def _key(host, key):
    def compared(x):
        result = host.call(key, [original(x)], {})
        if type(result) in PLAIN or type(result) is _KEY:
            return result
        return x if result is original(x) else Compared(host, result)

    return compared
