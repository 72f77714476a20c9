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
from thunder.kernels.stored_values import loads_outside
from thunder.kernels.tiles import instructions, nodes_of

Size = int | Extent


def by_pieces(kernel: Kernel, graph: Graph, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> Iterator[Kernel]:
    """A kernel for each piece of concatenations whose pieces take longer to compute than a piece takes to write."""
    cuts: set[Size] = set()
    loop = None
    for n in in_order([w.value for w in kernel.writes]) if not kernel.rows else ():
        if n.op != "concat":
            continue
        along, starts, _ = n.what
        ((v, factor),) = along.terms.items() if len(along.terms) == 1 else ((None, 0),)
        is_same = loop is None or v is loop
        if v not in kernel.loops or factor != 1 or not is_same:
            continue
        work = instructions(above_reductions(n)) * machine.instruction
        if work < SEGMENT * machine.byte["memory"]:
            continue
        loop = v
        cuts |= {s - along.constant for s in starts if 0 < hint(s - along.constant) < hint(v.size)}
    ends = _in_order_of_size(cuts, loop.size) if loop is not None else None
    if loop is None or ends is None or len(cuts) > MOST_LIKE or hint(loop.size) < SHORT * (len(cuts) + 1):
        yield kernel
        return
    for low, high in zip([0, *ends], ends, strict=False):
        own = axis("l", (loop.name, low), high - low)
        by = {loop: Index.of(own) + low}
        piece = Kernel([own if v is loop else v for v in kernel.loops], kernel.outer)
        for w in kernel.writes:
            piece.writes.append(w.of(graph.substitute(w.value, by), replaced(w.index, by)))
        yield with_loads(piece, strides)


def _in_order_of_size(cuts: Iterable[Size], end: Size) -> list[Size] | None:
    """The ends of ranges that are not empty for any size; None where that is not certain."""
    ends = [*sorted(cuts, key=hint), end]
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
