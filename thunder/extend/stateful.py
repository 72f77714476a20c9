"""Executors whose operations come into being with the programs that call them: with a state for each call, or with
names that nobody else has."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.extend import OperatorExecutor, _check_callable


class StatefulExecutor(OperatorExecutor):
    """An executor with operations that keep something from run to run, as scales of low-precision formats."""

    def register_stateful_operator(self, name: str, state_class: Callable, *, meta: Callable) -> Symbol:
        """Makes an operation with a state for each place it is called from: `state_class()`, made when the call is
        captured and called with the arguments when it runs.

        Each call prints under a number of its own, `name_0`, `name_1`. A program that is captured again starts with new
        states. meta: see `register_operator`.
        """
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
    """An executor for operations that belong to one program: its name and those of its operations are made up, and
    taken by nobody else."""

    def __init__(self):
        super().__init__(f"temporary_{id(self)}")

    def register_operator(self, name: str, **options) -> Symbol:
        """`OperatorExecutor.register_operator`, with a number added to the name."""
        return super().register_operator(f"{name}_{len(self.opmap)}", **options)
