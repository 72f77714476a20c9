"""The schedule of matrix products on a GPU: one kernel that multiplies tiles, with what is computed of the operands
before and of the products after as nodes of the IR.

A kernel has three spaces of loops: those of both operands (the batch), of the first one alone (rows) and of the second
one alone (columns). A program computes a tile of rows and columns in a loop over the contracted axis. Several products
of one space, as those of a gated unit, share the loop and what they read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from thunder.kernels.accesses import memory_steps, touched
from thunder.kernels.index import Index, Variable, join, split, strides_of
from thunder.kernels.ir import BINDERS, Buffer, Graph, Node, Program, Store, axis, in_order, offset, replaced
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    Kernel,
    TooComplex,
    Write,
    above_reductions,
    apart_loops,
    elements,
    joinable,
    joined_loops,
    offset_of,
)
from thunder.kernels.tiles import instructions

Size = int
Spaces = tuple[tuple[Variable, ...], tuple[Variable, ...], tuple[Variable, ...]]
SHARED = 200 << 10  # bytes of shared memory that a program may have
# by rows and columns of a tile: how fast it multiplies, as a part of the best rate, and its warps
TILES = {
    (128, 256): (1.0, 8), (256, 128): (0.98, 8), (128, 128): (0.92, 8), (128, 64): (0.75, 4), (64, 128): (0.78, 4),
    (64, 64): (0.6, 4), (64, 32): (0.4, 4), (32, 64): (0.4, 4), (32, 32): (0.25, 4), (16, 64): (0.25, 4),
    (16, 128): (0.3, 4), (16, 32): (0.15, 2), (64, 16): (0.22, 4), (128, 16): (0.3, 4), (64, 256): (0.9, 4),
}  # fmt: skip


class ProductTile(NamedTuple):
    """first, second, deep: rows, columns and contracted elements of a tile; warps, stages: of a program, which reads
    as many tiles ahead; group: as many rows of tiles are computed beside each other, which read the same columns.
    is_whole, steps: as of other tiles.
    """

    first: int
    second: int
    deep: int
    warps: int
    stages: int
    group: int = 8
    is_whole: bool = True
    steps: int = 1


class ProductKernel(Kernel):
    """spaces: the loops of the batch, of rows and of columns. bound: the contracted axis. dots: the products, which its
    writes read, with their operands over loops."""

    def __init__(self, spaces: Spaces, bound: Variable):
        batch, rows, columns = spaces
        super().__init__((*batch, *rows, *columns), len(batch) + len(rows))
        self.spaces, self.bound = spaces, bound
        self.dots: dict[Node, tuple[Node, Node]] = {}


def has_products(program: Program) -> bool:
    return any(n.op == "dot" for n in in_order(s.value for s in program.stores))


# ------------------------------------------------------------------------------------------------ the kernel


def kernel_of(program: Program, strides: Mapping[Buffer, Sequence[int]]) -> ProductKernel:
    """The kernel of a program of products and what is computed of them element by element. Raises TooComplex."""
    graph = program.graph
    dots = [n for n in in_order(s.value for s in program.stores) if n.op in BINDERS]
    if any(n.op != "dot" for n in dots) or any(n.depth > 1 for n in dots):
        raise TooComplex("a product of products, or of what is reduced")
    first, *others = [(s, _spaces_of(s, strides)) for s in program.stores]
    bound = dots[0].what[0]
    store, own = first
    loops = _loops_of(own)
    by = {store: _by(own, loops)} | {s: _by(spaces, loops) for s, spaces in others}
    values = {s: graph.substitute(s.value, by[s]) for s in program.stores}
    used = [{n for n in above_reductions(v) if n.op == "dot"} for v in values.values()]
    if len({n.what[0] for those in used for n in those}) > 1 or any(not those <= used[0] for those in used):
        raise TooComplex("products of several sizes")
    writes = [
        Write(s.buffer, offset([replaced(i, by[s]) for i in s.index], strides[s.buffer]), values[s])
        for s in program.stores
    ]
    return _joined(graph, loops, bound, writes, strides)


def _spaces_of(store: Store, strides: Mapping[Buffer, Sequence[int]]) -> Spaces:
    """The axes of a store by the operands of its products that have them, in the order of memory."""
    if store.scan is not None or store.scatter is not None or store.buffer.kind != "output":
        raise TooComplex("a product beside a scan or a scatter")
    products = [n for n in above_reductions(store.value) if n.op == "dot"]
    if not products:
        raise TooComplex("a result of no product")
    spaces = {tuple(map(frozenset, _classes(n))) for n in products}
    if len(spaces) > 1:
        raise TooComplex("products of several spaces")
    batch, rows, columns = _classes(products[0])
    if {a for a in store.axes if a.size != 1} - batch - rows - columns:
        raise TooComplex("a product is repeated")
    a, b = products[0].args
    return _ordered(batch, a, strides), _ordered(rows, a, strides), _ordered(columns, b, strides)


def _classes(dot: Node) -> tuple[set[Variable], set[Variable], set[Variable]]:
    """The axes of both operands, of the first one, and of the second one."""
    a, b = (set(n.axes) - {dot.what[0]} for n in dot.args)
    return a & b, a - b, b - a


def _ordered(axes: Iterable[Variable], operand: Node, strides: Mapping[Buffer, Sequence[int]]) -> tuple[Variable, ...]:
    load = next((n for n in in_order([operand]) if n.op == "load"), None)
    steps = memory_steps(load, strides) if load is not None else {}
    return tuple(sorted(axes, key=lambda v: (-steps.get(v, 0), v.name)))


def _loops_of(spaces: Spaces) -> Spaces:
    numbers = iter(range(sum(map(len, spaces))))
    batch, rows, columns = (tuple(axis("l", next(numbers), v.size) for v in space) for space in spaces)
    return batch, rows, columns


def _by(spaces: Spaces, loops: Spaces) -> dict[Variable, Index]:
    """The index of each axis in terms of loops of as many elements."""
    by: dict[Variable, Index] = {}
    for own, those in zip(spaces, loops, strict=True):
        if math.prod(v.size for v in own) != math.prod(v.size for v in those):
            raise TooComplex("results of several sizes")
        sizes = [v.size for v in those]
        together = join([Index.of(v) for v in those], strides_of(sizes))
        if [v.size for v in own] == sizes:
            by |= {v: Index.of(loop) for v, loop in zip(own, those, strict=True)}
        else:
            by |= dict(zip(own, split(together, [v.size for v in own]), strict=True))
    return by


def _joined(
    graph: Graph, spaces: Spaces, bound: Variable, writes: Sequence[Write], strides: Mapping[Buffer, Sequence[int]]
) -> ProductKernel:
    """The kernel with neighbouring loops of a space joined where memory is read and written along both in one step."""
    values = [w.value for w in writes]
    loads = [n for n in in_order(values) if n.op == "load"]
    indices = [w.index for w in writes] + [offset_of(n, strides) for n in loads]
    apart = apart_loops(in_order(values), indices)
    spans = [joinable(space, None, indices, apart) for space in spaces]
    loops, by = joined_loops([span for those in spans for span in those])
    numbers = iter(loops)
    batch, rows, columns = (tuple(next(numbers) for _ in those) for those in spans)
    kernel = ProductKernel((batch, rows, columns), bound)
    kernel.writes = [w.of(graph.substitute(w.value, by), replaced(w.index, by)) for w in writes]
    for n in in_order([w.value for w in kernel.writes]):
        if n.op == "dot":
            kernel.dots[n] = n.args[0], n.args[1]
        elif n.op == "load":
            kernel.loads[n] = offset_of(n, strides)
    return kernel


# ------------------------------------------------------------------------------------------------ cost


def kind_of(dot: Node) -> str:
    """The type in which a product multiplies."""
    return "tf32" if dot.what[1] else dot.args[0].dtype.name


def sizes_of(kernel: ProductKernel) -> tuple[int, int, int, int]:
    """The elements of the batch, of rows, of columns, and that are contracted."""
    batch, rows, columns = map(elements, kernel.spaces)
    return batch, rows, columns, elements([kernel.bound])


def multiplying(sizes: tuple[int, int, int, int], tile: tuple[int, int], rate: float, processors: int) -> float:
    """Seconds of a product by tiles of this size. rate: seconds of a multiplication and addition, all multiprocessors
    busy with the best tiles."""
    batch, rows, columns, deep = sizes
    programs = batch * -(-rows // tile[0]) * -(-columns // tile[1])
    rounds = max(1.0, -(-programs // processors))
    return rounds * processors * tile[0] * tile[1] * max(deep, 32) * rate / TILES[tile][0]


def of_pytorch(sizes: tuple[int, int, int, int], kind: str, size: int, machine: Gpu) -> float:
    """What PyTorch takes for a product that moves so many bytes."""
    each = [multiplying(sizes, tile, machine.multiply[kind], machine.multiprocessors) for tile in TILES]
    return machine.launch + max(min(each), machine.moving(size))


def candidates(kernel: ProductKernel, machine: Gpu) -> list[tuple[float, ProductTile]]:
    """Tiles with the predicted seconds of the kernel, the fastest first."""
    result = []
    sizes, count = sizes_of(kernel), len(kernel.dots)
    operands = next(iter(kernel.dots.values()))
    kind, width = kind_of(next(iter(kernel.dots))), operands[0].dtype.bytes
    outside = [n for w in kernel.writes for n in above_reductions(w.value)]
    work = instructions(dict.fromkeys(outside)) * math.prod(sizes[:3]) * machine.instruction
    inside = [(n, operand) for pair in kernel.dots.values() for operand in pair for n in in_order([operand])]
    plain = ("load", "cast", "constant")
    for (first, second), (_, warps) in TILES.items():
        if (
            count * first * second > 128 * 256
            or first > max(16, 2 * sizes[1] - 1)
            or second > max(16, 2 * sizes[2] - 1)
        ):
            continue
        warps = 8 if count * first * second >= 128 * 128 else warps
        deep = max(16, min(128 // width, 1 << (sizes[3] - 1).bit_length()))
        each = (first + count * second) * deep * width
        stages = max(2, min(4, SHARED // each))
        seconds = count * multiplying(sizes, (first, second), machine.dot[kind], machine.multiprocessors)
        repeated = {False: -(-sizes[2] // second), True: -(-sizes[1] // first)}
        before = sum(
            instructions([n]) * elements(n.axes) * repeated[operand is not operands[0]]
            for n, operand in dict.fromkeys(inside) if n.op not in plain
        )  # fmt: skip
        seconds += before * machine.instruction
        programs = sizes[0] * -(-sizes[1] // first) * -(-sizes[2] // second)
        share = machine.share(programs * warps)
        moved = max(kernel.bytes * machine.byte["L2" if kernel.bytes < machine.cache else "memory"] / share**0.5, 0.0)
        total = machine.launch + seconds + moved + work  # a program reads and writes before and after it multiplies
        result.append((total, ProductTile(first, second, deep, warps, stages)))
    return sorted(result, key=lambda pair: pair[0])


def scheduled(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu
) -> tuple[ProductKernel, ProductTile]:
    """The kernel of a program of products, with its tile. Raises TooComplex."""
    kernel = kernel_of(program, strides)
    kernel.bytes = sum(touched(n) * n.dtype.bytes for n in kernel.loads)
    kernel.bytes += sum(math.prod(w.buffer.shape) * w.buffer.dtype.bytes for w in kernel.writes)
    known = candidates(kernel, machine)
    if not known:
        raise TooComplex("too many products of one space")
    kernel.seconds, tile = known[0]
    return kernel, tile


def alternatives(kernel: ProductKernel, tile: ProductTile, machine: Gpu) -> list[ProductTile]:
    """Other tiles, the one first that is predicted to be fastest."""
    others = [other for _, other in candidates(kernel, machine)[:4]]
    best = others[0] if others else tile
    others += [best._replace(deep=best.deep // 2 if best.deep > 32 else best.deep * 2), best._replace(warps=4)]
    return [other for other in dict.fromkeys(others) if other != tile]
