"""`torch.autograd.Function` inside a captured program: its forward and its backward are read, and become one operation with that derivative."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thunder.core.proxies import TensorProxy, like, map_structure, proxies_in
from thunder.core.symbol import Recorder, Symbol, adopt, current_recorder, recording

__all__ = ["apply"]


class FunctionContext:
    """The `ctx` of a Function: attributes and saved tensors, as the program leaves them."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self._not_differentiable: tuple = ()
        self._dirty: tuple = ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors):
        self._not_differentiable = tensors

    def mark_dirty(self, *tensors):
        self._dirty = tensors

    def set_materialize_grads(self, value):
        """Cotangents are always there: zeros where autograd would pass None are what materializing gives."""


def apply(c, f, args, kwargs):
    """Handler of `Function.apply`."""
    cls, *inputs = args
    needs = tuple(isinstance(x, TensorProxy) and x.requires_grad for x in inputs)
    grad = torch.is_grad_enabled() and any(needs)
    ctx = FunctionContext(needs)
    with _separate(c) as forward:
        result = map_structure(c.recorder.latest, _forward(c, cls, ctx, inputs, kwargs))
    if ctx._dirty:
        c.refuse(f"{cls.__name__} marks tensors dirty: it writes to its inputs", "return new tensors in its place")
    if not grad:
        c.recorder.bound_symbols += forward.bound_symbols
        return result
    plain = {id(t) for t in ctx._not_differentiable}
    outputs = map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, result)
    for inner, o in zip(proxies_in(result, []), proxies_in(outputs, []), strict=True):
        o.name = c.recorder.context.names.make()
        o.requires_grad = id(inner) not in plain and o.dtype.category >= 2
    placeholders = [like(o) for o in proxies_in(outputs, [])]
    for p in placeholders:
        p.name = c.recorder.context.names.make()
    with _separate(c) as backward:
        gradients = map_structure(c.recorder.latest, c.call(_backward_of(cls), [ctx, *placeholders], {}))
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    symbol = Symbol(cls.__name__, id=("autograd_function", id(ctx)))
    symbol.grad_rule = _rule(forward.bound_symbols, result, backward.bound_symbols, placeholders, gradients)
    line = symbol.bind(*inputs, output=outputs, context=c.recorder.context)
    lines, line.aliases = adopt(forward.bound_symbols, result, outputs)
    line._subsymbols = tuple(lines)
    line.location = c.own_location()
    c.recorder.bound_symbols.append(line)
    return outputs


def _forward(c, cls, ctx, inputs, kwargs):
    if cls.setup_context is not torch.autograd.Function.setup_context:
        result = c.call(cls.forward, inputs, kwargs)
        c.call(cls.setup_context, [ctx, tuple(inputs), result], {})
        return result
    return c.call(cls.forward, [ctx, *inputs], kwargs)


def _backward_of(cls):
    """The user's backward, without `once_differentiable` around it: it is captured without grad anyway."""
    found = cls.backward
    return getattr(found, "__wrapped__", found)


@contextmanager
def _separate(c) -> Iterator[Recorder]:
    """Lines are recorded apart, without grad."""
    outer, enabled = c.recorder, torch.is_grad_enabled()
    inner = Recorder(outer.context.replace(grad_enabled=False), outer.location, outer.where)
    inner.versions = outer.versions
    c.recorder = inner
    c.outer_recorders.append(outer)
    torch._C._set_grad_enabled(False)
    try:
        with recording(inner):
            yield inner
    finally:
        c.recorder = outer
        c.outer_recorders.pop()
        torch._C._set_grad_enabled(enabled)


def _rule(forward, result, backward, placeholders, gradients):
    """The derivative: both recordings replayed, the cotangents in the place of the placeholders."""

    def rule(*inputs):
        current_recorder().bound_symbols += forward
        given = yield result
        table = dict(zip(placeholders, proxies_in(given, []), strict=False)) if given is not None else {}
        lines = [line.swap(table) for line in backward]
        current_recorder().bound_symbols += lines
        return tuple(table.get(g, g) if isinstance(g, TensorProxy) else None for g in gradients)

    return rule
