"""Splitting rules: how operations compute one rank's part of their result from its parts of their operands.

A rule returns None where it does not know the arguments; then, and where there is no rule, the ranks join their parts
(`thunder.distributed.layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.ops.registry import LTORCH, PRIMS
from thunder.ops.rules import splitting


class Part(NamedTuple):
    """What this rank has of a value: an equal part along one of its dimensions."""

    value: TensorProxy
    group: Any
    dim: int


class Split(Protocol):
    """sequences: by group, the dimension of activations that its ranks share between layers."""

    sequences: dict[Any, int]

    def part(self, value) -> Part | None:
        """This rank's part of a value, where it can be computed of parts."""

    def copied(self, x: TensorProxy, group) -> TensorProxy:
        """A value that all ranks have, each of which gives a gradient of it."""

    def cut(self, value: TensorProxy, group, dim: int) -> TensorProxy:
        """This rank's part of a value that all have."""

    def computed(self, operation: BoundSymbol, table: dict, group, dim: int) -> Part:
        """The operation on parts, which makes the part along `dim` of its result."""


def _rule(*names: str):
    def define(function: Callable) -> Callable:
        for table in (LTORCH, PRIMS):
            for name in table.keys() & names:
                splitting.rule.set(function, table[name])
        return function

    return define


@_rule(
    "add",
    "sub",
    "div",
    "true_divide",
    "where",
    "masked_fill",
    "to",
    "clone",
    "convert_element_type",
    "clamp",
    "contiguous",
)
def elementwise(split: Split, operation: BoundSymbol) -> Part | None:
    """Every operand of the result's size along the dimension is there in part, or is cut."""
    rank = len(operation.output.shape)
    tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
    known = {p: part for p in tensors if (part := split.part(p)) is not None}
    places = {(part.group, part.dim - len(p.shape)) for p, part in known.items()}
    if len(places) > 1:  # parts of sequences and of features: the features are joined
        places = {(group, dim) for group, dim in places if split.sequences.get(group) == rank + dim}
    if len(places) != 1:
        return None
    group, place = places.pop()
    known = {p: part for p, part in known.items() if (part.group, part.dim - len(p.shape)) == (group, place)}
    size = operation.output.shape[place]
    table = {p: part.value for p, part in known.items()}
    for p in tensors:
        if p not in known:  # what is broadcast along the dimension has a gradient from every rank
            whole = len(p.shape) >= -place and p.shape[place] == size
            table[p] = split.cut(p, group, len(p.shape) + place) if whole else split.copied(p, group)
    return split.computed(operation, table, group, rank + place)


@_rule("reshape", "view", "flatten", "unflatten")
def _reshaped(split: Split, operation: BoundSymbol) -> Part | None:
    """The dimension becomes another one with the same elements before it, which the ranks divide as well."""
    part = split.part(operation.inputs[0])
    if part is None or len(operation.inputs) != 1 or operation.output.dtype is not operation.inputs[0].dtype:
        return None
    shape, n = tuple(operation.output.shape), part.group.size()
    before = math.prod(operation.inputs[0].shape[: part.dim])
    dim = next((i for i, size in enumerate(shape) if math.prod(shape[:i]) == before and size > 1), None)
    if dim is None or shape[dim] % n:
        return None
    return Part(LTORCH["reshape"](part.value, (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])), part.group, dim)


@_rule("transpose", "permute", "t")
def _transposed(split: Split, operation: BoundSymbol) -> Part | None:
    part = split.part(operation.inputs[0])
    rank = len(operation.output.shape)
    if part is None or rank < 2:
        return None
    if operation.sym.name == "permute":
        order = [d % rank for d in operation.args[1]]
    else:
        order = list(range(rank))
        a, b = (0, 1) if operation.sym.name == "t" else (d % rank for d in operation.args[1:3])
        order[a % rank], order[b % rank] = b % rank, a % rank
    return split.computed(operation, {operation.inputs[0]: part.value}, part.group, order.index(part.dim))


@_rule("getitem")
def _indexed(split: Split, operation: BoundSymbol) -> Part | None:
    """Slices, numbers and new dimensions, which take all of the parts' dimension."""
    part, key = (
        split.part(operation.inputs[0]),
        operation.args[1] if isinstance(operation.args[1], tuple) else (operation.args[1],),
    )
    if (
        part is None
        or not all(k is None or k is Ellipsis or type(k) in (int, slice) for k in key)
        or len(operation.inputs) != 1
    ):
        return None
    missing = len(operation.inputs[0].shape) - sum(k is not None and k is not Ellipsis for k in key)
    at = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
    dim = place = 0
    for k in (*key[:at], *[slice(None)] * missing, *key[at + 1 :]):
        if dim == part.dim and k is not None:
            return (
                split.computed(operation, {operation.inputs[0]: part.value}, part.group, place)
                if k == slice(None)
                else None
            )
        dim, place = dim + (k is not None), place + (type(k) is not int)
    return None


@_rule("unsqueeze")
def _unsqueezed(split: Split, operation: BoundSymbol) -> Part | None:
    part, dim = (
        split.part(operation.inputs[0]),
        (operation.args[1] if len(operation.args) > 1 else operation.kwargs["dim"]) % len(operation.output.shape),
    )
    return (
        None
        if part is None
        else split.computed(operation, {operation.inputs[0]: part.value}, part.group, part.dim + (dim <= part.dim))
    )


@_rule("expand")
def _expanded(split: Split, operation: BoundSymbol) -> Part | None:
    part, shape = split.part(operation.inputs[0]), tuple(operation.output.shape)
    if part is None or len(operation.inputs) != 1:
        return None
    place = part.dim + len(shape) - len(operation.inputs[0].shape)
    return Part(
        LTORCH["expand"](part.value, (*shape[:place], shape[place] // part.group.size(), *shape[place + 1 :])),
        part.group,
        place,
    )


@_rule("repeat_interleave")
def _repeated(split: Split, operation: BoundSymbol) -> Part | None:
    """Each element several times: repeat_interleave with a number and a dimension."""
    part = split.part(operation.inputs[0])
    if (
        part is None
        or len(operation.args) != 3
        or type(operation.args[1]) is not int
        or type(operation.args[2]) is not int
        or operation.kwargs
    ):
        return None
    return split.computed(operation, {operation.inputs[0]: part.value}, part.group, part.dim)


@_rule("cat")
def _joined(split: Split, operation: BoundSymbol) -> Part | None:
    """cat along another dimension than that of the parts; what has no elements and one dimension plays no part in
    it."""
    tensors = [p for p in dict.fromkeys(operation.args[0]) if tuple(p.shape) != (0,)]
    parts = {p: part for p in tensors if (part := split.part(p)) is not None}
    dim = (operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)) % len(
        operation.output.shape
    )
    places = {(part.group, part.dim) for part in parts.values()}
    if len(places) != 1 or (place := places.pop())[1] == dim:
        return None
    table = {p: parts[p].value if p in parts else split.cut(p, *place) for p in tensors}
    return split.computed(operation, table, *place)


@_rule("matmul")
def _product(split: Split, operation: BoundSymbol) -> Part | None:
    """All tensors are in parts along one of the dimensions that a product computes one by one."""
    tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
    parts = {p: part for p in tensors if (part := split.part(p)) is not None}
    places = {(part.group, part.dim - len(p.shape)) for p, part in parts.items()}
    if len(parts) != len(tensors) or len(places) != 1 or len({len(p.shape) for p in tensors}) != 1:
        return None
    group, place = places.pop()
    if place in (-1, -2):
        return None
    table = {p: part.value for p, part in parts.items()}
    return split.computed(operation, table, group, len(operation.output.shape) + place)


@_rule("scaled_dot_product_attention")
def _attention(split: Split, operation: BoundSymbol) -> Part | None:
    """Heads are computed apart. Dropout would draw one mask on all ranks."""
    mask, dropout = (
        (*operation.args[3:5], None, 0.0)[:2]
        if len(operation.args) > 4
        else (operation.args[3] if len(operation.args) > 3 else None, 0.0)
    )
    one_for_all = (
        not isinstance(mask, TensorProxy) or not mask.requires_grad and (len(mask.shape) < 3 or mask.shape[-3] == 1)
    )
    parts = [split.part(p) for p in operation.args[:3]] if one_for_all and not dropout else [None]
    heads = len(operation.output.shape) - 3
    if None in parts or heads < 0 or {(part.group, part.dim) for part in parts} != {(parts[0].group, heads)}:
        return None
    return split.computed(
        operation, {p: part.value for p, part in zip(operation.args[:3], parts)}, parts[0].group, heads
    )


@_rule("layer_norm", "rms_norm")
def _normalized(split: Split, operation: BoundSymbol) -> Part | None:
    """Norms over other dimensions than that of the parts."""
    part = split.part(operation.inputs[0])
    if part is None or part.dim >= len(operation.output.shape) - len(operation.args[1]):
        return None
    table = {p: split.copied(p, part.group) for p in operation.inputs[1:]} | {operation.inputs[0]: part.value}
    return split.computed(operation, table, part.group, part.dim)


@_rule("softmax", "log_softmax")
def _along_dim(split: Split, operation: BoundSymbol) -> Part | None:
    """softmax and its like, of another dimension than that of the parts."""
    part = split.part(operation.inputs[0])
    dim = (
        operation.args[1] % len(operation.output.shape)
        if len(operation.args) > 1 and isinstance(operation.args[1], int)
        else None
    )
    return (
        None
        if part is None or dim is None or part.dim == dim
        else split.computed(operation, {operation.inputs[0]: part.value}, part.group, part.dim)
    )
