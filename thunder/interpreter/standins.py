"""Stand-ins: the arguments of native code in the place of objects whose special methods are written in Python.

    sorted([a, b])   # list.sort would call a.__lt__ natively
    sorted over stand-ins of a and b, whose __lt__ is host.compare("<", ...); the result is a and b again

CPython's own code runs, so that comparisons come in its order and errors are its own. A stand-in answers to every
special method that its object has, through the host.
"""

from __future__ import annotations

import bisect
import contextvars
import functools
import heapq
import itertools
import json.encoder
import operator
import re
import types
from collections import deque
from typing import Any

from thunder.interpreter.attributes import BUILTINS, call_special, in_python, of_python, parts_of, type_attribute
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
FORWARDED = sorted(CALLED - {"__getattribute__", "__getattr__", "__hash__"})


class StandIn:
    """The object `value` for native code; `known` has the stand-ins of one call by the ids of their objects."""

    __slots__ = ("host", "value", "known")

    def __init__(self, host, value, known):
        self.host, self.value, self.known = host, value, known

    def __hash__(self):
        return self.host.handed(self.host.call(hash, [self.value], {}))

    def __repr__(self):
        return self.host.handed(self.host.call(repr, [self.value], {}))


class Compared(StandIn):
    """An object that native code compares with other stand-ins."""

    __slots__ = ()
    __hash__ = StandIn.__hash__

    def __eq__(self, other):
        return self.host.truth(self.host.compare("==", self.value, original(other)))

    def __lt__(self, other):
        return self.host.truth(self.host.compare("<", self.value, original(other)))

    def __gt__(self, other):
        if not isinstance(other, StandIn):  # of `other < self`, of which a key is a number
            return self.host.truth(self.host.compare("<", other, self.value))
        return self.host.truth(self.host.compare(">", self.value, original(other)))


class Sorted(Compared):
    """An element of a list that is sorted, all of one class: a comparison that its method declines begins again."""

    __slots__ = ()
    __hash__ = StandIn.__hash__

    def __lt__(self, other):
        method = self.host.lookup(type(self.value), "__lt__")
        if in_python(method):
            result = call_special(self.host, method, self.value, [original(other)], "__lt__")
            if result is not NotImplemented:
                return self.host.truth(result)
        return Compared.__lt__(self, other)


class Called(Compared):
    """A callable for native code that keeps nothing of it."""

    __slots__ = ()
    __hash__ = StandIn.__hash__

    def __call__(self, *args, **kwargs):
        return self.host.handed(self.host.call(self.value, [original(a) for a in args], kwargs))

    def __getattr__(self, name):
        return self.host.handed(self.host.load_attr(self.value, name))


@functools.cache
def called_as(kind: type) -> type[Called]:
    """The class of the stand-ins of functions of a class, with its name in errors."""
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return type(name, (Called,), {"__slots__": (), "__hash__": StandIn.__hash__})


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


def stand_in(host, value, known, kind=Compared):
    """The stand-in of a value that native code compares or hashes."""
    found = known.get(id(value))
    if found is None:
        found = known[id(value)] = kind(host, value, known)
    return found


def original(value) -> Any:
    return value.value if isinstance(value, StandIn) else value


# ---------------------------------------------------------------- functions that add, and that ask for the truth


def _sum(host, function, args, kwargs):
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


CALLS = {sum: _sum, any: _any, all: _all}


# ---------------------------------------------------------------- functions that call an argument

_KEY_FUNCTION = (-1, "key")
_ENCODER = getattr(json.encoder, "c_make_encoder", None)  # of the module `json`
# the place and the name of the function among the arguments
_CALLING: dict[Any, tuple[int, str]] = {
    map: (0, ""), filter: (0, ""), functools.reduce: (0, ""), functools.cmp_to_key: (0, "mycmp"),
    sorted: _KEY_FUNCTION, min: _KEY_FUNCTION, max: _KEY_FUNCTION, list.sort: _KEY_FUNCTION,
    itertools.accumulate: (1, "func"), itertools.groupby: (1, "key"), itertools.dropwhile: (0, ""),
    itertools.takewhile: (0, ""), itertools.filterfalse: (0, ""), itertools.starmap: (0, ""),
    re.Pattern.sub: (0, "repl"), re.Pattern.subn: (0, "repl"), contextvars.Context.run: (0, ""),
    _ENCODER: (1, "default"),
}  # fmt: skip
CALLING = {id(function): place for function, place in _CALLING.items()}


def with_functions(host, f, args, kwargs) -> tuple:
    """The arguments of native code, with functions that it calls in a form that comes back to the machine."""
    method, _ = descriptor(f)
    found = CALLING.get(id(method))
    if found is None:
        return args, kwargs
    place, name = found
    place += type(f) is types.MethodDescriptorType  # which takes the object first
    called = _RESULTS.get(id(method), type(host).called_back)
    return (
        [called(host, a) if i == place else a for i, a in enumerate(args)],
        {k: called(host, a) if k == name else a for k, a in kwargs.items()},
    )


def _used_up(host, function):
    """A function whose result native code uses up: the text that a pattern puts in."""
    called = host.called_back(function)
    return function if called is function else lambda *args: host.handed(called(*args))


def _decided(host, function):
    """A function whose result native code asks for the truth."""
    called = host.called_back(function)
    return function if called is function else lambda value: host.truth(called(value))


def _filtered(host, function):
    """`_decided`; without a function, elements themselves are asked."""
    return host.truth if function is None else _decided(host, function)


# functions whose results native code does not hand on
_RESULTS = {
    **dict.fromkeys(map(id, (re.Pattern.sub, re.Pattern.subn, _ENCODER)), _used_up),
    **dict.fromkeys(map(id, (itertools.takewhile, itertools.dropwhile)), _decided),
    **dict.fromkeys(map(id, (filter, itertools.filterfalse)), _filtered),
}


# ---------------------------------------------------------------- functions that compare their arguments

# function -> positions of the elements among its arguments; the first argument is the container
_COMPARING: dict[Any, tuple[int, ...]] = {
    sorted: (), min: (), max: (), list.sort: (), list.index: (1,), list.count: (1,), list.remove: (1,),
    tuple.index: (1,), tuple.count: (1,), deque.index: (1,), deque.count: (1,), deque.remove: (1,),
    operator.indexOf: (1,), operator.countOf: (1,),
    heapq.heappush: (1,), heapq.heappop: (), heapq.heapify: (), heapq.heapreplace: (1,), heapq.heappushpop: (1,),
    bisect.bisect_left: (1,), bisect.bisect_right: (1,), bisect.insort_left: (1,), bisect.insort_right: (1,),
}  # fmt: skip
_BY_ID = {id(function): elements for function, elements in _COMPARING.items()}
_HOLDERS = (list, tuple, deque)
_OF_ITERABLES = (sorted, min, max, operator.indexOf, operator.countOf)


def compares(f) -> bool:
    """Whether a function does nothing with elements but compare them."""
    return id(descriptor(f)[0]) in _BY_ID


def descriptor(f):
    """The method of a class in C that a bound one is, and the object; a function by itself, and NULL."""
    if type(f) in BUILTINS and not isinstance(f.__self__, (types.ModuleType, type, types.NoneType)):
        found = type_attribute(type(f.__self__), f.__name__)
        if type(found) is types.MethodDescriptorType:
            return found, f.__self__
    return f, NULL


def compares_in_python(host, values) -> bool:
    """Whether one of the values, or something in the containers among them, compares in Python."""
    kinds = set(map(type, parts_of(*values, keys=False)))
    return any(host.compares(kind) or in_python(host.lookup(kind, name)) for kind in kinds for name in COMPARED)


def run(host, f, args, kwargs) -> Any:
    """The call of a function that compares its arguments, over stand-ins; NULL where none compares in Python, or the
    function is another. An iterator in `args` is a list afterwards."""
    function, owner = descriptor(f)
    elements = _BY_ID.get(id(function))
    if elements is None or not args and owner is NULL:
        return NULL
    bound = owner is not NULL
    first: Any = owner if bound else args[0]
    several = not bound and function in (min, max) and len(args) > 1
    if not several and function in _OF_ITERABLES and type(first) not in _HOLDERS:
        values = host.steps(first)  # of which only `sorted` asks for the length
        first = args[0] = list(values) if function is sorted else [x for x in values]
    if not several and not isinstance(first, _HOLDERS):
        return NULL
    base: Any = next((b for b in _HOLDERS if isinstance(first, b)), list)
    given: list[Any] = [first, *(args if bound else args[1:])]
    elements = range(len(given)) if several else elements
    inside = [] if several else list(base.__iter__(host.materialize(first)))
    held = [*inside, *(given[i] for i in elements if i < len(given))]
    if kwargs.get("key") is None and not compares_in_python(host, held):
        return NULL
    return _run(host, function, None if several else base, inside, elements, given, kwargs)


def _run(host, function, base: Any, inside: list, elements, given: list, kwargs: dict) -> Any:
    """The call, over stand-ins for the arguments at `elements`, and for the elements of the first, a `base`; None
    where the arguments themselves are compared."""
    first, key = given[0], kwargs.get("key")
    if VERSION >= (3, 12) and "reverse" in kwargs:  # before, it is a number
        kwargs = kwargs | {"reverse": host.truth(kwargs["reverse"])}
    known: dict[int, StandIn] = {}
    given = [stand_in(host, a, known) if i in elements else a for i, a in enumerate(given)]
    if base is not None:
        alike = function in (sorted, list.sort) and len(set(map(type, inside))) == 1
        given[0] = base(stand_in(host, x, known, Sorted if alike else Compared) for x in inside)
    if key is not None:
        kwargs = kwargs | {"key": _key(host, key, known)}
    try:
        result = function(*given, **kwargs)
    finally:
        if base in (list, deque):
            _write_back(base, first, inside, [original(x) for x in given[0]])
    return [original(x) for x in result] if function is sorted else original(result)


_KEY = type(functools.cmp_to_key(lambda a, b: 0))  # which compares by the program's function


def _key(host, key, known):
    def compared(x):
        found = host.call(key, [original(x)], {})
        return found if type(found) in PLAIN or type(found) is _KEY else stand_in(host, found, known)

    return compared


def _write_back(base: Any, holder, before: list, elements: list) -> None:
    if len(before) != len(elements) or any(x is not y for x, y in zip(before, elements, strict=True)):
        base.clear(holder)
        base.extend(holder, elements)


# ---------------------------------------------------------------- objects given to any native function


_CLASSES: dict[tuple, type] = {}


def stands_alone(kind: type) -> bool:
    """Whether objects of a class have no part that code in C reads by itself, as a list's items."""
    return next(base for base in kind.__mro__ if not of_python(base)) is object


def substitute(host, value, known):
    """A stand-in of the name of the value's class, with the special methods of its class."""
    kind = type(value)
    found = known.get(id(value))
    if found is None:
        found = known[id(value)] = _class_for(host, kind)(host, value, known)
    return found


def _class_for(host, kind: type) -> type:
    methods = {name: method for name in FORWARDED if in_python(method := host.lookup(kind, name))}
    key = kind.__name__, *((name, method is None) for name, method in methods.items())
    made = _CLASSES.get(key)
    if made is None:
        space = {name: None if method is None else _forward(name) for name, method in methods.items()}
        made = _CLASSES[key] = type(
            kind.__name__,
            (_Object,),
            {"__slots__": (), "__module__": kind.__module__, "__hash__": StandIn.__hash__, **space},
        )
    return made


def _forward(name: str):
    if name == "__iter__":
        return lambda self: self.host.steps(self.value)

    def method(self, *args, **kwargs):
        found = self.host.load_special(self.value, name)
        return self.host.handed(self.host.call(found, [original(a) for a in args], kwargs))

    return method


class _Object(StandIn):
    """A stand-in that has the methods of its object's class and no others. Its copy is one of the object."""

    __slots__ = ()
    __class__ = property(lambda self: type(self.value))

    def __reduce_ex__(self, protocol):
        return self.host.handed(self.host.call(self.host.load_attr(self.value, "__reduce_ex__"), [protocol], {}))

    def __getattr__(self, name):
        return self.host.handed(self.host.load_attr(self.value, name))
