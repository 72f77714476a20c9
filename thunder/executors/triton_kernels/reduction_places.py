"""The places at which reductions read their operands, and the order of the operands' dimensions in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thunder.executors.triton_kernels.values import Place, Value, sources
from thunder.kernels.index import Index, Variable, join, split, strides_of
from thunder.kernels.sizes import Extent, hint

PROBED = 1000  # bound on the values that the search for an order visits

Space = tuple[int | Extent, int | Extent]
Strides = Mapping[Value, Sequence[int | Extent]]


def space_of(reduction: Value) -> Space:
    """(rows, columns) of a reduction over columns."""
    shape, dims = reduction.operands[0].shape, reduction.what[1]
    return math.prod(n for d, n in enumerate(shape) if d not in dims), math.prod(shape[d] for d in dims)


def operand_place(reduction: Value, kept: Index, reduced: Index) -> Place:
    """The place of the operand, from the places in all kept and in all reduced dimensions."""
    shape, dims = reduction.operands[0].shape, sorted(reduction.what[1])
    others = [d for d in range(len(shape)) if d not in dims]
    at = dict(zip(others, split(kept, [shape[d] for d in others]), strict=True)) | dict(
        zip(dims, split(reduced, [shape[d] for d in dims]), strict=True)
    )
    return tuple(at[d] for d in range(len(shape)))


def partial_place(partial: Value, linear: Index, r: Variable, c: Variable) -> Place:
    """The place of the operand of a partial: of a row, or, where all dimensions are reduced, in the order of
    `linear`."""
    if len(partial.shape) == 1:
        return split(linear, partial.operands[0].shape)
    return operand_place(partial, Index.of(c), Index.of(r))


def reduced_place(reduction: Value, place: Place) -> Index:
    """The row of a reduction's result."""
    return join(place, strides_of(reduction.shape))


def along_memory(reduction: Value) -> bool:
    """Whether the last dimension in memory is reduced, for an operand in the order of its memory."""
    operand, dims = reduction.operands[0], reduction.what[1]
    long = [i for i, n in enumerate(operand.shape) if n != 1]
    return bool(long) and long[-1] in dims and operand.kind != "partial"


class Memory(NamedTuple):
    """order: dimensions from the slowest to the fastest. bytes: of an element."""

    order: tuple[int, ...]
    bytes: int


def memory_order(v: Value, strides: Strides) -> Memory:
    """The order in memory of the operands of a value: that of the first input that varies in all dimensions."""
    variables = [Variable(f"d{d}", n) for d, n in enumerate(v.shape)]
    long = [d for d, n in enumerate(v.shape) if n != 1]
    stack, seen = [(v, tuple(map(Index.of, variables)))], set()
    while stack and len(seen) < PROBED:
        value, place = stack.pop()
        if (key := (value, tuple(i.key for i in place))) in seen:
            continue
        seen.add(key)
        if value.kind in ("input", "reduce", "partial", "added"):
            terms = join(place, strides.get(value) or strides_of(value.shape)).terms
            steps = [abs(hint(terms.get(x, 0))) for x in variables]
            if all(steps[d] for d in long):
                return Memory(tuple(sorted(range(len(steps)), key=lambda d: -steps[d] if d in long else 0)),
                              value.dtype.bytes)  # fmt: skip
        elif value.kind in ("map", "cast"):
            stack += [(x, place) for x in reversed(value.operands) if isinstance(x, Value)]
        elif value.kind not in ("number", "iota", "philox", "gather"):
            stack += [(operand, there) for operand, there, _ in reversed(sources(value, place))]
    return Memory(tuple(range(len(v.shape))), v.dtype.bytes)
