"""Values that kernels write for each other, where that takes less than computing them again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thunder.analysis.min_cut import sink_side
from thunder.core.dtypes import dtype
from thunder.kernels.accesses import memory_steps, touched
from thunder.kernels.index import Index, Part, Variable
from thunder.kernels.ir import (
    BINDERS,
    Buffer,
    Graph,
    Node,
    axis,
    reads_inside,
    replaced,
    variables_of,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    Group,
    Shared,
    above_reductions,
    elements,
    loops_of,
)
from thunder.kernels.sizes import Extent, exact
from thunder.kernels.tiles import instructions

Size = int | Extent


def _results(
    groups: Sequence[Group], graph: Graph, names: Sequence[_Names]
) -> tuple[list[list[Node]], dict[Node, Shared]]:
    """By group, the values that its loops compute, in names that all groups have; and those that are results."""
    roots: list[list[Node]] = []
    stored: dict[Node, Shared] = {}
    changed = {
        i.store.buffer for g in groups for i in g.items
        if i.store is not None and (i.store.scatter is not None or i.store.scan is not None)
    }  # fmt: skip
    for number, group in enumerate(groups):
        roots.append([])
        for item, m in group.mappings().items():
            by = {a: replaced(i, names[number].there) for a, i in m.items()}
            root = graph.substitute(item.body, by)
            roots[-1].append(root)
            if item.store is not None and item.store.buffer not in changed:
                index = tuple(by[a] for a in item.store.axes)
                if all(variables_of(i) <= root.axes for i in index):  # otherwise others may not have all of its axes
                    result = Shared(item.store.buffer, index, number)
                    stored.setdefault(root, result)
                    if root.op == "cast" and graph.stored_dtype(root.args[0]) is root.dtype:
                        stored.setdefault(root.args[0], result)
    return roots, stored


def materialized(
    groups: Sequence[Group],
    graph: Graph,
    strides: Mapping[Buffer, Sequence[int]],
    machine: Gpu,
    new_buffer: Callable[[tuple[Size, ...], dtype], Buffer],
) -> list[dict[Node, Shared]]:
    """By group, the values that it writes for later groups or reads of earlier ones, where that takes less time than
    computing them again. Results that a group writes are there anyway."""
    names = [_by_size(g, graph, strides) for g in groups]
    roots, stored = _results(groups, graph, names)
    users = Counter(n for nodes in roots for n in {n for root in nodes for n in above_reductions(root)})
    first: dict[Node, int] = {}  # by value, the first group that computes it
    shared: dict[Node, Shared] = {}
    reads: list[set[Node]] = []
    for number, nodes in enumerate(roots):

        def price(n: Node, number: int = number) -> float | None:
            """Seconds for reading a value, and for writing it unless it is in memory; None where it cannot be read."""
            size = elements(n.axes) * graph.stored_dtype(n).bytes
            if n in shared or n in stored and stored[n].group < number:
                return machine.moving(size)
            if n not in first or not _is_shareable(n):
                return None
            return machine.moving(size) * (1 + 1.5 / max(1, users[n] - 1))

        cut = _cheapest_reads(nodes, price, machine)
        for n in cut.keys() - shared.keys():
            if n in stored and stored[n].group < number:
                shared[n] = stored[n]
            else:
                axes = [v for v in names[first[n]].back if v in n.axes]  # the fastest last
                buffer = new_buffer(tuple(v.size for v in axes), graph.stored_dtype(n))
                shared[n] = Shared(buffer, tuple(map(Index.of, axes)), first[n])
        for n in _above(nodes, cut):
            first.setdefault(n, number)
        reads.append(set(cut))
    return [_in_own_names(graph, shared, read, number, names[number].back) for number, read in enumerate(reads)]


def _above(roots: Iterable[Node], read: Container[Node]) -> list[Node]:
    """The nodes that are computed where these are read, and reductions are there."""
    order: dict[Node, None] = {}
    stack = [*roots]
    while stack:
        n = stack.pop()
        if n not in order and n not in read:
            order[n] = None
            stack += n.args if n.op not in BINDERS else ()
    return [*order]


def _cheapest_reads(roots: Sequence[Node], price: Callable[[Node], float | None], machine: Gpu) -> dict[Node, None]:
    """The values to read from memory, so that a kernel takes the least time. price: seconds to read a value.

    This is a minimum cut between memory and what is computed: a node that is behind it is computed, and costs its
    instructions; one whose operands alone are before it is read. Kernels compute while they wait for memory, so that
    instructions count less where memory decides: the best of the cuts for several weights is taken."""
    nodes = _above(roots, ())
    prices = {
        n: p
        for n in nodes
        if n.op not in ("load", "constant", "index", "tuple", *BINDERS) and (p := price(n)) is not None
    }
    if not prices:
        return {}
    work = {n: elements(n.axes) * instructions([n]) * machine.instruction for n in nodes}
    moved = {n: machine.moving(touched(n) * n.dtype.bytes) for n in nodes if n.op == "load"}
    best: tuple[float, dict[Node, None]] | None = None
    for weight in (0.25, 0.5, 1.0):
        edges: list[tuple[Any, Any, float]] = [((n, "value"), "results", math.inf) for n in roots]
        for n in nodes:
            if n.op not in BINDERS:
                edges.append(("memory", (n, "operands"), weight * work[n] + moved.get(n, 0.0)))
                edges.append(((n, "operands"), (n, "value"), prices.get(n, math.inf)))
                edges += [((a, "value"), (n, "operands"), math.inf) for a in n.args if a.op not in BINDERS]
        behind = sink_side(edges, "memory", "results")
        read = {n: None for n in prices if (n, "value") in behind and (n, "operands") not in behind}
        computed = _above(roots, read)
        moving = sum(prices[n] for n in read) + sum(moved.get(n, 0.0) for n in computed)
        computing = sum(work[n] for n in computed)
        seconds = max(moving, computing) + min(moving, computing) / 4
        if best is None or seconds < best[0]:
            best = seconds, read
    assert best is not None, "there are weights"
    return best[1]


def _is_shareable(node: Node) -> bool:
    """Whether a value is one over names that all groups have, and reads memory in all of its range, not just in that of
    a piece of a concatenation."""
    if node.op == "cast" and node.args[0].op == "load" or not node.axes or any(v.name[0] != "n" for v in node.axes):
        return False
    return reads_inside(node)


def _in_own_names(
    graph: Graph, shared: Mapping[Node, Shared], reads: set[Node], number: int, back: Mapping[Variable, Index]
) -> dict[Node, Shared]:
    """The shared values that a group reads or writes, in the names of its own axes."""
    own: dict[Node, Shared] = {}
    for n, s in shared.items():
        if n in reads or number == s.group and s.buffer.kind == "scratch":
            own[graph.substitute(n, back)] = Shared(s.buffer, tuple(replaced(i, back) for i in s.index), s.group)
    return own


def _by_size(group: Group, graph: Graph, strides: Mapping[Buffer, Sequence[int]]) -> _Names:
    """Names of loops that do not depend on their order, nor on how a range is split: by size, and among those of one
    size by steps in memory."""
    steps: dict[Variable, int] = {}
    indices: list[Index] = []
    for item, by in group.mappings().items():
        for n in above_reductions(item.body):
            if n.op == "load":
                indices += [replaced(i, by) for i in n.what[1]]
                for v, step in memory_steps(graph.substitute(n, by), strides).items():
                    steps[v] = max(steps.get(v, 0), step)
            elif n.op in ("index", "concat"):
                indices.append(replaced(n.what if n.op == "index" else n.what[0], by))
            elif n.op == "scan":
                indices.append(replaced(n.what[2], by))
    runs = _runs(loops_of(group.cuts), {i.key: i for i in indices}.values())
    count: dict[Size, int] = {}
    there: dict[Variable, Index] = {}
    back: dict[Variable, Index] = {}
    for run in sorted(runs, key=lambda run: -steps.get(run[-1], 0)):
        size = math.prod(v.size for v in run)
        number = count[size] = count.get(size, 0) + 1
        name = axis("n", (size, number), size)
        back[name], inner = Index.of(0), size
        for v in run:
            outer, inner = inner, exact(inner, v.size)
            back[name] = back[name] + Index.of(v) * inner
            there[v] = (Index.of(name) % outer if outer != size else Index.of(name)) // inner
    return _Names(there, back)


class _Names(NamedTuple):
    """there: loops in terms of names; back: names in terms of loops."""

    there: dict[Variable, Index]
    back: dict[Variable, Index]


def _runs(loops: Sequence[Variable], indices: Iterable[Index]) -> list[list[Variable]]:
    """Loops of which the second goes on where the first has ended, wherever they occur."""
    apart = {v for i in indices for a in i.terms if isinstance(a, Part) for v in variables_of(a.index)}

    def continues(run: list[Variable], v: Variable) -> bool:
        last = run[-1]
        return not apart & {v, *run} and all(
            i.terms.get(last, 0) == i.terms.get(v, 0) * v.size for i in indices
        )  # fmt: skip

    runs: list[list[Variable]] = []
    for v in loops:
        run = next((r for r in runs if continues(r, v)), None)
        if run is None:
            runs.append([v])
        else:
            run.append(v)
    return runs
