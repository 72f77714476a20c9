"""Errors of meta rules, put in PyTorch's own words.

When a meta rule refuses its arguments, the PyTorch function is run on tensors of the same shapes and types; what it
raises is what the user of PyTorch expects to read. Where it does not raise, the meta rule's own error stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import AnyProxy, NumberProxy, TensorProxy, concrete, map_structure, number_value
from thunder.errors import ThunderError
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

_FEW = 1 << 22  # elements up to which a fake is a dense tensor; beyond it is one element, expanded


def fake(x) -> Any:
    """A tensor of zeros with a proxy's metadata, on the CPU; other values as torch takes them."""
    if isinstance(x, TensorProxy):
        shape = tuple(number_value(n) for n in x.shape)
        dtype = to_torch_dtype(x.dtype)
        count = 1
        for n in shape:
            count *= n
        return (
            torch.zeros(shape, dtype=dtype, device="cpu")
            if count <= _FEW
            else torch.zeros((), dtype=dtype, device="cpu").expand(shape)
        )
    return number_value(x) if isinstance(x, NumberProxy) else as_torch(x)


def example(x, make: Callable = torch.empty, **options):
    """What PyTorch is called with in the place of a value of a trace, to see what it gives: a tensor that `make` makes
    with a proxy's shape, type and device.

    The value of a symbolic number becomes a guard.
    """
    if isinstance(x, TensorProxy):
        return make(
            tuple(map(concrete, x.shape)), dtype=to_torch_dtype(x.dtype), device=to_torch_device(x.device), **options
        )
    return x.example if isinstance(x, AnyProxy) else as_torch(concrete(x))


def as_torch(x):
    """thunder's dtypes and devices as torch's; everything else as it is."""
    if type(x).__module__.startswith("thunder.core"):
        return (
            to_torch_dtype(x)
            if type(x).__name__ == "dtype"
            else to_torch_device(x)
            if type(x).__name__ == "Device"
            else x
        )
    return x


def as_pytorch(symbol, args: tuple, kwargs: dict, error: Exception) -> Exception | None:
    """The error PyTorch raises for these arguments, or None where it raises none."""
    if symbol.fn is None or isinstance(error, ThunderError):
        return None
    try:
        with compat.DisableTorchFunction(), torch.no_grad():
            symbol.fn(*map_structure(fake, args), **map_structure(fake, kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as better:
        return better.with_traceback(None)
    return None
