"""Leaves of autograd's graph that a program makes: `torch.zeros(2, requires_grad=True)`."""

from __future__ import annotations

import functools

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy, number_value
from thunder.ops.inplace import copy_
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

__all__ = ["leaf"]


def leaf(c, values: TensorProxy) -> TensorProxy:
    """A new leaf with these values. The prologue makes it at each call, so that autograd knows it as it knows
    arguments; the program fills it."""
    shape, layout = tuple(map(number_value, values.shape)), c.recorder.memory.layout
    options = {"dtype": to_torch_dtype(values.dtype), "device": to_torch_device(values.device), "requires_grad": True}
    strides = layout(values).stride() if layout is not None else torch.empty(shape, device="meta").stride()
    make = functools.partial(torch.empty_strided, shape, strides, **options)
    with compat.DisableTorchFunction():
        made = make()
    proxy = c.read(made, c.const(make, "leaf").call("__call__"))
    with torch.no_grad():
        c.synchronize()
        copy_(proxy, values)
    c.synchronize()
    return proxy
