"""Objects of native code from outside: those whose state a program may look at, since it never changes or is asked."""

from __future__ import annotations

from thunder.capture.interface import Capture
from thunder.capture.policy import is_watched
from thunder.interpreter import NULL
from thunder.interpreter.attributes import type_attribute


def check_watched(c: Capture, o, name: str, called: str) -> None:
    """Native code is about to look at an object, by a special method or method of this name. Refuse one from outside
    whose state is not watched. called: the method in words."""
    if (id(o) in c.world.sources or id(o) in c.world.origins) and not _is_watched(o, name):
        c.refuse(
            f"{called} reads or changes an object from outside whose state thunder cannot compare",
            "call it outside of the compiled function",
        )


def _is_watched(o, name: str) -> bool:
    """Whether a method of an object from outside is known to leave it as it is, or is asked or warned about."""
    if is_watched(o):
        return True
    attribute = type_attribute(type(o), name)
    if attribute is NULL or getattr(attribute, "__objclass__", object) is not object:
        return False
    return name not in _CALLED_BY_OBJECT or _is_watched(o, _CALLED_BY_OBJECT[name])


# methods of `object` -> the method that they call
_CALLED_BY_OBJECT = {
    "__str__": "__repr__", "__format__": "__str__", "__ne__": "__eq__", "__reduce_ex__": "__reduce__",
}  # fmt: skip
