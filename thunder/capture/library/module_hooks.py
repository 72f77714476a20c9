"""Full backward hooks of modules, and their backward pre-hooks.

A module's inputs pass `entered`, its result `left`, and a token leads from one to the other: the gradient of the token
is that of the result, which the hooks want to see beside those of the inputs.

    x0, token = entered((x,), t1)                # t1: like the result
    t1 = linear(x0, w, b)
    t2 = left(t1, token, (), ())
    t4 = call_pre_hooks(t3, ...)                 # backward: t3 is the cotangent of t2
    (t6,) = call_hooks((t5,), t4, ...)           # t5, the cotangent of x0
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch.utils.hooks import BackwardHook

from thunder.capture.library.hooks import Hook, grad_mode
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import BoundSymbol, OpTags, Symbol

_WARNING = (
    "Full backward hook is firing when gradients are computed with respect to module outputs since no inputs require "
    "gradients. See https://docs.pytorch.org/docs/main/generated/torch.nn.Module.html#torch.nn.Module."
    "register_full_backward_hook for more details."
)


def _pack(places: Sequence[int], values: Sequence, count: int) -> tuple:
    found: list = [None] * count
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return tuple(found)


def _called(call, functions: Sequence, before: Sequence, now: tuple, what: str) -> tuple:
    """`now`, as hooks leave it. call: calls one."""
    for function in functions:
        found = call(function, [*before, now])
        if found is None:
            continue
        if not isinstance(found, (tuple, list)) or len(found) != len(now):
            raise RuntimeError(
                f"Backward {what}, got {len(found) if isinstance(found, (tuple, list)) else 1}, but expected {len(now)}"
            )
        now = tuple(found)
    return now


def _hooks(call, functions: Sequence, inputs: tuple, outputs: tuple) -> tuple:
    return _called(
        lambda f, given: call(f, [given[1], given[0]]), functions, [outputs], inputs,
        "hook returned an invalid number of grad_input",
    )  # fmt: skip


def _pre_hooks(call, functions: Sequence, outputs: tuple) -> tuple:
    return _called(call, functions, [], outputs, "pre hook returned an invalid number of grad_output")


def _natively(hook_and_values: tuple, given: list):
    hook, values = hook_and_values
    return hook.rebuilt(values)(*given)


# call: calls a hook, given with the values that it is rebuilt of, natively or by the interpreter
def _run_pre_hooks(gradient, place: tuple, hooks: tuple, values: tuple, call=_natively):
    """The gradient of a module's result. place: (index, number of results)."""
    packed = _pack(place[:1], [gradient], place[1])
    return _pre_hooks(call, list(zip(hooks, values, strict=True)), packed)[place[0]]


def _run_hooks(gradients: tuple, output, places: tuple, place: tuple, hooks: tuple, values: tuple, call=_natively):
    """The gradients of a module's inputs. places: (their indices, number of inputs); place: as for the result."""
    packed = _pack(places[0], gradients, places[1]), _pack(place[:1], [output], place[1])
    found = _hooks(call, list(zip(hooks, values, strict=True)), *packed)
    return tuple(found[i] for i in places[0])


def _run_hooks_alone(output, count: int, place: tuple, hooks: tuple, values: tuple, call=_natively):
    """Hooks of a module none of whose inputs requires grad."""
    if call is _natively:
        warnings.warn(_WARNING, stacklevel=2)
    for one in zip(hooks, values, strict=True):
        _check_alone(call(one, [(None,) * count, _pack(place[:1], [output], place[1])]))
    return output


def _check_alone(found) -> None:
    if found is not None and not (isinstance(found, tuple) and all(x is None for x in found)):
        raise RuntimeError(
            "Backward hook for Modules where no input requires gradient should always return None or None for all "
            "gradients."
        )


def _effect(name: str, meta, function) -> Symbol:
    made = Symbol(name, meta, module="ltorch", id=name, is_prim=True, tags=(OpTags.DONT_DCE,), fn=function)
    made.once_differentiable = "a hook of a module, which runs as it is, is no operation"
    return made


call_pre_hooks = _effect("call_pre_hooks", lambda gradient, *rest: like(gradient), _run_pre_hooks)
call_hooks = _effect("call_hooks", lambda gradients, *rest: tuple(map(like, gradients)), _run_hooks)
call_hooks_alone = _effect("call_hooks_alone", lambda gradient, *rest: like(gradient), _run_hooks_alone)
CALLS = {call_pre_hooks, call_hooks, call_hooks_alone}


def _types(value, shape, dtype, device, *rest) -> tuple[TensorProxy, TensorProxy]:
    return like(value), TensorProxy(shape=shape, dtype=dtype, device=device)


entered = Symbol(
    "entered", _types, module="ltorch", id="entered", is_prim=True, tags=(OpTags.VIEW,),
    fn=lambda value, *rest: (value.view_as(value), None),
)  # fmt: skip
left = Symbol(
    "left", lambda result, *rest: like(result), module="ltorch", id="left", is_prim=True, tags=(OpTags.VIEW,),
    fn=lambda result, *rest: result.view_as(result),
)  # fmt: skip
entered.shows = left.shows = 0


def _entered(value, shape, dtype, device, places, place, hooks, values):
    gradient, output = yield entered(value, shape, dtype, device, places, place, hooks, values)
    return (call_hooks((gradient,), output, places, place, hooks, values)[0],)


def _left(result, token, count, place, pre_hooks, pre_values, hooks, values):
    gradient = yield result
    if pre_hooks:
        gradient = call_pre_hooks(gradient, place, pre_hooks, pre_values)
    if hooks:
        gradient = call_hooks_alone(gradient, count, place, hooks, values)
    return gradient, gradient


entered.grad_rule, left.grad_rule = _entered, _left


# ---------------------------------------------------------------- capture


def set_up_inputs(c, f, args, kwargs):
    """`BackwardHook.setup_input_hook`."""
    module_hook, given = args
    module_hook.n_inputs = len(given)
    c.keep[id(module_hook)] = module_hook
    place = _place(c, given)
    if place is None:
        c.engine.entered[id(module_hook)] = None
        return given
    value = c.recorder.latest(given[place])
    names, context = c.recorder.context.names, c.recorder.context.afterwards
    inner, token = like(value), like(value)
    for made, prefix in ((inner, "t"), (token, "token")):
        made.name, made.requires_grad = names.make(prefix), True
    hooks = _all(module_hook, module_hook.user_hooks)
    kind = value.shape, value.dtype, value.device  # the result's is known when it is there
    operation = entered.bind(
        value, *kind, ((place,), len(given)), (0, 1), hooks, ((),) * len(hooks), output=(inner, token), context=context
    )
    operation.location = c.own_location()
    c.recorder.bound_symbols.append(operation)
    c.engine.entered[id(module_hook)] = token
    c.recorder.memory.fixed[inner] = "the input of a module that has full backward hooks is written to"
    return (*given[:place], inner, *given[place + 1 :])


def set_up_outputs(c, f, args, kwargs):
    """`BackwardHook.setup_output_hook`."""
    module_hook, result = args
    is_tuple = isinstance(result, tuple)
    given = result if is_tuple else (result,)
    place, token = _place(c, given), c.engine.entered.pop(id(module_hook))
    if place is None:
        return result
    value = c.recorder.latest(given[place])
    made = like(value)
    made.name, made.requires_grad = c.recorder.context.names.make(), True
    pre_hooks = _all(module_hook, module_hook.user_pre_hooks)
    alone = _all(module_hook, module_hook.user_hooks) if token is None else ()
    at = place, len(given)
    operation = left.bind(
        value, token, module_hook.n_inputs, at, pre_hooks, ((),) * len(pre_hooks), alone, ((),) * len(alone),
        output=made, context=c.recorder.context.afterwards,
    )  # fmt: skip
    operation.location = c.own_location()
    operations = c.recorder.bound_symbols
    if token is not None:  # which has the gradient of the result
        at_inputs = c.recorder.place(token)
        token.shape, token.dtype, token.device = kind = value.shape, value.dtype, value.device
        first, _, _, _, places, _, *hooks = operations[at_inputs].args
        operations[at_inputs] = operations[at_inputs].replace(args=(first, *kind, places, at, *hooks))
    operations.append(operation)
    c.recorder.memory.fixed[made] = "the result of a module that has full backward hooks is written to"
    return (*given[:place], made, *given[place + 1 :]) if is_tuple else made


def _all(module_hook, functions) -> tuple[Hook, ...]:
    return tuple(Hook(functools.partial(function, module_hook.module)) for function in functions)


def _place(c, given) -> int | None:
    """The index of the tensor among the arguments or results of a module; None where autograd does not see it."""
    places = [i for i, x in enumerate(given) if isinstance(x, (TensorProxy, torch.Tensor))]
    if not torch.is_grad_enabled() or not any(c.lift(given[i]).requires_grad for i in places):
        return None
    if len(places) > 1 or type(given) is not tuple or c.outer_recorders:
        c.refuse(
            "a module with full backward hooks is called with several tensors, gives several, or is called in a "
            "transform of functions",
            "remove the hooks, or register hooks on tensors",
        )
    return places[0]


def run(c, operation: BoundSymbol, create_graph: bool):
    """The result of hooks in a backward inside of the program, where they are interpreted."""
    assert operation.sym.fn is not None, "hooks are called by a function"
    with grad_mode(c, create_graph):
        return operation.sym.fn(*operation.args, call=lambda one, given: c.call(one[0].function, list(given), {}))


HANDLERS = {BackwardHook.setup_input_hook: set_up_inputs, BackwardHook.setup_output_hook: set_up_outputs}
