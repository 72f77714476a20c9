"""Join Parts: join the gradients of slices that do not overlap, instead of adding them.

Before: `t4 = select_backward(t1, (3, 8), 0, 2)`, `t5 = add_part(t4, t2, ("select", (3, 8), 0, 1))`, `t6 = add_part(t5,
t3, ("select", (3, 8), 0, 0))`. After: `t6 = stack([t3, t2, t1], 0)`.

The backward of a loop over slices is one operation then, which fused kernels can read the parts through. Gaps are
zeros. Gradients of one slice are added first, in their order, so that each element of the result equals eager's bit for
bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from thunder.analysis.flow import producers, uses
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import ltorch
from thunder.ops.families.parts import add_part, part_of_zeros

FEWEST = 3  # parts of a join; a sum of fewer is as fast


class _Part(NamedTuple):
    """The gradient of a slice, and the range of the slice along one dimension. selected: the slice is one index, so
    that the gradient lacks the dimension."""

    value: TensorProxy
    dim: int
    start: int
    end: int
    selected: bool


def joined_parts(trace: Trace) -> Trace:
    """The trace with one join for each sum of parts along one dimension, which do not overlap or are the same."""
    additions = [b for b in trace.bound_symbols if b.sym is add_part]
    if not additions:
        return trace
    producer, used = producers(trace), uses(trace.bound_symbols, trace.output_proxies)
    inner = {b.args[0] for b in additions if used[b.args[0]] == 1}
    chosen: dict[BoundSymbol, _Sum] = {}
    for b in additions:
        if b.output not in inner and (found := _sum(b, producer, inner)) is not None:
            chosen[b] = found
    if not chosen:
        return trace
    gone = {operation for found in chosen.values() for operation in found.operations}

    def rule(b: BoundSymbol, out: Rewriter) -> None:
        if b in chosen:
            out.trace(lambda a, part, *steps: _joined(b.output, chosen[b]), b)
        elif b not in gone:
            out.write(b)

    return rewrite(trace, rule, optional=True)


class _Sum(NamedTuple):
    """A sum of parts in order. whole: the value that they are added to, None where the first part is a part of zeros.
    operations: the additions."""

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
    """The part of one `select` or `slice` with constant bounds, else None."""
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
        value = ltorch.unsqueeze(p.value, dim) if p.selected and not stacked else p.value
        place = p.start, p.end
        at[place] = ltorch.add(at[place], value) if place in at else value
    pieces, end = [], 0
    for (start, stop), value in [*sorted(at.items(), key=lambda item: item[0]), ((shape[dim], shape[dim]), None)]:
        if start > end:
            gap = (*shape[:dim], start - end, *shape[dim + 1 :])
            pieces.append(ltorch.zeros(gap, device=result.device, dtype=result.dtype))
        pieces += [value] if value is not None else []
        end = stop
    joined = (ltorch.stack if stacked else ltorch.cat)(pieces, dim)
    return joined if whole is None else ltorch.add(whole, joined)
