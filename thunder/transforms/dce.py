"""Dead code elimination."""

from __future__ import annotations

from thunder.core.proxies import NumberProxy, TensorProxy, numbers_in
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.ops.rules import effects


def dce(trace: Trace) -> Trace:
    """Drops operations whose results are not used and that have no effect.

    Before: `t0 = sin(x)`, `t1 = cos(x)`, `return t1`. After: `t1 = cos(x)`, `return t1`.
    """
    return trace.replace(bound_symbols=leading_to(trace.bound_symbols, trace.output_proxies, _has_effect))


def dce_of_captured(trace: Trace) -> Trace:
    """Drops operations of a captured program as `dce` does, but for those that may raise: eager PyTorch runs them.

    Before: `t0 = cholesky(x)`, `t1 = cos(x)`, `return t1`. After: `t0 = cholesky(x)`, `tried(t0)`, `t1 = cos(x)`,
    `return t1`.
    """
    live = leading_to(trace.bound_symbols, trace.output_proxies, _has_effect)
    if len(live) == len(trace.bound_symbols):
        return trace.replace(bound_symbols=live)
    alive, live_or_tried = set(map(id, live)), []
    for operation in trace.bound_symbols:
        live_or_tried.append(operation)
        if id(operation) not in alive and may_raise(operation):
            live_or_tried.append(tried.bind(operation.outputs[0], output=None, context=operation.context))
    return dce(trace.replace(bound_symbols=live_or_tried))


def _has_effect(operation: BoundSymbol) -> bool:
    return OpTags.DONT_DCE in operation.sym.tags


tried = Symbol("tried", lambda x: None, module="prims", is_prim=True, tags=(OpTags.DONT_DCE,), fn=lambda x: None)


def may_raise(operation: BoundSymbol) -> bool:
    """Whether an operation of the program, and not of a backward inside, may raise for some values of its arguments, or
    for a data-dependent size."""
    gives_tensors = any(isinstance(o, TensorProxy) for o in operation.outputs)
    if not gives_tensors or operation.context is not None and operation.context.backward:
        return False
    return _raises_for_sizes(operation) or _raises_for_values(operation)


def _raises_for_values(operation: BoundSymbol) -> bool:
    """An index out of range raises on the CPU. On a GPU an assertion of a kernel ends the process instead."""
    on_cpu = any(isinstance(x, TensorProxy) and x.device.type == "cpu" for x in operation.inputs)
    if on_cpu and effects.checks_data.holds(operation) or effects.may_raise.holds(operation):
        return True
    return any(map(_raises_for_values, operation.subsymbols))


def _raises_for_sizes(operation: BoundSymbol) -> bool:
    """Whether a data-dependent size is an argument, or that of an operand that has to fit to another one or to a
    shape."""
    tensors = [i for i in operation.inputs if isinstance(i, TensorProxy)]
    if operation.sym.elementwise and len(tensors) == 1:
        return False
    numbers: list[NumberProxy] = numbers_in([(operation.args, operation.kwargs)], [])
    return any(n.unbacked and n.python_type is not float for n in numbers)
