"""`import thunder.torch as ltorch`: the operations with PyTorch's semantics, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.proxies import METHODS, proxies_in
from thunder.ops import LTORCH
from thunder.ops.methods import call_torch
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

__all__ = ["to_torch_dtype", "to_torch_device", *LTORCH]


def _register_custom_op(custom_op):
    """The operation for a result of torch.library.custom_op. Calling the operator needs no registration."""
    from thunder.ops.opaque import symbol_for

    return symbol_for(custom_op._opoverload)


def __getattr__(name: str):
    operation = LTORCH.get(name) or _of_torch(name)
    if operation is None:
        raise AttributeError(f"thunder.torch has no operation {name!r}")
    return operation


@functools.cache
def _of_torch(name: str) -> Callable | None:
    """PyTorch's function or method of that name (`softsign`, `add_`, `numel`), which is recorded where a program is."""
    spaces = (torch.nn.functional, torch, torch.Tensor)
    found = (f for space in spaces if callable(f := getattr(space, name, None)) and not isinstance(f, type))
    function: Any = next(found, None)
    if name.startswith("__") or function is None:
        return None
    recorded = METHODS.get(name)

    def call(*args, **kwargs):
        if not proxies_in((args, kwargs), []):
            return function(*args, **kwargs)
        return call_torch(function, args, kwargs) if recorded is None else recorded(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def __dir__():
    return __all__
