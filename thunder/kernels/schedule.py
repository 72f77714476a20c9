"""Which loops compute what: from a program of the IR to kernels.

Each store and each reduction of a program has a space: the axes that it runs over, the fastest in memory last. Items of
one space that read the same memory become one kernel. A kernel runs over rows: its outer loops are threads', its inner
loops, the sweep, run once for each level of row reductions. A reduction over outer loops is added up in memory of each
thread and combined at the end, so that what reads it is in a later kernel.

The cost of a kernel is what a `Machine` takes for its bytes, operations and launches. It decides whether a value that
several kernels need is stored or recomputed, and whether a region is left to PyTorch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from thunder.core.dtypes import FLOAT, dtype
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Part, Variable, opened, strides_of
from thunder.kernels.ir import (
    BINDERS,
    Buffer,
    Combine,
    Graph,
    Node,
    Program,
    Scatter,
    Store,
    axis,
    in_order,
    index_text,
    line,
    offset,
    reads_inside,
    replaced,
    variables_of,
)
from thunder.kernels.machine import Machine
from thunder.kernels.sizes import Extent, Undecided, at_least, common, divides, exact, hint, largest, least

LINE, PAGE = 64, 4096  # bytes of a line of a cache, and of all sets of a first one
LEAST_VECTOR = 8  # elements of a loop that is worth vectors
Size = int | Extent
MOST_ACCUMULATED = 1 << 22  # bytes that a thread adds up; more would not be in a cache


class TooComplex(Exception):
    """Raised for a program that no kernels are made for, with the reason."""


# ------------------------------------------------------------------------------------------------ items


class Item:
    """A store, or a reduction. axes: ordered, of the space; by: the index of each axis of the program in terms of
    these."""

    def __init__(self, node: Node, free: Sequence[Variable], bound: Sequence[Variable], store: Store | None):
        self.node, self.store = node, store
        self.free, self.bound = tuple(free), tuple(bound)
        self.scan = None if store is None else store.scan
        self.is_scatter = store is not None and store.scatter is not None
        self.body = node if store is not None else node.args[0]
        self.reductions = [n for n in above_reductions(self.body) if n.op in BINDERS]
        # of a scan's node, the axis along which it is read: in a kernel, its own element
        self.along = next(iter(variables_of(node.what[2]))) if store is None and node.op == "scan" else None
        self.buffers = {n.what[0] for n in above_reductions(self.body) if n.op == "load"}
        self.buffers |= {store.buffer} if store is not None and store.scatter is not None else set()
        self.scratch: Buffer | None = None  # of a reduction that other kernels read
        self.group = -1
        self.axes: list[Variable] = []
        self.by: dict[Variable, Index] = {}
        self._own_bound: set[Variable] = set()

    def lay_out(self, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> None:
        """Splits axes until indices are linear in them, and orders these."""
        loads = [n for n in in_order([self.body]) if n.op == "load"]
        axes = [a for a in (*self.free, *self.bound) if a.size != 1 and a is not self.along]
        self.by = {a: Index.of(a) for a in (*self.free, *self.bound)}
        if self.along is not None:
            self.by[self.along] = Index.of(self.bound[0])
        indices = [i for n in loads for i in n.what[1]]
        while (part := _part_of_axis(indices, axes)) is not None:
            a, n = part
            high, low = axis("s", (a.name, n, 0), exact(a.size, n)), axis("s", (a.name, n, 1), n)
            there = {a: Index.of(high) * n + Index.of(low)}
            axes[axes.index(a) : axes.index(a) + 1] = [high, low]
            indices = [replaced(i, there) for i in indices]
            self.by = {b: replaced(i, there) for b, i in self.by.items()}
        top = {n for n in above_reductions(self.body) if n.op == "load"} or set(loads)
        accesses = [(_steps(n, self.by, strides), elements(n.axes)) for n in loads if n in top]
        if self.store is not None:
            own, count = [replaced(i, self.by) for i in self.store.index], elements(self.store.axes)
            accesses.append((_terms(offset(own, strides[self.store.buffer])), 2 * count))
        self.axes = _in_memory_order(axes, accesses)
        self.axes = self._with_scan_last(self.axes)
        self._own_bound = {v for b in self.bound for v in self.by[b].terms if isinstance(v, Variable)}

    def _with_scan_last(self, axes: list[Variable]) -> list[Variable]:
        """The axes in an order in which a scan has one element after the other."""
        if self.scan is None or self.store is None:
            return axes
        along = self.by[self.store.axes[self.scan[1]]].terms
        last = sorted((a for a in axes if a in along), key=lambda a: -hint(along[a]))
        return [a for a in axes if a not in along] + last

    @property
    def sizes(self) -> list[Size]:
        return [a.size for a in self.axes]

    @property
    def total(self) -> Size:
        return math.prod(self.sizes)

    @property
    def cuts(self) -> set[Size]:
        """The products of the sizes of the last axes."""
        return {*accumulate(reversed(self.sizes), operator.mul, initial=1)}

    @property
    def row(self) -> Size | None:
        """For a reduction over the last axes, of more than one row, and for a scan: the elements of a row."""
        if self.scan is not None and self.store is not None:
            return self.store.axes[self.scan[1]].size
        if self.store is not None:
            return None
        last = 0
        while last < len(self.axes) and self.axes[-1 - last] in self._own_bound:
            last += 1
        width = math.prod(self.sizes[len(self.axes) - last :])
        return width if last == len(self._own_bound) and width != self.total else None


def above_reductions(node: Node) -> list[Node]:
    """The nodes that a node is computed from, reductions and scans among them, but not what these are made of."""
    order: dict[Node, None] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in order:
            order[n] = None
            if n.op not in BINDERS:
                stack += n.args
    return [*order]


def elements(loops: Iterable[Variable]) -> int:
    """How many elements there are, as sizes are when kernels are made."""
    return hint(math.prod(v.size for v in loops))


def _part_of_axis(indices: Iterable[Index], axes: Sequence[Variable]) -> tuple[Variable, Size] | None:
    """An axis that an index divides, and by what."""
    for index in indices:
        stack = [a for a in index.terms if isinstance(a, Part)]
        while stack:
            part = stack.pop()
            stack += [a for a in part.index.terms if isinstance(a, Part)]
            if part.remainder is None:
                continue
            terms = part.index.terms
            if len(terms) == 1 and not part.index.constant:
                ((a, factor),) = terms.items()
                if isinstance(a, Variable) and factor == 1 and a in axes and divides(part.by, a.size):
                    return a, part.by
    return None


def _terms(index: Index) -> dict[Variable, Size]:
    return {a: f for a, f in index.terms.items() if isinstance(a, Variable)}


def _steps(load: Node, by: Mapping[Variable, Index], strides: Mapping[Buffer, Sequence[int]]) -> dict[Variable, Size]:
    buffer, index, _ = load.what
    return _terms(opened(offset([replaced(i, by) for i in index], strides[buffer])))


def _in_memory_order(
    axes: Sequence[Variable], accesses: Sequence[tuple[Mapping[Variable, Size], int]]
) -> list[Variable]:
    """Axes from the slowest to the fastest, by a vote of the accesses, which are weighed by their elements."""
    position = {a: i for i, a in enumerate(axes)}

    def compare(a: Variable, b: Variable) -> float:
        votes = 0
        for step, weight in accesses:
            x, y = abs(hint(step.get(a, 0))), abs(hint(step.get(b, 0)))
            if x and y and x != y:
                votes += weight if x < y else -weight
            elif bool(x) != bool(y) and max(x, y) == 1:  # read in order along one, and not at all along the other
                votes += weight if x == 1 else -weight
        return votes or position[a] - position[b]

    return sorted(axes, key=functools.cmp_to_key(compare))


# ------------------------------------------------------------------------------------------------ groups


class Group:
    """Items that become one kernel. total: elements of their space; cuts: where its loops are cut, as products of the
    last sizes; row: elements of a row, where rows are reduced."""

    def __init__(self, item: Item):
        self.items: list[Item] = []
        self.total: Size = item.total
        self.cuts: set[Size] = {1}
        self.row: Size | None = None
        self.add(item)

    def add(self, item: Item) -> None:
        self.cuts, self.row = self._joined(item)  # type: ignore[misc]
        self.items.append(item)

    def _joined(self, item: Item) -> tuple[set[Size], Size | None] | None:
        """How axes are cut where an item joins the group, and the elements of a row; None where it does not fit."""
        scale: Size = 1
        if item.total != self.total:
            if item.store is None or self.row is None or item.total * self.row != self.total:
                return None
            scale = self.row  # an item of rows
        cuts = self.cuts | {c * scale for c in item.cuts}
        row = item.row if self.row is None else self.row
        if item.row is not None and item.row != row:
            return None
        if row is not None:
            cuts = cuts | {row}
        products = _chain(cuts)
        divisible = all(divides(a, b) for a, b in zip(products, products[1:], strict=False))
        return (cuts, row) if divisible and products[-1] == self.total else None

    def mappings(self) -> dict[Item, dict[Variable, Index]]:
        """For each item, its axes in terms of the loops."""
        return {i: mapping(i, self.cuts, self.total, self.row) for i in self.items}

    def takes(self, item: Item, reductions: Reductions, number: int, graph: Graph) -> list[Variable] | None:
        """The order of an item's axes in which it can be one of the group's; None where it cannot: one thread alone
        runs a scatter."""
        joined = self._joined(item)
        if joined is None or item.is_scatter or any(i.is_scatter for i in self.items):
            return None
        shared = {b for i in self.items for b in i.buffers} & item.buffers
        inside = {n: r for n in item.reductions if (r := reductions.item[n]).group == number}
        if not shared and not inside:
            return None
        cuts, row = joined
        if any(r.row is None for r in inside.values()):
            return None
        is_same = all(
            graph.substitute(n, mapping(item, cuts, self.total, row))
            is graph.substitute(r.node, of_free(r, mapping(r, cuts, self.total, row)))
            for n, r in inside.items()
        )
        return item.axes if is_same else None


def _chain(cuts: set[Size]) -> list[Size]:
    """Products in an order in which each can divide the next one."""
    return sorted(cuts, key=lambda n: (hint(n), 0 if isinstance(n, int) else max(map(len, n.terms))))


def loops_of(cuts: set[Size]) -> list[Variable]:
    products = _chain(cuts)[::-1]
    if len(products) == 1:
        return [axis("l", 0, 1)]  # one element
    return [axis("l", i, exact(a, b)) for i, (a, b) in enumerate(zip(products, products[1:], strict=False))]


def mapping(item: Item, cuts: set[Size], total: Size, row: Size | None) -> dict[Variable, Index]:
    """The index of each axis of an item's nodes in terms of a kernel's loops."""
    loops = loops_of(cuts)
    scale = exact(total, item.total)
    position = {n: number for number, n in enumerate(_chain(cuts))}
    after, inner = {}, total
    for loop in loops:
        inner = exact(inner, loop.size)
        after[loop] = inner
    own: dict[Variable, Index] = {}
    outer = item.total * scale
    for a in item.axes:
        inner = exact(outer, a.size)
        index = Index.of(0)
        for loop in loops:
            if position[inner] <= position[after[loop]] < position[outer]:
                index = index + Index.of(loop) * exact(after[loop], inner)
        own[a] = index
        outer = inner
    return {a: replaced(i, own) for a, i in item.by.items()}


def of_free(item: Item, by: Mapping[Variable, Index]) -> dict[Variable, Index]:
    """What an item's node, which binds its own axes, is at."""
    return {a: index for a, index in by.items() if a not in item.bound}


# ------------------------------------------------------------------------------------------------ kernels


class Write:
    """A store of a kernel. index: the distance in elements from the buffer's start. scan: how it is combined with the
    values before it in its row; None where it is not. scatter: of a scatter, by indices that are operands of the value.
    is_of_rows: whether it is for each row of a kernel whose sweep is another."""

    __slots__ = ("buffer", "index", "value", "scan", "scatter", "is_of_rows")

    def __init__(
        self,
        buffer: Buffer,
        index: Index,
        value: Node,
        scan: Combine | None = None,
        scatter: Scatter | None = None,
        is_of_rows: bool = False,
    ):
        self.buffer, self.index, self.value, self.scan = buffer, index, value, scan
        self.scatter, self.is_of_rows = scatter, is_of_rows

    def of(self, value: Node, index: Index | None = None) -> Write:
        """The write of another value, at another index."""
        at = self.index if index is None else index
        return Write(self.buffer, at, value, self.scan, self.scatter, self.is_of_rows)


class Column:
    """A reduction over outer loops: `value` is combined in `buffer` at `index`."""

    __slots__ = ("buffer", "index", "value", "combine")

    def __init__(self, buffer: Buffer, index: Index, value: Node, combine: Combine):
        self.buffer, self.index, self.value, self.combine = buffer, index, value, combine

    def of(self, value: Node) -> Column:
        """The reduction of another value."""
        return Column(self.buffer, self.index, value, self.combine)


class Kernel:
    """loops: the slowest first. outer: how many of these are threads'; 0: each thread has a piece of the only loop.
    rows: the row reductions, with their bodies over loops. seconds, bytes: predicted. is_parallel: whether all threads
    run it; least_parallel: elements from which on they do."""

    def __init__(self, loops: Sequence[Variable], outer: int):
        self.loops, self.outer = tuple(loops), outer
        self.rows: dict[Node, Node] = {}
        self.writes: list[Write] = []
        self.columns: list[Column] = []
        self.seconds, self.bytes, self.is_parallel, self.least_parallel = 0.0, 0, True, 0
        self.loads: dict[Node, Index] = {}

    @property
    def sweep(self) -> tuple[Variable, ...]:
        return self.loops[self.outer :]

    def stages(self) -> dict[Node, int]:
        """For each row reduction the sweep that computes it, counted from 0; for each scan the first one that can."""
        stage: dict[Node, int] = {}
        for node in in_order(self.rows.values()):
            if node in self.rows:
                stage[node] = self._stage_of(self.rows[node], stage)
        for node, body in self.rows.items():
            stage.setdefault(node, self._stage_of(body, stage))
        return dict(sorted(stage.items(), key=lambda t: t[1]))

    def _stage_of(self, value: Node, stage: Mapping[Node, int]) -> int:
        return max((stage[n] + (n.op != "scan") for n in above_reductions(value) if n in stage), default=0)

    def stage_of(self, value: Node) -> int:
        return self._stage_of(value, self.stages())


class Reductions:
    """The reductions of a program as items, one for those that differ only by where they are read. item, at: by node,
    its item and the index at which it reads each axis of the item."""

    def __init__(self, program: Program, kind: type[Item]):
        self._graph, self._kind = program.graph, kind
        self._of_canonical: dict[Node, Item] = {}
        self.item: dict[Node, Item] = {}
        self.at: dict[Node, tuple[Index, ...]] = {}
        self._forms: dict[Node, tuple[Node, tuple[Variable, ...], tuple[Index, ...]]] = {}
        for node in in_order(s.value for s in program.stores):
            if node.op in BINDERS:
                self._form_of(node)
        self._larger = self._within_larger()

    def register(self, node: Node) -> list[Item]:
        """The items that are new, in an order in which they can run."""
        if node in self.item:
            return []
        canonical, free, at = self._form_of(node)
        if canonical in self._larger:
            canonical, free, shifts = self._larger[canonical]
            at = tuple(i + shift for i, shift in zip(at, shifts, strict=True))
        bound = canonical.what[1:2] if node.op == "scan" else canonical.what[1]
        new = []
        if canonical not in self._of_canonical:
            for inner in above_reductions(canonical.args[0]):
                if inner.op in BINDERS:
                    new += self.register(inner)
            self._of_canonical[canonical] = self._kind(canonical, free, bound, None)
            new.append(self._of_canonical[canonical])
        self.item[node], self.at[node] = self._of_canonical[canonical], at
        return new

    def _form_of(self, node: Node) -> tuple[Node, tuple[Variable, ...], tuple[Index, ...]]:
        """The canonical form of a reduction, or of a scan at all of its elements."""
        if node not in self._forms:
            whole, along = whole_scan(self._graph, node) if node.op == "scan" else (node, None)
            canonical, free, at = canonical_form(self._graph, whole)
            if along is not None:
                at = tuple(replaced(i, {along: node.what[2]}) for i in at)
            self._forms[node] = canonical, free, at
        return self._forms[node]

    def _within_larger(self) -> dict[Node, tuple[Node, tuple[Variable, ...], tuple[int, ...]]]:
        """By reduction, one that has more elements and these among them, its axes, and from which element of each on:
        that of all groups of channels, where only some groups are read."""
        forms = {canonical: free for canonical, free, _ in self._forms.values() if canonical.op == "reduce"}
        forms = {n: free for n, free in forms.items() if all(isinstance(v.size, int) for v in free)}
        result = {}
        for n, free in forms.items():
            count, first = elements(free), _first_elements(n, free)
            for larger, axes in sorted(forms.items(), key=lambda form: -elements(form[1])):
                if elements(axes) <= count:
                    break
                if len(axes) != len(free) or larger.what[0] != n.what[0] or larger.dtype is not n.dtype:
                    continue
                shifts = tuple(a - b for a, b in zip(first, _first_elements(larger, axes), strict=True))
                inside = all(0 <= s <= w.size - v.size for s, v, w in zip(shifts, free, axes, strict=True))
                by = {w: Index.of(v) + s for s, v, w in zip(shifts, free, axes, strict=True)}
                if inside and self._graph.substitute(larger, by) is n:
                    result[n] = larger, axes, shifts
                    break
        return result


def _first_elements(node: Node, axes: Sequence[Variable]) -> list[int]:
    """By axis, the number that is added to it wherever a node reads by it, with whatever factor."""
    numbers: dict[Variable, set[int]] = {v: set() for v in axes}
    stack = [i for n in in_order([node]) for i in _indices(n)]
    while stack:
        index = opened(stack.pop())
        stack += [a.index for a in index.terms if isinstance(a, Part)]
        for v in numbers.keys() & index.terms.keys():
            if isinstance(index.constant, int) and isinstance(index.terms[v], int):
                numbers[v].add(index.constant // index.terms[v])
    return [min(numbers[v], default=0) for v in axes]


def whole_scan(graph: Graph, node: Node) -> tuple[Node, Variable]:
    """A scan at all of its elements, and the axis of these."""
    combine, bound, _, is_backwards = node.what
    along = axis("q", 0, bound.size)
    return graph.make("scan", node.args, node.dtype, (combine, bound, Index.of(along), is_backwards)), along


def canonical_form(graph: Graph, node: Node) -> tuple[Node, tuple[Variable, ...], tuple[Index, ...]]:
    """A value over axes of the numbers in which it reads by them, these axes, and where `node` reads it.

    `sum over r of x[r, within(d1 - 3, 3) + 1]` is `sum over r of x[r, f0]` at `within(d1 - 3, 3) + 1`, and `sum over r
    of x[r, d1 // 56, d1 % 56 // 2]` is `sum over r of x[r, f0, f1]` at `d1 // 56` and `d1 % 56 // 2`."""
    if node not in graph.canonical:
        graph.canonical[node] = _canonical_form(graph, node)
    return graph.canonical[node]


def _canonical_form(graph: Graph, node: Node) -> tuple[Node, tuple[Variable, ...], tuple[Index, ...]]:
    """See `canonical_form`, which keeps it."""
    at: dict[Variable, Index] = {}
    narrow: dict[Variable, Index] = {}
    wide: dict[Variable, Index] = {}
    ranges = {v: range_of(node, v) for v in _axes_in_order(node)}
    apart = {v: divisor_of(node, v) for v, bounds in ranges.items() if bounds is None}
    parts: dict[Part, Index] = {}
    for part in _parts_of(node, apart):
        v = axis("e", len(at), part.high + 1)
        at[v], parts[part] = Index({part: 1}, 0), Index.of(v)
    divided = {v for part in parts for v in variables_of(part.index)}
    for v in ranges.keys() - divided:
        bounds = ranges[v]
        if bounds is None:
            by, shift, size = apart[v]
            own = axis("e", len(at), size)
            narrow[v] = Index.of(own) * by + -shift
            at[own] = (Index.of(v) + shift) // by
            continue
        low, high, shift, sign, index, size = bounds
        inner = axis("e", (len(at), "part"), high - low + 1)
        narrow[v] = (Index.of(inner) + (low - shift)) * sign
        own = axis("e", len(at), size)
        first = 0 if size != high - low + 1 else low
        wide[inner] = Index.of(own) + (first - low)
        at[own] = index + -first
    if parts:
        node = graph.reindexed(node, divided, lambda index: _with_parts(index, parts))
    node = graph.substitute(graph.substitute(node, narrow), wide)
    order = [v for v in _axes_in_order(node) if v in at]
    order += [v for v in at if v not in order]
    free = tuple(axis("f", number, v.size) for number, v in enumerate(order))
    names = {v: Index.of(own) for v, own in zip(order, free, strict=True)}
    return graph.substitute(node, names), free, tuple(at[v] for v in order)


def _with_parts(index: Index, by: Mapping[Part, Index]) -> Index:
    """An index with other indices in the place of quotients and remainders that are its terms."""
    total = Index.of(index.constant)
    for atom, factor in index.terms.items():
        of_atom = by.get(atom) if isinstance(atom, Part) else None
        total = total + (Index({atom: 1}, 0) if of_atom is None else of_atom) * factor
    return total


def _parts_of(node: Node, axes: Mapping[Variable, tuple[Size, int, Size]]) -> list[Part]:
    """The quotients and remainders in which alone a node reads by these axes; none where they do not have fewer
    combinations than the axes, or depend on symbolic sizes. axes: see `divisor_of`."""
    parts: dict[Part, frozenset[Variable]] = {}
    alone = {v for v, (_, _, size) in axes.items() if isinstance(size, int)}
    for index in (i for n in in_order([node]) for i in _indices(n)):
        for atom in index.terms:
            if isinstance(atom, Part):
                parts[atom] = variables_of(atom.index)
            else:
                alone.discard(atom)
    while others := {v for own in parts.values() if not own <= alone for v in own & alone}:
        alone -= others
    result = [part for part, own in parts.items() if own <= alone]
    combinations = math.prod(hint(part.high) + 1 for part in result)
    is_fewer = combinations < math.prod(hint(axes[v][2]) for v in alone)
    return result if is_fewer and all(at_least(part.low, 0) for part in result) else []


def _places(node: Node, v: Variable) -> list[tuple[Index, Size | None]]:
    """The indices by an axis, with the sizes of their dimensions; None: there are values everywhere. A concatenation
    along the axis has values in all of its range, though each of its pieces reads in a part of it."""
    places: dict[Node, list[tuple[Index, Size | None]]] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n in places or v not in n.axes:
            continue
        if n.op == "load":
            places[n] = [*zip(n.what[1], n.what[0].shape, strict=True)]
        elif n.op == "scan":
            places[n] = [(n.what[2], n.what[1].size)]
        else:
            places[n] = [] if n.op not in ("index", "concat") else [(_indices(n)[0], None if n.op == "index" else 0)]
        if n.op != "concat" or v not in variables_of(n.what[0]):
            stack += reversed(n.args)
    return [(i, size) for those in places.values() for i, size in those if v in variables_of(i)]


def range_of(node: Node, v: Variable) -> tuple[Size, Size, Size, int, Index, Size] | None:
    """Where a node reads by an axis: the least and the largest index, the number and the sign with which it is `sign *
    axis + shift`, the index, and how many there are to read: all of a buffer's dimension where the node reads most of
    it. None where an index is more than the axis and a number, and where that depends on symbolic sizes."""
    places = _places(node, v)
    plain = [opened(i) for i, _ in places]
    sign = plain[0].terms.get(v, 0) if places else 0
    if sign not in (1, -1) or any(len(i.terms) != 1 or i.terms.get(v) != sign for i in plain):
        return None
    try:
        shift = least(i.constant for i in plain)
        low = largest(i.low - (p.constant - shift) for (i, _), p in zip(places, plain, strict=True))
        high = least(i.high - (p.constant - shift) for (i, _), p in zip(places, plain, strict=True))
    except Undecided:
        return None
    index = next(i for (i, _), p in zip(places, plain, strict=True) if p.constant == shift)
    if not index.is_inside(low, high + 1):
        return None
    count, sizes = high - low + 1, {size for _, size in places if size is not None}
    size = next(iter(sizes)) if len(sizes) == 1 else 0
    is_whole = all(p.constant == shift for p in plain) and hint(size) <= 2 * hint(count) and at_least(size - 1, high)
    return low, high, shift, sign, index, size if is_whole else count


def divisor_of(node: Node, v: Variable) -> tuple[Size, int, Size]:
    """The largest `by`, with a shift, for which a node reads by `(axis + shift) // by` alone, as that of a group of
    channels does which each of them reads; 1 where it need not be the same in all of a group. The last is the number of
    such groups."""
    numbers: set[Size] = set()
    shifts: set[Size] = set()
    stack = [i for n in in_order([node]) for i in _indices(n)]
    while stack:
        for atom in stack.pop().terms:
            if isinstance(atom, Part) and atom.remainder is False and [*atom.index.terms.items()] == [(v, 1)]:
                numbers.add(atom.by)
                shifts.add(atom.index.constant)
            elif isinstance(atom, Part):
                stack.append(atom.index)
            elif atom is v:
                return 1, 0, v.size
    shared = functools.reduce(common, numbers) if numbers else 1
    if divides(shared, v.size) and shifts <= {0}:
        return shared, 0, exact(v.size, shared)
    if not isinstance(shared, int) or not isinstance(v.size, int) or not all(isinstance(n, int) for n in shifts):
        return 1, 0, v.size
    within = {n % shared for n in shifts}  # type: ignore[operator]
    shift = within.pop()
    return (1, 0, v.size) if within else (shared, shift, (v.size - 1 + shift) // shared + 1)


def _indices(node: Node) -> Sequence[Index]:
    if node.op == "load":
        return node.what[1]
    if node.op == "scan":
        return node.what[2:3]
    return [node.what] if node.op == "index" else node.what[:1] if node.op == "concat" else ()


def _axes_in_order(node: Node) -> tuple[Variable, ...]:
    """The free axes of a node, in the order in which it reads by them, with larger steps first."""
    order: dict[Variable, None] = {}
    for index in (i for n in in_order([node]) for i in _indices(n)):
        stack = [index]
        while stack:
            steps = sorted(stack.pop().terms.items(), key=lambda term: hint(term[1]))
            for atom, _ in reversed(steps):
                if isinstance(atom, Part):
                    stack.append(atom.index)
                elif atom in node.axes:
                    order[atom] = None
    return tuple(order)


class Shared:
    """A value that several groups compute: the first one writes it to `buffer`, at `index` over its loops."""

    __slots__ = ("buffer", "index", "group")

    def __init__(self, buffer: Buffer, index: tuple[Index, ...], group: int):
        self.buffer, self.index, self.group = buffer, index, group


def scheduled(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Machine, threads: int
) -> list[Kernel]:
    """The kernels of a program, for buffers of these strides. Raises TooComplex."""
    strides, graph = dict(strides), program.graph
    for store in program.stores:
        strides.setdefault(store.buffer, strides_of(store.buffer.shape))
    reductions, items = Reductions(program, Item), list[Item]()
    for store in program.stores:
        for node in above_reductions(store.value):
            if node.op == "reduce":
                items += reductions.register(node)
        items.append(Item(store.value, store.axes, (), store))
    for item in items:
        item.lay_out(graph, strides)
    groups = groups_of(items, reductions, graph, Group)
    scratch = 1 + max((s.buffer.number for s in program.stores if s.buffer.kind == "scratch"), default=-1)

    def new_buffer(shape: tuple[Size, ...], kind: dtype) -> Buffer:
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
    kernels = [writer.kernel() for writer in writers]
    for kernel in kernels:
        estimate(kernel, machine, threads, strides)
    return kernels


def groups_of(items: Sequence[Item], reductions: Reductions, graph: Graph, kind: type[Group]) -> list[Group]:
    """Items in groups of this kind, each behind those that compute what it reads."""
    groups: list[Group] = []
    written: dict[Buffer, int] = {}
    for item in items:
        inner = [reductions.item[n] for n in item.reductions]
        least = max((r.group + (r.row is None) for r in inner), default=0)
        for buffer in item.buffers:
            least = max(least, written.get(buffer, -1) + 1)
        orders = {n: groups[n].takes(item, reductions, n, graph) for n in range(least, len(groups))}
        fitting = [n for n, order in orders.items() if order is not None]
        needed = [n for n in fitting if any(r.group == n for r in inner)]
        if fitting:
            item.group = (needed or fitting)[0]
            item.axes = orders[item.group] or []
            groups[item.group].add(item)
        else:
            item.group = len(groups)
            groups.append(kind(item))
        if item.store is not None:
            written[item.store.buffer] = item.group
    return groups


def shared_values(
    groups: Sequence[Group],
    reductions: Reductions,
    graph: Graph,
    machine: Machine,
    new_buffer: Callable[[tuple[Size, ...], dtype], Buffer],
) -> dict[Node, Shared]:
    """The values, over loops, that take less to write and to read than to compute in several groups. Groups of the same
    loops compute equal nodes."""
    first: dict[Node, int] = {}
    roots: list[list[Node]] = []
    for number, group in enumerate(groups):
        roots.append([graph.substitute(i.body, m) for i, m in group.mappings().items()])
        for root in roots[-1]:
            for n in above_reductions(root):
                first.setdefault(n, number)
    shared: dict[Node, Shared] = {}
    for number, nodes in enumerate(roots):
        stack, seen = [*nodes], set[Node]()
        while stack:
            n = stack.pop()
            if n in seen or n.op == "reduce":
                continue
            seen.add(n)
            if first[n] < number and n.axes and (n in shared or _is_dear(n, machine)):
                if n not in shared:
                    axes = sorted(n.axes, key=lambda v: v.name)
                    buffer = new_buffer(tuple(v.size for v in axes), n.dtype)
                    shared[n] = Shared(buffer, tuple(map(Index.of, axes)), first[n])
                continue
            stack += n.args
    return shared


def _is_dear(node: Node, machine: Machine) -> bool:
    """Whether a value takes longer to compute than to write once and to read once, for all of its loops."""
    if node.op in ("load", "constant", "index", "cast") or any(v.name[0] != "l" for v in node.axes):
        return False
    if not reads_inside(node):
        return False
    below = above_reductions(node)
    count = elements(node.axes)
    again = seconds_of([n for n in below if n.op != "reduce" and n.axes == node.axes], machine)
    loads = sum(n.dtype.bytes for n in below if n.op == "load" and n.axes == node.axes)
    where = "L2" if count * node.dtype.bytes < machine.caches[1] else "memory"
    return (
        again + loads * machine.byte[where]
        > 2.5 * node.dtype.bytes * machine.byte[where] + 4 * machine.element["simple"]
    )


class Assembly:
    """The kernel of a group, from its items."""

    def __init__(
        self,
        group: Group,
        number: int,
        reductions: Reductions,
        graph: Graph,
        strides: dict[Buffer, Sequence[int]],
        shared: Mapping[Node, Shared],
    ):
        self.group, self.number, self.reductions = group, number, reductions
        self.graph, self.strides, self.shared = graph, strides, shared
        self.by_item = group.mappings()
        self.own = {
            graph.substitute(i.node, of_free(i, by)): i
            for i, by in self.by_item.items()
            if i.store is None and i.row is not None
        }
        self.known: dict[Node, Node] = {n: n for n in self.own}
        self.foreign: dict[Node, tuple[Item, tuple[Index, ...]]] = {}  # reductions of other groups, and where
        for n, s in shared.items():
            if s.group < number:
                read = graph.make("load", (), s.buffer.dtype, (s.buffer, s.index, ()))
                self.known[n] = read if read.dtype is n.dtype else graph.make("cast", (read,), n.dtype)
        for item, by in self.by_item.items():
            for n in item.reductions:
                raw = graph.substitute(n, by)
                if raw not in self.own:
                    index = tuple(replaced(i, by) for i in reductions.at[n])
                    self.foreign[raw] = reductions.item[n], index

    def raw(self, item: Item) -> Node:
        return self.graph.substitute(item.body, self.by_item[item])

    def written(self) -> list[tuple[Node, Shared]]:
        return [(n, s) for n, s in self.shared.items() if s.group == self.number]

    def needed(self) -> list[Item]:
        """The reductions that this kernel reads from memory."""
        values = [*map(self.raw, self.group.items), *(n for n, _ in self.written())]
        items: dict[Item, None] = {}
        stack, seen = values, set[Node]()
        while stack:
            n = stack.pop()
            if n in seen or n in self.known and self.known[n] is not n:
                continue
            seen.add(n)
            if n in self.foreign:
                items[self.foreign[n][0]] = None
            elif n.op not in BINDERS:
                stack += n.args
        return [*items]

    def at(self, raw: Node) -> Node:
        """A value over the kernel's loops, with what other kernels have computed loaded."""

        def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
            if n in self.foreign:
                r, index = self.foreign[n]
                if r.scratch is None or r.group >= self.number:
                    raise TooComplex("a reduction is read where it is not computed yet")
                return self.graph.make("load", (), n.dtype, (r.scratch, index, ()))
            return self.graph.make(n.op, args, n.dtype, n.what)

        stack = [raw]
        while stack:  # without what reductions of other kernels are made of
            n = stack[-1]
            missing = [] if n in self.foreign else [a for a in n.args if a not in self.known]
            if n in self.known:
                stack.pop()
            elif missing:
                stack += missing
            else:
                self.known[n] = rebuilt(n, tuple(self.known[a] for a in n.args) if n not in self.foreign else ())
        return self.known[raw]

    def kernel(self, vectors: bool = True) -> Kernel:
        """vectors: whether the last loop is one that vectors run along."""
        group, strides = self.group, self.strides
        loops = loops_of(group.cuts)
        outer = len(loops)
        inner: Size = 1
        while group.row is not None and inner != group.row:
            outer -= 1
            inner = inner * loops[outer].size
        if outer == 0 and any(item.scan is not None for item in self.by_item):
            loops, outer = [axis("l", "row", 1), *loops], 1  # the only row
        kernel = Kernel(loops, outer if group.row is not None else max(len(loops) - 1, 0))
        rows = {node: self.at(self.raw(item)) for node, item in self.own.items()}
        writes, columns = [], []
        for n, s in self.written():
            value = self.at(n)
            if value.dtype is not s.buffer.dtype:
                value = self.graph.make("cast", (value,), s.buffer.dtype)
            writes.append(Write(s.buffer, offset(s.index, strides[s.buffer]), value))
        for item, by in self.by_item.items():
            free = [by[a] for a in item.free] if item.store is None else []
            if item.store is not None:
                buffer, scatter = item.store.buffer, item.store.scatter
                scan = None if item.scan is None else item.scan[0]
                index = offset([replaced(i, by) for i in item.store.index], strides[buffer])
                is_of_rows = item.total != group.total
                writes.append(Write(buffer, index, self.at(self.raw(item)), scan, scatter, is_of_rows))
            elif item.scratch is None:
                continue
            elif item.row is not None:
                node = self.graph.substitute(item.node, of_free(item, by))
                writes.append(Write(item.scratch, offset(free, strides[item.scratch]), node))
            else:
                value = self.at(self.raw(item))
                columns.append(Column(item.scratch, offset(free, strides[item.scratch]), value, item.node.what[0]))
        return _merged(kernel, rows, writes, columns, self.graph, strides, group.row is not None, vectors)


def _merged(
    kernel: Kernel,
    rows: Mapping[Node, Node],
    writes: Sequence[Write],
    columns: Sequence[Column],
    graph: Graph,
    strides: Mapping[Buffer, Sequence[int]],
    has_rows: bool,
    vectors: bool,
) -> Kernel:
    """The kernel with neighbouring loops joined where all memory is read and written along both in one step."""
    values = [*rows.values(), *(w.value for w in writes), *(c.value for c in columns)]
    indices = [w.index for w in writes] + [c.index for c in columns]
    indices += [offset_of(n, strides) for n in in_order(values) if n.op == "load"]
    boundary = kernel.outer if has_rows else None
    spans = joinable(kernel.loops, boundary, indices, apart_loops(values, indices))
    by: dict[Variable, Index] = {}
    result = kernel
    if any(len(span) > 1 for span in spans):
        loops, by = joined_loops(spans)
        starts = accumulate(map(len, spans[:-1]), initial=0)
        result = Kernel(loops, max(len(loops) - 1, 0) if boundary is None else sum(n < boundary for n in starts))

    def there(node: Node) -> Node:
        return graph.substitute(node, by) if by else node

    if vectors and all(w.scan is None for w in writes):
        result.loops = _vector_last(result.loops, result.outer if has_rows else 0)
    result.rows = {there(n): there(body) for n, body in rows.items()}
    result.writes = [w.of(there(w.value), replaced(w.index, by)) for w in writes]
    result.columns = [Column(c.buffer, replaced(c.index, by), there(c.value), c.combine) for c in columns]
    for n in in_order([*result.rows.values(), *(w.value for w in result.writes), *(c.value for c in result.columns)]):
        if n.op == "load":
            result.loads[n] = offset_of(n, strides)
    return result


def apart_loops(values: Sequence[Node], indices: Sequence[Index]) -> set[Variable]:
    """The loops that stay as they are: a value asks where it is in one, or an index divides it."""
    indices_read = [n.what if n.op == "index" else n.what[0] for n in in_order(values) if n.op in ("index", "concat")]
    divided = [a.index for i in indices for a in i.terms if isinstance(a, Part)]
    return {v for i in (*indices_read, *divided) for v in variables_of(i)}


def joinable(
    loops: Sequence[Variable], boundary: int | None, indices: Sequence[Index], apart: set[Variable]
) -> list[list[Variable]]:
    """The loops in runs that can be one loop each. boundary: the number of the loop before which a run ends."""
    spans: list[list[Variable]] = [[loop] for loop in loops[:1]]
    for n, inner in enumerate(loops[1:], 1):
        before = spans[-1][-1]
        may = before not in apart and inner not in apart and n != boundary
        if may and all(x.terms.get(before, 0) == x.terms.get(inner, 0) * inner.size for x in indices):
            spans[-1].append(inner)
        else:
            spans.append([inner])
    return spans


def joined_loops(spans: Sequence[Sequence[Variable]]) -> tuple[list[Variable], dict[Variable, Index]]:
    """A loop for each run, and the loops of before as indices of these."""
    loops = [axis("l", n, math.prod(v.size for v in span)) for n, span in enumerate(spans)]
    by: dict[Variable, Index] = {}
    for loop, span in zip(loops, spans, strict=True):
        rest = loop.size
        for v in span:
            before, rest = rest, exact(rest, v.size)
            index = Index.of(loop)
            by[v] = (index % before if before != loop.size else index) // rest
    return loops, by


def _vector_last(loops: Sequence[Variable], outer: int) -> tuple[Variable, ...]:
    """The loops with another one last where the last is too short for vectors. outer: how many stay where they are."""
    long = [v for v in loops[outer:] if hint(v.size) >= 2 * LEAST_VECTOR]
    if hint(loops[-1].size) >= LEAST_VECTOR or not long:
        return tuple(loops)
    return (*(v for v in loops if v is not long[-1]), long[-1])


def offset_of(load: Node, strides: Mapping[Buffer, Sequence[int]]) -> Index:
    buffer, index, _ = load.what
    return opened(offset(index, strides[buffer]))


# ------------------------------------------------------------------------------------------------ cost


def seconds_of(nodes: Iterable[Node], machine: Machine) -> float:
    """What the functions among nodes take for one element, of one thread."""
    total = 0.0
    for n in nodes:
        is_double = n.dtype.name in ("float64", "int64")
        if n.op in FUNCTIONS:
            function = FUNCTIONS[n.op]
            total += machine.work(function.rate, function.count, is_double)
        elif n.op == "random":
            total += machine.work("simple", 80, True)  # ten rounds, of two products of 64 bits
        elif n.op in ("cast", "concat"):
            is_half = n.op == "cast" and n.dtype.category == FLOAT and n.dtype.bytes == 2
            total += machine.work("simple", 8 if is_half else 1, is_double)  # rounding takes as many
    return total


def is_of_rows(w: Write, vector: Variable | None) -> bool:
    """Whether a scatter writes neighbours to neighbours: the indices that it reads are the same for a whole vector."""
    return w.index.terms.get(vector) == 1 and all(vector not in n.axes for n in w.value.args[1:])


def _seconds_of_scatters(scatters: Iterable[Write], vector: Variable | None, machine: Machine) -> float:
    """For one element, which is read and written."""
    return sum(2 * (machine.element["simple"] if is_of_rows(w, vector) else machine.gather) for w in scatters)


def _range(index: Index) -> int:
    """How many elements of a buffer an index may reach, at most."""
    return max(1, elements(variables_of(index)))


def _apart_seconds(step: int, vector: Variable | None, machine: Machine) -> float:
    """For an element that is `step` bytes from the one before it. Those of neighbours, which are in the same lines of
    the cache, find them there where the lines of one vector loop fit: in the sets that such steps reach."""
    lines = 0 if vector is None or abs(step) < LINE else hint(vector.size) * max(LINE, math.gcd(step, PAGE))
    if lines <= machine.caches[0] // 2:
        return machine.gather
    return machine.gather + LINE * machine.byte["L2" if lines <= machine.caches[1] // 2 else "memory"]


def estimate(kernel: Kernel, machine: Machine, threads: int, strides: Mapping[Buffer, Sequence[int]]) -> None:
    """Predicts the bytes and seconds of a kernel."""
    count, rows = elements(kernel.loops), elements(kernel.loops[: kernel.outer])
    vector = kernel.loops[-1] if kernel.loops else None
    used: dict[Buffer, int] = {}
    gathers = 0.0
    for n, index in kernel.loads.items():
        buffer = n.what[0]
        reach = min(_range(index), hint(math.prod(buffer.shape))) * buffer.dtype.bytes
        used[buffer] = max(used.get(buffer, 0), reach)
        step = hint(index.terms.get(vector, 0)) if vector is not None else 0
        if (
            n.args
            or step not in (0, 1)
            or any(isinstance(a, Part) and vector in variables_of(a.index) for a in index.terms)
        ):
            gathers += _range(index) * _apart_seconds(step * buffer.dtype.bytes, vector, machine)
    scatters = [w for w in kernel.writes if w.scatter is not None]
    gathers += count * _seconds_of_scatters(scatters, vector, machine)
    for w in (*kernel.writes, *kernel.columns):
        used[w.buffer] = used.get(w.buffer, 0) + hint(math.prod(w.buffer.shape)) * w.buffer.dtype.bytes
        if vector is not None and w.index.terms.get(vector, 1) != 1:
            step = hint(w.index.terms.get(vector, 0)) * w.buffer.dtype.bytes
            gathers += hint(math.prod(w.buffer.shape)) * _apart_seconds(step, vector, machine)
    kernel.bytes = sum(used.values())
    stages = kernel.stages()
    sweeps: dict[int, set[Node]] = {}
    for node, body in kernel.rows.items():
        sweeps.setdefault(stages[node], set()).update(above_reductions(body))
    for w in (*kernel.writes, *kernel.columns):
        sweeps.setdefault(kernel._stage_of(w.value, stages), set()).update(above_reductions(w.value))
    inner = set(kernel.sweep)
    work = 0.0
    if vector is not None:  # the last vector is computed whole
        width = hint(vector.size)
        count = count // width * -(-width // machine.lanes) * machine.lanes
    work += sum(6 * count * machine.element["simple"] for w in kernel.writes if w.scan is not None)
    for nodes in sweeps.values():
        work += count * seconds_of([n for n in nodes if n.axes & inner], machine)
        work += count * machine.element["simple"] * 2 + rows * 2e-8
    where = "L2" if kernel.bytes < machine.caches[1] * threads else "memory"
    busy, moving = work + gathers, kernel.bytes * machine.byte[where]
    alone = max(busy, moving) + min(busy, moving) / 4  # a thread's loads and functions overlap, not quite
    together = alone / (min(threads, rows) if kernel.outer else threads) + machine.launch
    kernel.is_parallel, kernel.seconds = together < alone, min(together, alone)
    kernel.least_parallel = int(elements(kernel.loops) * machine.launch * threads / (alone * max(1, threads - 1)))
    if scatters:  # in the order of the elements, so that equal calls have equal sums
        kernel.is_parallel, kernel.seconds, kernel.least_parallel = False, alone, 1 << 62


def describe(kernels: Sequence[Kernel]) -> str:
    """A schedule as text."""
    lines = []
    for number, k in enumerate(kernels):
        loops = ", ".join(f"{v.name}:{v.size}" for v in k.loops[: k.outer]) or "pieces"
        sweep = ", ".join(f"{v.name}:{v.size}" for v in k.sweep)
        lines.append(
            f"kernel {number}: for {loops}, sweep {sweep}: {k.bytes} bytes, {1e6 * k.seconds:.1f} us predicted"
        )
        stages = k.stages()
        for node, stage in stages.items():
            lines.append(f"    sweep {stage}: row {node.what[0]} of {line(k.rows[node])}")
        for c in k.columns:
            at = index_text(c.index)
            lines.append(f"    sweep {k._stage_of(c.value, stages)}: column {c.combine} into {c.buffer}[{at}]")
        for w in k.writes:
            verb = "write" if w.scan is None else f"write the {w.scan} so far to"
            verb = verb if w.scatter is None else f"scatter ({w.scatter.combine or 'the last one'}) to"
            lines.append(f"    sweep {k._stage_of(w.value, stages)}: {verb} {w.buffer}[{index_text(w.index)}]")
    return "\n".join(lines)
