"""Kinds of values: which are compared by value, by identity, or as containers, and which need no tracking."""

from __future__ import annotations

import ast
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import io
import os
import pathlib
import string
import sys
import threading
import types
import typing
import weakref
from typing import Any

import numpy
import torch
import torch.utils.checkpoint

from thunder.interpreter import NULL
from thunder.interpreter.attributes import BUILTINS, type_attribute

# values that are compared by value and never tracked
PRIMITIVE = {
    int, float, bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.Size,
        torch.memory_format, torch.layout, range, slice,
    type(NotImplemented),
}  # fmt: skip
TYPE_PARAMETERS = typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple
# values that are compared by identity
IDENTICAL = {
    types.FunctionType, *BUILTINS, types.ModuleType, type, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType,
    types.GenericAlias, types.UnionType, functools._lru_cache_wrapper, object, torch.Generator,
}  # fmt: skip
MUTABLE = (list, dict, set, collections.deque)
CONTAINERS = {list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter}


def container_base(kind: type) -> Any:
    """The builtin container that a class is, or derives from."""
    if kind in _BUILTIN:
        return kind
    return next(
        (base for base in (collections.OrderedDict, dict, list, set, collections.deque) if issubclass(kind, base)), None
    )


_BUILTIN = {list, dict, set, collections.OrderedDict, collections.deque}


def plain_base(kind: type) -> Any:
    """The builtin type of numbers or text that a class is, or derives from."""
    return next((base for base in (int, float, complex, str, bytes) if issubclass(kind, base)), None)


def slots(kind: type) -> list[str]:
    """The names of the slots of a class and its bases."""
    names = []
    for base in kind.__mro__:
        own = base.__dict__.get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"
        for n in (own,) if isinstance(own, str) else own:
            if not n.startswith("__"):
                names.append(n)
            elif not n.endswith("__"):
                names.append(private + n)
    return names


# compared by value, like numbers
IMMUTABLE = (
    numpy.generic, pathlib.PurePath, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
    datetime.timedelta, datetime.timezone,
    typing.ParamSpecArgs, typing.ParamSpecKwargs,  # made anew for whoever asks
)  # fmt: skip

# outside state that lives in a library object
_TRACKED = {
    type(os.environ), threading.local, types.SimpleNamespace, collections.UserDict, collections.UserList,
    collections.ChainMap, torch.nn.Module,
    BaseException, string.Template,
    contextlib._GeneratorContextManagerBase, contextlib.ExitStack, threading.Condition, threading.Semaphore,
    threading.Event, threading.Barrier, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, ast.AST, io.IOBase.__base__,
}  # fmt: skip


def is_tracked(kind: type) -> bool:
    """Whether objects of a library's class are read like the user's. Their bases say so: an abstract base class would
    ask each class that comes from it."""
    return not _TRACKED.isdisjoint(kind.__mro__)


def among(f, table) -> bool:
    """Whether a callable is one of a table; one that cannot be hashed is in none."""
    try:
        return f in table
    except TypeError:
        return False


def is_hashable(f) -> bool:
    """Whether a callable has a hash."""
    try:
        hash(f)
    except TypeError:
        return False
    return True


def in_library(module: Any) -> bool:
    """Whether a module, by its name, is one of PyTorch, what it is built on, thunder or the standard library."""
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


_LIBRARIES = {"torch", "triton", "sympy", "mpmath", "numpy", "thunder", *sys.stdlib_module_names}


def is_iterator(value) -> bool:
    """Whether a value of a library's type is used up by reading it."""
    return type_attribute(type(value), "__next__") is not NULL


_TABLES = ({}, collections.OrderedDict())
DICT_VIEWS = {type(getattr(table, n)()): n for table in _TABLES for n in ("keys", "values", "items")}
ENUM = enum.Enum
