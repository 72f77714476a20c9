"""What a program asks about a tensor's memory: strides, contiguity, offset.

Proxies carry no strides, since nearly no program asks. The answer for a program's input is the input's, and becomes a guard. For a value that the program
computes, the lines that lead to it are run on fake tensors, with the same PyTorch functions that run later. A view that was written to is asked as the view that it is in
the program.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder.core.proxies import TensorProxy
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol
from thunder.ops.layout import run_line

__all__ = ["LAYOUT_QUESTIONS", "answer", "layout"]

LAYOUT_QUESTIONS = {torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset, torch.Tensor.dim_order}


def answer(c, function, args, kwargs):
    """`function` is one of LAYOUT_QUESTIONS; its first argument is a tensor of the program's."""
    value = layout(c, args[0], function is torch.Tensor.storage_offset) if isinstance(args[0], TensorProxy) else args[0]
    with torch._C.DisableTorchFunction():
        return function(value, *args[1:], **kwargs)


def layout(c, wanted: TensorProxy, with_offset: bool = False) -> torch.Tensor:
    """A fake tensor with the strides, and the offset where it matters, that `wanted` has in the program. Views of one memory have stand-ins with one storage."""
    memory = c.recorder.memory
    wanted = memory.holder(wanted)
    c.fake_mode = c.fake_mode or FakeTensorMode(allow_non_fake_inputs=True)
    views = [wanted]
    while views[-1] in memory.view_of:
        views.append(memory.view_of[views[-1]][1])
    base = views.pop()
    value = memory.formed.get(base, base)
    with torch._C.DisableTorchFunction(), c.fake_mode, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        for line in _slice(c, value, c.layouts):
            if isinstance(line, BoundSymbol):
                run_line(line, c.layouts)
            else:
                _input(c, line, with_offset)
        for view in reversed(views):
            if view not in c.layouts:
                line, shown = memory.view_of[view]
                run_line(line.swap({p: value if shown is base else shown for p in line.inputs if memory.holder(p) is shown}), c.layouts)
    return c.layouts[wanted if views else value]


def _input(c, proxy: TensorProxy, with_offset: bool) -> None:
    real, source = c.real[proxy]
    c.guard(source, "stride", tuple(real.stride()))
    if with_offset:
        c.guard(source, "offset", real.storage_offset())
    if proxy not in c.layouts:
        c.layouts[proxy] = c.fake_mode.from_tensor(real)


def _slice(c, wanted: TensorProxy, known: dict) -> list:
    """The inputs and lines that lead to a value, in the order of the program, but for lines whose results are known."""
    lines = leading_to([line for recorder in (*c.outer_recorders, c.recorder) for line in recorder.bound_symbols], (wanted,))
    inputs = dict.fromkeys(p for p in (wanted, *(i for line in lines for i in line.inputs)) if p in c.real)
    return [*inputs, *(line for line in lines if not all(o in known for o in line.outputs))]
