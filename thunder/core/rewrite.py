"""The one driver of local rewriting: a rule is shown each operation of a trace and writes what takes its place.

def rule(operation, out):
    out.write(operation)                          # keep it
    out.alias({operation.outputs[0]: other})      # drop it: later operations read `other` instead
    out.trace(lambda x: ltorch.exp(x), operation) # compute its outputs another way, under their old names
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from thunder.core.proxies import Proxy, map_structure
from thunder.core.symbol import BoundSymbol, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.errors import ThunderError

__all__ = ["Rewriter", "rewrite", "decomposed"]


class Rewriter:
    """What a rule writes to: the operations so far, and what dropped values are read as."""

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

    def current(self, operation: BoundSymbol) -> BoundSymbol:
        """`operation` reading what its inputs have become."""
        return operation.swap(self.table) if self.table else operation

    def trace(self, function: Callable, operation: BoundSymbol, wanted: Any = None) -> None:
        """Writes the operations of `function(*operation.args, **operation.kwargs)` in the place of `operation`. wanted:
        what they compute; left out, the operation's output."""
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            result = function(*operation.args, **operation.kwargs)
        operations, aliases = adopt(recorder.bound_symbols, result, operation.output if wanted is None else wanted)
        self.bound_symbols += operations
        self.alias(aliases)


def rewrite(trace: Trace, rule: Callable[[BoundSymbol, Rewriter], None]) -> Trace:
    """The trace that `rule` writes when it is shown each operation in turn."""
    out = Rewriter()
    operation = None
    try:
        for operation in trace.bound_symbols:
            rule(out.current(operation), out)
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
