"""Attributes that a `__getattribute__` in Python answers, as those of transformers' configurations.

It is interpreted once for an object from outside and a name, where it does nothing but look: then it gives the same as
long as the program writes nothing to the outside. Its questions stay asked.
"""

from __future__ import annotations

import types
from typing import Any

from thunder.capture.callbacks import only_looks
from thunder.capture.containers import is_changed
from thunder.capture.interface import Capture
from thunder.capture.native import MUTABLE
from thunder.capture.policy import is_library
from thunder.interpreter import attributes

_LOOKING = {id(f) for f in (super, hasattr, getattr, isinstance)}


def look_at(c: Capture, value: Any) -> None:
    """The program looks at a value, maybe while such a method runs."""
    reading = c.dispatch.reading
    if reading is not None and isinstance(value, MUTABLE):
        known = id(value) in c.containers.looks
        reading.note(known or id(value) in c.containers.attribute_dicts, [value] if known else [])


def note_call(c: Capture, f: Any) -> None:
    """Such a method calls a function."""
    reading, kind = c.dispatch.reading, type(f)
    if reading is None:
        return
    if kind is types.FunctionType:
        library = is_library(f.__globals__.get("__name__"))
        reading.note(not library and only_looks(f), [])
    elif kind is types.BuiltinFunctionType and f.__name__ == "get":
        look_at(c, f.__self__)
    elif kind is not types.MethodType and id(f) not in _LOOKING:
        reading.note(getattr(f, "__name__", "") == "__getattribute__", [])


def load_attr(c: Capture, o, n):
    """`o.n`, of a class with a `__getattribute__` in Python."""
    known = c.known.answers.get((id(o), n))
    if known is not None and not c.effects and not any(is_changed(c, s) for s in known[1]):
        if c.dispatch.reading is not None:
            c.dispatch.reading.note(True, known[1])
        return known[0]
    with c.dispatch.read() as reading:
        value = attributes.load_attr(c, o, n)
    if reading.only_looks and id(o) in c.world.sources and not c.effects:
        c.known.answers[id(o), n] = value, reading.looked_at
    return value
