"""Sums over rows that a kernel of these rows adds up as well.

The gradient of a layer norm reads two tensors by rows, for the gradient of its input, and by columns, for that of its
weight. One kernel does both: each program takes several tiles of rows, one after the other, and adds up their columns
in registers. A second kernel adds up what the programs have.

    rows of 768: sum over r of f, write g          one launch: sum over r of f, write g, add up h over 32 rows
    columns of 4112: sum over rows of h    ->      rows of 129: sum of what 129 programs have added up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from thunder.core.dtypes import dtype
from thunder.kernels.index import Index, Variable, join, opened, split, strides_of
from thunder.kernels.ir import Buffer, Combine, Graph, Node, axis, replaced, variables_of
from thunder.kernels.schedule import Column, Kernel, Write, above_reductions, elements

PROGRAMS = "programs"
MOST_COLUMNS = 4  # sums, each of which takes registers of a whole tile
NewBuffer = Callable[[tuple[int, ...], dtype], Buffer]


class Carried(NamedTuple):
    """The kernel of rows, and that of the sums of what its programs have added up."""

    rows: Kernel
    sums: Kernel


def is_column_kernel(kernel: Kernel) -> bool:
    """Whether a kernel has nothing but sums of known sizes, none of which needs another one."""
    sizes = all(isinstance(v.size, int) for v in kernel.loops)
    sums = all(n.op == "reduce" and n.what[0] == Combine.SUM for n in kernel.rows)
    return sizes and sums and 0 < len(kernel.rows) <= MOST_COLUMNS and not any(kernel.stages().values())


def carried(kernel: Kernel, columns: Kernel, programs: int, graph: Graph, new_buffer: NewBuffer) -> Carried | None:
    """A kernel that also adds up the columns of another one, in so many ranges of its rows; None where they do not read
    the same elements, or depend on each other."""
    count, width = elements(columns.sweep), elements(columns.loops[: columns.outer])
    if len(kernel.columns) + len(columns.rows) > MOST_COLUMNS or elements(kernel.loops) != count * width:
        return None
    by_rows = _by_rows(kernel, width, graph)
    if by_rows is None:
        return None
    kernel, own, sweep = by_rows, by_rows.loops[: by_rows.outer], by_rows.sweep
    by = _in_loops(columns.sweep, own) | _in_loops(columns.loops[: columns.outer], sweep)
    exchanged = _exchanged(kernel, columns, by, graph)
    if exchanged is None:
        return None
    known, read = exchanged
    known |= {n: n for n in kernel.rows}

    def there(value: Node) -> Node:
        return graph.replace(graph.substitute(value, by), known)

    result = Kernel(kernel.loops, kernel.outer)
    result.rows, result.writes, result.columns = dict(kernel.rows), [*kernel.writes], [*kernel.columns]
    if read:  # what the columns have written is computed here
        known |= {graph.substitute(n, by): there(value) for n, value in read.items()}
        result.rows = {n: graph.replace(body, known) for n, body in kernel.rows.items()}
        result.writes = [w.of(graph.replace(w.value, known)) for w in kernel.writes]
        result.columns = [c.of(graph.replace(c.value, known)) for c in kernel.columns]

    sums, totals = _sums_of(columns, programs, width, graph, new_buffer)
    for (node, body), (buffer, _) in zip(columns.rows.items(), totals.values(), strict=True):
        result.columns.append(Column(buffer, _linear(sweep), there(body), node.what[0]))
    of_rows, of_sums = _parted_writes(columns)
    if any(w.scatter is not None or any(n in columns.rows for n in above_reductions(w.value)) for w in of_rows):
        return None
    result.writes += [w.of(there(w.value), replaced(w.index, by)) for w in of_rows]
    by_node = {n: total for n, (_, total) in totals.items()}
    sums.writes = [w.of(graph.replace(w.value, dict(by_node))) for w in of_sums]
    return Carried(result, sums)


def _exchanged(
    kernel: Kernel, columns: Kernel, by: dict[Variable, Index], graph: Graph
) -> tuple[dict[Node, Node], dict[Node, Node]] | None:
    """What the columns read of what the rows write, and the other way round, with the values, each in the loops of the
    kernel that writes; None where one kernel cannot compute both, or reads no less than two."""
    back = _in_loops(kernel.loops[: kernel.outer], columns.sweep)
    back |= _in_loops(kernel.sweep, columns.loops[: columns.outer])
    known, read = _written(kernel, columns, by, graph), _written(columns, kernel, back, graph)
    if known is None or read is None or known and read:
        return None
    if any(n in columns.rows for value in read.values() for n in above_reductions(value)):
        return None  # the rows need the sums
    return (known, read) if read or _reads_alike(kernel, columns, by, graph) else None


def _parted_writes(columns: Kernel) -> tuple[list[Write], list[Write]]:
    """What a kernel of columns writes for each element, and for each column."""
    inner = set(columns.sweep)
    each = [w for w in columns.writes if (variables_of(w.index) | w.value.axes) & inner]
    return each, [w for w in columns.writes if w not in each]


def _sums_of(
    columns: Kernel, programs: int, width: int, graph: Graph, new_buffer: NewBuffer
) -> tuple[Kernel, dict[Node, tuple[Buffer, Node]]]:
    """The kernel of the sums of what programs have added up, which writes nothing yet; and by sum of the columns, the
    memory of the programs' sums, and the sum of these."""
    sums = Kernel((*columns.loops[: columns.outer], axis("l", PROGRAMS, programs)), columns.outer)
    totals: dict[Node, tuple[Buffer, Node]] = {}
    at = _linear(columns.loops[: columns.outer])
    for node in columns.rows:
        buffer = new_buffer((programs, width), node.dtype)
        bound = axis("r", (node.depth, PROGRAMS), programs)
        terms = graph.make("load", (), node.dtype, (buffer, (Index.of(bound), at), ()))
        total = graph.make("reduce", (terms,), node.dtype, (Combine.SUM, (bound,)))
        totals[node] = buffer, total
        sums.rows[total] = graph.substitute(terms, {bound: Index.of(sums.loops[-1])})
    return sums, totals


def _by_rows(kernel: Kernel, width: int, graph: Graph) -> Kernel | None:
    """A kernel whose inner loops, behind the outer ones, are those of a row of `width` elements."""
    if any(not isinstance(v.size, int) for v in kernel.loops) or any(n.op == "scan" for n in kernel.rows):
        return None
    if kernel.rows or kernel.columns:
        return kernel if elements(kernel.sweep) == width and kernel.outer else None
    for outer in range(len(kernel.loops) - 1, -1, -1):
        v, inner = kernel.loops[outer], elements(kernel.loops[outer + 1 :])
        if inner == width or inner * v.size < width:
            continue
        if width % inner or v.size % (width // inner):
            return None
        size = width // inner
        high, low = axis("l", (v.name, size, 0), v.size // size), axis("l", (v.name, size, 1), size)
        loops = (*kernel.loops[:outer], high, low, *kernel.loops[outer + 1 :])
        result, by = Kernel(loops, outer + 1), {v: Index.of(high) * size + Index.of(low)}
        if v.size == size:  # the row begins with a whole loop
            result, by = Kernel(kernel.loops, outer), {}
        result.writes = [w.of(graph.substitute(w.value, by), replaced(w.index, by)) for w in kernel.writes]
        result.loads = {graph.substitute(n, by): replaced(i, by) for n, i in kernel.loads.items()}
        return result if result.outer else None
    return None


def _linear(loops: Sequence[Variable]) -> Index:
    """The number of an element among those of several loops."""
    return join([*map(Index.of, loops)], strides_of([v.size for v in loops]))


def _in_loops(loops: Sequence[Variable], others: Sequence[Variable]) -> dict[Variable, Index]:
    """Loops in terms of others that have as many elements."""
    return dict(zip(loops, split(_linear(others), [v.size for v in loops]), strict=True))


def _written(writer: Kernel, consumer: Kernel, by: dict[Variable, Index], graph: Graph) -> dict[Node, Node] | None:
    """What one kernel reads of what another one writes, in the loops of the latter, with the values; None where these
    are not the same elements. by: the loops of the consumer in terms of those of the writer."""
    writes = {w.buffer: w for w in writer.writes}
    known: dict[Node, Node] = {}
    for n, index in consumer.loads.items():
        w = writes.get(n.what[0])
        if w is None:
            continue
        if w.scan is not None or w.scatter is not None or opened(replaced(index, by)).key != opened(w.index).key:
            return None
        known[graph.substitute(n, by)] = w.value
    return known


def absorbed(kernel: Kernel, consumer: Kernel, graph: Graph) -> Kernel | None:
    """A kernel of sums that also computes what another one makes of them, element by element; None where it cannot."""
    own = kernel.loops[: kernel.outer]
    if consumer.rows or consumer.columns or elements(consumer.loops) != elements(own):
        return None
    by = _in_loops(consumer.loops, own)
    known = _written(kernel, consumer, by, graph)
    if not known or any(w.scan is not None or w.scatter is not None for w in consumer.writes):
        return None
    known |= {n: n for n in kernel.rows}
    result = Kernel(kernel.loops, kernel.outer)
    result.rows, result.writes = dict(kernel.rows), [*kernel.writes]
    for w in consumer.writes:
        value = graph.replace(graph.substitute(w.value, by), known)
        result.writes.append(w.of(value, replaced(w.index, by)))
    return result


def _reads_alike(kernel: Kernel, columns: Kernel, by: dict[Variable, Index], graph: Graph) -> bool:
    """Whether most of what the columns read is read, or computed, by the kernel at the same index."""
    size = elements(kernel.loops)
    mine = {(n.what[0], opened(i).key) for n, i in kernel.loads.items()}
    mine |= {(w.buffer, opened(w.index).key) for w in kernel.writes}
    total = shared = 0
    for n, index in columns.loads.items():
        if elements(n.axes) == size:
            total += n.dtype.bytes
            shared += n.dtype.bytes * ((n.what[0], opened(replaced(index, by)).key) in mine)
    return 2 * shared >= total > 0
