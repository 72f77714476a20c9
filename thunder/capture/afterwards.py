"""The part of an epilogue that autograd sees: it overwrites arguments with values that require grad, and makes views of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder.core.proxies import TensorProxy, like, map_structure
from thunder.core.symbol import BoundSymbol, recording
from thunder.ops import ltorch
from thunder.ops.functionalize import inplace
from thunder.ops.functionalize.histories import grad_enabled, holding
from thunder.ops.infer import as_torch


def write(writer: Any) -> None:
    """Write statements that give values which require grad to tensors from outside. writer: an `EpilogueWriter`."""
    memory = writer.c.recorder.memory
    for base, value in writer.c.tensors.written_after.items():
        target = writer.value(base)
        for symbol, arguments in memory.rearranged.get(base, ()):
            operands = target, *map(writer.build, arguments)
            writer.lines.append(_seen(writer, True, inplace.rearranging(symbol).fn, *operands))
        if base in memory.filled:
            writer.lines.append(_seen(writer, True, torch.Tensor.copy_, target, writer.value(value)))


def make_views(writer: Any, first: int) -> None:
    """Move operations since `first` that make views of tensors which are written to after the computation: the epilogue
    makes these views."""
    operations, afterwards = writer.c.recorder.bound_symbols, writer.c.tensors.afterwards
    for operation in operations[first:]:
        if not afterwards.keys().isdisjoint(operation.inputs):
            operations.remove(operation)
            _make_view(writer, operation)
            afterwards |= dict.fromkeys(operation.outputs)


def _make_view(writer: Any, operation: BoundSymbol) -> None:
    """Writes the statement of an epilogue that makes a view of a result, after the computation."""
    if operation.sym is holding:
        history, view = operation.args
        with recording(writer.c.recorder), grad_enabled(True):  # not a tensor that another result is, for autograd
            own = ltorch.clone.record(writer.c.recorder, (history,), {}, like(history))
        give, named = writer.pin(give_history, "give_history"), writer.afterwards(view)
        writer.lines.append(f"{give}({named}, {writer.value(own)})")
        writer.built[id(operation.output)] = named
        return
    if operation.sym.fn is None:
        for part in operation.subsymbols:
            _make_view(writer, part)
        for old, new in operation.aliases.items():
            writer.built[id(old)] = writer.built[id(new)]
        return

    def operand(x) -> str:
        x = map_structure(as_torch, x)
        if not isinstance(x, TensorProxy):
            return writer.build(x)
        if x in writer.c.tensors.afterwards:
            return writer.afterwards(x)
        return writer.built.get(id(x)) or writer.value(x)

    keywords = (f"{k}={operand(v)}" for k, v in operation.kwargs.items())
    by_autograd = operation.context is None or operation.context.grad_enabled
    expression = _seen(writer, by_autograd, operation.sym.fn, *map(operand, operation.args), *keywords)
    _name_outputs(writer, operation.output, expression)


def give_history(view: torch.Tensor, history: torch.Tensor) -> None:
    """What was written to a view that autograd does not see through has a history of its own; the memory may have been
    written to again since, from elsewhere."""
    numbers = view.detach().clone()
    with torch.enable_grad():
        view.copy_(history)
    view.detach().copy_(numbers)


def _name_outputs(writer: Any, said: Any, expression: str) -> None:
    name = writer.variable(said, expression)
    for i, part in enumerate(said if isinstance(said, (tuple, list)) else ()):
        _name_outputs(writer, part, f"{name}[{i}]")


def _seen(writer: Any, by_autograd: bool, function: Callable | None, *operands: str) -> str:
    assert function is not None, "a function of PyTorch's changes an argument"
    run, named = writer.pin(inplace.in_grad_mode, "in_grad_mode"), writer.pin(function, function.__name__)
    return f"{run}({', '.join((str(by_autograd), named, *operands))})"
