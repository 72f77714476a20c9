"""Functions of the standard library that run as one host call each.

    subprocess.run(["true"])  # is host_call(0, run, (['true'],), {}, 'CompletedProcess', 0)

A function that is written in Python is read like the user's, until it calls the host or meets what cannot be captured.
Then the program is captured again, and calls of it, or of the class of the object that it is a method of, run as they
stand, where what they are given may be given to host code: no tensors, and nothing that the program may have written
to. That a function calls the host holds for all programs, that it cannot be captured for this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.capture import host_lines, native
from thunder.core.proxies import TensorProxy
from thunder.errors import CaptureError
from thunder.interpreter import NULL
from thunder.interpreter.attributes import parts_of


class Entered:
    """A function of the library that the user's code has called, and that is being read."""

    __slots__ = ("code", "owner", "given", "calls")

    def __init__(self, c, f: Callable, args, kwargs):
        self.code, self.owner = f.__code__, type(args[0]) if args else None
        self.given = (*args, *kwargs.values())
        self.calls = c.path.host_calls, c.path.own_calls

    def learn(self, c, known: set) -> bool:
        """Whether the program is to be captured again, in which this function runs as a whole: it can, it was not
        known, and nothing in it has run that would run again. known: is told, and has what else does."""
        if c.path.log.effects and self.calls != (c.path.host_calls, c.path.own_calls):
            return False
        made_here = self.code.co_name == "__init__"
        if self.owner is not None and native.learn_class(c, self.owner, known, made_here):
            return True
        if native.is_known(c, self.code) or not may_be_given(c, self.given):
            return False
        known.add(self.code)
        c.path.needs_whole = True
        return True


def entered(c, f: Callable, args, kwargs, enter: Callable, of_library: bool):
    """A call between the user's code and the library's. of_library: whether the library's is called."""
    if of_library and (found := called(c, f, f.__code__, args, kwargs)) is not NULL:
        return found
    outer, c.library = c.library, Entered(c, f, args, kwargs) if of_library else None
    try:
        return enter(f, args, kwargs)
    except CaptureError:
        if c.library is not None:
            c.library.learn(c, c.whole)
        raise
    finally:
        c.library = outer


def called(c, f: Callable, known: Any, args, kwargs):
    """A call of a function that runs as a whole; NULL where it is read. known: its code, or the class itself."""
    if not native.is_known(c, known) or not may_be_given(c, (*args, *kwargs.values())):
        return NULL
    return host_lines.run(c, f, args, kwargs, effect="outside")


def may_be_given(c, values: tuple) -> bool:
    """Whether host code may be given all of these: no tensors, whose gradients and sizes it would not see."""
    if any(type(p) is TensorProxy for p in parts_of(values)):
        return False
    lent = len(c.path.lent)
    try:
        for value in values:
            host_lines.given(c, value, False)
    except CaptureError:
        return False
    finally:
        del c.path.lent[lent:]  # nothing is given yet
    return True
