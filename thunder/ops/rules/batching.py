"""Batching: how operations compute for each element of a batch, whose dimension comes first (`vmap`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from thunder.core.proxies import TensorProxy, proxies_in
from thunder.core.rule_table import Property, RuleTable
from thunder.core.symbol import BoundSymbol
from thunder.ops import ltorch
from thunder.ops.torch_types import to_torch_dtype


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

in_type_of_result = Property()
"""The operation computes in the type of its result, to which its operands may be converted first."""


# ----------------------------------------------------------------------------------------------------------------
# rules that operations of several families have


def only_first(batch: Batch, operation: BoundSymbol) -> bool:
    """Whether the first operand is mapped, and nothing else."""
    return (
        isinstance(operation.args[0], TensorProxy)
        and operation.args[0] in batch.moved
        and not any(p in batch.moved for p in proxies_in(operation.args[1:], []))
    )


def aligned(batch: Batch, x, rank: int):
    """A mapped value with ones after the batch, so that the rest of its shape is of this rank."""
    value = batch.at(x)
    if x in batch.moved and len(x.shape) < rank:
        return ltorch.reshape(value, (batch.size, *(1,) * (rank - len(x.shape)), *x.shape))
    return value


def shifted(dim, rank: int):
    """A dim, or several, of an element as dims of the batch."""
    return tuple(d % rank + 1 for d in dim) if isinstance(dim, (tuple, list)) else dim % rank + 1


def elementwise(batch: Batch, operation: BoundSymbol):
    """Operands broadcast, and have one dtype: a tensor of rank 0 counts less in PyTorch's rules of types; mapped, it
    has another rank."""
    tensors = [x for x in operation.args if type(x) is TensorProxy]
    if len({x.dtype for x in tensors}) == 1:
        return broadcast(batch, operation, tensors)
    if not in_type_of_result.holds(operation):
        return None
    kind, rank = operation.outputs[0].dtype, max(len(x.shape) for x in tensors)  # type: ignore[union-attr]
    operands = [
        ltorch.to(aligned(batch, x, rank), dtype=to_torch_dtype(kind)) if type(x) is TensorProxy else x
        for x in operation.args
    ]
    return operation.sym(*operands, **operation.kwargs)


def broadcast(batch: Batch, operation: BoundSymbol, tensors: list[TensorProxy]):
    """The operation on tensors whose ranks are made equal."""
    rank = max(len(x.shape) for x in tensors)
    return operation.sym(
        *(aligned(batch, x, rank) if type(x) is TensorProxy else x for x in operation.args), **operation.kwargs
    )


def same(batch: Batch, operation: BoundSymbol):
    """The same call."""
    if not only_first(batch, operation):
        return None
    return operation.sym(batch.at(operation.args[0]), *operation.args[1:], **operation.kwargs)


def along(batch: Batch, operation: BoundSymbol):
    """An operation along dims, its second argument; all of them where it is None or ()."""
    a, rank = operation.args[0], len(operation.args[0].shape)
    dim = operation.args[1] if len(operation.args) > 1 else None
    if not rank or not only_first(batch, operation):
        return None
    dim = shifted(tuple(range(rank)) if dim is None or dim == () else dim, rank)
    return operation.sym(batch.at(a), dim, *operation.args[2:], **operation.kwargs)
