"""Checked execution: each operation compares the types of its results with those in the trace. For
`DebugOptions(check_traces=True)`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder.core.proxies import Proxy, TensorProxy, type_string
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace
from thunder.errors import TraceCheckError, add_location
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype


def check_results(trace: Trace, where: Callable) -> Trace:
    """The same program with functions that raise TraceCheckError where a result has another type than its meta rule
    gave.

    where: (filename, line, function, source line) of an operation's location.
    """
    return trace.replace(bound_symbols=[_checked(operation, where) for operation in trace.bound_symbols])


def _checked(operation: BoundSymbol, where: Callable) -> BoundSymbol:
    function = operation.sym.fn
    # a function that is called for its effect may return anything
    if function is None or operation.sym.python_printer is not None or operation.output is None:
        return operation

    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        problem = _difference(result, operation.output)
        if problem is not None:
            error = TraceCheckError(
                f"{operation.sym.qualified_name} {problem}: correct the meta= of the operation, or the function that "
                "executes it"
            )
            if operation.location:
                add_location(error, where(operation.location))
            raise error
        return result

    symbol = Symbol(
        operation.sym.name,
        id=operation.sym.id,
        is_prim=True,
        fn=run,
        executor=operation.sym.executor,
        is_fusion=operation.sym.is_fusion,
    )
    return operation.replace(sym=symbol)


def _difference(result, said) -> str | None:
    if isinstance(said, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(said):
            found = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
            return f"returned {found} where its meta rule says {len(said)} values"
        return next((p for r, s in zip(result, said, strict=True) if (p := _difference(r, s)) is not None), None)
    if isinstance(said, TensorProxy):
        return _tensor_difference(result, said)
    if said is None or isinstance(said, Proxy) or result is said:  # what has no name is dead
        return None
    return (
        None
        if type(said) is type(result) and result == said
        else f"returned {result!r} where its meta rule says {said!r}"
    )


def _tensor_difference(result, said: TensorProxy) -> str | None:
    if not isinstance(result, torch.Tensor):
        return (
            f'returned a {type(result).__name__} where its meta rule says a tensor, {said.name}: "{type_string(said)}"'
        )
    shape = (
        tuple(n if type(m) is int else m for n, m in zip(result.shape, said.shape))
        if result.dim() == said.ndim
        else tuple(result.shape)
    )
    found = TensorProxy(
        "found", shape=shape, dtype=from_tensor_dtype(result.dtype), device=from_tensor_device(result.device)
    )
    if type_string(found) == type_string(said):
        return None
    return f'returned "{type_string(found)}" where its meta rule says {said.name}: "{type_string(said)}"'
