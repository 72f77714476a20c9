"""In-place operations: the functional operation is recorded, and from then on what was written to stands for its result
(`thunder.ops.functionalize.memory`)."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable

import torch

from thunder.core.definition import InPlaceForm
from thunder.core.proxies import METHODS, TensorProxy, like, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, current_recorder
from thunder.core.unbacked import check_shapes
from thunder.ops import ltorch
from thunder.ops.backward import sum_to
from thunder.ops.functionalize.histories import replacing
from thunder.ops.functionalize.memory import Memory
from thunder.ops.functionalize.overlap import check_overlap, refuse
from thunder.ops.functionalize.rearranged import may_keep_history, rearrange
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import LTORCH, alias, register_inplace, torch_prim
from thunder.ops.rules import effects, views
from thunder.ops.shape_rules import is_empty
from thunder.ops.torch_types import scalar_type


def write(symbol: Symbol, args: tuple, kwargs: dict) -> TensorProxy:
    """`args[0]`, a tensor or a list of them, overwritten with what `symbol` computes from the arguments. Returns what
    was written to, as PyTorch does."""
    target = args[0]
    if isinstance(target, (tuple, list)):
        for each, value in zip(target, symbol(*args, **kwargs), strict=True):
            overwrite(each, value)
        return target
    if views.undo.of(symbol) is not None:
        return _rearrange(symbol, *(symbol._by_position(args, kwargs) if kwargs else (args, {})))
    if (check := views.check_in_place.of(symbol)) is not None:
        check(*args, **kwargs)
    check_overlap(symbol.in_place and symbol.in_place.function, target, args, kwargs)
    return overwrite(target, symbol(*args, **kwargs))


def _rearrange(symbol: Symbol, args: tuple, kwargs: dict) -> TensorProxy:
    """`a.t_()` and its like: the tensor stands for the view."""
    target, *rest = args
    recorder = current_recorder()
    assert recorder is not None, "in-place operations are recorded"
    memory, now = recorder.memory, recorder.latest(target)
    is_program_value = (
        any(o is memory.holder(target) for operation in recorder.bound_symbols for o in operation.outputs)
        if memory is not None
        else True
    )
    if symbol.name == "detach":
        if not now.requires_grad:
            return target
        if not is_program_value or memory.holder(target) in memory.view_of:
            refuse("detach_ is called on an argument, or on a view")
    elif memory is None or kwargs or symbol.name == "as_strided" and not is_program_value:
        refuse(f"{symbol.name}_ changes the shape of a tensor in place")
    elif now.requires_grad and not recorder.context.grad_enabled and not may_keep_history(memory, target, symbol, rest):
        refuse(f"{symbol.name}_ changes the shape of a tensor that requires grad, unseen by autograd")
    if recorder.context.grad_enabled and now.requires_grad:
        memory.joins_history(target)
    rearrange(memory, target, symbol, tuple(rest), views.undo.of(symbol)(now, *rest))
    return memory.holder(target)


@functools.cache
def rearranging(symbol: Symbol) -> Symbol:
    """The in-place form of an operation that changes a shape, as an operation: its result is its argument in its new
    shape."""

    def meta(a, *args):
        return like(symbol.meta(a, *args))  # type: ignore[misc]

    tags = (OpTags.DONT_DCE, OpTags.IN_PLACE)
    value_form = Symbol(
        f"{symbol.name}_",
        meta,
        id=f"rearranging.{symbol.name}",
        module="Tensor",
        is_prim=True,
        tags=tags,
        fn=symbol.in_place and symbol.in_place.function,
    )
    effects.changes_metadata.add(value_form)

    @value_form.vjp
    def _(a, *args):
        """Of what requires grad it is recorded where autograd does not see it, and the shape stays."""
        g = yield value_form(a, *args)
        return g, *(None for _ in args)

    return value_form


@alias(torch.Tensor.swapaxes_, torch.Tensor.swapdims_)
def swapaxes_(a, *args, **kwargs):
    return write(ltorch.transpose, (a, *args, *kwargs.values()), {})


def overwrite(target: TensorProxy, value: TensorProxy) -> TensorProxy:
    """Makes `target`, and everything that shares memory with it, hold `value`, in target's own dtype.

    Raises RuntimeError where the shapes or types do not fit, as PyTorch does, CaptureError where what is written to can
    not be known.
    """
    recorder = current_recorder()
    assert recorder is not None, "in-place operations are recorded"
    memory = recorder.memory
    if memory is None:
        memory = recorder.memory = Memory(recorder.bound_symbols, _own(recorder))
    current = memory.latest(target)
    check_shapes(
        current.shape,
        value.shape,
        f"output with shape {list(current.shape)} doesn't match the broadcast shape {list(value.shape)}",
    )
    if value.dtype is not current.dtype:
        if value.dtype.category > current.dtype.category:
            raise RuntimeError(
                f"result type {scalar_type(value.dtype)} can't be cast to the desired output type "
                f"{scalar_type(current.dtype)}"
            )
        value = ltorch.to(value, dtype=current.dtype)
    if recorder.context.grad_enabled and (
        current.requires_grad or value.requires_grad or memory.latest(memory.base(target)).requires_grad
    ):
        memory.joins_history(target)
        value = replacing(current, value) if current.requires_grad and not value.requires_grad else value
    if value is not current:
        memory.write(target, value)
    return memory.holder(target)


def _own(recorder: Recorder):
    """Where nothing is written back, only what the operations of the recorder made may be written to."""

    def check(base: TensorProxy, is_view: bool, detached: bool) -> None:
        if not any(o is base for operation in recorder.bound_symbols for o in operation.outputs):
            refuse("an in-place operation writes to a tensor that was passed in")

    return check


def _written(name: str, id: str, meta: Callable, function: Callable) -> Symbol:
    """What the end of a program does to an argument."""
    tags = (OpTags.DONT_DCE, OpTags.IN_PLACE)
    return Symbol(name, meta, module="ltorch", id=id, is_prim=True, tags=tags, fn=function)


write_back = _written("copy_", "write_back", lambda target, value: None, torch.Tensor.copy_)


def copy_unless_there(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target.copy_(value)`, where a kernel may have made the value in the target's memory."""
    if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
        target.copy_(value)
    elif not target.is_inference():
        torch.autograd.graph.increment_version(target)


def _copy_data(target: torch.Tensor, value: torch.Tensor) -> None:
    target.data.copy_(value)


write_back_uncounted = _written("copy_data", "write_back_uncounted", lambda target, value: None, _copy_data)


count_write = _written("increment_version", "count_write", lambda target: None, torch.autograd.graph.increment_version)


def _nothing(target: torch.Tensor) -> None:
    """Run where passes are told something that needs no work."""


also_written = _written("also_written", "also_written", lambda target: None, _nothing)
written_after = _written("written_after", "written_after", lambda target: None, _nothing)


def _remains(value: torch.Tensor, tensor: torch.Tensor) -> None:
    """Run in programs that nobody differentiates."""


saved_from = Symbol(
    "saved_from", lambda value, tensor: None, module="ltorch", is_prim=True, tags=(OpTags.DONT_DCE,), fn=_remains
)
"""Backwards read `tensor` in the place of `value`: eager PyTorch saves memory that later calls may write to."""


def in_grad_mode(enabled: bool, function: Callable, *args, **kwargs):
    """What a function gives that autograd sees or does not, in whatever mode the program is called."""
    with torch.set_grad_enabled(enabled):
        return function(*args, **kwargs)


def writes_back(operation: BoundSymbol) -> bool:
    """Whether an operation only changes an argument: what it was before is not read through it."""
    return operation.sym in (
        write_back,
        write_back_uncounted,
        count_write,
        also_written,
        written_after,
    ) or effects.changes_metadata.of(operation.sym)


def overwriting(symbol: Symbol) -> None:
    """`symbol(a, ..., inplace=True)` overwrites `a`: the call is recorded without the flag, and `a` stands for the
    result from then on."""
    position = list(symbol.parameters).index("inplace")

    def call(*args, **kwargs):
        wanted = kwargs.pop("inplace", False) if "inplace" in kwargs else len(args) > position and args[position]
        args = args[:position] + args[position + 1 :]
        return write(symbol, args, kwargs) if wanted else symbol(*args, **kwargs)

    call.__name__ = symbol.name
    alias(*symbol.torch_functions, over=symbol)(call)
    register_inplace(symbol, symbol.name)


def write_out(function, out, result, args: tuple, kwargs: dict):
    """`function(..., out=out)`: the result is written to `out`, one tensor or one for each result.

    Raises PyTorch's RuntimeError where a gradient would be asked for, and CaptureError where `out` would have to change
    its shape.
    """
    recorder = current_recorder()
    assert recorder is not None, "operations are recorded"
    name = getattr(function, "__name__", "an operation")
    if recorder.context.grad_enabled and any(
        isinstance(p, TensorProxy) and p.requires_grad for p in proxies_in((out, args, kwargs), [])
    ):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    if name in _CONJUGATED_OUT and result.dtype.category == 3:
        refuse(
            f"{name}(out=...) leaves it to PyTorch's version whether its argument shows the result or the conjugate "
            "of it"
        )
    for target, value in zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (out, result)), strict=True):
        check_overlap(function, target, args, kwargs | {"out": out})
        now = recorder.latest(target)
        if (
            now.shape != value.shape
            and recorder.memory is not None
            and is_empty(now)
            and recorder.memory.is_alone(target)
        ):
            # an `out` without elements gets the shape of the result
            recorder.memory.reform(target, ltorch.empty(value.shape, dtype=now.dtype, device=now.device))
        if recorder.latest(target).shape != value.shape:
            refuse(
                f"{name}(out=...) would change the shape of its argument from {tuple(recorder.latest(target).shape)} "
                f"to {tuple(value.shape)}"
            )
        overwrite(target, value)
    if name in _RETURNS_NONE:
        return None
    return _as_returned(type(result), out)


_CONJUGATED_OUT = {"fft_ihfft2", "fft_ihfftn", "linalg_lu_solve"}
_RETURNS_NONE = {"split_copy", "split_with_sizes_copy", "unbind_copy"}  # with out=


def _as_returned(kind: type, out):
    """`out` as PyTorch gives it back: in a named tuple where the function's results are one."""
    named = (
        getattr(torch.return_types, f"{kind.__name__}_out", None) if kind.__module__ == "torch.return_types" else None
    )
    return out if named is None else named(out)


_NO_FUNCTION = {
    "set_",
    "resize_",
    "resize_as_",
    "requires_grad_",
    "rename_",
    "swap_tensors",
    "_resize_output_",
    "share_memory_",
    "__set__",
    "__setitem__",
    "__delitem__",
}


_ELEMENT_BY_ELEMENT = {"apply_", "map_", "map2_"}


def writes(function) -> bool:
    """Whether a torch function without a definition here writes to its first argument, by its name."""
    name = getattr(function, "__name__", "")
    return name in _NO_FUNCTION or name.endswith("_") and not name.endswith("__")


def write_unknown(function, args: tuple, kwargs: dict, call: Callable):
    """An in-place function without a definition: what it does to a copy of its first argument is an operation; on a
    list, what it does to each tensor."""
    name = function.__name__
    if name in _NO_FUNCTION:
        refuse(
            f"{name} changes the memory of a tensor"
            if name[0] != "_"
            else "an attribute or item of a tensor is assigned"
        )
    if name in _ELEMENT_BY_ELEMENT:
        refuse(f"{name} calls a Python function for each element")
    targets = args[0]
    if isinstance(targets, (tuple, list)):
        one = getattr(torch.Tensor, name.removeprefix("_foreach_"), None)
        if one is None:
            refuse(f"{name} is called with tensors that share memory, or that require grad")
        for i, target in enumerate(targets):
            mine = [a[i] if isinstance(a, (tuple, list)) else a for a in args[1:]]
            scale = {"value": mine.pop()} if one.__name__ in ("addcmul_", "addcdiv_") and len(mine) > 2 else {}
            call(one, (target, *mine), kwargs | scale)
    else:
        overwrite(targets, call(_on_a_copy(function), args, kwargs))
    return targets


def one_by_one(args: tuple) -> bool:
    """Whether a foreach function is what it does to each tensor in turn: where one is read after another was written
    to, or where they differ for autograd."""
    recorder = current_recorder()
    tensors = [p for p in proxies_in(args, []) if isinstance(p, TensorProxy)]
    if recorder.context.grad_enabled and any(recorder.latest(t).requires_grad for t in tensors):
        return True
    if recorder.memory is None:
        return False
    for t in args[0]:
        recorder.memory.declare(t)
    bases = collections.Counter(map(recorder.memory.base, tensors))
    return any(bases[recorder.memory.base(t)] > 1 for t in args[0])


@functools.cache
def _on_a_copy(function):
    def run(target, *args, **kwargs):
        out = target.clone()
        function(out, *args, **kwargs)
        return out

    run.__name__ = f"{function.__name__}copy"
    run.in_place = function  # type: ignore[attr-defined]
    return run


def _operator(name: str):
    def method(a, b):
        return write(LTORCH[name], (a, b), {})

    return method


for _dunder, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "div": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}.items():  # fmt: skip
    METHODS[f"__i{_dunder}__"] = _operator(_name)


def setitem(a: TensorProxy, key, value) -> None:
    """`a[key] = value`."""
    check_overlap(operator.setitem, a, (a, key, value), {})
    overwrite(a, ltorch.setitem(a, key, value))


METHODS["__setitem__"] = setitem


@torch_prim(fn=lambda a, src: torch.empty_like(a).copy_(src))
def copied_into(a, src):
    """src, broadcast and converted, in the layout of `a`, whose values are not read; its gradient is zero, as PyTorch's
    is."""
    if broadcast_shapes(a.shape, src.shape) != a.shape:
        raise RuntimeError(
            f"output with shape {list(a.shape)} doesn't match the broadcast shape "
            f"{list(broadcast_shapes(a.shape, src.shape))}"
        )
    return like(a)


copied_into.in_place = InPlaceForm(torch.Tensor.copy_, {0: 0})


@copied_into.vjp
def _(a, src):
    g = yield copied_into(a, src)
    return ltorch.zeros_like(g), sum_to(ltorch.to(g, dtype=src.dtype, device=src.device), src.shape)


@alias(torch.Tensor.copy_)
def copy_(a: TensorProxy, src: TensorProxy, non_blocking: bool = False) -> TensorProxy:
    """`a.copy_(src)`: src in a's shape, type and place."""
    check_overlap(torch.Tensor.copy_, a, (a, src), {})
    return overwrite(a, copied_into(a, src))


@torch_prim(torch.fill)
def fill(a, value):
    """A tensor like `a`, filled with a number or a tensor of no dimensions. The values of `a` are not read; its
    gradient is zero, as PyTorch's is."""
    if type(value) is TensorProxy and value.shape:
        raise RuntimeError(
            f"fill only supports 0-dimension value tensor but got tensor with {len(value.shape)} dimensions."
        )
    return like(a)


@fill.vjp
def _(a, value):
    g = yield fill(a, value)
    return ltorch.zeros_like(g), ltorch.to(ltorch.sum(g), dtype=value.dtype) if type(value) is TensorProxy else None


register_inplace(fill, "fill")


@alias(torch.Tensor.zero_, torch.zero_)
def zero_(a: TensorProxy) -> TensorProxy:
    return write(fill, (a, 0), {})
