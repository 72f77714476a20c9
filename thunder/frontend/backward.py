"""Gradients of tensors, and backward inside a program: what PyTorch's engine does when it runs is recorded, and what it leaves in `.grad` is an effect."""

from __future__ import annotations

import torch

from thunder.core.proxies import TensorProxy

__all__ = ["read_gradient", "write_gradient"]


def _place(c, p: TensorProxy) -> tuple:
    """The key of a tensor's `.grad` among what the program wrote: one for all proxies of a tensor from outside."""
    real = c.real.get(p)
    return id(p if real is None else real[0]), "grad"


def read_gradient(c, p: TensorProxy):
    """`p.grad`."""
    p = c.recorder.memory.holder(p)
    if (key := _place(c, p)) in c.overlay:
        return c.overlay[key]
    if p not in c.real:
        return None
    real, source = c.real[p]
    with torch._C.DisableTorchFunction():
        return c.read(real.grad, source.attr("grad"))


def write_gradient(c, p: TensorProxy, value) -> None:
    """`p.grad = value`. Raises TypeError and RuntimeError as PyTorch does where the value does not fit."""
    p = c.recorder.memory.holder(p)
    if type(value) is TensorProxy:
        now = c.recorder.latest(value)
        if value is p:
            raise RuntimeError("can't assign Variable as its own grad")
        for what, same in (("type", now.dtype is p.dtype), ("size", tuple(now.shape) == tuple(p.shape))):
            if not same:
                raise RuntimeError(f"assigned grad has data of a different {what}")
    elif value is not None:
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    key = _place(c, p)
    c.keep[id(p)] = p
    c.overlay[key] = value
    if p in c.real:
        c.effects.setdefault(key, ("grad", p, "grad"))
