"""Reductions with too few programs, in two steps."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from thunder.kernels.accesses import fastest_loop, loads_of, memory_steps, touched
from thunder.kernels.combining import neutral
from thunder.kernels.index import Index, Variable, opened, within
from thunder.kernels.ir import (
    Buffer,
    Graph,
    Node,
    Program,
    axis,
    in_order,
    offset,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    above_reductions,
    canonical_form,
    elements,
)
from thunder.kernels.sizes import Extent, divides, hint, rounded_up
from thunder.kernels.tiles import Work, best_tile, instructions, live_values

Size = int | Extent
MOST_RANGES = 1024  # that a split reduction has


def split_reductions(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, whole: Container[Node] = ()
) -> tuple[Program, dict[Node, Node]]:
    """The program with reductions that have too few programs in two steps:

    sum over r:1000000 of x[r]   becomes   sum over s:500 of sum over t:2000 of x[2000 * s + t]

    One that is read at several indices is split once: all channels of a group read the sum of the group.

    whole: those that stay as they are, in canonical form. They are returned by the form that they have in the result,
    whose operands may be split.
    """
    graph = program.graph
    users = _users_of_reductions(program)
    canonical_of: dict[Node, Node] = {}
    split: dict[Node, Node] = {}  # by canonical form

    def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
        node = graph.make(n.op, args, n.dtype, n.what)
        if node.op != "reduce" or _binds_scans(node):
            return node
        canonical, free, at = canonical_form(graph, node)
        before = canonical_form(graph, n)[0]
        if before in whole:
            canonical_of[canonical] = before
            return node
        if canonical not in split:
            split[canonical] = _split(graph, canonical, strides, machine, users.get(before, ()))
        if split[canonical] is canonical:
            return node
        return graph.substitute(split[canonical], dict(zip(free, at, strict=True)))

    known: dict[Node, Node] = {}
    stores = [s.of(graph.transform(s.value, rebuilt, known=known)) for s in program.stores]
    return Program(graph, program.inputs, stores), canonical_of


def _binds_scans(node: Node) -> bool:
    """Whether a reduction is of a scan's elements: a range of them begins with those before it."""
    return any(n.op == "scan" and n.axes & set(node.what[1]) for n in above_reductions(node.args[0]))


def _users_of_reductions(program: Program) -> dict[Node, list[Node]]:
    """By reduction, in canonical form, the values of stores and of other reductions that read it."""
    roots = [s.value for s in program.stores]
    roots += [n.args[0] for n in in_order(roots) if n.op == "reduce"]
    users: dict[Node, list[Node]] = {}
    for root in roots:
        for n in above_reductions(root):
            if n.op == "reduce":
                users.setdefault(canonical_form(program.graph, n)[0], []).append(root)
    return users


def _split(
    graph: Graph, node: Node, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, users: Sequence[Node]
) -> Node:
    """The reduction in two steps, partial results in memory, where that is predicted to be faster; else the node
    itself."""
    _, bound = node.what
    body, rows = node.args[0], elements(node.axes)
    loads = [n for n in loads_of(body) if n.axes & set(bound)]
    steps = [memory_steps(n, strides) for n in loads]
    if not steps:
        return node
    width = elements(bound)
    moved = sum(n.dtype.bytes * touched(n) for n in loads)
    work = instructions(above_reductions(body)) + 2
    fastest = [fastest_loop(opened(offset(n.what[1], strides[n.what[0]])), [*node.axes, *bound]) for n in loads]
    items = [n.dtype.bytes for n, v in zip(loads, fastest, strict=True) if v in node.axes]
    wanted = -(-machine.multiprocessors * machine.warps // 4 // -(-rows // (64 if items else 1)))
    wanted = min(MOST_RANGES, wanted, max(2, width // (16 if items else 2048)))
    ranges = _ranges_of(sorted(bound, key=lambda a: -max(s.get(a, 0) for s in steps) * (a.size != 1)), wanted)
    count = math.prod(r.count for r in ranges)
    if count < 2:
        return node
    is_known = all(isinstance(a.size, int) for a in bound)
    # the same programs compute all elements of a row that need the reduction, unless it is split
    whole = [r for r in users if elements(r.axes) == rows * width]
    after = instructions(dict.fromkeys(n for r in whole for n in above_reductions(r)))
    passes = [work, after] if whole else [work]
    live = live_values([body])
    alone, tile = best_tile(Work(rows, width, items, moved * len(passes), passes, live), machine, is_known)
    partial = Work(rows * count, -(-width // count), items, moved, [work], live)
    together, _ = best_tile(partial, machine, is_known)
    if whole:
        together += machine.launch + max(machine.moving(moved), rows * width * after * machine.instruction)
    elif not tile.is_whole:  # what reads the reduction is another pass, by the same programs or by more
        alone, _ = best_tile(Work(rows, width, items, moved, [work, work], live), machine, is_known)
        together *= 2
    if together + machine.launch > 0.8 * alone:
        return node
    return _in_ranges(graph, node, ranges)


class _Ranges(NamedTuple):
    """The ranges of an axis: how many there are, and how many elements each has but for the last."""

    axis: Variable
    count: int
    length: Size


def _ranges_of(bound: Sequence[Variable], wanted: int) -> list[_Ranges]:
    """The ranges of a split reduction, at most `wanted` in all. bound: the axes, the slowest in memory first. Each
    index of the first ones is a range, and the axis after them is cut."""
    ranges: list[_Ranges] = []
    for a in bound:
        size, left = hint(a.size), wanted // math.prod(r.count for r in ranges)
        if left < 2 or size == 1:
            break
        count = min(left, size)
        count = next((n for n in range(count, count // 2, -1) if divides(n, a.size)), count)
        length = rounded_up(a.size, count)
        # for smaller sizes some may be empty
        ranges.append(_Ranges(a, count if isinstance(length, Extent) else -(-size // length), length))
        if length != 1:
            break
    return ranges


def _in_ranges(graph: Graph, node: Node, ranges: Sequence[_Ranges]) -> Node:
    """A reduction of reductions over ranges of its axes."""
    combine, bound = node.what
    inner = node.args[0]
    parts: list[Variable] = []
    rest = [a for a in bound if all(a is not r.axis for r in ranges)]
    for number, (whole, count, length) in enumerate(ranges):
        part, own = axis("r", (node.depth, "range", number), count), axis("r", (node.depth, "in", number), length)
        at = Index.of(part) * length + Index.of(own)
        inner = graph.substitute(inner, {whole: within(at, whole.size)})
        if length * count != whole.size:
            nothing = graph.make("constant", (), node.dtype, neutral(combine, node.dtype))
            inner = graph.make("concat", (inner, nothing), node.dtype, (at, (0, whole.size), count * length))
        parts.append(part)
        rest.append(own)
    bounds = tuple(a for a in rest if a.size != 1)
    partial = graph.make("reduce", (inner,), node.dtype, (combine, bounds)) if bounds else inner
    return graph.make("reduce", (partial,), node.dtype, (combine, tuple(parts)))
