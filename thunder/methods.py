"""Methods: a compiled function in a class's body, bound to an instance, and the methods of compiled modules."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from thunder.capture.handlers import MODULE_CALLS
from thunder.core.pytree import tree_iter
from thunder.core.symbol import current_recorder
from thunder.options import FALLBACK_OPTIONS, JitOptions


class CompiledMethod:
    """A compiled function of a class's body, bound to an instance. Its attributes are the compiled function's."""

    def __init__(self, function: Any, instance: Any):
        self.__func__, self.__self__, self.__doc__ = function, instance, function.__doc__

    _lc_cd = property(lambda self: self.__func__)
    _lc_original = property(lambda self: types.MethodType(self.__func__.fn, self.__self__))
    __wrapped__ = _lc_original

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound method of {self.__self__!r}: {self.__func__!r}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is CompiledMethod and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __deepcopy__(self, memo):
        return CompiledMethod(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self):
        return getattr, (self.__self__, self.__func__.__name__)

    def lower(self, *args, **kwargs) -> Any:
        """The program that a call with these arguments would run, compiled where there is none. Nothing runs."""
        return self.__func__.lower(self.__self__, *args, **kwargs)


# ---------------------------------------------------------------- methods of compiled modules

_CALLS_IN_METHODS = 8  # of one module: a method that calls it in a longer loop runs as it is


def seen_by_methods(kind: type[torch.nn.Module], method: Callable) -> type[torch.nn.Module]:
    """The class of what methods of a wrapped module are given as `self`: the wrapped module with its own `__dict__`,
    whose calls run compiled programs. kind: the class of the wrapped module. method: says what stands for a function of
    that class."""

    def new(cls, *args, **kwargs):
        return kind(*args, **kwargs)

    def call(self, *args, **kwargs):
        return self._thunder_module(*args, **kwargs)

    def replace(self, forward):
        self._thunder_module._model.forward = forward

    members = {
        **{name: method(function) for name, function in _functions(kind).items()},
        "__slots__": ("_thunder_module",), "__module__": kind.__module__, "__qualname__": kind.__qualname__,
        "__new__": new, "__call__": call, "__class__": property(lambda self: kind),
        "__reduce_ex__": lambda self, protocol: self._thunder_module._model.__reduce_ex__(protocol),
        "forward": property(lambda self: self._thunder_module.forward, replace),
        **{name: _of_compiled(name) for name in ("state_dict", "load_state_dict", "named_parameters", "named_buffers")},
    }  # fmt: skip
    metaclass: Any = type(kind)
    return metaclass(kind.__name__, (kind,), members)


def _functions(kind: type) -> dict[str, types.FunctionType]:
    """The functions that the user wrote in the body of a class and its bases, but for special methods."""
    own = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    values = {name: value for base in reversed(own) for name, value in vars(base).items() if not name.startswith("__")}
    return {name: value for name, value in values.items() if type(value) is types.FunctionType}


def _of_compiled(name: str):
    """A method that asks the compiled module, which knows the tensors that transforms have put in the place of
    parameters."""
    return lambda self, *args, **kwargs: getattr(self._thunder_module, name)(*args, **kwargs)


def names_one_of(function: Any, names: Collection[str]) -> bool:
    """Whether the code of a Python function, below its decorators, names an attribute that is one of `names`."""
    if type(function) is not types.FunctionType:
        return False
    inside = inspect.unwrap(function)
    return type(inside) is types.FunctionType and not _names(inside.__code__).isdisjoint(names)


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inside)


def for_methods(options: JitOptions) -> JitOptions:
    """The options of programs for methods: one that loops over calls of a module would be one long program, and runs as
    it is, whatever they say."""
    limits = {MODULE_CALLS.name: _CALLS_IN_METHODS} | options.compile_options
    return dataclasses.replace(options, fallback=FALLBACK_OPTIONS.EAGER, compile_options=limits)


def method_with_programs(function: types.FunctionType, compiled: Any) -> Any:
    """The function of a method. Calls with tensors run programs of `compiled`; others, which set a model up, do not."""

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_iter((args, kwargs)))
        if not has_tensors or current_recorder() is not None:
            return function(self, *args, **kwargs)
        return compiled(*args, **kwargs)

    method._compiled = compiled  # type: ignore[attr-defined]
    return method
