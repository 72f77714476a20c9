"""Dispatch: give each operation to the first executor that takes it, by itself or in a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core.check import check_change, is_like
from thunder.core.proxies import Proxy, TensorProxy, leaves, proxies_in
from thunder.core.rewrite import Rewriter, decomposed, rewrite
from thunder.core.symbol import BoundSymbol, Recorder, Symbol, adopt, is_outside, recording
from thunder.core.trace import Trace, timed_pass
from thunder.errors import DataDependentError, DeclarationError, MissingImplementationError, noted
from thunder.extend import Executor
from thunder.extend.fusion import FusionExecutor
from thunder.extend.passes import named
from thunder.ops.rules import derivatives


def dispatch(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Gives each operation to the first executor that takes it, and decomposes composites that no executor takes.

    Before: `t0 = ltorch.mul(a, b)`. After, with the torch executor: `t0 = torch.mul(a, b)`, the operation before as its
    decomposition.

    Operations that a fusion executor may take stay as they are (`info.fusible`): `fuse` forms regions of them, and
    `dispatch_left` gives those outside of regions to the executors that do not fuse.

    Raises MissingImplementationError for an operation that no executor takes and that has no decomposition.
    """
    left: dict[BoundSymbol, None] = {}
    dispatched = rewrite(trace, lambda operation, out: _dispatched(operation, tuple(executors), out, left))
    return dispatched.replace(info=dispatched.info.replace(fusible=frozenset(left))) if left else dispatched


def _without_lists(trace: Trace, fusers: Sequence[FusionExecutor]) -> Trace:
    """Decomposes fusible operations on lists of tensors that depend on each other, so that each tensor has a region,
    rather than one region that is as long as the list.

    Before: `[t0, t1] = ltorch.foreach_mul([a, b], 2)`. After: `t0 = ltorch.mul(a, 2)`, `t1 = ltorch.mul(b, 2)`.
    """
    chosen = {b for fuser in fusers for b in _lists(trace, fuser)}
    return decomposed(trace, chosen)


def _lists(trace: Trace, fuser: FusionExecutor) -> set[BoundSymbol]:
    """The operations on lists that an executor fuses, and that share values with other operations that it fuses."""
    lists = [
        operation
        for operation in trace.bound_symbols
        if derivatives.composed.of(operation.sym)
        and fuser.takes(operation)
        and all(map(fuser.takes, operation.subsymbols))
    ]
    if not lists:
        return set()
    taken = [operation for operation in trace.bound_symbols if fuser.takes(operation)]
    outputs = {o for operation in taken for o in operation.outputs}
    read = {i for operation in taken for i in operation.inputs}
    return {b for b in lists if not outputs.isdisjoint(b.inputs) or not read.isdisjoint(b.outputs)}


def fuse(trace: Trace, fusers: Sequence[FusionExecutor]) -> list[Trace]:
    """Forms regions of fusible operations, one fusion executor after the other. Returns a trace of each, and one before
    in which lists are decomposed."""
    traces = [trace]
    if any(derivatives.composed.of(operation.sym) for operation in trace.info.fusible):
        traces.append(timed_pass("Decompose Lists", trace, lambda t: _without_lists(t, fusers)))
    for fuser in fusers:
        title = "Fusion" if len(fusers) == 1 else f"Fusion by {fuser.name}"
        if not is_outside(type(fuser)):
            traces.append(timed_pass(title, traces[-1], fuser.fusion_pass))
            continue
        with named(f"the fusion executor {fuser.name}"):
            traces.append(check_change(traces[-1], timed_pass(title, traces[-1], fuser.fusion_pass)))
    return traces[1:]


def dispatch_left(trace: Trace, executors: Sequence[Executor]) -> Trace:
    """Gives the operations outside of regions to the executors that do not fuse.

    Before: `t0 = ltorch.mul(a, b)`, which no region has. After: `t0 = torch.mul(a, b)`.
    """
    others = tuple(e for e in executors if not isinstance(e, FusionExecutor))
    fusible = trace.info.fusible

    def rule(operation: BoundSymbol, out: Rewriter) -> None:
        symbol = operation.sym
        is_placed = symbol.is_fusion or symbol.executor is not None and operation not in fusible
        out.write(operation) if is_placed else _dispatched(operation, others, out, {})

    dispatched = rewrite(trace, rule)
    return dispatched.replace(info=dispatched.info.replace(fusible=frozenset()))


def _dispatched(
    operation: BoundSymbol, executors: tuple[Executor, ...], out: Rewriter, left: dict[BoundSymbol, None]
) -> None:
    """Writes the operations that execute `operation`."""
    symbol = operation.sym
    for executor in executors:
        implementation = executor.implementation(operation)
        if isinstance(executor, FusionExecutor):
            if implementation is not None and implementation.execution_transform is not None:
                if _rewrites(operation, executor, implementation.execution_transform, executors, out, left):
                    return
            elif executor.takes(operation):
                left[operation] = None
                return out.write(operation)
        elif implementation is not None and implementation.executes and executor.get_fuel():
            if implementation.symbol is not None and implementation.execution_transform is None:
                _check_meta(operation, executor, implementation.symbol)
                return out.write(operation.replace(sym=implementation.symbol, subsymbols=(operation,)))
            assert implementation.execution_transform is not None, (
                "an implementation has a symbol or an execution transform"
            )
            if _rewrites(operation, executor, implementation.execution_transform, executors, out, left):
                return
        elif implementation is None and executor.takes_primitives and _is_implemented(operation.primitive, executor):
            break
        if symbol.executor is executor:
            return out.write(operation)
    else:
        if symbol.python_printer is not None:
            return out.write(operation)
    if symbol.decomposition is None and not operation.subsymbols:
        raise MissingImplementationError(
            f"no executor takes {symbol.qualified_name}: asked {', '.join(e.name for e in executors)}. Register an "
            "implementation, or a decomposition (like=)."
        )
    if not operation.subsymbols and any(o not in operation.aliases for o in operation.outputs):
        raise MissingImplementationError(
            f"no executor takes {symbol.qualified_name}, and its decomposition depends on data-dependent sizes. "
            "Register an implementation"
        )
    for sub in operation.subsymbols:
        _dispatched(out.current(sub), executors, out, left)
    out.alias(operation.aliases)


def _check_types(operation: BoundSymbol, what: str, result: Any, remedy: str) -> None:
    """Raises DeclarationError where a result has another type than an operation. what: whose result it is, in words."""
    single = isinstance(operation.output, TensorProxy)
    values = [result] if single else leaves(result)
    for new, old in zip(values, leaves(operation.output)):
        if not isinstance(old, Proxy) or not (isinstance(new, Proxy) or single):
            continue
        if not isinstance(new, Proxy) or not is_like(new, old):
            error = DeclarationError(f"{what} returned {new!r}, where the operation gives {old!r}: {remedy}")
            error.bound_symbol = operation
            raise error


def _check_meta(operation: BoundSymbol, executor: Executor, symbol: Symbol) -> None:
    """Raises DeclarationError where the meta rule of a user's implementation is not that of the operation."""
    typing = symbol.meta or symbol.decomposition
    if typing is None or not is_outside(typing) or symbol is operation.sym:
        return
    what = f"the meta rule of {executor.name}.{symbol.name}, which implements {operation.sym.qualified_name},"
    try:
        with recording(Recorder(operation.context, lambda: operation.location)):
            result = typing(*operation.args, **operation.kwargs)
    except DataDependentError:
        return
    except TypeError as error:  # parameters with other names, or in another number
        problem = DeclarationError(f"{what} does not take its arguments: {error}")
        problem.bound_symbol = operation
        raise problem from error
    _check_types(operation, what, result, "correct meta=, or a checker= that lets it take this")


def _is_implemented(primitive: BoundSymbol | None, executor: Executor) -> bool:
    implementation = None if primitive is None else executor.implementation(primitive)
    return implementation is not None and implementation.executes


def _rewrites(
    operation: BoundSymbol,
    executor: Executor,
    transform: Callable,
    executors: tuple[Executor, ...],
    out: Rewriter,
    left: dict[BoundSymbol, None],
) -> bool:
    """Writes the operations of an execution transform of an operation. False where it asks about a data-dependent
    size, which has no answer."""
    what = f"the execution transform of {executor.name} for {operation.sym.qualified_name}"
    try:
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder, noted(what):
            result = transform(*operation.args, **operation.kwargs)
    except DataDependentError:
        return False
    _check_types(operation, what, result, "correct the transform, or a checker= that lets it take this")
    try:
        operations, aliases = adopt(recorder.bound_symbols, result, operation.output)
    except ValueError:
        raise MissingImplementationError(
            f"{what} returned another number of values than the operation has: "
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
        _dispatched(out.current(new), executors if its_own else others, out, left)
    out.alias(aliases)
    return True
