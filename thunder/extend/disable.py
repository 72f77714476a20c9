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
    """Excludes a function from compilation: compiled programs call it in eager PyTorch, on real values, in program
    order.

    Can be used as a decorator:

        @thunder.disable
        def log_metrics(loss):
            writer.add_scalar("loss", loss.item())

    Each call is one bound symbol, an *eager call*, and the operations around it are still fused. Gradients flow through
    the call, also to parameters that the function reads from its closure or globals. `torch.compiler.disable` has the
    same effect.

    Raises:
        OptionError: If the argument is not a function.
        CaptureError: When a program would have to call the function inside a function transform or a checkpoint, or
            when the function may read what the program has written.
    """
    if not callable(function):
        raise OptionError(f"thunder.disable takes a function, not {function!r}")
    return Disabled(function)
