"""Transform for execution: every line goes to the first executor that takes it."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.errors import MissingImplementationError
from thunder.extend import Executor, Implementation

__all__ = ["dispatch"]


def dispatch(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Gives every line to the first executor that takes it, and opens up composites that nobody takes.

    Before: `t0 = ltorch.mul(a, b)`. After, with the torch executor: `t0 = torch.mul(a, b)`, the line before as its decomposition.

    Raises MissingImplementationError for an operation that no executor takes and that has no decomposition.
    """
    return rewrite(trace, lambda line, rewriter: _place(line, tuple(executors), rewriter))


def _place(line: BoundSymbol, executors: tuple[Executor, ...], out: Rewriter) -> None:
    """Writes what executes `line`."""
    symbol = line.sym
    for executor in executors:
        found = executor.implementation(line)
        if found is not None:
            return _implement(line, executor, found, executors, out)
        if symbol.executor is executor:
            return out.write(line)
    if symbol.python_printer is not None:
        return out.write(line)
    if symbol.decomposition is None and not line.subsymbols:
        raise MissingImplementationError(
            f"no executor takes {symbol.qualified_name}: asked {', '.join(e.name for e in executors)}. Register an implementation, or a decomposition (like=)."
        )
    for sub in line.subsymbols:
        _place(out.current(sub), executors, out)
    out.alias(line.aliases)


def _implement(line: BoundSymbol, executor: Executor, found: Implementation, executors: tuple[Executor, ...], out: Rewriter) -> None:
    if found.execution_transform is None:
        assert found.symbol is not None, "an implementation has a symbol or an execution transform"
        return out.write(line.replace(sym=found.symbol, subsymbols=(line,)))
    with recording(Recorder(line.context, lambda: line.location)) as recorder:
        result = found.execution_transform(*line.args, **line.kwargs)
    try:
        lines, aliases = adopt(recorder.bound_symbols, result, line.output)
    except ValueError:
        raise MissingImplementationError(
            f"the execution transform of {executor.name} for {line.sym.qualified_name} returned another number of values than the operation has"
        ) from None
    # what the transform writes goes to the other executors, so that it may use the operation it implements; operations of this executor stay with it
    others = tuple(e for e in executors if e is not executor)
    for new in lines:
        _place(out.current(new), executors if new.sym.executor is executor else others, out)
    out.alias(aliases)
