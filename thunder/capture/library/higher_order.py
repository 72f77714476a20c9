"""PyTorch's higher-order operators by their definitions: the program captures these functions in their place.

So `torch.cond` is a decision as `if` is, and what Dynamo writes into its graphs (`thunder.dynamo`) is captured as the
code that it was written for.
"""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.compat.names import AUTOCAST_MODE, HIGHER_ORDER

__all__ = ["BY_NAME", "definition_of"]


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


def scan(combine_fn, init, xs, *, dim=0, reverse=False):
    """carry, y[i] = combine(carry, x[i]): the last carry, and all y stacked."""
    leaves, spec = compat.tree_flatten(xs)
    slices = list(zip(*[torch.unbind(x, dim) for x in leaves]))
    carry, rows = init, []
    for x in slices[::-1] if reverse else slices:
        carry, y = combine_fn(carry, compat.tree_unflatten(list(x), spec))
        flat, row_spec = compat.tree_flatten(y)
        rows.append(flat)
    rows = rows[::-1] if reverse else rows
    return carry, compat.tree_unflatten([torch.stack(column, dim) for column in zip(*rows)], row_spec)


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

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs, ctx.kept = forward_graph(*context, *inputs)
            constant = options["non_differentiable_idx"]
            ctx.mark_non_differentiable(*[outputs[i] for i in constant])
            return outputs

        @staticmethod
        def backward(ctx, *gradients):
            return backward_graph(*context, *gradients, *ctx.kept)

    return Apply.apply(*args)


# operators that graphs hold, by name
_DEFINITIONS = {
    "cond": cond, "while_loop": while_loop, "wrap": _wrap, "invoke_subgraph": _invoke_subgraph,
    "wrap_with_set_grad_enabled": _with_grad_mode, "wrap_with_autocast": _with_autocast,
    "tag_activation_checkpoint": _checkpointed, "autograd_function_apply": _function_apply,
}  # fmt: skip


def definition_of(operator):
    """The function that a higher-order operator stands for, None where there is none here."""
    return _DEFINITIONS.get(operator.__name__) if isinstance(operator, compat.HigherOrderOperator) else None


def _defined(function):
    return lambda c, f, args, kwargs: c.enter(function, args, kwargs)


# functions: by module and name. Users call the first, Dynamo's graphs the others
BY_NAME = {
    **{(f"{HIGHER_ORDER}.{f.__name__}", f.__name__): _defined(f) for f in (cond, while_loop, associative_scan, scan)},
    **{(AUTOCAST_MODE, f.__name__): _defined(f) for f in (_enter_autocast, _exit_autocast)},
}
