"""Keep: what would be recomputed only to be written to memory stays in memory from the forward, as long as that
raises the peak by no more than 15 %.

What a fused kernel recomputes costs nothing where the kernel itself reads it. What a matrix product or an attention
kernel of the backward reads is written once more, though the forward wrote it for a reader like that: keeping it saves
a pass, and costs its bytes in between. At the end of a backward all gradients are in memory, often more than all that
was saved for it: up to there, memory is taken anyway, and a little more is worth the time. What is alike is kept or not
as one, so that a model's layers have the same kernels.

Before: `t0 = silu(x)` and `t1 = mm(t0, w)` in the forward, `bw_t0 = silu(x)` and `t2 = mm(bw_t0, g)` in the backward.
After: the backward reads `t0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.analysis.flow import positions
from thunder.analysis.lifetimes import Occupancy
from thunder.core.proxies import Proxy, TensorProxy, number_value
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.transforms.phases import phases
from thunder.transforms.save_plan import regathered

__all__ = ["keep", "keep_in_memory"]

# times the peak without what is kept: up to there the backward may fill the memory, where gradients come on top; the
# forward only up to the peak
ROOM = 1.15


def keep_in_memory(
    trace: Trace, fuses: Callable[[BoundSymbol], bool], at_any_peak: Callable[[BoundSymbol], bool]
) -> Trace:
    """The trace whose backwards recompute less (`info.recomputed`); see `keep`."""
    found: dict[int, frozenset[Proxy]] = {}
    for number, chosen in trace.info.recomputed.items():
        forward, _, backward, _, returned = phases(trace, number)
        again = regathered(forward, backward, returned).intersection(chosen)
        found[number] = keep(trace, frozenset(chosen) - again, fuses, at_any_peak, number) | again
    return trace.replace(info=trace.info.replace(recomputed=found))


def keep(
    trace: Trace,
    chosen: Iterable[Proxy],
    fuses: Callable[[BoundSymbol], bool],
    at_any_peak: Callable[[BoundSymbol], bool] = lambda operation: False,
    number: int | None = None,
) -> frozenset[Proxy]:
    """`chosen`, the values of the forward that a backward recomputes, by default the last, without those that stay in
    memory.

    fuses: operations that a fusion executor takes. at_any_peak: those of them whose results stay whatever the peak is
    then.
    """
    if not (chosen := frozenset(chosen)):
        return chosen
    forward, starts, backward, update, _ = phases(trace, number)
    operations, half = [*forward, *starts, *backward, *update], len(forward)
    end = len(operations) - len(update)
    bases = alias_bases(operations, maybe=True)
    apart = [not fuses(operation) and not any(o in bases for o in operation.outputs) for operation in operations]
    produced = {o: i for o, i in positions(operations).items() if o not in bases and isinstance(o, TensorProxy)}
    made_of = _sources(forward, bases, chosen)
    last: dict[Proxy, int] = {}  # the operation until which a value is in memory
    written: set[Proxy] = set()  # what an operation of the forward reads that stands apart
    again: dict[
        Proxy, tuple[int, int]
    ] = {}  # what such operations of the backward read: the first and the last of them
    for i, operation in enumerate(operations):
        for value in operation.inputs:
            root = bases[value]
            last |= dict.fromkeys(made_of[root] if half <= i < end and root in chosen else (root,), i)
            if apart[i] and i < half:
                written.add(root)
            elif apart[i] and i < end:
                again[root] = again.get(root, (i, i))[0], i
    last |= dict.fromkeys((bases[p] for p in trace.output_proxies), len(operations))
    memory = Occupancy(len(operations) + 1)
    for value, i in produced.items():
        if apart[i] or value in written or value in again or i < half <= last.get(value, i):
            memory.hold(value, i, last.get(value, i))
        if value in again and value in chosen:
            memory.hold(value, *again[value])
    peak = memory.peak
    groups: dict[tuple, list[TensorProxy]] = {}
    for value, i in produced.items():
        context = operations[i].context
        if (
            value in chosen
            and value in written
            and value in again
            and not apart[i]
            and (context is None or not context.checkpoint)
        ):
            groups.setdefault(
                (at_any_peak(operations[i]), operations[i].sym, value.dtype, *map(number_value, value.shape)), []
            ).append(value)
    kept: set[Proxy] = set()
    for (always, *_), group in sorted(groups.items(), key=lambda item: nbytes(item[1][0])):
        spans = [(last[value] + 1, again[value][0] - 1) for value in group]
        changed = memory.copied()
        for value, span in zip(group, spans, strict=True):
            changed.hold(value, *span)
        filled = changed.filled()
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        if (
            always
            or max(filled[begin:half], default=0) <= peak
            and max(filled[half : end + 1], default=0) <= ROOM * peak
        ):
            memory = changed
            kept.update(group)
    of_kept = {o for b in forward if b.sym.reshapes and b.args[0] in kept for o in b.outputs}
    return chosen - kept - of_kept


def _sources(
    forward: Sequence[BoundSymbol], bases: dict[Proxy, Proxy], chosen: frozenset[Proxy]
) -> dict[Proxy, frozenset[Proxy]]:
    """For values that are recomputed, what is read for that."""
    found: dict[Proxy, frozenset[Proxy]] = {}
    for operation in forward:
        if made := [o for o in operation.outputs if o in chosen]:
            read_from = {bases[i] for i in operation.inputs}
            read = frozenset().union(*(found[r] if r in found else (r,) for r in read_from))
            found |= dict.fromkeys(made, read)
    return found
