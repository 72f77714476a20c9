"""Hooks of tensors that a program registers: `t.register_hook(hook)` and `t.retain_grad()`.

A hook runs when the backward does. In a backward inside of the program it is interpreted there. A backward outside
calls it as it is, with the contents of its closure as arguments:

    t1 = hooked(t0, limit, (t2,))      # forward: t0 itself
    t4 = call_hook(t3, limit, (t2,))   # backward: the hook's result for t3
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from thunder import compat
from thunder.analysis import aliases
from thunder.capture.interface import Capture
from thunder.capture.tensors import is_leaf
from thunder.core.codegen import OBJECT_NAMES
from thunder.core.proxies import Proxy, TensorProxy, like
from thunder.core.rewrite import renamed_value
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.interpreter.attributes import plain_attribute
from thunder.ops.rules import derivatives


class Hook:
    """A hook as the program registered it. rebuilt: makes it of the values of one call; see `rebuilt_hooks`."""

    def __init__(self, function: Callable):
        self.function = function
        self.rebuilt: Callable[[tuple], Callable] = lambda values: function
        self.name = plain_attribute(function, "__name__") or type(function).__name__

    def __call__(self, gradient: torch.Tensor, values: tuple) -> torch.Tensor:
        result = self.rebuilt(values)(gradient)
        if result is None:
            return gradient
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"hook {self.name!r} gave a {type(result).__name__}, where a tensor or None is expected")
        if result.shape != gradient.shape or result.dtype != gradient.dtype:
            raise RuntimeError(f"hook {self.name!r} has changed the size or the type of value")
        return result


OBJECT_NAMES[Hook] = lambda hook: "hook" if hook.name == "<lambda>" else hook.name


def _derivative(value: TensorProxy, hook: Hook, values: tuple):
    gradient = yield value
    return (call_hook(gradient, hook, values),)


hooked = Symbol(
    "hooked", lambda value, hook, values: like(value), module="ltorch", id="hooked", is_prim=True,
    tags=(OpTags.VIEW,), fn=lambda value, hook, values: value.view_as(value),
)  # fmt: skip
hooked.grad_rule = _derivative
aliases.shows.set(0, hooked)

call_hook = Symbol(
    "call_hook", lambda gradient, hook, values: like(gradient), module="ltorch", id="call_hook", is_prim=True,
    tags=(OpTags.DONT_DCE,), fn=lambda gradient, hook, values: hook(gradient, values),
)  # fmt: skip
derivatives.once_differentiable.set("a hook of a tensor, which runs as it is, is no operation", call_hook)


def node(c: Capture, value: TensorProxy) -> Proxy:
    """The value whose gradient is that of another one behind its hooks."""
    return c.engine.heads.get(value, value)


def register(c: Capture, f, args, kwargs) -> RemovableHandle:
    """`Tensor.register_hook` of a value of the program: hooks run in the order they were registered in, on the whole
    gradient."""
    arguments = dict(zip(("self", "hook"), args)) | kwargs
    value = c.recorder.latest(arguments["self"])
    if not value.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    operations = c.recorder.bound_symbols
    head = node(c, value)
    position = c.recorder.position(head)
    if c.recording.outer or position is None or operations[position] in c.engine.known:
        return c.refuse(
            "a hook is registered on an overwritten argument, inside of a transform of functions, or after a backward",
            "register it outside of the compiled function, or earlier",
        )
    below = renamed_value(head, c.recorder.context.names.make())
    c.engine.heads[value] = below
    hook = hooked.bind(below, Hook(arguments["hook"]), (), output=head, context=c.recorder.context.afterwards)
    hook.location = c.own_location()
    c.recorder.rewrite(
        [*operations[:position], operations[position].swap({head: below}), hook, *operations[position + 1 :]]
    )
    handle = Handle(collections.OrderedDict())
    handle.hook = hook.args[1]
    return handle


def remove(c: Capture, f, args, kwargs) -> None:
    """`remove` of the handle: the value is what it was before the hook was registered."""
    handle, operations = args[0], c.recorder.bound_symbols
    if handle.hook is None:
        return
    call = next((b for b in operations if b.sym is hooked and b.args[1] is handle.hook), None)
    if call is None or call in c.engine.known:
        return c.refuse("a hook is removed after a backward", "let the hook itself decide")
    below, head = call.args[0], call.output
    for value in [value for value, first in c.engine.heads.items() if first is below]:
        c.engine.heads[value] = head
        if value is head:
            del c.engine.heads[value]
    position = c.recorder.position(below)
    c.recorder.rewrite(
        [b.swap({below: head}) if i == position else b for i, b in enumerate(operations) if b is not call]
    )
    handle.hook = None


class Handle(RemovableHandle):
    """The result of `register_hook` inside of a program. hook: the hook, until the program removes it."""

    hook: Hook | None = None

    def remove(self) -> None:
        raise RuntimeError(
            "a hook that a compiled function registered is removed: register it outside of the compiled function, on "
            "its result, or let the hook itself decide"
        )

    def __exit__(self, *error) -> None:
        self.remove()


def retain(c: Capture, f, args, kwargs) -> None:
    """`Tensor.retain_grad` of one: a backward inside of the program leaves the gradient in `.grad`."""
    value = c.recorder.latest(args[0])
    if not value.requires_grad:
        raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
    if not is_leaf(c, args[0]):
        c.engine.retained[value] = args[0]


def run(c: Capture, operation: BoundSymbol, create_graph: bool) -> TensorProxy:
    """The result of a hook in a backward inside of the program, where it is interpreted."""
    gradient, hook, _ = operation.args
    return called(c, hook.function, gradient, create_graph)


@contextlib.contextmanager
def grad_mode(c: Capture, enabled: bool) -> Iterator[None]:
    """A grad mode in which a backward inside of the program runs."""
    before = torch.is_grad_enabled()
    compat.set_grad_enabled(enabled)
    c.synchronize()
    try:
        yield
    finally:
        compat.set_grad_enabled(before)
        c.synchronize()


def called(c: Capture, function: Callable, gradient: TensorProxy, create_graph: bool) -> TensorProxy:
    """The result of a hook, which is interpreted, for a gradient."""
    with grad_mode(c, create_graph):
        result = c.call(function, [gradient], {})
    if result is None:
        return c.recorder.latest(gradient)
    result = c.recorder.latest(result)
    if type(result) is not TensorProxy or tuple(result.shape) != tuple(gradient.shape):
        raise RuntimeError(f"hook {Hook(function).name!r} has changed the size of value")
    return result


HANDLERS = {Handle.remove: remove, Handle.__exit__: remove}
