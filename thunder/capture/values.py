"""Values from outside as the program may hold them: a proxy, a snapshot of a container, or the object itself; asked as
they are read."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from typing import Any

import numpy
import torch

from thunder.capture import changing, containers, tensors
from thunder.capture.identities import known_itself
from thunder.capture.interface import Capture
from thunder.capture.native import (
    CONTAINERS,
    DICT_VIEWS,
    ENUM,
    IDENTICAL,
    IMMUTABLE,
    MUTABLE,
    PRIMITIVE,
    is_iterator,
    is_tracked,
    plain_base,
)
from thunder.capture.numbers import is_symbolic, parts_of_plain, primitive
from thunder.capture.policy import (
    DEFINED,
    bound_method,
    class_of_library,
    is_constant,
    is_library,
    is_of_host,
    is_watched,
    read_of_library,
)  # fmt: skip
from thunder.capture.remade import UNCHANGING
from thunder.capture.world import (
    CONTENT,
    ELEMENTS,
    IDENTITY,
    KEYS,
    LENGTH,
    MISSING,
    SAME,
    TYPE,
    VALUE,
    Source,
    held,
    is_data,
)
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import Size, TensorProxy
from thunder.interpreter import NULL
from thunder.interpreter.attributes import (
    BUILTINS,
    in_python,
    plain_attribute,
    type_attribute,
)
from thunder.ops import inplace_of
from thunder.ops import lookup as operation_of


def read(c: Capture, value, source: Source):
    """A value from a source, as the program may hold it."""
    t = type(value)
    c.world.note(source, value)
    if (known := c.outside.remade.get(id(value))) is not None:
        return _again(c, source, *known[1:])
    if t in PRIMITIVE:
        result = _PARTED.get(t, primitive)(c, value, source)
        return _remember(c, value, source, result) if t in (slice, torch.Size) else result
    if t is TensorProxy:
        return value
    if issubclass(t, torch.Tensor):
        return tensors.read(c, value, source)
    if t in CONTAINERS or issubclass(t, MUTABLE):
        return containers.snapshot(c, value, source)
    known = c.world.sources.get(id(value))
    if known is not None:
        if known is not source:
            c.world.ask(source, IDENTITY) if known.step == "const" else c.world.ask(source, SAME, known)
        return value
    if issubclass(t, torch.nn.Module):
        if source.base is not None and not _comes_anew(c, value, source):
            c.world.ask(source, IDENTITY)
        if id(value) in c.outside.rooted:
            c.outside.pinned[source] = value
        c.world.ask(source, TYPE)
        c.world.know(value, source)
        return value
    rule = _tuple if issubclass(t, tuple) else _array if issubclass(t, numpy.ndarray) else _RULES.get(t)
    result = rule(c, value, source) if rule is not None else _other(c, value, t, source)
    if issubclass(t, _REMADE):
        _remember(c, value, source, result)
    if t is not tuple and t is not types.MethodType and id(result) not in c.world.sources:
        c.world.know_whole(result, source)
    return result


_BOUND = (types.MethodWrapperType, *BUILTINS)
_REMADE = (
    tuple,
    frozenset,
    types.MappingProxyType,
    types.MethodType,
    *_BOUND,
)  # where something in them is another object here


def _remember(c: Capture, value, source: Source, copied):
    """`copied`, which stands for the value wherever it is read again."""
    if copied is not value:
        c.outside.remade[id(value)] = value, source, copied
        c.outside.standing[c.world.hold(copied)] = source
    return copied


def _again(c: Capture, source: Source, first: Source, copied):
    if source is not first:
        c.world.ask(source, IDENTITY) if first.step == "const" else c.world.ask(source, SAME, first)
    return copied


def _slice(c: Capture, value: slice, source: Source):
    parts = parts_of_plain(value, source)
    if all(_is_constant(c, x, s) for s, x in parts):
        return c.world.ask(source, VALUE)
    c.world.ask(source, TYPE)
    return slice(*(read(c, x, s) for s, x in parts))


def _is_constant(c: Capture, value, source: Source) -> bool:
    """Whether a part of a tuple or a slice is a number or a text that the program holds one value of."""
    if type(value) not in PRIMITIVE or is_symbolic(c, value, source):
        return False
    return type(value) not in changing.TEXTS or not changing.changes(c, value, source)


def _text(c: Capture, value, source: Source):
    return changing.read(c, value, source) if changing.changes(c, value, source) else c.world.ask(source, VALUE)


def _method(c: Capture, value: types.MethodType, source: Source):
    c.world.ask(source, TYPE)
    of_function, function = source.attr("__func__"), value.__func__
    if type(function) is types.FunctionType and _stands_in_no_class(function):  # each call may make it anew
        c.world.note(of_function, function)
        _identical(c, function, of_function)
    else:
        c.world.ask(of_function, IDENTITY)
        known_itself(c, function)
    return types.MethodType(function, read(c, value.__self__, source.attr("__self__")))


def _stands_in_no_class(f: types.FunctionType) -> bool:
    """Whether a function is a local one of another, and of no class in that."""
    _, is_local, name = f.__code__.co_qualname.rpartition("<locals>.")
    return bool(is_local) and "." not in name


def _mapping_proxy(c: Capture, value: types.MappingProxyType, source: Source):
    c.world.ask(source, TYPE)
    mapping = held(value)
    if isinstance(mapping, dict) and type(mapping) is not dict:
        inside: Any = read(c, mapping, source.child("held", None))
        return types.MappingProxyType(c.materialize(inside))
    c.world.ask(source, KEYS)
    return types.MappingProxyType({k: read(c, x, source.item(k)) for k, x in value.items()})


def _view(c: Capture, value, source: Source):
    reason = f"{c.world.describe(source)} is a {type(value).__name__}, a view of a dict from outside"
    c.refuse(reason, "pass the dict, or list(...) of the view")


def _frozenset(c: Capture, value: frozenset, source: Source):
    c.world.ask(source, TYPE)
    c.world.ask(source, ELEMENTS)
    c.world.know(value, source)
    items = elements(c, value)
    return value if all(a is b for a, b in zip(items, value, strict=True)) else frozenset(items)


def _array(c: Capture, value: numpy.ndarray, source: Source):
    """A NumPy array from outside: asked for its content, or a value of the host where it changes."""
    if value.dtype.hasobject:
        for i in numpy.ndindex(value.shape):
            if read(c, value[i], source.item(i)) is not value[i]:
                path = c.world.describe(source)
                c.refuse(f"{path} is a NumPy array that holds containers or tensors", "pass a list of them")
    elif changing.changes(c, value, source):
        return changing.read(c, value, source)
    if plain_attribute(value, "__dict__"):
        reason = f"{c.world.describe(source)} is a {type(value).__name__}, an array with a state of its own"
        c.refuse(reason, "pass the array alone: np.asarray(...)")
    c.world.ask(source, CONTENT)
    c.outside.arrays[id(value)] = value, numpy.ndarray.copy(value), source
    if type(value) is not numpy.ndarray:  # whose attributes are read
        c.world.know(value, source)
    return value


def _identical(c: Capture, value, source: Source):
    """A value that is no other object in any call, a function that is known by its structure, or a generator that is an
    input."""
    t = type(value)
    if t is types.FunctionType:
        c.outside.function_sources.setdefault(id(value), source)
    if t in (types.FunctionType, torch.Generator) and _comes_anew(c, value, source):
        c.world.ask(source, TYPE)
        c.world.know(value, source)
        if t is torch.Generator:
            c.world.ask(source.attr("device"), VALUE)
            c.outside.compare(source)
        return value
    c.world.ask(source, IDENTITY)
    if t is torch.Generator or t is types.FunctionType and source.root.key in ("args", "kwargs"):
        c.world.know(value, source)
    return value


def _comes_anew(c: Capture, value, source: Source) -> bool:
    """Whether a function, a partial or a module is known by its structure: what each call may make anew is the same
    program for the same code, and the tensors in it are inputs, as generators are. Those are arguments and what stands
    where another one was before. The others are known as the objects that they are, which is one guard."""
    if id(value) in c.outside.rooted or id(value) in c.outside.itself or value is torch.default_generator:
        return False
    if type(value) is types.FunctionType and _is_known_itself(c, value):
        return False
    if source.root.key not in ("args", "kwargs"):
        before = c.request.changing.get(c.world.describe(source), _NONE) if c.request.changing else _NONE
        if before is not None and (before is _NONE or (id(value),) in before):
            c.outside.identities[source] = id(value)
            return False
    c.world.know_anew(value)
    return True


_NONE: frozenset = frozenset()


def _is_known_itself(c: Capture, f: types.FunctionType) -> bool:
    """Whether a function stands in a module, or stands for an operation: its code does not say all about it."""
    if "<" not in f.__code__.co_qualname or is_library(f.__globals__.get("__name__")):
        return True
    known = id(f) in c.dispatch.handlers or id(f) in DEFINED or f in c.dispatch.replacements
    return known or operation_of(f) is not None or inplace_of(f) is not None


def _bound(c: Capture, value, source: Source):
    """A method in C: of an object from outside it is that object's, however the program comes by the method."""
    owner, name, method = value.__self__, value.__name__, bound_method(value)
    if method is None:
        return _identical(c, value, source)
    c.world.ask(source, TYPE)
    c.world.ask(source.attr("__name__"), VALUE)
    receiver = read(c, owner, source.attr("__self__"))
    if type(receiver) is HostProxy:
        return c.load_attr(receiver, name)
    return value if receiver is owner else method.__get__(receiver, type(receiver))


_RULES = {
    types.MethodType: _method,
    types.MappingProxyType: _mapping_proxy,
    frozenset: _frozenset,
}
_RULES |= dict.fromkeys(DICT_VIEWS, _view) | dict.fromkeys(IDENTICAL, _identical) | dict.fromkeys(_BOUND, _bound)


def _other(c: Capture, value, t: type, source: Source):
    """A value that is neither a primitive, a tensor, a container nor a module."""
    if issubclass(t, IMMUTABLE) and (not is_watched(value) or changing.changes(c, value, source)):
        return changing.read(c, value, source)
    if issubclass(t, IMMUTABLE) or plain_base(t) is not None and not issubclass(t, ENUM):
        c.world.ask(source, VALUE)
        if not issubclass(t, IMMUTABLE):
            c.world.know(value, source)
        return value
    if is_iterator(value) and not in_python(type_attribute(t, "__next__")):
        c.outside.iterators[id(value)] = value
    if issubclass(t, (type, ENUM, frozenset)) or is_constant(value):
        return _identical(c, value, source)
    if is_of_host(value):
        return changing.read(c, value, source)
    if t is functools.partial and _comes_anew(c, value, source):
        c.world.ask(source, TYPE)
        c.world.know(value, source)
        return value
    if class_of_library(t) and not (is_tracked(t) or issubclass(t, weakref.ref)):
        c.world.ask(source, IDENTITY)
        if t is functools.partial or not issubclass(t, UNCHANGING):
            c.world.know(value, source)
        return value
    c.world.know(value, source)
    c.world.ask(source, TYPE)
    return value


def reach(c: Capture, source: Source):
    """The value at a source, as the program may hold it; MISSING, asked, where there is none."""
    return c.read(c.world.value_at(source), source) if c.world.is_there(source) else MISSING


def elements(c: Capture, value) -> list:
    """The elements of a set from outside: objects among them, and in tuples, are pinned, and asked where somebody looks
    at them."""
    return [x if _is_primitive(x) else read(c, x, c.world.const(x)) for x in value]


def _is_primitive(value) -> bool:
    """Whether a value is a number or text, one of a library that is compared by value, or a tuple of such values."""
    kind = type(value)
    if issubclass(kind, IMMUTABLE):
        return is_watched(value) and class_of_library(kind) or read_of_library(kind.__module__)
    return kind in PRIMITIVE or issubclass(kind, tuple) and all(map(_is_primitive, tuple.__iter__(value)))


def _tuple(c: Capture, value: tuple, source: Source):
    """A tuple from outside: a constant where all in it are, else a tuple of what the program may hold."""
    if type(value) is tuple and tuple.__len__(value) > containers.LARGE and is_data(value):
        c.world.ask(source, CONTENT)
        return containers.data(c, value, source)
    items = parts_of_plain(value, source)
    if all(_is_constant(c, x, s) for s, x in items):
        c.world.ask(source, VALUE)
        if type(value).__dictoffset__:  # its attributes are read
            c.world.ask(source, TYPE)
            c.world.know(value, source)
        return value
    c.world.ask(source, TYPE)
    c.world.ask(source, LENGTH)
    children = [read(c, x, s) for s, x in items]
    if all(map(operator.is_, children, tuple.__iter__(value))):
        if type(value).__dictoffset__:  # its attributes are read
            c.world.know(value, source)
        return value
    if type_attribute(type(value), "_make") is not NULL:
        return type(value)._make(children)  # pyright: ignore[reportAttributeAccessIssue]
    return (Size if type(value) is torch.Size else type(value))(children)


_PARTED = {slice: _slice, torch.Size: _tuple, str: _text, bytes: _text}
