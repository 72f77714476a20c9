"""The layouts of all values of a program, inferred and checked: which ranks hold what, and whose gradients are partial.

Before: `computation(x, t_w_shard)`, `x0 = redistribute(x, tp, I, R)`, `y = linear(x0, t_w_shard, None)`. After: the
same, with the layouts {tp: S0} of t_w_shard, {tp: R} of x0 and {tp: S1} of y.

A program has an error here where the gradient of an invariant value would be partial: an operation reads it together
with values that are not the same on all ranks, and no redistribution from I to R says that its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.distributed.layouts import Axis, I, Layout, P, R, V
from thunder.distributed.placement import Placement
from thunder.distributed.redistribute import redistribute, steps_of, without_synchronization

Parts = Mapping[Proxy, tuple[Axis, Layout]]


def with_layouts(trace: Trace, placements: Sequence[Placement | None], parts: Parts, has_parts: bool = False) -> Trace:
    """The trace, knowing the layouts of its values where they are others than those of what the program is called with.
    placements: of its arguments. parts: what is known of values that are computed of parts. has_parts: whether the
    program itself asks for parts of values, which it may return.

    Raises AssertionError, with the operation, where values do not fit: programs are made here, so that this is no
    mistake of a user's.
    """
    axes = dict.fromkeys(q.axis for placement in placements if placement is not None for q in placement.axes)
    layouts: dict[str, dict[Axis, Layout]] = {}
    for axis in axes:
        usual = V if axis.reduction == "avg" else I  # ranks of split layers are called with the same data
        for p, layout in _along(trace, axis, usual, placements, has_parts).items():
            known, of_part = parts.get(p, (None, V))
            layout = of_part if known is not None and known.of_sequences == axis and layout == V else layout
            if layout != usual:
                layouts.setdefault(p.name, {})[axis] = layout
    return trace.replace(info=trace.info.replace(layouts=layouts))


def _along(
    trace: Trace, axis: Axis, usual: Layout, placements: Sequence[Placement | None], has_parts: bool
) -> dict[Proxy, Layout]:
    """The layout of each value along one axis."""
    layouts: dict[Proxy, Layout] = {}
    for a, placement in zip(trace.args, placements, strict=True):
        held = (q.layout for q in ([] if placement is None else placement.axes) if q.axis == axis)
        if isinstance(a, Proxy):
            layouts[a] = next(held, usual)
    for operation in trace.bound_symbols:
        steps = steps_of(*operation.args[1:4]) if operation.sym is redistribute else []
        step = next((step for step in steps if step[0].of_sequences == axis), None)
        if step is not None:
            _check_source(operation, step, layouts, has_parts)
            layout = step[2]
        elif operation.sym is without_synchronization and axis.reduction == "avg":
            layout = R
        else:
            layout = _computed(operation, axis, layouts, has_parts)
        layouts.update(dict.fromkeys(operation.outputs, layout))
    for o in trace.output_proxies:
        assert usual == V or has_parts or _is_same(layouts[o], o), (
            f"{o.name} is {layouts[o]} over {axis}, and ranks return it"
        )
    return layouts


def _is_same(layout: Layout, value: Proxy) -> bool:
    """Whether all ranks have a value, and its gradient where it has one."""
    return layout == I or layout == R and not _trained(value)


def _trained(value: Proxy) -> bool:
    return isinstance(value, TensorProxy) and value.requires_grad


def _check_source(
    operation: BoundSymbol, step: tuple[Axis, Layout, Layout], layouts: Mapping[Proxy, Layout], has_parts: bool
) -> None:
    """Raises where a `redistribute` says another layout than its operand has. has_parts: the program computes with
    numbers of ranks itself."""
    axis, src, _ = step
    layout = layouts[operation.args[0]]
    fits = {
        "I": _is_same(layout, operation.args[0]),
        "R": layout in (I, R),
        # V is what is not known better; a program's own parts may differ by the numbers that a rank computes with
        "S": layout == src or layout == V or has_parts,
        "P": layout in (P, V) or axis.reduction == "avg",  # a value is the mean of equal ones
        "V": True,
    }
    assert fits[src.kind], f"{operation} reads a value that is {layout} over {axis}"


def _computed(operation: BoundSymbol, axis: Axis, layouts: Mapping[Proxy, Layout], has_parts: bool) -> Layout:
    """What an operation makes of the layouts of its operands."""
    operands = [(layouts[p], _trained(p)) for p in operation.inputs]
    assert (P, True) not in operands, f"{operation} reads a partial value over {axis}"
    varies = any(layout.kind in "SV" for layout, _ in operands)
    if any(map(_trained, operation.outputs)) and not has_parts:
        is_partial = varies or (R, True) in operands
        assert not is_partial or (I, True) not in operands, (
            f"{operation}: the gradient of an operand that is invariant over {axis} would be that of one rank"
        )
    if varies or axis.reduction == "avg" and OpTags.RANDOM_OP in operation.sym.tags:
        return V
    return R if (R, True) in operands else I
