"""What a program asks about a tensor's memory: strides, contiguity, offset.

Proxies carry no strides, since nearly no program asks. The answer for a program's input is the input's, and becomes a guard. For a value that the program
computes, the lines that lead to it are run on fake tensors, with the same PyTorch functions that run later.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.ops.layout import run_line

__all__ = ["LAYOUT_QUESTIONS", "answer"]

LAYOUT_QUESTIONS = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset, torch.Tensor.dim_order}


def answer(c, function, args, kwargs):
    """`function` is one of LAYOUT_QUESTIONS; its first argument is a tensor of the program's."""
    value = c.recorder.latest(args[0])
    if isinstance(value, TensorProxy):
        value = _fake(c, value, function is torch.Tensor.storage_offset)
    with torch._C.DisableTorchFunction():
        return function(value, *args[1:], **kwargs)


def _fake(c, wanted: TensorProxy, with_offset: bool) -> torch.Tensor:
    """A fake tensor with the strides, and the offset where it matters, that `wanted` will have."""
    mode = FakeTensorMode()
    values: dict[Proxy, object] = {}
    with torch._C.DisableTorchFunction(), mode, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        for line in _slice(c, wanted):
            if isinstance(line, BoundSymbol):
                run_line(line, values)
            else:
                real, source = c.real[line]
                c.guard(source, "stride", tuple(real.stride()))
                if with_offset:
                    c.guard(source, "offset", real.storage_offset())
                values[line] = mode.from_tensor(real)
    return values[wanted]  # type: ignore[return-value]


def _slice(c, wanted: TensorProxy) -> list:
    """The inputs and lines that lead to a value, in the order of the program."""
    needed, found = {wanted}, []
    for line in reversed([line for recorder in (*c.outer_recorders, c.recorder) for line in recorder.bound_symbols]):
        if not needed.isdisjoint(line.outputs):
            needed.update(line.inputs)
            found.append(line)
    return [*(p for p in needed if p in c.real), *reversed(found)]
