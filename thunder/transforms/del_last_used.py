"""Delete Last Used: free values after their last use."""

from __future__ import annotations

from thunder.core.codegen import Printer
from thunder.core.proxies import CollectionProxy, Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace


def _print_del(operation: BoundSymbol, printer: Printer) -> list[str]:
    return [f"del {', '.join(p.name for p in operation.args)}"] if printer.memory else []


python_del = Symbol("python_del", module="prims", is_prim=True, python_printer=_print_del)


def del_last_used(trace: Trace) -> Trace:
    """Inserts `del` after the last use of each value, arguments included, unless it is returned.

    Before: `t0 = sin(x)`, `t1 = cos(t0)`, `return t1`. After: `t0 = sin(x)`, `del x`, `t1 = cos(t0)`, `del t0`, `return
    t1`.
    """
    live = set(trace.output_proxies)
    operations: list[BoundSymbol] = []
    for operation in reversed(trace.bound_symbols):
        last: list[Proxy] = []
        for p in (*operation.inputs, *operation.outputs):
            if p not in live and not isinstance(p, CollectionProxy):
                live.add(p)
                last.append(p)
        if last:
            dead = tuple(last)
            operations.append(BoundSymbol(python_del, dead, {}, None, inputs=dead, outputs=()))
        operations.append(operation)
    unused: tuple[Proxy, ...] = tuple(
        a for a in trace.args if isinstance(a, Proxy) and not isinstance(a, CollectionProxy) and a not in live
    )
    if unused:
        operations.append(BoundSymbol(python_del, unused, {}, None, inputs=unused, outputs=()))
    return trace.replace(bound_symbols=operations[::-1])
