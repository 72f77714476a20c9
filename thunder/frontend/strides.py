"""What a program asks about a tensor's memory: strides, contiguity, offset, whether it shows conjugates, whether it is pinned.

Proxies carry no strides, since nearly no program asks. The answer for a program's input is the input's, and becomes a guard. For a value that the program
computes, the lines that lead to it are run on fake tensors, with the same PyTorch functions that run later.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol
from thunder.ops.explain import as_torch

__all__ = ["LAYOUT_QUESTIONS", "answer"]

_OF_MEMORY = {torch.Tensor.is_pinned, torch.Tensor.is_shared}  # the same for all views of a memory
_OF_BITS = {torch.Tensor.is_conj: "is_conj", torch.is_conj: "is_conj", torch.Tensor.is_neg: "is_neg", torch.is_neg: "is_neg"}
LAYOUT_QUESTIONS = {
    torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset, torch.Tensor.dim_order, torch.Tensor.is_set_to, torch.Tensor.data_ptr,
    *_OF_BITS, *_OF_MEMORY,
}  # fmt: skip


def answer(c, function, args, kwargs):
    """`function` is one of LAYOUT_QUESTIONS; its first argument is a tensor of the program's."""
    value = c.recorder.latest(args[0])
    if isinstance(value, TensorProxy):
        if function in _OF_MEMORY:
            return _of_memory(c, function, value)
        if function is torch.Tensor.data_ptr:
            return _address(c, value)
        if function is torch.Tensor.is_set_to and c.recorder.latest(args[1]) is not value:
            c.refuse("whether two tensors are one view of one memory is asked", "ask it outside of the compiled function and pass the answer in")
        if function is torch.Tensor.is_set_to:
            return True
        value = _fake(c, value, function)
    with torch._C.DisableTorchFunction():
        return function(value, *args[1:], **kwargs)


def _of_memory(c, function, value: TensorProxy) -> bool:
    """What comes from outside answers itself, and is asked again by the prologue; what the program makes is neither pinned nor shared, but by the operation that says so."""
    base = c.recorder.memory.base(value)
    if base not in c.real:
        return function is torch.Tensor.is_pinned and any(base in line.outputs and line.sym.name == "pin_memory" for line in c.recorder.bound_symbols)
    real, source = c.real[base]
    with torch._C.DisableTorchFunction():
        found = function(real)
    c.guard(source, function.__name__, found)
    return found


def _address(c, value: TensorProxy) -> int:
    """An input's own, which the prologue compares: a tensor somewhere else is another program."""
    if value not in c.real:
        c.refuse(".data_ptr() asks for the address of what the program computes, which is known only when it runs", "ask for an input's, or outside of the compiled function")
    real, source = c.real[value]
    c.guard(source, "data_ptr", real.data_ptr())
    return real.data_ptr()


def _fake(c, wanted: TensorProxy, function) -> torch.Tensor:
    """A fake tensor with the strides, and the offset or the bits where they are asked for, that `wanted` will have."""
    mode = FakeTensorMode()
    values: dict[Proxy, object] = {}
    with torch._C.DisableTorchFunction(), mode, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        for line in _slice(c, wanted):
            if isinstance(line, BoundSymbol):
                _run(line, values)
            else:
                real, source = c.real[line]
                c.guard(source, "stride", tuple(real.stride()))
                if function is torch.Tensor.storage_offset:
                    c.guard(source, "offset", real.storage_offset())
                if function in _OF_BITS:
                    c.guard(source, "is_conj", real.is_conj())
                    c.guard(source, "is_neg", real.is_neg())
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
