"""Attributes that a `__getattribute__` in Python answers, as those of transformers' configurations.

It is interpreted once for an object from outside and a name, where it does nothing but look: then it gives the same as
long as the program writes nothing to the outside. Its questions stay asked.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

from thunder.capture.callbacks import only_looks
from thunder.capture.containers import is_changed
from thunder.capture.native import MUTABLE
from thunder.capture.policy import is_library
from thunder.interpreter import attributes

_LOOKING = {id(f) for f in (super, hasattr, getattr, isinstance)}


@dataclass(slots=True)
class Reading:
    """A call of a `__getattribute__` that runs. looked_at: containers from outside."""

    only_looks: bool = True
    looked_at: list[Any] = field(default_factory=list)

    def look_at(self, c, value) -> None:
        if isinstance(value, MUTABLE):
            known = id(value) in c.containers.looks
            self.only_looks &= known or id(value) in c.containers.attribute_dicts
            self.looked_at += [value] if known else []

    def call(self, c, f) -> None:
        kind = type(f)
        if kind is types.FunctionType:
            library = is_library(f.__globals__.get("__name__"))
            self.only_looks &= not library and only_looks(f)
        elif kind is types.BuiltinFunctionType and f.__name__ == "get":
            self.look_at(c, f.__self__)
        elif kind is not types.MethodType and id(f) not in _LOOKING:
            self.only_looks &= getattr(f, "__name__", "") == "__getattribute__"


def load_attr(c, o, n):
    """`o.n`, of a class with a `__getattribute__` in Python."""
    known, outer = c.known.answers.get((id(o), n)), c.reading
    if known is None or c.effects or any(is_changed(c, s) for s in known[1]):
        c.reading = Reading()
        try:
            value, reading = attributes.load_attr(c, o, n), c.reading
        finally:
            if outer is not None:
                outer.only_looks &= c.reading.only_looks
                outer.looked_at += c.reading.looked_at
            c.reading = outer
        if reading.only_looks and id(o) in c.world.sources and not c.effects:
            c.known.answers[id(o), n] = value, reading.looked_at
        return value
    if outer is not None:
        outer.looked_at += known[1]
    return known[0]
