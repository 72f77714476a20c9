"""`torch.autograd.Function` inside a captured program: its forward and its backward are read, and become one operation
with that derivative."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from thunder import compat
from thunder.capture import containers
from thunder.capture.library.functional import separate
from thunder.core.proxies import Proxy, TensorProxy, like, map_structure, proxies_in
from thunder.core.pytree import tree_flatten
from thunder.core.rewrite import renamed
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, adopt, current_recorder
from thunder.ops import PRIMS
from thunder.transforms.levels import typed
from thunder.transforms.recompute import generator_of


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
        """Cotangents are always there: zeros where autograd would pass None, as materialized ones are."""


def apply(c, f, args, kwargs):
    """Handler of `Function.apply`."""
    cls, *inputs = args
    needs = tuple(isinstance(x, TensorProxy) and x.requires_grad for x in inputs)
    grad = torch.is_grad_enabled() and any(needs)
    ctx = FunctionContext(needs)
    with separate(c, False, decides=True) as forward:
        result = map_structure(c.recorder.latest, _forward(c, cls, ctx, inputs, kwargs))
        decides = any(OpTags.DECISION in operation.sym.tags for operation in forward.bound_symbols)
        # later decisions do not run it again, which may draw random numbers
        values = [c.path.value_of(p) for p in proxies_in(result, [])] if decides and grad else ()
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
    before = containers.state(c)
    # in eager, too, it runs after the forward's autocast is left
    with separate(c, False) as backward, compat.autocast_off(), _laid_out(c, forward, placeholders) as contiguous:
        gradients = map_structure(c.recorder.latest, c.call(_backward_of(cls), [ctx, *placeholders], {}))
    if containers.state(c) != before:
        c.refuse(
            f"the backward of {cls.__name__} writes to the outside, which happens when the backward runs",
            "let the backward only compute gradients, or register a hook (Tensor.register_hook), which may do more",
        )
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    program = _Function(cls, inputs, forward.bound_symbols, result, backward.bound_symbols, placeholders, gradients)
    program.contiguous = [p for p in placeholders if p in contiguous]
    program.symbol.nondifferentiable = {i for i, inner in enumerate(proxies_in(result, [])) if id(inner) in plain}
    operation = program.operation((*inputs, *program.free), outputs, c.recorder.context.afterwards)
    operation.location = c.own_location()
    c.recorder.bound_symbols.append(operation)
    for o, value in zip(proxies_in(outputs, []), values):
        c.path.knows(o, value, operation)
    return outputs


@contextlib.contextmanager
def _laid_out(c, forward: Recorder, placeholders: list[TensorProxy]) -> Iterator[set[TensorProxy]]:
    """A backward may ask how its tensors lie in memory: results of the forward, and cotangents. The set has those that
    it asks about, which are contiguous whenever it runs."""
    c.outer_recorders.append(forward)
    c.tensors.cotangents.update(dict.fromkeys(placeholders, False))
    asked: set[TensorProxy] = set()
    try:
        yield asked
    finally:
        asked.update(p for p in placeholders if c.tensors.cotangents.pop(p))
        c.outer_recorders.remove(forward)


def _forward(c, cls, ctx, inputs, kwargs):
    if cls.setup_context is not torch.autograd.Function.setup_context:
        result = c.call(cls.forward, inputs, kwargs)
        c.call(cls.setup_context, [ctx, tuple(inputs), result], {})
        return result
    return c.call(cls.forward, [ctx, *inputs], kwargs)


def _backward_of(cls):
    """The user's backward, without `once_differentiable` around it: it is captured without grad anyway."""
    return cls.backward.__wrapped__ if _is_once(cls.backward) else cls.backward


def _is_once(function) -> bool:
    """Whether a function is `once_differentiable` around another; other decorators, such as torch.amp.custom_bwd,
    have a meaning here."""
    return hasattr(function, "__wrapped__") and function.__globals__.get("__name__") == "torch.autograd.function"


class _Function:
    """The bound symbols of a Function's forward and backward, replayed wherever the operation is differentiated.

    free: the live-ins of both beside the inputs; the operation takes them as further arguments. contiguous:
    those placeholders of cotangents that the backward was told to be so.
    """

    def __init__(self, cls, inputs, forward, result, backward, placeholders, gradients):
        self.inputs, self.forward, self.result = inputs, forward, result
        self.backward, self.placeholders, self.gradients = backward, placeholders, gradients
        known = {
            *proxies_in(inputs, []),
            *placeholders,
            *(o for operation in (*forward, *backward) for o in operation.outputs),
        }
        read = [p for operation in (*forward, *backward) for p in operation.inputs] + proxies_in(
            [result, gradients], []
        )
        self.free = list(dict.fromkeys(p for p in read if p not in known))
        self.once = _is_once(cls.backward) or _is_once(getattr(cls.backward, "__wrapped__", None))
        self.contiguous: Sequence[TensorProxy] = ()
        self.symbol = Symbol(cls.__name__, id=("autograd_function", id(self)))
        self.symbol.grad_rule = self.rule
        tags = {tag for operation in forward for tag in operation.sym.tags}
        own = {OpTags.RANDOM_OP, OpTags.DECISION, OpTags.DONT_DCE} if OpTags.DECISION in tags else {OpTags.RANDOM_OP}
        self.symbol.tags = frozenset(tags & own)
        self.symbol.functional_derivative, self.symbol.own_derivative = self.functional_rule, True

    def operation(self, args: tuple, outputs, context) -> BoundSymbol:
        """The operation as one operation, the forward its decomposition."""
        operation = self.symbol.bind(*args, output=outputs, context=context)
        table = self.arguments(args)
        copies = renamed(self.forward, context.names, table)
        operations, operation.aliases = adopt(
            copies, map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, self.result), outputs
        )
        operation._subsymbols = tuple(operations)
        return operation

    def arguments(self, args: tuple) -> dict:
        """The values of the inputs and free values in this call."""
        return dict(zip([*proxies_in(self.inputs, []), *self.free], proxies_in(args, []), strict=True))

    def rule(self, *args):
        """The derivative: both recordings replayed."""
        recorder, table = current_recorder(), self.arguments(args)
        recorder.bound_symbols += renamed(self.forward, recorder.context.names, table)
        given = yield map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, self.result)
        return self.replayed(self.backward, table, given)

    def functional_rule(self, *args):
        """The derivative that can be differentiated again: the operation stays, so that its derivative is always this
        backward.

        Values between, which the backward saved, are recomputed, with the random numbers that were drawn. They are
        constants to it, as in PyTorch.
        """
        recorder, table = current_recorder(), self.arguments(args)
        context = recorder.context
        outputs = map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, self.result)
        for o in proxies_in(outputs, []):
            o.name = context.names.make()
        operation = self.operation(args, outputs, context)
        generators = self.generators()
        states = [PRIMS["get_rng_state"](*generator) for generator in generators]
        recorder.bound_symbols.append(operation)
        typed([operation])
        given = yield outputs
        made = {**table}
        before = [PRIMS["get_rng_state"](*generator) for generator in generators]
        self.set_generators(states)
        recorder.bound_symbols += renamed(self.forward, context.names, made)
        self.set_generators(before)
        made |= zip(proxies_in(self.result, []), proxies_in(outputs, []), strict=True)
        backward = [operation if self.once else _with_grad(operation) for operation in self.backward]
        return self.replayed(backward, made, given)

    def generators(self) -> list[tuple]:
        """(device, generator) of those that the forward draws from."""
        drawing = (operation for operation in self.forward if OpTags.RANDOM_OP in operation.sym.tags)
        return list(dict.fromkeys(generator_of(operation) for operation in drawing))

    def set_generators(self, states: Sequence) -> None:
        for state, generator in zip(states, self.generators(), strict=True):
            PRIMS["set_rng_state"](state, *generator)

    def replayed(self, operations, table: dict, given) -> tuple:
        """Writes the backward for the cotangents `given`. The gradients."""
        recorder = current_recorder()
        outputs = [
            g
            for x, g in zip(tree_flatten(self.result)[0], tree_flatten(given)[0], strict=True)
            if isinstance(x, TensorProxy)
        ]
        table |= {
            p: g.contiguous() if p in self.contiguous else g
            for p, g in zip(self.placeholders, outputs, strict=True)
            if g is not None
        }
        operations = renamed(operations, recorder.context.names, table)
        gradients = tuple(table.get(g, g) if isinstance(g, TensorProxy) else None for g in self.gradients)
        if self.once:
            operations, gradients = self.as_one(operations, gradients, recorder.context)
        recorder.bound_symbols += operations
        return gradients

    def as_one(self, operations: list[BoundSymbol], gradients: tuple, context) -> tuple[list[BoundSymbol], tuple]:
        """A backward marked with once_differentiable as one operation, which has no derivative."""
        symbol = Symbol(f"{self.symbol.name}_backward", id=("autograd_function_backward", id(self)))
        symbol.once_differentiable = f"the backward of {self.symbol.name} is marked with @once_differentiable"
        made = {o for operation in operations for o in operation.outputs}
        read = dict.fromkeys(
            p
            for p in [*(p for operation in operations for p in operation.inputs), *proxies_in(gradients, [])]
            if p not in made
        )
        outputs = map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, gradients)
        for o in proxies_in(outputs, []):
            o.name = context.names.make()
        operation = symbol.bind(*read, output=outputs, context=context)
        subsymbols, operation.aliases = adopt(operations, gradients, outputs)
        operation._subsymbols = tuple(subsymbols)
        return [operation], outputs


def _with_grad(operation: BoundSymbol) -> BoundSymbol:
    copy = operation.replace(subsymbols=operation.subsymbols)
    copy.aliases, copy.context = operation.aliases, operation.context and operation.context.replace(grad_enabled=True)
    return copy
