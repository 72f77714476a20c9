"""The schedule of a GPU: kernels of tiles, and which of them share a launch.

A kernel computes tiles of two dimensions. Its outer loops are the first one, each tile of which is a program; its sweep
is the second. A reduction has its own axes in the first and those that it binds in the second, whatever their order in
memory is, so that sums over rows and over columns are the same kind of kernel. Kernels without reductions have tiles of
one dimension, and of two where their operands disagree about the axis that is fastest in memory.

A reduction with too few programs is split: each program reduces a range, and a second reduction combines the ranges.
Kernels that do not depend on each other share a launch, where each has a range of the programs.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from thunder.analysis.min_cut import sink_side
from thunder.core.dtypes import BOOL, FLOAT, dtype
from thunder.kernels.column_sums import PROGRAMS, absorbed, carried, is_column_kernel
from thunder.kernels.combining import aligned_scans, neutral
from thunder.kernels.index import Index, Part, Variable, opened, strides_of, within
from thunder.kernels.ir import (
    BINDERS,
    Buffer,
    Combine,
    Graph,
    Node,
    Program,
    Store,
    axis,
    in_order,
    index_text,
    line,
    offset,
    replaced,
    variables_of,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    Assembly,
    Group,
    Item,
    Kernel,
    Reductions,
    Shared,
    Write,
    above_reductions,
    canonical_form,
    elements,
    groups_of,
    loops_of,
    mapping,
    of_free,
    range_of,
)
from thunder.kernels.sizes import Extent, Undecided, at_least, divides, exact, hint, power_of_two, rounded_up

Size = int | Extent
MOST_RANGES = 1024  # that a split reduction has
WIDEST = 16384  # elements of a tile
WHOLE = 4096  # elements of a row with scans in both directions
SEGMENT = 32  # bytes of memory that are read at least
REGISTERS = 80  # of a thread, for values of elements
LARGE = 1 << 16  # elements that a sum over rows has, for a kernel of these rows to add it up


# instructions for an element of float32, by what an H200 takes, but of tan to pow; of other functions one
INSTRUCTIONS = {
    "exp": 7, "exp2": 7, "log": 28, "log2": 29, "log10": 29, "sigmoid": 18, "expm1": 17, "log1p": 56, "tanh": 25,
    "erf": 32, "sin": 29, "cos": 31, "true_divide": 9, "reciprocal": 10, "sqrt": 11, "rsqrt": 8, "floor": 7,
    "ceil": 7, "trunc": 8, "floor_divide": 8, "remainder": 8, "load": 2, "cast": 1, "constant": 0, "index": 2,
    "tan": 60, "asin": 25, "acos": 25, "atan": 25, "atan2": 40, "sinh": 30, "cosh": 20, "asinh": 40, "acosh": 40,
    "atanh": 30, "erfc": 35, "erfinv": 40, "lgamma": 100, "hypot": 20, "fmod": 40, "pow": 60,
    "random": 80, "tuple": 0, "scan": 12,
}  # fmt: skip


def instructions(nodes: Iterable[Node]) -> float:
    """How many instructions an element of these values takes, about."""
    total = 0.0
    for n in nodes:
        is_narrow = n.op == "cast" and n.dtype.category == FLOAT and n.dtype.bytes < 4
        count = 3 if is_narrow else INSTRUCTIONS.get(n.op, 1)
        is_double = n.dtype.name in ("float64", "int64") and n.op not in ("load", "constant", "index")
        total += count * (1 if not is_double else 2 if count < 4 else 5)
    return total


class Tile(NamedTuple):
    """first, second: elements of each dimension; second is 0 for tiles of one dimension. warps: of a program.
    is_whole: whether a tile has the whole sweep; otherwise a program loops over it. steps: how many tiles of the first
    dimension a program computes, one after the other."""

    first: int
    second: int
    warps: int
    is_whole: bool = True
    steps: int = 1


class Launch:
    """Kernels that run at a time, with their tiles."""

    def __init__(self, kernels: Sequence[tuple[Kernel, Tile]]):
        self.kernels = list(kernels)

    @property
    def warps(self) -> int:
        return max(tile.warps for _, tile in self.kernels)

    def seconds(self, machine: Gpu) -> float:
        """The time of its kernels, which share that of a launch."""
        return sum(k.seconds for k, _ in self.kernels) - (len(self.kernels) - 1) * machine.launch


def programs_of(kernel: Kernel, tile: Tile) -> int:
    """How many programs a kernel has, for the sizes that it is made for."""
    if not tile.second:
        return -(-elements(kernel.loops) // tile.first)
    count = -(-elements(kernel.loops[: kernel.outer]) // (tile.first * tile.steps))
    return count if kernel.rows else count * -(-elements(kernel.sweep) // tile.second)


# ------------------------------------------------------------------------------------------------ items and groups


class TileItem(Item):
    """An item whose axes may have several orders: a reduction's own come before those that it binds.

    is_spread: whether what a reduction binds is apart in memory and too much for a tile. What reads it is another
    kernel, which need not read memory in such an order. is_apart: whether it is no item of a kernel with a reduction
    that it reads; is_alone: whether it has kernels of its own.
    """

    is_spread = is_apart = is_alone = False

    def lay_out(self, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> None:
        super().lay_out(graph, strides)
        own = [a for a in self.axes if a not in self._own_bound]
        bound = [a for a in self.axes if a in self._own_bound]
        if self.along is not None:  # in the order in which it combines
            bound.sort(key=lambda a: -hint(self.by[self.along].terms.get(a, 0)))  # type: ignore[index]
        self.axes = own + bound
        together = [
            n.dtype.bytes for n in loads_of(self.body)
            if any(step == 1 and v in own for v, step in _steps(graph.substitute(n, self.by), strides).items())
        ]  # fmt: skip
        is_long = bool(together) and power_of_two(hint(self.row or 1)) * SEGMENT // max(together) > WIDEST
        self.is_spread = is_long and self.along is None

    @property
    def row(self) -> Size | None:
        return None if self.store is not None else math.prod(a.size for a in self._own_bound)

    def orders(self, reductions: Reductions) -> Iterator[list[Variable]]:
        """The order in memory, and those in which the axes at which a reduction is read come first, and the one along
        which a scan is read last."""
        first = self.axes
        yield first
        for n in self.reductions:
            scanned = opened(replaced(n.what[2], self.by)).terms if n.op == "scan" else {}
            at = {v for i in reductions.at[n] for v in variables_of(replaced(i, self.by))}
            steps = {a: -hint(scanned.get(a, 0)) for a in first}
            at = {a for a in at if not steps.get(a)}
            order = sorted(first, key=lambda a: (a in self._own_bound, a not in at, steps[a]))  # which is stable
            if order != first:
                yield order


class TileGroup(Group):
    """Items of one kernel: they read the same elements in the same order, or one reads the reduction of another."""

    def takes(self, item: Item, reductions: Reductions, number: int, graph: Graph) -> list[Variable] | None:
        assert isinstance(item, TileItem), "schedules of GPUs have such items"
        if item.is_alone or any(isinstance(i, TileItem) and i.is_alone for i in self.items):
            return None
        inside = {n: r for n in item.reductions if (r := reductions.item[n]).group == number}
        if (
            self.row is not None
            and not at_least(WHOLE, self.row)
            and len({*map(_way, (*self.items, item))} - {None}) > 1
        ):
            return None  # a loop over the sweep goes one way
        if inside and item.is_apart or any(isinstance(r, TileItem) and r.is_spread for r in inside.values()):
            return None
        if not inside and not {b for i in self.items for b in i.buffers} & item.buffers:
            return None
        usual, result = item.axes, None
        for order in [*item.orders(reductions)]:
            item.axes = order
            if result is None and self._fits(item, inside, graph):
                result = order
        item.axes = usual
        return result

    def _fits(self, item: Item, inside: Mapping[Node, Item], graph: Graph) -> bool:
        joined = self._joined(item)
        if joined is None:
            return False
        cuts, row = joined

        def there(i: Item) -> dict[Variable, Index]:
            return mapping(i, cuts, self.total, row)

        by = there(item)
        for n, r in inside.items():
            if graph.substitute(n, by) is not graph.substitute(r.node, of_free(r, there(r))):
                return False
        if inside:
            return True
        known = {graph.substitute(n, there(i)) for i in self.items for n in loads_of(i.body)}
        return any(graph.substitute(n, by) in known for n in loads_of(item.body))


def _way(item: Item) -> bool | None:
    """Whether a scan is backwards; None for other items."""
    return item.node.what[3] if item.along is not None else None


def loads_of(body: Node) -> list[Node]:
    return [n for n in above_reductions(body) if n.op == "load"]


# ------------------------------------------------------------------------------------------------ the schedule


def scheduled(program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> list[Launch]:
    """The launches of a program, for buffers of these strides. Raises TooComplex."""
    strides, (program, alone) = dict(strides), stored_moves(aligned_scans(program), machine)
    for store in program.stores:
        strides.setdefault(store.buffer, strides_of(store.buffer.shape))
    kernels, _ = _best_kernels(program, strides, machine, alone, frozenset())
    columns, rows = _large_sums(program, strides, machine)
    if columns:  # are those of them that kernels of rows add up worth it?
        others, merged = _best_kernels(program, strides, machine, alone, columns | rows)
        if merged and not columns <= merged:  # the others may be split
            others, _ = _best_kernels(program, strides, machine, alone, merged | rows)
        if merged:
            kernels = min(kernels, others, key=lambda those: sum(k.seconds for k, _ in those))
    return launches_of(kernels, machine)


def _best_kernels(
    program: Program,
    strides: Mapping[Buffer, Sequence[int]],
    machine: Gpu,
    alone: Container[Buffer],
    whole: frozenset[Node],
) -> tuple[list[tuple[Kernel, Tile]], frozenset[Node]]:
    """The kernels of a program with their tiles. whole: the sums that are not split; those of them that are over rows,
    and that a kernel of these rows adds up as well, are returned."""
    program, kept = split_reductions(program, strides, machine, whole)
    apart: frozenset = frozenset()
    kernels = _kernels(program, dict(strides), machine, apart, alone, kept)
    while more := _faster_apart(kernels.of_groups, machine) - apart:
        apart |= more
        kernels = _kernels(program, dict(strides), machine, apart, alone, kept)
    return kernels.result, kernels.merged


def _large_sums(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu
) -> tuple[frozenset[Node], frozenset[Node]]:
    """The large sums over rows of elements that lie together in memory, in canonical form; and those of many rows."""
    columns, rows = set[Node](), set[Node]()
    for n in in_order(s.value for s in program.stores):
        if n.op != "reduce" or n.what[0] != Combine.SUM or elements(n.axes) * elements(n.what[1]) < LARGE:
            continue
        order = [*n.axes, *n.what[1]]
        loads = [m for m in loads_of(n.args[0]) if m.axes >= n.axes and m.axes & set(n.what[1])]
        fastest = [_fastest(opened(offset(m.what[1], strides[m.what[0]])), order) for m in loads]
        if not all(isinstance(v.size, int) for v in order):
            continue
        if elements(n.axes) >= 8 * machine.multiprocessors and not all(v in n.axes for v in fastest):
            rows.add(canonical_form(program.graph, n)[0])
        elif any(v in n.axes for v in fastest):
            columns.add(canonical_form(program.graph, n)[0])
    return frozenset(columns), frozenset(rows)


class _Kernels(NamedTuple):
    """of_groups: the kernels with the groups that they compute, and their tiles. result: with sums over rows in kernels
    of these rows. merged: these sums, in canonical form."""

    of_groups: list[tuple[Group, Kernel, Tile]]
    result: list[tuple[Kernel, Tile]]
    merged: frozenset[Node]


def _kernels(
    program: Program,
    strides: dict[Buffer, Sequence[int]],
    machine: Gpu,
    apart: Container[Buffer],
    alone: Container[Buffer],
    columns: Mapping[Node, Node],
) -> _Kernels:
    """apart: buffers that are not written by kernels of the reductions that they read; alone: those that have kernels
    of their own; columns: see `split_reductions`."""
    graph, reductions, items = program.graph, Reductions(program, TileItem), list[Item]()
    for store in program.stores:
        for node in above_reductions(store.value):
            if node.op in BINDERS:
                items += reductions.register(node)
        item = TileItem(store.value, store.axes, (), store)
        item.is_apart, item.is_alone = store.buffer in apart, store.buffer in alone
        items.append(item)
    for item in items:
        item.lay_out(graph, strides)
    groups = groups_of(items, reductions, graph, TileGroup)
    scratch = 1 + max((s.buffer.number for s in program.stores if s.buffer.kind == "scratch"), default=-1)

    def new_buffer(shape: tuple[Size, ...], kind: dtype) -> Buffer:
        nonlocal scratch
        buffer = Buffer("scratch", scratch, shape, kind)
        strides[buffer] = strides_of(shape)
        scratch += 1
        return buffer

    shared = materialized(groups, graph, strides, machine, new_buffer)
    writers = [Assembly(g, n, reductions, graph, strides, shared[n]) for n, g in enumerate(groups)]
    for writer in writers:
        for r in writer.needed():
            if r.scratch is None:
                r.scratch = new_buffer(tuple(a.size for a in r.free), r.node.dtype)
    kernels = []
    for writer in writers:
        for kernel in _by_pieces(opened_loads(writer.kernel(vectors=False), graph, strides), graph, strides, machine):
            kernel, tile = tiled(guarded(kernel, graph, strides), machine)
            estimate(kernel, tile, machine)
            kernels.append((writer.group, kernel, tile))
    if not columns:
        return _Kernels(kernels, [(k, tile) for _, k, tile in kernels], frozenset())
    result, merged = _with_column_sums(kernels, columns, graph, strides, machine, new_buffer)
    return _Kernels(kernels, result, merged)


def _with_column_sums(
    kernels: Sequence[tuple[Group, Kernel, Tile]],
    columns: Mapping[Node, Node],
    graph: Graph,
    strides: dict[Buffer, Sequence[int]],
    machine: Gpu,
    new_buffer: Callable[[tuple[Size, ...], dtype], Buffer],
) -> tuple[list[tuple[Kernel, Tile]], frozenset[Node]]:
    """The kernels with sums over rows in kernels of these rows, where that takes less time, and these sums."""
    result: list[tuple[Kernel, Tile]] = [(k, tile) for _, k, tile in kernels]
    merged: set[Node] = set()
    changed = {w.buffer for _, k, _ in kernels for w in k.writes if w.scatter is not None or w.scan is not None}
    for group, columns_of, _ in kernels:
        own = {columns[i.node] for i in group.items if i.store is None and i.node in columns}
        if not own or not is_column_kernel(columns_of):
            continue

        def carried_by(kernel: Kernel, tile: Tile, those: Kernel = columns_of) -> list[tuple[Kernel, Tile]] | None:
            if not _buffers_between(kernel, those).isdisjoint(changed):
                return None
            return _carried(kernel, tile, those, graph, strides, machine, new_buffer)

        better = _with_columns_of(result, columns_of, carried_by)
        if better is not None:
            result = better
            merged |= own
    return _without_unread(_with_absorbed(result, graph, strides, machine, changed)), frozenset(merged)


def _with_columns_of(
    kernels: Sequence[tuple[Kernel, Tile]],
    columns: Kernel,
    carried_by: Callable[[Kernel, Tile], list[tuple[Kernel, Tile]] | None],
) -> list[tuple[Kernel, Tile]] | None:
    """The kernels in which one adds up the columns of another one, which is saved; None where that takes no less time.
    carried_by: a kernel that also adds up the columns, and that of the sums."""
    number = next((n for n, (k, _) in enumerate(kernels) if k is columns), None)
    if number is None:  # it has others' columns by now
        return None
    best: tuple[float, list[tuple[Kernel, Tile]]] | None = None
    for n, (kernel, tile) in enumerate(kernels):
        pair = carried_by(kernel, tile) if n != number else None
        if pair is None:
            continue
        gain = kernel.seconds + columns.seconds - sum(k.seconds for k, _ in pair)
        order = _ordered([q for m, p in enumerate(kernels) if m != number for q in (pair if m == n else [p])])
        if order is not None and gain > (best[0] if best is not None else 0.0):
            best = gain, order
    return best[1] if best is not None else None


def _buffers_between(kernel: Kernel, other: Kernel) -> set[Buffer]:
    """What one of two kernels writes and the other one reads. Where others change it as well, as a scatter does, it is
    not known which of the values is read."""
    pairs = (kernel, other), (other, kernel)
    return {w.buffer for a, b in pairs for w in a.writes for n in b.loads if n.what[0] is w.buffer}


def _with_absorbed(
    kernels: list[tuple[Kernel, Tile]],
    graph: Graph,
    strides: Mapping[Buffer, Sequence[int]],
    machine: Gpu,
    changed: Set[Buffer],
) -> list[tuple[Kernel, Tile]]:
    """The kernels in which those of sums over programs compute what others make of the sums alone."""
    result = list(kernels)
    for sums in [p for p in kernels if p[0].sweep and p[0].sweep[-1].name == f"l{PROGRAMS}"]:
        for consumer in kernels:
            is_plain = consumer in result and _buffers_between(sums[0], consumer[0]).isdisjoint(changed)
            other = absorbed(sums[0], consumer[0], graph) if is_plain else None
            if other is None:
                continue
            other, tile = tiled(with_loads(other, strides), machine)
            estimate(other, tile, machine)
            order = _ordered([(other, tile) if p is sums else p for p in result if p is not consumer])
            if order is not None:
                result = order
                sums = next(p for p in result if p[0] is other)
    return result


def _without_unread(kernels: Sequence[tuple[Kernel, Tile]]) -> list[tuple[Kernel, Tile]]:
    """The kernels without what they write to scratch memory for nobody."""
    read = {b for k, _ in kernels for b in _needed(k)}
    result = []
    for kernel, tile in kernels:
        left = copy.copy(kernel)
        left.writes = [w for w in kernel.writes if w.buffer.kind != "scratch" or w.buffer in read]
        if left.writes or left.columns:
            result.append((left, tile))
    return result


def _ordered(kernels: Sequence[tuple[Kernel, Tile]]) -> list[tuple[Kernel, Tile]] | None:
    """The kernels, each behind those that write what it reads; None where there is no such order."""
    writers: dict[Buffer, list[int]] = {}
    for i, (k, _) in enumerate(kernels):
        for buffer in (*(w.buffer for w in k.writes), *(c.buffer for c in k.columns)):
            writers.setdefault(buffer, []).append(i)
    behind: list[set[int]] = []
    for i, (k, _) in enumerate(kernels):
        those = [writers.get(b, []) for b in _needed(k)]
        behind.append({j for own in those for j in own if j != i and (j < i or i not in own)})
    order: dict[int, None] = {}
    while len(order) < len(kernels):
        ready = next((i for i, needed in enumerate(behind) if i not in order and needed <= order.keys()), None)
        if ready is None:
            return None
        order[ready] = None
    return [kernels[i] for i in order]


def _carried(
    kernel: Kernel,
    tile: Tile,
    columns: Kernel,
    graph: Graph,
    strides: dict[Buffer, Sequence[int]],
    machine: Gpu,
    new_buffer: Callable[[tuple[Size, ...], dtype], Buffer],
) -> list[tuple[Kernel, Tile]] | None:
    """A kernel of rows that adds up columns as well, and the kernel of the sums of these; None where it cannot."""
    width = elements(columns.loops[: columns.outer])
    if kernel.rows and not tile.is_whole:  # a program has whole rows
        moved = sum(size for _, size, _ in _accesses(kernel))
        if power_of_two(width) * _least_rows(_across(kernel)) > WIDEST:
            return None
        _, tile = _best_tile(_work_of(kernel, moved), machine, is_whole=True)
    roots = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    roots += columns.rows.values()
    live = live_values(roots) + len(kernel.columns) + len(columns.rows)
    if not kernel.rows and not kernel.columns:
        at_once = elements_at_once(roots)
        second = min(power_of_two(width), 512)
        first = max(1, min(8, 4 * 32 * at_once // second))
        tile = Tile(first, second, 4)
    rows, blocks = elements(columns.sweep), 1 if kernel.rows else -(-width // tile.second)
    registers = 24 + live * max(1.0, tile.first * tile.second / (32 * tile.warps))
    at_once = machine.multiprocessors * max(1, machine.resident(tile.warps, registers) // tile.warps)
    tiles = -(-rows // tile.first)
    if not kernel.columns:
        tile = tile._replace(steps=max(1, -(-tiles * blocks // at_once)))
    programs = -(-tiles // tile.steps)
    pair = carried(kernel, columns, programs, graph, new_buffer)
    if pair is None:
        return None
    merged, sums = with_loads(pair.rows, strides), with_loads(pair.sums, strides)
    sums, of_sums = tiled(sums, machine)
    estimate(sums, of_sums, machine)
    estimate(merged, tile, machine)
    return [(merged, tile), (sums, of_sums)]


def _faster_apart(kernels: Sequence[tuple[Group, Kernel, Tile]], machine: Gpu) -> frozenset[Buffer]:
    """The buffers of kernels with too few programs: what reads a reduction at each element of its rows is computed
    faster by a kernel without the reduction, which has programs for all elements."""
    result: set[Buffer] = set()
    for group, kernel, tile in kernels:
        inner = set(kernel.sweep)
        swept = [w for w in kernel.writes if variables_of(w.index) & inner]
        if not kernel.rows or not swept or machine.share(programs_of(kernel, tile) * tile.warps) == 1.0:
            continue
        rows, width = elements(kernel.loops[: kernel.outer]), elements(kernel.sweep)
        work = instructions(dict.fromkeys(n for w in swept for n in above_reductions(w.value)))
        alone = machine.launch + max(machine.moving(kernel.bytes), rows * width * work * machine.instruction)
        roots = [*kernel.rows.values()]
        passes = [instructions(dict.fromkeys(n for r in roots for n in above_reductions(r)))]
        reads = Work(rows, width, _across(kernel), kernel.bytes / 2, passes, live_values(roots), len(roots))
        reducing, _ = _best_tile(reads, machine, is_known=all(isinstance(v.size, int) for v in kernel.sweep))
        if kernel.seconds > 1.2 * (alone + reducing):
            written = {w.buffer for w in swept}
            result |= {i.store.buffer for i in group.items if i.store is not None and i.store.buffer in written}
    return frozenset(result)


# ------------------------------------------------------------------------------------------------ moved values


def stored_moves(program: Program, machine: Gpu) -> tuple[Program, frozenset[Buffer]]:
    """The program in which values that are needed at several indices are stored, where that takes less than computing
    them at each one: `f(x)[j] + f(x)[n - j]` has `f(x)` in scratch memory for the second. So are concatenations, each
    piece of which a kernel with other values computes at all indices: kernels of pieces do not. Their buffers are
    returned as well."""
    graph = program.graph
    nodes = in_order(s.value for s in program.stores)
    present = {*nodes}
    of_value: dict[Node, dict[Node, tuple[Index, ...]]] = {}  # by value, where nodes read it
    axes: dict[Node, tuple[Variable, ...]] = {}
    plain: set[Node] = set()  # values that are computed in order as well
    for n in _moved(nodes):
        for m, is_present in _parts_in_order(graph, n, present):
            if instructions(k for k in above_reductions(m) if k.op not in BINDERS) >= 8:
                value, free, at = canonical_form(graph, m)
                of_value.setdefault(value, {})[m] = at
                axes[value] = free
                plain |= {value} if is_present else set()
    lost: dict[Node, float] = {}  # by concatenation, instructions for an element that is in other pieces
    for n, count in _concatenations(program, nodes).items():
        value, free, at = canonical_form(graph, n)
        of_value.setdefault(value, {})[n] = at
        axes[value], lost[value] = free, count
    by, stores = dict[Node, Node](), list[Store]()
    number = 1 + max((s.buffer.number for s in program.stores if s.buffer.kind == "scratch"), default=-1)
    for value, those in of_value.items():
        count = elements(axes[value])
        work = instructions(m for m in above_reductions(value) if m.op not in BINDERS)
        places = {tuple((opened(i).constant, *opened(i).terms.values()) for i in at) for at in those.values()}
        again = max((len(places) + (value in plain) - 1) * work, lost.get(value, 0.0)) * count * machine.instruction
        if again <= machine.launch + machine.moving(2.5 * count * value.dtype.bytes):
            continue
        buffer = Buffer("scratch", number + len(stores), tuple(v.size for v in axes[value]), value.dtype)
        stores.append(Store(buffer, axes[value], value))
        by |= {n: graph.make("load", (), n.dtype, (buffer, at, ())) for n, at in those.items()}
    alone = frozenset(s.buffer for s in stores if s.value in lost)
    return (_with_stores(program, by, stores) if by else program), alone


def _with_stores(program: Program, by: Mapping[Node, Node], stores: Sequence[Store]) -> Program:
    """The program with other nodes in the place of some, and with stores that these read."""
    graph, known = program.graph, dict(by)
    result = [s.of(graph.replace(s.value, known)) for s in program.stores]
    for store in stores:  # behind those that write what it reads
        read = {n.what[0] for n in in_order([store.value]) if n.op == "load"}
        last = max((i for i, s in enumerate(result) if s.buffer in read), default=-1)
        result.insert(last + 1, store)
    return Program(graph, program.inputs, result)


def _concatenations(program: Program, nodes: Sequence[Node]) -> dict[Node, float]:
    """Those that are no results, whose pieces take much longer together, with the instructions that are lost."""
    roots = {n for s in program.stores for n in (s.value, *(s.value.args if s.value.op == "cast" else ()))}
    lost = {n: _lost_instructions(n) for n in nodes if n.op == "concat" and n not in roots}
    return {n: count for n, count in lost.items() if count >= 8}


def _lost_instructions(concat: Node) -> float:
    """How many instructions for an element a concatenation takes more than its pieces at their own indices; 0 where
    there are no kernels of pieces."""
    along, starts, end = concat.what
    ends = (*starts[1:], end)
    if [*opened(along).terms.values()] != [1] or not all(isinstance(n, int) for n in (*starts, end)):
        return 0.0
    work = [instructions(n for n in above_reductions(piece) if n.op not in BINDERS) for piece in concat.args]
    own = sum(w * (high - low) for w, low, high in zip(work, starts, ends, strict=True)) / (end - starts[0])
    together = dict.fromkeys(n for piece in concat.args for n in above_reductions(piece))
    return instructions(n for n in together if n.op not in BINDERS) - own


def _parts_in_order(graph: Graph, node: Node, present: set[Node]) -> list[tuple[Node, bool]]:
    """The largest values below a moved one that are computed in order as well, with True; the whole one where there are
    none, with False."""
    by: dict[Variable, Index] = {}
    for v in node.axes:
        found = range_of(node, v)
        if found is not None:
            _, _, shift, sign, _, _ = found
            by[v] = (Index.of(v) + -shift) * sign
    there: dict[Node, Node] = {}
    graph.substitute(node, by, there)
    stack, parts = [node], dict[Node, bool]()
    while stack:
        n = stack.pop()
        if there.get(n, n) is not n and there[n] in present and n.op not in ("load", "cast"):
            parts[n] = True
        elif n.op not in BINDERS:
            stack += n.args
    return [*parts.items()] or [(node, False)]


def _moved(nodes: Sequence[Node]) -> list[Node]:
    """The largest values that are read at one index, which is not that of the loops."""
    forms: dict[Node, dict[Variable, set]] = {}
    users: dict[Node, list[Node]] = {}
    for n in nodes:
        own: dict[Variable, set] = {}
        if n.op == "load":
            for index in n.what[1]:
                plain = opened(index)
                for v in variables_of(plain):
                    own.setdefault(v, set()).add(plain.key if not plain.is_variable(v) else None)
        if n.op not in BINDERS:
            for a in n.args:
                users.setdefault(a, []).append(n)
                for v, keys in forms[a].items():
                    own[v] = own.get(v, set()) | keys
        forms[n] = own

    def is_moved(n: Node) -> bool:
        each = forms[n].values()
        return all(len(keys) == 1 for keys in each) and any(keys != {None} for keys in each)

    largest = {n for n in nodes if is_moved(n) and n.op not in ("load", "cast", "tuple", "scan")}
    return [
        n for n in nodes
        if n in largest and (n not in users or any(u not in largest or u.op == "concat" for u in users[n]))
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ stored values


def _results(
    groups: Sequence[Group], graph: Graph, names: Sequence[_Names]
) -> tuple[list[list[Node]], dict[Node, Shared]]:
    """By group, the values that its loops compute, in names that all groups have; and those that are results."""
    roots: list[list[Node]] = []
    stored: dict[Node, Shared] = {}
    changed = {
        i.store.buffer for g in groups for i in g.items
        if i.store is not None and (i.store.scatter is not None or i.store.scan is not None)
    }  # fmt: skip
    for number, group in enumerate(groups):
        roots.append([])
        for item, m in group.mappings().items():
            by = {a: replaced(i, names[number].there) for a, i in m.items()}
            root = graph.substitute(item.body, by)
            roots[-1].append(root)
            if item.store is not None and item.store.buffer not in changed:
                index = tuple(by[a] for a in item.store.axes)
                if all(variables_of(i) <= root.axes for i in index):  # otherwise others may not have all of its axes
                    result = Shared(item.store.buffer, index, number)
                    stored.setdefault(root, result)
                    if root.op == "cast" and graph.stored_dtype(root.args[0]) is root.dtype:
                        stored.setdefault(root.args[0], result)
    return roots, stored


def materialized(
    groups: Sequence[Group],
    graph: Graph,
    strides: Mapping[Buffer, Sequence[int]],
    machine: Gpu,
    new_buffer: Callable[[tuple[Size, ...], dtype], Buffer],
) -> list[dict[Node, Shared]]:
    """By group, the values that it writes for later groups or reads of earlier ones, where that takes less time than
    computing them again. Results that a group writes are there anyway."""
    names = [_by_size(g, graph, strides) for g in groups]
    roots, stored = _results(groups, graph, names)
    users = Counter(n for nodes in roots for n in {n for root in nodes for n in above_reductions(root)})
    first: dict[Node, int] = {}  # by value, the first group that computes it
    shared: dict[Node, Shared] = {}
    reads: list[set[Node]] = []
    for number, nodes in enumerate(roots):

        def price(n: Node, number: int = number) -> float | None:
            """Seconds for reading a value, and for writing it unless it is in memory; None where it cannot be read."""
            size = elements(n.axes) * graph.stored_dtype(n).bytes
            if n in shared or n in stored and stored[n].group < number:
                return machine.moving(size)
            if n not in first or not _is_shareable(n):
                return None
            return machine.moving(size) * (1 + 1.5 / max(1, users[n] - 1))

        cut = _cheapest_reads(nodes, price, machine)
        for n in cut.keys() - shared.keys():
            if n in stored and stored[n].group < number:
                shared[n] = stored[n]
            else:
                axes = [v for v in names[first[n]].back if v in n.axes]  # the fastest last
                buffer = new_buffer(tuple(v.size for v in axes), graph.stored_dtype(n))
                shared[n] = Shared(buffer, tuple(map(Index.of, axes)), first[n])
        for n in _above(nodes, cut):
            first.setdefault(n, number)
        reads.append(set(cut))
    return [_in_own_names(graph, shared, read, number, names[number].back) for number, read in enumerate(reads)]


def _above(roots: Iterable[Node], read: Container[Node]) -> list[Node]:
    """The nodes that are computed where these are read, and reductions are there."""
    order: dict[Node, None] = {}
    stack = [*roots]
    while stack:
        n = stack.pop()
        if n not in order and n not in read:
            order[n] = None
            stack += n.args if n.op not in BINDERS else ()
    return [*order]


def _cheapest_reads(roots: Sequence[Node], price: Callable[[Node], float | None], machine: Gpu) -> dict[Node, None]:
    """The values to read from memory, so that a kernel takes the least time. price: seconds to read a value.

    This is a minimum cut between memory and what is computed: a node that is behind it is computed, and costs its
    instructions; one whose operands alone are before it is read. Kernels compute while they wait for memory, so that
    instructions count less where memory decides: the best of the cuts for several weights is taken."""
    nodes = _above(roots, ())
    prices = {
        n: p
        for n in nodes
        if n.op not in ("load", "constant", "index", "tuple", *BINDERS) and (p := price(n)) is not None
    }
    if not prices:
        return {}
    work = {n: elements(n.axes) * instructions([n]) * machine.instruction for n in nodes}
    moved = {n: machine.moving(touched(n) * n.dtype.bytes) for n in nodes if n.op == "load"}
    best: tuple[float, dict[Node, None]] | None = None
    for weight in (0.25, 0.5, 1.0):
        edges: list[tuple[Any, Any, float]] = [((n, "value"), "results", math.inf) for n in roots]
        for n in nodes:
            if n.op not in BINDERS:
                edges.append(("memory", (n, "operands"), weight * work[n] + moved.get(n, 0.0)))
                edges.append(((n, "operands"), (n, "value"), prices.get(n, math.inf)))
                edges += [((a, "value"), (n, "operands"), math.inf) for a in n.args if a.op not in BINDERS]
        behind = sink_side(edges, "memory", "results")
        read = {n: None for n in prices if (n, "value") in behind and (n, "operands") not in behind}
        computed = _above(roots, read)
        moving = sum(prices[n] for n in read) + sum(moved.get(n, 0.0) for n in computed)
        computing = sum(work[n] for n in computed)
        seconds = max(moving, computing) + min(moving, computing) / 4
        if best is None or seconds < best[0]:
            best = seconds, read
    assert best is not None, "there are weights"
    return best[1]


def _is_shareable(node: Node) -> bool:
    """Whether a value is one over names that all groups have, and reads memory in all of its range, not just in that of
    a piece of a concatenation."""
    if node.op == "cast" and node.args[0].op == "load" or not node.axes or any(v.name[0] != "n" for v in node.axes):
        return False
    return reads_inside(node)


def reads_inside(node: Node) -> bool:
    """Whether all that a value reads, other than in pieces of its concatenations, is inside of its buffers. False where
    that is not known."""
    return next(_outside([node], ()), None) is None


def _outside(nodes: Iterable[Node], known: Container[Node]) -> Iterator[tuple[Node, Index, Size]]:
    """The loads that may be outside of their buffers, with an index and the size of its dimension. known: values that
    are computed elsewhere."""
    stack: list[tuple[Node, tuple]] = [(n, ()) for n in nodes]
    seen = set(stack)
    while stack:
        n, guards = stack.pop()
        below = [(a, guards) for a in n.args if n not in known]
        if n.op == "load":
            for i, size in zip(n.what[1], n.what[0].shape, strict=True):
                if not _is_inside(i, size, guards):
                    yield n, opened(i), size
        elif n.op == "concat":
            along, starts, end = n.what
            ranges = zip(n.args, starts, (*starts[1:], end), strict=True)
            below = [(piece, (*guards, (opened(along), low, high))) for piece, low, high in ranges]
        stack += [b for b in below if b not in seen]
        seen.update(below)


def _is_inside(index: Index, size: Size, guards: Sequence[tuple[Index, Size, Size]]) -> bool:
    """Whether an index is one of a dimension, where indices of concatenations are in the ranges of `guards`. An index
    that nothing else says more of than its terms is that of a verified program."""
    plain = opened(index)
    if plain.key == index.key:
        return True
    is_above, is_below = at_least(plain.low, 0), at_least(size - 1, plain.high)
    for along, start, end in guards:
        for sign in (1, -1):
            rest = plain + along * -sign
            if not rest.terms:  # the index is that of the concatenation and a number
                first, last = (start, end - 1) if sign == 1 else (1 - end, -start)
                is_above |= at_least(first + rest.constant, 0)
                is_below |= at_least(size - 1, last + rest.constant)
    return is_above and is_below


def _in_own_names(
    graph: Graph, shared: Mapping[Node, Shared], reads: set[Node], number: int, back: Mapping[Variable, Index]
) -> dict[Node, Shared]:
    """The shared values that a group reads or writes, in the names of its own axes."""
    own: dict[Node, Shared] = {}
    for n, s in shared.items():
        if n in reads or number == s.group and s.buffer.kind == "scratch":
            own[graph.substitute(n, back)] = Shared(s.buffer, tuple(replaced(i, back) for i in s.index), s.group)
    return own


def _by_size(group: Group, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> _Names:
    """Names of loops that do not depend on their order, nor on how a range is split: by size, and among those of one
    size by steps in memory."""
    steps: dict[Variable, int] = {}
    indices: list[Index] = []
    for item, by in group.mappings().items():
        for n in above_reductions(item.body):
            if n.op == "load":
                indices += [replaced(i, by) for i in n.what[1]]
                for v, step in _steps(graph.substitute(n, by), strides).items():
                    steps[v] = max(steps.get(v, 0), step)
            elif n.op in ("index", "concat"):
                indices.append(replaced(n.what if n.op == "index" else n.what[0], by))
            elif n.op == "scan":
                indices.append(replaced(n.what[2], by))
    runs = _runs(loops_of(group.cuts), {i.key: i for i in indices}.values())
    count: dict[Size, int] = {}
    there: dict[Variable, Index] = {}
    back: dict[Variable, Index] = {}
    for run in sorted(runs, key=lambda run: -steps.get(run[-1], 0)):
        size = math.prod(v.size for v in run)
        number = count[size] = count.get(size, 0) + 1
        name = axis("n", (size, number), size)
        back[name], inner = Index.of(0), size
        for v in run:
            outer, inner = inner, exact(inner, v.size)
            back[name] = back[name] + Index.of(v) * inner
            there[v] = (Index.of(name) % outer if outer != size else Index.of(name)) // inner
    return _Names(there, back)


class _Names(NamedTuple):
    """there: loops in terms of names; back: names in terms of loops."""

    there: dict[Variable, Index]
    back: dict[Variable, Index]


def _runs(loops: Sequence[Variable], indices: Iterable[Index]) -> list[list[Variable]]:
    """Loops of which the second goes on where the first has ended, wherever they occur."""
    apart = {v for i in indices for a in i.terms if isinstance(a, Part) for v in variables_of(a.index)}

    def continues(run: list[Variable], v: Variable) -> bool:
        last = run[-1]
        return not apart & {v, *run} and all(
            i.terms.get(last, 0) == i.terms.get(v, 0) * v.size for i in indices
        )  # fmt: skip

    runs: list[list[Variable]] = []
    for v in loops:
        run = next((r for r in runs if continues(r, v)), None)
        if run is None:
            runs.append([v])
        else:
            run.append(v)
    return runs


# ------------------------------------------------------------------------------------------------ split reductions


def split_reductions(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, whole: Container[Node] = ()
) -> tuple[Program, dict[Node, Node]]:
    """The program with reductions that have too few programs in two steps:

    sum over r:1000000 of x[r]   becomes   sum over s:500 of sum over t:2000 of x[2000 * s + t]

    whole: those that stay as they are, in canonical form. They are returned by the form that they have in the result,
    whose operands may be split.
    """
    graph = program.graph
    users = _users_of_reductions(program)
    kept: dict[Node, Node] = {}

    def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
        node = graph.make(n.op, args, n.dtype, n.what)
        if node.op != "reduce" or _binds_scans(node):
            return node
        if whole and (canonical := canonical_form(graph, n)[0]) in whole:
            kept[canonical_form(graph, node)[0]] = canonical
            return node
        return _split(graph, node, strides, machine, users.get(n, ()))

    known: dict[Node, Node] = {}
    stores = [s.of(graph.transform(s.value, rebuilt, known=known)) for s in program.stores]
    return Program(graph, program.inputs, stores), kept


def _binds_scans(node: Node) -> bool:
    """Whether a reduction is of a scan's elements: a range of them begins with those before it."""
    return any(n.op == "scan" and n.axes & set(node.what[1]) for n in above_reductions(node.args[0]))


def _users_of_reductions(program: Program) -> dict[Node, list[Node]]:
    """By reduction, the values of stores and of other reductions that read it."""
    roots = [s.value for s in program.stores]
    roots += [n.args[0] for n in in_order(roots) if n.op == "reduce"]
    users: dict[Node, list[Node]] = {}
    for root in roots:
        for n in above_reductions(root):
            if n.op == "reduce":
                users.setdefault(n, []).append(root)
    return users


def _split(
    graph: Graph, node: Node, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, users: Sequence[Node]
) -> Node:
    _, bound = node.what
    body, rows = node.args[0], elements(node.axes)
    loads = [n for n in loads_of(body) if n.axes & set(bound)]
    steps = [_steps(n, strides) for n in loads]
    if not steps:
        return node
    width = elements(bound)
    moved = sum(n.dtype.bytes * touched(n) for n in loads)
    work = instructions(above_reductions(body)) + 2
    fastest = [_fastest(opened(offset(n.what[1], strides[n.what[0]])), [*node.axes, *bound]) for n in loads]
    items = [n.dtype.bytes for n, v in zip(loads, fastest, strict=True) if v in node.axes]
    wanted = -(-machine.multiprocessors * machine.warps // 4 // -(-rows // (64 if items else 1)))
    wanted = min(MOST_RANGES, wanted, max(2, width // (16 if items else 2048)))
    ranges = _ranges_of(sorted(bound, key=lambda a: -max(s.get(a, 0) for s in steps) * (a.size != 1)), wanted)
    count = math.prod(r.count for r in ranges)
    if count < 2:
        return node
    is_known = all(isinstance(a.size, int) for a in bound)
    # the same programs compute all elements of a row that need the reduction, unless it is split
    whole = [r for r in users if elements(r.axes) == rows * width]
    after = instructions(dict.fromkeys(n for r in whole for n in above_reductions(r)))
    passes = [work, after] if whole else [work]
    live = live_values([body])
    alone, tile = _best_tile(Work(rows, width, items, moved * len(passes), passes, live), machine, is_known)
    partial = Work(rows * count, -(-width // count), items, moved, [work], live)
    together, _ = _best_tile(partial, machine, is_known)
    if whole:
        together += machine.launch + max(machine.moving(moved), rows * width * after * machine.instruction)
    elif not tile.is_whole:  # what reads the reduction is another pass, by the same programs or by more
        alone, _ = _best_tile(Work(rows, width, items, moved, [work, work], live), machine, is_known)
        together *= 2
    if together + machine.launch > 0.8 * alone:
        return node
    return _in_ranges(graph, node, ranges)


class _Ranges(NamedTuple):
    """The ranges of an axis: how many there are, and how many elements each has but for the last."""

    axis: Variable
    count: int
    length: Size


def _ranges_of(bound: Sequence[Variable], wanted: int) -> list[_Ranges]:
    """The ranges of a split reduction, at most `wanted` in all. bound: the axes, the slowest in memory first. Each
    index of the first ones is a range, and the axis after them is cut."""
    ranges: list[_Ranges] = []
    for a in bound:
        size, left = hint(a.size), wanted // math.prod(r.count for r in ranges)
        if left < 2 or size == 1:
            break
        count = min(left, size)
        count = next((n for n in range(count, count // 2, -1) if divides(n, a.size)), count)
        length = rounded_up(a.size, count)
        # for smaller sizes some may be empty
        ranges.append(_Ranges(a, count if isinstance(length, Extent) else -(-size // length), length))
        if length != 1:
            break
    return ranges


def _in_ranges(graph: Graph, node: Node, ranges: Sequence[_Ranges]) -> Node:
    """A reduction of reductions over ranges of its axes."""
    combine, bound = node.what
    inner = node.args[0]
    parts: list[Variable] = []
    rest = [a for a in bound if all(a is not r.axis for r in ranges)]
    for number, (whole, count, length) in enumerate(ranges):
        part, own = axis("r", (node.depth, "range", number), count), axis("r", (node.depth, "in", number), length)
        at = Index.of(part) * length + Index.of(own)
        inner = graph.substitute(inner, {whole: within(at, whole.size)})
        if length * count != whole.size:
            nothing = graph.make("constant", (), node.dtype, neutral(combine, node.dtype))
            inner = graph.make("concat", (inner, nothing), node.dtype, (at, (0, whole.size), count * length))
        parts.append(part)
        rest.append(own)
    bounds = tuple(a for a in rest if a.size != 1)
    partial = graph.make("reduce", (inner,), node.dtype, (combine, bounds)) if bounds else inner
    return graph.make("reduce", (partial,), node.dtype, (combine, tuple(parts)))


def _steps(load: Node, strides: Mapping[Buffer, Sequence[int]]) -> dict[Variable, int]:
    """By axis, how far the elements are apart in memory, for the sizes that kernels are made for."""
    buffer, index, _ = load.what
    steps: dict[Variable, int] = {}
    for atom, factor in opened(offset(index, strides[buffer])).terms.items():
        for v in variables_of(atom.index) if isinstance(atom, Part) else (atom,):
            steps[v] = max(steps.get(v, 0), abs(hint(factor)))
    return steps


# ------------------------------------------------------------------------------------------------ pieces


def _by_pieces(kernel: Kernel, graph: Graph, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> Iterator[Kernel]:
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
    if loop is None or ends is None or len(cuts) > 16 or hint(loop.size) // (len(cuts) + 1) < 16:
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


def nodes_of(kernel: Kernel) -> list[Node]:
    """What a kernel computes for an element, each node once."""
    roots = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    return [*dict.fromkeys(n for root in roots for n in above_reductions(root))]


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
    for n, index, size in _outside([*kernel.rows.values(), *(w.value for w in kernel.writes)], kernel.rows):
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


# ------------------------------------------------------------------------------------------------ tiles


def touched(load: Node) -> int:
    """How many elements of memory a value reads, at most."""
    ranges = math.prod(hint(i.high - i.low + 1) for i in load.what[1])
    return min(ranges, elements(load.axes)) if not load.args else elements(load.axes)


def _accesses(kernel: Kernel) -> list[tuple[Index, int, Buffer]]:
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


def _fastest(index: Index, loops: Sequence[Variable]) -> Variable | None:
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


def tiled(kernel: Kernel, machine: Gpu) -> tuple[Kernel, Tile]:
    """A kernel with its tile; the loops of one without reductions in the order of its tile."""
    return (kernel, _tile_of_rows(kernel, machine)) if kernel.rows else _tile_of_map(kernel, machine)


def elements_of_thread(work: float) -> int:
    """How many elements of a tile a thread has: fewer where much is computed of each, and all are in registers."""
    return 16 if work < 100 else 8 if work < 400 else 4


def elements_at_once(roots: Iterable[Node]) -> int:
    """How many elements of a tile a thread has whose values are in registers at once: where the tile changes its layout
    between threads, and in loops, which read ahead."""
    return max(2, min(16, 1 << int(math.log2(max(2, REGISTERS / max(1, live_values(roots)))))))


def live_values(roots: Iterable[Node]) -> int:
    """How many values of an element are needed at once, where they are computed in order."""
    roots = [*roots]
    above = {n for root in roots for n in above_reductions(root)}
    order = [n for n in in_order(roots) if n in above]
    last = {a: number for number, n in enumerate(order) if n.op not in BINDERS for a in n.args}
    last |= dict.fromkeys(roots, len(order))
    ends = Counter(last[n] for n in order if n in last and _has_register(n))
    most = live = 0
    for number, n in enumerate(order):
        live += _has_register(n) and n in last
        most = max(most, live)
        live -= ends[number]
    return most


def _has_register(n: Node) -> bool:
    return bool(n.axes) and n.op not in ("constant", "index")


def warps_of(elements: int, share: int) -> int:
    return max(1, min(32, elements // (32 * share)))


def _tile_of_map(kernel: Kernel, machine: Gpu) -> tuple[Kernel, Tile]:
    total = elements(kernel.loops)
    votes: dict[Variable, int] = {}
    for index, weight, _ in _accesses(kernel):
        v = _fastest(index, kernel.loops)
        if v is not None and len(variables_of(index)) > 1 and weight * 8 > total:
            votes[v] = votes.get(v, 0) + weight
    long = sorted((v for v in votes if hint(v.size) >= 8), key=lambda v: -votes[v])
    if len(long) < 2:
        share = total // (4 * machine.multiprocessors)
        first = max(128, min(64 * elements_of_thread(instructions(nodes_of(kernel))), power_of_two(share + 1) // 2))
        first = min(first, power_of_two(total))
        return kernel, Tile(first, 0, max(1, min(4, first // 128)))
    b, a = long[:2]
    loops = [*(v for v in kernel.loops if v is not a and v is not b), a, b]
    other = Kernel(loops, len(loops) - 1)
    other.writes, other.loads = kernel.writes, kernel.loads
    at_once = elements_at_once(w.value for w in kernel.writes)
    side = 64 if total >= 64 * 64 * 2 * machine.multiprocessors and at_once >= 8 else 32
    second = min(side, power_of_two(hint(b.size)))
    first = min(side * side // second, power_of_two(elements(loops[:-1])))
    share = min(at_once, 8 if side < 64 else 16)
    return other, Tile(first, second, min(16, warps_of(first * second, share)))


def _tile_of_rows(kernel: Kernel, machine: Gpu) -> Tile:
    ways = {n.what[3] for n in kernel.rows if n.op == "scan"}
    is_known = all(isinstance(v.size, int) for v in kernel.sweep)
    if len(ways) > 1 and not is_known:
        raise Undecided
    moved = sum(size for _, size, _ in _accesses(kernel))
    return _best_tile(_work_of(kernel, moved), machine, is_known, len(ways) > 1)[1]


def _work_of(kernel: Kernel, moved: int) -> Work:
    roots = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    rows, width = elements(kernel.loops[: kernel.outer]), elements(kernel.sweep)
    return Work(rows, width, _across(kernel), moved, _passes(kernel), live_values(roots), len(kernel.rows))


def _passes(kernel: Kernel) -> list[float]:
    """The instructions for an element of each pass over a row that is no whole tile."""
    stages, inner = kernel.stages(), set(kernel.sweep)
    sweeps: dict[int, dict[Node, None]] = {}
    for node, body in kernel.rows.items():
        sweeps.setdefault(stages[node], {}).update(dict.fromkeys(above_reductions(body)))
    for w in kernel.writes:
        if w.value.axes & inner:
            sweeps.setdefault(kernel._stage_of(w.value, stages), {}).update(dict.fromkeys(above_reductions(w.value)))
    for c in kernel.columns:
        sweeps.setdefault(kernel._stage_of(c.value, stages), {}).update(dict.fromkeys(above_reductions(c.value)))
    return [2 + instructions(n for n in nodes if n.axes & inner) for nodes in sweeps.values()]


def _across(kernel: Kernel) -> list[int]:
    """The bytes of elements that lie together along the rows of a tile."""
    outer, sweep = kernel.loops[: kernel.outer], set(kernel.sweep)
    accesses = [(i, n.axes, n.what[0]) for n, i in kernel.loads.items()]
    accesses += [(w.index, variables_of(w.index), w.buffer) for w in kernel.writes]
    return [b.dtype.bytes for i, axes, b in accesses if axes & sweep and _fastest(i, kernel.loops) in outer]


class Work(NamedTuple):
    """What a kernel of reductions does. rows, width: elements of each dimension. items: bytes of the elements that lie
    together along rows. moved: bytes. passes: the instructions for an element of each pass over a row that is no whole
    tile. live: the values of an element that are needed at once. reductions: how many there are."""

    rows: int
    width: int
    items: Sequence[int]
    moved: float
    passes: Sequence[float]
    live: int
    reductions: int = 1


def _best_tile(work: Work, machine: Gpu, is_known: bool = True, is_whole: bool = False) -> tuple[float, Tile]:
    """The tile of a reduction that is predicted to be fastest, and its seconds. is_known: whether the width is the same
    for all sizes, so that a tile can have all of it; is_whole: whether it has to have it."""
    tiles = [*_tiles(work, is_known, is_whole)] or [
        Tile(1, power_of_two(work.width), warps_of(power_of_two(work.width), 8))
    ]
    return min(((_seconds(work, tile, machine), tile) for tile in tiles), key=lambda pair: pair[0])


def _tiles(work: Work, is_known: bool, is_whole: bool) -> Iterator[Tile]:
    """The tiles among which the fastest is chosen."""
    whole, rows = power_of_two(work.width), power_of_two(work.rows)
    least = min(rows, _least_rows(work.items))
    for first in (least << n for n in range(11)):
        if first > max(least, min(rows, max(128 if work.items else 4, 1024 // whole))):
            break
        if is_known and (first * whole <= WIDEST or is_whole and first == least):
            yield from dict.fromkeys(Tile(first, whole, warps_of(first * whole, share)) for share in (4, 8, 16))
        for warps, share in ((4, 4), (4, 8), (8, 8), (16, 4), (16, 8), (16, 16)):
            second = max(8, 32 * warps * share // first)
            if not is_whole and (second < whole or not is_known):
                yield Tile(first, second, warps, False)


def _least_rows(items: Sequence[int]) -> int:
    """The rows of a tile with which half of what is read at least is used. items: see `Work`."""
    return SEGMENT // 2 // max(items) if items else 1


def _seconds(work: Work, tile: Tile, machine: Gpu) -> float:
    """What a kernel takes with a tile. The shares of a launch in it were fitted to 980 tiles of 98 kernels of random
    programs on an H200."""
    rows, width = work.rows, work.width
    programs, steps = -(-rows // tile.first), 1 if tile.is_whole else -(-width // tile.second)
    count = 1 if tile.is_whole else len(work.passes)
    of_thread = max(1.0, tile.first * tile.second / (32 * tile.warps))
    # a tile of rows changes its layout between threads, and a loop reads ahead: the values of all elements are live
    at_once = 0.5 if tile.first == 1 and tile.is_whole else 1.2
    registers = 24 + at_once * work.live * of_thread
    spilled = max(1.0, registers / min(255.0, machine.registers / (32 * tile.warps))) ** 2
    resident = machine.resident(tile.warps, registers)
    share = min(1.0, programs * tile.warps / machine.multiprocessors / machine.warps, resident / machine.warps)
    waste = max([1.0, *(0.5 + SEGMENT / (tile.first * b) for b in work.items)])
    padded = programs * tile.first * tile.second * steps
    again = 1 + 0.5 * (count - 1)
    moving = machine.moving(work.moved) * waste * again * math.sqrt(max(1.0, padded / (rows * width)))
    moving /= min(1.0, 2 * share)
    each = sum(work.passes)
    turning = 5 / max(20.0, each) if work.items else 0.0
    computing = padded * each * (1 + turning) * machine.instruction * spilled / share
    waves = max(1.0, programs * tile.warps / (machine.multiprocessors * resident))
    waiting = 0.2 + 0.05 * steps * count * math.sqrt(of_thread) + 0.02 * tile.first * tile.second / 1024
    waiting += 0.03 * math.log2(tile.warps) * work.reductions
    return machine.launch * (0.8 + waves * waiting) + max(moving, computing) + min(moving, computing) / 4


# ------------------------------------------------------------------------------------------------ cost


def estimate(kernel: Kernel, tile: Tile, machine: Gpu) -> None:
    """Predicts the bytes and seconds of a kernel."""
    used: dict[Buffer, int] = {}
    accesses = _accesses(kernel)
    for _, moved, buffer in accesses:
        used[buffer] = max(used.get(buffer, 0), min(moved, hint(math.prod(buffer.shape)) * buffer.dtype.bytes))
    kernel.bytes = sum(used.values())
    rows, width = elements(kernel.loops[: kernel.outer]), elements(kernel.sweep)
    if kernel.rows:
        kernel.seconds = _seconds(_work_of(kernel, kernel.bytes), tile, machine)
    else:
        work = instructions(nodes_of(kernel))
        share = machine.share(programs_of(kernel, tile) * tile.warps)
        moving, computing = machine.moving(kernel.bytes), rows * width * work * machine.instruction
        kernel.seconds = machine.launch + (max(moving, computing) + min(moving, computing) / 4) / share
    kernel.seconds = max(kernel.seconds, machine.launch + _atomic_seconds(kernel, machine))


def _atomic_seconds(kernel: Kernel, machine: Gpu) -> float:
    """What a kernel's atomic operations take: those of neighbours in memory are one."""
    total = 0.0
    for w in kernel.writes:
        if w.scatter is not None and w.scatter.combine is not None:
            apart = 1 if _fastest(w.index, kernel.loops) is not None else SEGMENT // w.buffer.dtype.bytes
            total += elements(written_over(w, kernel)) * apart * machine.atomic
    return total


# ------------------------------------------------------------------------------------------------ launches


def launches_of(kernels: Sequence[tuple[Kernel, Tile]], machine: Gpu) -> list[Launch]:
    """Kernels in launches, each behind those that write what it reads. Short ones that are independent share one. Long
    ones that write results alone come last, so that they may write them over inputs that the others read."""
    launches: list[Launch] = []
    written: dict[Buffer, int] = {}
    read = {b for k, _ in kernels for b in _needed(k)}

    def is_last(kernel: Kernel) -> bool:
        is_read = kernel.columns or not read.isdisjoint(w.buffer for w in kernel.writes)
        return not _is_short(kernel, machine) and not is_read

    for kernel, tile in sorted(kernels, key=lambda pair: is_last(pair[0])):  # which is stable
        least = max((written.get(b, -1) + 1 for b in _needed(kernel)), default=0)
        least = len(launches) if is_last(kernel) else least
        number = next((n for n in range(least, len(launches)) if _may_join(kernel, tile, launches[n], machine)), None)
        if number is None:
            number = len(launches)
            launches.append(Launch([]))
        launches[number].kernels.append((kernel, tile))
        for buffer in (*(w.buffer for w in kernel.writes), *(c.buffer for c in kernel.columns)):
            written[buffer] = max(number, written.get(buffer, 0))
    return launches


def _needed(kernel: Kernel) -> list[Buffer]:
    """The buffers that have to be written before a kernel runs."""
    return [n.what[0] for n in kernel.loads] + [w.buffer for w in kernel.writes if w.scatter is not None]


def _is_short(kernel: Kernel, machine: Gpu) -> bool:
    """Whether a kernel is worth sharing a launch."""
    return kernel.seconds < 8 * machine.launch


def _may_join(kernel: Kernel, tile: Tile, launch: Launch, machine: Gpu) -> bool:
    """Whether a kernel may run beside those of a launch: all are short, and few warps are too many."""
    together = [*launch.kernels, (kernel, tile)]
    warps = max(t.warps for _, t in together)
    idle = sum((warps - t.warps) * programs_of(k, t) for k, t in together)
    return all(_is_short(k, machine) for k, _ in together) and idle <= machine.multiprocessors * machine.warps


def describe(launches: Sequence[Launch]) -> str:
    """A schedule as text."""
    lines = []
    for number, launch in enumerate(launches):
        lines.append(f"launch {number}: {launch.warps} warps")
        for k, tile in launch.kernels:
            outer = ", ".join(f"{v.name}:{v.size}" for v in k.loops[: k.outer])
            sweep = ", ".join(f"{v.name}:{v.size}" for v in k.sweep)
            lines.append(
                f"    kernel over [{outer}] [{sweep}], {tile}: {k.bytes} bytes, {1e6 * k.seconds:.1f} us predicted"
            )
            for node, stage in k.stages().items():
                lines.append(f"        sweep {stage}: {node.what[0]} of {line(k.rows[node])}")
            for w in k.writes:
                verb = "write" if w.scatter is None else f"scatter ({w.scatter.combine or 'in any order'}) to"
                lines.append(f"        {verb} {w.buffer}[{index_text(w.index)}]")
            for c in k.columns:
                lines.append(f"        add up {line(c.value)} to {c.buffer}[program, {index_text(c.index)}]")
    return "\n".join(lines)
