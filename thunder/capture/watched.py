"""Objects of native code from outside: those whose state a program may look at, since it never changes or is asked."""

from __future__ import annotations

import contextvars
import functools
import io
import operator
import random
import re
import struct
import types
import weakref

import numpy
import torch

from thunder.capture import containers, locks
from thunder.capture.native import BUFFERS, ENUM, IMMUTABLE, PRIMITIVE, is_iterator
from thunder.interpreter import NULL
from thunder.interpreter.attributes import type_attribute

_WATCHED = (
    *containers.MUTABLE, tuple, *IMMUTABLE, frozenset, slice, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MappingProxyType, types.GenericAlias, types.UnionType, contextvars.ContextVar,
    weakref.ref, re.Pattern, re.Match, struct.Struct, operator.itemgetter, operator.attrgetter, operator.methodcaller,
    functools.partial, int, float, complex, str, bytes, *BUFFERS, torch.nn.Module, property, staticmethod, classmethod,
    numpy.ndarray, numpy.dtype, ENUM, random.Random, BaseException, *locks.KINDS,
)  # fmt: skip


def check_watched(c, o, name: str, called: str) -> None:
    """Native code is about to look at an object, by a special method or method of this name. Refuse one from outside
    whose state is not watched. called: the method in words."""
    if (id(o) in c.sources or id(o) in c.outside.origins) and not _is_watched(o, name):
        c.refuse(
            f"{called} looks at or changes an object from outside whose state is not watched",
            "call it outside of the compiled function",
        )


def _is_watched(o, name: str) -> bool:
    """Whether a method of an object from outside is known to leave it as it is, or is asked or warned about."""
    t = type(o)
    if t in PRIMITIVE or isinstance(o, _WATCHED) or is_iterator(o) and not isinstance(o, io.IOBase):
        return True
    if isinstance(o, (torch.UntypedStorage, torch.TypedStorage)):
        return False
    found = type_attribute(t, name)
    if found is NULL:
        found = type_attribute(t, "__getitem__")  # by which native code iterates and searches as well
    owner = getattr(found, "__objclass__", object)
    return owner in (object, types.SimpleNamespace) or t.__module__.split(".")[0] in ("torch", "numpy")
