"""The text of a tensor that requires grad ends with the name of its node in autograd's graph:

    t1 = with_node(t0, 'MulBackward0')   # t0, for its text: tensor([2., 4.], grad_fn=<MulBackward0>)
    host_call(0, print, (t1,), {})

A compiled program has no such nodes. Their names come from running the operation that made the tensor on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import math

import torch

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.strides import layout
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, like, map_structure, number_value, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, primitive
from thunder.interpreter.attributes import plain_attribute
from thunder.ops.infer import as_torch, assign
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


@functools.cache
def _function(name: str) -> type[torch.autograd.Function]:
    """One whose node has this name."""

    def forward(ctx, a):
        return a.view_as(a)

    function_class = type("Printed", (torch.autograd.Function,), {"forward": staticmethod(forward)})
    function_class._backward_cls.__name__ = name  # type: ignore[attr-defined]  # autograd.Function's metaclass makes it
    return function_class


@primitive(lambda value, name: like(value), tags=(OpTags.DETACHED,), module="ltorch")
def with_node(value: torch.Tensor, name: str) -> torch.Tensor:
    with torch.enable_grad():
        return _function(name).apply(value.detach().requires_grad_())


def printed(c: Capture, values):
    """Values of which a text is made: tensors that the program computes and that require grad have named nodes."""
    return map_structure(lambda x: _printed(c, x) if type(x) is TensorProxy and x.requires_grad else x, values)


def _printed(c: Capture, value: TensorProxy) -> TensorProxy:
    """The tensor with the name of the autograd node that eager PyTorch would print."""
    latest = c.recorder.latest(value)
    operation = next((b for b in reversed(c.recorder.bound_symbols) if any(o is latest for o in b.outputs)), None)
    if operation is None:
        if latest not in c.tensors.real:
            c.sharp(_NAMELESS)
        return value
    name = _node(c, operation, latest)
    if name is None:
        c.sharp(_NAMELESS)
        return value
    return with_node(latest, name)


_NAMELESS = "the text of a tensor that requires grad says nothing of its grad_fn"


def _node(c: Capture, operation: BoundSymbol, value: TensorProxy) -> str | None:
    """The name of the node that PyTorch's function makes; None where that is not known."""
    function = operation.sym.fn
    if operation.sym.name in ("setitem", "copy_with_setitem"):
        return "CopySlices"
    if operation.sym.own_derivative:  # of a torch.autograd.Function
        return f"{operation.sym.name}Backward"
    if function is None or not (plain_attribute(function, "__module__") or "torch").startswith("torch"):
        return None
    inputs = proxies_in((operation.args, operation.kwargs), [])
    if any(type(p) is not TensorProxy for p in inputs):
        return None
    strided = OpTags.VIEW in operation.sym.tags
    laid_out = {p: layout(c, p).stride() for p in inputs} if strided else {}
    small = all(math.prod(map(number_value, p.shape)) < _FEW for p in inputs)
    # fake tensors do not say which elements a mask takes
    for mode in (c.tensors.fake_mode, contextlib.nullcontext())[: 2 if small else 1]:
        with compat.probing(grad=True, draws=True), mode:
            examples: dict[Proxy, torch.Tensor] = {p: _example(p, laid_out.get(p)) for p in inputs}
            with contextlib.suppress(Exception):  # its text has no name then, which is said
                return _name(operation, examples, value)
    return None


_FEW = 1 << 16  # elements of an example


def _example(p: TensorProxy, strides: tuple | None) -> torch.Tensor:
    shape, dtype = tuple(map(number_value, p.shape)), to_torch_dtype(p.dtype)
    if strides is None:
        tensor = torch.zeros(shape, dtype=dtype)
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype).zero_()
    return tensor.to(to_torch_device(p.device)).requires_grad_(p.requires_grad)


def _name(operation: BoundSymbol, examples: dict[Proxy, torch.Tensor], value: TensorProxy) -> str | None:
    def example(x):
        return examples[x] if isinstance(x, Proxy) else number_value(x) if isinstance(x, NumberProxy) else as_torch(x)

    assert operation.sym.fn is not None, "the program runs the operation"
    result = operation.sym.fn(*map_structure(example, operation.args), **map_structure(example, operation.kwargs))
    results: dict[Proxy, object] = {}
    assign(operation.output, result, results)
    node = getattr(results.get(value), "grad_fn", None)
    return None if node is None else type(node).__name__
