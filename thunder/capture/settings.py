"""Settings: functions of libraries that look at the outside world, and are given nothing of the program. The prologue
calls them again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch

from thunder.capture.ask import ELEMENTS
from thunder.interpreter.attributes import plain_attribute


def asked_again(c, f, args, kwargs, call: Callable):
    """The result of a call that looks at something outside of the program: the prologue makes the call again."""
    key = f, *map(type, args), *args, *kwargs.items()
    asked = c.known.cached_calls.setdefault(key, functools.partial(f, *args, **kwargs))
    return c.read(call(asked), c.const(asked, getattr(f, "__name__", "")).call("__call__"))


def subclasses(c, f, args, kwargs):
    """`kind.__subclasses__()`: a class is told of those that others make."""
    kind = plain_attribute(f, "__self__", *args)
    return list(c.ask(c.const(kind).call("__subclasses__"), ELEMENTS)) if isinstance(kind, type) else f(*args, **kwargs)


def is_question(c, f) -> bool:
    """Whether a function of a library asks for a setting, where it is given no objects: it may be asked again. In an
    event loop of the program it may ask for what the program has made."""
    owner = f.__self__ if type(f) is types.BuiltinFunctionType else None
    if c.loop is not None or c.threads or type(f) not in _FUNCTIONS or type(owner) not in _MODULES:
        return False
    if (f.__module__ or "").startswith("thunder."):
        return False
    asks = f.__name__.lstrip("_").startswith(_ASKING) or f.__name__.endswith("_enabled")
    return asks and f not in _OF_MODES


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MODULES = (types.ModuleType, types.NoneType)  # of functions in C
_ASKING = ("get", "is_", "are_", "has_", "current_", "active_")


ANSWERS = (bool, int, float, str)
# looked at for every call, or a device's
_OF_MODES = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled,
    torch.cuda.is_current_stream_capturing,
)  # fmt: skip
