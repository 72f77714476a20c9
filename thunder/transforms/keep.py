"""Keep: what would be recomputed only to be written to memory stays in memory from the forward, as long as that
raises the peak by no more than 15 %.

What a fused kernel recomputes costs nothing where the kernel itself reads it. What a matrix product or an attention
kernel of the backward reads is written once more, though the forward wrote it for a consumer like that: keeping it
saves a pass, and costs its bytes in between. At the end of a backward all gradients are in memory, often more than all
that was saved for it: up to there, memory is taken anyway, and a little more is worth the time. What is alike is kept
or not as one, so that a model's layers have the same kernels.

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
    flow = _Lifetimes(trace, chosen, fuses, number)
    memory, half = flow.occupancy(), flow.half
    peak = memory.peak
    kept: set[Proxy] = set()
    for (always, *_), group in sorted(flow.groups(at_any_peak).items(), key=lambda item: nbytes(item[1][0])):
        spans = [(flow.last[value] + 1, flow.again[value][0] - 1) for value in group]
        changed = memory.copied()
        for value, span in zip(group, spans, strict=True):
            changed.hold(value, *span)
        filled = changed.filled()
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        in_forward, in_backward = max(filled[begin:half], default=0), max(filled[half : end + 1], default=0)
        if always or in_forward <= peak and in_backward <= ROOM * peak:
            memory = changed
            kept.update(group)
    of_kept = {o for b in flow.operations[:half] if b.sym.reshapes and b.args[0] in kept for o in b.outputs}
    return chosen - kept - of_kept


class _Lifetimes:
    """When the values of a forward and its backward are in memory, where the backward recomputes those of `chosen`.

    half: where the backward begins. apart: whether an operation runs by itself. produced: places of values that are no
    views. last: by value, the place until which it is in memory. written: values of the forward that an operation of
    the forward reads which runs by itself. again: values that such operations of the backward read, by the first and
    the last of these.
    """

    def __init__(self, trace: Trace, chosen: frozenset[Proxy], fuses: Callable[[BoundSymbol], bool], number):
        forward, starts, backward, update, _ = phases(trace, number)
        operations = self.operations = [*forward, *starts, *backward]
        bases = alias_bases(operations, maybe=True)
        self.half, self.chosen = len(forward), chosen
        self.apart = [not fuses(b) and not any(o in bases for o in b.outputs) for b in operations]
        self.produced = {
            o: i for o, i in positions(operations).items() if o not in bases and isinstance(o, TensorProxy)
        }
        self.last: dict[Proxy, int] = {}
        self.written: set[Proxy] = set()
        self.again: dict[Proxy, tuple[int, int]] = {}
        made_of = _sources(forward, bases, chosen)
        for i, operation in enumerate(operations):
            for value in operation.inputs:
                base = bases[value]
                self.last |= dict.fromkeys(made_of[base] if i >= self.half and base in chosen else (base,), i)
                if self.apart[i] and i < self.half:
                    self.written.add(base)
                elif self.apart[i]:
                    self.again[base] = self.again.get(base, (i, i))[0], i
        afterwards = [*trace.output_proxies, *(i for b in update for i in b.inputs)]
        self.last |= dict.fromkeys((bases[p] for p in afterwards), len(operations))

    def occupancy(self) -> Occupancy:
        """The bytes of what is surely in memory at each place."""
        memory = Occupancy(len(self.operations) + 1)
        for value, i in self.produced.items():
            read_apart = value in self.written or value in self.again
            if self.apart[i] or read_apart or i < self.half <= self.last.get(value, i):
                memory.hold(value, i, self.last.get(value, i))
            if value in self.again and value in self.chosen:
                memory.hold(value, *self.again[value])
        return memory

    def groups(self, at_any_peak: Callable[[BoundSymbol], bool]) -> dict[tuple, list[TensorProxy]]:
        """The values that would be written twice, in groups of those that are alike."""
        found: dict[tuple, list[TensorProxy]] = {}
        for value, i in self.produced.items():
            operation = self.operations[i]
            twice = value in self.chosen and value in self.written and value in self.again and not self.apart[i]
            if twice and (operation.context is None or not operation.context.checkpoint):
                kind = at_any_peak(operation), operation.sym, value.dtype, *map(number_value, value.shape)
                found.setdefault(kind, []).append(value)
        return found


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
