"""The schedule: the kernels of a program, and the values that each of them stores.

A kernel runs over an iteration space. "map": the places `x` of a tensor. "rows": rows `r` and columns `c`. Reductions
over columns stay on chip while the elements of the row are computed, so that a normalization is one pass over memory
(rows that do not fit are read once for each level of reductions, see `emit`). "columns": the same space, reduced over
rows. Reductions over rows are split: each program reduces some rows to a "partial" value that a later kernel reduces.

Values between loads, reductions and stores are recomputed in each kernel that uses them, which costs no pass over
memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence

from thunder.core.dtypes import FLOAT
from thunder.executors.triton_kernels.adds import at_home, start_and_add
from thunder.executors.triton_kernels.functions import FUNCTIONS
from thunder.executors.triton_kernels.joins import parts_of
from thunder.executors.triton_kernels.reduction_places import (
    Space,
    operand_place,
    partial_place,
    reduced_place,
    space_of,
)
from thunder.executors.triton_kernels.reductions import LAUNCH, fits, with_steps
from thunder.executors.triton_kernels.strides import ordered
from thunder.executors.triton_kernels.values import Place, Program, Value, in_order, indexed_place, sources
from thunder.extend.fusion import TooLarge
from thunder.kernels.index import Index, Variable, join, split, strides_of
from thunder.kernels.sizes import Extent, hint

LIMIT = 4000  # values at places, in all kernels of a region
WORK = 1 << 27  # instructions of elements that are done in that time, about
ROOTS = "reduce", "partial", "added"  # what is stored wherever it is read
LOOKED_UP = 16  # instructions that take as long as reading what they compute


class Kernel:
    """kind: "map", "rows" or "columns". rows, columns: the space, of ints or extents; a map has its places as columns.
    stores: values, in the order of the region. linear: the place in memory of the reduced operand, or in a map. orders:
    orders of the dimensions of results in memory."""

    __slots__ = ("kind", "rows", "columns", "orders", "stores", "reductions", "x", "r", "c", "linear")

    def __init__(self, kind: str, rows: int | Extent, columns: int | Extent, orders: Mapping[Value, Sequence[int]]):
        self.kind, self.rows, self.columns = kind, rows, columns
        self.stores: list[Value] = []
        self.reductions: list[Value] = []
        self.orders = orders
        self.x, self.r, self.c = Variable("x", columns), Variable("r", rows), Variable("c", columns)
        self.linear = Index.of(self.x) if kind == "map" else Index.of(self.r) * columns + Index.of(self.c)

    @property
    def numel(self) -> int | Extent:
        return self.rows * self.columns

    @property
    def on_chip(self) -> bool:
        return fits(self.columns)


class Schedule:
    """kernels: in the order in which they run. temporaries: values between kernels, beside the outputs of the program.
    dear: elementwise values among them, which cost too much to recompute. launches: groups of kernels that run as one,
    in order."""

    __slots__ = ("program", "kernels", "temporaries", "dear", "launches")

    def __init__(
        self,
        program: Program,
        kernels: Sequence[Kernel],
        temporaries: Sequence[Value],
        dear: Iterable[Value] = (),
        launches: Sequence[Sequence[Kernel]] = (),
    ):
        self.launches = launches or [[k] for k in kernels]
        self.program, self.kernels, self.temporaries, self.dear = (
            program,
            tuple(kernels),
            tuple(temporaries),
            frozenset(dear),
        )


# ----------------------------------------------------------------------------------------------------------------
# places


def tile_place(value: Value, kernel: Kernel) -> Place:
    """The place at which a value as large as the space is computed: in the order of the space, where its own is not
    known."""
    return split(kernel.linear, value.shape)


def stored_place(value: Value, kernel: Kernel) -> Place:
    """The place at which a stored value is computed: in the order of its memory, in which its operands most often
    are."""
    order = kernel.orders.get(value)
    if order is None:
        return tile_place(value, kernel)
    there = dict(zip(order, split(kernel.linear, [value.shape[d] for d in order]), strict=True))
    return tuple(there[d] for d in range(len(order)))


# ---------------------------------------------------------------------------------------------------------------- which
# kernel


class _Scheduler:
    """One assignment of roots to kernels: each, in some order, to the first one that can compute it. parts: those of
    outputs that are stored in parts."""

    def __init__(self, program: Program, parts: Mapping[Value, Sequence[Value]], orders: Mapping[Value, Sequence[int]]):
        self.program, self.parts, self.orders = program, parts, orders
        self.kernels: list[Kernel] = []
        self.kernel_of: dict[Value, int] = {}  # of reductions, partials and outputs
        self.stored: dict[Value, None] = {}
        self.home = at_home(program, parts)
        self.added: dict[Value, None] = {}  # that have memory of their own
        self.loaded: list[dict[Value, None]] = []  # by each kernel
        self.visited = 0
        self.dear = _dear(program)
        self.spaces: set[Space] = set()

    def run(self, roots: Sequence[Value]) -> Schedule:
        """roots: the reductions and partials, each after those it depends on."""
        self.spaces = {space_of(v) for v in roots if v.kind == "reduce"}
        outputs = [v for v in dict.fromkeys(self.program.outputs) if v.kind not in ROOTS]
        for root in (
            *self.dear,
            *roots,
            *(root for v in outputs if v not in self.dear for root in self.parts.get(v, (v,))),
        ):
            if root not in self.home.values():
                self.place(root)
        for v in self.program.outputs:
            if v.kind == "reduce":
                self.stored[v] = None
        for v in (v for v in self.stored if v not in self.added):
            kernel = self.kernels[self.kernel_of[v]]
            if not any(v is s for s in kernel.stores):
                kernel.stores.append(v)
        results = set(self.program.outputs)
        temporaries = [v for v in (*self.stored, *self.added) if v not in results and v.kind not in ("part", "add")]
        return Schedule(self.program, self.kernels, list(dict.fromkeys(temporaries)), self.dear)

    def place(self, root: Value) -> None:
        """Assigns a root to the first kernel that can compute it, or to a new one. An addition at indices has two
        kernels: one for the start value, and one that adds to it."""
        if root.kind == "added":
            start, add = start_and_add(root, self.home.get(root))
            self.place(start)
            self.place(add)
            self.kernel_of[root] = self.kernel_of[add]
            if root not in self.home:
                self.added[root] = None
            return
        wanted = self.kernels_for(root)
        for number, kernel in enumerate(self.kernels):
            if wanted(kernel) and self.feasible(root, kernel, number):
                break
        else:
            number = len(self.kernels)
            kernel = self.new(root)
            self.kernels.append(kernel)
            self.loaded.append({})
            if not self.feasible(root, kernel, number):
                raise AssertionError("a new kernel finds stored what earlier ones computed")
        needed, inputs = self.demands(root, kernel, number)
        before = [v for v in needed if self.kernel_of[v] != number]
        self.stored |= dict.fromkeys(before)
        self.loaded[number] |= inputs | dict.fromkeys(before)
        self.kernel_of[root] = number
        if root.kind == "reduce":
            kernel.reductions.append(root)
        else:
            self.stored[root] = None

    def kernels_for(self, root: Value):
        if root.kind == "reduce":
            space = space_of(root)
            return lambda k: k.kind == "rows" and (k.rows, k.columns) == space
        if root.kind == "partial":
            space = self.partial_space(root)
            if space is None:
                return lambda k: (
                    k.numel == root.operands[0].numel and (k.kind == "map" or k.on_chip and k.kind == "rows")
                )
            return lambda k: (k.rows, k.columns) == space and (k.kind == "columns" or k.kind == "rows" and k.on_chip)
        return lambda k: k.numel == root.numel or k.kind == "rows" and k.rows == root.numel

    def partial_space(self, partial: Value) -> Space | None:
        """(rows, columns) of a reduction over rows; None for one over everything."""
        return None if len(partial.shape) == 1 else space_of(partial)[::-1]

    def new(self, root: Value) -> Kernel:
        if root.kind == "reduce":
            kernel = Kernel("rows", *space_of(root), self.orders)
        elif root.kind == "partial" and (space := self.partial_space(root)) is not None:
            kind = "rows" if space in self.spaces and fits(space[1]) else "columns"
            kernel = Kernel(kind, *space, self.orders)
        else:
            return Kernel("map", 1, (root.operands[0] if root.kind == "partial" else root).numel, self.orders)
        ((operand, place),) = self.start(root, kernel)
        kernel.linear = join(place, strides_of(operand.shape))
        return kernel

    def start(self, root: Value, kernel: Kernel) -> list[tuple[Value, Place]]:
        """The values that a kernel computes a root from, with their places."""
        if root.kind == "reduce":
            return [(root.operands[0], operand_place(root, Index.of(kernel.r), Index.of(kernel.c)))]
        if root.kind == "partial":
            return [(root.operands[0], partial_place(root, kernel.linear, kernel.r, kernel.c))]
        if kernel.kind == "rows" and root.numel == kernel.rows and kernel.columns != 1:
            return [(root, split(Index.of(kernel.r), root.shape))]
        return [(root, stored_place(root, kernel))]

    @property
    def cost(self) -> int:
        """The cost: bytes moved, and launches in units of bytes."""
        moved = [v for kernel, loaded in zip(self.kernels, self.loaded, strict=True) for v in (*loaded, *kernel.stores)]
        return sum(hint(v.numel) * v.dtype.bytes for v in moved) + LAUNCH * len(self.kernels)

    def demands(self, root: Value, kernel: Kernel, kernel_number: int) -> tuple[dict[Value, bool], dict[Value, None]]:
        """The reductions, partials and stored values that a root depends on, with whether each is read in the current
        row only; and the inputs."""
        found: dict[Value, bool] = {}
        inputs: dict[Value, None] = {}
        seen = set()
        stack = self.start(root, kernel)
        number = itertools.count()
        while stack:
            value, place = stack.pop()
            key = (value, tuple(i.key for i in place))
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > LIMIT:
                raise TooLarge
            if value is not root and value.kind in ROOTS:
                here = value.kind == "reduce" and reduced_place(value, place).is_variable(kernel.r)
                found[value] = found.get(value, True) and here
            elif value is not root and value in self.dear and self.kernel_of[value] < kernel_number:
                found[value] = False
            elif value.kind in ("map", "cast"):
                stack += [(x, place) for x in value.operands if isinstance(x, Value)]
            elif value.kind == "gather":
                a, *indices = value.operands
                there = indexed_place(
                    value.what, a.shape, indices, place,
                    lambda _, n: Index.of(Variable(f"loaded{next(number)}", n, loaded=True)),
                )  # fmt: skip
                stack += [(a, there), *((v, place) for v in indices)]
            elif value.kind == "add":
                stack += [(v, place) for v in value.operands]
            elif value.kind == "input":
                inputs[value] = None
            elif value.kind == "philox":
                stack.append((value.operands[0], ()))
            elif value.kind not in ("number", "iota"):
                stack += [(operand, there) for operand, there, _ in sources(value, place)]
        self.visited += len(seen)
        if self.visited > LIMIT * 4:
            raise TooLarge
        return found, inputs

    def feasible(self, root: Value, kernel: Kernel, number: int) -> bool:
        """Whether earlier kernels store all values that a root depends on, or this kernel has them on chip. Partials of
        one kernel have one number of programs."""
        if root.kind == "add" and self.kernel_of[root.what[1]] >= number:
            return False
        if root.kind == "partial" and any(
            v.kind == "partial" and v.shape[0] != root.shape[0] and self.kernel_of[v] == number for v in self.kernel_of
        ):
            return False
        for needed, here in self.demands(root, kernel, number)[0].items():
            before = self.kernel_of[needed]
            if before > number or before == number and not here:
                return False
        return True


def _dear(program: Program) -> dict[Value, None]:
    """Elementwise functions of inputs that cost more to recompute for each use than to store by a kernel of their own:
    broadcast tables of sines, and expensive values that are gathered many times."""
    found: dict[Value, None] = {}
    gathered: dict[Value, int] = {}
    for v in in_order(program.outputs):
        if v.kind not in ("broadcast", "gather"):
            continue
        value = v.operands[0]
        while value.kind in ("broadcast", "reshape", "permute"):
            value = value.operands[0]
        more = hint(v.numel - value.numel)
        if (
            value.kind not in ("map", "cast")
            or v.kind == "broadcast"
            and more < hint(value.numel)
            or not (work := _work(value, found))
        ):
            continue
        if v.kind == "gather":
            gathered[value] = gathered.get(value, 0) + hint(v.numel)
            dear = _reads_more(value, gathered[value])
        else:
            dear = work >= LOOKED_UP and more * work >= WORK
        if dear:
            found[value] = None
    return found


def _reads_more(value: Value, count: int) -> bool:
    """Whether computing so many elements reads more bytes than computing each once, storing it, and reading so many."""
    size = hint(value.numel)
    read = sum(v.dtype.bytes for v in in_order([value]) if v.kind == "input" and 2 * hint(v.numel) >= size)
    own = max(4, value.dtype.bytes) if value.dtype.category == FLOAT else value.dtype.bytes
    return count * read > size * (read + own) + count * own + LAUNCH


def _work(value: Value, stored: Container[Value]) -> int:
    """Instructions for an element of a value that depends on inputs and stored values only; 0 for other values. A
    single number is computed once in a block."""
    total, seen, stack = 0, {value}, [value]
    while stack:
        v = stack.pop()
        if v.kind in ROOTS or v.kind == "gather":
            return 0
        total += FUNCTIONS[v.what].work if v.kind == "map" and v.numel != 1 else 0
        new = [x for x in v.operands if isinstance(x, Value) and x not in seen and x not in stored]
        seen.update(new)
        stack += new
    return total


def schedule(
    program: Program,
    programs: int,
    strides: Sequence[Sequence[int | Extent]],
    layout: Sequence[Sequence[int | Extent]],
    parts: Sequence[Sequence[int]] = (),
) -> Schedule:
    """The cheapest schedule of a program.

    programs: the number of parts of a split reduction over rows. strides, layout: of inputs and of outputs. parts:
    places of the outputs that have kernels of their own, which share launches. Raises TooLarge where kernels would take
    too long to compile."""
    if not parts:
        return _whole(program, programs, strides, layout)
    made = [
        _whole(
            Program(program.inputs, [program.outputs[i] for i in part]), programs, strides, [layout[i] for i in part]
        )
        for part in parts
    ]
    outputs = dict(zip((i for part in parts for i in part), (v for s in made for v in s.program.outputs), strict=True))
    launches: list[list[Kernel]] = []
    for wave in itertools.zip_longest(*(s.kernels for s in made)):
        kernels = [k for k in wave if k is not None]
        launches += [[k] for k in kernels if not may_share(k)] + _shared([k for k in kernels if may_share(k)])
    return Schedule(
        Program(program.inputs, [outputs[i] for i in range(len(outputs))]),
        [k for launch in launches for k in launch],
        [v for s in made for v in s.temporaries],
        [v for s in made for v in s.dear],
        launches,
    )


def _shared(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Independent kernels as one launch, or as two: a large map runs at half its speed in a kernel with the registers
    of a reduction."""
    maps, rows = ([k for k in kernels if (k.kind == "map") is kind] for kind in (True, False))
    moved = sum(hint(k.numel) * v.dtype.bytes for k in maps for v in (*k.stores, *k.stores))
    return [x for x in ([maps, rows] if moved > LAUNCH else [[*kernels]]) if x]


def may_share(kernel: Kernel) -> bool:
    """Whether a kernel may run as a range of the programs of a launch, each of which computes one of its blocks."""
    return (
        (kernel.kind == "map" or kernel.kind == "rows" and kernel.on_chip)
        and isinstance(kernel.numel, int)
        and not any(v.kind in ("partial", "part") for v in kernel.stores)
    )


def _whole(program: Program, programs: int, strides: Sequence[Sequence], layout: Sequence[Sequence]) -> Schedule:
    program = with_steps(program, programs, dict(zip(program.inputs, strides, strict=True)))
    orders = {v: ordered(steps) for v, steps in zip(program.outputs, layout, strict=True)}
    order = in_order(program.outputs)
    roots = [v for v in order if v.kind in ROOTS]
    best = _Scheduler(program, {}, orders)
    found = best.run(roots)
    early = _early(order)
    if len(found.kernels) > 2 and any(a is not b for a, b in zip(early, roots, strict=True)):
        other = _Scheduler(program, {}, orders)
        schedule = other.run(early)
        if other.cost < best.cost:
            best, found, roots = other, schedule, early
    if parts := parts_of(program):
        other = _Scheduler(program, parts, orders)
        with contextlib.suppress(TooLarge):
            schedule = other.run(roots)
            # each element chooses once less: about half of what reading and writing it takes
            saved = sum(hint(v.numel) * v.dtype.bytes for v in parts) // 2
            if other.cost <= best.cost + saved and other.visited <= LIMIT:
                return schedule
    return found


def _early(order: Sequence[Value]) -> list[Value]:
    """Reductions and partials in the order of their depth, and those of small operands first, so that a pass over a
    large tensor finds the other values that it needs."""
    depth: dict[Value, int] = {}
    for v in order:
        below = max((depth[x] for x in v.operands if isinstance(x, Value)), default=0)
        depth[v] = below + (v.kind in ROOTS)
    return sorted((v for v in order if v.kind in ROOTS), key=lambda v: (depth[v], hint(v.operands[0].numel)))
