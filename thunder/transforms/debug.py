"""`DebugTransform`: call functions of the user before and after each operation of a program, and print their results in
its text.

Before: `t0 = torch.sin(x)`. After, with a pre_callback that returned "x is fine" when the program ran last:

    # x is fine
    debug_pre_sin(x)
    t0 = torch.sin(x)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.transforms.base import Transform


@dataclasses.dataclass
class DebugTransform(Transform):
    """pre_callback(operation, *args, **kwargs) and post_callback(operation, output, *args, **kwargs) are called when an
    operation runs; what they return is printed above it."""

    exact: ClassVar[bool] = True
    pre_callback: Callable | None = None
    post_callback: Callable | None = None

    def transform_trace_post_optimization(self, computation_trace: Trace, **kwargs) -> Trace:
        operations: list[BoundSymbol] = []
        for operation in computation_trace.bound_symbols:
            watched = operation.sym.python_printer is None
            if watched and self.pre_callback is not None:
                operations.append(_call("pre", self.pre_callback, operation, operation.args))
            operations.append(operation)
            if watched and self.post_callback is not None:
                operations.append(_call("post", self.post_callback, operation, (operation.output, *operation.args)))
        return computation_trace.replace(bound_symbols=operations)


def _call(when: str, callback: Callable, operation: BoundSymbol, args: tuple) -> BoundSymbol:
    """The operation that calls the user's callback before or behind another one."""

    def run(*args, **kwargs):
        inserted.header = str(callback(operation, *args, **kwargs) or "")

    symbol = Symbol(
        f"debug_{when}_{operation.sym.name}",
        id=("debug", when, id(operation)),
        is_prim=True,
        tags=(OpTags.DONT_DCE,),
        fn=run,
    )
    inserted = BoundSymbol(symbol, args, operation.kwargs, None, context=operation.context, location=operation.location)
    return inserted
