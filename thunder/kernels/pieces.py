"""What kernels read: pieces of concatenations, and reads that may be outside of a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from thunder.core.dtypes import BOOL
from thunder.kernels.accesses import SEGMENT
from thunder.kernels.index import Index, opened
from thunder.kernels.ir import (
    Buffer,
    Graph,
    Node,
    axis,
    in_order,
    line,
    loads_outside,
    offset,
    replaced,
    variables_of,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.rules import MOST_LIKE, SHORT
from thunder.kernels.schedule import (
    Kernel,
    above_reductions,
)
from thunder.kernels.sizes import Extent, at_least, hint
from thunder.kernels.tiles import instructions, nodes_of

Size = int | Extent


def by_pieces(kernel: Kernel, graph: Graph, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> Iterator[Kernel]:
    """A kernel for each piece of concatenations, where computing all pieces for each element takes longer than the
    kernel moves data, and by more than the segments of memory take that two pieces write. Pieces that are too short for
    kernels of their own share one."""
    cuts: set[Size] = set()
    loop = None
    values = [w.value for w in kernel.writes]
    for n in in_order(values) if not kernel.rows else ():
        if n.op != "concat":
            continue
        along, starts, _ = n.what
        ((v, factor),) = along.terms.items() if len(along.terms) == 1 else ((None, 0),)
        is_same = loop is None or v is loop
        if v not in kernel.loops or factor != 1 or not is_same:
            continue
        loop = v
        cuts |= {s - along.constant for s in starts if 0 < hint(s - along.constant) < hint(v.size)}
    ends = _in_order_of_size(cuts, loop.size) if loop is not None else None
    if loop is None or ends is None or not 1 < len(ends) <= MOST_LIKE + 1:
        yield kernel
        return
    pieces = []
    for low, high in zip([0, *ends], ends, strict=False):
        own = axis("l", (loop.name, low), high - low)
        by = {loop: Index.of(own) + low}
        piece = Kernel([own if v is loop else v for v in kernel.loops], kernel.outer)
        for w in kernel.writes:
            piece.writes.append(w.of(graph.substitute(w.value, by), replaced(w.index, by)))
        pieces.append((piece, hint(high - low)))
    moving = 2 * sum(v.dtype.bytes for v in values) * machine.byte["memory"]
    apart = sum(count * max(_computing(piece, machine), moving) for piece, count in pieces)
    edges = (len(pieces) - 1) * SEGMENT * machine.byte["memory"]
    if hint(loop.size) * max(_computing(kernel, machine), moving) <= apart + edges:
        yield kernel
        return
    for piece, _ in pieces:
        yield with_loads(piece, strides)


def _computing(kernel: Kernel, machine: Gpu) -> float:
    """Seconds for the instructions of an element."""
    values = dict.fromkeys(n for w in kernel.writes for n in above_reductions(w.value))
    return instructions(values) * machine.instruction


def _in_order_of_size(cuts: Iterable[Size], end: Size) -> list[Size] | None:
    """The ends of ranges of at least `SHORT` elements, as far as sizes are known; None where a range may be empty."""
    ends: list[Size] = []
    for n in sorted(cuts, key=hint):
        if hint(n) - (hint(ends[-1]) if ends else 0) >= SHORT and hint(end) - hint(n) >= SHORT:
            ends.append(n)
    ends.append(end)
    certain = all(at_least(high - low, 1) for low, high in zip([0, *ends], ends, strict=False))
    return ends if certain else None


def with_loads(kernel: Kernel, strides: Mapping[Buffer, Sequence[int]]) -> Kernel:
    """The kernel with the offsets of what it reads."""
    loads = [n for n in nodes_of(kernel) if n.op == "load"]
    kernel.loads = {n: opened(offset(n.what[1], strides[n.what[0]])) for n in loads}
    for n, index in kernel.loads.items():
        assert variables_of(index) <= {*kernel.loops, *n.what[2]}, f"{line(n)} reads by a loop of another kernel"
    return kernel


def opened_loads(kernel: Kernel, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> Kernel:
    """The kernel where pieces of concatenations read what is read anyway by the same nodes, so that what is computed of
    it is computed once: `x[within(j - 333, 334) + 333]` becomes `x[j]`."""
    loads = [n for n in nodes_of(kernel) if n.op == "load"]
    others: dict[Node, list[Node]] = {}
    for n in loads:
        index = tuple(map(opened, n.what[1]))
        is_inside = all(i.is_inside(0, m) for i, m in zip(index, n.what[0].shape, strict=True))
        if is_inside and any(a.key != b.key for a, b in zip(index, n.what[1], strict=True)):
            other = graph.make("load", n.args, n.dtype, (n.what[0], index, n.what[2]))
            others.setdefault(other, []).append(n)
    by = {n: other for other, those in others.items() if other in loads or len(those) > 1 for n in those}
    return _with_nodes(kernel, by, graph, strides)


def _with_nodes(
    kernel: Kernel, by: Mapping[Node, Node], graph: Graph, strides: Mapping[Buffer, Sequence[int]]
) -> Kernel:
    """The kernel with other nodes in the place of some."""
    known = {n: n for n in kernel.rows} | dict(by)
    result = Kernel(kernel.loops, kernel.outer)
    result.rows = {node: graph.replace(body, known) for node, body in kernel.rows.items()}
    result.writes = [w.of(graph.replace(w.value, known)) for w in kernel.writes]
    return with_loads(result, strides)


def guarded(kernel: Kernel, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> Kernel:
    """The kernel in which what may be outside of a buffer is read in the range of the buffer alone: a reduction is
    computed at more indices than it is read at where its axes are split."""
    outside: dict[Node, dict[Index, Size]] = {}
    for n, index, size in loads_outside([*kernel.rows.values(), *(w.value for w in kernel.writes)], kernel.rows):
        outside.setdefault(n, {})[index] = size
    if not outside:
        return kernel
    by: dict[Node, Node] = {}
    for n, indices in outside.items():
        value = n
        nothing = graph.make("constant", (), n.dtype, False if n.dtype.category == BOOL else 0)
        for index, size in indices.items():
            before, behind = not at_least(index.low, 0), not at_least(size - 1, index.high)
            pieces = [(index.low, nothing)] * before + [(0, value)] + [(size, nothing)] * behind
            ranges = tuple(start for start, _ in pieces), index.high + 1 if behind else size
            value = graph.make("concat", [piece for _, piece in pieces], n.dtype, (index, *ranges))
        by[n] = value
    return _with_nodes(kernel, by, graph, strides)
