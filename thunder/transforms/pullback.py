"""The derivatives of a function that is recorded as a level: `Pullback` (reverse mode) and `pushforward` (forward
mode)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.regions import leading_to
from thunder.core.rewrite import renamed
from thunder.core.symbol import Context, Recorder, recording
from thunder.core.trace import Trace
from thunder.core.unbacked import with_sizes
from thunder.errors import MissingImplementationError
from thunder.ops import ltorch
from thunder.transforms.autodiff import Linearization
from thunder.transforms.dce import dce
from thunder.transforms.derivative import Derivative
from thunder.transforms.levels import Level, typed, write


def _linearized(level: Level, executors: Sequence) -> Linearization:
    """The derivative of a level. Operations that its results do not depend on are not differentiated, but stay: the
    program around it may have their values."""
    linear = Linearization(
        level.operations,
        executors,
        functional=True,
        needed=set(leading_to(level.operations, level.outputs)),
    )
    for step in linear.steps:
        if isinstance(step, Derivative):
            _check_connected(step)
    return linear


def _check_connected(step: Derivative) -> None:
    """Checks that the operations of a rule's forward are differentiable themselves: otherwise a second derivative would
    silently be zero."""
    results = {o for o, _ in step.gets}
    for operation in step.forward:
        if (
            operation.context is not None
            and not operation.context.grad_enabled
            and not results.isdisjoint(operation.outputs)
        ):
            raise MissingImplementationError(
                f"the rule of an operation computes its result without grad ({operation.sym.qualified_name}): it has "
                "no derivative as a function"
            )


def _writer(recorder: Recorder) -> Recorder:
    return Recorder(
        recorder.context.replace(grad_enabled=True, autocast=None, checkpoint=()), recorder.location, recorder.where
    )


class Pullback:
    """The derivative of a level at its arguments, as a function of cotangents.

    The constructor records the operations of the level in `recorder`, that of the program around it, with those that
    only the backward reads. arguments: the values of the level's arguments there. Each call records the backward.
    """

    def __init__(self, level: Level, arguments: Sequence[Proxy], executors: Sequence, recorder: Recorder):
        self.level, self.used = level, False
        self.table: dict[Proxy, Proxy] = dict(zip(level.arguments, arguments, strict=True))
        self.linear = _linearized(level, executors)
        write(recorder, self.linear.forward, self.table)

    def __call__(self, cotangents: Sequence, recorder: Recorder, wanted: Sequence[Proxy] | None = None) -> list:
        """The gradient, or None, of each value of `wanted`, by default of each argument. cotangents: one for each
        output, None where it is not differentiated."""
        seeds = [(o, g) for o, g in zip(self.level.outputs, cotangents, strict=True) if g is not None]
        with recording(_writer(recorder)) as backward:
            grads = self.linear.backward(seeds, backward)
        gradients = [grads.get(a) for a in (self.level.arguments if wanted is None else wanted)]
        table, operations = dict(self.table), leading_to(backward.bound_symbols, gradients)
        if self.used:
            operations = renamed(operations, recorder.context.names, table)
        self.used = True
        write(recorder, operations, table)
        return [table.get(g, g) for g in gradients]


def pushforward(
    level: Level, arguments: Sequence[Proxy], tangents: Sequence, executors: Sequence, recorder: Recorder
) -> list:
    """The tangent, or None where it is zero, of each output of a level. tangents: one for each argument, None where it
    is zero.

    The backward is linear in its cotangents; its own backward is the derivative forward: with J the Jacobian, c -> J' c
    has v -> J v for its pullback (https://j-towns.github.io/2017/06/12/A-new-trick.html). No operation needs a second
    rule. The level's operations are written to `recorder`, too.
    """
    table: dict[Proxy, Proxy] = dict(zip(level.arguments, arguments, strict=True))
    linear = _linearized(level, executors)
    writer = _writer(recorder)
    differentiable = [o if isinstance(o, TensorProxy) and o.requires_grad else None for o in level.outputs]
    with recording(writer):
        # any value would do, where no formula takes its logarithm
        cotangents = [None if o is None else ltorch.ones_like(o) for o in differentiable]
        starts, writer.bound_symbols = writer.bound_symbols, []
        grads = linear.backward(
            [(o, c) for o, c in zip(differentiable, cotangents, strict=True) if o is not None], writer
        )
    gradients = [(grads[a], v) for a, v in zip(level.arguments, tangents, strict=True) if v is not None and a in grads]
    backward = leading_to(writer.bound_symbols, [g for g, _ in gradients])
    _constant(level.arguments)
    _constant(o for operation in linear.forward for o in operation.outputs)
    for c in cotangents:
        if c is not None:
            c.requires_grad = True
    typed(backward)
    transposed = Linearization(backward, executors, functional=True)
    with recording(_writer(recorder)) as again:
        transposed_gradients = transposed.backward(gradients, again)
    results = [None if c is None else transposed_gradients.get(c) for c in cotangents]
    write(recorder, linear.forward, table)
    write(recorder, leading_to([*starts, *transposed.forward, *again.bound_symbols], results), table)
    return [table.get(g, g) for g in results]


def gradients_of(
    trace: Trace, cotangents: Sequence[TensorProxy | None], outputs: Sequence[TensorProxy], executors: Sequence
) -> Trace:
    """The gradients of a program as a program that can itself be differentiated: its arguments are those of `trace`,
    then the cotangents that are not None.

    outputs: the values that the cotangents belong to. Returns one gradient for each argument of `trace`, None where
    there is none. The forward is recomputed; random operations stay in their order, so that the state of the generator
    before them gives their numbers again.
    """
    recorder = Recorder(Context(trace.names, grad_enabled=True))
    arguments = [a for a in trace.args if isinstance(a, TensorProxy)]
    with recording(recorder):
        pullback = Pullback(Level(arguments, trace.bound_symbols, outputs), arguments, executors, recorder)
        by_argument = dict(zip(arguments, pullback(cotangents, recorder), strict=True))
    gradients = tuple(
        by_argument.get(a) if isinstance(a, TensorProxy) and a.requires_grad else None for a in trace.args
    )
    present = [c for c in cotangents if c is not None]
    operations = with_sizes(recorder.bound_symbols, [*trace.args, *present], trace.names)
    return dce(
        trace.replace(args=[*trace.args, *present], bound_symbols=operations, output=gradients, name="gradients")
    )


def _constant(values: Any) -> None:
    for value in values:
        if isinstance(value, TensorProxy):
            value.requires_grad = False
