"""Keep: what would be computed again only to be written to memory stays in memory from the forward, as long as that does not raise the peak.

What a fused kernel computes again costs nothing where the kernel itself reads it. What a matrix product or an attention kernel of the backward reads is written once more, though
the forward wrote it for a reader like that: keeping it saves a pass, and costs its bytes in between. At the end of a backward all gradients are in memory, often more than all that
was saved for it: up to there, memory is taken anyway. What is alike is kept or not as one, so that the layers of a model have the same kernels.

Before: `t0 = silu(x)` and `t1 = mm(t0, w)` in the forward, `bw_t0 = silu(x)` and `t2 = mm(bw_t0, g)` in the backward. After: the backward reads `t0`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from thunder.core.proxies import Proxy, TensorProxy, number_value
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.transforms.autodiff import sides
from thunder.transforms.memory_budget import nbytes, roots

__all__ = ["keep"]

SHARE = 0.9  # of the peak that the forward may fill, whose last lines need more beside what is counted than others


def keep(joint: Trace, chosen: Iterable[Proxy], fuses: Callable[[BoundSymbol], bool], at_any_peak: Callable[[BoundSymbol], bool] = lambda line: False) -> frozenset[Proxy]:
    """`chosen`, the values of the forward that the backward computes again, without those that stay in memory.

    fuses: lines that a fusion executor takes. at_any_peak: those of them whose results stay whatever the peak is then.
    """
    if not (chosen := frozenset(chosen)):
        return chosen
    forward, starts, backward = sides(joint)
    lines, half = [*forward, *starts, *backward], len(forward)
    shown = roots(lines, maybe=True)
    apart = [not fuses(line) and not any(o in shown for o in line.outputs) for line in lines]
    makers: dict[TensorProxy, int] = {o: i for i, line in enumerate(lines) for o in line.outputs if o not in shown and isinstance(o, TensorProxy)}
    last: dict[Proxy, int] = {}  # the line until which a value is in memory
    written: set[Proxy] = set()  # what a line of the forward reads that stands apart
    again: dict[Proxy, tuple[int, int]] = {}  # what such lines of the backward read: the first and the last of them
    for i, line in enumerate(lines):
        for value in line.inputs:
            root = shown.get(value, value)
            if i < half or root not in chosen:
                last[root] = i
            if apart[i] and i < half:
                written.add(root)
            elif apart[i]:
                again[root] = again.get(root, (i, i))[0], i
    last |= dict.fromkeys((shown.get(p, p) for p in joint.output_proxies), len(lines))
    changes = [0] * (len(lines) + 2)  # of the bytes in memory, line by line
    for value, i in makers.items():
        if apart[i] or value in written or value in again or i < half <= last.get(value, i):
            _hold(changes, value, i, last.get(value, i))
        if value in again and value in chosen:
            _hold(changes, value, *again[value])
    peak = max(itertools.accumulate(changes))
    groups: dict[tuple, list[TensorProxy]] = {}
    for value, i in makers.items():
        context = lines[i].context
        if value in chosen and value in written and value in again and not apart[i] and (context is None or not context.checkpoint):
            groups.setdefault((at_any_peak(lines[i]), lines[i].sym, value.dtype, *map(number_value, value.shape)), []).append(value)
    kept: set[Proxy] = set()
    for (always, *_), group in sorted(groups.items(), key=lambda item: nbytes(item[1][0])):
        spans = [(last[value] + 1, again[value][0] - 1) for value in group]
        changed = list(changes)
        for value, span in zip(group, spans, strict=True):
            _hold(changed, value, *span)
        filled = list(itertools.accumulate(changed))
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        if always or max(filled[begin:half], default=0) <= SHARE * peak and max(filled[half : end + 1], default=0) <= peak:
            changes = changed
            kept.update(group)
    return chosen - kept


def _hold(changes: list[int], value: TensorProxy, begin: int, end: int) -> None:
    """Between the lines `begin` and `end`, both with it; nothing where that is no span."""
    if begin <= end:
        changes[begin] += nbytes(value)
        changes[end + 1] -= nbytes(value)
