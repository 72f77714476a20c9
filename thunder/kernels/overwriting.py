"""Which outputs of a region may be written over which of its inputs that nothing reads afterwards.

An output may take the memory of an input where each element is read by nothing but the program that writes there, and
before it does: at the index at which it writes, or in the row that it writes. Such a program reads all of a tile before
it writes: the target puts a barrier between, since several threads may read an element.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container, Mapping, Sequence, Set
from typing import Any

from thunder.kernels.index import Index, opened
from thunder.kernels.ir import Buffer, Node, variables_of
from thunder.kernels.schedule import Kernel, Write, above_reductions
from thunder.kernels.sizes import hint
from thunder.kernels.tiled import Launch
from thunder.kernels.tiles import Tile, nodes_of


def places(
    launches: Sequence[Launch],
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    strides: Mapping[Buffer, Sequence[Any]],
    dying: Set[int],
    targets: Mapping[int, int],
    with_gaps: Container[Buffer],
) -> dict[int, int]:
    """By number of an output, the number of the input that it may be written over.

    strides: of inputs and outputs. dying: the inputs that nothing reads afterwards. targets: by number of an input that
    the program overwrites, the number of the only output that may be written over it. with_gaps: the buffers whose
    kernels also write between rows.
    """
    chosen: dict[int, int] = {}
    for o, out in enumerate(outputs):
        free = dying.union(i for i, target in targets.items() if target == o).difference(chosen.values())
        for i in sorted(free):
            x = inputs[i]
            is_alike = x.dtype is out.dtype and _elements(x, strides[x]) == _elements(out, strides[out])
            if is_alike and (x in with_gaps or out not in with_gaps) and _may_share(launches, x, out):
                chosen[o] = i
                break
    return chosen


def _elements(buffer: Buffer, strides: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The elements of memory that a buffer has, whatever its shape: how many, how far apart."""
    spans: list[tuple[Any, Any]] = []
    for step, n in sorted(zip(strides, buffer.shape, strict=True), key=lambda dimension: hint(dimension[0])):
        if spans and spans[-1][0] * spans[-1][1] == step:
            spans[-1] = spans[-1][0] * n, spans[-1][1]
        elif n != 1:
            spans.append((n, step))
    return spans


def _may_share(launches: Sequence[Launch], x: Buffer, out: Buffer) -> bool:
    """Whether an output may have the memory of an input."""
    kernels = [(number, k, tile) for number, launch in enumerate(launches) for k, tile in launch.kernels]
    written = [number for number, k, _ in kernels if any(w.buffer is out for w in k.writes)]
    if not written:
        return False
    for number, kernel, tile in kernels:
        loads = [n for n in kernel.loads if n.what[0] is x]
        writes = [w for w in kernel.writes if w.buffer is out]
        if loads and not writes and number >= min(written):
            return False
        if loads and writes and not (len(writes) == 1 and _reads_before(kernel, tile, loads, writes[0])):
            return False
    return True


def _reads_before(kernel: Kernel, tile: Tile, loads: Sequence[Node], write: Write) -> bool:
    """Whether a kernel reads elements where it writes them and not after that."""
    if write.scatter is not None:
        return False
    at, loops = opened(write.index), [v for v in kernel.loops if v.size != 1]
    apart = [n for n in loads if n.args or opened(kernel.loads[n]).key != at.key]
    if apart and not (kernel.rows and all(_is_in_row(kernel, opened(kernel.loads[n]), at) for n in apart)):
        return False
    by = variables_of(at)
    outer = [v for v in loops if v in kernel.loops[: kernel.outer]]
    if not by.issuperset(outer if kernel.rows and by.isdisjoint(kernel.sweep) else loops):
        return False  # several programs write it
    if tile.is_whole:
        return True
    of_values: dict[float, list[Node]] = {}
    for n, stage in kernel.stages().items():
        of_values.setdefault(stage, []).append(kernel.rows[n])
    for w in kernel.writes:
        of_values.setdefault(_stage(kernel, w), []).append(w.value)

    def last(those: Sequence[Node]) -> float:
        """The last sweep that reads one of these."""
        stages = [s for s, values in of_values.items() if any(n in those for v in values for n in above_reductions(v))]
        return max(stages, default=-1)

    return last(loads) <= _stage(kernel, write) and last(apart) < _stage(kernel, write)


def _is_in_row(kernel: Kernel, read: Index, at: Index) -> bool:
    """Whether an index is in the row that the same program writes at another index, as that of an element at an index
    from memory. Rows lie behind each other."""
    outer = {*kernel.loops[: kernel.outer]}

    def split(index: Index) -> tuple[dict, Index]:
        own = {a: f for a, f in index.terms.items() if variables_of(Index({a: 1}, 0)) <= outer}
        return own, Index({a: f for a, f in index.terms.items() if a not in own}, index.constant)

    (own, rest), (of_write, row) = split(read), split(at)
    numbers = [*own.values(), row.low, row.high, rest.low, rest.high]
    if own != of_write or not all(isinstance(n, int) for n in numbers):
        return False
    is_inside = row.low <= rest.low and rest.high <= row.high
    return is_inside and (not own or math.gcd(*own.values()) > row.high - row.low)


def _stage(kernel: Kernel, write: Write) -> float:
    """The sweep in which a program that loops over rows writes; infinity for what is written behind them."""
    return math.inf if variables_of(write.index).isdisjoint(kernel.sweep) else kernel.stage_of(write.value)


def without_copies(launches: Sequence[Launch], over: Mapping[Buffer, Buffer]) -> list[Launch]:
    """The launches without what copies elements to where they are. over: the inputs that outputs are written over."""

    def is_copy(kernel: Kernel, w: Write) -> bool:
        if w.value not in kernel.loads or over.get(w.buffer) is not w.value.what[0]:
            return False
        return w.scan is w.scatter is None and opened(kernel.loads[w.value]).key == opened(w.index).key

    result = []
    for launch in launches:
        kernels = []
        for kernel, tile in launch.kernels:
            writes = [w for w in kernel.writes if not is_copy(kernel, w)]
            if len(writes) < len(kernel.writes):
                if not writes:
                    continue
                kernel = copy.copy(kernel)
                kernel.writes = writes
                kernel.loads = {n: i for n, i in kernel.loads.items() if n in nodes_of(kernel)}
            kernels.append((kernel, tile))
        result += [Launch(kernels)] if kernels else []
    return result
