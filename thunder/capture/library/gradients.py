"""`.grad` of tensors in a captured program: an overlay, which the epilogue writes back."""

from __future__ import annotations

import torch

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.world import SAME
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, primitive
from thunder.interpreter import NULL
from thunder.ops.infer import fake
from thunder.ops.rules import effects
from thunder.ops.torch_types import from_tensor_dtype

A_TENSOR = torch.empty(())  # made before any capture, which would record it


def _owner(c: Capture, p: TensorProxy) -> torch.Tensor | TensorProxy:
    """The owner of a tensor's `.grad` among the program's writes: one for all proxies of a tensor from outside."""
    if p not in c.tensors.real:
        return p
    real, source = c.tensors.real[p]
    first = c.engine.leaves.setdefault(id(real), p)
    if first is not p:
        c.world.ask(source, SAME, c.tensors.real[first][1])
    return real


def first_proxy(c: Capture, p: TensorProxy) -> TensorProxy:
    """The one of a tensor's proxies that gradients are kept under."""
    return c.engine.leaves[id(_owner(c, p))] if p in c.tensors.real else p


def read_gradient(c: Capture, p: TensorProxy):
    """`p.grad`."""
    p = c.recorder.memory.holder(p)
    if (written := c.effects.value(_owner(c, p), "grad")) is not NULL:
        return written
    if p not in c.tensors.real:
        return None
    real, source = c.tensors.real[p]
    with compat.DisableTorchFunction():
        return c.read(real.grad, source.attr("grad"))


def write_gradient(c: Capture, p: TensorProxy, value) -> None:
    """`p.grad = value`. Raises TypeError and RuntimeError as PyTorch does where the value does not fit."""
    p = c.recorder.memory.holder(p)
    now = c.recorder.latest(value)
    placement = c.tensors.placements.get(p)
    dtype = p.dtype if placement is None else from_tensor_dtype(placement.held_dtype)
    fits = type(now) is TensorProxy and value is not p and now.dtype is dtype and tuple(now.shape) == tuple(p.shape)
    if value is not None and not fits:
        with compat.DisableTorchFunction():
            tensor = fake(p)
            tensor.grad = tensor if value is p else fake(now) if type(now) is TensorProxy else value
    owner = _owner(c, p)
    c.world.hold(p)
    if p in c.tensors.real:
        with compat.DisableTorchFunction():
            filled = c.tensors.real[p][0].grad is not None
        is_new = c.effects.value(owner, "grad") is NULL
        if value is None and is_new and filled:
            drop_gradient(p)
        c.effects.write_to_tensor(owner, p, "grad", value)
    else:
        c.effects.hold(p, "grad", value)


# the memory of the last step's gradients is free for this one, which the effect at the end would be too late for
@primitive(lambda tensor: None, tags=(OpTags.DONT_DCE,), module="ltorch")
def drop_gradient(tensor: torch.Tensor) -> None:
    whole = getattr(tensor, "local_of", tensor)  # the DTensor of a local tensor
    whole.grad = None


effects.of_held.add(drop_gradient)


@primitive(lambda tensor, gradient: like(gradient), tags=(OpTags.DETACHED,), module="ltorch")
def leaf_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself where it is laid out as its tensor, a copy in that layout otherwise."""
    wanted = tensor.stride()
    if gradient.stride() == wanted and tensor.is_contiguous():
        return gradient
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    places = zip(gradient.stride(), wanted, tensor.shape, strict=True)
    alike = all(a == b or n == 1 for a, b, n in places) if dense else gradient.is_contiguous()
    if alike:
        return gradient
    form = torch.preserve_format if dense else torch.contiguous_format
    return torch.empty_like(tensor, memory_format=form).copy_(gradient)
