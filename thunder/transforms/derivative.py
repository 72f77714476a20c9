"""The derivative of one operation: run its rule once, and sort the recorded operations into forward and backward.

A rule is a generator over proxies: it yields its operation's result, is sent the result's cotangent, and returns the
cotangents of the arguments.

    @softmax.vjp
    def _(a, dim, dtype=None):
        y = softmax(a, dim, dtype)
        g = yield y
        return (y * (g - sum(g * y, dim, True)),)

After the positional arguments' cotangents may come those of keyword arguments, as a dict. A rule that returns
NotImplemented before it yields leaves the operation to PyTorch's derivative. A rule runs once, with a placeholder for
the cotangent. The operations that the result depends on are the forward, the rest is the backward. Rules that are plain
functions use `get_grad` and `put_grads` instead.

Rules are written for real numbers: `g * y` for y = exp(x). The gradient of a holomorphic function multiplies the
cotangent by the conjugate of its derivative, `g * conj(y)`, so the factors of cotangents in a rule are conjugated for
complex numbers. `rules.derivatives.of_complex` names the operations without such a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from thunder.core.check import is_like
from thunder.core.dtypes import COMPLEX
from thunder.core.proxies import Proxy, TensorProxy, leaves, like, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, adopt, current_recorder, is_outside, recording
from thunder.errors import DataDependentError, DerivativeError, MissingImplementationError, noted
from thunder.ops import ltorch, pytorch_derivative
from thunder.ops.gradients import check_count, check_kind, fitted, is_real, is_wanted
from thunder.ops.rules import derivatives as facts
from thunder.transforms.levels import typed
from thunder.transforms.phases import get_grad_symbol
from thunder.transforms.register_grad import REGISTERED

# ----------------------------------------------------------------------------------------------------------------
# get_grad, put_grads

put_grad_symbol = Symbol(
    "put_grad", lambda value, gradient: None, module="prims", is_prim=True, tags=(OpTags.DONT_DCE,)
)


def get_grad(value: TensorProxy) -> TensorProxy:
    """The cotangent of a value, inside a grad transform; the same proxy in each call for one value."""
    recorder = current_recorder()
    if recorder is None:
        raise MissingImplementationError(
            "get_grad is called inside a grad transform, while a program is differentiated"
        )
    for operation in recorder.bound_symbols:
        if operation.sym is get_grad_symbol and operation.args[0] is value:
            return operation.output
    return get_grad_symbol(value)


def put_grad(value: TensorProxy, gradient: TensorProxy | None) -> None:
    """Adds to the cotangent of an argument, inside a grad transform. None: says that it has none."""
    check_kind("put_grad(value, gradient)", 0, value, TensorProxy)
    put_grad_symbol(value, gradient)


def put_grads(values: Any, gradients: Any) -> None:
    """`put_grad` for each pair of a tensor and its gradient in two structures of the same form. What is no tensor has
    no gradient, and a gradient of None says that there is none."""
    values, gradients = leaves(values), leaves(gradients)
    check_count("a grad transform", len(values), gradients)
    for value, gradient in zip(values, gradients, strict=False):
        if isinstance(value, TensorProxy):
            put_grad(value, gradient)


# ---------------------------------------------------------------------------------------------------------------- one
# operation


class Derivative:
    """The derivative of one operation: its forward and backward operations.

    gets: (output, placeholder) pairs for the cotangents that the backward reads. puts: (argument, gradient) pairs for
    those that it computes.
    """

    __slots__ = ("forward", "backward", "gets", "puts")

    def __init__(self, forward: list[BoundSymbol], backward: list[BoundSymbol], gets: list, puts: list):
        self.forward, self.backward, self.gets, self.puts = forward, backward, gets, puts

    @property
    def saves(self) -> bool:
        """Whether it reads tensors of the forward."""
        own_values = {o for b in self.backward for o in b.outputs} | {placeholder for _, placeholder in self.gets}
        return any(isinstance(i, TensorProxy) and i not in own_values for b in self.backward for i in b.inputs)


def _run_generator(rule: Callable, operation: BoundSymbol, recorder: Recorder, gets: list, puts: list):
    """Runs a generator rule. Appends to `gets` and `puts`: see `Derivative`."""
    steps = rule(*operation.args, **operation.kwargs)
    try:
        result = next(steps)
    except StopIteration:  # it declined
        return NotImplemented
    count, wanted = len(proxies_in(result, [])), len(operation.outputs)
    if count != wanted and is_outside(rule):
        raise DerivativeError(
            f"{_who(operation)} yields {count} values where the operation has {wanted}: yield its result"
        )
    placeholders: dict[TensorProxy, TensorProxy] = {}

    def cotangent(value):
        if not isinstance(value, TensorProxy) or value.dtype.category < 2:
            return None
        if value not in placeholders:
            placeholder = placeholders[value] = like(value)
            placeholder.name = recorder.context.names.make()
            placeholder.requires_grad = recorder.context.grad_enabled and value.requires_grad
        return placeholders[value]

    cotangents = map_structure(cotangent, result)
    gets += placeholders.items()
    try:
        steps.send(cotangents)
    except StopIteration as done:
        gradients = done.value if isinstance(done.value, (tuple, list)) else (done.value,)
    else:
        raise DerivativeError(
            f"the derivative of {operation.sym.qualified_name} yields more than once: it yields its result, and "
            "returns the gradients"
        )
    if not gradients:
        _check_put(rule, operation, result, recorder)
    who, number = _who(operation), len(operation.args)
    left_out = operation.args[len(gradients) :]
    # none at all: they are put, or there are none; thunder's own rules leave out what they take for constants
    if not gradients or not is_outside(rule) or not any(map(is_wanted, left_out)):
        gradients = (*gradients, *(None for _ in left_out))
    by_name = gradients[number] if len(gradients) == number + 1 and type(gradients[number]) is dict else None
    check_count(who, number, gradients[:number] if by_name is not None else gradients)
    real = is_real((operation.inputs, result))
    arguments = (*operation.args, operation.kwargs)
    for index, (argument, gradient) in enumerate(zip(arguments, (*gradients[:number], by_name), strict=True)):
        _put(who, index, argument, gradient, real, puts)
    return result


def _check_put(rule: Callable, operation: BoundSymbol, result: Any, recorder: Recorder) -> None:
    """Raises DerivativeError where a user's rule, which returns no gradients, puts none either. A result that is an
    argument gets its gradient without."""
    results = proxies_in(result, [])
    is_passed_on = any(r is i for r in results for i in operation.inputs)
    has_all = len(results) == len(operation.outputs)  # others are refused where results are taken
    has_put = any(b.sym is put_grad_symbol for b in recorder.bound_symbols)
    if is_outside(rule) and has_all and not is_passed_on and not has_put:
        raise DerivativeError(
            f"{_who(operation)} gives no gradients: put_grads(arguments, gradients) gives them, with None for an "
            "argument that has none"
        )


def _who(operation: BoundSymbol) -> str:
    """An operation's derivative, in errors."""
    return f"the derivative of {operation.sym.qualified_name}"


def _put(who: str, index: int, argument, gradient, real: bool, puts: list) -> None:
    """Notes the gradient of the argument at this index, of those inside where it is a container."""
    if gradient is None or not is_wanted(argument):
        return
    if isinstance(argument, TensorProxy):
        puts.append((argument, fitted(who, index, argument, gradient, real)))
    elif isinstance(argument, dict):
        check_kind(who, index, gradient, dict)
        for name, g in gradient.items():
            _put(who, index, argument.get(name), g, real, puts)
    else:
        check_kind(who, index, gradient, (tuple, list))
        check_count(who, len(argument), gradient)
        for a, g in zip(argument, gradient, strict=False):
            _put(who, index, a, g, real, puts)


def differentiate(
    operation: BoundSymbol, rule: Callable, is_generator: bool, conjugates: bool = False
) -> Derivative | None:
    """Runs the rule of an operation; None where it returns NotImplemented in the place of yielding a result.
    conjugates: it is one for real numbers, of a holomorphic function of complex ones.

    Raises DerivativeError where it returns another number of values than the operation has, or gradients that are not
    those of the arguments.
    """
    gets: list[tuple[Any, Any]] = []
    puts: list[tuple[Any, Any]] = []
    with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
        with noted(_who(operation)) if is_outside(rule) else nullcontext():
            if is_generator:
                result = _run_generator(rule, operation, recorder, gets, puts)
            else:
                result = rule(*operation.args, **operation.kwargs)
                _check_put(rule, operation, result, recorder)
        if result is NotImplemented:
            return None
        operations = []
        said = [b.args for b in recorder.bound_symbols if b.sym is put_grad_symbol]
        for argument, gradient in said:
            if gradient is not None:
                index = next((i for i, a in enumerate(operation.args) if a is argument), 0)
                real = is_real((operation.args, operation.kwargs, result))
                puts.append((argument, fitted(_who(operation), index, argument, gradient, real)))
        for b in recorder.bound_symbols:
            if b.sym is get_grad_symbol:
                gets.append((b.args[0], b.output))
            elif b.sym is not put_grad_symbol:
                operations.append(b)
        if conjugates:
            operations = _conjugated(operations, {g for _, g in gets}, recorder)
    adopted, aliases = _adopted(operation, rule, operations, result)
    renamed = _renamed(operations, adopted, proxies_in(result, []), proxies_in(operation.output, []))
    gets = [(renamed.get(o, o), g) for o, g in gets]
    inputs = set(operation.inputs)
    puts = [(a if a in inputs else renamed.get(a, a), renamed.get(g, g)) for a, g in puts]
    for old, new in aliases.items():  # a result that is an argument: an edge of its own
        adopted.append(ltorch.detach.bind(new, output=old, context=operation.context))
        # what the rule does not ask for passes through
        if isinstance(new, TensorProxy) and not any(o is old for o, _ in gets):
            gets.append((old, like(new)))
            puts.append((new, gets[-1][1]))
    if not gets:  # gradients that read no cotangent are there where the operation has one
        gets = [(o, like(o)) for o in operation.outputs if isinstance(o, TensorProxy) and o.requires_grad]
    _check_puts(operation, puts, gets)
    return _sorted(operation, adopted, gets, puts)


def _adopted(
    operation: BoundSymbol, rule: Callable, operations: list[BoundSymbol], result: Any
) -> tuple[list[BoundSymbol], dict[Proxy, Any]]:
    """`adopt` for the operations of a rule. Raises DerivativeError where its results are not those of the operation."""
    values, wanted = proxies_in(result, []), proxies_in(operation.output, [])
    try:
        if len(values) != len(wanted):
            raise ValueError("another number of values")
        adopted = adopt(operations, result, operation.output)
    except ValueError:
        raise DerivativeError(
            f"the grad transform of {operation.sym.qualified_name} returned {len(values)} values where "
            f"the operation has {len(operation.outputs)}: "
            "return what the operation returns"
        ) from None
    for new, old in zip(values, wanted, strict=True):
        if is_outside(rule) and not is_like(new, old):
            raise DerivativeError(f"{_who(operation)} returned {new!r} where the operation gives {old!r}")
    return adopted


def _renamed(
    operations: list[BoundSymbol], adopted: list[BoundSymbol], result: Sequence[Proxy], outputs: Sequence[Proxy]
) -> dict[Proxy, Proxy]:
    """By value of a rule, the value that takes its place in the program."""
    written = (o for b in operations for o in b.outputs)
    renamed = dict(zip(written, (o for b in adopted for o in b.outputs), strict=True))
    of_results = {new: old for new, old in zip(result, outputs, strict=True) if new is not old}
    return of_results | renamed


def _conjugated(operations: list[BoundSymbol], flowing: set, recorder: Recorder) -> list[BoundSymbol]:
    """The operations of a rule; those that depend on a cotangent read the conjugates of their other operands. flowing:
    the cotangents, to which the values that depend on them are added."""
    conjugates: dict[Proxy, Proxy] = {}
    conjugated: list[BoundSymbol] = []
    for b in operations:
        flows = not flowing.isdisjoint(b.inputs)
        if flows and not facts.conjugates.of(b.sym):
            for value in b.inputs:
                if value not in flowing and value not in conjugates and _is_complex(value):
                    conjugates[value] = ltorch.conj(value)
                    conjugated.append(recorder.bound_symbols[-1])
            b = b.swap(conjugates)
            if any(type(x) is complex for x in leaves((b.args, b.kwargs))):
                args, kwargs = map_structure(_conjugate, b.args), map_structure(_conjugate, b.kwargs)
                b = b.replace(args=args, kwargs=kwargs)
        if flows:
            flowing.update(b.outputs)
        conjugated.append(b)
    return conjugated


def _conjugate(x):
    return x.conjugate() if type(x) is complex else x


def _check_puts(operation: BoundSymbol, puts: list, gets: list) -> None:
    """Checks that cotangents are those of results, and that gradients belong to arguments; others would be lost."""
    inputs, outputs = set(operation.inputs), set(operation.outputs)
    for value, _ in gets:
        if value not in outputs:
            raise DerivativeError(
                f"the derivative of {operation.sym.qualified_name} asks for the gradient of {value.name}, which is no "
                "result of it: get_grad takes what the derivative returns"
            )
    for value, _ in puts:
        if value not in inputs:
            read = (
                "whose gradient was read before" if any(value is o for o, _ in gets) else "which is no argument of it"
            )
            raise DerivativeError(
                f"the derivative of {operation.sym.qualified_name} puts a gradient to {value.name}, {read}: put "
                "gradients to the arguments of the operation"
            )


def _sorted(operation: BoundSymbol, operations: list[BoundSymbol], gets: list, puts: list) -> Derivative:
    """The forward, which the result depends on, and the backward, wherever the rule records them."""
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


def _rule_for(
    operation: BoundSymbol, executors: Sequence, functional: bool, inexact: bool
) -> tuple[Callable, bool] | None:
    """(rule, whether it is a generator): an executor's that takes the operation, in their order, then the operation's
    own, unless it is inexact where PyTorch's bits are wanted. functional: its own for a second derivative, if there is
    one."""
    for executor in executors:
        implementation = executor.implementation(operation)
        if implementation is not None and implementation.grad_transform is not None:
            return implementation.grad_transform, False
        if implementation is not None or operation.sym.executor is executor:
            break
    if functional and not inexact and operation.sym.id not in REGISTERED:
        if (again := facts.functional.of(operation.sym)) is not None:
            return again, True
    if (
        inexact
        or operation.sym.grad_rule is None
        or operation.sym.torch_functions
        and (_is_for_reals(operation) or _wants_by_keyword(operation))
    ):
        return None
    return operation.sym.grad_rule, True


def _is_by_primitive(operation: BoundSymbol, executors: Sequence) -> bool:
    """Whether an operation that is a primitive and nothing else has the primitive's derivative: the first executor that
    takes either has one for the primitive, or register_grad gave one to the primitive alone."""
    if operation.sym.decomposition is None or operation.aliases:
        return False
    for executor in executors:
        implementation = executor.implementation(operation)
        if implementation is None and executor.takes_primitives and operation.primitive is not None:
            implementation = executor.implementation(operation.primitive)
            if implementation is not None and implementation.grad_transform is not None:
                return True
        if implementation is not None and implementation.grad_transform is not None:
            return False
        if implementation is not None or operation.sym.executor is executor:
            break
    if not REGISTERED or operation.sym.id in REGISTERED:
        return False
    return operation.primitive is not None and operation.primitive.sym.id in REGISTERED


def _is_for_reals(operation: BoundSymbol) -> bool:
    """Whether an operation reads or returns complex numbers for which neither its rule nor its decomposition holds."""
    return facts.of_complex.of(operation.sym) == "PyTorch's" and _has_complex(operation)


def _conjugates(operation: BoundSymbol) -> bool:
    """Whether the rule of an operation is that of a holomorphic function, applied to complex numbers."""
    symbol = operation.sym
    return bool(symbol.torch_functions) and facts.of_complex.of(symbol) == "holomorphic" and _has_complex(operation)


def _is_complex(value) -> bool:
    return isinstance(value, TensorProxy) and value.dtype.category == COMPLEX


def _has_complex(operation: BoundSymbol) -> bool:
    return any(map(_is_complex, (*operation.inputs, *operation.outputs)))


def _wants_by_keyword(operation: BoundSymbol) -> bool:
    """Whether a keyword-only argument gets a gradient, which the rules of operations do not compute."""
    return bool(operation.kwargs) and any(
        isinstance(p, TensorProxy) and p.requires_grad for p in proxies_in(operation.kwargs, [])
    )


def _by_parts(operation: BoundSymbol) -> bool:
    """Whether PyTorch composes the operation of its decomposition, which is then differentiated."""
    wanted = facts.composed.of(operation.sym)
    return (
        bool(wanted)
        and not _is_for_reals(operation)
        and (wanted is True or wanted(*operation.args, **operation.kwargs))
    )


def _fused(operation: BoundSymbol, executors: Sequence) -> bool:
    """Whether an executor fuses the decomposition of an operation. Then that is differentiated, and the save plan
    chooses among its values."""
    return (
        operation.sym.decomposition is not None
        and not _has_complex(operation)
        and any(executor.can_fuse(operation) for executor in executors)
    )


def _is_pytorchs(operation: BoundSymbol, executors: Sequence, inexact: bool) -> bool:
    """Whether PyTorch differentiates an operation without a rule; otherwise its decomposition is differentiated."""
    if operation.sym.fn is None or operation.sym.executor is not None:
        return False
    decomposed = (not inexact and _by_parts(operation)) or _fused(operation, executors)
    return not (decomposed and operation.subsymbols)


def derivatives(
    operation: BoundSymbol,
    executors: Sequence,
    out: list,
    functional: bool,
    exact: bool = False,
) -> None:
    """Appends the derivatives of an operation: by its rule, by its decomposition, or by PyTorch's own derivative.
    exact: PyTorch differentiates operations whose rule rounds otherwise than its own derivative."""
    if not any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs):
        out.append(operation)
        return
    if (why := facts.once_differentiable.of(operation.sym)) is not None:
        raise MissingImplementationError(f"a second derivative is asked for, but {why}")
    inexact = exact and facts.inexact.of(operation.sym) and operation.sym.id not in REGISTERED
    if not inexact and operation.sym.id not in REGISTERED and facts.formula.of(operation.sym) is not None:
        for sub in by_formula(operation):
            derivatives(sub, executors, out, functional, exact)
        return
    if _is_by_primitive(operation, executors):
        typed(operation.subsymbols)
        derivatives(operation.subsymbols[0], executors, out, functional, exact)
        return
    rule = _rule_for(operation, executors, functional, inexact)
    if rule is not None and (derivative := _differentiated(operation, *rule)) is not None:
        out.append(derivative)
    elif _is_pytorchs(operation, executors, inexact):
        out.append(differentiate(operation, pytorch_derivative.derivative_of(operation.sym, functional), True))
    elif operation.sym.decomposition is not None and operation.subsymbols:
        typed(operation.subsymbols)  # those of a decomposition that was made later do not know what requires grad
        for sub in operation.subsymbols:
            derivatives(sub, executors, out, functional, exact)
        for old, new in operation.aliases.items():
            out.append(differentiate(ltorch.detach.bind(new, output=old, context=operation.context), _identity, True))
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
        return differentiate(operation, rule, is_generator, is_generator and _conjugates(operation))
    except DataDependentError:
        return None


def by_formula(operation: BoundSymbol) -> list[BoundSymbol]:
    """The operations of the formula that stands for a kernel where it is differentiated: they compute the kernel's
    results."""
    formula = facts.formula.of(operation.sym)
    assert formula is not None, "the caller asks for one that there is"
    with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
        result = formula(*operation.args, **operation.kwargs)
    operations, aliases = adopt(recorder.bound_symbols, result, operation.output)
    return operations + [ltorch.clone.bind(new, output=old, context=operation.context) for old, new in aliases.items()]


def _identity(a):
    g = yield ltorch.clone(a)
    return (g,)
