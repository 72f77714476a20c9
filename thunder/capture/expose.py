"""Exposing: everything that native code may look at is asked before the code runs.

One walk over everything that is reachable, however deep and long: snapshots are filled, and the attributes of objects
from outside are read.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from thunder.capture import callbacks, containers
from thunder.capture.classes import PROXIES
from thunder.capture.identities import stays_apart
from thunder.capture.interface import Capture
from thunder.capture.native import CONTAINERS, DICT_VIEWS, MUTABLE, PRIMITIVE, container_base, is_iterator, slots
from thunder.capture.policy import class_of_library
from thunder.capture.watched import check_watched
from thunder.capture.world import IDENTITY, KEYS, MISSING
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import AnyProxy, NumberProxy, TensorProxy, concrete
from thunder.interpreter import standins
from thunder.interpreter.attributes import parts_of, plain_attribute, type_attribute
from thunder.interpreter.instructions import PLAIN
from thunder.interpreter.operators import METHOD_OF

MOST = 10_000  # objects that one call may look at
# native code calls them, or asks torch about them
_OPAQUE = (type, types.FunctionType, types.ModuleType, torch.Tensor, NumberProxy)
_LEAVES = PRIMITIVE | {TensorProxy, AnyProxy, HostProxy, types.BuiltinFunctionType} - {slice}
_SEQUENCES = (list, tuple, set, frozenset, deque)


def expose(
    c: Capture, *values, concretely: bool = False, called=None, shown: bool = False, opened: bool = False
) -> None:
    """Native code may look at the values and at everything that they lead to.

    concretely: it also asks for types, so that symbolic numbers in lists and dicts are replaced by their values.
    called: the native callable, where it may call special methods of these objects; what copies them looks at modules
    too. shown: it makes a text. opened: it opens containers and looks at nothing that is in them.
    """
    opaque = _OPAQUE if called is not None and not opened and callbacks.copies(called) else (*_OPAQUE, torch.nn.Module)
    seen: set[int] = set()
    as_it_is: set[int] = set()  # what objects from outside hold: native code sees no symbolic number there
    pending, data, lazy = list(values), c.containers.data, c.containers.lazy
    while pending:
        if len(seen) > MOST:
            c.sharp(
                f"native code is given more than {MOST} objects, which are not watched for changes beyond that number"
            )
            return
        value = pending.pop()
        kind = type(value)
        if shown:
            _check_shown(c, kind)
        elif not opened:
            stays_apart(c, value)
        if id(value) in c.world.anew and kind is not functools.partial:
            c.world.ask(c.world.sources[id(value)], IDENTITY)
        if kind in _LEAVES or id(value) in seen or id(value) in data or isinstance(value, standins.StandIn):
            continue
        seen.add(id(value))
        if called is not None:
            callbacks.check_given(c, value, called)
        if id(value) in lazy:
            containers.materialize(c, value)
            if id(value) in data:
                continue
        is_held = id(value) in as_it_is
        if concretely or is_held:
            settle_values(c, value, concrete)
        if is_held and isinstance(value, tuple):
            in_tuples(concrete, value)
        parts = _parts(c, value, kind, shown, opaque)
        if is_held or id(value) in c.world.sources and not isinstance(value, (dict, *_SEQUENCES)):
            as_it_is.update(map(id, parts))
        pending += parts


def _parts(c: Capture, value, kind: type, shown: bool, opaque: tuple) -> list:
    """What native code finds in a value."""
    parts: list = []
    if isinstance(value, MUTABLE) and kind not in CONTAINERS:
        parts += _inside(c, value, kind, shown)
    if isinstance(value, (dict, *_SEQUENCES)):
        parts += _elements(c, value, kind)
    elif kind is types.MappingProxyType:
        parts += value.values()
    elif kind is slice:
        parts += (value.start, value.stop, value.step)
    elif kind is types.MethodType:
        parts.append(value.__self__)
    elif not isinstance(value, opaque):
        check_watched(c, value, "__getitem__", f"native code that is given a {kind.__name__}")
        parts += _inside(c, value, kind, shown)
    return parts


def _elements(c: Capture, value, kind: type) -> tuple:
    if isinstance(value, dict):
        return *dict.keys(value), *dict.values(value)
    base = container_base(kind) or (tuple if isinstance(value, tuple) else kind)
    return tuple(base.__iter__(value))


def _check_shown(c: Capture, kind: type) -> None:
    what = "tensor" if kind is TensorProxy else "module" if issubclass(kind, torch.nn.Module) else None
    if what is not None:
        c.refuse(f"the text of an object that holds a {what} is made by native code", f"make a text of the {what}")


def settle_values(c: Capture, container, settled: Callable) -> None:
    """Values, keys and elements of a list, a dict, a set or a deque are replaced by what `settled` makes of them."""
    if not isinstance(container, (list, dict, set, deque)):
        return
    look = c.containers.looks.get(id(container))
    for part in (container, *([look.was] if look is not None else [])):
        settle_keys(part, settled)
        if isinstance(part, set):
            continue
        for k, x in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if (settled_value := in_tuples(settled, x)) is not x:
                part[k] = settled_value


def in_tuples(settled: Callable, x):
    """What `settled` makes of a value, or of the elements of a tuple. Lists, which may hold themselves, are not
    opened."""
    if type(x) is not tuple:
        return settled(x)
    items = tuple([in_tuples(settled, y) for y in x])
    return x if all(map(operator.is_, items, x)) else items


def settle_keys(part: Any, settled: Callable) -> None:
    """A number that stands for another is replaced, in its place: its hash has decided about it."""
    if not isinstance(part, (dict, set)):
        return
    base = cast(Any, dict if isinstance(part, dict) else set)
    keys = list(base.__iter__(part))
    settled_keys = [in_tuples(settled, k) for k in keys]
    if all(k is new for k, new in zip(keys, settled_keys, strict=True)):
        return
    table = base(zip(settled_keys, dict.values(part), strict=True) if isinstance(part, dict) else settled_keys)
    base.clear(part)
    base.update(part, table)


def is_for_library(*values) -> bool:
    """Whether a library's class in C may compute with the values: NumPy makes an array of a list beside one of its
    numbers, and asks for the types of what is in it."""
    return any(_computes_in_c(kind) for kind in set(map(type, parts_of(*values))))


def with_numbers(c: Capture, *values) -> list:
    """The values, exposed, with the values of symbolic numbers."""
    expose(c, *values, concretely=True)
    return [in_tuples(concrete, x) for x in values]


def _computes_in_c(kind: type) -> bool:
    """Whether a class of a library's, or one that derives from it, has arithmetic in C."""
    if kind in PRIMITIVE or kind in CONTAINERS or issubclass(kind, PROXIES):
        return False
    methods = (type_attribute(kind, f"__{name}__") for name in METHOD_OF.values())
    owners = (plain_attribute(method, "__objclass__", object) for method in methods)
    return any(owner.__module__ not in ("builtins", "collections") for owner in owners)


def _inside(c: Capture, value, kind: type, again: bool) -> list:
    """The values of an object's attributes; of one from outside, asked, and given again where that is said."""
    source = c.world.sources.get(id(value))
    if source is not None:
        return [] if id(value) in c.known.exposed and not again else attributes(c, value, source)
    if class_of_library(kind):
        return _kept_by(value)
    slot_values = (plain_attribute(value, n, MISSING) for n in slots(kind))
    return [*plain_attribute(value, "__dict__", {}).values(), *(x for x in slot_values if x is not MISSING)]


def _kept_by(value) -> list:
    """The values that an object of a library's class, which the program has made, was given."""
    if isinstance(value, BaseException):
        return list(value.args)
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values()]
    return list(vars(value).values()) if isinstance(value, types.SimpleNamespace) else []


def attributes(c: Capture, o, source) -> list:
    """All attributes of an object from outside, asked. Raises CaptureError where the program has written to one, which
    native code would not see."""
    c.known.exposed.add(id(o))
    c.world.hold(o)
    own = plain_attribute(o, "__dict__")
    children = []
    if isinstance(own, dict):
        c.world.ask(source.attr("__dict__"), KEYS)
        entries = [(n, x) for n, x in list(own.items()) if _can_be_asked(c, x, source, n)]
        children += [c.reach(_place_of(c, o, source, n)) for n, _ in entries]
    names = [*slots(type(o)), *_members(type(o))]
    filled = ((n, plain_attribute(o, n, MISSING) is not MISSING) for n in names)  # else `__getattr__` would answer
    places = [source.attr(n) if is_filled else source.find(n) for n, is_filled in filled]
    children += [entries for source_of_child in places if (entries := c.reach(source_of_child)) is not MISSING]
    if c.effects.names(o) or any(containers.is_changed(c, x) for x in children):
        path = c.world.describe(source)
        reason = f"{path}, which the program has written to, goes to code that thunder does not read"
        c.refuse(reason, "give the code the attributes that it needs")
    return [concrete(x) for x in children]


def _place_of(c: Capture, o, source, name: str):
    """The place of an object's own attribute; in its `__dict__` where code of the user's may answer instead."""
    answers = hasattr(type(type_attribute(type(o), name)), "__set__") or c.slot(type(o), "__getattribute__")
    return source.attr("__dict__").item(name) if answers else source.attr(name)


def _members(kind: type) -> list[str]:
    """Attributes that a class made in C keeps: the function of a partial, the arguments of an exception."""
    spaces = [vars(base) for base in kind.__mro__ if "__slots__" not in vars(base)]
    members = [n for space in spaces for n, x in space.items() if type(x) is types.MemberDescriptorType]
    return [n for n in [*members, *(["args"] * issubclass(kind, BaseException))] if not n.startswith("__")]


def _can_be_asked(c: Capture, value, source, name: str) -> bool:
    if type(value) in DICT_VIEWS or is_iterator(value):
        c.sharp(
            f"native code is given {c.world.describe(source.attr(name))}, a {type(value).__name__}, which is "
            "not watched for changes"
        )
        return False
    return True


def as_text(c: Capture, value, function: Callable):
    """A value of which native code makes a text, exposed."""
    expose(c, value, called=function, shown=True)
    return value


_WALKED = 1000  # objects; larger ones that are no containers are a library's: loggers, files
_APART = (type, types.ModuleType, types.CodeType, torch.Tensor)


def _shows_nothing(kind: type) -> bool:
    """Whether texts of a class's objects say where they are, and no more."""
    return kind is types.FunctionType or kind.__repr__ is object.__repr__ and kind.__str__ is object.__str__


def contents_of(*values, shown: bool = False) -> Iterator:
    """The values and what objects of C types and of libraries among them keep, as a deque, a namespace or a signature.
    shown: only what their texts show."""
    pending, seen = [v for v in values if type(v) not in PLAIN], set[int]()
    while pending and len(seen) < _WALKED:
        value = pending.pop(0)
        if id(value) in seen:
            continue
        yield value
        seen.add(id(value))
        if not isinstance(value, _APART) and not (shown and _shows_nothing(type(value))):
            pending += [x for x in _inside_of(value) if type(x) not in PLAIN]


def _inside_of(value) -> Iterable:
    """What an object keeps; of an exception no traceback, of a function no globals."""
    if isinstance(value, standins.StandIn):  # which comes back to the machine
        return ()
    if isinstance(value, types.FunctionType):
        return () if value.__module__.startswith("thunder.") else value.__closure__ or ()
    return value.args if isinstance(value, BaseException) else gc.get_referents(value)


def keeps(values: tuple, kinds) -> bool:
    """Whether texts of objects show values of these kinds."""
    return any(isinstance(value, kinds) for value in contents_of(*values, shown=True))


def is_written(c: Capture, value) -> bool:
    """Whether the program has written to an object from outside, or to something that it keeps."""
    written = {owner for owner, _ in c.effects.held}
    looks = c.containers.looks.items()
    written |= {id(look.original) for sid, look in looks if containers.is_changed(c, c.world.keep[sid])}
    return bool(written) and any(id(x) in written for x in contents_of(value))
