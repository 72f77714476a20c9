"""Hooks of tensors from outside: those that a program registers, and those that its own backward finds.

A backward inside of the program calls them, interpreted, with the whole gradient. Those that are registered in the end
stay on the tensors, where the epilogue puts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.hooks import RemovableHandle

from thunder import compat
from thunder.capture import containers
from thunder.capture.library import hooks
from thunder.capture.library.gradients import first_proxy
from thunder.capture.tensors import has_new_history, is_leaf
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import recording
from thunder.interpreter.attributes import cell_value
from thunder.runtime.retained import retain as retain_result

_TABLES = {"register_hook": "_backward_hooks", "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks"}


class OutsideHandle(RemovableHandle):
    """The result of a registration inside of a program. The epilogue makes the tensor's own of it."""

    def __init__(self, tensor: TensorProxy, kind: str, function: Callable):
        self.tensor, self.kind, self.function, self.is_removed = tensor, kind, function, False

    def remove(self) -> None:
        self.is_removed = True

    def __exit__(self, *error) -> None:
        self.remove()


def register_hook(c, f, args, kwargs) -> RemovableHandle:
    """`Tensor.register_hook`."""
    given = dict(zip(("self", "hook"), args)) | kwargs
    p = _of_outside(c, given["self"])
    return hooks.register(c, f, args, kwargs) if p is None else register(c, p, "register_hook", given["hook"])


def retain_grad(c, f, args, kwargs) -> None:
    """`Tensor.retain_grad`."""
    p = _of_outside(c, args[0])
    if p is None:
        hooks.retain(c, f, args, kwargs)
        return
    with compat.DisableTorchFunction():
        if not c.tensors.real[p][0].is_leaf:  # on a leaf it does nothing
            c.engine.outside_retained[p] = None


def _of_outside(c, value) -> TensorProxy | None:
    """The tensor that requires grad and has its history outside; None for a value of the program."""
    p = c.recorder.memory.holder(value)
    is_outside = p in c.tensors.real and not has_new_history(c, p) and c.recorder.latest(value).requires_grad
    return p if is_outside else None


def register(c, p: TensorProxy, kind: str, function: Callable) -> OutsideHandle:
    """`p.register_hook(function)`, or another kind of registration."""
    placement = c.tensors.placements.get(p)
    if c.outer_recorders or placement is not None and not placement.is_whole or p in c.tensors.frozen:
        c.refuse(
            "a hook is registered on a frozen tensor, inside of a transform, or on a tensor that ranks hold parts of",
            "register it outside of the compiled function",
        )
    handle = OutsideHandle(p, kind, function)
    c.engine.outside_hooks.append(handle)
    return handle


def register_late(c, f, args, kwargs) -> OutsideHandle:
    """`Tensor.register_post_accumulate_grad_hook`."""
    given = dict(zip(("self", "hook"), args)) | kwargs
    p, value = c.recorder.memory.holder(given["self"]), c.recorder.latest(given["self"])
    if not value.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if not is_leaf(c, p):
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    return register(c, p, "register_post_accumulate_grad_hook", given["hook"])


def remove(c, f, args, kwargs) -> None:
    """`remove` of the handle."""
    args[0].is_removed = True


def called_before(c, p: TensorProxy, gradient: TensorProxy, create_graph: bool) -> TensorProxy:
    """The gradient of a leaf, as the hooks leave it."""
    for function in _functions(c, p, "register_hook"):
        with _watched(c, p):
            gradient = hooks.called(c, function, gradient, create_graph)
    return gradient


def call_after(c, p: TensorProxy) -> None:
    """Call the hooks that want to know that the gradient has been accumulated."""
    for function in _functions(c, p, "register_post_accumulate_grad_hook"):
        with _watched(c, p):
            c.call(function, [p], {})


def _functions(c, p: TensorProxy, kind: str) -> list[Callable]:
    real, source = c.tensors.real[p]
    with compat.DisableTorchFunction():
        table = getattr(real, _TABLES[kind])
    before = [] if not table else list(c.steps(c.call(dict.values, [c.read(table, source.attr(_TABLES[kind]))], {})))
    registered = (h for h in c.engine.outside_hooks if h.kind == kind and not h.is_removed)
    return before + [h.function for h in registered if first_proxy(c, h.tensor) is p]


@contextlib.contextmanager
def _watched(c, p: TensorProxy) -> Iterator[None]:
    """Around the call of a hook. Hooks of several tensors run in an order that the engine chooses: those that change
    the same objects, or run code on the host, are refused."""
    before = _changes(c)
    yield
    changed = {key for key, value in _changes(c).items() if before.get(key) != value}
    others = set().union(*(keys for other, keys in c.engine.changed_by_hooks if other is not p))
    if changed & others:
        c.refuse(
            "hooks of several tensors change the same object in a backward inside of it, in an order that is not known",
            "call backward outside of the compiled function",
        )
    c.engine.changed_by_hooks.append((p, changed))


def _changes(c) -> dict[Any, Any]:
    found = containers.state(c)
    found["host"] = len(c.path.log)
    for hook in c.engine.outside_hooks:
        for cell in getattr(hook.function, "__closure__", None) or ():
            inner = cell_value(cell)
            found[id(cell)] = id(inner)
            if isinstance(inner, (list, dict, set)):
                found[id(inner)] = len(inner)
    return found


# ---------------------------------------------------------------- the epilogue


def write_registered(writer: Any) -> None:
    """Register the hooks that the program leaves on tensors from outside, in its order. writer: an `EpilogueWriter`."""
    leaves = writer.c.tensors.leaves
    for handle in writer.c.engine.outside_hooks:
        p = handle.tensor
        stays = p in leaves and id(p) not in writer.values
        if id(handle) not in writer.built and not handle.is_removed and not stays:
            writer.variable(handle, f"{writer.itself(p)}.{handle.kind}({writer.build(handle.function)})")


def write(writer: Any) -> None:
    """Write statements for hooks, and for `retain_grad()` of arguments and results."""
    c = writer.c
    write_registered(writer)
    for value, p in c.engine.retained.items():
        with recording(c.recorder):
            leaves = id(value) in writer.values and c.recorder.latest(p) is value
        if value not in c.engine.ran and leaves and c.recorder.memory.base(p) not in c.tensors.written_after:
            c.engine.ran.add(value)
            cell = hooks.retain_outside(c, value)
            writer.lines.append(f"{writer.pin(retain_result)}({writer.value(value)}, {writer.value(cell)})")
    for p in c.engine.outside_retained:
        writer.lines.append(f"{writer.itself(p)}.retain_grad()")


HANDLERS = {OutsideHandle.remove: remove, OutsideHandle.__exit__: remove}
