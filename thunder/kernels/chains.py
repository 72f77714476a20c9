"""The schedule of chains of matrix products on a GPU, as attention and its gradients: a product of an operand that is
computed of other products.

    out[m, d] = sum over c of f(sum over r of q[m, r] k[c, r]) v[c, d]

A program has a tile of rows (m), and loops over tiles of the chained axis (c): it computes a tile of the inner
products, what the program computes of it, and adds the outer product up. A maximum along the chained axis, which a
softmax subtracts, is the one so far: sums of exponentials are rescaled where it grows (M. Milakov and N. Gimelshein
2018, "Online normalizer calculation for softmax"; T. Dao et al. 2022, "FlashAttention").

Where a value is `where(condition, value, -inf)`, or 0 where the condition does not hold, the loop runs over the tiles
for which a condition of indices can hold, and computes the condition only where it does not hold for a whole tile. Of
a condition that reads memory, as of documents that a sequence has, a kernel before lists these tiles in each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from thunder.core.dtypes import int32
from thunder.kernels.accesses import touched
from thunder.kernels.index import Index, Variable, split
from thunder.kernels.ir import BINDERS, Buffer, Combine, Graph, Node, Program, Store, axis, in_order, offset, replaced
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    Kernel,
    TooComplex,
    Write,
    above_reductions,
    divisor_of,
    offset_of,
)
from thunder.kernels.tiles import instructions

WIDEST = 256  # elements of a dimension that a program has whole
SLOWER = 1.6  # than a product alone: a chain also computes exponentials, and the tensor cores wait for them
VISIBLE = 0.55  # of the elements for which conditions of indices hold, about
LISTING = 0.3  # of the time of a chain that listing its tiles may take


class ChainTile(NamedTuple):
    """first, second: rows, and elements of the chained axis; warps, stages: as of a product. is_whole, steps: as of
    other tiles."""

    first: int
    second: int
    warps: int
    stages: int
    is_whole: bool = True
    steps: int = 1


class Sum(NamedTuple):
    """What is added up along the chained axis. rows: its value, or the operand of a product with inner products;
    beside: the other operand, over the chained axis and columns."""

    rows: Node
    beside: Node | None = None
    columns: Variable | None = None


class ChainKernel(Kernel):
    """batch, row: the loops of a program. along: the chained axis. sums: what is added up, by the node that writes
    read. largest: the maximum along the chained axis, and its body. conditions: without any of which all that is added
    up is 0. listed: the kernel that lists the tiles in which conditions hold."""

    def __init__(self, graph: Graph, batch: Variable, row: Variable, along: Variable, columns: Sequence[Variable]):
        super().__init__((batch, row, *columns), 2)
        self.graph = graph
        self.batch, self.row, self.along, self.widths = batch, row, along, tuple(columns)
        self.sums: dict[Node, Sum] = {}
        self.largest: tuple[Node, Node] | None = None
        self.conditions: list[Node] = []
        self.listed: ListedTiles | None = None


class VisibleTiles(ChainKernel):
    """In which tiles of a chain all conditions hold: a program has a tile, of which it writes to `flags` whether they
    hold for no element (0), for some (1), or for all (2).

    per: how many neighbours in the batch have the same tiles."""

    def __init__(self, chain: ChainKernel, tile: ChainTile, number: int, strides: Mapping[Buffer, Sequence[int]]):
        super().__init__(chain.graph, chain.batch, chain.row, chain.along, ())
        self.conditions, batch = chain.conditions, chain.batch
        self.per = batch.size
        for c in self.conditions:
            if batch in c.axes:
                self.per = math.gcd(self.per, divisor_of(c, batch)[0])
        self.rows_of_tiles, self.tiles = -(-self.row.size // tile.first), -(-self.along.size // tile.second)
        self.flags = Buffer("scratch", number, (batch.size // self.per * self.rows_of_tiles, self.tiles), int32)
        self.loads = {n: offset_of(n, strides) for n in in_order(self.conditions) if n.op == "load"}


class ListedTiles(ChainKernel):
    """The numbers of visible tiles, from their flags. A program has a tile of rows: to `numbers` it writes those in
    which conditions hold for all elements from the front on, and others from the end on; to `counts` how many there
    are of each."""

    def __init__(self, visible: VisibleTiles):
        super().__init__(visible.graph, visible.batch, visible.row, visible.along, ())
        programs, tiles = visible.flags.shape
        self.visible = visible
        self.numbers = Buffer("scratch", visible.flags.number + 1, (programs, tiles), int32)
        self.counts = Buffer("scratch", visible.flags.number + 2, (programs, 2), int32)


def has_chains(program: Program) -> bool:
    """Whether a program has products of what is computed of products."""
    dots = [n for n in in_order(s.value for s in program.stores) if n.op == "dot"]
    return any(m.op == "dot" for n in dots for m in in_order(n.args))


# ------------------------------------------------------------------------------------------------ from the program


class _Chain(NamedTuple):
    """A store whose axes are loops, and what it adds up."""

    store: Store
    value: Node
    loops: tuple[Variable, Variable, Variable, tuple[Variable, ...]]
    sums: dict[Node, Sum]
    largest: tuple[Node, Node] | None
    index: tuple[Index, ...]
    inner: frozenset[Node]


def kernels_of(program: Program, strides: Mapping[Buffer, Sequence[int]]) -> list[ChainKernel]:
    """The kernels of a program: what has the same rows, and the same inner products, is one. Raises TooComplex."""
    graph = program.graph
    groups: list[list[_Chain]] = []
    for store in program.stores:
        chain = _chain(graph, store)
        own = next((g for g in groups if g[0].loops[:3] == chain.loops[:3] and g[0].inner & chain.inner), None)
        if own is None:
            groups.append([chain])
        else:
            own.append(chain)
    return [_kernel(graph, those, strides) for those in groups]


def _chain(graph: Graph, store: Store) -> _Chain:
    """A store with its axes as loops, and what it adds up. Raises TooComplex."""
    if store.scan is not None or store.scatter is not None or store.buffer.kind != "output":
        raise TooComplex("a chain beside a scan or a scatter")
    value = _with_factors_outside(graph, store.value)
    binders = [n for n in above_reductions(value) if n.op in BINDERS]
    sizes = {_bound_of(n).size for n in binders}
    if len(sizes) != 1:
        raise TooComplex("what is chained has several sizes")
    batch, rows, columns = _spaces(store, binders)
    if any(v.size != 1 and v not in (*batch, *rows, *columns) for v in store.axes):
        raise TooComplex("a chain is repeated")
    names = ("batch", batch), ("row", rows), ("column", columns)
    own = [axis("l", name, math.prod(v.size for v in axes)) for name, axes in names]
    along = axis("l", "along", sizes.pop())
    by: dict[Variable, Index] = {}
    for loop, (_, axes) in zip(own, names, strict=True):
        by |= dict(zip(axes, split(Index.of(loop), [v.size for v in axes]), strict=True))
    value = graph.substitute(value, by)
    sums, largest = _sums_of(graph, value, along, own[2])
    index = tuple(replaced(i, by) for i in store.index)
    roots = [s.rows for s in sums.values()] + ([largest[1]] if largest is not None else [])
    inner = frozenset(m for m in in_order(roots) if m.op == "dot")
    if any(_has_products(a) for m in inner for a in m.args):
        raise TooComplex("chains of more than two products")
    columns_of = (own[2],) if any(s.beside is not None for s in sums.values()) else ()
    return _Chain(store, value, (own[0], own[1], along, columns_of), sums, largest, index, inner)


def _sums_of(
    graph: Graph, value: Node, along: Variable, columns: Variable
) -> tuple[dict[Node, Sum], tuple[Node, Node] | None]:
    """What a value adds up along the chained axis, and the maximum along it."""
    sums: dict[Node, Sum] = {}
    largest = None
    for n in dict.fromkeys(n for n in above_reductions(value) if n.op in BINDERS):
        bodies = [graph.substitute(a, {_bound_of(n): Index.of(along)}) for a in n.args]
        if n.op == "dot":
            bodies.sort(key=lambda b: not _has_products(b))
            sums[n] = Sum(bodies[0], bodies[1], columns)
        elif n.op == "reduce" and n.what[0] == Combine.SUM:
            sums[n] = Sum(bodies[0])
        elif n.op == "reduce" and n.what[0] == Combine.AMAX:
            largest = n, bodies[0]
        else:
            raise TooComplex("a chain with another reduction")
    inside = [m for s in sums.values() for m in in_order([s.rows]) if m.op in ("reduce", "scan")]
    for n in dict.fromkeys(inside):
        is_other = largest is not None and largest[0] is not n
        if n.op != "reduce" or n.what[0] != Combine.AMAX or len(n.what[1]) != 1 or is_other:
            raise TooComplex("a chain within a reduction")
        largest = n, graph.substitute(n.args[0], {n.what[1][0]: Index.of(along)})
    if not all(_is_rescaled(s.rows, largest[0]) for s in sums.values() if largest is not None):
        raise TooComplex("what is added up is no exponential of a difference from the largest")
    return sums, largest


def _bound_of(n: Node) -> Variable:
    if n.op == "dot":
        return n.what[0]
    if n.op != "reduce" or len(n.what[1]) != 1:
        raise TooComplex("a reduction of several axes")
    return n.what[1][0]


def _has_products(node: Node) -> bool:
    return any(m.op == "dot" for m in in_order([node]))


def _spaces(store: Store, binders: Sequence[Node]) -> tuple[list[Variable], list[Variable], list[Variable]]:
    """The axes of a store: those of both operands of inner products, of rows, and of columns."""
    bound = {_bound_of(n) for n in binders}
    inner = [m for n in binders for m in in_order(n.args) if m.op == "dot"]
    if not inner:
        raise TooComplex("a result of no chain")
    batch = {v for m in inner for v in m.args[0].axes & m.args[1].axes} - {m.what[0] for m in inner}
    rows, columns = set[Variable](), set[Variable]()
    for n in binders:
        for a in n.args:
            (rows if n.op == "reduce" or _has_products(a) else columns).update(a.axes)
    batch |= rows & columns
    batch -= bound
    spaces = batch, rows - batch - bound, columns - batch - bound
    order = {v: i for i, v in enumerate(store.axes)}
    if any(v not in order for space in spaces for v in space):
        raise TooComplex("a chain has other axes than its result")
    first, second, third = (sorted(space, key=order.__getitem__) for space in spaces)
    return first, second, third


def _with_factors_outside(graph: Graph, value: Node) -> Node:
    """A value in which outer products are of what depends on the chained axis alone: what multiplies or divides a whole
    row does so behind the product."""
    by: dict[Node, Node] = {}
    for dot in [n for n in above_reductions(value) if n.op == "dot"]:
        number = next((i for i, a in enumerate(dot.args) if _has_products(a)), None)
        if number is None:
            raise TooComplex("a product beside a chain")
        node, bound, outside = dot.args[number], dot.what[0], list[tuple[str, list[Node | None]]]()
        while True:
            changing = [a for a in node.args if bound in a.axes]
            if node.op == "cast" and node.args[0].dtype.category == node.dtype.category:
                node = node.args[0]
            elif len(changing) == 1 and _is_linear(node, changing[0]):
                outside.append((node.op, [None if a is changing[0] else a for a in node.args]))
                node = changing[0]
            else:
                break
        args = [*dot.args]
        args[number] = graph.make("cast", (node,), dot.args[0].dtype) if node.dtype is not dot.args[0].dtype else node
        result = graph.make("dot", args, dot.dtype, dot.what)
        for op, operands in reversed(outside):
            result = graph.make(op, [result if a is None else a for a in operands], result.dtype)
        by[dot] = result
    return graph.replace(value, by)


def _is_linear(node: Node, operand: Node) -> bool:
    """Whether a value is a multiple of an operand."""
    if node.op == "mul" or node.op == "neg":
        return True
    if node.op == "true_divide":
        return node.args[0] is operand
    others = [a for a in node.args[1:] if a is not operand]
    return (
        node.op == "where" and node.args[0] is not operand and all(a.op == "constant" and a.what == 0 for a in others)
    )


def _is_rescaled(rows: Node, largest: Node) -> bool:
    """Whether something that is added up is the exponential of a difference from the largest, or does not read it."""
    node = rows.args[0] if rows.op == "cast" else rows
    if largest not in in_order([node]):
        return True
    if node.op != "exp" or node.args[0].op != "sub":
        return False
    x, shift = node.args[0].args
    return largest not in in_order([x]) and not any(n.op == "dot" for n in above_reductions(shift))


def _kernel(graph: Graph, chains: Sequence[_Chain], strides: Mapping[Buffer, Sequence[int]]) -> ChainKernel:
    """The kernel of chains of products that share their loops. Raises TooComplex where they disagree."""
    batch, row, along, _ = chains[0].loops
    columns = dict.fromkeys(v for c in chains for v in c.loops[3])
    kernel = ChainKernel(graph, batch, row, along, [*columns])
    largest = {c.largest[0]: c.largest for c in chains if c.largest is not None}
    if len(largest) > 1:
        raise TooComplex("several maxima of one row")
    kernel.largest = next(iter(largest.values()), None)
    for c in chains:
        kernel.sums |= c.sums
        kernel.writes.append(Write(c.store.buffer, offset(c.index, strides[c.store.buffer]), c.value))
    roots = [*(w.value for w in kernel.writes), *_roots(kernel)]
    kernel.loads = {n: offset_of(n, strides) for n in in_order(roots) if n.op == "load"}
    zero = [set(_conditions_of_zero(s.rows)) for s in kernel.sums.values()]
    kernel.conditions = [n for n in in_order(_roots(kernel)) if all(n in those for those in zero)]
    widths = [v.size for v in columns] + [m.what[0].size for m in inner_of(kernel)]
    if not all(2 <= n <= WIDEST for n in widths):
        raise TooComplex("a dimension that programs have whole is too wide, or none")
    return kernel


def _roots(kernel: ChainKernel) -> list[Node]:
    """What a kernel computes for each element of the chained axis."""
    roots = [n for s in kernel.sums.values() for n in (s.rows, s.beside) if n is not None]
    return roots + ([kernel.largest[1]] if kernel.largest is not None else [])


def inner_of(kernel: ChainKernel) -> list[Node]:
    """The inner products."""
    return [n for n in in_order(_roots(kernel)) if n.op == "dot"]


# ------------------------------------------------------------------------------------------------ conditions


def _conditions_of_zero(n: Node) -> list[Node]:
    """Conditions of which each has to hold for a value to be other than 0."""
    if n.op in ("cast", "neg"):
        return _conditions_of_zero(n.args[0])
    if n.op == "exp":
        return _conditions_of_infinity(n.args[0])
    if n.op == "mul":
        return [c for a in n.args for c in _conditions_of_zero(a)]
    if n.op == "true_divide":
        return _conditions_of_zero(n.args[0])
    if n.op in ("add", "sub"):
        first, second = map(_conditions_of_zero, n.args)
        return [c for c in first if c in second]
    return _conditions_of_where(n, 0, _conditions_of_zero)


def _conditions_of_infinity(n: Node) -> list[Node]:
    """Conditions of which each has to hold for a value to be other than -inf."""
    if n.op in ("cast", "sub"):
        return _conditions_of_infinity(n.args[0])
    if n.op == "add":
        return [c for a in n.args for c in _conditions_of_infinity(a)]
    return _conditions_of_where(n, -math.inf, _conditions_of_infinity)


def _conditions_of_where(n: Node, number: float, inside: Callable[[Node], list[Node]]) -> list[Node]:
    """Conditions for a choice between a number and a value to be other than the number."""
    if n.op != "where":
        return []
    condition, first, second = n.args
    if second.op == "constant" and second.what == number:
        return [condition, *inside(first)]
    return inside(second) if first.op == "constant" and first.what == number else []


class Range(NamedTuple):
    """Elements of the chained axis: from a number, and up to one that is outside, as texts; None for all."""

    low: str | None = None
    high: str | None = None

    def __and__(self, other: Range) -> Range:
        return Range(_both("maximum", self.low, other.low), _both("minimum", self.high, other.high))

    def __or__(self, other: Range) -> Range:
        low = None if self.low is None or other.low is None else f"tl.minimum({self.low}, {other.low})"
        high = None if self.high is None or other.high is None else f"tl.maximum({self.high}, {other.high})"
        return Range(low, high)


NOTHING = Range("0", "0")


def _both(name: str, a: str | None, b: str | None) -> str | None:
    return b if a is None else a if b is None else f"tl.{name}({a}, {b})"


def ranges_of(condition: Node, kernel: ChainKernel) -> tuple[Range, Range]:
    """For the rows from `first` to `last`: outside of which elements a condition holds for no row, and elements for
    which it holds for all."""
    if condition.op in ("logical_and", "bitwise_and"):
        (a, whole_a), (b, whole_b) = (ranges_of(c, kernel) for c in condition.args)
        return a & b, whole_a & whole_b
    if condition.op in ("logical_or", "bitwise_or"):
        (a, whole_a), (b, whole_b) = (ranges_of(c, kernel) for c in condition.args)
        is_of_rows = any((d := _difference(c, kernel)) and kernel.along not in d.terms for c in condition.args)
        if is_of_rows or None in (whole_a.low or whole_b.low, whole_a.high or whole_b.high):
            return a | b, whole_a | whole_b
        return a | b, whole_b if whole_a == NOTHING else whole_a
    apart = _difference(condition, kernel)
    if apart is None:
        return Range(), NOTHING
    step, by_row = apart.terms.get(kernel.along, 0), apart.terms.get(kernel.row, 0)
    ends = [f"{by_row} * {name} + {apart.constant}" for name in ("first", "last")]
    if step == 0:  # all elements of a row, or none
        least, most = ends if by_row >= 0 else ends[::-1]
        some, each = (f"tl.where({n} >= 0, {{}}, {{}})" for n in (most, least))
        size = kernel.along.size
        return Range(some.format(0, size), some.format(size, 0)), Range(each.format(0, size), each.format(size, 0))
    if step == -1:  # up to the end of a row
        least, most = ends if by_row >= 0 else ends[::-1]
        return Range(None, f"({most} + 1)"), Range(None, f"({least} + 1)")
    least, most = ends[::-1] if by_row >= 0 else ends  # from its negative on
    return Range(f"(-({least}))"), Range(f"(-({most}))")


def _difference(condition: Node, kernel: ChainKernel) -> Index | None:
    """What is not negative where a comparison of indices holds, by the row and the chained axis; None for others."""
    if condition.op not in ("ge", "gt", "le", "lt"):
        return None
    first, second = (affine(a) for a in condition.args)
    if first is None or second is None:
        return None
    larger, smaller = (first, second) if condition.op in ("ge", "gt") else (second, first)
    apart = larger + smaller * -1 + (-1 if condition.op in ("gt", "lt") else 0)
    is_known = not set(apart.terms) - {kernel.along, kernel.row}
    is_known &= apart.terms.get(kernel.along, 0) in (0, 1, -1) and isinstance(apart.terms.get(kernel.row, 0), int)
    return apart if is_known and apart.terms else None


def _is_of_ranges(condition: Node, kernel: ChainKernel) -> bool:
    """Whether `ranges_of` knows all of a condition."""
    if condition.op in ("logical_and", "bitwise_and", "logical_or", "bitwise_or"):
        return all(_is_of_ranges(c, kernel) for c in condition.args)
    return _difference(condition, kernel) is not None


def affine(n: Node) -> Index | None:
    if n.op == "index":
        return n.what
    if n.op == "constant" and isinstance(n.what, int):
        return Index.of(n.what)
    if n.op in ("add", "sub"):
        a, b = map(affine, n.args)
        return None if a is None or b is None else a + b * (1 if n.op == "add" else -1)
    return affine(n.args[0]) if n.op == "cast" and n.dtype.name == "int64" else None


# ------------------------------------------------------------------------------------------------ cost


def multiply_adds(kernel: ChainKernel, tile: ChainTile) -> int:
    """Those of whole tiles."""
    rows, along = (-(-v.size // n) * n for v, n in ((kernel.row, tile.first), (kernel.along, tile.second)))
    scores = kernel.batch.size * rows * along
    widths = [m.what[0].size for m in inner_of(kernel)]
    widths += [s.columns.size for s in kernel.sums.values() if s.columns is not None]
    return scores * sum(widths)


def scheduled(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu
) -> list[tuple[ChainKernel, ChainTile]]:
    """The kernels of a program, with their tiles. Raises TooComplex."""
    result: list[tuple[ChainKernel, ChainTile]] = []
    for kernel in kernels_of(program, strides):
        tile = tiles_of(kernel)[0]
        moved = sum(touched(n) * n.dtype.bytes for n in kernel.loads)
        kernel.bytes = moved + sum(math.prod(w.buffer.shape) * w.buffer.dtype.bytes for w in kernel.writes)
        part = VISIBLE if any(ranges_of(c, kernel)[0] != Range() for c in kernel.conditions) else 1.0
        kind = inner_of(kernel)[0].args[0].dtype.name
        work = multiply_adds(kernel, tile) * machine.dot["tf32" if inner_of(kernel)[0].what[1] else kind] * SLOWER
        work /= machine.share(kernel.batch.size * -(-kernel.row.size // tile.first) * tile.warps)
        kernel.seconds = machine.launch + max(part * work, machine.moving(kernel.bytes))
        if any(not _is_of_ranges(c, kernel) for c in kernel.conditions):
            visible = VisibleTiles(kernel, tile, 3 * len(result), strides)
            listed = ListedTiles(visible)
            memory = math.prod(visible.flags.shape) * visible.flags.dtype.bytes
            visible.bytes, listed.bytes = memory + sum(touched(n) * n.dtype.bytes for n in visible.loads), 2 * memory
            visible.seconds, listed.seconds = _seconds_of_conditions(visible, tile, machine), machine.launch
            if visible.seconds + listed.seconds < LISTING * kernel.seconds:
                kernel.listed = listed
                result += [(visible, tile), (listed, tile)]
        result.append((kernel, tile))
    return result


def _seconds_of_conditions(kernel: VisibleTiles, tile: ChainTile, machine: Gpu) -> float:
    """Seconds for the conditions of all elements, and to count those of a tile that hold."""
    each = instructions(n for n in in_order(kernel.conditions) if {kernel.row, kernel.along} <= n.axes) + 4
    programs = math.prod(kernel.flags.shape)
    work = programs * tile.first * tile.second * each * machine.instruction
    return machine.launch + work / machine.share(programs * tile.warps)


def tiles_of(kernel: ChainKernel) -> list[ChainTile]:
    """Tiles, the one first that is usually fastest: as many sums as registers hold."""
    widest = max([s.columns.size for s in kernel.sums.values() if s.columns is not None] + [16])
    count = sum(s.beside is not None for s in kernel.sums.values())
    few = kernel.row.size <= 64
    if kernel.largest is not None:
        tiles = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 3)]
    elif count > 1:
        tiles = [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 8, 2)]
        tiles = tiles if widest <= 64 else [tiles[1], tiles[0], *tiles[2:]]
    else:
        tiles = [(64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3), (128, 32, 4, 3), (64, 128, 4, 2)]
        tiles = tiles if widest <= 64 else [tiles[1], tiles[0], *tiles[2:]]
    size = inner_of(kernel)[0].args[0].dtype.bytes
    if size == 4 or widest > 128:
        tiles = [(64, 32, 4, 2), (32, 32, 4, 2), (64, 64, 8, 2)]
    if few:
        tiles = [(max(16, 1 << (kernel.row.size - 1).bit_length()), 64, 4, 3)]
    return [ChainTile(*t) for t in tiles]


def alternatives(kernel: ChainKernel, tile: ChainTile) -> list[ChainTile]:
    is_listed = kernel.listed is not None or isinstance(kernel, (VisibleTiles, ListedTiles))  # for this tile
    return [other for other in tiles_of(kernel) if other != tile] if not is_listed else []
