"""The schedule of a GPU: kernels of tiles, and which of them share a launch.

A kernel computes tiles of two dimensions. Its outer loops are the first one, each tile of which is a program; its sweep
is the second. A reduction has its own axes in the first and those that it binds in the second, whatever their order in
memory is, so that sums over rows and over columns are the same kind of kernel. Kernels without reductions have tiles of
one dimension, and of two where their operands disagree about the axis that is fastest in memory.

A reduction with too few programs is split: each program reduces a range, and a second reduction combines the ranges.
Kernels that do not depend on each other share a launch, where each has a range of the programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from thunder.core.dtypes import FLOAT, dtype
from thunder.kernels.index import Index, Part, Variable, opened, strides_of, within
from thunder.kernels.ir import (
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
    Write,
    above_reductions,
    groups_of,
    mapping,
    of_free,
    seconds_of,
    shared_values,
)

MOST_RANGES = 1024  # that a split reduction has
WIDEST = 16384  # elements of a tile
SEGMENT = 32  # bytes of memory that are read at least


def power_of_two(n: int) -> int:
    """The least one that is not less."""
    return 1 << (n - 1).bit_length()


class Tile(NamedTuple):
    """first, second: elements of each dimension; second is 0 for tiles of one dimension. warps: of a program.
    is_whole: whether a tile has the whole sweep; otherwise a program loops over it."""

    first: int
    second: int
    warps: int
    is_whole: bool = True


class Launch:
    """Kernels that run at a time, with their tiles."""

    def __init__(self, kernels: Sequence[tuple[Kernel, Tile]]):
        self.kernels = list(kernels)

    @property
    def warps(self) -> int:
        return max(tile.warps for _, tile in self.kernels)

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k, _ in self.kernels)


def programs_of(kernel: Kernel, tile: Tile) -> int:
    """How many programs a kernel has."""
    sizes = [v.size for v in kernel.loops]
    if not tile.second:
        return -(-math.prod(sizes) // tile.first)
    count = -(-math.prod(sizes[: kernel.outer]) // tile.first)
    return count if kernel.rows else count * -(-math.prod(sizes[kernel.outer :]) // tile.second)


# ------------------------------------------------------------------------------------------------ items and groups


class TileItem(Item):
    """An item whose axes may have several orders: a reduction's own come before those that it binds."""

    def lay_out(self, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> None:
        super().lay_out(graph, strides)
        own = [a for a in self.axes if a not in self._own_bound]
        self.axes = own + [a for a in self.axes if a in self._own_bound]

    @property
    def row(self) -> int | None:
        return None if self.store is not None else math.prod(a.size for a in self._own_bound)

    def orders(self, reductions: Reductions) -> Iterator[list[Variable]]:
        """The order in memory, and those in which the axes at which a reduction is read come first."""
        first = self.axes
        yield first
        for n in self.reductions:
            at = {v for a in reductions.axes[n] for v in variables_of(self.by.get(a, Index.of(a)))}
            order = [a for a in first if a in at] + [a for a in first if a not in at]
            if order != first:
                yield order


class TileGroup(Group):
    """Items of one kernel: they read the same elements in the same order, or one reads the reduction of another."""

    def takes(self, item: Item, reductions: Reductions, number: int, graph: Graph) -> list[Variable] | None:
        assert isinstance(item, TileItem), "schedules of GPUs have such items"
        inside = {n: r for n in item.reductions if (r := reductions.item[n]).group == number}
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


def loads_of(body: Node) -> list[Node]:
    return [n for n in above_reductions(body) if n.op == "load"]


# ------------------------------------------------------------------------------------------------ the schedule


def scheduled(program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> list[Launch]:
    """The launches of a program, for buffers of these strides. Raises TooComplex."""
    strides = dict(strides)
    for store in program.stores:
        strides.setdefault(store.buffer, strides_of(store.buffer.shape))
    program = split_reductions(program, strides, machine)
    graph, reductions, items = program.graph, Reductions(program.graph, TileItem), list[Item]()
    for store in program.stores:
        for node in above_reductions(store.value):
            if node.op == "reduce":
                items += reductions.register(node)
        items.append(TileItem(store.value, store.axes, (), store))
    for item in items:
        item.lay_out(graph, strides)
    groups = groups_of(items, reductions, graph, TileGroup)
    scratch = sum(s.buffer.kind == "scratch" for s in program.stores)

    def new_buffer(shape: tuple[int, ...], kind: dtype) -> Buffer:
        nonlocal scratch
        buffer = Buffer("scratch", scratch, shape, kind)
        strides[buffer] = strides_of(shape)
        scratch += 1
        return buffer

    shared = shared_values(groups, reductions, graph, machine, new_buffer)
    writers = [Assembly(g, n, reductions, graph, strides, shared) for n, g in enumerate(groups)]
    for writer in writers:
        for r in writer.needed():
            if r.scratch is None:
                r.scratch = new_buffer(tuple(a.size for a in r.free), r.node.dtype)
    kernels = []
    for writer in writers:
        for kernel in _by_pieces(writer.kernel(vectors=False), graph, strides, machine):
            kernels.append(tiled(kernel, machine))
            estimate(*kernels[-1], machine)
    return launches_of(kernels, machine)


# ------------------------------------------------------------------------------------------------ split reductions


def split_reductions(program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> Program:
    """The program with reductions that have too few programs in two steps:

        sum over r:1000000 of x[r]   becomes   sum over s:500 of sum over t:2000 of x[2000 * s + t]
    """
    graph = program.graph

    def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
        node = graph.make(n.op, args, n.dtype, n.what)
        return _split(graph, node, strides, machine) if node.op == "reduce" else node

    known: dict[Node, Node] = {}
    stores = [Store(s.buffer, s.axes, graph.transform(s.value, rebuilt, known=known)) for s in program.stores]
    return Program(graph, program.inputs, stores)


def _split(graph: Graph, node: Node, strides: Mapping[Buffer, Sequence[int]], machine: Gpu) -> Node:
    combine, bound = node.what
    body, rows = node.args[0], math.prod(a.size for a in node.axes)
    loads = [n for n in loads_of(body) if n.axes & set(bound)]
    total = math.prod(a.size for a in (*node.axes, *bound))
    moved = sum(n.dtype.bytes * math.prod(a.size for a in n.axes) for n in loads)
    steps = [_steps(n, strides) for n in loads]
    across = any(s.get(a) == 1 for s in steps for a in node.axes if a.size > 1)
    programs = -(-rows // (SEGMENT // 4)) if across else rows
    alone = moved / machine.alone / min(programs, machine.multiprocessors)
    if alone - moved * machine.byte["L2"] < machine.launch or not steps:
        return node
    longest = max(bound, key=lambda a: max(s.get(a, 0) for s in steps) * (a.size > 1))
    wanted = min(MOST_RANGES, max(2, 2 * machine.multiprocessors // programs), -(-total // rows // 256), longest.size)
    if wanted < 2:
        return node
    count = next((s for s in range(wanted, wanted // 2, -1) if longest.size % s == 0), wanted)
    width = -(-longest.size // count)
    count = -(-longest.size // width)
    part, rest = axis("r", (node.depth, "range", node.number), count), axis("r", (node.depth, "in", node.number), width)
    at = Index.of(part) * width + Index.of(rest)
    inner = graph.substitute(body, {longest: within(at, longest.size)})
    if count * width > longest.size:
        nothing = graph.make("constant", (), node.dtype, neutral(combine, node.dtype))
        inner = graph.make("concat", (inner, nothing), node.dtype, (at, (0, longest.size), count * width))
    others = tuple(a for a in bound if a is not longest)
    bounds = tuple(a for a in (*others, rest) if a.size > 1)
    partial = graph.make("reduce", (inner,), node.dtype, (combine, bounds)) if bounds else inner
    return graph.make("reduce", (partial,), node.dtype, (combine, (part,)))


def neutral(combine: Combine, kind: dtype) -> int | float:
    """What changes nothing when it is combined."""
    if combine == Combine.SUM or combine == Combine.PROD:
        number = int(combine == Combine.PROD)
        return float(number) if kind.category == FLOAT else number
    if kind.category == FLOAT:
        return -math.inf if combine == Combine.AMAX else math.inf
    bits = 8 * kind.bytes
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.signed else (0, (1 << bits) - 1)
    return low if combine == Combine.AMAX else high


def _steps(load: Node, strides: Mapping[Buffer, Sequence[int]]) -> dict[Variable, int]:
    """By axis, how far the elements are apart in memory."""
    buffer, index, _ = load.what
    steps: dict[Variable, int] = {}
    for atom, factor in opened(offset(index, strides[buffer])).terms.items():
        for v in variables_of(atom.index) if isinstance(atom, Part) else (atom,):
            steps[v] = max(steps.get(v, 0), abs(factor))
    return steps


# ------------------------------------------------------------------------------------------------ pieces


def _by_pieces(
    kernel: Kernel, graph: Graph, strides: Mapping[Buffer, Sequence[int]], machine: Gpu
) -> Iterator[Kernel]:
    """A kernel for each piece of concatenations whose pieces take longer to compute than a piece takes to write."""
    cuts: set[int] = set()
    loop = None
    for n in in_order([w.value for w in kernel.writes]) if not kernel.rows else ():
        if n.op != "concat":
            continue
        along, starts, _ = n.what
        ((v, factor),) = along.terms.items() if len(along.terms) == 1 else ((None, 0),)
        is_same = loop is None or v is loop
        if v not in kernel.loops or factor != 1 or not is_same:
            continue
        work = seconds_of(above_reductions(n), machine)
        if work < SEGMENT * machine.byte["memory"]:
            continue
        loop = v
        cuts |= {s - along.constant for s in starts if 0 < s - along.constant < v.size}
    if loop is None or len(cuts) > 16 or loop.size // (len(cuts) + 1) < 16:
        yield kernel
        return
    ends = [*sorted(cuts), loop.size]
    for low, high in zip([0, *ends], ends, strict=False):
        own = axis("l", (loop.name, low), high - low)
        by = {loop: Index.of(own) + low}
        piece = Kernel([own if v is loop else v for v in kernel.loops], kernel.outer)
        for w in kernel.writes:
            piece.writes.append(Write(w.buffer, replaced(w.index, by), graph.substitute(w.value, by)))
        for n in in_order(w.value for w in piece.writes):
            if n.op == "load":
                piece.loads[n] = opened(offset(n.what[1], strides[n.what[0]]))
        yield piece


# ------------------------------------------------------------------------------------------------ tiles


def _accesses(kernel: Kernel) -> list[tuple[Index, int, Buffer]]:
    """The indices at which memory is read and written, with bytes."""
    reads = [(i, n.what[0]) for n, i in kernel.loads.items()]
    writes = [(w.index, w.buffer) for w in kernel.writes]
    return [(i, b.dtype.bytes * math.prod(v.size for v in variables_of(i)), b) for i, b in (*reads, *writes)]


def _fastest(index: Index, loops: Sequence[Variable]) -> Variable | None:
    """The loop along which an access is in order, or nearly so."""
    steps = {v: abs(index.terms.get(v, 0)) for v in loops if v.size > 1}
    return min((v for v, s in steps.items() if 0 < s <= 2), key=lambda v: steps[v], default=None)


def tiled(kernel: Kernel, machine: Gpu) -> tuple[Kernel, Tile]:
    """A kernel with its tile; the loops of one without reductions in the order of its tile."""
    return (kernel, _tile_of_rows(kernel, machine)) if kernel.rows else _tile_of_map(kernel, machine)


def _tile_of_map(kernel: Kernel, machine: Gpu) -> tuple[Kernel, Tile]:
    total = math.prod(v.size for v in kernel.loops)
    votes: dict[Variable, int] = {}
    for index, weight, _ in _accesses(kernel):
        v = _fastest(index, kernel.loops)
        if v is not None and len(variables_of(index)) > 1 and weight * 8 > total:
            votes[v] = votes.get(v, 0) + weight
    long = sorted((v for v in votes if v.size >= 8), key=lambda v: -votes[v])
    if len(long) < 2:
        share = total // (4 * machine.multiprocessors)
        first = max(128, min(1024, power_of_two(share + 1) // 2))
        first = min(first, power_of_two(total))
        return kernel, Tile(first, 0, max(1, min(4, first // 128)))
    b, a = long[:2]
    loops = [*(v for v in kernel.loops if v is not a and v is not b), a, b]
    other = Kernel(loops, len(loops) - 1)
    other.writes, other.loads = kernel.writes, kernel.loads
    side = 64 if total >= 64 * 64 * 2 * machine.multiprocessors else 32
    second = min(side, power_of_two(b.size))
    first = min(side * side // second, power_of_two(math.prod(v.size for v in loops[:-1])))
    return other, Tile(first, second, max(1, min(8, first * second // 256)))


def _tile_of_rows(kernel: Kernel, machine: Gpu) -> Tile:
    outer, sweep = kernel.loops[: kernel.outer], kernel.sweep
    rows, width = math.prod(v.size for v in outer), math.prod(v.size for v in sweep)
    whole = power_of_two(width)
    across = [
        b.dtype.bytes for i, _, b in _accesses(kernel)
        if (v := _fastest(i, kernel.loops)) is not None and v in outer and variables_of(i) & set(sweep)
    ]  # fmt: skip
    live = max(1, len({n.what[0] for n in kernel.loads} | {w.buffer for w in kernel.writes}))
    most = WIDEST if live <= 6 else WIDEST // 2
    if across:
        least = SEGMENT // min(across)
        first = least
        while first < 2 * least and -(-rows // (2 * first)) >= 2 * machine.multiprocessors:
            first *= 2
        first = min(first, power_of_two(rows))
        if whole * first <= most or whole * least <= most:
            first = first if whole * first <= most else least
            return Tile(first, whole, max(1, min(16, whole * first // 512)))
        while first < 4 * least and -(-rows // (2 * first)) >= machine.multiprocessors:
            first *= 2
        second = max(16, 4096 // first)
        return Tile(first, second, 8, False)
    if whole <= most:
        first = 1
        while first * whole < 2048 and -(-rows // (2 * first)) >= 4 * machine.multiprocessors:
            first *= 2
        first = min(first, power_of_two(rows))
        return Tile(first, whole, max(1, min(16, first * whole // 512)))
    return Tile(1, 4096, 8, False)


# ------------------------------------------------------------------------------------------------ cost


def estimate(kernel: Kernel, tile: Tile, machine: Gpu) -> None:
    """Predicts the bytes and seconds of a kernel."""
    used: dict[Buffer, int] = {}
    for index, moved, buffer in _accesses(kernel):
        used[buffer] = max(used.get(buffer, 0), min(moved, math.prod(buffer.shape) * buffer.dtype.bytes))
    kernel.bytes = sum(used.values())
    passes = 1
    if kernel.rows and not tile.is_whole:
        passes = 1 + max(kernel.stages().values()) + any(w.value.axes & set(kernel.sweep) for w in kernel.writes)
    elements = math.prod(v.size for v in kernel.loops)
    nodes = in_order([*(w.value for w in kernel.writes), *kernel.rows.values()])
    work = elements * seconds_of(nodes, machine)
    busy = min(1.0, programs_of(kernel, tile) / machine.multiprocessors)
    where = "L2" if kernel.bytes < machine.cache else "memory"
    moving = max(kernel.bytes * machine.byte[where], kernel.bytes / machine.alone / machine.multiprocessors / busy)
    kernel.seconds = machine.launch + max(passes * moving, work / busy)


# ------------------------------------------------------------------------------------------------ launches


def launches_of(kernels: Sequence[tuple[Kernel, Tile]], machine: Gpu) -> list[Launch]:
    """Kernels in launches, each behind those that write what it reads. Short ones that are independent share one."""
    launches: list[Launch] = []
    written: dict[Buffer, int] = {}
    for kernel, tile in kernels:
        least = max((written.get(n.what[0], -1) + 1 for n in kernel.loads), default=0)
        short = kernel.seconds < 4 * machine.launch
        number = next(
            (
                n
                for n in range(least, len(launches))
                if short and all(k.seconds < 4 * machine.launch for k, _ in launches[n].kernels)
            ),
            None,
        )
        if number is None:
            number = len(launches)
            launches.append(Launch([]))
        launches[number].kernels.append((kernel, tile))
        for w in kernel.writes:
            written[w.buffer] = max(number, written.get(w.buffer, 0))
    return launches


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
                lines.append(f"        write {w.buffer}[{index_text(w.index)}]")
    return "\n".join(lines)

