"""`thunder.disable`: a Python function that compiled programs call as it is."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, final

from thunder.errors import OptionError


@final
class Disabled:
    """A function behind `thunder.disable`. Called by itself it is the function."""

    def __init__(self, function: Callable):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __get__(self, instance, owner=None):
        """One in a class body is a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<thunder.disable of {getattr(self.function, '__qualname__', self.function)}>"


def disable(function: Callable) -> Any:
    """Keeps thunder from looking into a function: compiled programs call it as it is, on real values, in program order.
    Usable as a decorator.

        @thunder.disable
        def log_metrics(loss):
            writer.add_scalar("loss", loss.item())

    A call is one bound symbol, an *eager call*, and operations around it stay fused. Gradients pass through it, also to
    parameters that the function reads by itself. `torch.compiler.disable` has the same meaning.

    Raises OptionError for what is no function. A call raises CaptureError where no program can make it: inside of a
    transform of functions or of a checkpoint, and where the function may look at what the program has written to.
    """
    if not callable(function):
        raise OptionError(f"thunder.disable takes a function, not {function!r}")
    return Disabled(function)
