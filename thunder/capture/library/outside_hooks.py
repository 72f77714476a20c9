"""Hooks of tensors from outside. A backward inside of the program calls those that they have, interpreted, with the
whole gradient. A program that registers one is refused: the original runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from thunder import compat
from thunder.capture import containers
from thunder.capture.interface import Capture
from thunder.capture.library import hooks
from thunder.capture.tensors import has_new_history, is_leaf
from thunder.core.proxies import TensorProxy


def register_hook(c: Capture, f, args, kwargs) -> Any:
    """`Tensor.register_hook`."""
    arguments = dict(zip(("self", "hook"), args)) | kwargs
    _refuse_outside(c, arguments["self"])
    return hooks.register(c, f, args, kwargs)


def retain_grad(c: Capture, f, args, kwargs) -> None:
    """`Tensor.retain_grad`."""
    if not is_leaf(c, args[0]):  # on a leaf it does nothing
        _refuse_outside(c, args[0])
    hooks.retain(c, f, args, kwargs)


def register_late(c: Capture, f, args, kwargs) -> None:
    """`Tensor.register_post_accumulate_grad_hook`, which leaves alone have."""
    _refuse(c)


def _refuse_outside(c: Capture, value) -> None:
    """Refuses a tensor that requires grad and has its history outside."""
    p = c.recorder.memory.holder(value)
    if p in c.tensors.real and not has_new_history(c, p) and c.recorder.latest(value).requires_grad:
        _refuse(c)


def _refuse(c: Capture) -> None:
    # an eager call would register the hook on what stands for the tensor inside of it
    c.refuse_whole(
        "a hook is registered on a tensor from outside, or retain_grad() is called on one",
        "register it outside of the compiled function",
    )


def called_before(c: Capture, p: TensorProxy, gradient: TensorProxy, create_graph: bool) -> TensorProxy:
    """The gradient of a leaf, as the hooks leave it."""
    for function in _functions(c, p, "_backward_hooks"):
        with _watched(c, p):
            gradient = hooks.called(c, function, gradient, create_graph)
    return gradient


def call_after(c: Capture, p: TensorProxy) -> None:
    """Call the hooks that want to know that the gradient has been accumulated."""
    for function in _functions(c, p, "_post_accumulate_grad_hooks"):
        with _watched(c, p):
            c.call(function, [p], {})


def _functions(c: Capture, p: TensorProxy, kind: str) -> list[Callable]:
    real, source = c.tensors.real[p]
    with compat.DisableTorchFunction():
        table = getattr(real, kind)
    return list(c.steps(c.call(dict.values, [c.read(table, source.attr(kind))], {}))) if table else []


@contextlib.contextmanager
def _watched(c: Capture, p: TensorProxy) -> Iterator[None]:
    """Around the call of a hook. Hooks of several tensors run in an order that the engine chooses: those that change
    the same objects, or run code on the host, are refused."""
    before = _changes(c)
    yield
    changed = {key for key, value in _changes(c).items() if before.get(key) != value}
    others = set().union(*(keys for other, keys in c.engine.changed_by_hooks if other is not p))
    if changed & others:
        c.refuse(
            "hooks of several tensors change one object in a backward, and their order is not known",
            "call backward outside of the compiled function",
        )
    c.engine.note_changed(p, changed)


def _changes(c: Capture) -> dict[Any, Any]:
    return containers.state(c) | {"host": len(c.dispatch.log)}
