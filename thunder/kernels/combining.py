"""Combinations of elements: what changes nothing in one, and scans that are aligned with those that read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thunder.core.dtypes import FLOAT, dtype
from thunder.kernels.index import Index, Variable, opened, within
from thunder.kernels.ir import Combine, Graph, Node, Program, axis, in_order
from thunder.kernels.schedule import canonical_form, whole_scan


def neutral(combine: Combine, kind: dtype) -> int | float:
    """What changes nothing when it is combined."""
    if combine == Combine.SUM or combine == Combine.PROD:
        number = int(combine == Combine.PROD)
        return float(number) if kind.category == FLOAT else number
    if kind.category == FLOAT:
        return -math.inf if combine == Combine.AMAX else math.inf
    bits = 8 * kind.bytes
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.signed else (0, (1 << bits) - 1)
    return low if combine == Combine.AMAX else high


def neutrals(combine: str, operands: Sequence[Node]) -> list[int | float]:
    """What changes nothing when a scan combines it, for each operand."""
    if combine == "linear":  # h = a * (the one before) + b
        return [1.0, 0.0]
    if combine == "logsumexp":
        return [-math.inf]
    if combine in ("argmax", "argmin"):
        return [neutral(Combine(combine.replace("arg", "a")), operands[0].dtype), 0]
    return [neutral(Combine(combine), operands[0].dtype)]


def aligned_scans(program: Program) -> Program:
    """The program whose scans have the elements of those that read them, so that both are one kernel:

    concat at d of 0..1: 1, 1..n: prod over r:n-1 up to d - 1 of x[r]
    becomes that of prod over r:n up to d of concat at r of 0..1: 1, 1..n: x[r - 1]
    """
    graph = program.graph
    reads: dict[Node, dict[Node, tuple[Variable, int] | None]] = {}  # by what is scanned
    for n in in_order(s.value for s in program.stores):
        if n.op == "scan":
            canonical, _, _ = canonical_form(graph, whole_scan(graph, n)[0])
            reads.setdefault(canonical, {})[n] = _alignment(n)
    alignments = {n: at for those in reads.values() if _is_one(those) for n, at in those.items() if at is not None}

    def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
        node = graph.make(n.op, args, n.dtype, n.what)
        return _aligned(graph, node, *alignments[n]) if n in alignments and node.op == "scan" else node

    if not alignments:
        return program
    known: dict[Node, Node] = {}
    stores = [s.of(graph.transform(s.value, rebuilt, known=known)) for s in program.stores]
    return Program(graph, program.inputs, stores)


def _alignment(scan: Node) -> tuple[Variable, int] | None:
    """The axis along which a scan is read, and how far ahead of it; None where it is not read in order, or combines
    elements that are ahead of the first, or behind the last, that reads it."""
    _, bound, index, is_backwards = scan.what
    plain = opened(index)
    ((v, factor),) = plain.terms.items() if len(plain.terms) == 1 else ((None, 0),)
    if not isinstance(v, Variable) or factor != 1:
        return None
    shift = plain.constant
    if any(type(n) is not int for n in (v.size, bound.size, shift)):
        return None
    is_inside = v.size + shift >= bound.size if is_backwards else shift <= 0
    return (v, shift) if is_inside else None


def _is_one(reads: dict[Node, tuple[Variable, int] | None]) -> bool:
    """Whether all read a scan in one way, which is not in order and of its size."""
    ways = {None if at is None else (at[0].size, at[1]) for at in reads.values()}
    return len(ways) == 1 and None not in ways and ways != {(next(iter(reads)).what[1].size, 0)}


def _aligned(graph: Graph, scan: Node, v: Variable, shift: int) -> Node:
    """A scan's operands as they stand `shift` places further along `v`, neutral beyond the ends, so that two scans are
    one loop."""
    combine, bound, _, is_backwards = scan.what
    body = scan.args[0]
    along = axis("r", (scan.depth, "at", shift), v.size)
    first, last = max(0, -shift), min(v.size, bound.size - shift)
    parts = body.args if body.op == "tuple" else (body,)
    at = within(Index.of(along) + shift, bound.size)
    results = []
    for part, number in zip(parts, neutrals(combine, parts), strict=True):
        nothing, inner = graph.make("constant", (), part.dtype, number), graph.substitute(part, {bound: at})
        pieces = [(0, nothing)] * (first > 0) + [(first, inner)] + [(last, nothing)] * (last < v.size)
        what = Index.of(along), tuple(start for start, _ in pieces), v.size
        results.append(graph.make("concat", [p for _, p in pieces], part.dtype, what) if len(pieces) > 1 else inner)
    body = results[0] if len(results) == 1 else graph.make("tuple", results, body.dtype)
    return graph.make("scan", (body,), scan.dtype, (combine, along, Index.of(v), is_backwards))
