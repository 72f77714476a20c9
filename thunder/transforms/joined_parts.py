"""Join Parts: join the gradients of slices that do not overlap, instead of adding them.

Before: `t4 = select_backward(t1, (3, 8), 0, 2)`, `t5 = add_part(t4, t2, ("select", (3, 8), 0, 1))`, `t6 = add_part(t5,
t3, ("select", (3, 8), 0, 0))`. After: `t6 = stack([t3, t2, t1], 0)`.

The backward of a loop over slices is one operation then, which fused kernels can read the parts through. Gaps are
zeros. Gradients of one slice are added first, in their order, so that each element of the result equals eager's bit for
bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend.patterns import Flow
from thunder.extend.rules import CUT, Match, Rule
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


class _Sum(NamedTuple):
    """A sum of parts in order. whole: the value that they are added to, None where the first part is a part of
    zeros."""

    whole: Proxy | None
    parts: list[_Part]


def _sum(last: BoundSymbol, flow: Flow) -> _Sum | None:
    """The sum that an addition ends, where its parts can be joined."""
    if _is_inner(last.output, flow):
        return None
    parts: list[_Part | None] = []
    operations: list[BoundSymbol] = []
    value: Proxy = last.output
    while (b := flow.producer(value)) is not None and b.sym is add_part and (b is last or _is_inner(value, flow)):
        parts.append(_part(b.args[1], b.args[2:]))
        operations.append(b)
        value = b.args[0]
    whole: Proxy | None = value
    first = part_of_zeros(value, flow.producers) if _is_inner(value, flow) else None
    if first is not None and len(first[1]) == 1:
        parts.append(_part(*first))
        whole = None
    known = [p for p in reversed(parts) if p is not None]
    if len(known) < max(FEWEST, len(parts)) or len({p.dim for p in known}) > 1:
        return None
    places = sorted({(p.start, p.end) for p in known})
    if any(end > start for (_, end), (start, _) in zip(places, places[1:])):
        return None
    return _Sum(whole, known) if whole is None or len(places) == len(known) else None


def _is_inner(value: Proxy, flow: Flow) -> bool:
    """Whether an addition of a part alone reads a value, as the sum so far."""
    return flow.uses(value) == 1 and any(c.sym is add_part and c.args[0] is value for c in flow.consumers(value))


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


def _can_be_joined(*_, match: Match) -> bool:
    return _sum(match.operation, match.flow) is not None


def _joined(*_, match: Match) -> TensorProxy:
    """The replacement: one concatenation or stack of all slices."""
    total, result = _sum(match.operation, match.flow), match.operation.output
    assert total is not None, "the condition holds"
    whole, parts = total
    dim, shape = parts[0].dim, result.shape
    stacked = all(p.selected for p in parts) and len({p.start for p in parts}) == shape[dim]
    at: dict[tuple[int, int], TensorProxy] = {}
    for p in parts:
        value = ltorch.unsqueeze(p.value, dim) if p.selected and not stacked else p.value
        bounds = p.start, p.end
        at[bounds] = ltorch.add(at[bounds], value) if bounds in at else value
    pieces, end = [], 0
    for (start, stop), value in [*sorted(at.items(), key=lambda item: item[0]), ((shape[dim], shape[dim]), None)]:
        if start > end:
            gap = (*shape[:dim], start - end, *shape[dim + 1 :])
            pieces.append(ltorch.zeros(gap, device=result.device, dtype=result.dtype))
        pieces += [value] if value is not None else []
        end = stop
    joined = (ltorch.stack if stacked else ltorch.cat)(pieces, dim)
    return joined if whole is None else ltorch.add(whole, joined)


JOIN_PARTS = Rule("Join Parts", add_part, _joined, _can_be_joined, CUT, exact=True)
