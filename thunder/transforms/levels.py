"""Levels: a function under a functional transform is recorded apart; what the transform makes of it becomes part of the
program around it.

A level's operations are typed for the level: its arguments require grad where the transform differentiates. Outside,
what requires grad follows from the program there, so the operations are typed anew where they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thunder.core.proxies import Proxy, TensorProxy, UnbackedNumber
from thunder.core.symbol import BoundSymbol, Names, Recorder

__all__ = ["Level", "write", "typed", "renamed", "renamed_operation", "renamed_value"]


class Level:
    """What a function did when it was called with `arguments`: `operations`, which that make `outputs`. Both are flat;
    an output may be an argument or a value from outside."""

    __slots__ = ("arguments", "operations", "outputs")

    def __init__(self, arguments: Sequence[TensorProxy], operations: Sequence[BoundSymbol], outputs: Sequence):
        self.arguments, self.operations, self.outputs = list(arguments), list(operations), list(outputs)


def typed(operations: Iterable[BoundSymbol], grad_enabled: bool = True) -> None:
    """Sets requires_grad of what the operations make, by what their inputs have now. The values belong to the level:
    nobody else has read it yet."""
    for operation in operations:
        grad = (
            grad_enabled
            and (operation.context is None or operation.context.grad_enabled)
            and operation.sym.connects(operation.args, operation.kwargs, operation.inputs)
        )
        plain = operation.sym.nondifferentiable
        for i, o in enumerate(operation.outputs):
            if isinstance(o, TensorProxy) and not any(o is p for p in operation.inputs):
                o.requires_grad = grad and o.dtype.category >= 2 and i not in plain


def write(recorder: Recorder, operations: Iterable[BoundSymbol], table: dict[Proxy, Proxy]) -> None:
    """Appends the operations of a level, with other values in the place of its arguments."""
    operations = [operation.swap(table) for operation in operations]
    typed(operations, recorder.context.grad_enabled)
    recorder.bound_symbols += operations


def renamed(operations: Iterable[BoundSymbol], names: Names, table: dict[Proxy, Proxy]) -> list[BoundSymbol]:
    """Copies of the operations that make new values; `table`, which maps values to what is read in their place, learns
    these."""
    return [renamed_operation(operation, table, lambda o: names.make()) for operation in operations]


def renamed_operation(operation: BoundSymbol, table: dict[Proxy, Proxy], name: Callable[[Proxy], str]) -> BoundSymbol:
    """A copy of an operation whose results, and the values inside its decomposition where that was made, are new values
    with names of their own."""
    for o in operation.outputs:
        if o not in table and not any(o is i for i in operation.inputs):
            table[o] = renamed_value(o, name(o))
    for sub in operation._subsymbols or ():
        renamed_operation(sub, table, name)
    return operation.swap(table)


def renamed_value(value: Proxy, name: str) -> Proxy:
    new = value.replace() if isinstance(value, (TensorProxy, UnbackedNumber)) else type(value)("")
    new.name = name
    return new
