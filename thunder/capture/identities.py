"""Identity: `is`, `id()` and hash tables over objects from outside."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from typing import Any

from thunder.capture.ask import IDENTITY, SAME
from thunder.core.proxies import TensorProxy, concrete


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
    for k, (first, other) in c.outside.ids.items():
        if other is real and first is not source:
            c.ask(source, SAME, first)
            return k
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
    """A hash table or a list compares a value with others: one from outside stays another object than they are."""
    if isinstance(value, weakref.ref):
        found = value()
        if id(found) in c.sources:
            c.outside.passing.add(id(found))
            c.ask(c.sources[id(found)], IDENTITY)
    if id(value) not in c.sources and type(value) is not Id:
        return
    base: Any = next((b for b in (dict, set, frozenset, list, tuple, deque) if isinstance(others, b)), None)
    for x in others if base is None else list(base.__iter__(others)):
        if type(value) is not Id and x is not value:
            c.same(value, x)
        elif type(value) is Id and type(x) is Id and x != value:
            c.ask(c.outside.ids[value][0], SAME, c.outside.ids[x][0])
