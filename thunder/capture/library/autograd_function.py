"""`torch.autograd.Function` inside a captured program: its forward and its backward are read, and become one operation
with that derivative. Where a transform of torch.func asks for a `vmap` or a `jvp` of its own, the call is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thunder import compat
from thunder.capture import containers
from thunder.capture.interface import Capture
from thunder.capture.library.functional import separate
from thunder.core.proxies import Proxy, TensorProxy, leaves, like, map_structure, proxies_in
from thunder.core.regions import leading_to
from thunder.core.rewrite import renamed
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, adopt, current_recorder, primitive
from thunder.errors import DerivativeError
from thunder.ops import ltorch, prims
from thunder.ops.gradients import check_count, check_kind, fitted
from thunder.ops.rules import derivatives
from thunder.transforms.levels import typed
from thunder.transforms.recompute import generator_of


class FunctionContext:
    """The `ctx` of a Function: attributes and saved tensors, as the program leaves them."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self._not_differentiable: tuple = ()
        self._dirty: tuple = ()
        self._materializes = True

    def save_for_backward(self, *tensors):
        for i, tensor in enumerate(tensors):
            if tensor is not None and not isinstance(tensor, (Proxy, torch.Tensor)):
                kind = type(tensor).__name__
                raise TypeError(f"save_for_backward can only save variables, but argument {i} is of type {kind}")
        self.saved_tensors = tensors

    save_for_forward = save_for_backward

    def mark_non_differentiable(self, *tensors):
        self._not_differentiable = tensors

    def mark_dirty(self, *tensors):
        self._dirty = tensors

    def set_materialize_grads(self, value):
        self._materializes = value


@primitive(lambda text, wanted, cotangents: tuple(like(x) for x in wanted))
def no_gradients(text: str, wanted: tuple, cotangents: tuple) -> tuple:
    """The gradients of a backward that raises when it runs."""
    raise RuntimeError(text)


def apply(c: Capture, f, args, kwargs):
    """Handler of `Function.apply`."""
    cls, *arguments = args
    inputs = [c.recorder.latest(x) if type(x) is TensorProxy else x for x in arguments]
    needs = tuple(isinstance(x, TensorProxy) and x.requires_grad for x in inputs)
    grad = torch.is_grad_enabled() and any(needs)
    for name, is_asked in (
        ("vmap", any(x.maps for x in c.recording.levels)),
        ("jvp", any(x.pushes for x in c.recording.levels)),
    ):
        if is_asked and getattr(cls, name) is not getattr(torch.autograd.Function, name):
            c.refuse(f"{cls.__name__} has a {name} of its own, which a transform of torch.func asks for")
    ctx, before = FunctionContext(needs), dict(c.recorder.memory.current)
    with separate(c, False, decides=True) as forward:
        returned = _forward(c, cls, ctx, arguments, kwargs)
        result = map_structure(c.recorder.latest, returned)
        plain = {id(c.recorder.latest(t)) for t in ctx._not_differentiable}
    if not grad:
        c.recorder.add(forward.bound_symbols)
        return returned if ctx._dirty else result
    _check_writes(c, cls, forward, before)
    function = _Function(cls, inputs, forward, result)
    outputs = _outputs(c, function, {id(x) for x in proxies_in(function.result, [])} - plain)
    function.read_backwards(c, ctx, outputs)
    values = _values_known(c, function)
    function.close()
    function.symbol.nondifferentiable = {i for i, o in enumerate(proxies_in(outputs, [])) if not o.requires_grad}
    operation = function.operation((*inputs, *function.free), outputs, c.recorder.context.afterwards)
    operation.location = c.own_location()
    c.recorder.add([operation])
    for o, value in zip(proxies_in(outputs, []), values):
        c.path.knows(o, value, operation)
    return outputs


def _outputs(c: Capture, function: _Function, connected: set[int]):
    """The results of the operation, with names of their own. connected: the ids of the forward's results that have a
    gradient, where their dtype has one."""
    outputs = map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, function.result)
    for inner, o in zip(proxies_in(function.result, []), proxies_in(outputs, []), strict=True):
        o.name = c.recorder.context.names.make()
        o.requires_grad = id(inner) in connected and o.dtype.category >= 2
    return outputs


def _values_known(c: Capture, function: _Function) -> Sequence:
    """The values of the forward's results where it decides by values: later decisions do not run it again, which may
    draw random numbers."""
    if not any(OpTags.DECISION in operation.sym.tags for operation in function.forward):
        return ()
    with function.behind_forward(c):
        return [c.path.value_of(p) for p in proxies_in(function.result, [])]


def _check_writes(c: Capture, cls, forward: Recorder, before: dict) -> None:
    """Refuses a forward that has written to the program's tensors: the operation would have to come before the write,
    and the tensor to be its result."""
    own = {o for operation in forward.bound_symbols for o in operation.outputs}
    for target, value in c.recorder.memory.current.items():
        if value is not before.get(target, target) and target not in own:
            c.refuse(f"{cls.__name__} writes to a tensor that it does not make", "let it return a new tensor")


def _forward(c: Capture, cls, ctx, inputs, kwargs):
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


_MOST_VARIANTS = 4  # results: a backward that is told of missing cotangents is read for each of 15 sets of them


class _Read(NamedTuple):
    """A backward: its operations, and for each input what it gives."""

    operations: list[BoundSymbol]
    results: tuple


class _Function:
    """The bound symbols of a Function's forward and backward, replayed wherever the operation is differentiated.

    inputs: of `apply`. result: what the forward returns. free: the live-ins of all beside the inputs; the operation
    takes them as further arguments. cotangents: placeholders, None for results that are not differentiable.
    contiguous: those that the backward was told to be so. backwards: by the places of the cotangents that are
    missing; {(): ...} alone where these are zeros.
    """

    def __init__(self, cls, inputs: list, forward: Recorder, result):
        self.cls, self.inputs, self.result = cls, inputs, result
        self.recorder, self.forward = forward, forward.bound_symbols
        self.cotangents: list[TensorProxy | None] = []
        self.contiguous: set[TensorProxy] = set()
        self.backwards: dict[tuple[int, ...], _Read] = {}
        self.free: list[Proxy] = []
        self.once = _is_once(cls.backward) or _is_once(getattr(cls.backward, "__wrapped__", None))
        self.symbol = Symbol(cls.__name__, id=("autograd_function", id(self)))
        self.symbol.own_derivative = True

    # --- reading
    @contextlib.contextmanager
    def behind_forward(self, c: Capture) -> Iterator[Recorder]:
        """Lines are recorded apart, that read results of the forward, and may ask about them."""
        with separate(c, False, decides=True) as recorder:
            with c.recording.behind(self.recorder):
                yield recorder

    def read_backwards(self, c: Capture, ctx: FunctionContext, outputs) -> None:
        """outputs: the results in the program around, which say what is differentiable."""
        for o in proxies_in(outputs, []):
            placeholder = like(o) if o.requires_grad else None
            if placeholder is not None:
                placeholder.name = c.recorder.context.names.make()
            self.cotangents.append(placeholder)
        self.backwards[()] = self._read_backward(c, ctx, outputs, ())
        places = [i for i, g in enumerate(self.cotangents) if g is not None]
        if ctx._materializes or len(places) < 2:
            return
        if len(places) > _MOST_VARIANTS:
            c.refuse(
                f"{self.cls.__name__}, of more than {_MOST_VARIANTS} results, is told which cotangents are missing",
                "leave set_materialize_grads(False) out",
            )
        for n in range(1, len(places)):
            for missing in itertools.combinations(places, n):
                self.backwards[missing] = self._read_backward(c, ctx, outputs, missing)

    def _read_backward(self, c: Capture, ctx: FunctionContext, outputs, missing: tuple[int, ...]) -> _Read:
        """Records the Function's backward for cotangents of which some are missing."""
        name, before, attributes = self.cls.__name__, containers.state(c), dict(vars(ctx))
        known = [p for p in self.cotangents if p is not None]
        # in eager, too, it runs after the forward's autocast is left
        with self.behind_forward(c) as backward, compat.autocast_off():
            c.tensors.await_cotangents(known)
            try:
                cotangents = self._cotangents(ctx, outputs, missing)
                returned = map_structure(c.recorder.latest, c.call(_backward_of(self.cls), [ctx, *cotangents], {}))
                gradients = self._checked(c, returned)
            except c.uncatchable:
                raise
            except Exception as error:
                if not isinstance(error, DerivativeError) and not missing:
                    raise
                gradients = self._raising(str(error), known)
            finally:
                self.contiguous.update(p for p in known if c.tensors.is_asked_for_layout(p))
        if containers.state(c) != before:
            c.refuse(
                f"the backward of {name} writes to the outside, which happens when the backward runs",
                "let the backward only compute gradients, or register a hook (Tensor.register_hook), which may do more",
            )
        if any(v is not attributes.get(k) for k, v in vars(ctx).items() if v is not None):
            c.refuse(
                f"the backward of {name} writes to its ctx, which a second backward through the same graph reads",
                "let the backward only compute gradients",
            )
        vars(ctx).update(attributes)
        return _Read(self._without_decisions(c, backward.bound_symbols), gradients)

    def _cotangents(self, ctx: FunctionContext, outputs, missing: tuple[int, ...]) -> list:
        """The cotangents that the backward is called with: of no tensor there is None, of a missing one zeros or
        None."""
        cotangents, places = [], iter(range(len(self.cotangents)))
        for o in outputs if isinstance(outputs, tuple) else (outputs,):
            position = next(places) if isinstance(o, TensorProxy) else None
            cotangent = self.cotangents[position] if position is not None and position not in missing else None
            if cotangent is None and position is not None and ctx._materializes:
                cotangent = ltorch.zeros(o.shape, device=o.device, dtype=o.dtype)
            cotangents.append(cotangent)
        return cotangents

    def _checked(self, c: Capture, returned) -> tuple:
        """The gradients of a backward as PyTorch checks them. Raises DerivativeError."""
        name = f"{self.cls.__name__}Backward"
        gradients = returned if isinstance(returned, tuple) else (returned,)
        check_count(f"function {name}", len(self.inputs), gradients)
        checked: list[TensorProxy | None] = []
        for i, (x, gradient) in enumerate(zip(self.inputs, gradients, strict=False)):
            if gradient is not None:
                if isinstance(gradient, Proxy) and not isinstance(gradient, TensorProxy):
                    c.refuse(f"the backward of {self.cls.__name__} gives a gradient that is no plain tensor")
                check_kind(f"function {name}", i, gradient, TensorProxy)
                if not isinstance(x, TensorProxy):
                    raise DerivativeError(
                        f"function {name} returned a gradient different than None at position {i + 1}, but the "
                        "corresponding forward input was not a Variable"
                    )
            wanted = gradient is not None and x.requires_grad
            checked.append(fitted(f"Function {name}", i, x, gradient) if wanted else None)
        return tuple(checked)

    def _raising(self, text: str, cotangents: list) -> tuple:
        """Gradients that raise where they are computed, as they do in eager."""
        wanted = [x for x in self.inputs if isinstance(x, TensorProxy) and x.requires_grad]
        gradients = iter(no_gradients(text, tuple(wanted), tuple(cotangents)))
        return tuple(next(gradients) if any(x is w for w in wanted) else None for x in self.inputs)

    def _without_decisions(self, c: Capture, operations: list[BoundSymbol]) -> list[BoundSymbol]:
        """The operations of a backward. It may decide by what the forward has computed: then the forward
        does."""
        first = set(leading_to(operations, (), lambda b: OpTags.DECISION in b.sym.tags))
        if any(
            OpTags.DECISION not in b.sym.tags
            and not b.sym.tags.isdisjoint((OpTags.DONT_DCE, OpTags.RANDOM_OP, OpTags.OPAQUE))
            for b in first
        ):
            c.refuse(f"the backward of {self.cls.__name__} branches on the result of an operation with a side effect")
        self.forward += [b for b in operations if b in first]
        return [b for b in operations if b not in first]

    def close(self) -> None:
        """All is read."""
        backwards = self.backwards.values()
        self.free = _live_ins(
            [b for backward in backwards for b in [*self.forward, *backward.operations]],
            [self.result, [backward.results for backward in backwards]],
            [*proxies_in(self.inputs, []), *self.cotangents],
        )
        symbol, tags = self.symbol, {tag for operation in self.forward for tag in operation.sym.tags}
        own = {OpTags.RANDOM_OP, OpTags.DECISION, OpTags.DONT_DCE} if OpTags.DECISION in tags else {OpTags.RANDOM_OP}
        symbol.tags = frozenset(tags & own)
        symbol.grad_rule = self.rule
        derivatives.functional.set(self.functional_rule, symbol)

    # --- the operation
    def operation(self, args: tuple, outputs, context) -> BoundSymbol:
        """The operation as one operation, the forward its decomposition."""
        operation = self.symbol.bind(*args, output=outputs, context=context)
        table = self.arguments(args)
        copies = renamed(self.forward, context.names, table)
        operations, operation.aliases = adopt(copies, _replaced(self.result, table), outputs)
        operation._subsymbols = tuple(operations)
        return operation

    def arguments(self, args: tuple) -> dict:
        """The values of the inputs and free values in this call."""
        return dict(zip([*proxies_in(self.inputs, []), *self.free], proxies_in(args, []), strict=True))

    # --- its derivatives
    def rule(self, *args):
        """The derivative: both recordings replayed."""
        recorder, table = current_recorder(), self.arguments(args)
        recorder.bound_symbols += renamed(self.forward, recorder.context.names, table)
        cotangents = yield _replaced(self.result, table)
        return self.replayed(table, cotangents, False)

    def functional_rule(self, *args):
        """The derivative that can be differentiated again: the operation stays, so that its derivative is always this
        backward.

        Values between, which the backward saved, are recomputed, with the random numbers that were drawn. They are
        constants to it, as in PyTorch.
        """
        outputs, states = self.once_more(args)
        cotangents = yield outputs
        return self.replayed(self.values_between(args, outputs, states), cotangents, True)

    def once_more(self, args: tuple) -> tuple[Any, list]:
        """Records the operation. Its results, and the states of the generators before it."""
        recorder = current_recorder()
        outputs = map_structure(lambda x: like(x) if isinstance(x, TensorProxy) else x, self.result)
        for o in proxies_in(outputs, []):
            o.name = recorder.context.names.make()
        operation = self.operation(args, outputs, recorder.context)
        states = [prims.get_rng_state(*generator) for generator in self.generators()]
        recorder.bound_symbols.append(operation)
        typed([operation])
        return outputs, states

    def values_between(self, args: tuple, outputs, states: list) -> dict:
        """Records the forward again. Its values, and those of the inputs; the results are those that there are."""
        recorder, table = current_recorder(), self.arguments(args)
        before = [prims.get_rng_state(*generator) for generator in self.generators()]
        self.set_generators(states)
        recorder.bound_symbols += renamed(self.forward, recorder.context.names, table)
        self.set_generators(before)
        return table | dict(zip(proxies_in(self.result, []), proxies_in(outputs, []), strict=True))

    def generators(self) -> list[tuple]:
        """(device, generator) of those that the forward draws from."""
        drawing = (operation for operation in self.forward if OpTags.RANDOM_OP in operation.sym.tags)
        return list(dict.fromkeys(generator_of(operation) for operation in drawing))

    def set_generators(self, states: Sequence) -> None:
        for state, generator in zip(states, self.generators(), strict=True):
            prims.set_rng_state(state, *generator)

    def replayed(self, table: dict, received, again: bool) -> tuple:
        """Writes the backward for these cotangents, and returns the gradients. again: they may be differentiated."""
        pairs = zip(leaves(self.result), leaves(received), strict=True)
        flat = [g for x, g in pairs if isinstance(x, TensorProxy)]
        cotangents = {p: g for p, g in zip(self.cotangents, flat, strict=True) if p is not None}
        for p in self.contiguous:
            cotangents[p] = cotangents[p].contiguous()
        if len(cotangents) == 1 and not self.once:
            operations, gradients = self.backwards[()]
            recorder, table = current_recorder(), table | cotangents
            recorder.bound_symbols += _again(renamed(operations, recorder.context.names, table), again)
            return tuple(table.get(g, g) if isinstance(g, TensorProxy) else None for g in gradients)
        return self.as_one(table, list(cotangents.values()), again)

    def as_one(self, table: dict, cotangents: list, again: bool) -> tuple:
        """A backward as one operation, which is told of missing cotangents, or cannot be differentiated itself."""
        reads = [(b, g) for b, g in self.backwards.values()]
        live = _live_ins([x for b, _ in reads for x in b], [g for _, g in reads], self.cotangents)
        wanted = [i for i in range(len(self.inputs)) if any(g[i] is not None for _, g in reads)]
        places = [i for i, p in enumerate(self.cotangents) if p is not None]

        def meta(values, cotangents):
            gradients_like = tuple(like(self.inputs[i]) for i in wanted)
            for x in gradients_like:
                x.requires_grad = False
            return gradients_like

        def decomposition(values, cotangents):
            recorder, known = current_recorder(), dict(zip(live, values, strict=True))
            missing = tuple(i for i, g in zip(places, cotangents, strict=True) if g is None)
            for i, g in zip(places, cotangents, strict=True):
                p = self.cotangents[i]
                assert p is not None, "places are those of cotangents"
                known[p] = ltorch.zeros(p.shape, device=p.device, dtype=p.dtype) if g is None else g
            operations, gradients = self.backwards.get(missing) or self.backwards[()]
            recorder.bound_symbols += _again(renamed(operations, recorder.context.names, known), again)
            pairs = ((gradients[i], self.inputs[i]) for i in wanted)
            return tuple(known.get(g, g) if g is not None else zeros_for(x) for g, x in pairs)

        def zeros_for(x):
            return ltorch.zeros(x.shape, device=x.device, dtype=x.dtype)

        key = ("autograd_function_backward", id(self), again)
        symbol = Symbol(f"{self.symbol.name}_backward", meta, id=key, decomposition=decomposition)
        derivatives.accepts_missing_cotangents.add(symbol)
        if self.once:
            symbol.grad_rule = _differentiated_twice(symbol)
            symbol.detaches = lambda values, cotangents: not any(g is not None and g.requires_grad for g in cotangents)
        by_input = dict(zip(wanted, symbol(tuple(table.get(p, p) for p in live), tuple(cotangents)), strict=True))
        return tuple(by_input.get(i) for i in range(len(self.inputs)))


def _differentiated_twice(symbol: Symbol) -> Callable:
    def rule(values, cotangents):
        result = symbol(values, cotangents)
        received = yield result
        wanted = [g for g in cotangents if isinstance(g, TensorProxy) and g.requires_grad]
        text = "trying to differentiate twice a function that was marked with @once_differentiable"
        computed = iter(no_gradients(text, tuple(wanted), tuple(received)))
        return None, tuple(next(computed) if any(g is w for w in wanted) else None for g in cotangents)

    return rule


def _live_ins(operations: Sequence[BoundSymbol], results, known: Sequence[Proxy | None]) -> list[Proxy]:
    """What operations and their results read of values that come from elsewhere; `known` is no part of it."""
    inside = {*known, *(o for operation in operations for o in operation.outputs)}
    read = [p for operation in operations for p in operation.inputs] + proxies_in(results, [])
    return list(dict.fromkeys(p for p in read if p not in inside))


def _replaced(value, table: dict):
    return map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, value)


def _again(operations: list[BoundSymbol], again: bool) -> list[BoundSymbol]:
    """The operations of a backward, recorded with grad where it may be differentiated."""
    return [_with_grad(operation) for operation in operations] if again else operations


def _with_grad(operation: BoundSymbol) -> BoundSymbol:
    copy = operation.replace(subsymbols=operation.subsymbols)
    copy.aliases, copy.context = operation.aliases, operation.context and operation.context.replace(grad_enabled=True)
    return copy
