"""`import thunder.torch as ltorch`: the operations with PyTorch's semantics, by name."""

from __future__ import annotations

import functools
import pkgutil
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from thunder.compat.names import AUTOCAST_MODE
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


# names of Lightning Thunder that PyTorch spells otherwise
_OTHER_NAMES: dict[str, Callable] = {
    "torch_type": torch.Tensor.type, "setitem_": torch.Tensor.__setitem__, "zeta": torch.special.zeta,
    "all_tensor": torch.all, "any_tensor": torch.any, "torch_max": torch.max, "_softmin": torch.nn.functional.softmin,
    "checkpoint": torch.utils.checkpoint.checkpoint,
}  # fmt: skip
# those that programs call as PyTorch's functions: they communicate in place, set a mode, or take functions
_FUNCTIONS = {
    "all_reduce_": "torch.distributed.all_reduce", "all_gather_": "torch.distributed.all_gather_into_tensor",
    "reduce_scatter_": "torch.distributed.reduce_scatter_tensor",
    "_set_grad_enabled_with_warning": "torch.set_grad_enabled",
    "autocast_enter": f"{AUTOCAST_MODE}._enter_autocast",
    "autocast_exit": f"{AUTOCAST_MODE}._exit_autocast",
    "autograd_function_apply": "torch.ops.higher_order.autograd_function_apply",
}  # fmt: skip


@functools.cache
def _of_torch(name: str) -> Callable | None:
    """PyTorch's function or method of that name (`softsign`, `add_`, `numel`), which is recorded where a program is."""
    if isinstance(getattr(torch.Tensor, name, None), types.GetSetDescriptorType):  # is_cuda
        return lambda a: getattr(a, name)
    if name in _FUNCTIONS:
        return pkgutil.resolve_name(_FUNCTIONS[name])
    spaces = (torch.nn.functional, torch, torch.Tensor)
    functions = (f for space in spaces if callable(f := getattr(space, name, None)) and not isinstance(f, type))
    function: Any = _OTHER_NAMES.get(name) or next(functions, None)
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
