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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from thunder.core.dtypes import dtype
from thunder.kernels import chains, products
from thunder.kernels.accesses import SEGMENT, accesses, fastest_loop, loads_of, memory_steps
from thunder.kernels.chains import ChainKernel, ChainTile
from thunder.kernels.column_sums import PROGRAMS, absorbed, carried, is_column_kernel
from thunder.kernels.combining import aligned_scans
from thunder.kernels.index import Index, Variable, opened, strides_of
from thunder.kernels.ir import (
    BINDERS,
    Buffer,
    Combine,
    Graph,
    Node,
    Program,
    in_order,
    index_text,
    line,
    offset,
    replaced,
    variables_of,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.moved_values import stored_moves
from thunder.kernels.pieces import by_pieces, guarded, opened_loads, with_loads
from thunder.kernels.products import ProductKernel, ProductTile
from thunder.kernels.schedule import (
    Assembly,
    Group,
    Item,
    Kernel,
    Reductions,
    TooComplex,
    above_reductions,
    canonical_form,
    elements,
    groups_of,
    mapping,
    of_free,
)
from thunder.kernels.sizes import Extent, at_least, hint, power_of_two
from thunder.kernels.split_reductions import split_reductions
from thunder.kernels.stored_values import materialized
from thunder.kernels.tiles import (
    WIDEST,
    Tile,
    Work,
    across,
    alternatives,
    best_tile,
    elements_at_once,
    estimate,
    in_vectors,
    instructions,
    is_too_wide,
    live_values,
    programs_of,
    tiled,
    work_of,
)

Size = int | Extent
WHOLE = 4096  # elements of a row with scans in both directions
LARGE = 1 << 16  # elements that a sum over rows has, for a kernel of these rows to add it up


class Launch:
    """Kernels that run at a time, with their tiles."""

    def __init__(self, kernels: Sequence[tuple[Kernel, Tile | ProductTile | ChainTile]]):
        self.kernels = list(kernels)

    @property
    def warps(self) -> int:
        return max(tile.warps for _, tile in self.kernels)

    @property
    def stages(self) -> int | None:
        """How many tiles programs read ahead; None for what the compiler decides."""
        return next((tile.stages for _, tile in self.kernels if isinstance(tile, (ProductTile, ChainTile))), None)

    def alternatives(self, machine: Gpu) -> list[Launch]:
        """The same kernel with other tiles, the one first that is predicted to be fastest. Kernels that share a launch
        are short."""
        if len(self.kernels) > 1:
            return []
        ((kernel, tile),) = self.kernels
        if isinstance(kernel, ProductKernel) and isinstance(tile, ProductTile):
            return [Launch([(kernel, other)]) for other in products.alternatives(kernel, tile, machine)]
        if isinstance(kernel, ChainKernel) and isinstance(tile, ChainTile):
            return [Launch([(kernel, other)]) for other in chains.alternatives(kernel, tile)]
        assert isinstance(tile, Tile), "kernels of other loops have such tiles"
        return [Launch([(kernel, other)]) for other in dict.fromkeys(alternatives(kernel, tile, machine))]

    def seconds(self, machine: Gpu) -> float:
        """The time of its kernels, which share that of a launch."""
        return sum(k.seconds for k, _ in self.kernels) - (len(self.kernels) - 1) * machine.launch


# ------------------------------------------------------------------------------------------------ items and groups


class TileItem(Item):
    """An item whose axes may have several orders: a reduction's own come before those that it binds.

    is_spread: whether what a reduction binds is apart in memory and too much for a tile. What reads it is another
    kernel, which need not read memory in such an order. is_apart: whether it is no item of a kernel with a reduction
    that it reads; is_alone: whether it has kernels of its own.
    """

    is_spread = is_apart = is_alone = False

    def lay_out(self, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> None:
        """`Group.lay_out`: what is reduced in a tile comes last; long rows of memory are spread over a block."""
        super().lay_out(graph, strides)
        own = [a for a in self.axes if a not in self._own_bound]
        bound = [a for a in self.axes if a in self._own_bound]
        if self.along is not None:  # in the order in which it combines
            bound.sort(key=lambda a: -hint(self.by[self.along].terms.get(a, 0)))  # type: ignore[index]
        self.axes = own + bound
        together = [
            n.dtype.bytes for n in loads_of(self.body)
            if not n.axes.isdisjoint(self.bound)
            and any(step == 1 and v in own for v, step in memory_steps(graph.substitute(n, self.by), strides).items())
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
        """The axes over which an item can join this kernel, or None. reductions: those of the whole graph, by the item
        that has them."""
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
        """Whether reductions of the group have, in an item's loops, the values that the item reads."""
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


# ------------------------------------------------------------------------------------------------ the schedule


def scheduled(program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> list[Launch]:
    """The launches of a program, for buffers of these strides. Raises TooComplex."""
    if chains.has_chains(program):
        return [Launch([pair]) for pair in chains.scheduled(program, strides, machine)]
    if products.has_products(program):
        return [Launch([products.scheduled(program, strides, machine)])]
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
    return launches_of([in_vectors(k, tile, program.graph) for k, tile in kernels], machine)


def _best_kernels(
    program: Program,
    strides: Mapping[Buffer, Sequence[int]],
    machine: Gpu,
    alone: Container[Buffer],
    whole: frozenset[Node],
) -> tuple[list[tuple[Kernel, Tile]], frozenset[Node]]:
    """The kernels of a program with their tiles. whole: the sums that are not split; those of them that are over rows,
    and that a kernel of these rows adds up as well, are returned."""
    program, canonical_of = split_reductions(program, strides, machine, whole)
    apart: frozenset = frozenset()
    kernels = _kernels(program, dict(strides), machine, apart, alone, canonical_of)
    while more := _faster_apart(kernels.of_groups, machine) - apart:
        apart |= more
        kernels = _kernels(program, dict(strides), machine, apart, alone, canonical_of)
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
        fastest = [fastest_loop(opened(offset(m.what[1], strides[m.what[0]])), order) for m in loads]
        if not all(isinstance(v.size, int) for v in order):
            continue
        if elements(n.axes) >= 8 * machine.multiprocessors and not all(v in n.axes for v in fastest):
            rows.add(canonical_form(program.graph, n)[0])
        elif any(v in n.axes for v in fastest):
            columns.add(canonical_form(program.graph, n)[0])
    return frozenset(columns), frozenset(rows)


def check_writes(kernel: Kernel) -> None:
    """Raises TooComplex where several values would be written to one element."""
    for w in kernel.writes:
        if w.scatter is None and w.scan is None and not w.value.axes <= variables_of(w.index):
            raise TooComplex(f"{line(w.value)} has several values for an element of {w.buffer}")


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
        for kernel in by_pieces(opened_loads(writer.kernel(vectors=False), graph, strides), graph, strides, machine):
            kernel, tile = tiled(guarded(kernel, graph, strides), machine)
            check_writes(kernel)
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
    roots = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    roots += columns.rows.values()
    live = live_values(roots) + len(kernel.columns) + len(columns.rows)
    if kernel.rows and not kernel.columns:  # a program has whole rows, and what it adds up in registers
        if is_too_wide(kernel, width):
            return None
        moved = sum(size for _, size, _ in accesses(kernel))
        _, tile = best_tile(work_of(kernel, moved)._replace(live=live), machine, is_whole=True)
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
        reads = Work(rows, width, across(kernel), kernel.bytes / 2, passes, live_values(roots), len(roots))
        reducing, _ = best_tile(reads, machine, is_known=all(isinstance(v.size, int) for v in kernel.sweep))
        if kernel.seconds > 1.2 * (alone + reducing):
            written = {w.buffer for w in swept}
            result |= {i.store.buffer for i in group.items if i.store is not None and i.store.buffer in written}
    return frozenset(result)


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
            added = k.dots if isinstance(k, ProductKernel) else k.sums if isinstance(k, ChainKernel) else ()
            lines += [f"        {line(node)}" for node in added]
            for node, stage in k.stages().items():
                lines.append(f"        sweep {stage}: {node.what[0]} of {line(k.rows[node])}")
            for w in k.writes:
                verb = "write" if w.scatter is None else f"scatter ({w.scatter.combine or 'in any order'}) to"
                lines.append(f"        {verb} {w.buffer}[{index_text(w.index)}]")
            for c in k.columns:
                lines.append(f"        add up {line(c.value)} to {c.buffer}[program, {index_text(c.index)}]")
    return "\n".join(lines)
