"""Settings: functions of libraries that look at the outside world, and are given nothing of the program. The prologue
calls them again."""

from __future__ import annotations

import functools
from collections.abc import Callable

from thunder.capture.interface import Capture
from thunder.capture.policy import Ask, native_row
from thunder.interpreter.recursion import original_limit


def asked_again(c: Capture, f, args, kwargs, call: Callable):
    """The result of a call that looks at something outside of the program: the prologue makes the call again."""
    key = f, *map(type, args), *args, *kwargs.items()
    question = c.known.same_call(key, functools.partial(f, *args, **kwargs))
    return c.read(call(question), c.world.const(question, getattr(f, "__name__", "")).call("__call__"))


def _recursion_limit(c: Capture) -> int:
    """A program asks for it, or is so deep that it may meet it."""
    c.world.ask_setting(c.world.const(original_limit, "sys.getrecursionlimit").call("__call__"), c.limit)
    return c.limit


def _set_recursion_limit(c: Capture, limit: int) -> None:
    c.limit = limit


recursion_limit = property(_recursion_limit, _set_recursion_limit)


def is_question(c: Capture, f) -> bool:
    """Whether a function of a library asks for a setting, where it is given no objects: it may be asked again."""
    return type(native_row(f).answer) is Ask


ANSWERS = (bool, int, float, str)
