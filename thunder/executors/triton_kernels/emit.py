"""The text of kernels.

A value is computed once for each place it is needed at, by a line of its own, in front of the loops that it does not
depend on. Blocks are [X] in a map, [R, C] in the other kernels; what depends on rows only is [R, 1], on columns only
[1, C].
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence, Set
from typing import NamedTuple

from thunder.core.dtypes import BOOL, FLOAT, dtype, float32
from thunder.executors.triton_kernels.functions import FUNCTIONS, HELPERS
from thunder.executors.triton_kernels.index import Index, Part, Variable, join, opened, split, strides_of
from thunder.executors.triton_kernels.joins import place_in_whole
from thunder.executors.triton_kernels.literals import LOWEST, bracketed, compute_type, literal, neutral
from thunder.executors.triton_kernels.numbers import Scalar
from thunder.executors.triton_kernels.parts import Member, joined_text
from thunder.executors.triton_kernels.reductions import operand_place, partial_place, reduced_place
from thunder.executors.triton_kernels.schedule import Kernel, Schedule, stored_place, tile_place
from thunder.executors.triton_kernels.sizes import Atom, Extent, at_least, divides, hint
from thunder.executors.triton_kernels.sizes import text as text_of
from thunder.executors.triton_kernels.tiles import Tile, part_tile, stages, tile_of
from thunder.executors.triton_kernels.values import Place, Value, in_order, indexed_place, sources

__all__ = ["Source", "emit", "joined", "stored_type", "HEADER"]

HEADER = "import triton\nimport triton.language as tl\n"


class Source(NamedTuple):
    """name, text: a function of the buffers (values, in order), called after what it computes, so that profiles say it.
    helpers: names of functions it calls.

    loads: where in memory each value is read; stores: where each is written: keys of indices.

    sizes: the numbers that the function is called with after the buffers. grid: numbers of programs, as ints or as
    Python text of sizes. limits: what has to fit into the integers that the kernel computes places with. part: the
    same for a launch that it shares with others.
    """

    name: str
    text: str
    buffers: tuple[Value, ...]
    grid: tuple[int | str, int | str]
    warps: int
    helpers: tuple[str, ...]
    loads: dict[Value, set]
    stores: dict[Value, tuple]
    sizes: tuple[Atom | Scalar, ...] = ()
    limits: tuple[Extent, ...] = ()
    part: Member | None = None


def stored_type(v: Value, outputs: Sequence[Value]) -> dtype:
    """The type that a value is stored in: its own where it is an output; what later kernels read keeps the precision it
    was computed in."""
    return float32 if v.dtype.category == FLOAT and v.dtype.bytes < 4 and not any(v is o for o in outputs) else v.dtype


class _Term(NamedTuple):
    """An expression, and the loop variables that it depends on."""

    text: str
    variables: frozenset


def emit(
    schedule: Schedule, kernel: Kernel, strides: dict[Value, Sequence[int]], interpreted: bool, shared: int = 0,
        tile: Tile | None = None, late: Container[Value] = (), wide: bool = False, padded: Set[Value] = frozenset(),
        part: bool = False
) -> Source:  # fmt: skip
    """strides: of the program's inputs and outputs; what kernels pass on is row-major. interpreted: for Triton's
    interpreter. shared: bytes of a multiprocessor's shared memory. tile: in place of the one that a rule gives. late:
    what is written over something that the kernel reads, after all threads of a program have read it. wide:
    data-dependent places may need 64 bits. padded: inputs and outputs whose padding, behind each row, is no one's.
    part: of a launch, for the number of a block, sizes and numbers by names that depend on their order alone."""
    tile = tile or (part_tile(kernel) if part else tile_of(kernel))
    return _Emitter(schedule, kernel, strides, interpreted, shared, tile, late, wide, padded, part).run()


def joined(sources: Sequence[Source], interpreted: bool) -> Source:
    """Parts of one launch as one kernel."""
    if len(sources) == 1:
        return sources[0]
    parts = [s.part for s in sources if s.part is not None]
    name = f"{sources[0].name}_of_{len(parts)}"
    text, buffers, numbers, programs = joined_text(name, parts, interpreted)
    loads: dict[Value, set] = {}
    for n, s in enumerate(sources):
        for v, places in s.loads.items():
            # a part may not write over what another one reads
            loads[v] = places if v not in loads else {*loads[v], *places, n}
    helpers = tuple(dict.fromkeys(h for s in sources for h in s.helpers))
    stores = {v: place for s in sources for v, place in s.stores.items()}
    warps = max(s.warps for s in sources)
    limits = tuple(dict.fromkeys(n for s in sources for n in s.limits))
    return Source(name, text, tuple(buffers), (programs, 1), warps, helpers, loads, stores, tuple(numbers), limits)


LIMIT = 2**31 - 2**20  # of places that are computed with 32 bits
NAMED = 8  # operations in the name of a kernel
_NONE: frozenset = frozenset()


class _Emitter:
    def __init__(
        self,
        schedule: Schedule,
        kernel: Kernel,
        strides: dict[Value, Sequence[int]],
        interpreted: bool,
        shared: int,
        tile: Tile,
        late: Container[Value],
        wide: bool,
        padded: Set[Value],
        part: bool,
    ):
        self.part = part
        self.named: dict[int, str] = {}  # sizes of a part
        self.kernel, self.interpreted, self.shared, self.tile, self.late = kernel, interpreted, shared, tile, late
        self.types = {
            v: stored_type(v, schedule.program.outputs) for v in (*schedule.program.outputs, *schedule.temporaries)
        }
        before = schedule.kernels[: schedule.kernels.index(kernel)]
        parts = [v.what[1] if v.kind == "add" else v for v in kernel.stores if v.kind in ("part", "add")]
        self.types |= {v: self.types[v.what[0]] for v in parts}
        # loaded, where others that are elementwise are recomputed
        self.dear = {v for k in before for v in k.stores if v in schedule.dear}
        self.strides = {**strides, **{v: strides_of(v.shape) for v in schedule.temporaries}}
        self.outer: list[str] = []
        self.inner: list[str] = []  # of the loop that begins with `header`
        self.header = ""
        self.last: tuple[list[str], list[str]] = [], []  # stores behind everything else of the body, and of the loop
        self.looping: frozenset = _NONE  # the variable of the loop that is being written
        self.memo: dict = {}
        self.of_loop: list = []  # keys of what the loop's body knows
        self.loaded: dict[str, frozenset] = {}
        self.buffers: dict[Value, str] = {}
        self.loads: dict[Value, set] = {}
        self.stores: dict[Value, tuple] = {}
        self.helpers: dict[str, None] = {}
        self.computes: dict[str, None] = {}  # names of operations
        self.count = 0
        self.keep = ""  # what the cache is told of the blocks that a pass reads
        self.ahead = 0  # bytes that a loop over blocks loads for one of them
        self.masks = {"x": False, "r": False, "c": False}
        # columns with the padding behind them: a vector of columns is read and written whole
        ends = {self.strides[v][-2] for v in padded if v.shape[-1] == kernel.columns}
        self.padded, self.padded_end = padded, min(ends, default=0)
        extents = [kernel.numel, *(_extent(v.shape, of_v) for v, of_v in self.strides.items())]
        self.wide = wide or max([n for n in extents if isinstance(n, int)], default=0) >= LIMIT
        self.limits = dict.fromkeys(n for n in extents if isinstance(n, Extent))
        self.sizes: dict[Atom | Scalar, None] = {}

    # ------------------------------------------------------------------------------------------------------------ the
    # three forms
    def run(self) -> Source:
        grid = getattr(self, f"_{self.kernel.kind}")()
        self._write_last(self.outer, self.last[0])
        body = "\n".join(f"    {line}" for line in self.outer)
        name = "_".join(["fused", *list(self.computes or ["copy"])[:NAMED]])
        if self.part:
            return self._as_part(name, body, grid)
        # Triton 3.6 makes no number of an argument for range() with NumPy 2.4, where it interprets
        sizes = [f"{atom.name}{': tl.constexpr' if self.interpreted else ''}" for atom in self.sizes]
        text = f"@triton.jit\ndef {name}({', '.join([*self.buffers.values(), *sizes])}):\n{body}\n"
        return Source(
            name, text, tuple(self.buffers), grid, self.tile.warps, tuple(self.helpers), self.loads, self.stores,
            tuple(self.sizes), tuple(self.limits) if not self.wide else (),
        )  # fmt: skip

    def _as_part(self, name: str, body: str, grid: tuple) -> Source:
        numbers = {self._scalar(n) if isinstance(n, Scalar) else n.name: n for n in self.sizes}
        buffers, sizes = {name: v for v, name in self.buffers.items()}, {name: n for n, name in self.named.items()}
        parameters = ", ".join(["block", *buffers, *sizes, *numbers])
        text = f"@triton.jit\ndef part({parameters}):\n{body}\n"
        return Source(
            name, text, tuple(self.buffers), grid, self.tile.warps, tuple(self.helpers), self.loads, self.stores,
            limits=tuple(self.limits) if not self.wide else (), part=Member(text, buffers, sizes, numbers, grid[0]),
        )  # fmt: skip

    def _scalar(self, x: Scalar) -> str:
        """The name of a number in the text of the kernel."""
        self.sizes.setdefault(x)
        return f"number{list(self.sizes).index(x)}" if self.part else x.name

    def size(self, n: int | Extent) -> str:
        """A size in the text of the kernel."""
        if isinstance(n, int):
            return self.named.setdefault(n, f"k{len(self.named)}") if self.part else str(n)
        self.limits[n] = None
        self.sizes |= dict.fromkeys(atom for monomial in n.terms for atom in monomial)
        return self._emit(text_of(n), _NONE).text

    def _count(self, n: int | Extent, block: int) -> str:
        """How many blocks there are, in the text of the kernel."""
        if isinstance(n, int):
            return str(-(-n // block))
        return self._emit(_blocks_of(self.size(n), block), _NONE).text

    def _program(self, axis: int) -> str:
        return ("block" if self.part else f"tl.program_id({axis})") + (".to(tl.int64)" if self.wide else "")

    def _block_number(self) -> str:
        return "tl.cast(block, tl.int64)" if self.wide else "block"

    def _partials(self) -> list[Value]:
        return [v for v in self.kernel.stores if v.kind == "partial"]

    def _blocks(self, count: str, programs: int, variable: str) -> None:
        """The loop of a program over its share of the blocks."""
        first = f"tl.program_id({1 if self.kernel.kind == 'columns' else 0})"
        if self.interpreted:  # Triton 3.6 makes no number of it for range() with NumPy 2.4
            first += ".handle.data.item()"
        self.header = f"{first}, {count}, {programs}"
        self.looping = frozenset(variable)

    def _close_blocks(self) -> None:
        self.header = (
            f"for block in range({self.header}):"
            if self.interpreted
            else f"for block in tl.range({self.header}, num_stages={stages(self.ahead, self.shared)}):"
        )
        self._close()

    def _write_last(self, target: list[str], stores: list[str]) -> None:
        """Where several threads hold a copy of what they read, none of them may write before the others have read."""
        if stores:
            target += ["tl.debug_barrier()", *stores]
            stores.clear()

    def _close(self) -> None:
        self._write_last(self.inner, self.last[1])
        self.outer += [self.header, *(f"    {line}" for line in self.inner)]
        self.inner = []
        for key in self.of_loop:
            del self.memo[key]
        self.of_loop, self.looping = [], _NONE

    def _map(self):
        k = self.kernel
        block = self.tile.columns
        self.shape = [block]
        self.masks["x"] = not divides(block, k.columns)
        partials = self._partials()
        accumulators = [self._accumulator(p) for p in partials]
        target = self.outer
        index = self._program(0)
        if partials:
            self._blocks(self._count(k.columns, block), partials[0].shape[0], "x")
            target, index = self.inner, self._block_number()
        target.append(f"x = {index} * {block} + tl.arange(0, {block})")
        self.linear = self._in_memory_order(next((v for v in k.stores if v.kind not in ("partial", "add")), None))
        if self.masks["x"]:
            target.append(f"x_inside = x < {self.size(k.columns)}")
        self._stores("x", partials, accumulators)
        if partials:
            self._close_blocks()
            self._store_partials(partials, accumulators)
        return (partials[0].shape[0] if partials else blocks_of(k.columns, block), 1)

    def _rows(self):
        k = self.kernel
        if not k.on_chip:
            return self._long_rows()
        rows, columns, _ = self.tile
        self.shape = [rows, columns]
        self.masks |= {"r": not divides(rows, k.rows), "c": columns != k.columns}
        partials = self._partials()
        accumulators = [self._accumulator(p) for p in partials]
        self._columns_line("0", self.outer)
        if partials:
            self._blocks(self._count(k.rows, rows), partials[0].shape[0], "r")
            self._rows_line(self._block_number(), self.inner)
        else:
            self._rows_line(self._program(0), self.outer)
        self._stores("rc", partials, accumulators)
        if partials:
            self._close_blocks()
            self._store_partials(partials, accumulators)
        return (partials[0].shape[0] if partials else blocks_of(k.rows, rows), 1)

    def _long_rows(self):
        """Rows that do not fit: a pass for each level of reductions, then one for what is stored."""
        k = self.kernel
        columns = self.tile.columns
        self.shape = [1, columns]
        self.masks["c"] = not divides(columns, k.columns)
        self._rows_line(self._program(0), self.outer)
        stored = [v for v in k.stores if not self._is_row(v)]
        self.keep = "evict_last" if stored else ""
        for level in self._levels():
            online = {v: [(s, self._accumulator(s)) for s in self._exponentials(v)] for v in level}
            accumulators = [self._accumulator(v, LOWEST if online[v] else "") for v in level]
            self._pass(columns)
            for v, accumulator in zip(level, accumulators, strict=True):
                operand = self.value(v.operands[0], operand_place(v, Index.of(k.r), Index.of(k.c)), ())
                if online[v]:
                    self._rescale(v, accumulator, operand, [total for _, total in online[v]])
                else:
                    self._accumulate(v, accumulator, operand, "c")
            self._close()
            for v, accumulator in zip(level, accumulators, strict=True):
                best = self._emit(self._combined(v, accumulator, 1), frozenset("r"))
                for s, total in online[v]:
                    scaled = self._emit(
                        f"{total} * tl.where({accumulator} == {best.text}, 1.0, tl.exp({accumulator} - {best.text}))",
                        frozenset("rc"),
                    )
                    whole = self._emit(self._combined(s, scaled.text, 1), frozenset("r"))
                    # infinite ones are subtracted from themselves: where all of the row is -inf, which leaves 0, or
                    # some of it inf
                    none = f"({whole.text} == 0) | ({best.text} == float('inf'))"
                    self.memo["reduction", s] = self._emit(
                        f"tl.where({none}, float('nan'), {whole.text})", frozenset("r")
                    )
                if online[v]:
                    best = self._emit(f"tl.where({whole.text} == 0, float('-inf'), {best.text})", frozenset("r"))
                self.memo["reduction", v] = best
        for v in k.stores:
            if self._is_row(v):
                self._store(v)
        self.keep = "evict_first" if stored else ""
        if stored:
            self._pass(columns)
            for v in stored:
                self._store(v)
            self._close()
        return blocks_of(k.rows, 1), 1

    def _pass(self, columns: int) -> None:
        self.header = f"for start in range(0, {self.size(self.kernel.columns)}, {columns}):"
        self.looping = frozenset("c")
        self._columns_line("start", self.inner, columns)

    def _columns(self):
        """Reductions over rows alone: each program sees some columns of its share of the rows."""
        k = self.kernel
        rows, columns, _ = self.tile
        self.shape = [rows, columns]
        self.masks |= {"r": not divides(rows, k.rows), "c": not divides(columns, k.columns)}
        partials = self._partials()
        accumulators = [self._accumulator(p) for p in partials]
        self._columns_line(f"{self._program(0)} * {columns}", self.outer)
        self._blocks(self._count(k.rows, rows), partials[0].shape[0], "r")
        self._rows_line(self._block_number(), self.inner)
        self._stores("rc", partials, accumulators)
        self._close_blocks()
        self._store_partials(partials, accumulators)
        return blocks_of(k.columns, columns), partials[0].shape[0]

    def _rows_line(self, block: str, target: list[str]) -> None:
        rows = self.shape[0]
        target.append(
            f"r = {block} * {rows} + tl.arange(0, {rows})[:, None]"
            if rows > 1
            else f"r = {block} + tl.zeros([1, 1], tl.int32)"
        )
        if self.masks["r"]:
            target.append(f"r_inside = r < {self.size(self.kernel.rows)}")

    def _columns_line(self, start: str, target: list[str], columns: int = 0) -> None:
        target.append(f"c = {f'{start} + ' if start != '0' else ''}tl.arange(0, {columns or self.shape[-1]})[None, :]")
        if self.masks["c"]:
            target.append(f"c_inside = c < {self.size(self.kernel.columns)}")
            if self.padded_end:
                target.append(f"c_in_row = c < {self.padded_end}")

    def _in_memory_order(self, v: Value | None) -> Index:
        """The row-major place, in a tensor of the space's size, of the x-th element of `v` in memory: neighbours are
        written, and most often read, together."""
        x = Index.of(self.kernel.x)
        if v is None:
            return x
        steps = self._steps(v)
        order = sorted(range(len(v.shape)), key=lambda d: -hint(steps[d]))
        there = dict(zip(order, split(x, [v.shape[d] for d in order]), strict=True))
        return join([there[d] for d in range(len(v.shape))], strides_of(v.shape))

    def _steps(self, v: Value) -> Sequence[int]:
        """How far in memory a step in each dimension leads."""
        if v.kind != "part":
            return self.strides[v]
        variables = [Variable("step", n) for n in v.shape]
        offset = self._offset(v, tuple(map(Index.of, variables)))
        return [offset.terms.get(x, 0) for x in variables]

    def _offset(self, v: Value, place: Place) -> Index:
        return (
            join(place_in_whole(v, place), self.strides[v.what[0]])
            if v.kind == "part"
            else join(place, self.strides[v])
        )

    # ------------------------------------------------------------------------------------------------------------
    # stores
    def _tile_place(self, v: Value, stored: bool = False) -> Place:
        if self.kernel.kind != "map":
            return (stored_place if stored else tile_place)(v, self.kernel)
        return split(self._in_memory_order(v) if v.kind == "part" else self.linear, v.shape)

    def _is_row(self, v: Value) -> bool:
        return (
            v.kind == "reduce"
            or v.numel == self.kernel.rows
            and self.kernel.kind == "rows"
            and v.numel != self.kernel.numel
        )

    def _stores(self, reduced: str, partials: list[Value], accumulators: list[str]) -> None:
        for v in self.kernel.stores:
            if v.kind != "partial":
                self._store(v)
        for p, accumulator in zip(partials, accumulators, strict=True):
            whole, k = len(p.shape) == 1, self.kernel
            linear = self.linear if k.kind == "map" else k.linear
            operand = self.value(p.operands[0], partial_place(p, linear, k.r, k.c), ())
            (self._deviate if p.what[0] == "squares" else self._accumulate)(
                p, accumulator, operand, reduced if whole else "r"
            )

    def _store(self, v: Value) -> None:
        if v.kind == "add":
            self._add(v)
            return
        place = split(Index.of(self.kernel.r), v.shape) if self._is_row(v) else self._tile_place(v, stored=True)
        self._write(v, place, self._reduction(v) if v.kind == "reduce" else self.value(v, place, ()))

    def _write(self, v: Value, place: Place, term: _Term) -> None:
        index = opened(self._offset(v, place))
        offset = self.index(index)
        variables = offset.variables | term.variables
        mask = self._mask(offset.variables, (), self._is_by_rows(v, index))
        if self.interpreted and self.types[v].name == "bfloat16":
            term = self._emit(self._rounded(term.text, v.dtype), term.variables)
        # where something starts to which a later kernel adds, it is what lies there
        whole = v.what[0] if v.kind == "part" and not v.what[1] else v
        self.stores[whole] = index.key
        of_loop = bool(variables & self.looping)
        target = self.last[of_loop] if whole in self.late else self.inner if of_loop else self.outer
        target.append(
            f"tl.store({self._pointer(v)} + {bracketed(offset.text)}, {term.text}{f', mask={mask}' if mask else ''})"
        )

    def _add(self, v: Value) -> None:
        """Each element of the space adds what it has: all of a block, whatever the places and the numbers depend on."""
        how, start = v.what
        place = self._tile_place(v)
        term = self.value(v.operands[0], place, ())
        there = indexed_place(how, start.shape, v.operands[1:], place, lambda at, n: self._found(at, n, place, ()))
        offset = self.index(opened(self._offset(start, there)))
        space = frozenset("x" if self.kernel.kind == "map" else "rc")
        text = offset.text if offset.variables == space else f"{offset.text} + tl.zeros({self.shape}, tl.int32)"
        mask = self._mask(space, ())
        self.computes["added"] = None
        (self.inner if space & self.looping else self.outer).append(
            f"tl.atomic_add({self._pointer(start)} + {bracketed(text)}, {term.text}"
            f"{f', mask={mask}' if mask else ''}, sem='relaxed')"
        )

    def _store_partials(self, partials: list[Value], accumulators: list[str]) -> None:
        k = self.kernel
        for p, accumulator in zip(partials, accumulators, strict=True):
            if len(p.shape) == 1:
                total, axes = accumulator, range(len(self.shape))[::-1]
                if p.what[0] == "squares":
                    total, axes = self._joined_squares(total, axes), ()
                for axis in axes:
                    total = self._emit(self._combined(p, total, axis, last=True), _NONE).text
                self.outer.append(f"tl.store({self._pointer(p)} + tl.program_id(0), {total})")
                continue
            squares = p.what[0] == "squares"
            total = f"{self._joined_squares(accumulator, (0,))}[None, :]" if squares else (
                self._combined(p, accumulator, 0))  # fmt: skip
            axis = 1 if k.kind == "columns" else 0
            mask = self._mask(frozenset("c"), ())
            self.outer.append(
                f"tl.store({self._pointer(p)} + (tl.program_id({axis}) * {self.size(k.columns)} + c), "
                f"{total}{f', mask={mask}' if mask else ''})"
            )

    # ------------------------------------------------------------------------------------------------------------
    # reductions
    def _levels(self) -> list[list[Value]]:
        """Reductions by how many passes have to come before their own."""
        here = set(self.kernel.reductions)
        level: dict[Value, int] = {}
        for v in in_order(self.kernel.reductions):
            below = max((level[x] for x in v.operands if isinstance(x, Value)), default=0)
            maximum = _exponential_of(v) if v in here else None
            online = maximum in here and v in self._exponentials(maximum)
            level[v] = level[maximum] if online else below + (v in here)
            if online:
                here.discard(v)
        return [
            [v for v in self.kernel.reductions if v in here and level[v] == n] for n in sorted({level[v] for v in here})
        ]

    def _exponentials(self, v: Value) -> list[Value]:
        """Sums of exp(x - max(x)) over the same rows as a maximum `v` of x: they are found in its pass (Milakov and
        Gimelshein 2018, "Online normalizer calculation")."""
        return [
            s
            for s in self.kernel.reductions
            if v.what[0] == "amax" and _exponential_of(s) is v and v.dtype.name == "float32"
        ]

    def _rescale(self, v: Value, accumulator: str, term: _Term, totals: list[str]) -> None:
        """A step of a maximum, and of sums of exponentials relative to it: one exponential for both, since either the
        element or what was the maximum is 0 from the new one."""
        text = f"tl.where(c_inside, {term.text}, {neutral(v.what[0], v.dtype)})" if self.masks["c"] else term.text
        self.inner.append(f"x = {text}")
        self.inner.append(f"apart = tl.exp(-tl.abs(x - {accumulator}))")
        for total in totals:
            self.inner.append(f"{total} = tl.where(x > {accumulator}, {total} * apart + 1.0, {total} + apart)")
        self.inner.append(f"{accumulator} = tl.maximum({accumulator}, x, propagate_nan=tl.PropagateNan.ALL)")

    def _accumulator(self, v: Value, start: str = "") -> str:
        self.count += 1
        name = f"sum{self.count}"
        for own in (name, f"{name}_mean", f"{name}_count") if v.what[0] == "squares" else (name,):
            neutral_ = start or neutral(v.what[0], v.dtype)
            self.outer.append(f"{own} = tl.full({self.shape}, {neutral_}, {compute_type(v.dtype)})")
        return name

    def _deviate(self, v: Value, squares: str, term: _Term, reduced: str) -> None:
        """A step of the squared deviations from the mean, in each place of a block, which has seen one element in each
        pass of the loop (Welford 1962)."""
        mean, count, kind = f"{squares}_mean", f"{squares}_count", compute_type(v.dtype)
        inside = " & ".join(f"{n}_inside" for n in ("x", "r", "c") if self.masks[n] and n in reduced)
        seen = f"tl.cast(block // {v.shape[0]} + 1, {kind})"
        self.inner += [
            f"element = tl.where({inside}, {term.text}, {mean})" if inside else f"element = {term.text}",
            f"apart = element - {mean}",
            f"{mean} += apart * (1.0 / {seen})",
            f"{squares} += apart * (element - {mean})",
            f"{count} += {f'tl.where({inside}, 1.0, 0.0)' if inside else '1.0'}",
        ]

    def _joined_squares(self, squares: str, axes: Sequence[int]) -> str:
        """The squared deviations of all places of a block along axes, which are gone afterwards."""
        self.computes["variance"] = None
        mean, count, dimensions = f"{squares}_mean", f"{squares}_count", len(self.shape)
        for axis in axes:
            along = "" if dimensions == 1 else "[:, None]" if axis else "[None, :]"
            total = self._emit(f"tl.sum({count}, {axis})", _NONE).text
            middle = self._emit(f"tl.sum({count} * {mean}, {axis}) / tl.maximum({total}, 1.0)", _NONE).text
            apart = self._emit(f"{mean} - {middle}{along}", _NONE).text
            squares = self._emit(f"tl.sum({squares} + {count} * {apart} * {apart}, {axis})", _NONE).text
            mean, count, dimensions = middle, total, dimensions - 1
        return squares

    def _accumulate(self, v: Value, accumulator: str, term: _Term, reduced: str) -> None:
        masks = [f"{n}_inside" for n in ("x", "r", "c") if self.masks[n] and n in reduced]
        text = (
            f"tl.where({' & '.join(masks)}, {term.text}, {neutral(v.what[0], v.dtype)})"
            if masks
            else bracketed(term.text)
        )
        joined = (
            f"{accumulator} + {text}"
            if v.what[0] == "sum"
            else f"tl.{v.what[0][1:]}imum({accumulator}, {text}, propagate_nan=tl.PropagateNan.ALL)"
        )
        self.inner.append(f"{accumulator} = {joined}")

    def _combined(self, v: Value, text: str, axis: int, last: bool = False) -> str:
        """A block reduced along an axis, which stays as 1 unless it is the `last`, which leaves a number in the end."""
        self.computes[v.what[0]] = None
        restored = "" if last else "[:, None]" if axis else "[None, :]"
        if v.what[0] == "sum":
            return f"tl.sum({text}, {axis}){restored}"
        best = f"tl.{v.what[0][1:]}({text}, {axis})"
        if v.dtype.category == FLOAT:  # which passes NaNs over
            best = f'tl.where(tl.max(({text} != {text}).to(tl.int32), {axis}) > 0, float("nan"), {best})'
        return f"{best}{restored}"

    def _reduction(self, v: Value) -> _Term:
        key = "reduction", v
        if key not in self.memo:
            k = self.kernel
            operand = self.value(v.operands[0], operand_place(v, Index.of(k.r), Index.of(k.c)), ())
            text = operand.text
            if self.masks["c"]:
                text = f"tl.where(c_inside, {text}, {neutral(v.what[0], v.dtype)})"
            block = self._emit(
                f"tl.zeros({self.shape}, {compute_type(v.dtype)}) + {text}" if self._is_small(operand) else text,
                operand.variables | {"r"},
            )
            self._know(key, self._emit(self._combined(v, block.text, 1), frozenset("r")))
        return self.memo[key]

    def _is_small(self, term: _Term) -> bool:
        """Whether a term may be less than a block."""
        return "c" not in term.variables or self.shape[0] > 1 and "r" not in term.variables

    # ------------------------------------------------------------------------------------------------------------
    # values
    def value(self, v: Value, place: Place, conditions: tuple) -> _Term:
        if (
            v.kind == "reduce"
            and any(v is own for own in self.kernel.reductions)
            and reduced_place(v, place).is_variable(self.kernel.r)
        ):
            return self._reduction(v)
        key = (v, tuple(i.key for i in place), tuple((i.key, low, high) for i, low, high in conditions))
        found = self.memo.get(key)
        if found is None:
            found = self._computed(v, place, conditions)
            self._know(key, found)
        return found

    def _know(self, key, term: _Term) -> None:
        self.memo[key] = term
        if term.variables & self.looping:
            self.of_loop.append(key)

    def _computed(self, v: Value, place: Place, conditions: tuple) -> _Term:
        kind = v.kind
        if kind in ("input", "reduce", "partial", "added") or v in self.dear:
            return self._load(v, place, conditions)
        if kind == "map":
            return self._mapped(v, place, conditions)
        if kind == "cast":
            return self._cast(v.operands[0].dtype, v.dtype, self.value(v.operands[0], place, conditions))
        if kind == "number":
            return self._emit(self._of_number(v.what, v.dtype), _NONE)
        if kind == "iota":
            start, step = v.what
            at = self.index(place[0])
            if (start, step) == (0, 1) and v.dtype.category != FLOAT:
                return self._emit(f"{bracketed(at.text)}.to({compute_type(v.dtype)})", at.variables)
            wide = "int64" if isinstance(start, int) and isinstance(step, int) else "float64"
            number = f"{bracketed(at.text)}.to(tl.{wide}) * {step} + {start}"
            return self._cast_text(number, v.dtype, at.variables)
        if kind == "philox":
            return self._drawn(v, place)
        if kind == "gather":
            return self._gathered(v, place, conditions)
        if kind in ("cat", "pad", "partials"):
            self.computes[kind] = None
            return self._chosen(v, place, conditions)
        ((operand, there, _),) = sources(v, place)
        return self.value(operand, there, conditions)

    def _drawn(self, v: Value, place: Place) -> _Term:
        offset, low, high = v.what
        seed, at = self.value(v.operands[0], (), ()), self.index(join(place, strides_of(v.shape)))
        halves = f"{bracketed(at.text)}.to(tl.int32), ({at.text} >> 32).to(tl.int32)" if self.wide else f"{at.text}, 0"
        self.helpers["_uniform"] = self.computes["uniform"] = None
        return self._emit(f"_uniform({seed.text}, {offset}, {halves}) * {high - low} + {low}", at.variables)

    def _mapped(self, v: Value, place: Place, conditions: tuple) -> _Term:
        function = FUNCTIONS[v.what]
        kind = next(x.dtype for x in reversed(v.operands) if isinstance(x, Value))
        if v.what == "where":
            kind = v.dtype
        texts, variables = [], _NONE
        for x in v.operands:
            if isinstance(x, Value):
                term = self.value(x, place, conditions)
                texts.append(term.text)
                variables |= term.variables
            elif v.what == "pow":
                texts.append(repr(x))
            else:
                number = self._number(x, kind)
                texts.append(number if isinstance(x, int | float | bool) else self._emit(number, _NONE).text)
        text = function.text(*texts)
        self.computes[v.what] = None
        self.helpers.update(dict.fromkeys(h for h in HELPERS if h in text))
        return self._emit(text, variables)

    def _number(self, x, d: dtype) -> str:
        if not isinstance(x, Extent | Scalar) and (d.name == "float32" or d.category == FLOAT and d.bytes < 4):
            return literal(x, d)
        return self._of_number(x, d)

    def _of_number(self, x, d: dtype) -> str:
        number = self.size(x) if isinstance(x, Extent) else self._scalar(x) if isinstance(x, Scalar) else literal(x, d)
        return f"tl.full({[1] * len(self.shape)}, {number}, {compute_type(d)})"

    def _cast(self, source: dtype, target: dtype, term: _Term) -> _Term:
        if target.category == BOOL:
            return term if source.category == BOOL else self._emit(f"{term.text} != 0", term.variables)
        if source.category == FLOAT and source.bytes < 4 and target.name == "float32":
            return term
        return self._cast_text(term.text, target, term.variables, compute_type(source))

    def _cast_text(self, text: str, target: dtype, variables: frozenset, known: str = "") -> _Term:
        text = bracketed(text) + (f".to({compute_type(target)})" if known != compute_type(target) else "")
        if target.category == FLOAT and target.bytes < 4:
            text = self._rounded(text, target)
        return self._emit(text, variables)

    def _rounded(self, text: str, target: dtype) -> str:
        if self.interpreted and target.name == "bfloat16":
            self.helpers["_nearest_bfloat16"] = None
            return f"_nearest_bfloat16({text})"
        return f"{text}.to(tl.{target.name}).to(tl.float32)"

    def _chosen(self, v: Value, place: Place, conditions: tuple) -> _Term:
        """A join or a padding: what is read where, by conditions on the place."""
        options = [
            (o, there, [c for c in needed if not _always(c)])
            for o, there, needed in sources(v, place)
            if not any(map(_never, needed))
        ]
        if v.kind != "cat":
            term = _Term(self._number(v.what[0], v.dtype), _NONE)
            if not options:
                return self._computed(Value("number", (), (), v.dtype, v.what[0]), (), ())
        else:
            operand, there, needed = options.pop()
            term = self.value(operand, there, conditions + tuple(needed))
        for operand, there, needed in reversed(options):
            inside = self.value(operand, there, conditions + tuple(needed))
            if not needed:
                term = inside
                continue
            test = [self._test(c) for c in needed]
            variables = frozenset().union(term.variables, inside.variables, *(t.variables for t in test))
            term = self._emit(f"tl.where({' & '.join(t.text for t in test)}, {inside.text}, {term.text})", variables)
        return term

    def _gathered(self, v: Value, place: Place, conditions: tuple) -> _Term:
        self.computes["gather"] = None
        a, *indices = v.operands
        there = indexed_place(v.what, a.shape, indices, place, lambda at, n: self._found(at, n, place, conditions))
        return self.value(a, there, conditions)

    def _found(self, at: Value, n: int | Extent, place: Place, conditions: tuple) -> Index:
        """The number that an index is at a place. Where it is read and not one of n the program ends, as PyTorch's
        kernels end it."""
        term = self.value(at, place, conditions)
        test = self._emit(f"({term.text} >= 0) & ({term.text} < {self.size(n)})", term.variables)
        tests = [self._test(c) for c in conditions if not _always(c)]
        mask = self._mask(term.variables, tests)
        inside = f"{test.text} | (({mask}) == 0)" if mask else test.text
        target = self.inner if term.variables.union(*(t.variables for t in tests)) & self.looping else self.outer
        if self.interpreted:  # which has no assertions
            target.append(f"if not ({inside}).handle.data.all(): raise IndexError('index out of range')")
        else:
            target.append(f"tl.device_assert({inside}, 'index out of range')")
        loaded = self._emit(f"{term.text}.to(tl.{'int64' if self.wide else 'int32'})", term.variables)
        self.loaded[loaded.text] = loaded.variables
        return Index({Variable(loaded.text, n, loaded=True): 1}, 0)

    # ------------------------------------------------------------------------------------------------------------
    # memory
    def _pointer(self, v: Value) -> str:
        v = v.what[0] if v.kind == "part" else v
        if v not in self.buffers:
            self.buffers[v] = f"{'in' if v.kind == 'input' else 'buffer'}{len(self.buffers)}"
        return self.buffers[v]

    def _load(self, v: Value, place: Place, conditions: tuple) -> _Term:
        index = opened(join(place, self.strides[v]))
        offset = self.index(index)
        tests = [self._test(c) for c in conditions if not _always(c)]
        variables = offset.variables.union(*(t.variables for t in tests))
        mask = self._mask(variables, tests, self._is_by_rows(v, index))
        if variables & self.looping:
            self.ahead += v.dtype.bytes * math.prod(
                n
                for n, name in zip(self.shape, "rc" if len(self.shape) == 2 else "x", strict=True)
                if name in variables
            )
        self.loads.setdefault(v, set()).add(index.key)
        keep = f", eviction_policy='{self.keep}'" if self.keep and "c" in variables and "r" in variables else ""
        text = (
            f"tl.load({self._pointer(v)} + {bracketed(offset.text)}{f', mask={mask}, other=0' if mask else ''}{keep})"
        )
        if v.dtype.category == FLOAT and v.dtype.bytes < 4:
            text += ".to(tl.float32)"
        if v.dtype.category == BOOL:
            text += ".to(tl.int1)"
        return self._emit(text, variables)

    def _is_by_rows(self, v: Value, index: Index) -> bool:
        """Whether a place is a column of a padded row, for each column of the kernel."""
        if v not in self.padded or v.shape[-1] != self.kernel.columns:
            return False
        step = self.strides[v][-2]
        columns = [f for a, f in index.terms.items() if isinstance(a, Variable) and a.name == "c"]
        others = [f for a, f in index.terms.items() if not isinstance(a, Variable) or a.name != "c"]
        return columns == [1] and index.constant == 0 and all(type(f) is int and f % step == 0 for f in others)

    def _mask(self, variables: frozenset, tests: Sequence[_Term], by_rows: bool = False) -> str:
        names = {"x": "x_inside", "r": "r_inside", "c": "c_in_row" if by_rows else "c_inside"}
        return " & ".join(
            [names[n] for n in ("x", "r", "c") if n in variables and self.masks[n]] + [t.text for t in tests]
        )

    def _test(self, condition: tuple) -> _Term:
        where, low, high = condition
        at = self.index(where)
        texts = [] if at_least(where.low, low) else [f"({at.text} >= {self.size(low)})"]
        texts += [] if at_least(high - 1, where.high) else [f"({at.text} < {self.size(high)})"]
        return self._emit(" & ".join(texts), at.variables)

    def index(self, index: Index) -> _Term:
        """An index as an integer expression; quotients and remainders are lines of their own."""
        texts, variables = [], _NONE
        for atom, factor in index.terms.items():
            if isinstance(atom, Part):
                key = "part", atom
                if key not in self.memo:
                    inside = self.index(atom.index)
                    text = (
                        inside.text
                        if atom.remainder is None
                        else f"{bracketed(inside.text)} {'%' if atom.remainder else '//'} {self.size(atom.by)}"
                    )
                    self._know(key, self._emit(text, inside.variables))
                name, of_atom = self.memo[key]
            else:
                name, of_atom = atom.name, self.loaded[atom.name] if atom.loaded else frozenset(atom.name)
            variables |= of_atom
            texts.append(name if factor == 1 else f"{name} * {self.size(factor)}")
        if index.constant:
            texts.append(self.size(index.constant))
        if not variables:  # of a rank like all others
            texts.append(self._emit(f"tl.zeros({[1] * len(self.shape)}, tl.int32)", _NONE).text)
        return _Term(" + ".join(texts), variables)

    def _emit(self, text: str, variables: frozenset) -> _Term:
        """A line that computes an expression; equal expressions are one line."""
        if text.isidentifier():
            return _Term(text, variables)
        key = "text", text
        if key not in self.memo:
            self.count += 1
            target = self.inner if variables & self.looping else self.outer
            target.append(f"v{self.count} = {text}")
            self._know(key, _Term(f"v{self.count}", variables))
        return self.memo[key]


def _exponential_of(s: Value) -> Value | None:
    """The maximum in sum(exp(x - max(x)))."""
    if s.kind != "reduce" or s.what[0] != "sum":
        return None
    e = s.operands[0]
    if e.kind != "map" or e.what != "exp" or e.operands[0].kind != "map" or e.operands[0].what != "sub":
        return None
    x, m = e.operands[0].operands
    while isinstance(m, Value) and m.kind in ("broadcast", "reshape"):
        m = m.operands[0]
    if not isinstance(m, Value) or m.kind != "reduce" or m.what != ("amax", s.what[1]):
        return None
    return m if m.operands[0] is x else None


def _always(condition: tuple) -> bool:
    where, low, high = condition
    return at_least(where.low, low) and at_least(high - 1, where.high)


def _never(condition: tuple) -> bool:
    where, low, high = condition
    return at_least(low - 1, where.high) or at_least(where.low, high)


def _extent(shape: Sequence[int | Extent], strides: Sequence[int | Extent]) -> int | Extent:
    """How far the last element is from the first."""
    total: int | Extent = 0
    for n, step in zip(shape, strides, strict=True):
        total = total + (n - 1) * (abs(step) if isinstance(step, int) else step)
    return total


def _blocks_of(n: str, block: int) -> str:
    return f"({n} + {block - 1}) // {block}" if block > 1 else n


def blocks_of(n: int | Extent, block: int) -> int | str:
    """How many blocks there are, in Python's text where a size is an extent."""
    return -(-n // block) if isinstance(n, int) else _blocks_of(text_of(n), block)
