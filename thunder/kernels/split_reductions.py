"""Reductions with too few programs, in two steps."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from thunder.kernels.accesses import fastest_loop, loads_of, memory_steps, touched
from thunder.kernels.dependent_reductions import Pair, pair_of
from thunder.kernels.index import Variable, opened
from thunder.kernels.ir import Buffer, Graph, Node, Program, in_order, offset
from thunder.kernels.machine import Gpu
from thunder.kernels.ranges import Ranges, exact_ranges, in_ranges, ranges_of
from thunder.kernels.schedule import above_reductions, canonical_form, elements
from thunder.kernels.tiles import WIDEST, Work, best_tile, instructions, least_rows, live_values

MOST_RANGES = 1024  # that a split reduction has


def split_reductions(
    program: Program, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, whole: Container[Node] = ()
) -> tuple[Program, dict[Node, Node]]:
    """The program with reductions that have too few programs in two steps:

    sum over r:1000000 of x[r]   becomes   sum over s:500 of sum over t:2000 of x[2000 * s + t]

    One that is read at several indices is split once: all channels of a group read the sum of the group. One that reads
    another of the same elements is split with it, so that these are read once: see `dependent_reductions`.

    whole: those that stay as they are, in canonical form. They are returned by the form that they have in the result,
    whose operands may be split.
    """
    graph = program.graph
    users = _users_of_reductions(program)
    canonical_of: dict[Node, Node] = {}
    split: dict[Node, Node] = {}  # by canonical form
    together = _together(program, users, strides, machine, whole)

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
            pair, ranges = together.get(before, (None, None))
            if ranges is None:
                split[canonical] = _split(graph, canonical, strides, machine, users.get(before, ()))
            elif pair is None:
                split[canonical] = in_ranges(graph, canonical, ranges)
            else:
                split[canonical] = pair.in_ranges(graph, canonical, ranges)
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


def _together(
    program: Program,
    users: Mapping[Node, Sequence[Node]],
    strides: Mapping[Buffer, Sequence[int]],
    machine: Gpu,
    whole: Container[Node],
) -> dict[Node, tuple[Pair | None, list[Ranges]]]:
    """The ranges of reductions of the same elements, of which one reads the other, by their canonical forms. The one
    that reads has the pair beside them."""
    graph = program.graph
    result: dict[Node, tuple[Pair | None, list[Ranges]]] = {}
    for n in in_order(s.value for s in program.stores):
        if n.op != "reduce" or _binds_scans(n):
            continue
        second = canonical_form(graph, n)[0]
        pair = pair_of(graph, second) if second not in whole and second not in result else None
        if pair is None:
            continue
        first = canonical_form(graph, pair.first)[0]
        if first in result:  # which another one reads as well
            ranges = pair.of_second(result[first][1])
        else:
            ranges = _ranges_together(pair, second, strides, machine, users.get(second, ()))
        if ranges:
            result[second] = pair, ranges
            result.setdefault(first, (None, pair.of_first(ranges)))
    return result


def _ranges_together(
    pair: Pair, second: Node, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, users: Sequence[Node]
) -> list[Ranges]:
    """Ranges that are tiles, where kernels for these are predicted to be faster than one that reads its rows again for
    the second reduction; none where they are not."""
    (body,), (_, bound) = second.args, second.what
    loads = [n for n in loads_of(body) if n.axes & set(bound)]
    if not loads or not all(isinstance(v.size, int) for v in bound):
        return []
    rows, width = elements(second.axes), elements(bound)
    steps, items, moved = _memory_of(second, loads, strides)
    work = [instructions(above_reductions(r.args[0])) + 2 for r in (pair.first, second)]
    whole_users = [r for r in users if elements(r.axes) == rows * width]
    after = instructions(dict.fromkeys(n for r in whole_users for n in above_reductions(r)))
    passes, live = [*work, after] if whole_users else work, live_values([body])
    alone, _ = best_tile(Work(rows, width, items, moved * (1 + bool(whole_users)), passes, live, 2), machine)
    best, ranges = math.inf, list[Ranges]()
    for most in (128, 256, 512, 1024, 2048, 4096, 8192):
        those = exact_ranges(_slowest_first(bound, steps), width, min(most, WIDEST // least_rows(items)))
        if those:
            count = math.prod(r.count for r in those)
            tiles = Work(rows * count, width // count, items, moved, [sum(work)], live, 2)
            seconds, _ = best_tile(tiles, machine, is_whole=True)
            if seconds < best:
                best, ranges = seconds, those
    together = best + 2 * machine.launch
    if whole_users:
        together += machine.launch + max(machine.moving(2 * moved), rows * width * after * machine.instruction)
    return ranges if together < 0.9 * alone else []


def _split(
    graph: Graph, node: Node, strides: Mapping[Buffer, Sequence[int]], machine: Gpu, users: Sequence[Node]
) -> Node:
    """The reduction in two steps, partial results in memory, where that is predicted to be faster; else the node
    itself."""
    _, bound = node.what
    body, rows = node.args[0], elements(node.axes)
    loads = [n for n in loads_of(body) if n.axes & set(bound)]
    if not loads:
        return node
    width = elements(bound)
    steps, items, moved = _memory_of(node, loads, strides)
    work = instructions(above_reductions(body)) + 2
    wanted = -(-machine.multiprocessors * machine.warps // 4 // -(-rows // (64 if items else 1)))
    wanted = min(MOST_RANGES, wanted, max(2, width // (16 if items else 2048)))
    ranges = ranges_of(_slowest_first(bound, steps), wanted)
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
    return in_ranges(graph, node, ranges)


def _memory_of(
    node: Node, loads: Sequence[Node], strides: Mapping[Buffer, Sequence[int]]
) -> tuple[list[dict[Variable, int]], list[int], int]:
    """What a reduction reads: the steps in memory along axes by load, the bytes of elements that lie together along the
    reduction's rows, and all bytes."""
    order = [*node.axes, *node.what[1]]
    fastest = [fastest_loop(opened(offset(n.what[1], strides[n.what[0]])), order) for n in loads]
    items = [n.dtype.bytes for n, v in zip(loads, fastest, strict=True) if v in node.axes]
    return [memory_steps(n, strides) for n in loads], items, sum(n.dtype.bytes * touched(n) for n in loads)


def _slowest_first(bound: Sequence[Variable], steps: Sequence[Mapping[Variable, int]]) -> list[Variable]:
    """The axes of a reduction, those with the largest steps in memory first."""
    return sorted(bound, key=lambda a: -max(s.get(a, 0) for s in steps) * (a.size != 1))
