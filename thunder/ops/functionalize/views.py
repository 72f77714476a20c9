"""Views: what a write to a view does to its base, and what undoes a change of shape in place."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.core.recording import current_recorder, user_location
from thunder.core.symbol import BoundSymbol
from thunder.errors import CaptureError
from thunder.ops import ltorch
from thunder.ops.functionalize.histories import grad_enabled, holding, is_unseen
from thunder.ops.functionalize.memory import REMEDY
from thunder.ops.functionalize.parts import part_of
from thunder.ops.registry import LTORCH
from thunder.ops.rules import views
from thunder.ops.shape_rules import along


def _again(operation: BoundSymbol, view, whole, part):
    """Views that undo themselves."""
    return _dense(LTORCH[operation.sym.name](part, *operation.args[1:]), whole)


def _dense(a: TensorProxy, whole: TensorProxy) -> TensorProxy:
    """The whole stays as it was laid out, for the views that are made of it later."""
    layout = current_recorder().memory.layout
    dims = range(len(a.shape))
    order = sorted(dims, key=layout(whole).stride().__getitem__, reverse=True) if layout is not None else list(dims)
    if order == list(dims):
        return ltorch.contiguous(a, memory_format=torch.contiguous_format)
    a = ltorch.contiguous(ltorch.permute(a, tuple(order)), memory_format=torch.contiguous_format)
    return ltorch.permute(a, tuple(order.index(d) for d in dims))


def _reshaped(operation: BoundSymbol, view, whole, part):
    return ltorch.reshape(part, whole.shape)


def _viewed(operation: BoundSymbol, view, whole, part):
    if not is_unseen(operation):
        return _reshaped(operation, view, whole, part)
    return _detached(operation, view, whole, ltorch.view(part, whole.dtype))


def _copyable(write: Callable) -> Callable:
    """Views only where the strides allow it: without a layout that says so, nothing is known."""
    return lambda operation, view, whole, part: (
        write(operation, view, whole, part) if current_recorder().memory.layout is not None else None
    )


def _placed(operation: BoundSymbol, view, whole, part):
    """Any view that shows elements of the whole: their places are the same view of 0, 1, 2 ..."""
    count = math.prod(whole.shape)
    places = operation.sym(
        ltorch.reshape(ltorch.arange(count, device=whole.device), whole.shape),
        *operation.args[1:],
        **operation.kwargs,
    )
    flat = ltorch.scatter(
        ltorch.reshape(whole, (count,)), 0, ltorch.reshape(places, (-1,)), ltorch.reshape(part, (-1,))
    )
    return _dense(ltorch.reshape(flat, whole.shape), whole)


def _placed_once(size_and_stride: Callable) -> Callable:
    """How a write to an `as_strided` view that shows each element once is a write to the whole. size_and_stride: of a
    bound symbol and its view."""

    def write(operation: BoundSymbol, view, whole, part):
        size, stride = size_and_stride(operation, view)
        with compat.DisableTorchFunction():
            offsets = (
                torch.as_strided(
                    torch.arange(1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))), size, stride
                )
                if math.prod(size)
                else torch.arange(0)
            )
            overlaps = offsets.unique().numel() != offsets.numel()
        if overlaps:
            raise CaptureError(
                "a view that shows elements of its tensor more than once is written to",
                location=user_location(),
                remedy=REMEDY,
            )
        return _placed(operation, view, whole, part)

    return write


def _window_steps(operation: BoundSymbol, view) -> tuple:
    _, dimension, size, step = operation.args
    return (view.shape[dimension % max(len(view.shape) - 1, 1)], size), (step, 1)


def _real(operation: BoundSymbol, view, whole, part):
    return ltorch.complex(part, ltorch.imag(whole))


def _imaginary(operation: BoundSymbol, view, whole, part):
    return ltorch.complex(ltorch.real(whole), part)


def _permuted(operation: BoundSymbol, view, whole, part):
    rank = len(whole.shape)
    order = [d % rank for d in operation.args[1]]
    return _dense(ltorch.permute(part, tuple(order.index(d) for d in range(rank))), whole)


def _moved(operation: BoundSymbol, view, whole, part):
    return _dense(ltorch.movedim(part, operation.args[2], operation.args[1]), whole)


def _assigned(key: Callable):
    def write(operation: BoundSymbol, view, whole, part):
        return ltorch.setitem(whole, key(operation, view, whole), part)

    return write


def _argument(operation: BoundSymbol, position: int, name: str, default):
    return operation.args[position] if len(operation.args) > position else operation.kwargs.get(name, default)


def _split_key(operation: BoundSymbol, view: TensorProxy, whole: TensorProxy) -> tuple:
    default = {"hsplit": 1 if len(whole.shape) > 1 else 0, "vsplit": 0, "dsplit": 2}.get(operation.sym.name)
    dim = default if default is not None else _argument(operation, 2, "dim", 0)
    start = 0
    for o in operation.outputs:
        size = o.shape[dim]
        if o is view:
            return along(whole, dim, slice(start, start + size))
        start = start + size
    raise AssertionError("the view is a result of the line")


def _narrow_key(operation: BoundSymbol, view: TensorProxy, whole: TensorProxy) -> tuple:
    return along(whole, operation.args[1], slice(operation.args[2], operation.args[2] + operation.args[3]))


def _unbind_key(operation: BoundSymbol, view: TensorProxy, whole: TensorProxy) -> tuple:
    return along(
        whole, _argument(operation, 1, "dim", 0), next(i for i, o in enumerate(operation.outputs) if o is view)
    )


def _detached(operation: BoundSymbol, view, whole, part):
    """What autograd knows of the whole stays as it is."""
    if not whole.requires_grad:
        return ltorch.detach(part)  # a value of its own: views made of the part later do not become views of the whole
    with grad_enabled(True):
        return holding(whole, part)


def _expanded(operation: BoundSymbol, view, whole, part):
    if math.prod(whole.shape) == math.prod(view.shape):
        return _reshaped(operation, view, whole, part)
    raise CaptureError(
        "an expanded tensor is written to, whose elements share memory", location=user_location(), remedy=REMEDY
    )


for _names, _inverse in (
    ("t transpose", _again), ("conj", lambda operation, view, whole, part: ltorch.conj(part)),
    ("permute", _permuted),
    ("movedim", _moved), ("detach data", _detached), ("unflatten unsqueeze squeeze", _reshaped), ("view", _viewed),
    ("reshape flatten contiguous", _copyable(_reshaped)), ("diagonal", _placed),
    ("unfold", _placed_once(_window_steps)), ("real", _real), ("imag", _imaginary),
    ("split chunk tensor_split hsplit vsplit dsplit", _assigned(_split_key)), ("expand", _expanded),
    ("unbind", _assigned(_unbind_key)), ("getitem", _assigned(lambda operation, view, whole: operation.args[1])),
    ("select", _assigned(lambda operation, view, whole: along(whole, operation.args[1], operation.args[2]))),
    ("narrow", _assigned(_narrow_key)),
    ("view_as_real", lambda operation, view, whole, part: ltorch.view_as_complex(part)),
    ("view_as_complex", lambda operation, view, whole, part: ltorch.view_as_real(part)),
):  # fmt: skip
    views.inverse.set(_inverse, *(LTORCH[name] for name in _names.split()))
views.inverse.set(_placed_once(lambda operation, view: operation.args[1:3]), part_of)
views.several.add(ltorch.split, ltorch.chunk, ltorch.unbind)

views.undo.set(lambda a: (ltorch.t, ()), ltorch.t)
views.undo.set(lambda a, dim0, dim1: (ltorch.transpose, (dim0, dim1)), ltorch.transpose)
views.undo.set(lambda a, dim=None: (ltorch.view, (a.shape,)), ltorch.squeeze)
views.undo.set(lambda a, dim: (ltorch.squeeze, (dim,)), ltorch.unsqueeze)
views.undo.set(lambda a, *args: None, ltorch.as_strided, ltorch.detach)
