"""What a Python function can reach: the objects that it may look at, without running it."""

from __future__ import annotations

import collections
import gc
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from thunder import compat
from thunder.capture.native import in_library
from thunder.distributed.boundary import held
from thunder.distributed.placement import (
    any_placed,
    communicates_by_itself,
    is_dtensor,
    placement_of,
)
from thunder.interpreter import NULL
from thunder.interpreter.attributes import type_attribute

_MOST = 300_000  # objects that are looked at
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))  # lead to nothing, and nobody writes to them


class Reach:
    """The objects that functions may look at: their arguments, the values in their closures and defaults, those that
    names in their code stand for, and all that these lead to, with the methods of their classes. Computed names
    (`getattr(module, name)`) are not followed into modules. Functions of libraries lead to no other functions.

    is_known: False where there are too many objects to look at.
    """

    def __init__(self, values: Iterable):
        self.seen: dict[int, Any] = {}
        self._names: set[tuple[int, str]] = set()  # of globals, with the id of their namespace
        self.is_known = True
        for value in walk(values):
            if len(self.seen) > _MOST:
                self.is_known = False
                return
            self.seen[id(value)] = value
            if type(value) is types.FunctionType:
                self._names.update((id(value.__globals__), name) for name in names_of(value.__code__))

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


def walk(values: Iterable, follows: Callable[[Any], bool] = lambda value: True) -> Iterator:
    """Each object that values lead to, once, the nearest first. follows: whether an object is one of them, and is
    followed."""
    pending, seen = collections.deque(values), dict[int, Any]()
    while pending:
        value = pending.popleft()
        if type(value) not in _ATOMS and id(value) not in seen and follows(value):
            seen[id(value)] = value
            yield value
            pending += _behind(value)


def reaches_placed(values: Iterable) -> bool:
    """Whether functions can reach parameters that ranks hold together."""
    return any_placed() and any(isinstance(x, torch.Tensor) and placement_of(x) is not None for x in _near(values))


def reaches_parts(values: Iterable) -> bool:
    """Whether functions can reach parameters of which a rank holds a part, DTensors, or modules for which PyTorch
    communicates."""
    return (any_placed() or compat.distributed_is_used()) and any(map(_is_part, _near(values)))


def _is_part(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_dtensor(value) or (placement := placement_of(value)) is not None and not placement.is_whole
    return isinstance(value, torch.nn.Module) and communicates_by_itself(value)


def _near(values: Iterable) -> Iterator:
    """The objects that values lead to, up to a number. Compiled modules, which communicate by themselves, are not among
    them, nor are functions and classes of PyTorch, thunder and the standard library, which hold no parameters of
    users."""

    def follows(value: Any) -> bool:
        if isinstance(value, (type, types.FunctionType)):
            return not in_library(value.__module__)
        return type_attribute(type(value), "_lc_cd") is NULL

    return itertools.islice(walk(values, follows), _MOST)


def _memory(tensor: torch.Tensor) -> int:
    tensor = held(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _behind(value: Any) -> Iterable:
    """The objects that a value leads to by itself. Classes of libraries lead to nothing, and their functions to no
    other functions and classes: these hold nothing of users, and hundreds of thousands of objects are behind PyTorch's.
    """
    kind = type(value)
    if kind is types.FunctionType:
        held_by_itself = (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        named = _named(value.__code__, value.__globals__)
        return *held_by_itself, *(filter(_is_instance, named) if in_library(value.__module__) else named)
    if kind is types.ModuleType or kind is types.FrameType or kind is types.CodeType:
        return ()
    if isinstance(value, type):
        return () if in_library(value.__module__) else (*vars(value).values(), *value.__bases__)
    return gc.get_referents(value)


def _is_instance(value: Any) -> bool:
    return not isinstance(value, (type, types.FunctionType, types.ModuleType))


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
