"""Batching: how operations compute for each element of a batch, whose dimension comes first (`vmap`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from thunder.core.rule_table import Property, RuleTable
from thunder.core.symbol import BoundSymbol


class Batch(Protocol):
    """size: of the batch. moved: values of the program for which there are values with the batch in front."""

    size: Any
    moved: dict

    def at(self, x) -> Any:
        """The batched value of `x`, or `x` itself, which is the same for all elements."""


rule: RuleTable[Callable[[Batch, BoundSymbol], Any] | None] = RuleTable(None)
"""Computes the operation for each element of a batch. It returns None where it does not know the arguments; then, and
where there is no rule, torch.vmap carries the operation out."""

unknown_to_vmap = Property()
"""torch.vmap refuses the operation, or computes something else: the decomposition is mapped."""
