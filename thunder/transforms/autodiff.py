"""Derivatives: one joint trace of a program and its backward.

A rule is a generator over proxies: it yields its operation's result, is sent the result's cotangent, and returns the
cotangents of the arguments.

    @softmax.vjp
    def _(a, dim, dtype=None):
        y = softmax(a, dim, dtype)
        g = yield y
        return (y * (g - sum(g * y, dim, True)),)

After the positional arguments' cotangents may come those of keyword arguments, as a dict. A rule that returns
NotImplemented before it yields leaves the operation to PyTorch's derivative. A rule is run once, with a placeholder for
the cotangent; the operations it writes are sorted into those the result needs (forward) and the rest (backward).
`get_grad` and `put_grads` are the same thing for rules written as plain functions.

Before: `t0 = ltorch.sin(x)`, `return t0`. After: `t0 = ltorch.sin(x)`, `t2 = ltorch.cos(x)`, `t3 = ltorch.mul(t1, t2)`,
`return (t0, t3)` with t1 the cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thunder._lazy import names_from
from thunder.analysis.flow import producers
from thunder.core.dtypes import COMPLEX
from thunder.core.proxies import Proxy, TensorProxy, leaves, like, map_structure, proxies_in, same_shape
from thunder.core.symbol import BoundSymbol, Context, OpTags, Recorder, Symbol, adopt, current_recorder, recording
from thunder.core.trace import Trace, TraceTag, timed_pass
from thunder.core.unbacked import with_sizes
from thunder.errors import DataDependentError, MissingImplementationError, ThunderError
from thunder.extend import resolve_executors
from thunder.ops import LTORCH, pytorch_derivative
from thunder.ops.parts import add_part, part_of_zeros
from thunder.transforms.levels import typed
from thunder.transforms.phases import get_grad_symbol, marked

__all__ = [
    "Linearization",
    "by_formula",
    "joint_trace",
    "grad_transform_on_trace",
    "get_grad_symbol",
    "get_grad",
    "put_grad",
    "put_grads",
]


# ----------------------------------------------------------------------------------------------------------------
# get_grad, put_grads

put_grad_symbol = Symbol(
    "put_grad", lambda value, gradient: None, module="prims", is_prim=True, tags=(OpTags.DONT_DCE,)
)


def get_grad(value: TensorProxy) -> TensorProxy:
    """The cotangent of a value, inside a grad transform. Asking twice for one value's gives the same proxy."""
    recorder = current_recorder()
    if recorder is None:
        raise MissingImplementationError(
            "get_grad is called inside a grad transform, while a program is differentiated"
        )
    for operation in recorder.bound_symbols:
        if operation.sym is get_grad_symbol and operation.args[0] is value:
            return operation.output
    return get_grad_symbol(value)


def put_grad(value: TensorProxy, gradient: TensorProxy) -> None:
    """Adds to the cotangent of an argument, inside a grad transform."""
    put_grad_symbol(value, gradient)


def put_grads(values: Any, gradients: Any) -> None:
    """`put_grad` for each pair of a tensor and its gradient in two structures of the same form; None and what is no
    tensor are passed over."""
    for value, gradient in zip(leaves(values), leaves(gradients), strict=True):
        if isinstance(value, TensorProxy) and isinstance(gradient, TensorProxy):
            put_grad(value, gradient)


# ---------------------------------------------------------------------------------------------------------------- one
# operation


class Derivative:
    """What differentiating one operation gave: forward operations, backward operations, which cotangents those read,
    and which they make.

    gets: (output, placeholder) pairs. puts: (argument, gradient) pairs.
    """

    __slots__ = ("forward", "backward", "gets", "puts")

    def __init__(self, forward: list[BoundSymbol], backward: list[BoundSymbol], gets: list, puts: list):
        self.forward, self.backward, self.gets, self.puts = forward, backward, gets, puts


def _run_generator(rule: Callable, operation: BoundSymbol):
    """A generator rule as calls of get_grad and put_grads: the one form that everything below knows."""
    steps = rule(*operation.args, **operation.kwargs)
    try:
        result = next(steps)
    except StopIteration:  # it declined
        return NotImplemented
    cotangents = map_structure(
        lambda o: get_grad(o) if isinstance(o, TensorProxy) and o.dtype.category >= 2 else None, result
    )
    try:
        steps.send(cotangents)
    except StopIteration as done:
        gradients = done.value if isinstance(done.value, (tuple, list)) else (done.value,)
    else:
        raise MissingImplementationError(
            f"the derivative of {operation.sym.qualified_name} yields more than once: it yields its result, and "
            "returns the gradients"
        )
    for argument, gradient in zip((*operation.args, operation.kwargs), gradients, strict=False):
        _put(operation, argument, gradient)
    return result


def _put(operation: BoundSymbol, argument, gradient) -> None:
    if isinstance(argument, (tuple, list)) and isinstance(gradient, (tuple, list)):
        for a, g in zip(argument, gradient, strict=True):
            _put(operation, a, g)
    elif isinstance(argument, dict) and isinstance(gradient, dict):
        for name, g in gradient.items():
            _put(operation, argument[name], g)
    elif isinstance(argument, TensorProxy) and isinstance(gradient, TensorProxy) and argument.requires_grad:
        put_grad(argument, gradient)


def differentiate(operation: BoundSymbol, rule: Callable, is_generator: bool) -> Derivative | None:
    """Runs the rule of an operation; None where it returns NotImplemented in the place of yielding a result.

    Raises MissingImplementationError where it returns another number of values than the operation has.
    """
    with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
        result = _run_generator(rule, operation) if is_generator else rule(*operation.args, **operation.kwargs)
    if result is NotImplemented:
        return None
    marks = (get_grad_symbol, put_grad_symbol)
    operations = [b for b in recorder.bound_symbols if b.sym not in marks]
    gets = [(b.args[0], b.output) for b in recorder.bound_symbols if b.sym is get_grad_symbol]
    puts = [b.args for b in recorder.bound_symbols if b.sym is put_grad_symbol]
    try:
        adopted, aliases = adopt(operations, result, operation.output)
    except ValueError:
        raise MissingImplementationError(
            f"the grad transform of {operation.sym.qualified_name} returned {len(proxies_in(result, []))} values where "
            f"the operation has {len(operation.outputs)}: "
            "return what the operation returns"
        ) from None
    renamed = dict(
        zip((o for b in operations for o in b.outputs), (o for b in adopted for o in b.outputs), strict=True)
    )
    renamed |= {
        new: old
        for new, old in zip(proxies_in(result, []), proxies_in(operation.output, []), strict=True)
        if new not in renamed and new is not old
    }
    gets = [(renamed.get(o, o), g) for o, g in gets]
    puts = [(a if any(a is i for i in operation.inputs) else renamed.get(a, a), renamed.get(g, g)) for a, g in puts]
    for old, new in aliases.items():  # a result that is an argument: an edge of its own
        adopted.append(LTORCH["detach"].bind(new, output=old, context=operation.context))
        # what the rule does not ask for passes through
        if isinstance(new, TensorProxy) and not any(o is old for o, _ in gets):
            gets.append((old, like(old)))
            puts.append((new, gets[-1][1]))
    _check_puts(operation, puts, gets)
    return _sorted(operation, adopted, gets, puts)


def _check_puts(operation: BoundSymbol, puts: list, gets: list) -> None:
    """Gradients are put to arguments: to anything else they would be lost."""
    for value, _ in puts:
        if not any(value is i for i in operation.inputs):
            read = (
                "whose gradient was read before" if any(value is o for o, _ in gets) else "which is no argument of it"
            )
            raise MissingImplementationError(
                f"the derivative of {operation.sym.qualified_name} puts a gradient to {value.name}, {read}: put "
                "gradients to the arguments of the operation"
            )


def _sorted(operation: BoundSymbol, operations: list[BoundSymbol], gets: list, puts: list) -> Derivative:
    """What the result needs is forward, wherever the rule writes it."""
    needed = set(operation.outputs)
    forward, backward = [], []
    for b in reversed(operations):
        if not needed.isdisjoint(b.outputs) or OpTags.DONT_DCE in b.sym.tags and not _reads(b, operations, gets):
            needed.update(b.inputs)
            forward.append(b)
        else:
            backward.append(b)
    return Derivative(forward[::-1], backward[::-1], gets, [(a, g) for a, g in puts if a.requires_grad])


def _reads(operation: BoundSymbol, operations: list[BoundSymbol], gets: list) -> bool:
    """Whether cotangents flow into an operation."""
    values = {g for _, g in gets}
    for b in operations:
        if not values.isdisjoint(b.inputs):
            values.update(b.outputs)
            if b is operation:
                return True
    return False


# ----------------------------------------------------------------------------------------------------------------
# choosing a rule


def _rule_for(operation: BoundSymbol, executors: Sequence) -> tuple[Callable, bool] | None:
    """(rule, whether it is a generator): an executor's that takes the operation, in their order, then the operation's
    own."""
    for executor in executors:
        found = executor.implementation(operation)
        if found is not None and found.grad_transform is not None:
            return found.grad_transform, False
        if found is not None or operation.sym.executor is executor:
            break
    if operation.sym.grad_rule is None or (
        operation.sym.torch_functions and (_complex(operation) or _wants_by_keyword(operation))
    ):
        return None
    return operation.sym.grad_rule, True


def _complex(operation: BoundSymbol) -> bool:
    """The rules beside the operations are those of real types: PyTorch differentiates what is complex, but for moves of
    data and what says that its rule holds."""
    holds = operation.sym.complex_derivative
    if OpTags.SHAPE_OP in operation.sym.tags or holds is True or (holds and holds(*operation.args, **operation.kwargs)):
        return False
    return any(
        isinstance(p, TensorProxy) and p.dtype.category == COMPLEX for p in (*operation.inputs, *operation.outputs)
    )


def _wants_by_keyword(operation: BoundSymbol) -> bool:
    """Whether a keyword-only argument gets a gradient, of which the rules beside the operations know nothing."""
    return bool(operation.kwargs) and any(
        isinstance(p, TensorProxy) and p.requires_grad for p in proxies_in(operation.kwargs, [])
    )


def _by_parts(operation: BoundSymbol) -> bool:
    """Whether the decomposition is what PyTorch composes the operation of, so that its parts are differentiated.
    Complex numbers take PyTorch's derivative."""
    wanted = operation.sym.differentiate_decomposition
    return bool(wanted) and not _complex(operation) and (wanted is True or wanted(*operation.args, **operation.kwargs))


def _fused(operation: BoundSymbol, executors: Sequence) -> bool:
    """Whether an executor makes kernels of an operation's parts: then these are differentiated, and what is saved and
    recomputed is chosen among them."""
    return (
        operation.sym.decomposition is not None
        and not _complex(operation)
        and any(executor.can_fuse(operation) for executor in executors)
    )


def _derivatives(operation: BoundSymbol, executors: Sequence, out: list, functional: bool) -> None:
    """Appends what differentiating `operation` gives: by its rule, by its decomposition, or by PyTorch's own
    derivative."""
    if not any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs):
        out.append(operation)
        return
    if operation.sym.once_differentiable:
        raise MissingImplementationError(f"a second derivative is asked for, but {operation.sym.once_differentiable}")
    if operation.sym.formula:
        for sub in by_formula(operation):
            _derivatives(sub, executors, out, functional)
        return
    rule = _rule_for(operation, executors)
    if functional and (again := operation.sym.functional_derivative) is not None:
        rule = again, True
    if rule is not None and (made := _differentiated(operation, *rule)) is not None:
        out.append(made)
    elif (
        operation.sym.fn is not None
        and operation.sym.executor is None
        and not ((_by_parts(operation) or _fused(operation, executors)) and operation.subsymbols)
    ):
        out.append(differentiate(operation, pytorch_derivative.derivative_of(operation.sym, functional), True))
    elif operation.sym.decomposition is not None and operation.subsymbols:
        typed(operation.subsymbols)  # those of a decomposition that was made later do not know what requires grad
        for sub in operation.subsymbols:
            _derivatives(sub, executors, out, functional)
        for old, new in operation.aliases.items():
            out.append(
                differentiate(LTORCH["detach"].bind(new, output=old, context=operation.context), _identity, True)
            )
    else:
        raise MissingImplementationError(
            f"{operation.sym.qualified_name} has no derivative: give it one with register_implementation(..., "
            "grad_transform=...), define it by like=, "
            "or call it under torch.no_grad()"
        )


def _differentiated(operation: BoundSymbol, rule: Callable, is_generator: bool) -> Derivative | None:
    """`differentiate`; None as well where the rule would have to decide by a data-dependent size, which PyTorch's
    own derivative does when it runs."""
    try:
        return differentiate(operation, rule, is_generator)
    except DataDependentError:
        return None


def by_formula(operation: BoundSymbol) -> list[BoundSymbol]:
    """The operations of the formula that stands for a kernel where it is differentiated: they compute the kernel's
    results."""
    with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
        result = operation.sym.formula(*operation.args, **operation.kwargs)
    operations, aliases = adopt(recorder.bound_symbols, result, operation.output)
    return operations + [
        LTORCH["clone"].bind(new, output=old, context=operation.context) for old, new in aliases.items()
    ]


def _identity(a):
    g = yield LTORCH["clone"](a)
    return (g,)


# ---------------------------------------------------------------------------------------------------------------- the
# joint trace


class _Gradients:
    """The cotangents accumulated so far, by value. recorder: the current one, where the backward is written."""

    def __init__(self, recorder: Recorder):
        self.current: dict[Proxy, Any] = {}
        self.zeros: set[Proxy] = set()  # the values that only missing cotangents lead to so far
        self.recorder, self.producers, self.seen = recorder, {}, 0

    def add(self, value: Proxy, gradient) -> None:
        known = None if value in self.zeros else self.current.get(value)
        self.zeros.discard(value)
        self.current[value] = gradient if known is None else self.sum(known, gradient)

    def sum(self, known, gradient):
        """What is zeros beside a part is added where it is not zeros."""
        written = self.recorder.bound_symbols
        self.producers |= producers(written[self.seen :])
        self.seen = len(written)
        found = part_of_zeros(gradient, self.producers)
        return LTORCH["add"](known, gradient) if found is None else add_part(known, found[0], *found[1])

    def add_zeros(self, value: Proxy) -> None:
        if value not in self.current:
            self.current[value] = LTORCH["zeros_like"](value)  # dropped again where nothing reads it
            self.zeros.add(value)


class Linearization:
    """A program with the derivative of each of its operations: `forward` are the operations that compute what the
    program does, and what its backward reads.

    functional: every operation that it makes can be differentiated again; without it, what PyTorch differentiates saves
    a graph that is run once. needed: the operations that are differentiated, where others stand between them. known:
    operations that earlier derivatives made, which stand for these derivatives.

    Raises MissingImplementationError where an operation has no derivative, or a rule breaks the rules: see
    `differentiate`.
    """

    __slots__ = ("steps", "forward")

    def __init__(
        self,
        operations: Iterable[BoundSymbol],
        executors: Sequence,
        *,
        functional: bool = False,
        needed: set | None = None,
        known: dict | None = None,
    ):
        self.steps: list = []
        operation = None
        try:
            for operation in operations:
                if known and operation in known:
                    if not self.steps or self.steps[-1] is not known[operation]:
                        self.steps.append(known[operation])
                elif needed is not None and operation not in needed:
                    self.steps.append(operation)
                else:
                    _derivatives(operation, executors, self.steps, functional)
        except ThunderError as error:
            error.bound_symbol = error.bound_symbol or operation
            raise
        self.forward: list[BoundSymbol] = [
            b for s in self.steps for b in ([s] if isinstance(s, BoundSymbol) else s.forward)
        ]

    def backward(self, seeds: Iterable[tuple[Proxy, Any]], recorder: Recorder) -> dict[Proxy, Any]:
        """Writes the backward to `recorder`, the current one. `seeds` are pairs of a value and its cotangent. The
        cotangents of all values that get one."""
        grads = _Gradients(recorder)
        for value, cotangent in seeds:
            grads.add(value, cotangent)
        for step in reversed(self.steps):
            if isinstance(step, Derivative):
                _backward(step, grads, recorder)
        return grads.current


def joint_trace(trace: Trace, executors: Sequence) -> Trace:
    """A program and its backward in one trace, differentiated with respect to the arguments that require grad.

    The operations of the forward come first, then `get_grad` for each output that cotangents come for, then the
    backward. It returns a dict: "output", for each argument its gradient or None; "flat_args", the arguments;
    "fw_flat_out", what the program returns.

    Raises MissingImplementationError where an operation has no derivative, or a rule breaks the rules: see
    `differentiate`.
    """
    linear = Linearization(trace.bound_symbols, executors)
    outputs = dict.fromkeys(
        o
        for o in trace.output_proxies
        if isinstance(o, TensorProxy) and o.requires_grad and not any(o is a for a in trace.args)
    )
    context = next((b.context for b in trace.bound_symbols if b.context is not None), None)
    recorder = Recorder(
        context.replace(grad_enabled=False, checkpoint=()) if context else Context(trace.names, grad_enabled=False)
    )
    with recording(recorder):
        seeds = [(o, get_grad_symbol(o)) for o in outputs]
        grads = linear.backward(seeds, recorder)
    wanted = (isinstance(a, TensorProxy) and a.requires_grad for a in trace.args)
    gradients = tuple(grads.get(a) if w else None for a, w in zip(trace.args, wanted, strict=True))
    output = {"output": gradients, "flat_args": trace.args, "fw_flat_out": trace.output}
    number = trace.info.backwards + 1
    backward = marked(recorder.bound_symbols, number)
    operations = with_sizes([*linear.forward, *backward], trace.args, trace.names)
    info = trace.info.replace(backwards=number)
    return trace.replace(bound_symbols=operations, output=output, name="joint", tags={TraceTag.JOINT}, info=info)


def grad_transform_on_trace(trace: Trace, /, *args, **kwargs) -> Trace:
    """`joint_trace` with the default executors, under the name and with the header line that users of Lightning Thunder
    know."""
    return timed_pass(
        "Grad transform pass", trace, lambda t: joint_trace(t, kwargs.get("executors") or resolve_executors(None))
    )


def _cast(gradient, value: TensorProxy):
    """A gradient in its value's own dtype."""
    if isinstance(gradient, TensorProxy) and gradient.dtype is not value.dtype:
        return LTORCH["to"](gradient, dtype=value.dtype)
    return gradient


def _backward(step: Derivative, grads: _Gradients, recorder: Recorder) -> None:
    """Writes the backward operations of one derivative, where any of its cotangents is there."""
    if not any(o in grads.current for o, _ in step.gets):
        return
    table: dict = {placeholder: grads.current[o] for o, placeholder in step.gets if o in grads.current}
    gone = {placeholder for o, placeholder in step.gets if o not in grads.current}
    if gone:
        write_without(step.backward, {placeholder for _, placeholder in step.gets}, gone, table, recorder)
    else:
        for b in step.backward:
            recorder.bound_symbols.append(b.swap(table))
    for argument, gradient in step.puts:
        if gradient in gone:
            grads.add_zeros(argument)
        else:
            grads.add(argument, _cast(table.get(gradient, gradient), argument))


def write_without(
    operations: Iterable[BoundSymbol], dependent: set, gone: set, table: dict, recorder: Recorder
) -> None:
    """Writes operations of a backward to `recorder`, the current one, for the case that some cotangents are missing.

    Derivatives are linear in their cotangents: an operation that reads only missing ones makes a missing one, a sum or
    difference is its other term, and what reads some that are missing and some that are not is given zeros, or None,
    for them. dependent: the cotangents; gone: the missing ones; table: what takes the place of a value. All three are
    added to.
    """
    zeros: dict = {}
    for operation in operations:
        read = dict.fromkeys(i for i in operation.inputs if i in dependent)
        if read:
            dependent.update(operation.outputs)
        lost = [i for i in read if i in gone]
        if lost and len(lost) == len(read):
            gone.update(operation.outputs)
        elif lost and (term := _other_term(operation, gone)) is not None:
            table[operation.output] = term = table.get(term, term)
            if operation.sym is LTORCH["sub"] and operation.args[0] in gone:
                table[operation.output] = LTORCH["neg"](term)
        elif lost and operation.sym.accepts_missing_cotangents:
            recorder.bound_symbols.append(operation.swap({**table, **dict.fromkeys(lost)}))
        else:
            for i in lost:
                if i not in zeros:
                    zeros[i] = LTORCH["zeros"](i.shape, device=i.device, dtype=i.dtype)
            recorder.bound_symbols.append(operation.swap({**table, **zeros} if lost else table))


def _other_term(operation: BoundSymbol, gone: set) -> TensorProxy | None:
    """Of a sum or difference of two tensors with one missing: the other, where it is of the result's form."""
    if operation.sym is add_part:
        return operation.args[0] if operation.args[0] not in gone else None
    if operation.sym not in (LTORCH["add"], LTORCH["sub"]) or operation.kwargs or len(operation.inputs) != 2:
        return None
    term = operation.inputs[0] if operation.inputs[1] in gone else operation.inputs[1]
    alike = same_shape(term.shape, operation.output.shape) and term.dtype is operation.output.dtype  # type: ignore[attr-defined]
    return term if alike else None


# the steps after this one, under the path where Lightning Thunder's users find them; they import this module
__getattr__, __dir__ = names_from(
    __name__,
    {
        "thunder.transforms.partition": (
            "split_into_forward_and_backward",
            "forward_and_backward_from_trace",
            "ForwardBackwardTraces",
        )
    },
)
