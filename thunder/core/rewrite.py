"""The one driver of local rewriting: a rule is shown each line of a trace and writes what takes its place.

def rule(line, out):
    out.write(line)                          # keep it
    out.alias({line.outputs[0]: other})      # drop it: later lines read `other` instead
    out.trace(lambda x: ltorch.exp(x), line) # compute its outputs another way, under their old names
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
    """What a rule writes to: the lines so far, and what dropped values are read as."""

    __slots__ = ("lines", "table")

    def __init__(self):
        self.lines: list[BoundSymbol] = []
        self.table: dict[Proxy, Any] = {}

    def write(self, line: BoundSymbol) -> None:
        self.lines.append(line)

    def alias(self, values: dict[Proxy, Any]) -> None:
        """Later lines read other values in the place of these."""
        for old, new in values.items():
            self.table[old] = self.table.get(new, new) if isinstance(new, Proxy) else new

    def current(self, line: BoundSymbol) -> BoundSymbol:
        """`line` reading what its inputs have become."""
        return line.swap(self.table) if self.table else line

    def trace(self, function: Callable, line: BoundSymbol) -> None:
        """Writes the lines of `function(*line.args, **line.kwargs)` in the place of `line`."""
        with recording(Recorder(line.context, lambda: line.location)) as recorder:
            result = function(*line.args, **line.kwargs)
        lines, aliases = adopt(recorder.bound_symbols, result, line.output)
        self.lines += lines
        self.alias(aliases)


def rewrite(trace: Trace, rule: Callable[[BoundSymbol, Rewriter], None]) -> Trace:
    """The trace that `rule` writes when it is shown each line in turn."""
    out = Rewriter()
    line = None
    try:
        for line in trace.bound_symbols:
            rule(out.current(line), out)
    except ThunderError as error:
        error.bound_symbol = error.bound_symbol or line
        raise
    table = out.table
    output = (
        map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, trace.output) if table else trace.output
    )
    return trace.replace(bound_symbols=out.lines, output=output)


def decomposed(trace: Trace, chosen: Set[BoundSymbol]) -> Trace:
    """The trace with their decompositions in the place of some bound symbols."""

    def rule(line: BoundSymbol, out: Rewriter) -> None:
        if line not in chosen:
            return out.write(line)
        for sub in line.subsymbols:
            out.write(out.current(sub))
        out.alias(line.aliases)

    return rewrite(trace, rule) if chosen else trace
