"""PyTorch's higher-order operators by their definitions: the program captures these functions in their place.

So `torch.cond` is a decision as `if` is, and the operators in Dynamo's graphs (`thunder.dynamo`) are captured as the
code that they stand for.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.capture.interface import Capture
from thunder.compat.names import AUTOCAST_MODE, HIGHER_ORDER


def cond(pred, true_fn, false_fn, operands=()):
    return true_fn(*operands) if pred else false_fn(*operands)


def while_loop(cond_fn, body_fn, carried_inputs, additional_inputs=()):
    carried = tuple(carried_inputs)
    while cond_fn(*carried, *additional_inputs):
        carried = tuple(body_fn(*carried, *additional_inputs))
    return carried


def associative_scan(combine_fn, xs, dim=0, reverse=False, combine_mode="pointwise"):
    """y[0] = x[0], y[i] = combine(y[i - 1], x[i])."""
    leaves, spec = compat.tree_flatten(xs)
    slices = list(zip(*[torch.unbind(x, dim) for x in leaves]))
    slices = slices[::-1] if reverse else slices
    out = [slices[0]]
    for x in slices[1:]:
        previous = compat.tree_unflatten(list(out[-1]), spec)
        out.append(tuple(compat.tree_leaves(combine_fn(previous, compat.tree_unflatten(list(x), spec)))))
    out = out[::-1] if reverse else out
    return compat.tree_unflatten([torch.stack(column, dim) for column in zip(*out)], spec)


def scan(combine_fn, init, xs, *, dim=0, reverse=False, keeps_dim=True):
    """carry, y[i] = combine(carry, x[i]): the last carry, and all y stacked, along `dim` where they have it."""
    leaves, spec = compat.tree_flatten(xs)
    slices = list(zip(*[torch.unbind(x, dim) for x in leaves]))
    carry, rows = init, []
    for x in slices[::-1] if reverse else slices:
        carry, y = combine_fn(carry, compat.tree_unflatten(list(x), spec))
        flat, row_spec = compat.tree_flatten(y)
        rows.append(flat)
    rows = rows[::-1] if reverse else rows
    dim = dim % leaves[0].dim() if keeps_dim else 0
    stacked = [torch.stack(column, dim if dim <= column[0].dim() else 0) for column in zip(*rows)]
    return carry, compat.tree_unflatten(stacked, row_spec)


def flex_attention(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
):
    """Attention whose scores `score_mod(score, batch, head, row, column)` changes, and `block_mask` leaves out.

    Computed in float32, in float64 for such inputs; a row without any score is 0.
    """
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    key, value = (x.expand(query.size(0), *x.shape[1:]) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    scores = scores.to(torch.float64 if query.dtype is torch.float64 else torch.float32)
    places = [torch.arange(n, device=query.device) for n in scores.shape]
    if score_mod is not None:
        scores = _at_places(score_mod, (0,))(scores, *places)
    if block_mask is not None:
        scores = torch.where(_at_places(block_mask.mask_mod)(*places), scores, -math.inf)
    empty = scores.amax(-1, keepdim=True) == -math.inf
    weights = torch.where(empty, 0.0, scores.softmax(-1))
    out = weights.to(query.dtype) @ value
    return (out, torch.where(empty[..., 0], -math.inf, scores.logsumexp(-1))) if return_lse else out


def _at_places(function, first=()):
    """A function of a place of a four-dimensional tensor, for all places."""
    for i in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=(*first, *(0 if i == j else None for j in range(4))))
    return function


def _wrap(function, *args, **kwargs):
    return function(*args, **kwargs)


def _invoke_subgraph(subgraph, identifier, *operands):
    return subgraph(*operands)


def _with_grad_mode(enabled, function, *args, **kwargs):
    with torch.set_grad_enabled(enabled):
        return function(*args, **kwargs)


def _with_autocast(device_type, dtype, enabled, cache_enabled, function, *args, **kwargs):
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return function(*args, **kwargs)


def _enter_autocast(*settings):
    mode = torch.autocast(*settings)
    mode.__enter__()
    return mode


def _exit_autocast(mode):
    mode.__exit__(None, None, None)


def _checkpointed(function, *args, **kwargs):
    return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)


def _function_apply(forward_graph, backward_graph, *args, **options):
    """An autograd.Function as Dynamo writes it: `forward_graph` gives (outputs, saved values). Before torch 2.12 both
    graphs take a context first, which they do not use."""
    context = (None,) * (len(forward_graph.graph.find_nodes(op="placeholder")) - len(args))

    def forward(ctx, *inputs):
        outputs, ctx.residuals = forward_graph(*context, *inputs)
        constant = options["non_differentiable_idx"]
        ctx.mark_non_differentiable(*[outputs[i] for i in constant])
        return outputs

    def backward(ctx, *gradients):
        return backward_graph(*context, *gradients, *ctx.residuals)

    return _function(forward, backward).apply(*args)


def _function(forward, backward) -> Any:
    """It runs natively: a program makes no classes."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Apply", (torch.autograd.Function,), methods)


# operators that graphs hold, by name
_DEFINITIONS = {
    "cond": cond, "while_loop": while_loop, "wrap": _wrap, "invoke_subgraph": _invoke_subgraph,
    "wrap_with_set_grad_enabled": _with_grad_mode, "wrap_with_autocast": _with_autocast,
    "tag_activation_checkpoint": _checkpointed, "autograd_function_apply": _function_apply,
}  # fmt: skip


def definition_of(operator):
    """The function that a higher-order operator stands for, None where there is none here."""
    known = compat.HigherOrderOperator in type(operator).__mro__  # an abstract base class asks all that come from it
    return _DEFINITIONS.get(operator.__name__) if known else None


def _defined(function):
    return lambda c, f, args, kwargs: c.enter(function, args, kwargs)


def _scan(c: Capture, f, args, kwargs):
    return c.enter(scan, args, {**kwargs, "keeps_dim": "dim" in kwargs and compat.scan_keeps_dim(f)})


def _flex_attention(c: Capture, f, args, kwargs):
    options = {**kwargs}
    if options.pop("return_aux", None) is not None:
        c.refuse("flex_attention is called with return_aux=", "pass return_lse=True, or leave them out")
    return c.enter(flex_attention, args, options)


def handlers() -> dict:
    """Handlers of functions in modules that few programs import."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return {} if module is None else {module.flex_attention: _flex_attention}


# functions: by module and name. Users call the first, Dynamo's graphs the others
BY_NAME = {
    **{(f"{HIGHER_ORDER}.{f.__name__}", f.__name__): _defined(f) for f in (cond, while_loop, associative_scan)},
    (f"{HIGHER_ORDER}.scan", "scan"): _scan,
    **{(AUTOCAST_MODE, f.__name__): _defined(f) for f in (_enter_autocast, _exit_autocast)},
}
