"""Names in modules: globals, builtins and imports. Functions take the capture first."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch

from thunder.capture.identities import known_itself
from thunder.capture.interface import Capture
from thunder.capture.native import CONTAINERS, IDENTICAL, is_tracked, plain_base
from thunder.capture.native_calls import call_native
from thunder.capture.policy import bound_method, is_library
from thunder.capture.world import IDENTITY, PRESENT, Source
from thunder.interpreter import NULL, attributes
from thunder.interpreter.instructions import builtin_namespace


def import_module(c: Capture, f, args, kwargs):
    """`__import__` and `importlib.import_module`: another module may stand under a name, or one where there is none."""
    modules, name = c.world.const(sys.modules, "sys.modules"), kwargs.get("name", args[0] if args else None)
    try:
        module: Any = call_native(c, f, args, kwargs)
    except ImportError:
        c.world.ask(modules.item(name), PRESENT)
        raise
    if not is_library(module.__name__) and module.__name__ in sys.modules:
        c.world.ask(modules.item(module.__name__), IDENTITY)
    return module


# by identity, and no constant: a program gives back the object itself
_ITSELF = {object, types.GenericAlias, types.UnionType, *attributes.BUILTINS}
_CREATED = {types.FunctionType, functools._lru_cache_wrapper}  # by functions of libraries


def namespace_value(c: Capture, space: dict, label: str, n: str, value, answered: Source | None = None):
    """The value of a name in a module's globals; `answered` where the module's `__getattr__` says it."""
    t = type(value)
    is_own = not is_library(space.get("__name__"))
    if t in IDENTICAL and not (is_own and bound_method(value) is not None) or issubclass(t, (type, types.ModuleType)):
        if (id(space), n) not in c.known.names:
            c.known.names[id(space), n] = value
            known_itself(c, value)
            if n in space:
                source = c.world.const(space, label).item(n)
                c.world.ask(source, IDENTITY)
                if t is torch.Generator:
                    c.world.sources.setdefault(id(value), source)
                elif t in _ITSELF or t in _CREATED and is_own:
                    c.world.know_whole(value, source)
        return value
    if is_own:
        return c.read(value, answered or c.world.const(space, "global").item(n))
    # `sys.argv`, `math.pi`; a library's own code changes its globals natively
    by_attribute = label != "global" and (t in CONTAINERS or plain_base(t) is not None)
    return c.read(value, answered or c.world.const(space, label).item(n)) if by_attribute or is_tracked(t) else value


def namespace(c: Capture, f):
    """`globals()`: read name by name; nobody may write through it."""
    space = f.__globals__
    if is_library(space.get("__name__")) or id(f) in c.fresh:
        return space
    c.outside.namespaces.add(id(space))
    _check_namespace(c, space)
    return c.read(space, c.world.const(space, "global"))


def _check_namespace(c: Capture, space) -> None:
    if id(space) in c.outside.namespaces and c.effects.names(space):
        c.refuse("globals() is read in a program that assigns globals", "read the global by its name")


def load_global(c: Capture, f, n):
    """A global or builtin name, read in the module where it stands."""
    space = f.__globals__
    known = None if c.effects else c.known.names.get((id(space), n))
    if known is not None and (space.get(n) is known or n not in space and (id(space), n) in c.known.builtins):
        return known
    if c.effects and (written := c.effects.value(space, n)) is not NULL:
        return written
    if n in space:
        return namespace_value(c, space, "global", n, space[n])
    if is_library(space.get("__name__")):
        return c.load_builtin(space, n)
    c.world.ask(c.world.const(space, "global").item(n), PRESENT)
    source = c.world.const(builtin_namespace(space), "builtins.").item(n)
    if c.world.ask(source, PRESENT) is False:
        return c.load_builtin(space, n)  # raises
    value = c.reach(source)
    if not c.effects:
        c.known.names[id(space), n] = value
        c.known.builtins.add((id(space), n))
    return value


def store_global(c: Capture, f, n, v) -> None:
    space = f.__globals__
    c.effects.note({c.world.const(space, "global").item(n): v})
    c.effects.write("global", space, n, v)
    _check_namespace(c, space)


def delete_global(c: Capture, f, n) -> None:
    load_global(c, f, n)
    c.refuse(f"the global {n!r} is deleted", "set it to None")
