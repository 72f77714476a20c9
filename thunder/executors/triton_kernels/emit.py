"""The text of kernels: their loops over blocks, reductions and stores."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

from thunder.core.dtypes import FLOAT
from thunder.executors.triton_kernels.expressions import NONE, Expressions, Term
from thunder.executors.triton_kernels.literals import LOWEST, bracketed, compute_type, neutral
from thunder.executors.triton_kernels.parts import Member
from thunder.executors.triton_kernels.reduction_places import operand_place, partial_place
from thunder.executors.triton_kernels.schedule import Kernel, Schedule, stored_place, tile_place
from thunder.executors.triton_kernels.source import Source
from thunder.executors.triton_kernels.tiles import Tile, part_tile, stages, tile_of
from thunder.executors.triton_kernels.values import Place, Value, in_order, indexed_place
from thunder.kernels.index import Index, opened, split
from thunder.kernels.numbers import Scalar
from thunder.kernels.sizes import Extent, divides
from thunder.kernels.sizes import text as text_of


def emit(
    schedule: Schedule, kernel: Kernel, strides: dict[Value, Sequence[int]], interpreted: bool, shared: int = 0,
        tile: Tile | None = None, late: Container[Value] = (), wide: bool = False, padded: Set[Value] = frozenset(),
        part: bool = False
) -> Source:  # fmt: skip
    """The text of a kernel.

    strides: of the inputs and outputs of the program; temporaries are row-major. interpreted: for Triton's interpreter.
    shared: bytes of shared memory of a multiprocessor. tile: block sizes, by default those of a rule. late: values that
    are written over operands of the kernel, after all threads of a program have read these. wide: data-dependent places
    may need 64 bits. padded: inputs and outputs whose padding behind each row may be overwritten. part: as a function
    of the number of a block, for a launch that several kernels share, with names that depend on their order alone."""
    tile = tile or (part_tile(kernel) if part else tile_of(kernel))
    return _Emitter(schedule, kernel, strides, interpreted, shared, tile, late, wide, padded, part).run()


NAMED = 8  # operations in the name of a kernel


class _Emitter(Expressions):
    # ------------------------------------------------------------------------------------------------------------
    # the three forms
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

    def _count(self, n: int | Extent, block: int) -> str:
        """The number of blocks, in the text of the kernel."""
        if isinstance(n, int):
            return str(-(-n // block))
        return self._emit(_blocks_of(self.size(n), block), NONE).text

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
        """Writes the late stores behind a barrier: no thread may write before others have read the same element."""
        if stores:
            target += ["tl.debug_barrier()", *stores]
            stores.clear()

    def _close(self) -> None:
        self._write_last(self.inner, self.last[1])
        self.outer += [self.header, *(f"    {line}" for line in self.inner)]
        self.inner = []
        for key in self.of_loop:
            del self.memo[key]
        self.of_loop, self.looping = [], NONE

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
        """Rows that do not fit on chip: a pass for each level of reductions, then one for the stores."""
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
        """Reductions over rows alone: each program reduces some columns of its share of the rows."""
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

    def _write(self, v: Value, place: Place, term: Term) -> None:
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
        """Atomic additions of all elements of a block, also where places and terms do not depend on all dimensions."""
        how, start = v.what
        place = self._tile_place(v)
        term = self.value(v.operands[0], place, ())
        there = indexed_place(how, start.shape, v.operands[1:], place, lambda at, n: self._found(at, n, place, ()))
        offset = self.index(opened(self._offset(start, there)))
        space = frozenset("x" if self.kernel.kind == "map" else "rc")
        text = offset.text if offset.variables == space else f"{offset.text} + tl.zeros({self.shape}, tl.int32)"
        mask, added = self._mask(space, ()), term.text
        if self.interpreted:  # Triton 3.6's reads a block where one number stands for all
            added = f"tl.where(tl.full({self.shape}, True, tl.int1), {added}, 0)"
        self.computes["added"] = None
        (self.inner if space & self.looping else self.outer).append(
            f"tl.atomic_add({self._pointer(start)} + {bracketed(text)}, {added}"
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
                    total = self._emit(self._combined(p, total, axis, last=True), NONE).text
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
        """Reductions in groups by the number of passes that their own depends on."""
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
        """The sums of exp(x - max(x)) over the rows of a maximum `v` of x, which are computed in its pass (Milakov and
        Gimelshein 2018, "Online normalizer calculation")."""
        return [
            s
            for s in self.kernel.reductions
            if v.what[0] == "amax" and _exponential_of(s) is v and v.dtype.name == "float32"
        ]

    def _rescale(self, v: Value, accumulator: str, term: Term, totals: list[str]) -> None:
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

    def _deviate(self, v: Value, squares: str, term: Term, reduced: str) -> None:
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
        """The squared deviations of all places of a block, reduced along axes."""
        self.computes["variance"] = None
        mean, count, dimensions = f"{squares}_mean", f"{squares}_count", len(self.shape)
        for axis in axes:
            along = "" if dimensions == 1 else "[:, None]" if axis else "[None, :]"
            total = self._emit(f"tl.sum({count}, {axis})", NONE).text
            middle = self._emit(f"tl.sum({count} * {mean}, {axis}) / tl.maximum({total}, 1.0)", NONE).text
            apart = self._emit(f"{mean} - {middle}{along}", NONE).text
            squares = self._emit(f"tl.sum({squares} + {count} * {apart} * {apart}, {axis})", NONE).text
            mean, count, dimensions = middle, total, dimensions - 1
        return squares

    def _accumulate(self, v: Value, accumulator: str, term: Term, reduced: str) -> None:
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
        """A block reduced along an axis. The axis has size 1 afterwards; the `last` one is removed."""
        self.computes[v.what[0]] = None
        restored = "" if last else "[:, None]" if axis else "[None, :]"
        if v.what[0] == "sum":
            return f"tl.sum({text}, {axis}){restored}"
        best = f"tl.{v.what[0][1:]}({text}, {axis})"
        if v.dtype.category == FLOAT:  # which passes NaNs over
            best = f'tl.where(tl.max(({text} != {text}).to(tl.int32), {axis}) > 0, float("nan"), {best})'
        return f"{best}{restored}"

    def _reduction(self, v: Value) -> Term:
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

    def _is_small(self, term: Term) -> bool:
        """Whether a term may be less than a block."""
        return "c" not in term.variables or self.shape[0] > 1 and "r" not in term.variables


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


def _blocks_of(n: str, block: int) -> str:
    return f"({n} + {block - 1}) // {block}" if block > 1 else n


def blocks_of(n: int | Extent, block: int) -> int | str:
    """The number of blocks, as text of Python where a size is an extent."""
    return -(-n // block) if isinstance(n, int) else _blocks_of(text_of(n), block)
