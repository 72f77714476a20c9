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
from thunder.capture.remade import TYPE_PARAMETERS
from thunder.interpreter import NULL
from thunder.interpreter.attributes import NATIVE_METHODS, type_attribute

_WATCHED = (
    *containers.MUTABLE, tuple, *IMMUTABLE, frozenset, slice, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MappingProxyType, types.GenericAlias, types.UnionType, contextvars.ContextVar,
    weakref.ref, re.Pattern, re.Match, struct.Struct, operator.itemgetter, operator.attrgetter, operator.methodcaller,
    functools.partial, int, float, complex, str, bytes, *BUFFERS, torch.nn.Module, property, staticmethod, classmethod,
    numpy.ndarray, numpy.dtype, ENUM, random.Random, BaseException, *locks.KINDS, *TYPE_PARAMETERS,
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
    if isinstance(o, types.SimpleNamespace) or t.__module__.split(".")[0] in ("torch", "numpy"):
        return True
    found = type_attribute(t, name)
    if found is NULL:
        return not _has_native_state(t)
    if getattr(found, "__objclass__", object) is not object:
        return False
    return name not in _CALLED_BY_OBJECT or _is_watched(o, _CALLED_BY_OBJECT[name])


# methods of `object` -> the method that they call
_CALLED_BY_OBJECT = {
    "__str__": "__repr__", "__format__": "__str__", "__ne__": "__eq__", "__reduce_ex__": "__reduce__",
}  # fmt: skip


@functools.cache
def _has_native_state(kind: type) -> bool:
    """Whether objects of a class keep, in C, what only its methods show. Slots and attributes are asked."""
    own = ((name, method) for base in kind.__mro__ for name, method in vars(base).items() if base is not object)
    return any(type(m) in _OF_C and n not in ("__dict__", "__weakref__") for n, m in own)


_OF_C = (*NATIVE_METHODS, types.GetSetDescriptorType)
