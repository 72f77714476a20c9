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

import numpy

from thunder.capture.native import DICT_VIEWS, TYPE_PARAMETERS
from thunder.capture.policy import is_library
from thunder.interpreter import sequences
from thunder.interpreter.attributes import in_python, type_attribute


def made_of(value, t: type) -> tuple | None:
    """(a callable, its arguments) that make an object of a library's again, where its parts do not say so."""
    if t is slice:
        return slice, (value.start, value.stop, value.step)
    if t in DICT_VIEWS:
        (table,) = gc.get_referents(value)
        return getattr(type(table), DICT_VIEWS[t]), (table,)
    return None


# objects that no copy stands for: what goes on where it stands, and what calls functions of the program's natively
_ITSELF = (
    types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, sequences.Items, staticmethod, classmethod,
    property, operator.itemgetter, operator.methodcaller, types.MappingProxyType, types.CellType,
    functools._lru_cache_wrapper, weakref.WeakMethod,
)  # fmt: skip


def stays(value) -> bool:
    """Whether an object of the program's cannot be rebuilt: iterators of native code's are such."""
    if isinstance(value, _ITSELF):
        return True
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


def is_global(value, t: type) -> bool:
    """Whether pickle knows an object of a library's by a name, as typing.Union."""
    method = type_attribute(t, "__reduce__")
    known = type(method) is types.FunctionType and is_library(method.__globals__.get("__name__"))
    return known and isinstance(value.__reduce__(), str)


def native_new(t: type):
    return next(base.__dict__["__new__"] for base in t.__mro__ if type(base.__dict__.get("__new__")) in _NATIVE_NEW)


def stored(descriptor, o, v):
    """The value of an attribute in C after a write. An empty object says whether it takes the value, and as what."""
    t = type(o)
    try:
        empty = native_new(t)(t)
    except TypeError:  # of a function, which takes what it has where it takes anything
        descriptor.__set__(o, descriptor.__get__(o, t))
        return v
    descriptor.__set__(empty, v)
    return descriptor.__get__(empty, t)


_NATIVE_NEW = (types.BuiltinFunctionType, types.BuiltinMethodType)


SET_ARGS = BaseException.__dict__["args"].__set__  # an assignment would call the class's `__setattr__`


def space_of(value, name: str, pin: Callable) -> str:
    """The expression of an object's `__dict__`, which a class's own `__getattribute__` is not asked for."""
    if not in_python(type_attribute(type(value), "__getattribute__")):
        return f"{name}.__dict__"
    return f"{pin(object.__getattribute__)}({name}, '__dict__')"
