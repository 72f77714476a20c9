"""Settings: functions of libraries that look at the outside world, and are given nothing of the program. The prologue
calls them again."""

from __future__ import annotations

import csv
import decimal
import functools
import locale
from collections.abc import Callable

import numpy

from thunder.capture.ask import SUBCLASSES
from thunder.capture.policy import Ask, native_row
from thunder.interpreter.attributes import plain_attribute
from thunder.interpreter.recursion import original_limit


def asked_again(c, f, args, kwargs, call: Callable):
    """The result of a call that looks at something outside of the program: the prologue makes the call again."""
    key = f, *map(type, args), *args, *kwargs.items()
    asked = c.known.cached_calls.setdefault(key, functools.partial(f, *args, **kwargs))
    return c.read(call(asked), c.const(asked, getattr(f, "__name__", "")).call("__call__"))


def subclasses(c, f, args, kwargs):
    """`kind.__subclasses__()`: a class is told of those that others make."""
    kind = plain_attribute(f, "__self__", *args)
    if not isinstance(kind, type):
        return f(*args, **kwargs)  # raises
    return [found() for found in c.ask(c.const(kind), SUBCLASSES)]


def _recursion_limit(c) -> int:
    """A program asks for it, or is so deep that it may meet it."""
    c.setting(c.const(original_limit, "sys.getrecursionlimit").call("__call__"), c.limit)
    return c.limit


def _set_recursion_limit(c, limit: int) -> None:
    c.limit = limit


recursion_limit = property(_recursion_limit, _set_recursion_limit)


def is_question(c, f) -> bool:
    """Whether a function of a library asks for a setting, where it is given no objects: it may be asked again."""
    return type(native_row(f).answer) is Ask


ANSWERS = (bool, int, float, str)


# ---------------------------------------------------------------- what a library's native code looks at besides


def _decimal() -> tuple:
    contexts = decimal.getcontext(), decimal.DefaultContext
    return tuple((c.prec, c.rounding, c.Emin, c.Emax, c.capitals, c.clamp, str(c.traps)) for c in contexts)


def _dialects() -> tuple:
    known = ((name, csv.get_dialect(name)) for name in csv.list_dialects())
    return csv.field_size_limit(), tuple((n, *(getattr(d, x) for x in _OF_DIALECTS)) for n, d in known)


def _printing() -> str:
    return str(numpy.get_printoptions())


_OF_DIALECTS = (
    "delimiter", "doublequote", "escapechar", "lineterminator", "quotechar", "quoting", "skipinitialspace", "strict",
)  # fmt: skip
_STATES: dict[str | None, Callable] = {  # by the module of functions and classes in C
    "decimal": _decimal,
    "_csv": _dialects,
    "_locale": functools.partial(locale.setlocale, locale.LC_ALL),
    "texts of numpy": _printing,
}


def look_beside(c, module: str | None) -> None:
    """Native code of a library runs, or an object of it comes in: the program depends on what it looks at besides."""
    if (state := _STATES.get(module)) is None:
        return
    source = c.const(state, f"{module}.settings").call("__call__")
    if source not in c.settings:
        c.setting(source, state())
