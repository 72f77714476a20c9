"""Splitting: how operations compute one rank's part of their result from its parts of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from thunder.core.proxies import TensorProxy
from thunder.core.rule_table import RuleTable
from thunder.core.symbol import BoundSymbol


class Part(NamedTuple):
    """What this rank has of a value: an equal part along one of its dimensions. axis: that of the mesh."""

    value: TensorProxy
    axis: Any
    dim: int


class Split(Protocol):
    """sequences: by axis of the mesh, the dimension of activations that its ranks share between layers."""

    sequences: dict[Any, int]

    def part(self, value) -> Part | None:
        """This rank's part of a value, where it can be computed of parts."""

    def copied(self, x: TensorProxy, axis) -> TensorProxy:
        """A value that all ranks have, each of which gives a gradient of it."""

    def cut(self, value: TensorProxy, axis, dim: int) -> TensorProxy:
        """This rank's part of a value that all have."""

    def computed(self, operation: BoundSymbol, table: dict, axis, dim: int) -> Part:
        """The operation on parts, which makes the part along `dim` of its result."""


rule: RuleTable[Callable[[Split, BoundSymbol], Part | None] | None] = RuleTable(None)
"""Computes the operation on parts. It returns None where it does not know the arguments; then, and where there is no
rule, the ranks join their parts (`thunder.distributed.layers`)."""


# ----------------------------------------------------------------------------------------------------------------
# rules that operations of several families have


def elementwise(split: Split, operation: BoundSymbol) -> Part | None:
    """Every operand of the result's size along the dimension is there in part, or is cut."""
    rank = len(operation.output.shape)
    tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
    known = {p: part for p in tensors if (part := split.part(p)) is not None}
    places = {(part.axis, part.dim - len(p.shape)) for p, part in known.items()}
    if len(places) > 1:  # parts of sequences and of features: the features are joined
        places = {(axis, dim) for axis, dim in places if split.sequences.get(axis) == rank + dim}
    if len(places) != 1:
        return None
    axis, place = places.pop()
    known = {p: part for p, part in known.items() if (part.axis, part.dim - len(p.shape)) == (axis, place)}
    size = operation.output.shape[place]
    table = {p: part.value for p, part in known.items()}
    for p in tensors:
        if p not in known:  # what is broadcast along the dimension has a gradient from every rank
            whole = len(p.shape) >= -place and p.shape[place] == size
            table[p] = split.cut(p, axis, len(p.shape) + place) if whole else split.copied(p, axis)
    return split.computed(operation, table, axis, rank + place)
