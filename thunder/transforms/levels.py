"""Levels: a function under a functional transform is recorded apart; what the transform makes of it becomes part of the
program around it.

A level's operations are typed for the level: its arguments require grad where the transform differentiates. Outside,
what requires grad follows from the program there, so the operations are typed anew where they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thunder.core.proxies import Proxy, TensorProxy, UnbackedNumber
from thunder.core.symbol import BoundSymbol, Names, Recorder

__all__ = ["Level", "write", "typed", "renamed", "renamed_line", "renamed_value"]


class Level:
    """What a function did when it was called with `arguments`: `lines` that make `outputs`. Both are flat; an output
    may be an argument or a value from outside."""

    __slots__ = ("arguments", "lines", "outputs")

    def __init__(self, arguments: Sequence[TensorProxy], lines: Sequence[BoundSymbol], outputs: Sequence):
        self.arguments, self.lines, self.outputs = list(arguments), list(lines), list(outputs)


def typed(lines: Iterable[BoundSymbol], grad_enabled: bool = True) -> None:
    """Sets requires_grad of what the operations make, by what their inputs have now. The values belong to the level:
    nobody else has read it yet."""
    for line in lines:
        grad = (
            grad_enabled
            and (line.context is None or line.context.grad_enabled)
            and line.sym.connects(line.args, line.kwargs, line.inputs)
        )
        plain = line.sym.nondifferentiable
        for i, o in enumerate(line.outputs):
            if isinstance(o, TensorProxy) and not any(o is p for p in line.inputs):
                o.requires_grad = grad and o.dtype.category >= 2 and i not in plain


def write(recorder: Recorder, lines: Iterable[BoundSymbol], table: dict[Proxy, Proxy]) -> None:
    """Appends the operations of a level, with other values in the place of its arguments."""
    lines = [line.swap(table) for line in lines]
    typed(lines, recorder.context.grad_enabled)
    recorder.bound_symbols += lines


def renamed(lines: Iterable[BoundSymbol], names: Names, table: dict[Proxy, Proxy]) -> list[BoundSymbol]:
    """Copies of the operations that make new values; `table`, which maps values to what is read in their place, learns
    these."""
    return [renamed_line(line, table, lambda o: names.make()) for line in lines]


def renamed_line(line: BoundSymbol, table: dict[Proxy, Proxy], name: Callable[[Proxy], str]) -> BoundSymbol:
    """A copy of an operation whose results, and the values inside its decomposition where that was made, are new values
    with names of their own."""
    for o in line.outputs:
        if o not in table and not any(o is i for i in line.inputs):
            table[o] = renamed_value(o, name(o))
    for sub in line._subsymbols or ():
        renamed_line(sub, table, name)
    return line.swap(table)


def renamed_value(value: Proxy, name: str) -> Proxy:
    new = value.replace() if isinstance(value, (TensorProxy, UnbackedNumber)) else type(value)("")
    new.name = name
    return new
