"""The tiles of a GPU's kernels, by a model of what each takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from thunder.core.dtypes import FLOAT
from thunder.kernels.accesses import SEGMENT, accesses, fastest_loop, written_over
from thunder.kernels.index import Index, Variable
from thunder.kernels.ir import (
    BINDERS,
    Buffer,
    Graph,
    Node,
    axis,
    in_order,
    replaced,
    variables_of,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    Kernel,
    above_reductions,
    elements,
)
from thunder.kernels.sizes import Extent, Undecided, divides, exact, hint, power_of_two

Size = int | Extent
VERSION = 1  # of the tiles that kernels have
WIDEST = 16384  # elements of a tile
REGISTERS = 80  # of a thread, for values of elements
MOST_AT_ONCE = 8  # elements of a thread in a kernel without reductions
VECTOR = 16  # bytes that a thread reads or writes at once
NEAR = 1.6  # of the least predicted time, within which a tile may be the fastest


# instructions for an element of float32, by what an H200 takes, but of tan to pow; of other functions one
INSTRUCTIONS = {
    "exp": 7, "exp2": 7, "log": 28, "log2": 29, "log10": 29, "sigmoid": 18, "expm1": 17, "log1p": 56, "tanh": 25,
    "erf": 32, "sin": 29, "cos": 31, "true_divide": 9, "reciprocal": 10, "sqrt": 11, "rsqrt": 8, "floor": 7,
    "ceil": 7, "trunc": 8, "floor_divide": 8, "remainder": 8, "load": 2, "cast": 1, "constant": 0, "index": 2,
    "tan": 60, "asin": 25, "acos": 25, "atan": 25, "atan2": 40, "sinh": 30, "cosh": 20, "asinh": 40, "acosh": 40,
    "atanh": 30, "erfc": 35, "erfinv": 40, "lgamma": 100, "hypot": 20, "fmod": 40, "pow": 60,
    "random": 80, "tuple": 0, "scan": 12,
}  # fmt: skip


APART = 6  # instructions of a load of one element more than of one that is read with its neighbours


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


def programs_of(kernel: Kernel, tile: Tile) -> int:
    """How many programs a kernel has, for the sizes that it is made for."""
    if not tile.second:
        return -(-elements(kernel.loops) // tile.first)
    count = -(-elements(kernel.loops[: kernel.outer]) // (tile.first * tile.steps))
    return count if kernel.rows else count * -(-elements(kernel.sweep) // tile.second)


def nodes_of(kernel: Kernel) -> list[Node]:
    """What a kernel computes for an element, each node once."""
    roots = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    return [*dict.fromkeys(n for root in roots for n in above_reductions(root))]


def tiled(kernel: Kernel, machine: Gpu) -> tuple[Kernel, Tile]:
    """A kernel with its tile; the loops of one without reductions in the order of its tile."""
    return (kernel, _tile_of_rows(kernel, machine)) if kernel.rows else _tile_of_map(kernel, machine)


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
    """The tile of a kernel without reductions: of one dimension, or of two where operands disagree about the fastest
    axis."""
    total = elements(kernel.loops)
    votes: dict[Variable, int] = {}
    for index, weight, _ in accesses(kernel):
        v = fastest_loop(index, kernel.loops)
        if v is not None and len(variables_of(index)) > 1 and weight * 8 > total:
            votes[v] = votes.get(v, 0) + weight
    long = sorted((v for v in votes if hint(v.size) >= 8), key=lambda v: -votes[v])
    if len(long) < 2:
        share = total // (4 * machine.multiprocessors)
        at_once = min(MOST_AT_ONCE, elements_at_once(w.value for w in kernel.writes))
        first = max(128, min(128 * at_once, power_of_two(share + 1) // 2))
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


def in_vectors(kernel: Kernel, tile: Tile, graph: Graph) -> tuple[Kernel, Tile]:
    """A map of several loops, whose tile gets a second dimension of the few elements that a thread reads and writes at
    once: their indices, and what is computed of the other loops alone, are computed once for all of them.

    Before: tiles of 512 elements x of 32 rows of 196. After: of 128 vectors x of 32 rows of 49, of 4 elements each."""
    if kernel.rows or kernel.columns or tile.second or len(kernel.loops) < 2:
        return kernel, tile
    widest = max((b.dtype.bytes for i, _, b in accesses(kernel) if fastest_loop(i, kernel.loops[-1:])), default=4)
    outer, inner, by = _last_elements(kernel, min(max(2, VECTOR // widest), tile.first // (32 * tile.warps)))
    count = math.prod(hint(v.size) for v in inner)
    if count == 1 or not outer:
        return kernel, tile
    other = Kernel([*outer, *inner], len(outer))
    other.writes = [w.of(graph.substitute(w.value, by), replaced(w.index, by)) for w in kernel.writes]
    other.loads = {graph.substitute(n, by): replaced(i, by) for n, i in kernel.loads.items()}
    other.bytes, other.seconds = kernel.bytes, kernel.seconds
    return other, Tile(max(1, tile.first // count), count, tile.warps)


def _last_elements(kernel: Kernel, most: int) -> tuple[list[Variable], list[Variable], dict[Variable, Index]]:
    """The last loops of a kernel, as many as have at most so many elements, a power of two, that lie together in what
    it writes: the loops before these, these, and the loop that is cut in terms of its parts."""
    outer, inner, by = [*kernel.loops], list[Variable](), dict[Variable, Index]()
    step: Size = 1
    while most > 1 and outer and all(w.index.terms.get(outer[-1], step) == step for w in kernel.writes):
        last = outer.pop()
        count = next(n for n in (MOST_AT_ONCE, 4, 2, 1) if n <= most and divides(n, last.size))
        if last.size != count:
            name = last.name.removeprefix("l")
            vectors = axis("l", (name, "vectors"), exact(last.size, count))
            within = axis("l", (name, "within"), count)
            by[last] = Index.of(vectors) * count + Index.of(within)
            return [*outer, vectors], [within, *inner], by
        inner.insert(0, last)
        most, step = most // count, step * count
    return outer, inner, by


def _tile_of_rows(kernel: Kernel, machine: Gpu) -> Tile:
    return best_tile(_rows_of(kernel), machine, *_demands(kernel))[1]


def _rows_of(kernel: Kernel) -> Work:
    return work_of(kernel, sum(size for _, size, _ in accesses(kernel)))


def _demands(kernel: Kernel) -> tuple[bool, bool]:
    """Whether the width of rows is the same for all sizes, and whether a tile has to have all of it."""
    ways = {n.what[3] for n in kernel.rows if n.op == "scan"}
    is_known = all(isinstance(v.size, int) for v in kernel.sweep)
    if len(ways) > 1 and not is_known:
        raise Undecided
    return is_known, len(ways) > 1


def alternatives(kernel: Kernel, tile: Tile, machine: Gpu) -> list[Tile]:
    """The other tiles that may be as fast, the one first that is predicted to be. None for kernels that add something
    up in memory, which would do so again when they are measured, and for those whose programs others depend on."""
    if kernel.columns or any(w.scatter is not None for w in kernel.writes):
        return []
    if kernel.rows:
        work = _rows_of(kernel)
        seconds = {t: _seconds(work, t, machine) for t in _tiles(work, *_demands(kernel))}
        least = seconds.get(tile, min(seconds.values(), default=0.0))
        near = sorted((t for t in seconds if seconds[t] < NEAR * least), key=lambda t: seconds[t])
    else:
        is_square = tile.second > MOST_AT_ONCE
        near = [*(_square_tiles(kernel) if is_square else _flat_tiles(kernel, tile.second))]
    return [t for t in near if t != tile]


def _flat_tiles(kernel: Kernel, second: int) -> Iterator[Tile]:
    """second: 0, or the elements of a vector."""
    total = power_of_two(elements(kernel.loops))
    for size in (1024, 512, 256, 2048, 4096, 128):
        for share in (8, 4, 16, 2):
            if size <= total and 1 <= size // (32 * share) <= 8 and share >= second:
                yield Tile(size // max(1, second), second, size // (32 * share))


def _square_tiles(kernel: Kernel) -> Iterator[Tile]:
    rows, width = (power_of_two(elements(v)) for v in (kernel.loops[: kernel.outer], kernel.sweep))
    for first, second in ((32, 32), (64, 64), (32, 64), (64, 32), (128, 32), (32, 128), (16, 64), (64, 16)):
        for share in (8, 16, 4):
            if first <= rows and second <= width:
                yield Tile(first, second, min(16, warps_of(first * second, share)))


def work_of(kernel: Kernel, moved: int) -> Work:
    roots = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    rows, width = elements(kernel.loops[: kernel.outer]), elements(kernel.sweep)
    live = live_values(roots) + len(kernel.columns)  # which are added up in registers
    return Work(rows, width, across(kernel), moved, _passes(kernel), live, len(kernel.rows))


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


def across(kernel: Kernel) -> list[int]:
    """The bytes of elements that lie together along the rows of a tile."""
    outer, sweep = kernel.loops[: kernel.outer], set(kernel.sweep)
    each = [(i, n.axes, n.what[0]) for n, i in kernel.loads.items()]
    each += [(w.index, variables_of(w.index), w.buffer) for w in kernel.writes]
    return [b.dtype.bytes for i, axes, b in each if axes & sweep and fastest_loop(i, kernel.loops) in outer]


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


def best_tile(work: Work, machine: Gpu, is_known: bool = True, is_whole: bool = False) -> tuple[float, Tile]:
    """The tile of a reduction that is predicted to be fastest, and its seconds. is_known: whether the width is the same
    for all sizes, so that a tile can have all of it; is_whole: whether it has to have it."""
    tiles = [*_tiles(work, is_known, is_whole)] or [
        Tile(1, power_of_two(work.width), warps_of(power_of_two(work.width), 8))
    ]
    return min(((_seconds(work, tile, machine), tile) for tile in tiles), key=lambda pair: pair[0])


def _tiles(work: Work, is_known: bool, is_whole: bool) -> Iterator[Tile]:
    """The tiles among which the fastest is chosen."""
    whole, rows = power_of_two(work.width), power_of_two(work.rows)
    least = min(rows, least_rows(work.items))
    for first in (least << n for n in range(11)):
        if first > max(least, min(rows, max(128 if work.items else 4, 1024 // whole))):
            break
        if is_known and (first * whole <= WIDEST or is_whole and first == least):
            yield from dict.fromkeys(Tile(first, whole, warps_of(first * whole, share)) for share in (4, 8, 16))
        for warps, share in ((4, 4), (4, 8), (8, 8), (16, 4), (16, 8), (16, 16)):
            second = max(8, 32 * warps * share // first)
            if not is_whole and (second < whole or not is_known):
                yield Tile(first, second, warps, False)


def least_rows(items: Sequence[int]) -> int:
    """The rows of a tile with which half of what is read at least is used. items: see `Work`."""
    return SEGMENT // 2 // max(items) if items else 1


def is_too_wide(kernel: Kernel, width: int) -> bool:
    """Whether no tile has whole rows of this width."""
    return power_of_two(width) * least_rows(across(kernel)) > WIDEST


def _seconds(work: Work, tile: Tile, machine: Gpu) -> float:
    """What a kernel takes with a tile. The shares of a launch in it were fitted to 2,600 tiles of 200 kernels of
    random programs and of models on an H200."""
    rows, width = work.rows, work.width
    programs, steps = -(-rows // tile.first), 1 if tile.is_whole else -(-width // tile.second)
    count = 1 if tile.is_whole else len(work.passes)
    of_thread = max(1.0, tile.first * tile.second / (32 * tile.warps))
    # a tile of rows changes its layout between threads, and a loop reads ahead: the values of all elements are live
    at_once = 0.4 if tile.first == 1 and tile.is_whole else 0.6
    registers = 24 + at_once * work.live * of_thread
    spilled = max(1.0, registers / min(255.0, machine.registers / (32 * tile.warps))) ** 2
    resident = machine.resident(tile.warps, registers)
    share = min(1.0, programs * tile.warps / machine.multiprocessors / machine.warps, resident / machine.warps)
    waste = max([1.0, *(0.5 + SEGMENT / (tile.first * b) for b in work.items)])
    padded = programs * tile.first * tile.second * steps
    again = 1 + 0.5 * (count - 1)
    moving = machine.moving(work.moved) * waste * again * max(1.0, padded / (rows * width)) ** 0.8
    moving /= min(1.0, 2 * share)
    each = sum(work.passes)
    turning = 14 / max(20.0, each) if work.items else 0.0
    computing = padded * each * (1 + turning) * machine.instruction * spilled / share
    waves = max(1.0, programs * tile.warps / (machine.multiprocessors * resident))
    waiting = 0.2 + 0.05 * steps * count * math.sqrt(of_thread) + 0.02 * tile.first * tile.second / 1024
    waiting += 0.03 * math.log2(tile.warps) * work.reductions
    waiting = waves * waiting + 0.14 * (waves - 1)
    return machine.launch * (0.8 + waiting) + max(moving, computing) + min(moving, computing) / 4


def estimate(kernel: Kernel, tile: Tile, machine: Gpu) -> None:
    """Predicts the bytes and seconds of a kernel."""
    used: dict[Buffer, int] = {}
    for _, moved, buffer in accesses(kernel):
        used[buffer] = max(used.get(buffer, 0), min(moved, hint(math.prod(buffer.shape)) * buffer.dtype.bytes))
    kernel.bytes = sum(used.values())
    rows, width = elements(kernel.loops[: kernel.outer]), elements(kernel.sweep)
    if kernel.rows:
        kernel.seconds = _seconds(work_of(kernel, kernel.bytes), tile, machine)
    else:
        work = instructions(nodes_of(kernel)) + APART * _loads_apart(kernel)
        share = machine.share(programs_of(kernel, tile) * tile.warps)
        moving, computing = machine.moving(kernel.bytes), rows * width * work * machine.instruction
        kernel.seconds = machine.launch + (max(moving, computing) + min(moving, computing) / 4) / share
    kernel.seconds = max(kernel.seconds, machine.launch + _atomic_seconds(kernel, machine))


def _loads_apart(kernel: Kernel) -> int:
    """How many loads read each element of a sweep by itself: its neighbours there are no neighbours in memory."""
    sweep = kernel.loops[kernel.outer :]
    count = 0
    for index in kernel.loads.values():
        step: Size = 1
        for v in reversed(sweep if not variables_of(index).isdisjoint(sweep) else ()):
            if index.terms.get(v, 0) != step:
                count += 1
                break
            step = step * v.size
    return count


def _atomic_seconds(kernel: Kernel, machine: Gpu) -> float:
    """What a kernel's atomic operations take: those of neighbours in memory are one."""
    total = 0.0
    for w in kernel.writes:
        if w.scatter is not None and w.scatter.combine is not None:
            apart = 1 if fastest_loop(w.index, kernel.loops) is not None else SEGMENT // w.buffer.dtype.bytes
            total += elements(written_over(w, kernel)) * apart * machine.atomic
    return total
