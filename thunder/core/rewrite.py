"""Local rewriting: a rule is called for each operation of a trace, and writes the operations that replace it.

def rule(operation, out):
    out.write(operation)                          # keep it
    out.alias({operation.outputs[0]: other})      # drop it: later operations read `other` instead
    out.trace(lambda x: ltorch.exp(x), operation) # compute its outputs another way, under their old names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

from thunder.core.proxies import Proxy, map_structure
from thunder.core.symbol import BoundSymbol, Names, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.errors import DataDependentError, ThunderError


class Rewriter:
    """The output of a rule: the operations so far, and the replacements of dropped values."""

    __slots__ = ("bound_symbols", "table")

    def __init__(self):
        self.bound_symbols: list[BoundSymbol] = []
        self.table: dict[Proxy, Any] = {}

    def write(self, operation: BoundSymbol) -> None:
        self.bound_symbols.append(operation)

    def alias(self, values: dict[Proxy, Any]) -> None:
        """Later operations read other values in the place of these."""
        for old, new in values.items():
            self.table[old] = self.table.get(new, new) if isinstance(new, Proxy) else new

    def back_to(self, written: int, replaced: int) -> None:
        """Forgets all but so many operations and replacements."""
        del self.bound_symbols[written:]
        while len(self.table) > replaced:
            self.table.popitem()

    def current(self, operation: BoundSymbol) -> BoundSymbol:
        """`operation` with its inputs replaced."""
        return operation.swap(self.table) if self.table else operation

    def trace(self, function: Callable, operation: BoundSymbol, wanted: Any = None) -> None:
        """Writes the operations of `function(*operation.args, **operation.kwargs)` in the place of `operation`. wanted:
        the values that they compute, by default the output of the operation."""
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            result = function(*operation.args, **operation.kwargs)
        operations, aliases = adopt(recorder.bound_symbols, result, operation.output if wanted is None else wanted)
        self.bound_symbols += operations
        self.alias(aliases)


def rewrite(trace: Trace, rule: Callable[[BoundSymbol, Rewriter], None], optional: bool = False) -> Trace:
    """The trace that `rule` writes, which is called for each operation in order. optional: operations
    may stay as they are. Those do about which the rule asks for a decision by a data-dependent size, which else raises
    DataDependentError."""
    out = Rewriter()
    operation = None
    try:
        for operation in trace.bound_symbols:
            written, replaced = len(out.bound_symbols), len(out.table)
            try:
                rule(out.current(operation), out)
            except DataDependentError:
                if not optional:
                    raise
                out.back_to(written, replaced)
                out.write(out.current(operation))
    except ThunderError as error:
        error.bound_symbol = error.bound_symbol or operation
        raise
    table = out.table
    output = (
        map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, trace.output) if table else trace.output
    )
    return trace.replace(bound_symbols=out.bound_symbols, output=output)


def decomposed(trace: Trace, chosen: Set[BoundSymbol]) -> Trace:
    """The trace with their decompositions in the place of some bound symbols."""

    def rule(operation: BoundSymbol, out: Rewriter) -> None:
        if operation not in chosen:
            return out.write(operation)
        for sub in operation.subsymbols:
            out.write(out.current(sub))
        out.alias(operation.aliases)

    return rewrite(trace, rule) if chosen else trace


def renamed(operations: Iterable[BoundSymbol], names: Names, table: dict[Proxy, Proxy]) -> list[BoundSymbol]:
    """Copies of operations with new results. `table` maps values to those that the copies read in their place; the new
    results are added to it."""
    return [renamed_operation(operation, table, lambda o: names.make()) for operation in operations]


def renamed_operation(operation: BoundSymbol, table: dict[Proxy, Proxy], name: Callable[[Proxy], str]) -> BoundSymbol:
    """A copy of an operation with new results, which `name` names. Values inside its decomposition are new as well,
    where the decomposition exists already."""
    for o in operation.outputs:
        if o not in table and not any(o is i for i in operation.inputs):
            table[o] = renamed_value(o, name(o))
    for sub in operation._subsymbols or ():
        renamed_operation(sub, table, name)
    return operation.swap(table)


def renamed_value(value: Proxy, name: str) -> Proxy:
    """A copy of a value under another name."""
    new = value.replace() if hasattr(value, "replace") else type(value)("")  # pyright: ignore
    new.name = name
    return new
