"""What a Python function can reach: the objects that it may look at, without running it."""

from __future__ import annotations

import collections
import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder import compat
from thunder.distributed.boundary import held
from thunder.distributed.placement import (
    Placement,
    any_placed,
    communicates_by_itself,
    is_dtensor,
    placement_of,
)
from thunder.interpreter import NULL
from thunder.interpreter.attributes import type_attribute

_MOST = 300_000  # objects that are looked at


class Reach:
    """The objects that functions may look at: their arguments, the values in their closures and defaults, those that
    names in their code stand for, and all that these lead to, with the methods of their classes. Computed names
    (`getattr(module, name)`) are not followed into modules.

    follows: whether a value is followed. is_known: False where there are too many objects to look at.
    """

    def __init__(self, values: Iterable, follows: Callable[[Any], bool] = lambda value: True):
        self.seen: dict[int, Any] = {}
        self._names: set[tuple[int, str]] = set()  # of globals, with the id of their namespace
        self.is_known = True
        pending = collections.deque(values)  # what is near comes first
        while pending:
            value = pending.popleft()
            if id(value) in self.seen or value is None or not follows(value):
                continue
            if len(self.seen) > _MOST:
                self.is_known = False
                return
            self.seen[id(value)] = value
            if type(value) is types.FunctionType:
                self._names.update((id(value.__globals__), name) for name in names_of(value.__code__))
            pending += _behind(value)

    def reaches(self, value: Any) -> bool:
        return not self.is_known or id(value) in self.seen

    def reads_global(self, space: dict, name: str) -> bool:
        return not self.is_known or (id(space), name) in self._names

    def reaches_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the same memory is reached."""
        if self.reaches(tensor):
            return True
        with compat.DisableTorchFunction():
            memory = _memory(tensor)
            tensors = (x for x in self.seen.values() if isinstance(x, torch.Tensor))
            return any(_memory(x) == memory for x in tensors)


def reached_placements(values: Iterable) -> list[Placement]:
    """How the ranks hold the parameters that functions can reach. Compiled modules, which communicate by themselves,
    are not followed."""
    if not any_placed():
        return []
    tensors = (x for x in _reached(values) if isinstance(x, torch.Tensor))
    return [placement for x in tensors if (placement := placement_of(x)) is not None]


def reaches_wrappers(values: Iterable) -> bool:
    """Whether functions can reach DTensors, or modules for which PyTorch communicates."""
    return compat.distributed_is_used() and any(
        isinstance(x, torch.Tensor) and is_dtensor(x) or isinstance(x, torch.nn.Module) and communicates_by_itself(x)
        for x in _reached(values)
    )


def _reached(values: Iterable) -> Iterable:
    return Reach(values, follows=lambda value: type_attribute(type(value), "_lc_cd") is NULL).seen.values()


def _memory(tensor: torch.Tensor) -> int:
    tensor = held(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _behind(value: Any) -> Iterable:
    """The objects that a value leads to by itself."""
    kind = type(value)
    if kind is types.FunctionType:
        cells = (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        return *cells, *_named(value.__code__, value.__globals__)
    if kind is types.ModuleType or kind is types.FrameType or kind is types.CodeType:
        return ()
    if isinstance(value, type):
        return () if value.__module__ in sys.builtin_module_names else (*vars(value).values(), *value.__bases__)
    return gc.get_referents(value)


def _named(code: types.CodeType, space: dict) -> list:
    """The values that the names in a function's code stand for: globals, attributes of the modules among these."""
    names = names_of(code)
    values = [space[name] for name in names if name in space]
    for module in [x for x in values if type(x) is types.ModuleType]:
        values += [vars(module)[name] for name in names if name in vars(module)]
    return values


def names_of(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function's code, and in that of functions inside of it."""
    inside = (constant for constant in code.co_consts if type(constant) is types.CodeType)
    return {*code.co_names, *(name for constant in inside for name in names_of(constant))}
