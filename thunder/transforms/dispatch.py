"""Transform for execution: every operation goes to the first executor that takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder.core.proxies import proxies_in
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.errors import MissingImplementationError
from thunder.extend import Executor, Implementation
from thunder.extend.fusion import FusionExecutor

__all__ = ["dispatch"]


def dispatch(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Gives every operation to the first executor that takes it, and opens up composites that nobody takes.

    Before: `t0 = ltorch.mul(a, b)`. After, with the torch executor: `t0 = torch.mul(a, b)`, the operation before as its
    decomposition.

    A fusion executor that may take an operation gets its regions first; what it leaves goes to the others.

    Raises MissingImplementationError for an operation that no executor takes and that has no decomposition.
    """
    fusers = [e for e in executors if isinstance(e, FusionExecutor)]
    left: set[int] = set()  # ids of operations that a fusion executor may take
    placed = rewrite(trace, lambda operation, rewriter: _place(operation, tuple(executors), rewriter, left))
    if not left:
        return placed
    fused = placed
    for fuser in fusers:
        fused = fuser.fusion_pass(fused)
    others = tuple(e for e in executors if e not in fusers)

    def rest(operation: BoundSymbol, out: Rewriter) -> None:
        """What a fusion executor left alone goes to the first of the others."""
        of_a_region = operation.sym.is_fusion or operation.sym.executor is not None and id(operation) not in left
        out.write(operation) if of_a_region else _place(operation, others, out, left)

    return rewrite(fused, rest)


def _place(operation: BoundSymbol, executors: tuple[Executor, ...], out: Rewriter, left: set[int]) -> None:
    """Writes what executes `operation`."""
    symbol = operation.sym
    for executor in executors:
        found = executor.implementation(operation)
        if isinstance(executor, FusionExecutor):
            if found is not None and found.execution_transform is not None:
                return _rewrite(operation, executor, found.execution_transform, executors, out, left)
            if executor.takes(operation):
                left.add(id(operation))
                return out.write(operation)
        elif found is not None and found.executes and executor.get_fuel():
            return _implement(operation, executor, found, executors, out, left)
        if symbol.executor is executor:
            return out.write(operation)
    if symbol.python_printer is not None:
        return out.write(operation)
    if symbol.decomposition is None and not operation.subsymbols:
        raise MissingImplementationError(
            f"no executor takes {symbol.qualified_name}: asked {', '.join(e.name for e in executors)}. Register an "
            "implementation, or a decomposition (like=)."
        )
    if not operation.subsymbols and any(o not in operation.aliases for o in operation.outputs):
        raise MissingImplementationError(
            f"no executor takes {symbol.qualified_name}, and its decomposition depends on sizes that data decides. "
            "Register an implementation"
        )
    for sub in operation.subsymbols:
        _place(out.current(sub), executors, out, left)
    out.alias(operation.aliases)


def _implement(
    operation: BoundSymbol,
    executor: Executor,
    found: Implementation,
    executors: tuple[Executor, ...],
    out: Rewriter,
    left: set[int],
) -> None:
    if found.execution_transform is None:
        assert found.symbol is not None, "an implementation has a symbol or an execution transform"
        return out.write(operation.replace(sym=found.symbol, subsymbols=(operation,)))
    _rewrite(operation, executor, found.execution_transform, executors, out, left)


def _rewrite(
    operation: BoundSymbol,
    executor: Executor,
    transform: Callable,
    executors: tuple[Executor, ...],
    out: Rewriter,
    left: set[int],
) -> None:
    """Writes what an execution transform makes of an operation."""
    with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
        result = transform(*operation.args, **operation.kwargs)
    try:
        operations, aliases = adopt(recorder.bound_symbols, result, operation.output)
    except ValueError:
        raise MissingImplementationError(
            f"the execution transform of {executor.name} for {operation.sym.qualified_name} returned another number of "
            "values than the operation has: "
            f"return {len(proxies_in(operation.output, []))} as the operation does, with any object where nobody "
            "reads one"
        ) from None
    # what the transform writes goes to the other executors, so that it may use the operation it implements; operations
    # of this executor stay with it
    others = tuple(e for e in executors if e is not executor)
    for new in operations:
        its_own = (
            new.sym.executor is executor or isinstance(executor, FusionExecutor) and new.sym.id != operation.sym.id
        )
        _place(out.current(new), executors if its_own else others, out, left)
    out.alias(aliases)
