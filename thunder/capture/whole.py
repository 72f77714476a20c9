"""Functions of the standard library that run as one host call each.

    subprocess.run(["true"])  # is host_call(0, run, (['true'],), {}, 'CompletedProcess', 0)

A function that is written in Python is read like the user's, until it does something outside of the process's memory
or meets what cannot be captured. Then it is known from now on, with the class of the object that it is a method of: the
program is captured again, and its calls run as they stand, where what they are given may be given to host code: no
tensors, and nothing that the program may have written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.capture import host_lines, native
from thunder.core.proxies import TensorProxy, proxies_in
from thunder.errors import CaptureError
from thunder.interpreter import NULL


class Entered:
    """A function of the library that the user's code has called, and that is being read."""

    __slots__ = ("code", "owner", "calls")

    def __init__(self, c, f: Callable, args: list):
        self.code, self.owner = f.__code__, type(args[0]) if args else None
        self.calls = c.path.host_calls, c.path.own_calls

    def learn(self, c) -> bool:
        """Whether the program is to be captured again, in which this function runs as a whole: it was not known, and
        nothing in it has run that would run again."""
        if c.path.log.effects and self.calls != (c.path.host_calls, c.path.own_calls):
            return False
        made_here = self.code.co_name == "__init__"
        learned = self.owner is not None and native.learn_class(c, self.owner, made_here)
        if not learned and self.code in native.KNOWN:
            return False
        native.KNOWN.add(self.code)
        c.path.needs_whole = True
        return True


def entered(c, f: Callable, args, kwargs, enter: Callable, of_library: bool):
    """A call between the user's code and the library's. of_library: whether the library's is called."""
    if of_library and (found := called(c, f, f.__code__, args, kwargs)) is not NULL:
        return found
    outer, c.library = c.library, Entered(c, f, args) if of_library else None
    try:
        return enter(f, args, kwargs)
    except CaptureError:
        if c.library is not None:
            c.library.learn(c)
        raise
    finally:
        c.library = outer


def called(c, f: Callable, known: Any, args, kwargs):
    """A call of a function that runs as a whole; NULL where it is read. known: its code, or the class itself."""
    if known not in native.KNOWN or any(type(p) is TensorProxy for p in proxies_in((args, kwargs), [])):
        return NULL
    try:
        for value in (*args, *kwargs.values()):
            host_lines.given(c, value, False)
    except CaptureError:
        return NULL
    return host_lines.run(c, f, args, kwargs, effect="outside")
