"""Attributes of classes, and the questions by which the program depends on them. Functions take the capture first."""

from __future__ import annotations

import functools
import types

import torch

from thunder.capture.effects import DELETED
from thunder.capture.identities import known_itself
from thunder.capture.interface import Capture
from thunder.capture.native import ENUM, IDENTICAL
from thunder.capture.policy import bound_method, class_of_library
from thunder.capture.world import IDENTITY, PRESENT, Source
from thunder.core.proxies import AnyProxy, Condition, NumberProxy, TensorProxy
from thunder.interpreter import NULL
from thunder.interpreter.attributes import plain_attribute

PROXIES = (TensorProxy, AnyProxy, Condition, NumberProxy)


UNKNOWN = object()


# types of attributes that a class gives as they are, or the function inside: a question to it is one to its bases
_SHOWN_BY_CLASSES = {
    types.FunctionType, property, staticmethod, functools.cached_property, types.WrapperDescriptorType,
    types.MethodDescriptorType, type,
    types.MemberDescriptorType, types.GetSetDescriptorType, types.BuiltinFunctionType, types.ClassMethodDescriptorType,
}  # fmt: skip


def lookup(c: Capture, kind: type, name: str, after: type | None = None):
    """The attribute as it stands in a class or its bases, or NULL; the program depends on it, unless a library says
    it."""
    attribute = c.known.looked_up.get((kind, name, after), UNKNOWN)
    return _look_up(c, kind, name, after) if attribute is UNKNOWN else attribute


def _look_up(c: Capture, kind, name, after):
    """`lookup`, where the answer is not known yet: walks the bases, and asks about those that may change."""
    if issubclass(kind, PROXIES):  # tensors and numbers have operations in the place of special methods
        c.known.looked_up[kind, name, after] = NULL
        return NULL
    mro = kind.__mro__
    passed, attribute, owner = [], NULL, None
    for base in mro if after is None else mro[mro.index(after) + 1 :]:
        if c.effects and (written := c.effects.value(base, name)) is not NULL:
            attribute, owner = written, None
            if attribute is DELETED:
                attribute = NULL
                continue
            break
        if name in base.__dict__:
            attribute, owner = base.__dict__[name], base
            break
        if not of_library(base) and not base.__module__.startswith("torch."):
            passed.append(base)
    if owner is not None and not of_library(owner):
        _depend(c, kind, name, after, attribute, owner, passed)
    else:
        _depend_on_absence(c, kind, name, after, attribute, passed)
    c.known.looked_up[kind, name, after] = attribute
    return attribute


def of_library(kind: type) -> bool:
    """Whether a class is taken to stay as it is. Classes of modules are patched by other libraries, whoever wrote
    them."""
    module = kind.__module__
    return not isinstance(module, str) or class_of_library(kind) and not issubclass(kind, torch.nn.Module)


_MADE_AGAIN = {property, staticmethod, classmethod, functools._lru_cache_wrapper}


def _depend(c: Capture, kind, name, after, attribute, owner, passed) -> None:
    """Depend on an attribute of a user's class: descriptors, functions and classes stay the same objects; other values
    are asked where they are used."""
    known_itself(c, attribute)
    if not is_fixed(attribute):
        _absent(c, passed, name)
        ask_bases(c, kind)
        return
    if type(attribute) in _MADE_AGAIN:  # otherwise: a program that gives it back gives this one
        c.world.know_whole(attribute, entry(c, owner, name))
    if (
        not of_library(type(attribute))
        and not issubclass(type(attribute), type)
        and id(attribute) not in c.world.sources
    ):
        c.world.know(attribute, c.world.const(attribute))  # a descriptor of the user's: its methods read its attributes
    if not _by_class(c, kind, name, after, attribute):
        _absent(c, passed, name)
        c.world.ask(entry(c, owner, name), IDENTITY)
        ask_bases(c, kind)


def _depend_on_absence(c: Capture, kind, name, after, attribute, passed) -> None:
    if passed and not (attribute is not NULL and _by_class(c, kind, name, after, attribute)):
        _absent(c, passed, name)
        ask_bases(c, kind)


def ask_bases(c: Capture, kind) -> None:
    """The order in which bases are looked up stays the same."""
    if len(kind.__mro__) > 2 and not of_library(kind):
        c.world.ask(c.world.const(kind, kind.__qualname__).attr("__mro__"), IDENTITY)


def _by_class(c: Capture, kind, name, after, attribute) -> bool:
    """One question to the class for all of its bases, where the class gives the same object whenever it is asked."""
    attribute_type = type(attribute)
    if after is not None or not of_library(type(kind)) or attribute_type not in _SHOWN_BY_CLASSES:
        return False
    if plain_attribute(kind, name) is not (attribute.__func__ if attribute_type is staticmethod else attribute):
        return False
    c.world.ask(c.world.const(kind, kind.__qualname__).attr(name), IDENTITY)
    return True


def _absent(c: Capture, classes, name) -> None:
    for base in classes:
        c.world.ask(entry(c, base, name), PRESENT)


def entry(c: Capture, owner: type, name: str) -> Source:
    return c.world.const(owner, owner.__qualname__).attr("__dict__").item(name)


def is_fixed(attribute) -> bool:
    """Whether something on a class is compared by identity: it binds, or is no value."""
    t = type(attribute)
    return attribute is None or hasattr(t, "__get__") or t in IDENTICAL or issubclass(t, (type, types.ModuleType, ENUM))


def forget_lookups(c: Capture) -> None:
    """The program writes to a class."""
    c.known.looked_up.clear()


def class_value(c: Capture, kind, name, attribute):
    """A class attribute that is no descriptor: read like anything from outside."""
    owner = owner_of(kind, name, attribute)
    if owner is None or of_library(owner):
        return attribute
    if is_fixed(attribute) and bound_method(attribute) is None:
        return attribute
    return c.read(attribute, entry(c, owner, name))


def owner_of(kind: type, name: str, attribute) -> type | None:
    return next((base for base in kind.__mro__ if base.__dict__.get(name, NULL) is attribute), None)
