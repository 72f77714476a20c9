"""The text of a kernel of a chain of matrix products: attention, and its gradients.

x = ...                                    # the rows of a tile
h = tl.full([128, 1], float("-inf"), ...)  # the largest score so far
v1 = tl.load(...)                          # queries
for start in range(low, high, 64):
    c = start + tl.arange(0, 64)[None, :]  # the chained axis, of scores
    cb = start + tl.arange(0, 64)[:, None]  # and of values
    v2 = tl.dot(v1, tl.load(...))
    ...
    p0 = tl.dot(v9.to(tl.bfloat16), tl.load(...), p0 * scale)
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

from thunder.core.dtypes import bool8
from thunder.kernels.chains import (
    NOTHING,
    ChainKernel,
    ChainTile,
    ListedTiles,
    Range,
    VisibleTiles,
    affine,
    inner_of,
    ranges_of,
)
from thunder.kernels.index import Index, Variable
from thunder.kernels.ir import Buffer, Node, in_order
from thunder.kernels.schedule import TooComplex, Write
from thunder.kernels.sizes import power_of_two
from thunder.kernels.triton_cuda import PROGRAMS, Memory, Programs, Scope, Writer

_LOG2E = 1.4426950408889634
_COMPARED = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!="}


class ChainWriter(Writer):
    """Writes the function of a kernel of a chain.

    side: of which operand values are written, by which the loops have dimensions: "rows", of scores; "left" and
    "right", of an inner product; "beside", of an outer one; "columns", of results.
    """

    kernel: ChainKernel
    tile: ChainTile

    def __init__(self, kernel: ChainKernel, tile: ChainTile, interpreted: bool, wide: bool, memory: Memory):
        super().__init__(kernel, tile, interpreted, wide, memory)  # type: ignore[arg-type]
        self.looped = (kernel.along,)
        self.row_ends = {}
        self.side, self.is_edge = "rows", False
        self.bounds = {m.what[0] for m in inner_of(kernel)}
        self.beside = Scope(self.top)
        self.is_half = all(m.args[0].dtype.bytes == 2 for m in inner_of(kernel))
        self.growing: set[Node] = set()  # what reads the largest so far

    # -------------------------------------------------------------------------------------------- loops
    def space(self, v: Variable) -> tuple[Sequence[Variable], str]:
        """The axes of a tile that a variable runs along, and the name of its index in the text."""
        kernel = self.kernel
        if v is kernel.batch:
            return (v,), "batch"
        if v is kernel.row:
            return (v,), "x"
        if v is kernel.along:
            return (v,), "cb" if self.side == "beside" else "c"
        if v in self.bounds:
            name = ("ka" if self.side == "left" else "kb") + str(v.size)
        else:
            name = f"w{v.size}"
        width = max(16, power_of_two(v.size))
        subscript = "[:, None]" if name[:2] == "kb" else "[None, :]"
        if name not in self.top.names:
            self.top.names[name] = name
            self.top.lines.append(f"{name} = tl.arange(0, {width}){subscript}")
            if width != v.size:
                self.top.lines.append(f"{name}_inside = {name} < {v.size}")
        return (v,), name

    def is_masked(self, v: Variable) -> bool:
        if v is self.kernel.batch:
            return False
        if v is self.kernel.row:
            return v.size % self.tile.first != 0
        if v is self.kernel.along:
            return self.is_edge
        return max(16, power_of_two(v.size)) != v.size

    def masks(self, axes: Iterable[Variable], buffer: Buffer | None = None, index: Index | None = None) -> list[str]:
        return list(dict.fromkeys(f"{self.space(v)[1]}_inside" for v in axes if self.is_masked(v)))

    def home(self, n: Node, scope: Scope) -> Scope:
        return scope if n in self.growing else super().home(n, scope)

    # -------------------------------------------------------------------------------------------- products
    def on(self, side: str, node: Node, scope: Scope) -> str:
        """A value of a side."""
        before, self.side = self.side, side
        name = self.value(node, scope)
        zero = [v for v in node.axes if v in self.bounds and self.is_masked(v)]
        zero += [self.kernel.along] if side == "beside" and self.is_edge and self.kernel.along in node.axes else []
        plain = node.args[0] if node.op == "cast" else node
        if zero and plain.op != "load":
            inside = " & ".join(self.masks(zero))
            name = self.emit(scope, f"tl.where({inside}, {name}, tl.full([], 0, {name}.dtype))")
        self.side = before
        return self.whole_tile(node, name, side, scope)

    def whole_tile(self, node: Node, name: str, side: str, scope: Scope) -> str:
        """A tile of two dimensions, of an operand that does not depend on one of them."""
        own = next((v for v in node.axes if v in (*self.bounds, *self.kernel.widths)), None)
        other = self.kernel.row if side == "left" else self.kernel.along
        if own is not None and other in node.axes:
            return name
        if own is None:
            raise TooComplex("a product of an operand without its contracted axis")
        width, length = max(16, power_of_two(own.size)), self.tile.first if side == "left" else self.tile.second
        shape = [width, length] if side == "right" else [length, width]
        return self.emit(scope, f"tl.broadcast_to({name}, {shape})")

    def computed(self, n: Node, scope: Scope, mask: str | None) -> str:
        if n.op != "dot":
            short = self.shorter(n, scope)
            return short if short is not None else super().computed(n, scope, mask)
        first, second = n.args
        if self.kernel.along in first.axes:
            first, second = second, first
        left = self.on("left", first, self.top)
        right = self.on("right", second, scope)
        return self.product(n, left, right, None)

    def shorter(self, n: Node, scope: Scope) -> str | None:
        """The text of a function that scores are computed by, of fewer instructions: exponentials by powers of 2, whose
        factor is a part of the same multiplication and addition, and indices of 32 bits. An error of a unit in the last
        place of a float32 is less than what rounding to 16 bits changes."""

        def known(a: Node) -> str:
            name = self.known(a, scope, None)
            assert name is not None, "operands are computed before"
            return name

        if n.op in _COMPARED and all(affine(a) is not None for a in n.args):
            first, second = (self.index(affine(a), scope) for a in n.args)  # type: ignore[arg-type]
            return f"({first}) {_COMPARED[n.op]} ({second})"
        if n.op == "cast" and n.dtype.name == "float32" and n.args[0].op == "index":
            return f"({self.index(n.args[0].what, scope)}).to(tl.float32)"
        if n.dtype.name != "float32" or not self.is_half:
            return None
        if n.op == "exp" and n.args[0].op == "sub":
            x, shift = n.args[0].args
            if self.kernel.along in x.axes and not x.axes <= shift.axes:
                scaled = self.emit(self.home(shift, scope), f"{known(shift)} * {_LOG2E}")
                return f"tl.exp2({known(x)} * {_LOG2E} - {scaled})"
        if n.op == "true_divide" and n.args[1].op == "constant" and n.args[1].what:
            return f"{known(n.args[0])} * {1 / n.args[1].what!r}"
        if n.op == "tanh":
            return f"1.0 - 2.0 / (tl.exp2({known(n.args[0])} * {2 * _LOG2E}) + 1.0)"
        return None

    def product(self, n: Node, left: str, right: str, total: str | None) -> str:
        if self.interpreted:  # which takes the bits of 16-bit floats for integers
            left, right = f"{left}.to(tl.float32)", f"{right}.to(tl.float32)"
        is_single = n.args[0].dtype.bytes == 4
        precision = f', input_precision="{"tf32" if n.what[1] else "ieee"}"' if is_single else ""
        return f"tl.dot({left}, {right}{', ' + total if total else ''}{precision})"

    def operand_beside(self, node: Node, scope: Scope) -> str:
        """The other operand of an outer product: where an inner one reads the same, turned around."""
        (columns,) = (v for v in self.kernel.widths if v in node.axes)
        for bound in self.bounds:
            turned = (
                self.kernel_graph.substitute(node, {columns: Index.of(bound)}) if bound.size == columns.size else None
            )
            name = scope.names.get((turned, None)) if turned is not None else None
            if name is not None:
                return f"tl.trans({name})"
        return self.on("beside", node, self.beside)

    def spread(self, w: Write, axes: Container[Variable]) -> tuple[list[int], list[str]]:
        if self.kernel.row in axes:
            return [], []
        widths = [max(16, power_of_two(v.size)) for v in self.kernel.widths if v in axes]
        return [self.tile.first, *(widths or [1])], ["(x < 1)"]

    # -------------------------------------------------------------------------------------------- the function
    def text(self, name: str) -> str:
        """The Triton function of a chain of products: a block of rows, a loop over the chained axis, sums kept on the
        way."""
        kernel, tile, lines = self.kernel, self.tile, self.top.lines
        count = -(-kernel.row.size // tile.first)
        program = "program.to(tl.int64)" if self.is_wide else "program"
        lines.append(f"batch = {program} // {count}")
        ends = [ranges_of(c, kernel)[0] for c in kernel.conditions]
        grows = any(r.high is not None for r in ends) and not any(r.low is not None for r in ends)
        number = f"({count - 1} - program % {count})" if grows else f"program % {count}"  # the longest ones first
        lines.append(f"first = {number} * {tile.first}")
        lines.append(f"x = first + tl.arange(0, {tile.first})[:, None]")
        if self.is_masked(kernel.row):
            lines.append(f"x_inside = x < {kernel.row.size}")
        if kernel.conditions:
            lines.append(f"last = tl.minimum(first + {tile.first - 1}, {kernel.row.size - 1})")
        names = {n: f"p{i}" for i, n in enumerate(kernel.sums)}
        for n, s in kernel.sums.items():
            width = max(16, power_of_two(s.columns.size)) if s.columns is not None else 1
            lines.append(f"{names[n]} = tl.zeros([{tile.first}, {width}], tl.float32)")
        if kernel.largest is not None:
            lines.append(f'h = tl.full([{tile.first}, 1], float("-inf"), tl.float32)')
        self.phases(names)
        self.top.names |= {(n, None): name for n, name in names.items()}
        if kernel.largest is not None:
            self.top.names[kernel.largest[0], None] = "h"
        self.side, self.is_edge = "columns", False
        self.write_all(kernel.writes, self.top)
        self.computed_ops["chain"] = None
        text = "\n".join(f"    {line}" for line in lines)
        parameters = ["program", *self.buffers.values(), *self.numbers.values()]
        return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{text}\n"

    def phases(self, names: dict[Node, str]) -> None:
        """Loops over the elements for which conditions may hold: where they hold for all rows of a tile, they are not
        computed."""
        kernel, deep, size = self.kernel, self.tile.second, self.kernel.along.size
        known = {c: self.constant_true() for c in kernel.conditions}
        if kernel.listed is not None:
            self.over_listed(kernel.listed, names, known)
            return
        bounds = {c: ranges_of(c, kernel) for c in kernel.conditions}
        outer, whole = Range(), Range()
        for any_, all_ in bounds.values():
            outer, whole = outer & any_, whole & all_
        end = size // deep * deep  # of whole tiles
        low = "0" if outer.low is None else f"tl.maximum({outer.low}, 0) // {deep} * {deep}"
        high = str(size) if outer.high is None else f"tl.minimum({outer.high}, {size})"
        if any(all_ == NOTHING for _, all_ in bounds.values()):
            self.loop_over(low, high, names, size % deep != 0, {})
            return
        if whole.low is None and whole.high is None:
            if end:
                self.loop_over(low, high if end == size else str(end), names, False, known)
            if end != size:
                self.loop_over(str(end), high, names, True, {})
            return
        top = self.top.lines
        top += [f"low = {low}", f"high = {high}"]
        begin = (
            "low" if whole.low is None else f"tl.minimum(tl.maximum(tl.cdiv({whole.low}, {deep}) * {deep}, low), high)"
        )
        stop = str(end) if whole.high is None else f"tl.minimum(tl.maximum({whole.high}, 0), {end}) // {deep} * {deep}"
        top += [f"begin = {begin}"]
        if whole.low is not None:
            top += [f"begin = tl.cdiv(begin, {deep}) * {deep}"]
        top += [f"stop = tl.maximum(tl.minimum({stop}, high // {deep} * {deep}), begin)"]
        if whole.low is not None:
            self.loop_over("low", "tl.minimum(begin, high)", names, size % deep != 0, {})
        self.loop_over("begin", "stop", names, False, known)
        self.loop_over("stop", "high", names, size % deep != 0, {})

    def over_listed(self, listed: ListedTiles, names: dict[Node, str], known: dict[Node, Node]) -> None:
        """Loops over the tiles that are listed: those in which all conditions hold for all elements, and others."""
        visible = listed.visible
        deep, size, count = self.tile.second, self.kernel.along.size, visible.tiles
        numbers, counts = map(self.buffer, (listed.numbers, listed.counts))
        self.top.lines += [
            f"tiles = batch // {visible.per} * {visible.rows_of_tiles} + first // {self.tile.first}",
            f"whole, some = tl.load({counts} + tiles * 2), tl.load({counts} + tiles * 2 + 1)",
        ]
        start = f"start = tl.load({numbers} + (tiles * {count} + number)) * {deep}"
        self.loop_of(["for number in range(0, whole):", start], names, False, known)
        self.loop_of([f"for number in range({count} - some, {count}):", start], names, size % deep != 0, {})

    def constant_true(self) -> Node:
        return self.kernel_graph.make("constant", (), bool8, True)

    def loop_over(self, low: str, high: str, names: dict[Node, str], is_edge: bool, known: dict[Node, Node]) -> None:
        self.loop_of([f"for start in range({low}, {high}, {self.tile.second}):"], names, is_edge, known)

    def loop_of(self, head: list[str], names: dict[Node, str], is_edge: bool, known: dict[Node, Node]) -> None:
        """A loop over tiles. head: its first lines, which say where a tile starts."""
        kernel, deep, graph = self.kernel, self.tile.second, self.kernel_graph
        self.is_edge, self.side, self.beside = is_edge, "rows", Scope(self.top)
        scope = Scope(self.top)
        at = f"tl.arange(0, {deep})" + (".to(tl.int64)" if self.is_wide else "")
        lines = [f"c = start + {at}[None, :]", f"cb = start + {at}[:, None]"]
        if is_edge:
            lines += [f"c_inside = c < {kernel.along.size}", f"cb_inside = cb < {kernel.along.size}"]
        replaced = dict(known)
        if kernel.largest is not None:
            largest, body = kernel.largest
            x = graph.replace(body, replaced) if known else body
            self.growing = {largest, *(n for s in kernel.sums.values() for n in _above(s.rows, largest))}
            value = self.tile_of(x, scope)
            if is_edge:
                value = self.emit(scope, f'tl.where(c_inside, {value}, float("-inf"))')
                scope.names[x, None] = value
            new = self.emit(scope, f"tl.maximum(h, tl.max({value}, 1)[:, None])")
            guarded = self.emit(scope, f'tl.where({new} == float("-inf"), 0.0, {new})')
            scope.names[largest, None] = guarded
            scale = self.emit(scope, f"tl.exp(h - {guarded})")
            scope.lines.append(f"h = {new}")
        values: dict[Node, tuple[str, str]] = {}
        for n, s in kernel.sums.items():
            rows = graph.replace(s.rows, replaced) if known else s.rows
            self.growing |= {*_above(rows, kernel.largest[0])} if kernel.largest is not None else set()
            value = self.tile_of(rows, scope)
            is_scaled = kernel.largest is not None and kernel.largest[0] in in_order([rows])
            if is_edge and not is_scaled:
                value = self.emit(scope, f"tl.where(c_inside, {value}, tl.full([], 0, {value}.dtype))")
            values[n] = value, f"{names[n]} * {scale}" if is_scaled else names[n]
        for n, s in kernel.sums.items():  # when inner products have read what outer ones may turn around
            value, total = values[n]
            if s.beside is None:
                scope.lines.append(f"{names[n]} = {total} + tl.sum({value}, 1)[:, None]")
                continue
            beside = self.operand_beside(s.beside, scope)
            lines_of_beside, self.beside.lines = self.beside.lines, []
            scope.lines += lines_of_beside
            scope.lines.append(f"{names[n]} = {self.product(n, value, beside, total)}")
        self.top.lines.append(head[0])
        self.top.lines += [f"    {line}" for line in (*head[1:], *lines, *scope.lines)]
        self.is_edge, self.growing = False, set()

    def tile_of(self, node: Node, scope: Scope) -> str:
        value = self.value(node, scope)
        if node.axes >= {self.kernel.row, self.kernel.along}:
            return value
        return self.emit(scope, f"tl.broadcast_to({value}, [{self.tile.first}, {self.tile.second}])")

    @property
    def kernel_graph(self):
        return self.kernel.graph


class VisibleWriter(ChainWriter):
    """Writes the function of a kernel that looks for visible tiles."""

    kernel: VisibleTiles

    def text(self, name: str) -> str:
        """The Triton function that marks each tile of a mask: hidden, in part visible, or whole."""
        kernel, tile, lines = self.kernel, self.tile, self.top.lines
        flags, deep, size = self.buffer(kernel.flags), tile.second, kernel.along.size
        lines += [
            f"rows = program // {kernel.tiles}",
            f"batch = rows // {kernel.rows_of_tiles} * {kernel.per}",
            f"x = rows % {kernel.rows_of_tiles} * {tile.first} + tl.arange(0, {tile.first})[:, None]",
            f"c = program % {kernel.tiles} * {deep} + tl.arange(0, {deep})[None, :]",
            f"x_inside, c_inside = x < {kernel.row.size}, c < {size}",
        ]
        self.is_edge = size % deep != 0
        holds = self.emit(self.top, " & ".join([self.tile_of(c, self.top) for c in kernel.conditions]))
        lines += [
            f"some = tl.max(tl.max(({holds} & x_inside & c_inside).to(tl.int32), 1), 0)",
            f"whole = tl.min(tl.min((({holds} | (x_inside == 0)) & c_inside).to(tl.int32), 1), 0)",
            f"tl.store({flags} + program, some + some * whole)",
        ]
        return self.as_function(name, "visible")

    def as_function(self, name: str, op: str) -> str:
        self.computed_ops[op] = None
        text = "\n".join(f"    {line}" for line in self.top.lines)
        return f"@triton.jit\ndef {name}({', '.join(['program', *self.buffers.values()])}):\n{text}\n"


class ListWriter(VisibleWriter):
    """Writes the function of a kernel that lists tiles."""

    kernel: ListedTiles  # type: ignore[assignment]

    def text(self, name: str) -> str:
        """The Triton function that lists the visible tiles of each row of tiles, those without a mask first."""
        kernel = self.kernel
        tiles = kernel.visible.tiles
        flags, numbers, counts = map(self.buffer, (kernel.visible.flags, kernel.numbers, kernel.counts))
        self.top.lines += [
            f"at = tl.arange(0, {power_of_two(tiles)})",
            f"flags = tl.load({flags} + program * {tiles} + at, mask=at < {tiles}, other=0)",
            "whole, some = (flags == 2).to(tl.int32), (flags == 1).to(tl.int32)",
            f"number = tl.where(flags == 2, tl.cumsum(whole, 0) - 1, {tiles} - tl.cumsum(some, 0))",
            f"tl.store({numbers} + program * {tiles} + number, at, mask=flags > 0)",
            f"tl.store({counts} + program * 2, tl.sum(whole, 0))",
            f"tl.store({counts} + program * 2 + 1, tl.sum(some, 0))",
        ]
        return self.as_function(name, "list")


def _above(root: Node, node: Node) -> list[Node]:
    """The nodes that are computed of a node."""
    result: dict[Node, None] = {node: None}
    for n in in_order([root]):
        if any(a in result for a in n.args):
            result[n] = None
    return [n for n in result if n is not node]


def _programs(kernel: ChainKernel, tile: ChainTile, interpreted: bool, wide: bool, memory: Memory) -> Programs:
    count = int(kernel.batch.size) * -(-int(kernel.row.size) // tile.first)
    return Programs(ChainWriter(kernel, tile, interpreted, wide, memory), "0", str(count))


def _visible(kernel: VisibleTiles, tile: ChainTile, interpreted: bool, wide: bool, memory: Memory) -> Programs:
    return Programs(VisibleWriter(kernel, tile, interpreted, wide, memory), "0", str(math.prod(kernel.flags.shape)))


def _listing(kernel: ListedTiles, tile: ChainTile, interpreted: bool, wide: bool, memory: Memory) -> Programs:
    return Programs(ListWriter(kernel, tile, interpreted, wide, memory), "0", str(kernel.numbers.shape[0]))


PROGRAMS |= {VisibleTiles: _visible, ListedTiles: _listing}  # which are chains as well
PROGRAMS[ChainKernel] = _programs
