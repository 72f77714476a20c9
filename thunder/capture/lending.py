"""What host code does with containers that it is given: what only looks at them, and which are lent as copies."""

from __future__ import annotations

import array
import bisect
import heapq
import pickle
import random

import torch

from thunder.capture.interface import Capture
from thunder.capture.native import among
from thunder.core.host_calls import CONTAINERS, call_function, call_method, contents
from thunder.core.proxies import TensorProxy
from thunder.interpreter.attributes import plain_attribute

_CHOOSING = {f.__func__ for f in (random.choice, random.choices, random.sample)}
_READING = {
    print, format, repr, str, ascii, list, len, getattr, torch.save, pickle.dumps, bisect.bisect_left,
    bisect.bisect_right, heapq.nsmallest, heapq.nlargest, array.array, *_CHOOSING,
    torch.tensor, torch.as_tensor, torch.asarray,
}  # fmt: skip
_READING_MODULES = (
    "json", "math", "statistics", "numpy", "pprint", "textwrap", "re", "_operator", "logging", "thunder",
)  # fmt: skip


def called(function, args):
    """The function that a call runs, also where a host call gave it."""
    if function is call_method:
        return getattr(args[0].example, args[1])
    return args[0].example if function is call_function else function


def only_reads(c: Capture, function, args) -> bool:
    """Whether a function changes no container that it is given, and gives none of what is in it back."""
    return _is_reader(function) and not _gives_back(c, function, args)


def _is_reader(function) -> bool:
    if among(plain_attribute(function, "__func__", function), _READING):
        return True
    owner = plain_attribute(function, "__self__")
    module = plain_attribute(function, "__module__") or type(owner).__module__
    changes = plain_attribute(function, "__name__") == "shuffle"  # of NumPy's generators
    return not changes and module.split(".")[0] in _READING_MODULES or isinstance(owner, (str, bytes))


def _gives_back(c: Capture, function, args) -> bool:
    """Whether a function gives back an element of a container that is more than its content."""
    if plain_attribute(function, "__func__", function) not in _CHOOSING:
        return False
    containers = [a for a in args if isinstance(a, (list, tuple))]
    return any(type(x) in CONTAINERS for a in containers for x in c.materialize(a))


def lent(args: tuple, kwargs: dict, reads: bool) -> tuple[int | str, ...]:
    """The arguments, by position or keyword, that are or hold the program's containers or tensors, which the function
    may change. reads: it does not."""
    named = () if reads else (*enumerate(args), *kwargs.items())
    return tuple(
        at
        for at, a in named
        if any(x in CONTAINERS if isinstance(x, type) else type(x) is TensorProxy for x in contents(a))
    )


def without_nothing(effect: str, lent: tuple, frames: tuple) -> tuple:
    """The last arguments of a host call, as few as say them."""
    return (effect, lent, frames) if frames else (effect, lent) if lent else (effect,) if effect else ()
