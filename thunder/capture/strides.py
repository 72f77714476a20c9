"""Questions about a tensor's memory: strides, contiguity, offset, whether it shows conjugates, whether it is
pinned.

Proxies carry no strides, since nearly no program asks. The answer for a program's input is the input's, and becomes a
guard. For a value that the program computes, the operations that lead to it are run on fake tensors, with the same
PyTorch functions that run later. A view that was written to is asked as the view that it is in the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.world import VALUE
from thunder.core.proxies import (
    RELATIONS,
    NumberProxy,
    Proxy,
    TensorProxy,
    UnbackedNumber,
    concrete,
    map_structure,
    number_value,
    numbers_in,
)
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol, user_location
from thunder.errors import DataDependentError
from thunder.ops.infer import run_line
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

# the same for all views of a memory
_OF_MEMORY = {torch.Tensor.is_pinned, torch.Tensor.is_shared, torch.Tensor.is_inference, torch.is_inference}
_OF_BITS = {torch.Tensor.is_conj, torch.is_conj, torch.Tensor.is_neg, torch.is_neg}
LAYOUT_QUESTIONS = {
    torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset, torch.Tensor.dim_order,
    torch.Tensor.is_set_to, torch.Tensor.data_ptr,
    *_OF_BITS, *_OF_MEMORY,
}  # fmt: skip


def answer(c: Capture, function, args, kwargs):
    """`function` is one of LAYOUT_QUESTIONS; its first argument is a tensor of the program's."""
    value = args[0]
    if isinstance(value, TensorProxy):
        if function in _OF_MEMORY:
            return _of_memory(c, function, value)
        if function is torch.Tensor.data_ptr:
            return _address(c, c.recorder.latest(value))
        if function is torch.Tensor.is_set_to:
            return _same_view(c, value, args[1])
        holder = c.recorder.memory.holder(value)
        itself = holder in c.tensors.real and holder not in c.recorder.memory.formed
        if function is torch.Tensor.is_contiguous and itself and not (args[1:] or kwargs):
            return c.world.ask(c.tensors.real[holder][1].call("is_contiguous"), VALUE)
        value = layout(c, value, function is torch.Tensor.storage_offset, function in _OF_BITS)
    with compat.DisableTorchFunction():
        return function(value, *args[1:], **kwargs)


def _of_memory(c: Capture, function, value: TensorProxy) -> bool:
    """Tensors from outside answer themselves, and the prologue asks them again; those of the program are neither pinned
    nor shared, but by the operation that says so."""
    base = c.recorder.memory.base(value)
    if base not in c.tensors.real and function in (torch.Tensor.is_inference, torch.is_inference):
        return c.modes.inference.around or c.modes.inference.is_made(c.recorder, base)
    if base not in c.tensors.real:
        return function is torch.Tensor.is_pinned and any(
            base in operation.outputs and operation.sym.name == "pin_memory" for operation in c.recorder.bound_symbols
        )
    real, source = c.tensors.real[base]
    with compat.DisableTorchFunction():
        answer = function(real)
    c.world.ask(source.call(function.__name__), VALUE)
    return answer


def _address(c: Capture, value: TensorProxy) -> int:
    """An input's own, which the prologue compares: a tensor somewhere else is another program."""
    if value not in c.tensors.real or value in c.tensors.placements:
        c.refuse(
            ".data_ptr() reads the address of a computed tensor, which is known only when the program runs",
            "read the address of an input, or call it outside of the compiled function",
        )
    real, source = c.tensors.real[value]
    return c.world.ask(source.call("data_ptr"), VALUE)


def _same_view(c: Capture, a: TensorProxy, b) -> bool:
    if not isinstance(b, TensorProxy) or c.recorder.memory.holder(a) is not c.recorder.memory.holder(b):
        c.refuse(
            "the program asks whether two tensors are the same view of one memory",
            "ask it outside of the compiled function and pass the answer in",
        )
    return True


def layout(
    c: Capture, wanted: TensorProxy, with_offset: bool = False, with_bits: bool = False, known: dict | None = None
) -> torch.Tensor:
    """A fake tensor with the strides, and the offset or the bits where those matter, that `wanted` has in the program.

    Views of one memory have fake tensors with one storage. The program holds the sizes that lead to it for constants,
    but where the answer goes into `known`: nothing is decided by it then.
    """
    decides = known is None
    layouts = c.tensors.layouts if known is None else known
    memory = c.recorder.memory
    wanted = memory.holder(wanted)
    if (
        decides
        and not with_bits
        and c.numbers.decisions.values
        and (example := _for_all_sizes(c, wanted, with_offset)) is not None
    ):
        return example
    base, views, value = _base(c, wanted)
    with compat.probing(), c.tensors.fake_mode:
        for operation in _slice(c, value, layouts):
            if isinstance(operation, BoundSymbol):
                try:
                    run_line(operation, layouts, _number if decides else number_value)
                except compat.DynamicOutputShape:
                    raise DataDependentError(
                        f"the strides of what {operation.sym.name} gives", location=user_location()
                    ) from None
            else:
                if decides:
                    map_structure(concrete, operation.shape)
                _input(c, operation, layouts, with_offset, with_bits)
        return _view(c, wanted, {base: layouts[value]}, views)


def _base(c: Capture, wanted: TensorProxy) -> tuple[TensorProxy, list[TensorProxy], TensorProxy]:
    """The base of a view, the views that lead from it to the view, and the value that the base has."""
    memory, views = c.recorder.memory, [wanted]
    while views[-1] in memory.view_of:
        views.append(memory.view_of[views[-1]][1])
    base = views.pop()
    return base, views, memory.formed.get(base, base)


def _view(
    c: Capture, wanted: TensorProxy, layouts: dict[Proxy, object], views: list[TensorProxy], *number
) -> torch.Tensor:
    memory = c.recorder.memory
    for view in reversed(views):  # a value of the trace has the name of the first view that it was
        operation, shown = memory.view_of[view]
        run_line(operation.swap({p: shown for p in operation.inputs if memory.holder(p) is shown}), layouts, *number)
    return cast(torch.Tensor, layouts[wanted])


def _for_all_sizes(c: Capture, wanted: TensorProxy, with_offset: bool) -> torch.Tensor | None:
    """The fake tensor of `layout` where it is the same for all sizes, so that none of those that lead to it needs to be
    a constant: PyTorch's symbolic sizes say so. None where it is not, or nobody knows."""
    if not c.numbers.decisions.values:
        return None
    base, views, value = _base(c, wanted)
    steps = _slice(c, value, {})
    names = _sizes_in([*steps, *(c.recorder.memory.view_of[view][0] for view in views)])
    sizes = {name: number_value(n) for name, n in names.items()}
    if not sizes or any(type(n) is not int or n < 2 for n in sizes.values()):
        return None
    with compat.probing(), compat.symbolic_sizes(sizes) as (symbols, nothing_decided):

        def number(x: NumberProxy):
            return number_value(x) if x.python_type is float else x.expression.evaluate(symbols)

        layouts: dict[Proxy, object] = {}
        try:
            for step in steps:
                if isinstance(step, BoundSymbol):
                    run_line(step, layouts, number)
                elif (example := _contiguous_input(c, step, with_offset, number)) is None:
                    return None
                else:
                    layouts[step] = example
            laid_out = _view(c, wanted, {base: layouts[value]}, views, number)
        except (RuntimeError, KeyError, TypeError, ValueError):  # an operation refuses symbolic sizes
            return None
        if not nothing_decided() or any(type(n) is not int for n in (*laid_out.shape, *laid_out.stride())):
            return None
        if with_offset and type(laid_out.storage_offset()) is not int:
            return None
    return laid_out if all(RELATIONS[">"](n, 1) for n in names.values()) else None


def _sizes_in(steps: list) -> dict[str, NumberProxy]:
    """The sizes that stay symbolic in inputs and operations, by name; none where one depends on data."""
    read = [(s.args, s.kwargs) if isinstance(s, BoundSymbol) else getattr(s, "shape", ()) for s in steps]
    numbers = [n for n in numbers_in(read, []) if n.python_type is not float]
    if any(n.unbacked for n in numbers):
        return {}
    return {name: n.symbol(name) for n in numbers for name in n.expression.symbols()}


def _contiguous_input(c: Capture, proxy: Proxy, with_offset: bool, number: Callable) -> torch.Tensor | None:
    """A fake tensor for an input of the program whose strides are those of a new tensor; None for another one."""
    if proxy in c.tensors.arguments or not isinstance(proxy, TensorProxy):
        return None
    if proxy in c.tensors.cotangents:
        c.tensors.ask_layout(proxy)
    elif proxy not in c.tensors.placements:
        real, source = c.tensors.real[proxy]
        with compat.without_fakes(), compat.DisableTorchFunction():
            new = real.is_contiguous() and not (with_offset and real.storage_offset())
        if not new or real.layout is not torch.strided:
            return None
        for name in ("is_contiguous", *(("storage_offset",) if with_offset else ())):
            c.world.ask(source.call(name), VALUE)
    shape = [number(n) if isinstance(n, NumberProxy) else n for n in proxy.shape]
    return torch.empty(shape, dtype=to_torch_dtype(proxy.dtype), device=to_torch_device(proxy.device))


def _input(c: Capture, proxy: TensorProxy, layouts: dict, with_offset: bool, with_bits: bool) -> None:
    """The layout of an input, as the call has it, which the prologue asks for. Fills `layouts`."""
    if proxy in c.tensors.cotangents:
        c.tensors.ask_layout(proxy)
        layouts[proxy] = _dense(proxy, to_torch_dtype(proxy.dtype))
        return
    if proxy in c.tensors.arguments:
        outer, dim = c.tensors.arguments[proxy]
        around = layout(c, outer, with_offset, with_bits, layouts)
        layouts[proxy] = around if dim is None else around.select(dim, 0)
        return
    real, source = c.tensors.real[proxy]
    placement = c.tensors.placements.get(proxy)
    if placement is not None and placement.is_split:  # gathered anew by each call
        layouts[proxy] = _dense(proxy, placement.dtype)
        return
    for name in (
        "stride",
        *(("storage_offset",) if with_offset else ()),
        *(("is_conj", "is_neg") if with_bits else ()),
    ):
        c.world.ask(source.call(name), VALUE)
    if proxy not in layouts:
        with compat.without_fakes(), compat.DisableTorchFunction():
            plain = real.data  # a gradient may have another size
        fake = c.tensors.fake_mode.from_tensor(plain)
        layouts[proxy] = fake if c.request.options.device is None else fake.to(to_torch_device(proxy.device))


def _dense(proxy: TensorProxy, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(tuple(map(int, proxy.shape)), dtype=dtype, device=to_torch_device(proxy.device))


def _slice(c: Capture, wanted: TensorProxy, known: dict) -> list:
    """The inputs and operations that lead to a value, in the order of the program, without those that are known."""
    operations = leading_to(
        [operation for recorder in c.recording.all for operation in recorder.bound_symbols], (wanted,)
    )
    read = (wanted, *(i for operation in operations for i in operation.inputs))
    outside = (c.tensors.real, c.tensors.cotangents, c.tensors.arguments)
    inputs = dict.fromkeys(p for p in read if any(p in table for table in outside))
    computed = (o for o in operations if any(not isinstance(x, UnbackedNumber) and x not in known for x in o.outputs))
    return [*inputs, *computed]


def _number(x: NumberProxy):
    """A symbolic number, for an example: no strides depend on a float."""
    return number_value(x) if x.python_type is float else x.concrete()
