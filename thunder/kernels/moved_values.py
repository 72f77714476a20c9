"""Values that are needed at several indices: stored, where that takes less than computing them at each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.kernels.index import Index, Variable, opened
from thunder.kernels.ir import (
    BINDERS,
    Buffer,
    Graph,
    Node,
    Program,
    Store,
    in_order,
    variables_of,
)
from thunder.kernels.machine import Gpu
from thunder.kernels.schedule import (
    above_reductions,
    canonical_form,
    elements,
    range_of,
)
from thunder.kernels.tiles import instructions


def stored_moves(program: Program, machine: Gpu) -> tuple[Program, frozenset[Buffer]]:
    """The program in which values that are needed at several indices are stored, where that takes less than computing
    them at each one: `f(x)[j] + f(x)[n - j]` has `f(x)` in scratch memory for the second. So are concatenations, each
    piece of which a kernel with other values computes at all indices: kernels of pieces do not. Their buffers are
    returned as well."""
    graph = program.graph
    nodes = in_order(s.value for s in program.stores)
    present = {*nodes}
    of_value: dict[Node, dict[Node, tuple[Index, ...]]] = {}  # by value, where nodes read it
    axes: dict[Node, tuple[Variable, ...]] = {}
    plain: set[Node] = set()  # values that are computed in order as well
    for n in _moved(nodes):
        for m, is_present in _parts_in_order(graph, n, present):
            if instructions(k for k in above_reductions(m) if k.op not in BINDERS) >= 8:
                value, free, at = canonical_form(graph, m)
                of_value.setdefault(value, {})[m] = at
                axes[value] = free
                plain |= {value} if is_present else set()
    lost: dict[Node, float] = {}  # by concatenation, instructions for an element that is in other pieces
    for n, count in _concatenations(program, nodes).items():
        value, free, at = canonical_form(graph, n)
        of_value.setdefault(value, {})[n] = at
        axes[value], lost[value] = free, count
    by, stores = dict[Node, Node](), list[Store]()
    number = 1 + max((s.buffer.number for s in program.stores if s.buffer.kind == "scratch"), default=-1)
    for value, those in of_value.items():
        count = elements(axes[value])
        work = instructions(m for m in above_reductions(value) if m.op not in BINDERS)
        places = {tuple((opened(i).constant, *opened(i).terms.values()) for i in at) for at in those.values()}
        again = max((len(places) + (value in plain) - 1) * work, lost.get(value, 0.0)) * count * machine.instruction
        if again <= machine.launch + machine.moving(2.5 * count * value.dtype.bytes):
            continue
        buffer = Buffer("scratch", number + len(stores), tuple(v.size for v in axes[value]), value.dtype)
        stores.append(Store(buffer, axes[value], value))
        by |= {n: graph.make("load", (), n.dtype, (buffer, at, ())) for n, at in those.items()}
    alone = frozenset(s.buffer for s in stores if s.value in lost)
    return (_with_stores(program, by, stores) if by else program), alone


def _with_stores(program: Program, by: Mapping[Node, Node], stores: Sequence[Store]) -> Program:
    """The program with other nodes in the place of some, and with stores that these read."""
    graph, known = program.graph, dict(by)
    result = [s.of(graph.replace(s.value, known)) for s in program.stores]
    for store in stores:  # behind those that write what it reads
        read = {n.what[0] for n in in_order([store.value]) if n.op == "load"}
        last = max((i for i, s in enumerate(result) if s.buffer in read), default=-1)
        result.insert(last + 1, store)
    return Program(graph, program.inputs, result)


def _concatenations(program: Program, nodes: Sequence[Node]) -> dict[Node, float]:
    """Those that are no results, whose pieces take much longer together, with the instructions that are lost."""
    roots = {n for s in program.stores for n in (s.value, *(s.value.args if s.value.op == "cast" else ()))}
    lost = {n: _lost_instructions(n) for n in nodes if n.op == "concat" and n not in roots}
    return {n: count for n, count in lost.items() if count >= 8}


def _lost_instructions(concat: Node) -> float:
    """How many instructions for an element a concatenation takes more than its pieces at their own indices; 0 where
    there are no kernels of pieces."""
    along, starts, end = concat.what
    ends = (*starts[1:], end)
    if [*opened(along).terms.values()] != [1] or not all(isinstance(n, int) for n in (*starts, end)):
        return 0.0
    work = [instructions(n for n in above_reductions(piece) if n.op not in BINDERS) for piece in concat.args]
    own = sum(w * (high - low) for w, low, high in zip(work, starts, ends, strict=True)) / (end - starts[0])
    together = dict.fromkeys(n for piece in concat.args for n in above_reductions(piece))
    return instructions(n for n in together if n.op not in BINDERS) - own


def _parts_in_order(graph: Graph, node: Node, present: set[Node]) -> list[tuple[Node, bool]]:
    """The largest values below a moved one that are computed in order as well, with True; the whole one where there are
    none, with False."""
    by: dict[Variable, Index] = {}
    for v in node.axes:
        bounds = range_of(node, v)
        if bounds is not None:
            _, _, shift, sign, _, _ = bounds
            by[v] = (Index.of(v) + -shift) * sign
    there: dict[Node, Node] = {}
    graph.substitute(node, by, there)
    stack, parts = [node], dict[Node, bool]()
    while stack:
        n = stack.pop()
        if there.get(n, n) is not n and there[n] in present and n.op not in ("load", "cast"):
            parts[n] = True
        elif n.op not in BINDERS:
            stack += n.args
    return [*parts.items()] or [(node, False)]


def _moved(nodes: Sequence[Node]) -> list[Node]:
    """The largest values that are read at one index, which is not that of the loops."""
    forms: dict[Node, dict[Variable, set]] = {}
    users: dict[Node, list[Node]] = {}
    for n in nodes:
        own: dict[Variable, set] = {}
        if n.op == "load":
            for index in n.what[1]:
                plain = opened(index)
                for v in variables_of(plain):
                    own.setdefault(v, set()).add(plain.key if not plain.is_variable(v) else None)
        if n.op not in BINDERS:
            for a in n.args:
                users.setdefault(a, []).append(n)
                for v, keys in forms[a].items():
                    own[v] = own.get(v, set()) | keys
        forms[n] = own

    def is_moved(n: Node) -> bool:
        each = forms[n].values()
        return all(len(keys) == 1 for keys in each) and any(keys != {None} for keys in each)

    largest = {n for n in nodes if is_moved(n) and n.op not in ("load", "cast", "tuple", "scan")}
    return [
        n for n in nodes
        if n in largest and (n not in users or any(u not in largest or u.op == "concat" for u in users[n]))
    ]  # fmt: skip
