"""Reverse-mode differentiation: one joint trace of a program and its backward.

The derivatives of single operations are in `derivative.py`.

Before: `t0 = ltorch.sin(x)`, `return t0`. After: `t0 = ltorch.sin(x)`, `t2 = ltorch.cos(x)`, `t3 = ltorch.mul(t1, t2)`,
`return (t0, t3)` with t1 the cotangent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from thunder._lazy import names_from
from thunder.analysis.flow import producers
from thunder.core.dtypes import COMPLEX
from thunder.core.proxies import Proxy, TensorProxy, same_shape
from thunder.core.symbol import BoundSymbol, Context, Recorder, recording
from thunder.core.trace import Trace, TraceTag, timed_pass
from thunder.core.unbacked import with_sizes
from thunder.errors import ThunderError
from thunder.extend import resolve_executors
from thunder.ops import ltorch
from thunder.ops.families.parts import add_part, part_of_zeros
from thunder.ops.functionalize.histories import holding
from thunder.ops.functionalize.inplace import saved_from
from thunder.ops.rules.derivatives import accepts_missing_cotangents
from thunder.transforms.derivative import Derivative, derivatives
from thunder.transforms.phases import get_grad_symbol, marked

__all__ = ["Linearization", "joint_trace", "grad_transform_on_trace", "get_grad_symbol", "write_without"]


# ---------------------------------------------------------------------------------------------------------------- the
# joint trace


class _Gradients:
    """The cotangents accumulated so far, by value. recorder: the current one, which records the backward."""

    def __init__(self, recorder: Recorder):
        self.current: dict[Proxy, Any] = {}
        self.zeros: set[Proxy] = set()  # values that so far have missing cotangents only
        self.recorder, self.producers, self.seen = recorder, {}, 0

    def add(self, value: Proxy, gradient) -> None:
        known = None if value in self.zeros else self.current.get(value)
        self.zeros.discard(value)
        self.current[value] = gradient if known is None else self.sum(known, gradient)

    def sum(self, known, gradient):
        """The sum of two cotangents. One that is zeros beside a part is added where it is not zeros."""
        written = self.recorder.bound_symbols
        self.producers |= producers(written[self.seen :])
        self.seen = len(written)
        part = part_of_zeros(gradient, self.producers)
        return ltorch.add(known, gradient) if part is None else add_part(known, part[0], *part[1])

    def add_zeros(self, value: Proxy) -> None:
        if value not in self.current:
            self.current[value] = ltorch.zeros_like(value)  # dead code where it has no use
            self.zeros.add(value)


class Linearization:
    """A program with the derivatives of its operations. forward: the operations of the program, and those whose results
    the backward reads.

    functional: every operation that it records can be differentiated again; otherwise operations that PyTorch
    differentiates save a graph that runs once. exact: derivatives are PyTorch's, bit for bit. needed: the operations to
    differentiate; None: all. known: derivatives by operations that earlier linearizations have recorded.

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
        exact: bool = False,
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
                    derivatives(operation, executors, self.steps, functional, exact)
        except ThunderError as error:
            error.bound_symbol = error.bound_symbol or operation
            raise
        self.forward: list[BoundSymbol] = [
            b for s in self.steps for b in ([s] if isinstance(s, BoundSymbol) else s.forward)
        ]

    def backward(self, seeds: Iterable[tuple[Proxy, Any]], recorder: Recorder) -> dict[Proxy, Any]:
        """Records the backward in `recorder`, the current one. Returns the cotangents by value. seeds: pairs of a value
        and its cotangent."""
        grads = _Gradients(recorder)
        for value, cotangent in seeds:
            grads.add(value, cotangent)
        for step in reversed(self.steps):
            if isinstance(step, Derivative):
                _backward(step, grads, recorder)
        return grads.current


def joint_trace(trace: Trace, executors: Sequence, exact: bool = False) -> Trace:
    """A program and its backward in one trace, differentiated with respect to the arguments that require grad.

    The operations of the forward come first, then `get_grad` for each output that cotangents come for, then the
    backward. It returns a dict: "output", for each argument its gradient or None; "flat_args", the arguments;
    "fw_flat_out", what the program returns. exact: derivatives are PyTorch's, bit for bit (`numerics="eager"`).

    Raises MissingImplementationError where an operation has no derivative, or a rule breaks the rules: see
    `differentiate`.
    """
    table = {b.args[0]: b.args[1] for b in trace.bound_symbols if b.sym is saved_from}
    linear = Linearization([b for b in trace.bound_symbols if b.sym is not saved_from], executors, exact=exact)
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
    backward = marked([b if b.sym is get_grad_symbol else b.swap(table) for b in recorder.bound_symbols], number)
    operations = with_sizes([*linear.forward, *backward], trace.args, trace.names)
    info = trace.info.replace(backwards=number, cotangents=_names_of(grads, recorder.bound_symbols, trace))
    operations = _without_histories(operations)
    return trace.replace(bound_symbols=operations, output=output, name="joint", tags={TraceTag.JOINT}, info=info)


def _names_of(grads: dict[Proxy, Any], backward: Sequence[BoundSymbol], trace: Trace) -> dict[str, str]:
    """The names of cotangents in text to be read: that of a value `y` is `d_y`, where the backward computes it and it
    has only a number."""
    computed, names = {o for b in backward for o in b.outputs}, dict(trace.info.cotangents)
    for value, cotangent in grads.items():
        if cotangent in computed and cotangent.name not in names and re.fullmatch(r"t\d+", cotangent.name):
            names[cotangent.name] = trace.names.claim(f"d_{value.name}")
    return names


def _without_histories(operations: Sequence[BoundSymbol]) -> Sequence[BoundSymbol]:
    """The operations, which read a value itself in the place of the value joined to a history: once it is
    differentiated, that is another name, and a saved value must have one."""
    table: dict[Proxy, Proxy] = {b.output: b.args[1] for b in operations if b.sym is holding}
    if not table:
        return operations
    for old, new in table.items():  # in order: an earlier one is resolved already
        table[old] = table.get(new, new)
    return [b if b.sym in (get_grad_symbol, holding) else b.swap(table) for b in operations]


def grad_transform_on_trace(trace: Trace, /, *args, **kwargs) -> Trace:
    """`joint_trace` with the default executors, under the name and header that users of Lightning Thunder know."""
    return timed_pass(
        "Grad transform pass", trace, lambda t: joint_trace(t, kwargs.get("executors") or resolve_executors(None))
    )


def _cast(gradient, value: TensorProxy):
    """A gradient in its value's own dtype: of a real value, the real part."""
    if isinstance(gradient, TensorProxy) and gradient.dtype is not value.dtype:
        if gradient.dtype.category == COMPLEX and value.dtype.category < COMPLEX:
            gradient = ltorch.real(gradient)
        return ltorch.to(gradient, dtype=value.dtype)
    return gradient


def _backward(step: Derivative, grads: _Gradients, recorder: Recorder) -> None:
    """Records the backward operations of one derivative, where any of its cotangents exists."""
    if not any(o in grads.current for o, _ in step.gets):
        return
    table: dict = {placeholder: grads.current[o] for o, placeholder in step.gets if o in grads.current}
    gone = {placeholder for o, placeholder in step.gets if o not in grads.current}
    if gone:
        write_without(step.backward, {placeholder for _, placeholder in step.gets}, gone, table, recorder)
    else:
        for b in step.backward:
            recorder.bound_symbols.append(b.swap(table))
    location = next((b.location for b in reversed(step.backward)), None)
    recorder.location = lambda: location  # of sums of cotangents
    zeros = {b.output for b in step.backward if b.sym is ltorch.zeros_like}
    for argument, gradient in step.puts:
        if gradient in gone or gradient in zeros:
            grads.add_zeros(argument)
        else:
            grads.add(argument, _cast(table.get(gradient, gradient), argument))


def write_without(
    operations: Iterable[BoundSymbol], dependent: set, gone: set, table: dict, recorder: Recorder
) -> None:
    """Records operations of a backward in `recorder`, the current one, for a call with missing cotangents.

    Derivatives are linear in their cotangents. So the result of an operation is missing if all its cotangents are; a
    sum or difference with a missing term is its other term; any other operation gets zeros, or None, for missing
    cotangents. dependent: the cotangents; gone: the missing ones; table: replacements of values. All three are
    extended.
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
            if operation.sym is ltorch.sub and operation.args[0] in gone:
                table[operation.output] = ltorch.neg(term)
        elif lost and accepts_missing_cotangents.of(operation.sym):
            told = operation.swap({**table, **dict.fromkeys(lost)})
            recorder.bound_symbols.append(told.replace(args=told.args, kwargs=told.kwargs))  # decomposed anew
        else:
            for i in lost:
                if i not in zeros:
                    zeros[i] = ltorch.zeros(i.shape, device=i.device, dtype=i.dtype)
            recorder.bound_symbols.append(operation.swap({**table, **zeros} if lost else table))


def _other_term(operation: BoundSymbol, gone: set) -> TensorProxy | None:
    """The other term of a sum or difference of two tensors with one missing, where it has the type of the result."""
    if operation.sym is add_part:
        return operation.args[0] if operation.args[0] not in gone else None
    if operation.sym not in (ltorch.add, ltorch.sub) or operation.kwargs or len(operation.inputs) != 2:
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
