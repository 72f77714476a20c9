"""Tags of operations, and where the functions that declare operations come from."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any


class OpTags(enum.Enum):
    """Properties of an operation that passes ask for, beyond its rules."""

    __hash__ = object.__hash__  # every pass looks for some of them in every operation: Enum's is written in Python

    SHAPE_OP = enum.auto()  # moves or views data, computes nothing
    REDUCTION_OP = enum.auto()
    RANDOM_OP = enum.auto()  # draws from a generator: never merged, never repeated
    MATMUL_OP = enum.auto()
    DEVICE_SYNC_OP = enum.auto()  # waits for the device
    DONT_DCE = enum.auto()  # has an effect beyond its outputs
    IN_PLACE = enum.auto()
    DETACHED = enum.auto()  # its results never require grad, whatever its arguments do
    VIEW = enum.auto()  # an output may share memory with the first tensor argument
    DECISION = enum.auto()  # the program may leave for another path here
    OPAQUE = enum.auto()  # typed by running PyTorch on fake tensors, executed by calling PyTorch
    AUTO_REGISTERED = OPAQUE


# operations that may have effects beyond their results
EFFECTS = frozenset((OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.OPAQUE))


_INSIDE = ("thunder", "torch", "builtins", "math", "operator", "_operator", "functools")


def is_outside(declaration: Any) -> bool:
    """Whether a function, or a class, is neither thunder's nor PyTorch's."""
    return (
        declaration is not None and (getattr(declaration, "__module__", None) or "torch").split(".")[0] not in _INSIDE
    )


# the functions that symbols were made with, or that `carries_out` marks: programs on disk may name them
CARRIED_OUT: set[Callable] = set()


def carries_out(function: Callable) -> Callable:
    """Marks a function that carries out an operation, and that no symbol has before a program is lowered."""
    CARRIED_OUT.add(function)
    return function
