"""Rule tables: what one pass, executor or analysis asks of operations.

Whoever asks defines the meaning of a table, the family of an operation adds the operation's row beside its definition:

    rule: RuleTable[Callable | None] = RuleTable(None)          # beside the pass

    @batching.rule(softmax, log_softmax)                        # the family
    def _softmax_of_batch(batch, operation): ...

    batching.rule.of(operation.sym)                             # the pass

A row belongs to the symbol, so that it lives as long as the symbol, and the form of an operation that an executor runs
(`Symbol.executed`) has the operation's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from thunder.core.definition import Definition

T = TypeVar("T")


class RuleTable(Generic[T]):
    """A value for each operation that has a row, and `default` for the others."""

    __slots__ = ("default",)

    def __init__(self, default: T):
        self.default = default

    def of(self, symbol: Definition) -> T:
        """The value of an operation."""
        return symbol.rules.get(self, self.default)

    def set(self, value: T, *symbols: Definition) -> None:
        """Sets the value of operations."""
        for symbol in symbols:
            symbol.rules[self] = value

    def __call__(self, *symbols: Definition) -> Callable[[Any], Any]:
        """Decorator: the decorated function is the value of operations."""

        def define(function):
            self.set(function, *symbols)
            return function

        return define


class Property(RuleTable[bool | Callable[[Any], bool]]):
    """Whether something holds for an operation: always, or as a function of the bound symbol says."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(False)

    def add(self, *symbols: Definition, when: Callable[[Any], bool] | None = None) -> None:
        """Says that the property holds for operations. when: the bound symbols that it holds for."""
        self.set(True if when is None else when, *symbols)

    def holds(self, bound_symbol: Any) -> bool:
        """Whether the property holds for a bound symbol."""
        value = self.of(bound_symbol.sym)
        return value(bound_symbol) if callable(value) else value
