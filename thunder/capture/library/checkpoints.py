"""Checkpoints (`torch.utils.checkpoint`): the backward recomputes their operations.

What eager PyTorch's second run does besides, such as updates of batch norm's statistics, no program repeats: a
checkpoint that writes is an eager call.
"""

from __future__ import annotations

import inspect

import torch
import torch.utils.checkpoint

from thunder.capture import containers, eager
from thunder.capture.calls import Entered
from thunder.capture.interface import Capture
from thunder.core.proxies import NumberProxy, TensorProxy, concrete, proxies_in
from thunder.interpreter import NULL


def call(c: Capture, f, args, kwargs):
    """Operations inside are marked: the backward recomputes their results, which are not saved."""
    function = inspect.unwrap(f)
    if function.__code__ in c.request.eager and (result := eager.called(c, function, args, kwargs)) is not NULL:
        return result
    with Entered(c, function, args, kwargs):
        return _read(c, function, args, kwargs)


def _read(c: Capture, function, args, kwargs):
    if kwargs.get("use_reentrant") is not False:  # PyTorch's Python checks the rest, and applies CheckpointFunction
        return c.enter(function, args, kwargs)
    options = set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters) - {"function", "args", "kwargs"} | {
        "preserve_rng_state"
    }
    kwargs = {k: v for k, v in kwargs.items() if k not in options}
    return _recomputed(c, args[0], args[1:], kwargs, is_reentrant=False)


def reentrant(c: Capture, function, args):
    """`torch.utils.checkpoint(use_reentrant=True)`. It is one autograd function of its arguments: where none of them
    requires grad nothing inside has a gradient, and where one does every result has."""
    c.enter(torch.utils.checkpoint.check_backward_validity, (args,), {})
    if not torch.is_grad_enabled() or not any(
        type(a) is TensorProxy and c.recorder.latest(a).requires_grad for a in args
    ):
        return c.enter(torch.no_grad()(function), args, {})
    result = _recomputed(c, function, args, {}, is_reentrant=True)
    for value in result if isinstance(result, tuple) else (result,):
        tensors = proxies_in(value, [])
        if any(t is not value for t in tensors) or any(
            not t.requires_grad and t.dtype.category >= 2 for t in tensors if type(t) is TensorProxy
        ):
            c.refuse(
                "torch.utils.checkpoint with use_reentrant=True gives tensors in a structure, or tensors without a "
                "gradient, which get another one there",
                "pass use_reentrant=False",
            )
    return result


def _recomputed(c: Capture, function, args, kwargs, is_reentrant: bool):
    """A call whose values a backward rematerializes, unless something happens in it that may not happen twice."""
    outer, before = c.recorder.context.checkpoint, _repeatable(c)
    c.recording.change(checkpoint=(*outer, object()))
    try:
        result = c.call(function, args, kwargs)
        has_gradient = any(type(p) is TensorProxy and p.requires_grad for p in proxies_in(result, []))
        if has_gradient and _repeatable(c) != before:
            # autograd runs the graph of a reentrant one as a whole: no function around it can be an eager call
            refuse = c.refuse_whole if is_reentrant else c.refuse
            refuse(
                "what runs in a checkpoint writes to tensors, numbers or containers, which eager PyTorch does once "
                "more in the backward",
                "leave it out of the checkpoint",
            )
    finally:
        c.recording.change(checkpoint=outer)
    return result


def _repeatable(c: Capture) -> tuple:
    """What a checkpoint that runs again in the backward would do again, and which would not come out the same: writes
    to tensors, to numbers that the program has read, and to containers of numbers or of a number of elements."""
    tensors = {base: id(c.recorder.memory.latest(base)) for base in c.tensors.mutated}
    written = ((key, v) for key, v in c.effects.held.items() if _is_number(v) and _was_read(c, *key))
    numbers = {key: id(v) if isinstance(v, NumberProxy) else v for key, v in written}
    changed = [_described(*change) for change in containers.changes(c)]
    return tensors, numbers, [change for change in changed if change is not None]


def _described(kind: str, original, source, key, value) -> tuple | None:
    """A change of a container from outside, to compare; None for an entry that would be the same the second time."""
    if kind == "item" and not _is_number(value):
        return None
    sized = isinstance(value, (list, set, dict))
    return kind, id(original), key, len(value) if sized else concrete(value) if _is_number(value) else None


def _is_number(value) -> bool:
    return type(value) in (int, float, bool) or isinstance(value, NumberProxy)


def _was_read(c: Capture, owner: int, name) -> bool:
    """Whether the program has looked for an attribute that it writes, also where its class has the value."""
    source = c.world.sources.get(owner)
    if source is None or name is None:
        return False
    world, places = c.world, (source, source.attr("__dict__"))
    return source.attr(name) in world.values or any(s.key == name and s.base in places for s, _, _ in world.observed)
