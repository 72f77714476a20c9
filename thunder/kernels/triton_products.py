"""The text of a kernel of matrix products.

@triton.jit
def kernel_0(program, b0, b1, b2):
    x = ...  # the rows of a tile
    r = ...  # its columns
    p0 = tl.zeros([128, 256], tl.float32)
    for start in range(0, 4096, 64):
        ka = start + tl.arange(0, 64)[None, :]
        kb = start + tl.arange(0, 64)[:, None]
        p0 = tl.dot(tl.load(b0 + (x * 4096 + ka)), tl.load(b1 + (r * 4096 + kb)), p0)
    tl.store(b2 + (x * 4096 + r), ...)
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

from thunder.kernels.index import Index, Variable
from thunder.kernels.ir import Buffer, Node
from thunder.kernels.products import ProductKernel, ProductTile, sizes_of
from thunder.kernels.schedule import Write
from thunder.kernels.triton_cuda import PROGRAMS, Memory, Programs, Scope, Writer


class ProductWriter(Writer):
    """Writes the function of a kernel of products."""

    kernel: ProductKernel
    tile: ProductTile

    def __init__(self, kernel: ProductKernel, tile: ProductTile, interpreted: bool, wide: bool, memory: Memory):
        super().__init__(kernel, tile, interpreted, wide, memory)  # type: ignore[arg-type]
        self.batches, self.row_count, self.column_count, self.deep = sizes_of(kernel)
        self.looped = (kernel.bound,)
        self.row_ends = {}
        self.spaces = {loops: name for loops, name in zip(kernel.spaces, ("batch", "x", "r"), strict=True) if loops}
        self.masks_of = {
            "x": self.row_count % tile.first != 0, "r": self.column_count % tile.second != 0,
            "ka": self.deep % tile.deep != 0, "kb": self.deep % tile.deep != 0,
        }  # fmt: skip
        self.along = "ka"  # the contracted axis, as the second dimension of the first operand or the first of the other

    def space(self, v: Variable) -> tuple[Sequence[Variable], str]:
        if v is self.kernel.bound:
            return (v,), self.along
        return next((loops, name) for loops, name in self.spaces.items() if v in loops)

    def masks(self, axes: Iterable[Variable], buffer: Buffer | None = None, index: Index | None = None) -> list[str]:
        names = dict.fromkeys(self.space(v)[1] for v in axes)
        return [f"{name}_inside" for name in ("x", "r", "ka", "kb") if name in names and self.masks_of[name]]

    def spread(self, w: Write, axes: Container[Variable]) -> tuple[list[int], list[str]]:
        names = {name for loops, name in self.spaces.items() if any(v in axes for v in loops)}
        missing = [name for name in ("x", "r") if name not in names]
        return [self.tile.first, self.tile.second] if missing else [], [f"({name} < 1)" for name in missing]

    # -------------------------------------------------------------------------------------------- the function
    def text(self, name: str) -> str:
        """The Triton function of a product: a tile of results, a loop over the inner axis, and the fused operations
        behind it."""
        tile, lines = self.tile, self.top.lines
        lines += self.tile_lines()
        sizes = ("x", self.row_count), ("r", self.column_count)
        lines += [f"{n}_inside = {n} < {size}" for n, size in sizes if self.masks_of[n]]
        body = self.multiplied()
        lines.append(f"for start in range(0, {self.deep}, {tile.deep}):")
        lines += [f"    {line}" for line in body]
        self.write_all(self.kernel.writes, self.top)
        self.computed_ops["dot"] = None
        text = "\n".join(f"    {line}" for line in lines)
        parameters = ["program", *self.buffers.values(), *self.numbers.values()]
        return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{text}\n"

    def tile_lines(self) -> list[str]:
        """The tile of a program, as lines. Programs that follow each other read the same columns, for some rows of
        tiles, which are then in the cache."""
        tile = self.tile
        rows, columns = -(-self.row_count // tile.first), -(-self.column_count // tile.second)
        lines = ["number = program"]
        if self.batches > 1:
            batch = "program.to(tl.int64)" if self.is_wide else "program"
            lines = [f"batch = {batch} // {rows * columns}", f"number = program % {rows * columns}"]
        group = min(tile.group, rows)
        if group > 1:
            height = f"tl.minimum({rows} - number // {group * columns} * {group}, {group})"
            height = str(group) if rows % group == 0 else height
            lines += [
                f"height = {height}",
                f"row = number // {group * columns} * {group} + number % {group * columns} % height",
                f"column = number % {group * columns} // height",
            ]
        else:
            lines += [f"row = number // {columns}", f"column = number % {columns}"]
        wide = ".to(tl.int64)" if self.is_wide else ""
        return [
            *lines,
            f"x = row{wide} * {tile.first} + tl.arange(0, {tile.first})[:, None]",
            f"r = column{wide} * {tile.second} + tl.arange(0, {tile.second})[None, :]",
        ]

    def multiplied(self) -> list[str]:
        """The lines of the loop over the contracted axis. What depends on rows or columns alone is computed before."""
        tile, dots = self.tile, self.kernel.dots
        first, second, products = Scope(self.top), Scope(self.top), []
        for number, (dot, (a, b)) in enumerate(dots.items()):
            name = f"p{number}"
            self.top.lines.append(f"{name} = tl.zeros([{tile.first}, {tile.second}], tl.float32)")
            self.top.names[dot, None] = name
            operands = [self.operand(a, first, "ka"), self.operand(b, second, "kb")]
            if self.interpreted:  # which takes the bits of 16-bit floats for integers
                operands = [f"{x}.to(tl.float32)" for x in operands]
            precision = f', input_precision="{"tf32" if dot.what[1] else "ieee"}"' if a.dtype.bytes == 4 else ""
            products.append(f"{name} = tl.dot({', '.join(operands)}, {name}{precision})")
        wide = "tl.arange(0, {}).to(tl.int64)" if self.is_wide else "tl.arange(0, {})"
        at = wide.format(tile.deep)
        lines = [f"ka = start + {at}[None, :]", f"kb = start + {at}[:, None]"]
        lines += [f"{n}_inside = {n} < {self.deep}" for n in ("ka", "kb") if self.masks_of[n]]
        return [*lines, *first.lines, *second.lines, *products]

    def operand(self, node: Node, scope: Scope, along: str) -> str:
        """The name of an operand's tile."""
        self.along = along
        value, tile = self.value(node, scope), self.tile
        shape = [tile.first, tile.deep] if along == "ka" else [tile.deep, tile.second]
        names = {self.space(v)[1] for v in node.axes}
        if not names >= ({"x", along} if along == "ka" else {"r", along}):
            value = self.emit(scope, f"tl.broadcast_to({value}, {shape})")
        plain = node.args[0] if node.op == "cast" else node
        if self.masks_of[along] and (plain.op != "load" or self.kernel.bound not in plain.axes):
            zero = f"tl.full([], 0, {value}.dtype)"
            value = self.emit(scope, f"tl.where({along}_inside, {value}, {zero})")
        return value


def _programs(kernel: ProductKernel, tile: ProductTile, interpreted: bool, wide: bool, memory: Memory) -> Programs:
    batches, rows, columns, _ = sizes_of(kernel)
    count = math.prod((batches, -(-rows // tile.first), -(-columns // tile.second)))
    return Programs(ProductWriter(kernel, tile, interpreted, wide, memory), "0", str(count))


PROGRAMS[ProductKernel] = _programs
