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
from collections.abc import Iterable, Mapping, Sequence

from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Part, Variable, opened, strides_of
from thunder.kernels.ir import (
    Buffer,
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
from thunder.kernels.machine import Machine

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
        self.body = node if store is not None else node.args[0]
        self.reductions = [n for n in _above_reductions(self.body) if n.op == "reduce"]
        self.buffers = {n.what[0] for n in _above_reductions(self.body) if n.op == "load"}
        self.scratch: Buffer | None = None  # of a reduction that other kernels read
        self.group = -1
        self.axes: list[Variable] = []
        self.by: dict[Variable, Index] = {}
        self._own_bound: set[Variable] = set()

    def lay_out(self, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> None:
        """Splits axes until indices are linear in them, and orders these."""
        loads = [n for n in in_order([self.body]) if n.op == "load"]
        axes = [a for a in (*self.free, *self.bound) if a.size > 1]
        self.by = {a: Index.of(a) for a in (*self.free, *self.bound)}
        indices = [i for n in loads for i in n.what[1]]
        while (part := _part_of_axis(indices, axes)) is not None:
            a, n = part
            high, low = axis("s", (a.name, n, 0), a.size // n), axis("s", (a.name, n, 1), n)
            there = {a: Index.of(high) * n + Index.of(low)}
            axes[axes.index(a) : axes.index(a) + 1] = [high, low]
            indices = [replaced(i, there) for i in indices]
            self.by = {b: replaced(i, there) for b, i in self.by.items()}
        top = {n for n in _above_reductions(self.body) if n.op == "load"} or set(loads)
        accesses = [_steps(n, self.by, strides) for n in loads if n in top]
        if self.store is not None:
            own = [self.by[a] for a in self.store.axes]
            accesses.append(_terms(offset(own, strides[self.store.buffer])))
            accesses.append(accesses[-1])
        self.axes = _in_memory_order(axes, accesses)
        self._own_bound = {v for b in self.bound for v in self.by[b].terms if isinstance(v, Variable)}

    @property
    def sizes(self) -> list[int]:
        return [a.size for a in self.axes]

    @property
    def total(self) -> int:
        return math.prod(self.sizes)

    @property
    def cuts(self) -> set[int]:
        """The products of the sizes of the last axes."""
        products = {1}
        for n in reversed(self.sizes):
            products.add(n * max(products))
        return products

    @property
    def row(self) -> int | None:
        """For a reduction over the last axes, of more than one row: the elements of a row."""
        if self.store is not None:
            return None
        last = 0
        while last < len(self.axes) and self.axes[-1 - last] in self._own_bound:
            last += 1
        width = math.prod(self.sizes[len(self.axes) - last :])
        return width if last == len(self._own_bound) and width < self.total else None


def _above_reductions(node: Node) -> list[Node]:
    """The nodes that a node is computed from, reductions among them, but not what these are made of."""
    order: dict[Node, None] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n not in order:
            order[n] = None
            if n.op != "reduce":
                stack += n.args
    return [*order]


def _part_of_axis(indices: Iterable[Index], axes: Sequence[Variable]) -> tuple[Variable, int] | None:
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
                if isinstance(a, Variable) and factor == 1 and a in axes and a.size % part.by == 0:
                    return a, part.by
    return None


def _terms(index: Index) -> dict[Variable, int]:
    return {a: f for a, f in index.terms.items() if isinstance(a, Variable)}


def _steps(load: Node, by: Mapping[Variable, Index], strides: Mapping[Buffer, Sequence[int]]) -> dict[Variable, int]:
    buffer, index, _ = load.what
    return _terms(opened(offset([replaced(i, by) for i in index], strides[buffer])))


def _in_memory_order(axes: Sequence[Variable], accesses: Sequence[Mapping[Variable, int]]) -> list[Variable]:
    """Axes from the slowest to the fastest, by a vote of the accesses, weighed by their elements."""
    weights = [math.prod(a.size for a in axes if step.get(a)) for step in accesses]
    place = {a: i for i, a in enumerate(axes)}

    def compare(a: Variable, b: Variable) -> float:
        votes = 0
        for step, weight in zip(accesses, weights, strict=True):
            x, y = abs(step.get(a, 0)), abs(step.get(b, 0))
            if x and y and x != y:
                votes += weight if x < y else -weight
            elif bool(x) != bool(y) and max(x, y) == 1:  # read in order along one, and not at all along the other
                votes += weight if x == 1 else -weight
        return votes or place[a] - place[b]

    return sorted(axes, key=functools.cmp_to_key(compare))


# ------------------------------------------------------------------------------------------------ groups


class Group:
    """Items that become one kernel. total: elements of their space; cuts: where its loops are cut, as products of the
    last sizes; row: elements of a row, where rows are reduced."""

    def __init__(self, item: Item):
        self.items: list[Item] = []
        self.total, self.cuts, self.row = item.total, {1}, None
        self.add(item)

    def add(self, item: Item) -> None:
        self.cuts, self.row = self._joined(item)  # type: ignore[misc]
        self.items.append(item)

    def _joined(self, item: Item) -> tuple[set[int], int | None] | None:
        scale = 1
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
        products = sorted(cuts)
        divisible = all(b % a == 0 for a, b in zip(products, products[1:], strict=False))
        return (cuts, row) if divisible and max(products) == self.total else None

    def takes(self, item: Item, items: Mapping[Node, Item], number: int, graph: Graph) -> bool:
        joined = self._joined(item)
        if joined is None:
            return False
        shared = {b for i in self.items for b in i.buffers} & item.buffers
        inside = [items[r] for r in item.reductions if items[r].group == number]
        if not shared and not inside:
            return False
        cuts, row = joined
        if any(r.row is None for r in inside):
            return False
        return all(
            graph.substitute(r.node, mapping(item, cuts, self.total, row))
            is graph.substitute(r.node, _of_free(r, mapping(r, cuts, self.total, row)))
            for r in inside
        )


def loops_of(cuts: set[int]) -> list[Variable]:
    products = sorted(cuts, reverse=True)
    if len(products) == 1:
        return [axis("l", 0, 1)]  # one element
    return [axis("l", i, a // b) for i, (a, b) in enumerate(zip(products, products[1:], strict=False))]


def mapping(item: Item, cuts: set[int], total: int, row: int | None) -> dict[Variable, Index]:
    """The index of each axis of an item's nodes in terms of a kernel's loops."""
    loops = loops_of(cuts)
    scale = total // item.total
    after, inner = {}, total
    for loop in loops:
        inner //= loop.size
        after[loop] = inner
    own: dict[Variable, Index] = {}
    outer = item.total * scale
    for a in item.axes:
        inner = outer // a.size
        index = Index.of(0)
        for loop in loops:
            if inner <= after[loop] < outer:
                index = index + Index.of(loop) * (after[loop] // inner)
        own[a] = index
        outer = inner
    return {a: replaced(i, own) for a, i in item.by.items()}


def _of_free(item: Item, by: Mapping[Variable, Index]) -> dict[Variable, Index]:
    """What an item's node, which binds its own axes, is at."""
    return {a: index for a, index in by.items() if a not in item.bound}


# ------------------------------------------------------------------------------------------------ kernels


class Write:
    """A store of a kernel. index: the distance in elements from the buffer's start."""

    __slots__ = ("buffer", "index", "value")

    def __init__(self, buffer: Buffer, index: Index, value: Node):
        self.buffer, self.index, self.value = buffer, index, value


class Column:
    """A reduction over outer loops: `value` is combined in `buffer` at `index`."""

    __slots__ = ("buffer", "index", "value", "combine")

    def __init__(self, buffer: Buffer, index: Index, value: Node, combine: str):
        self.buffer, self.index, self.value, self.combine = buffer, index, value, combine


class Kernel:
    """loops: the slowest first. outer: how many of these are threads'; 0: each thread has a piece of the only loop.
    rows: the row reductions, with their bodies over loops. seconds, bytes: predicted. is_parallel: whether all threads
    run it."""

    def __init__(self, loops: Sequence[Variable], outer: int):
        self.loops, self.outer = tuple(loops), outer
        self.rows: dict[Node, Node] = {}
        self.writes: list[Write] = []
        self.columns: list[Column] = []
        self.seconds, self.bytes, self.is_parallel = 0.0, 0, True
        self.loads: dict[Node, Index] = {}

    @property
    def sweep(self) -> tuple[Variable, ...]:
        return self.loops[self.outer :]

    def stages(self) -> dict[Node, int]:
        """For each row reduction the sweep that computes it, counted from 0."""
        stage: dict[Node, int] = {}
        for node in in_order(self.rows.values()):
            if node in self.rows:
                stage[node] = self._stage_of(self.rows[node], stage)
        for node, body in self.rows.items():
            stage.setdefault(node, self._stage_of(body, stage))
        return dict(sorted(stage.items(), key=lambda t: t[1]))

    def _stage_of(self, value: Node, stage: Mapping[Node, int]) -> int:
        return max((stage[n] + 1 for n in _above_reductions(value) if n in stage), default=0)

    def stage_of(self, value: Node) -> int:
        return self._stage_of(value, self.stages())


def scheduled(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Machine, threads: int
) -> list[Kernel]:
    """The kernels of a program, for buffers of these strides; those of scratch are added to `strides`. Raises
    TooComplex."""
    strides = dict(strides)
    for store in program.stores:
        strides.setdefault(store.buffer, strides_of(store.buffer.shape))
    items = _items(program)
    for item in items:
        item.lay_out(program.graph, strides)
    of_node = {i.node: i for i in items if i.store is None}
    groups = _grouped(items, of_node, program.graph)
    scratch = sum(s.buffer.kind == "scratch" for s in program.stores)
    for item in items:
        for r in (of_node[n] for n in item.reductions):
            if r.scratch is None and (r.group != item.group or r.row is None):
                shape = tuple(a.size for a in r.free)
                r.scratch = Buffer("scratch", scratch, shape, r.node.dtype)
                strides[r.scratch] = strides_of(shape)
                scratch += 1
    kernels = [_kernel(g, n, of_node, program.graph, strides, threads) for n, g in enumerate(groups)]
    for kernel in kernels:
        estimate(kernel, machine, threads, strides)
    return kernels


def _items(program: Program) -> list[Item]:
    """In an order in which they can run."""
    items: dict[Node | Store, Item] = {}
    for store in program.stores:
        for node in in_order([store.value]):
            if node.op == "reduce" and node not in items:
                free = sorted(node.axes, key=lambda a: (a.name, a.size))
                items[node] = Item(node, free, node.what[1], None)
        items[store] = Item(store.value, store.axes, (), store)
    return [*items.values()]


def _grouped(items: Sequence[Item], of_node: Mapping[Node, Item], graph: Graph) -> list[Group]:
    groups: list[Group] = []
    written: dict[Buffer, int] = {}
    for item in items:
        least = 0
        for r in (of_node[n] for n in item.reductions):
            least = max(least, r.group + (r.row is None))
        for buffer in item.buffers:
            least = max(least, written.get(buffer, -1) + 1)
        fitting = [n for n in range(least, len(groups)) if groups[n].takes(item, of_node, n, graph)]
        needed = [n for n in fitting if any(of_node[r].group == n for r in item.reductions)]
        later = any(of_node[r].group == least and of_node[r].row is not None for r in item.reductions)
        if needed or fitting:
            number = (needed or fitting)[0]
            groups[number].add(item)
        else:
            number = max(least + later, len(groups))
            groups.append(Group(item))
        item.group = number
        if item.store is not None:
            written[item.store.buffer] = number
    return groups


def _kernel(
    group: Group,
    number: int,
    of_node: Mapping[Node, Item],
    graph: Graph,
    strides: Mapping[Buffer, Sequence[int]],
    threads: int,
) -> Kernel:
    loops = loops_of(group.cuts)
    inner = 1
    outer = len(loops)
    while group.row is not None and inner < group.row:
        outer -= 1
        inner *= loops[outer].size
    by_item = {i: mapping(i, group.cuts, group.total, group.row) for i in group.items}
    own = {
        graph.substitute(i.node, _of_free(i, by_item[i])): i
        for i in group.items
        if i.store is None and i.row is not None
    }

    def at(item: Item, node: Node) -> Node:
        """A node of an item over the kernel's loops, with what other kernels have reduced loaded."""

        def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
            return graph.make(n.op, args, n.dtype, n.what)

        known: dict[Node, Node] = {}
        for n in item.reductions:
            r = of_node[n]
            if graph.substitute(n, by_item[item]) not in own:
                if r.scratch is None or r.group >= number:
                    raise TooComplex("a reduction is read where it is not computed yet")
                index = tuple(Index.of(a) for a in r.free)
                known[n] = graph.make("load", (), n.dtype, (r.scratch, index, ()))
            else:
                known[n] = n
        return graph.substitute(graph.transform(node, rebuilt, known=known), by_item[item])

    kernel = Kernel(loops, outer if group.row is not None else max(len(loops) - 1, 0))
    rows: dict[Node, Node] = {}
    for node, item in own.items():
        rows[node] = at(item, item.body)
    writes, columns = [], []
    for item in group.items:
        free = [by_item[item][a] for a in (item.store.axes if item.store is not None else item.free)]
        if item.store is not None:
            writes.append(Write(item.store.buffer, offset(free, strides[item.store.buffer]), at(item, item.node)))
        elif item.row is not None and item.scratch is not None:
            node = graph.substitute(item.node, _of_free(item, by_item[item]))
            writes.append(Write(item.scratch, offset(free, strides[item.scratch]), node))
        elif item.row is None:
            if item.scratch is None:
                continue
            combine = item.node.what[0]
            columns.append(Column(item.scratch, offset(free, strides[item.scratch]), at(item, item.body), combine))
    return _merged(kernel, rows, writes, columns, graph, strides, group.row is not None)


def _merged(
    kernel: Kernel,
    rows: Mapping[Node, Node],
    writes: Sequence[Write],
    columns: Sequence[Column],
    graph: Graph,
    strides: Mapping[Buffer, Sequence[int]],
    has_rows: bool,
) -> Kernel:
    """The kernel with neighbouring loops joined where all memory is read and written along both in one step."""
    values = [*rows.values(), *(w.value for w in writes), *(c.value for c in columns)]
    indices = [w.index for w in writes] + [c.index for c in columns]
    others: list[Index] = []
    for n in in_order(values):
        if n.op == "load":
            indices.append(_offset_of(n, strides))
        elif n.op == "index":
            others.append(n.what)
        elif n.op == "concat":
            others.append(n.what[0])
    loops, outer = [*kernel.loops], kernel.outer
    blocked = {v for i in others for v in variables_of(i)}
    blocked |= {v for i in indices for a in i.terms if isinstance(a, Part) for v in variables_of(a.index)}
    spans: list[list[Variable]] = [[loop] for loop in loops]
    boundary = outer if has_rows else None
    i = 0
    positions = [*range(len(loops))]
    while i + 1 < len(spans):
        a, b = spans[i][-1], spans[i + 1][0]
        first = positions[i + 1]
        size = math.prod(v.size for v in spans[i + 1])
        inner = spans[i + 1][-1]
        may = a not in blocked and b not in blocked and first != boundary
        if may and all(x.terms.get(a, 0) == x.terms.get(inner, 0) * size for x in indices):
            spans[i] += spans.pop(i + 1)
            positions.pop(i + 1)
        else:
            i += 1
    if all(len(s) == 1 for s in spans):
        by: dict[Variable, Index] = {}
        result = kernel
    else:
        by, new = {}, []
        for n, span in enumerate(spans):
            loop = axis("l", n, math.prod(v.size for v in span))
            new.append(loop)
        for loop, span in zip(new, spans, strict=True):
            rest = loop.size
            for v in span:
                before, rest = rest, rest // v.size
                index = Index.of(loop)
                by[v] = (index % before if before != loop.size else index) // rest
        if boundary is not None:
            outer = sum(p < boundary for p in positions)
        else:
            outer = max(len(new) - 1, 0)
        result = Kernel(new, outer)

    def there(node: Node) -> Node:
        return graph.substitute(node, by) if by else node

    result.rows = {there(n): there(body) for n, body in rows.items()}
    result.writes = [Write(w.buffer, replaced(w.index, by), there(w.value)) for w in writes]
    result.columns = [Column(c.buffer, replaced(c.index, by), there(c.value), c.combine) for c in columns]
    for n in in_order([*result.rows.values(), *(w.value for w in result.writes), *(c.value for c in result.columns)]):
        if n.op == "load":
            result.loads[n] = _offset_of(n, strides)
    return result


def _offset_of(load: Node, strides: Mapping[Buffer, Sequence[int]]) -> Index:
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
        elif n.op in ("cast", "concat"):
            total += machine.work("simple", 1, is_double)
    return total


def _range(index: Index) -> int:
    """How many elements of a buffer an index may reach, at most."""
    return max(1, math.prod(v.size for v in variables_of(index)))


def estimate(kernel: Kernel, machine: Machine, threads: int, strides: Mapping[Buffer, Sequence[int]]) -> None:
    """Predicts the bytes and seconds of a kernel."""
    elements = math.prod(v.size for v in kernel.loops)
    rows = math.prod(v.size for v in kernel.loops[: kernel.outer])
    vector = kernel.loops[-1] if kernel.loops else None
    used: dict[Buffer, int] = {}
    gathers = 0.0
    for n, index in kernel.loads.items():
        buffer = n.what[0]
        reach = min(_range(index), math.prod(buffer.shape)) * buffer.dtype.bytes
        used[buffer] = max(used.get(buffer, 0), reach)
        step = index.terms.get(vector, 0) if vector is not None else 0
        if (
            n.args
            or step not in (0, 1)
            or any(isinstance(a, Part) and vector in variables_of(a.index) for a in index.terms)
        ):
            gathers += _range(index)
    for w in (*kernel.writes, *kernel.columns):
        used[w.buffer] = used.get(w.buffer, 0) + math.prod(w.buffer.shape) * w.buffer.dtype.bytes
        if vector is not None and w.index.terms.get(vector, 1) != 1:
            gathers += math.prod(w.buffer.shape)
    kernel.bytes = sum(used.values())
    stages = kernel.stages()
    sweeps: dict[int, set[Node]] = {}
    for node, body in kernel.rows.items():
        sweeps.setdefault(stages[node], set()).update(_above_reductions(body))
    for w in (*kernel.writes, *kernel.columns):
        sweeps.setdefault(kernel._stage_of(w.value, stages), set()).update(_above_reductions(w.value))
    inner = set(kernel.sweep)
    work = 0.0
    for nodes in sweeps.values():
        work += elements * seconds_of([n for n in nodes if n.axes & inner], machine)
        work += elements * machine.element["simple"] * 2 + rows * 2e-8
    where = "L2" if kernel.bytes < machine.caches[1] * threads else "memory"
    busy, moving = work + gathers * machine.gather, kernel.bytes * machine.byte[where]
    alone = max(busy, moving) + min(busy, moving) / 4  # a thread's loads and functions overlap, not quite
    together = alone / (min(threads, rows) if kernel.outer else threads) + machine.launch
    kernel.is_parallel, kernel.seconds = together < alone, min(together, alone)


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
            lines.append(f"    sweep {k._stage_of(w.value, stages)}: write {w.buffer}[{index_text(w.index)}]")
    return "\n".join(lines)
