"""Executors whose operations come into being with the programs that call them: with a state for each call, or with
names that nobody else has."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.extend import OperatorExecutor, _check_callable


class StatefulExecutor(OperatorExecutor):
    """An executor whose operations keep state between runs, such as the scales of low-precision formats."""

    def register_stateful_operator(self, name: str, state_class: Callable, *, meta: Callable) -> Symbol:
        """Registers an operation with state. Each call in a program has its own state: `state_class()` is created
        when the call is captured, and called with the arguments when the program runs."""
        _check_callable(f"register_stateful_operator({name!r})", state_class=state_class, meta=meta)

        def numbered(operation: BoundSymbol) -> BoundSymbol:
            assert operation.context is not None, "a recorded operation has a context"
            own = Symbol(
                operation.context.names.make(f"{name}_"), operation.sym.meta, id=operation.sym.id, is_prim=True,
                    tags=tuple(operation.sym.tags), fn=state_class(), executor=self
            )  # fmt: skip
            return operation.replace(sym=own)

        def nowhere(*args, **kwargs):
            return state_class()(*args, **kwargs)

        return self.register_operator(name, meta=meta, fn=nowhere, tags=(OpTags.DONT_DCE,), bind_postprocess=numbered)


class TemporaryExecutor(OperatorExecutor):
    """An executor for the operations of one program. Its name and the names of its operations are generated and
    unique."""

    def __init__(self):
        super().__init__(f"temporary_{id(self)}")

    def register_operator(self, name: str, **options) -> Symbol:
        """`OperatorExecutor.register_operator`, with a number appended to the name."""
        return super().register_operator(f"{name}_{len(self.opmap)}", **options)
