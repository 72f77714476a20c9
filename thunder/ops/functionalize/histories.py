"""Histories: values that have other elements than what autograd knows them by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import BoundSymbol, Symbol, current_recorder, user_location
from thunder.errors import CaptureError
from thunder.ops.rules import splitting


@contextmanager
def grad_enabled(enabled: bool) -> Iterator[None]:
    """Operations are recorded with or without grad."""
    recorder = current_recorder()
    assert recorder is not None, "memory is that of a recording"
    context = recorder.context
    recorder.context = context.replace(grad_enabled=enabled)
    try:
        yield
    finally:
        recorder.context = context


def with_history(old: TensorProxy, new: TensorProxy) -> TensorProxy:
    """What a tensor that requires grad holds after a write under no_grad: other numbers, and the history that it
    had."""
    recorder = current_recorder()
    if not old.requires_grad or recorder is None or recorder.context.grad_enabled:
        return new
    with grad_enabled(True):
        return holding(old, new)


holding = Symbol(
    "holding", lambda old, new: like(new), module="ltorch", id="holding", decomposition=lambda old, new: new
)


splitting.rule.set(splitting.elementwise, holding)


@holding.vjp
def _(old, new):
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        raise CaptureError(
            "the data of a tensor that requires grad are set to another shape, dtype or device, and a gradient is "
            "asked for",
            location=user_location(),
            remedy="do it outside of the compiled function, or under torch.no_grad()",
        )
    g = yield holding(old, new)  # not `new` alone: a later derivative passes here as well
    return g, None


replacing = Symbol(
    "replacing", lambda old, new: like(new), module="ltorch", id="replacing", decomposition=lambda old, new: new
)


@replacing.vjp
def _(old, new):
    """A tensor that requires grad and is filled with what does not still requires grad, and passes none on."""
    yield new
    return None, None


def is_unseen(operation: BoundSymbol) -> bool:
    """Whether autograd does not see through a view, so that what is written to it is written behind its back."""
    detaches = operation.sym.detaches
    return (
        operation.sym.name in ("detach", "data")
        or detaches is not None
        and detaches(*operation.args, **operation.kwargs)
    )
