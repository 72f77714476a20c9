"""Which memory kernels read and write, and how far the elements are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from thunder.kernels.index import Index, Part, Variable, opened
from thunder.kernels.ir import (
    Buffer,
    Node,
    offset,
    variables_of,
)
from thunder.kernels.schedule import (
    Kernel,
    Write,
    above_reductions,
    elements,
)
from thunder.kernels.sizes import hint

SEGMENT = 32  # bytes of memory that are read at least


def touched(load: Node) -> int:
    """How many elements of memory a value reads, at most."""
    ranges = math.prod(hint(i.high - i.low + 1) for i in load.what[1])
    return min(ranges, elements(load.axes)) if not load.args else elements(load.axes)


def accesses(kernel: Kernel) -> list[tuple[Index, int, Buffer]]:
    """The indices at which memory is read and written, with bytes."""
    reads = [(i, n.what[0].dtype.bytes * touched(n), n.what[0]) for n, i in kernel.loads.items()]
    reads += [(c.index, hint(math.prod(c.buffer.shape)) * c.buffer.dtype.bytes, c.buffer) for c in kernel.columns]
    sizes = [elements(written_over(w, kernel)) for w in kernel.writes]
    return reads + [(w.index, w.buffer.dtype.bytes * n, w.buffer) for w, n in zip(kernel.writes, sizes, strict=True)]


def written_over(w: Write, kernel: Kernel) -> Iterable[Variable]:
    """The loops over which something is written: a scatter also adds what does not depend on a loop."""
    if w.scatter is None:
        return variables_of(w.index)
    return kernel.loops[: kernel.outer] if w.is_of_rows else kernel.loops


def fastest_loop(index: Index, loops: Sequence[Variable]) -> Variable | None:
    """The loop along which an access is in order, or nearly so."""
    steps = _steps_of(index)
    near = {v: s for v in loops if v.size != 1 and 0 < (s := steps.get(v, 0)) <= 2}
    return min(near, key=lambda v: near[v], default=None)


def _steps_of(index: Index) -> dict[Variable, float]:
    """By loop, how far the elements of neighbours are apart, on average where an index divides it."""
    steps: dict[Variable, float] = {}
    for atom, factor in index.terms.items():
        own = {atom: 1.0} if isinstance(atom, Variable) else _steps_of(atom.index)
        by = hint(atom.by) if isinstance(atom, Part) and atom.remainder is False else 1
        for v, step in own.items():
            apart = abs(hint(factor)) * step / by
            steps[v] = min(steps.get(v, apart), apart)
    return steps


def loads_of(body: Node) -> list[Node]:
    return [n for n in above_reductions(body) if n.op == "load"]


def memory_steps(load: Node, strides: Mapping[Buffer, Sequence[int]]) -> dict[Variable, int]:
    """By axis, how far the elements are apart in memory, for the sizes that kernels are made for."""
    buffer, index, _ = load.what
    steps: dict[Variable, int] = {}
    for atom, factor in opened(offset(index, strides[buffer])).terms.items():
        for v in variables_of(atom.index) if isinstance(atom, Part) else (atom,):
            steps[v] = max(steps.get(v, 0), abs(hint(factor)))
    return steps
