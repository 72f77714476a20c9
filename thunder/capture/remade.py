"""How an epilogue rebuilds objects whose attributes do not say it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import io
import operator
import re
import struct
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy

from thunder.capture.native import DICT_VIEWS, TYPE_PARAMETERS
from thunder.capture.policy import is_library
from thunder.core.proxies import NumberProxy, Proxy
from thunder.interpreter import NULL, sequences
from thunder.interpreter.attributes import BUILTINS, cell_value, in_python, type_attribute
from thunder.interpreter.instructions import PLAIN


def made_of(value, t: type) -> tuple | None:
    """(a callable, its arguments) that make an object of a library's again, where its parts do not say so."""
    if t is slice:
        return slice, (value.start, value.stop, value.step)
    if t in DICT_VIEWS:
        (table,) = gc.get_referents(value)
        return getattr(type(table), DICT_VIEWS[t]), (table,)
    if isinstance(value, (staticmethod, classmethod)):
        return None if type(value.__func__) in BUILTINS else (t, (value.__func__,))
    if t is types.MappingProxyType:
        return _mapping(value)
    if t is property:
        return t, (value.fget, value.fset, value.fdel, value.__doc__)
    if t is types.CellType:
        held = cell_value(value, NULL)
        return t, (() if held is NULL else (held,))
    if t is sequences.Items:
        return iter, (value.value,)
    if t in _ITERATORS:
        make, *given = value.__reduce__()
        return make, given[0]
    if t is functools._lru_cache_wrapper:
        given = value.cache_parameters()
        directly = given == _CACHE.cache_parameters() and value.cache_parameters.__qualname__ == _DIRECT
        return functools.lru_cache if directly else functools.lru_cache(**given), (value.__wrapped__,)
    if t is weakref.WeakMethod:
        return t, (value(),)
    return None


_CACHE: Any = functools.lru_cache(repr)  # without parentheses
_DIRECT = _CACHE.cache_parameters.__qualname__
GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def _mapping(value: types.MappingProxyType) -> tuple:
    (table,) = gc.get_referents(value)
    owners = {getattr(x, "__objclass__", None) for x in table.values()} if type(table) is dict else ()
    shown = [kind for kind in owners if isinstance(kind, type) and gc.get_referents(vars(kind))[0] is table]
    return (vars, (shown[0],)) if shown else (type(value), (table,))


def goes_on(value) -> bool:
    """Whether a value is an iterator of native code's, which goes on where it stands and cannot be rebuilt."""
    if type(value) in _ITERATORS:
        return value.__reduce__()[2:] not in ((), (0,), (None,))  # somewhere inside; a range says what is left
    if type(value) is sequences.Items:
        return value.position != 0
    steps = type_attribute(type(value), "__next__")
    return isinstance(steps, types.WrapperDescriptorType) and not isinstance(value, io.IOBase)


# objects that nobody can change, and those by which a library describes classes and functions
UNCHANGING = (
    *TYPE_PARAMETERS, dataclasses.Field, inspect.Parameter,
    re.Pattern, re.Match, struct.Struct, operator.itemgetter, operator.attrgetter, operator.methodcaller,
    staticmethod, classmethod, types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, types.TracebackType,
    types.FrameType, type(...), weakref.ref,
    type(NotImplemented), numpy.dtype, numpy.ufunc,
)  # fmt: skip


_ITERATORS = {type(iter(made)) for made in ([], (), range(0))}


def is_global(value, t: type) -> bool:
    """Whether pickle knows an object of a library's by a name, as typing.Union."""
    method = type_attribute(t, "__reduce__")
    known = type(method) is types.FunctionType and is_library(method.__globals__.get("__name__"))
    return known and isinstance(value.__reduce__(), str)


def native_new(t: type):
    return next(base.__dict__["__new__"] for base in t.__mro__ if type(base.__dict__.get("__new__")) in _NATIVE_NEW)


def stored(found, o, v):
    """The value of an attribute in C after a write. An empty object says whether it takes the value, and as what."""
    t = type(o)
    try:
        empty = native_new(t)(t)
    except TypeError:  # of a function, which takes what it has where it takes anything
        found.__set__(o, found.__get__(o, t))
        return v
    found.__set__(empty, v)
    return found.__get__(empty, t)


_NATIVE_NEW = (types.BuiltinFunctionType, types.BuiltinMethodType)


SET_ARGS = BaseException.__dict__["args"].__set__  # an assignment would call the class's `__setattr__`


def space_of(value, name: str, pin: Callable) -> str:
    """The expression of an object's `__dict__`, which a class's own `__getattribute__` is not asked for."""
    if not in_python(type_attribute(type(value), "__getattribute__")):
        return f"{name}.__dict__"
    return f"{pin(object.__getattribute__)}({name}, '__dict__')"


def pinned_with(c, value, built: dict, is_made: Callable) -> set[int] | None:
    """The ids of what something leads to that is pinned as it is; None where proxies, snapshots of containers from
    outside or objects that were built are among them. is_made: whether the program made a class."""
    seen, pending = set[int](), [value]
    while pending:
        value = pending.pop()
        if id(value) in c.containers.looks or id(value) in built or isinstance(value, (Proxy, NumberProxy)):
            return None
        stays = isinstance(value, types.ModuleType) or isinstance(value, type) and not is_made(value)
        if id(value) in seen or stays or id(value) in c.sources or type(value) in PLAIN or len(seen) > 10_000:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            pending += (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        else:
            pending += gc.get_referents(vars(value) if isinstance(value, type) else value)
    return seen
