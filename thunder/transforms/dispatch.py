"""Transform for execution: every line goes to the first executor that takes it."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.proxies import Proxy, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, Recorder, Symbol, recording
from thunder.core.trace import Trace
from thunder.errors import MissingImplementationError
from thunder.extend import Executor, Implementation

__all__ = ["dispatch"]


def dispatch(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Gives every line to the first executor that takes it, and opens up composites that nobody takes.

    Before: `t0 = ltorch.mul(a, b)`. After, with the torch executor: `t0 = torch.mul(a, b)`, the line before as its decomposition.

    Raises MissingImplementationError for an operation that no executor takes and that has no decomposition.
    """
    lines: list[BoundSymbol] = []
    table: dict[Proxy, object] = {}
    for line in trace.bound_symbols:
        _place(line.swap(table) if table else line, tuple(executors), lines, table)
    output = _swapped(trace.output, table)
    return trace.replace(bound_symbols=lines, output=output)


def _swapped(x, table):
    return map_structure(lambda v: table.get(v, v) if isinstance(v, Proxy) else v, x) if table else x


def _place(line: BoundSymbol, executors: tuple[Executor, ...], lines: list[BoundSymbol], table: dict) -> None:
    """Appends what executes `line`; outputs that turn out to be other values go into `table`."""
    symbol = line.sym
    for executor in executors:
        if symbol.executor is executor and symbol.id not in executor.implmap:
            lines.append(line)
            return
        found = executor.implementation(line)
        if found is not None:
            _implement(line, executor, found, executors, lines, table)
            return
        if symbol.executor is executor:
            lines.append(line)
            return
    if symbol.python_printer is not None:
        lines.append(line)
        return
    if symbol.decomposition is None:
        raise MissingImplementationError(
            f"no executor takes {symbol.qualified_name}: asked {', '.join(e.name for e in executors)}. Register an implementation, or a decomposition (like=)."
        )
    for sub in line.subsymbols:
        _place(sub.swap(table) if table else sub, executors, lines, table)
    table.update({old: _swapped(new, table) for old, new in line.aliases.items()})


def _implement(line: BoundSymbol, executor: Executor, found: Implementation, executors, lines: list[BoundSymbol], table: dict) -> None:
    if found.execution_transform is None:
        assert found.symbol is not None, "an implementation has a symbol or an execution transform"
        lines.append(line.replace(sym=found.symbol, subsymbols=(line,)))
        return
    # what the transform writes in its own operation's name goes to the executors after this one; operations of this executor stay with it
    with recording(Recorder(line.context)) as recorder:
        result = found.execution_transform(*line.args, **line.kwargs)
    made = {o for new in recorder.bound_symbols for o in new.outputs}
    new_values, old_values = proxies_in(result, []), proxies_in(line.output, [])
    if len(new_values) != len(old_values):
        raise MissingImplementationError(
            f"the execution transform of {executor.name} for {line.sym.qualified_name} returned {len(new_values)} values where the operation has {len(old_values)}"
        )
    names = {new: old for new, old in zip(new_values, old_values, strict=True) if new in made and new is not old}
    table.update({old: new for new, old in zip(new_values, old_values, strict=True) if new not in names and new is not old})
    for new in recorder.bound_symbols:
        _place(new.swap(names), _others(new.sym, executor, executors), lines, table)


def _others(symbol: Symbol, executor: Executor, executors: tuple[Executor, ...]) -> tuple[Executor, ...]:
    return executors if symbol.executor is executor else tuple(e for e in executors if e is not executor)
