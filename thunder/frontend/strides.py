"""What a program asks about a tensor's memory: strides, contiguity, offset.

Proxies carry no strides, since nearly no program asks. The answer for a program's input is the input's, and becomes a guard. For a value that the program
computes, the lines that lead to it are run on fake tensors, with the same PyTorch functions that run later.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, map_structure
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol
from thunder.ops.explain import as_torch

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
                _run(line, values)
            else:
                real, source = c.real[line]
                c.guard(source, "stride", tuple(real.stride()))
                if with_offset:
                    c.guard(source, "offset", real.storage_offset())
                values[line] = mode.from_tensor(real)
    return values[wanted]  # type: ignore[return-value]


def _slice(c, wanted: TensorProxy) -> list:
    """The inputs and lines that lead to a value, in the order of the program."""
    lines = leading_to([line for recorder in (*c.outer_recorders, c.recorder) for line in recorder.bound_symbols], (wanted,))
    return [*dict.fromkeys(p for p in (wanted, *(i for line in lines for i in line.inputs)) if p in c.real), *lines]


def _run(line: BoundSymbol, values: dict[Proxy, object]) -> None:
    if line.sym.fn is None:
        for sub in line.subsymbols:
            _run(sub, values)
        values.update({old: values.get(new, new) for old, new in line.aliases.items()})
        return

    def real(x):
        return values[x] if isinstance(x, Proxy) else x.concrete() if isinstance(x, NumberProxy) else as_torch(x)

    result = line.sym.fn(*map_structure(real, line.args), **map_structure(real, line.kwargs))
    _name(line.output, result, values)


def _name(said, result, values: dict[Proxy, object]) -> None:
    if isinstance(said, Proxy):
        values[said] = result
    elif isinstance(said, (tuple, list)):
        for s, r in zip(said, result, strict=True):
            _name(s, r, values)
    elif isinstance(said, dict):
        for k, s in said.items():
            _name(s, result[k], values)
