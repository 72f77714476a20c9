"""Join Parts: the gradients of slices that do not overlap are joined, not added up.

Before: `t4 = select_backward(t1, (3, 8), 0, 2)`, `t5 = add_part(t4, t2, ("select", (3, 8), 0, 1))`, `t6 = add_part(t5,
t3, ("select", (3, 8), 0, 0))`. After: `t6 = stack([t3, t2, t1], 0)`.

A loop over slices of a value is one operation then, which kernels that are fused read the parts from. Gaps are zeros;
gradients of the same slice are added first, in their order, so that each element of the result is eager's bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from thunder.analysis.flow import producers, uses
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import LTORCH
from thunder.ops.parts import add_part, part_of_zeros

__all__ = ["has_parts", "joined_parts"]

FEWEST = 3  # parts, below which a sum is as good


class _Part(NamedTuple):
    """A gradient, and the places along a dimension that it belongs to; one place is a dimension less."""

    value: TensorProxy
    dim: int
    start: int
    end: int
    selected: bool


def has_parts(program: Trace) -> bool:
    return any(b.sym is add_part for b in program.bound_symbols)


def joined_parts(trace: Trace) -> Trace:
    """Joins parts that are added up where all are of one dimension, and each two of the same places or of others."""
    producer, used = producers(trace), uses(trace.bound_symbols, trace.output_proxies)
    inner = {b.args[0] for b in trace.bound_symbols if b.sym is add_part and used[b.args[0]] == 1}
    chosen: dict[BoundSymbol, _Sum] = {}
    for b in trace.bound_symbols:
        if b.sym is add_part and b.output not in inner and (found := _sum(b, producer, inner)) is not None:
            chosen[b] = found
    gone = {operation for found in chosen.values() for operation in found.operations}

    def rule(b: BoundSymbol, out: Rewriter) -> None:
        if b in chosen:
            out.trace(lambda a, part, *steps: _joined(b.output, chosen[b]), b)
        elif b not in gone:
            out.write(b)

    return rewrite(trace, rule)


class _Sum(NamedTuple):
    """Parts that are added up, the first one first; what they are added to, None where the first is; what adds them."""

    whole: Proxy | None
    parts: list[_Part]
    operations: list[BoundSymbol]


def _sum(last: BoundSymbol, producer: dict, inner: set) -> _Sum | None:
    parts: list[_Part | None] = []
    operations: list[BoundSymbol] = []
    value: Proxy = last.output
    while (b := producer.get(value)) is not None and b.sym is add_part and (value is last.output or value in inner):
        parts.append(_part(b.args[1], b.args[2:]))
        operations.append(b)
        value = b.args[0]
    whole: Proxy | None = value
    if value in inner and (first := part_of_zeros(value, producer)) is not None and len(first[1]) == 1:
        parts.append(_part(*first))
        operations.append(producer[value])
        whole = None
    found = [p for p in reversed(parts) if p is not None]
    if len(found) < max(FEWEST, len(parts)) or len({p.dim for p in found}) > 1:
        return None
    places = sorted({(p.start, p.end) for p in found})
    if any(end > start for (_, end), (start, _) in zip(places, places[1:])):
        return None
    return _Sum(whole, found, operations) if whole is None or len(places) == len(found) else None


def _part(value: Any, steps: tuple[tuple, ...]) -> _Part | None:
    """A part that one step puts at constant places."""
    (kind, *arguments), *others = steps
    if others or kind not in ("select", "slice"):
        return None
    sizes, dim, *rest = arguments
    if not all(type(n) is int for n in (sizes[dim], *rest)):
        return None
    if kind == "select":
        start = rest[0] % sizes[dim]
        return _Part(value, dim % len(sizes), start, start + 1, True)
    start, end, step = slice(*rest).indices(sizes[dim])
    return _Part(value, dim % len(sizes), start, end, False) if step == 1 and start < end else None


def _joined(result: TensorProxy, found: _Sum) -> TensorProxy:
    whole, parts = found.whole, found.parts
    dim, shape = parts[0].dim, result.shape
    stacked = all(p.selected for p in parts) and len({p.start for p in parts}) == shape[dim]
    at: dict[tuple[int, int], TensorProxy] = {}
    for p in parts:
        value = LTORCH["unsqueeze"](p.value, dim) if p.selected and not stacked else p.value
        place = p.start, p.end
        at[place] = LTORCH["add"](at[place], value) if place in at else value
    pieces, end = [], 0
    for (start, stop), value in [*sorted(at.items(), key=lambda item: item[0]), ((shape[dim], shape[dim]), None)]:
        if start > end:
            gap = (*shape[:dim], start - end, *shape[dim + 1 :])
            pieces.append(LTORCH["zeros"](gap, device=result.device, dtype=result.dtype))
        pieces += [value] if value is not None else []
        end = stop
    joined = LTORCH["stack" if stacked else "cat"](pieces, dim)
    return joined if whole is None else LTORCH["add"](whole, joined)
