"""Splitting: how operations compute one rank's part of their result from its parts of their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from thunder.core.proxies import TensorProxy
from thunder.core.rule_table import RuleTable
from thunder.core.symbol import BoundSymbol, OpTags


class Part(NamedTuple):
    """What this rank has of a value: an equal part along one of its dimensions. axis: that of the mesh."""

    value: TensorProxy
    axis: Any
    dim: int


class Split(Protocol):
    """sequences: by axis of the mesh, the dimension of activations that its ranks share between layers.
    shares_positions: whether the ranks share positions in all layers, so that attention gathers keys."""

    sequences: dict[Any, int]
    shares_positions: bool

    def part(self, value) -> Part | None:
        """This rank's part of a value, where it can be computed of parts."""

    def copied(self, x: TensorProxy, axis) -> TensorProxy:
        """A value that all ranks have, each of which gives a gradient of it."""

    def gathered_over(self, x: TensorProxy, axis) -> TensorProxy:
        """The whole of a value that the ranks have parts of, each of which gives a gradient of it."""

    def summed_over(self, x: TensorProxy, axis) -> TensorProxy:
        """The sum of what each rank has."""

    def largest_over(self, x: TensorProxy, axis) -> TensorProxy:
        """The largest of the elements that each rank has at a place; without a gradient."""

    def cut(self, value: TensorProxy, axis, dim: int) -> TensorProxy:
        """This rank's part of a value that all have."""

    def computed(self, operation: BoundSymbol, table: dict, axis, dim: int) -> Part:
        """The operation on parts, which makes the part along `dim` of its result."""


rule: RuleTable[Callable[[Split, BoundSymbol], Part | None] | None] = RuleTable(None)
"""Computes the operation on parts. It returns None where it does not know the arguments; then, and where there is no
rule, the ranks join their parts (`thunder.distributed.layers`)."""

several: RuleTable[Callable[[Split, BoundSymbol], Sequence[Part] | None] | None] = RuleTable(None)
"""Computes an operation with several results on parts."""

total: RuleTable[Callable[[Split, BoundSymbol], TensorProxy | None] | None] = RuleTable(None)
"""Computes the whole result of an operation that reduces the dimension of parts: what each rank has of it is summed."""


# ----------------------------------------------------------------------------------------------------------------
# rules that operations of several families have


def argument(operation: BoundSymbol, name: str) -> Any:
    """An argument of an operation by its name, its default where it is left out."""
    places = dict(zip(operation.sym.parameters, operation.args, strict=False))
    return (operation.sym.defaults | places | operation.kwargs).get(name)


def is_elementwise(operation: BoundSymbol) -> bool:
    """Whether an operation, or all that it is composed of, computes elements from those at the same place."""
    return (
        operation.sym.elementwise
        or rule.of(operation.sym) is elementwise
        or bool(operation.subsymbols)
        and OpTags.SHAPE_OP not in operation.sym.tags
        and all(map(is_elementwise, operation.subsymbols))
    )


def rule_of(operation: BoundSymbol, only_elements: bool = False) -> Callable[[Split, BoundSymbol], Part | None] | None:
    """How an operation is computed on parts. only_elements: by elementwise operations alone, which read no padding."""
    known = None if only_elements else rule.of(operation.sym)
    return known or (elementwise if is_elementwise(operation) else None)


def along(split: Split, operation: BoundSymbol) -> Part | None:
    """An operation along one dimension, which is not that of parts. All tensors have its dimensions."""
    result, dim = operation.output, argument(operation, "dim")
    tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
    if type(dim) is not int or any(len(p.shape) != len(result.shape) for p in tensors):
        return None
    parts = {p: part for p in tensors if (part := split.part(p)) is not None}
    places = {(part.axis, part.dim) for part in parts.values()}
    if len(places) != 1:
        return None
    axis, split_dim = places.pop()
    if split_dim == dim % len(result.shape) or any(p.shape[split_dim] != result.shape[split_dim] for p in tensors):
        return None
    table = {p: parts[p].value if p in parts else split.cut(p, axis, split_dim) for p in tensors}
    return split.computed(operation, table, axis, split_dim)


def several_along(split: Split, operation: BoundSymbol) -> Sequence[Part] | None:
    """Results of one tensor along one dimension, which is not that of its parts, that have all of its dimensions."""
    (x,) = (p for p in operation.inputs if isinstance(p, TensorProxy))
    part, dim = split.part(x), argument(operation, "dim")
    if part is None or type(dim) is not int or dim % len(x.shape) == part.dim:
        return None
    if any(len(o.shape) != len(x.shape) for o in operation.outputs):
        return None
    args = [part.value if a is x else a for a in operation.args]
    return [Part(one, part.axis, part.dim) for one in operation.sym(*args, **operation.kwargs)]


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
    axis, split_dim = places.pop()
    known = {p: part for p, part in known.items() if (part.axis, part.dim - len(p.shape)) == (axis, split_dim)}
    size = operation.output.shape[split_dim]
    table = {p: part.value for p, part in known.items()}
    for p in tensors:
        if p not in known:  # what is broadcast along the dimension has a gradient from every rank
            whole = len(p.shape) >= -split_dim and p.shape[split_dim] == size
            table[p] = split.cut(p, axis, len(p.shape) + split_dim) if whole else split.copied(p, axis)
    return split.computed(operation, table, axis, rank + split_dim)
