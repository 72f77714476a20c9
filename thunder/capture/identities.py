"""Identity: `is`, `id()` and hash tables over objects from outside."""

from __future__ import annotations

import operator
import weakref

from thunder.capture.ask import IDENTITY, SAME
from thunder.capture.native import CONTAINERS
from thunder.core.proxies import TensorProxy, concrete
from thunder.interpreter.attributes import parts_of
from thunder.interpreter.instructions import PLAIN


class Id(int):
    """The id of an object from outside."""


def id_of(c, f, args, kwargs):
    """Handler of id(): an object from outside has an id of its own, until that meets ids from outside (`real_id`)."""
    o = concrete(args[0])
    look = c.containers.looks.get(id(o))
    known = look.original if look is not None else o
    real, source = c.tensors.real.get(o, (None, None)) if type(o) is TensorProxy else (known, c.sources.get(id(o)))
    if source is None:
        return id(o)
    k = Id(id(o))
    c.outside.ids[k] = source, real
    return k


def real_id(c, k):
    """A number that meets ids from outside: the program depends on the identity of an object whose id it is."""
    if type(k) is not Id:
        return k
    c.outside.met.add(int(k))
    source, real = c.outside.ids[k]
    if type(real).__weakrefoffset__:
        c.outside.passing.add(id(real))
    if source.step != "const":
        c.ask(source, IDENTITY)
    return id(real)


def hashable(c, value):
    """The argument of hash(): the program depends on the identity of an object that is hashed by it."""
    if type(value) in (tuple, frozenset):
        parts = [hashable(c, x) for x in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if type(value) is TensorProxy:
        return real_id(c, id_of(c, id, [value], {}))
    if id(value) in c.sources and c.lookup(type(value), "__hash__") is object.__hash__:
        real_id(c, id_of(c, id, [value], {}))
    return value


def told_apart(c, value, others) -> None:
    """A hash table or a list compares a value with others, a dict with its keys: those from outside stay other objects
    than they are. Numbers and text are compared by what they are."""
    if type(value) in PLAIN:
        return
    value, others = (tuple(dict.keys(x)) if isinstance(x, dict) else x for x in (value, others))
    if isinstance(value, weakref.ref):
        found = value()
        if id(found) in c.sources:
            c.outside.passing.add(id(found))
            c.ask(c.sources[id(found)], IDENTITY)
    if type(value) is Id:
        for x in parts_of(others):
            if type(x) is Id and x != value:
                c.ask(c.outside.ids[value][0], SAME, c.outside.ids[x][0])
    for x in parts_of(value, others):
        stays_apart(c, x)


def stays_apart(c, value) -> None:
    """The identity of a value from outside may be compared with those of others: it stays another object than they
    are. Containers are compared by their content, and references as their objects."""
    value = value() if isinstance(value, weakref.ref) else value
    kind = type(value)
    source = c.tensors.real.get(value, _NO_SOURCE)[1] if kind is TensorProxy else c.sources.get(id(value))
    if source is not None and kind not in CONTAINERS:
        c.outside.apart[source] = None


_NO_SOURCE = None, None
