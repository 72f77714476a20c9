"""Kept values: the second half of the save plan keeps in memory what a backward would otherwise write again.

Recomputing a value costs nothing where a fused kernel reads it. A matrix product or an attention kernel reads it from
memory, so a backward that recomputes it has to write it again, although the forward wrote it for such a consumer too.
Keeping it saves a pass over memory and costs its bytes in between. At the end of a backward all gradients are in
memory, often more bytes than the backward has saved. Memory up to that peak is allocated anyway, and keeping values may
raise the peak by 15 %. Values of equal operations, shapes and types are kept as one group, so that all layers of a
model have the same kernels.

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

# bound of the peak of a backward with kept values, as a multiple of the peak without them; a forward may not raise it
ROOM = 1.15


def values_in_memory(
    trace: Trace,
    chosen: Iterable[Proxy],
    fuses: Callable[[BoundSymbol], bool],
    at_any_peak: Callable[[BoundSymbol], bool] = lambda operation: False,
    number: int | None = None,
) -> frozenset[Proxy]:
    """Those of `chosen`, the values that a backward recomputes, by default the last one, that stay in memory instead.

    fuses: whether a fusion executor takes an operation. at_any_peak: whether the results of an operation stay
    even where they raise the peak.
    """
    if not (chosen := frozenset(chosen)):
        return chosen
    flow = _Lifetimes(trace, chosen, fuses, number)
    memory, half = flow.occupancy(), flow.half
    peak = memory.peak
    saved: set[Proxy] = set()
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
            saved.update(group)
    of_kept = {o for b in flow.operations[:half] if b.sym.reshapes and b.args[0] in saved for o in b.outputs}
    return chosen.intersection(saved | of_kept)


class _Lifetimes:
    """Lifetimes of the values of a forward and its backward, which recomputes the values of `chosen`.

    half: the place where the backward begins. apart: by place, whether an operation is unfused. produced: places of the
    producers of values that are no views. last: by value, the place of its last use. written: values of the forward
    with unfused consumers in the forward. again: values with unfused consumers in the backward, with the places of the
    first and the last of these.
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
        """The bytes at each place of the values that are certainly materialized."""
        memory = Occupancy(len(self.operations) + 1)
        for value, i in self.produced.items():
            read_apart = value in self.written or value in self.again
            if self.apart[i] or read_apart or i < self.half <= self.last.get(value, i):
                memory.hold(value, i, self.last.get(value, i))
            if value in self.again and value in self.chosen:
                memory.hold(value, *self.again[value])
        return memory

    def groups(self, at_any_peak: Callable[[BoundSymbol], bool]) -> dict[tuple, list[TensorProxy]]:
        """The values that both forward and backward would write, in groups of equal operations, types and shapes."""
        groups: dict[tuple, list[TensorProxy]] = {}
        for value, i in self.produced.items():
            operation = self.operations[i]
            twice = value in self.chosen and value in self.written and value in self.again and not self.apart[i]
            if twice and (operation.context is None or not operation.context.checkpoint):
                kind = at_any_peak(operation), operation.sym, value.dtype, *map(number_value, value.shape)
                groups.setdefault(kind, []).append(value)
        return groups


def _sources(
    forward: Sequence[BoundSymbol], bases: dict[Proxy, Proxy], chosen: frozenset[Proxy]
) -> dict[Proxy, frozenset[Proxy]]:
    """By recomputed value, the values in memory that its recomputation reads."""
    sources: dict[Proxy, frozenset[Proxy]] = {}
    for operation in forward:
        if outputs := [o for o in operation.outputs if o in chosen]:
            read_from = {bases[i] for i in operation.inputs}
            read = frozenset().union(*(sources[r] if r in sources else (r,) for r in read_from))
            sources |= dict.fromkeys(outputs, read)
    return sources
