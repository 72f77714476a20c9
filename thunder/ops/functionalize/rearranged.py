"""Tensors that show their memory in another shape, or other memory, from some point of a program on."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.analysis import aliases
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import Symbol, current_recorder, detached, user_location
from thunder.errors import CaptureError
from thunder.ops import ltorch
from thunder.ops.functionalize.histories import grad_enabled, holding, with_history
from thunder.ops.functionalize.memory import REMEDY, Memory


def may_keep_history(memory: Memory, x: TensorProxy, symbol: Symbol, args: Sequence) -> bool:
    """Whether `x` may change its shape behind autograd's back: what is read of it later has the history that it
    had, element by element, so that the shape must stay, and no view may stand for the elements in another
    order."""
    x = memory.holder(x)
    with detached():
        unchanged = symbol(memory.latest(x), *args).shape == memory.latest(x).shape
    return unchanged and x not in memory.view_of and not memory.views.get(x)


def rearrange(memory: Memory, x: TensorProxy, symbol: Symbol, args: tuple, back: tuple[Symbol, tuple] | None) -> None:
    """`x` shows its memory as `symbol(x, *args)` from now on; `back` undoes that. Raises CaptureError for what came
    from outside and can not be undone.

    A view becomes the view of a view. What is no view stays what other tensors show, in its new shape: they show
    what undoes the change.
    """
    x = memory.holder(x)
    memory.declare(x)
    memory.active = True
    memory.decide(memory.base(x))
    if x in memory.view_of and (memory.view_of[x][0].context is None or memory.view_of[x][0].sym.name == "contiguous"):
        what = (
            "a result of contiguous() that is its argument"
            if memory.view_of[x][0].context
            else "an argument that shares memory with another one"
        )
        raise CaptureError(f"{symbol.name}_ is called on {what}", location=user_location(), remedy=REMEDY)
    context = current_recorder().context
    before, below, is_view = memory.latest(x), memory.views.get(x), x in memory.view_of
    with memory.no_views():
        value = with_history(before, symbol(before, *args))
    if is_view and "data" not in memory.detaching(x):
        memory.counted.add(memory.base(x))
    inner = like(before)
    memory.replace(x, inner)
    if is_view:
        memory.add_view(x, symbol.bind(inner, *args, output=x, context=context), inner)
    elif below:
        if back is None:
            raise CaptureError(
                f"{symbol.name}_ is called on a tensor that other tensors show",
                location=user_location(),
                remedy="use the form that makes a new tensor",
            )
        memory.add_view(inner, back[0].bind(value, *back[1], output=inner, context=context), x)
    if inner in memory.view_of:
        memory.stale.add(inner)
    if aliases.may_copy.of(symbol) and x in memory.view_of:
        memory.undecided.setdefault(memory.base(x), []).append(x)
    elif x not in memory.view_of:
        memory.rearranged.setdefault(x, []).append((symbol, args))
    memory.outdate(inner, None)
    memory.reform(x, value)


def shows_whole(memory: Memory, value: TensorProxy, x: TensorProxy) -> bool:
    """Whether `value` is `x`, or shows it as it is."""
    value = memory.holder(value)
    while value is not x and value in memory.view_of and memory.view_of[value][0].sym.name in ("detach", "data"):
        value = memory.view_of[value][1]
    return value is x


def may_rebind(memory: Memory, x: TensorProxy) -> bool:
    """Whether `x` may show other memory: it is no other name of an argument, and has the shape that it came in."""
    named = x in memory.view_of and memory.view_of[x][0].context is None
    others = any(memory.view_of[v][0].context is None for v in memory.views.get(x, ()))
    return not (named or others or x in memory.shared or x in memory.rearranged or memory.base(x) in memory.fixed)


def rebind(memory: Memory, x: TensorProxy, value: TensorProxy) -> TensorProxy:
    """`x` shows the memory of `value` from now on, with the history that it had. Returns what stands for the memory
    that it showed, which views that were made of it go on to show."""
    x, value = memory.holder(x), memory.holder(value)
    context, before = current_recorder().context, memory.latest(x)
    memory.active = True
    memory.decide(memory.base(x))
    old, inner = _same_elements(memory, before), like(before)
    inner.name, inner.requires_grad = context.names.make(), x.requires_grad
    memory.supersede(before)
    memory.replace(x, inner)
    for marks in (memory.counted, memory.filled):
        if x in marks:
            marks.add(inner)
    memory.formed.setdefault(inner, memory.formed.pop(x, x))
    if (history := memory.histories.pop(x, None)) is not None:
        memory.histories[inner] = history
    memory.current.pop(x, None)
    memory.current[inner], memory.owner[old] = old, inner
    memory.rebound.add(x)
    memory.add_view(x, ltorch.detach.bind(value, output=x, context=context), value)
    if before.requires_grad:
        memory.histories[x] = before
    memory.stale.add(x)
    memory.formed[x] = memory.latest(x)
    return inner


def _same_elements(memory: Memory, x: TensorProxy) -> TensorProxy:
    """Another name in the trace for a value."""
    with memory.no_views():
        shown = ltorch.detach(x)
        if x.requires_grad:
            with grad_enabled(True):
                shown = holding.record(current_recorder(), (x, shown), {}, like(shown))
    return shown
