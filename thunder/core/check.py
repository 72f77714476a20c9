"""`check(trace)`: the invariants of traces."""

from __future__ import annotations

from thunder.core.proxies import Proxy, TensorProxy, proxies_in
from thunder.core.symbol import BoundSymbol, detached
from thunder.core.trace import Trace
from thunder.errors import DataDependentError, TraceCheckError


def check(trace: Trace) -> Trace:
    """Returns `trace` if each name is defined once and before its uses, no value is read after its `del`, and the
    recorded types are those of the meta rules. Otherwise raises TraceCheckError, which names the operation."""
    defined: dict[str, Proxy] = {}
    for a in trace.args:
        _define(trace, defined, a, None)
    for operation in trace.bound_symbols:
        for value in operation.inputs:
            if defined.get(value.name) is not value:
                raise _error(
                    trace,
                    operation,
                    f"{value.name} is used before it is defined, after it was deleted, or stands for two values",
                )
        if operation.sym.name == "python_del":
            for value in operation.inputs:
                del defined[value.name]
            continue
        _check_types(trace, operation)
        for o in operation.outputs:
            _define(trace, defined, o, operation)
    for value in trace.output_proxies:
        if defined.get(value.name) is not value:
            raise _error(trace, None, f"{value.name} is returned but not defined")
    return trace


def _define(trace: Trace, defined: dict[str, Proxy], value: Proxy, operation: BoundSymbol | None) -> None:
    known = defined.get(value.name)
    if known is not None and not (operation is not None and known is value and operation.has_input(value)):
        raise _error(trace, operation, f"{value.name} is defined twice")
    defined[value.name] = value


def _check_types(trace: Trace, operation: BoundSymbol) -> None:
    if (
        operation.sym.meta is None
        or operation.sym.is_fusion
        or operation.context is None
        or operation.sym.executor is not None
    ):
        return
    with detached(operation.context):
        try:
            again = operation.sym.meta(*operation.args, **operation.kwargs)
        except DataDependentError:  # typed by examples, and checked when it runs
            return
    found = proxies_in(again, [])
    if len(found) != len(operation.outputs):
        raise _error(
            trace,
            operation,
            f"it has {len(operation.outputs)} values, the meta rule of {operation.sym.qualified_name} gives "
            f"{len(found)}",
        )
    for said, is_ in zip(operation.outputs, found, strict=True):
        if (
            type(said) is not type(is_)
            or (isinstance(said, TensorProxy) and (said.dtype, said.device) != (is_.dtype, is_.device))
            or not _fits(said, is_)
        ):
            raise _error(
                trace,
                operation,
                f"{said!r} is what the trace says, the meta rule of {operation.sym.qualified_name} says {is_!r}",
            )


def _fits(said: Proxy, is_: Proxy) -> bool:
    """Whether two shapes are equal, where this does not depend on data: an unbacked size has a new name each
    time."""
    if not isinstance(said, TensorProxy):
        return True
    pairs = zip(said.shape, is_.shape)  # type: ignore[attr-defined]
    if len(said.shape) != len(is_.shape):  # type: ignore[attr-defined]
        return False
    return not any((m == n) is False for m, n in pairs)


def _error(trace: Trace, operation: BoundSymbol | None, what: str) -> TraceCheckError:
    where = f"\n  {operation!r}" if operation is not None else ""
    return TraceCheckError(f"{what}, in {trace.name} ({trace.provenance or 'as acquired'}){where}")
