"""Identity: `is`, `id()` and hash tables over objects from outside."""

from __future__ import annotations

import operator
import types
import weakref
from typing import Any

from thunder.capture.interface import Capture
from thunder.capture.native import CONTAINERS
from thunder.capture.policy import is_library
from thunder.capture.state import NOT_REAL
from thunder.capture.world import IDENTITY, SAME, Source, same_value
from thunder.core.proxies import FloatProxy, IntegerProxy, NumberProxy, TensorProxy, concrete
from thunder.interpreter.attributes import parts_of
from thunder.interpreter.instructions import PLAIN


def source_of(c: Capture, value) -> Source | None:
    """Where an object from outside is, or the one that this stands for. A function that is known as the object that it
    is may be compared with one that is known by its structure."""
    source = c.world.sources.get(id(value)) or c.outside.standing.get(id(value))
    if source is None and c.world.anew and type(value) is types.FunctionType and id(value) not in c.fresh:
        source = c.world.origins.get(id(value)) or c.world.const(value)
    return source


def known_itself(c: Capture, value) -> None:
    """The program knows the object that stands in a module or in a class: where it knows it by its structure from
    elsewhere, it stands there in all calls."""
    if type(value) is types.FunctionType:
        c.outside.itself.add(id(value))
        c.world.hold(value)
    if id(value) in c.world.anew:
        c.world.ask(c.world.sources[id(value)], IDENTITY)


class Id(int):
    """The id of an object from outside."""


def id_of(c: Capture, f, args, kwargs):
    """Handler of id(): an object from outside has an id of its own, until that meets ids from outside (`real_id`)."""
    o = concrete(args[0])
    look = c.containers.looks.get(id(o))
    known = look.original if look is not None else o
    real, source = c.tensors.real.get(o, (None, None)) if type(o) is TensorProxy else (known, source_of(c, o))
    if source is None:
        return id(o)
    if id(o) in c.outside.standing:
        real = c.world.values[source]
    return c.outside.ids.setdefault(id(o), (source, real, Id(id(o))))[2]


def real_id(c: Capture, k):
    """A number that meets ids from outside: the program depends on the identity of an object whose id it is."""
    if type(k) is not Id:
        return k
    c.outside.met.add(int(k))
    source, real, _ = c.outside.ids[k]
    if type(real).__weakrefoffset__:
        c.outside.passing.add(id(real))
    if source.step != "const":
        c.world.ask(source, IDENTITY)
    return id(real)


def hashable(c: Capture, value):
    """The argument of hash(): the program depends on the identity of an object that is hashed by it."""
    if type(value) in (tuple, frozenset):
        parts = [hashable(c, x) for x in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if type(value) is TensorProxy:
        return real_id(c, id_of(c, id, [value], {}))
    if id(value) in c.world.sources and c.lookup(type(value), "__hash__") is object.__hash__:
        real_id(c, id_of(c, id, [value], {}))
    return value


def told_apart(c: Capture, value, others) -> None:
    """A hash table or a list compares a value with others, a dict with its keys: those from outside stay other objects
    than they are. Numbers and text are compared by what they are."""
    if type(value) in PLAIN:
        return
    value, others = (tuple(dict.keys(x)) if isinstance(x, dict) else x for x in (value, others))
    if isinstance(value, weakref.ref):
        referent = value()
        if id(referent) in c.world.sources:
            c.outside.passing.add(id(referent))
            c.world.ask(c.world.sources[id(referent)], IDENTITY)
    told = c.outside.told  # the keys of a table are compared with each one that comes: once they are known, at once
    for x in parts_of(value, [x for x in others if id(x) not in told]):
        stays_apart(c, x)


def stays_apart(c: Capture, value: Any) -> None:
    """The identity of a value from outside may be compared with those of others: it stays another object than they
    are, as does the object of an id. Containers are compared by their content, and references as their objects."""
    value = value() if isinstance(value, weakref.ref) else value
    kind = type(value)
    if kind is Id:
        source = c.outside.ids[value][0]
    else:
        source = c.tensors.real.get(value, NOT_REAL)[1] if kind is TensorProxy else source_of(c, value)
    if source is not None and (kind is Id or kind not in CONTAINERS):
        c.outside.compare(source)
        c.outside.told.add(id(value))


# numbers and texts: of the same value Python has one object for some, and several for others
COPIED = {int, float, complex, str, bytes, IntegerProxy, FloatProxy}


def same_number(c: Capture, a, b) -> bool:
    """Whether two numbers or texts are one object. Python keeps small integers; a number that the program computes is
    new; of those from outside the prologue asks, where code of the user's compares them."""
    symbolic = isinstance(a, NumberProxy) or isinstance(b, NumberProxy)
    function = c.stack_of_frames[-1].fn
    if a is b and (symbolic or is_library(function.__globals__.get("__name__"))):
        return True
    kinds = {getattr(x, "python_type", type(x)) for x in (a, b)}
    if len(kinds) > 1 or not (c.truth(c.compare("==", a, b)) if symbolic else same_value(a, b)):
        return False
    if kinds == {int} and -5 <= concrete(a) <= 256:
        return True
    places, others = _places(c, a), _places(c, b)
    source = next(iter(places or others), None)
    written = [k for k in function.__code__.co_consts if k is a or k is b]
    if source is not None and written:
        return c.world.ask(source, SAME, c.world.const(written[0]))
    if source is not None and places and others:
        known = a is not b and not set(places).isdisjoint(others)  # a symbolic number and its value
        return known or all([c.world.ask(source, SAME, other) for other in others if other is not source])
    for x in (a, b):
        _check_choice(c, x)
    return a is b


def _check_choice(c: Capture, x) -> None:
    if isinstance(x, NumberProxy) and x.expression.is_choice:
        c.refuse(
            "the program asks whether abs(), max() or min() returns one of its operands", "compare the numbers by =="
        )


def _places(c: Capture, x) -> list:
    """The sources of a number or a text from outside; none for one that the program computes."""
    known = c.numbers.proxies if isinstance(x, NumberProxy) else c.world.values
    return [s for s, v in known.items() if v is x and s.step not in _COMPUTED]


_COMPUTED = ("const", "len", "size", "number")
