"""Levels: a function under a functional transform is recorded by itself, and the operations of the transformed function
become part of the program around it.

The values of a level are typed for the level: its arguments require grad where the transform differentiates. In the
program around it other values require grad, so the operations are typed again where they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Recorder


class Level:
    """A function recorded for `arguments`: its `operations` and their `outputs`. Both are flat; an output may be an
    argument or a value from outside."""

    __slots__ = ("arguments", "operations", "outputs")

    def __init__(self, arguments: Sequence[TensorProxy], operations: Sequence[BoundSymbol], outputs: Sequence):
        self.arguments, self.operations, self.outputs = list(arguments), list(operations), list(outputs)


def typed(operations: Iterable[BoundSymbol], grad_enabled: bool = True) -> None:
    """Sets requires_grad of the results of operations from that of their inputs. The results are changed in place: they
    belong to the level, and nobody else has read them yet."""
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
