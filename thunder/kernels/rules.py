"""The rewrite rules of the kernel IR: rows of a pattern, a condition and a replacement, applied to a fixed point.

In a pattern a tuple is a node, a name is anything (the same thing where it stands twice), and a number a constant of
that value. What a rule replaces has the same value for all numbers, infinities, nan and -0.0 among them; `x + 0.0` is
not `x`. Equal nodes are one node already: see `ir.Graph`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder.core.dtypes import BOOL, FLOAT, INTEGER, bool8, dtype, int64
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Part, Variable, opened
from thunder.kernels.ir import BINDERS, COMBINES, EXTREMES, Combine, Graph, Node, in_order, replaced, variables_of
from thunder.kernels.sizes import Extent, Undecided, at_least, hint

Bindings = dict[str, Node]
Size = int | Extent


class Rule(NamedTuple):
    """pattern: of the node that is replaced. condition: of the nodes that the names stand for ("it": the whole one).
    replacement: a name, a pattern whose nodes have the type of the whole one, or a function of graph and nodes, which
    may find that the rule does not fit: None."""

    pattern: tuple
    condition: Callable[[Bindings], bool]
    replacement: Any


def _always(f: Bindings) -> bool:
    return True


def _of(*categories: int) -> Callable[[Bindings], bool]:
    return lambda f: f["it"].dtype.category in categories


def _is_power_of_two(f: Bindings) -> bool:
    c = f["c"]
    if c.op != "constant" or c.dtype.category != FLOAT or not math.isfinite(c.what) or not c.what:
        return False
    mantissa, exponent = math.frexp(c.what)
    return abs(mantissa) == 0.5 and -100 < exponent < 100


def _inverse(graph: Graph, f: Bindings) -> Node:
    c = f["c"]
    return graph.make("mul", (f["x"], graph.make("constant", (), c.dtype, 1.0 / c.what)), f["it"].dtype)


def _is_exact_and_back(f: Bindings) -> bool:
    """A type that holds all values of the other one."""
    narrow, wide = f["x"].dtype, f["it"].args[0].dtype
    return f["it"].dtype is narrow and _holds(wide, narrow)


_DIGITS = {"bfloat16": (8, 8), "float16": (11, 5), "float32": (24, 8), "float64": (53, 11)}


def _holds(wide: dtype, narrow: dtype) -> bool:
    if wide.category == FLOAT and narrow.category == FLOAT:
        return all(w >= n for w, n in zip(_DIGITS[wide.name], _DIGITS[narrow.name], strict=True))
    if wide.category == INTEGER and narrow.category == INTEGER:
        return wide.bytes > narrow.bytes and wide.signed or wide is narrow
    return narrow.category == BOOL


def _is_between(f: Bindings) -> bool:
    return any(f["it"].what[0].is_inside(lo, hi) for lo, hi in _ranges(f["it"]))


def _ranges(concat: Node) -> list[tuple[Size, Size]]:
    _, starts, end = concat.what
    return [*zip(starts, (*starts[1:], end), strict=True)]


def _only_piece(graph: Graph, f: Bindings) -> Node:
    index = f["it"].what[0]
    return next(
        piece for piece, (lo, hi) in zip(f["it"].args, _ranges(f["it"]), strict=True) if index.is_inside(lo, hi)
    )


def _like_pieces(concat: Node) -> bool:
    first, *others = concat.args
    return first.op != "constant" and all(p.op == first.op and p.dtype is first.dtype for p in others)


def _rotated(graph: Graph, f: Bindings) -> Node | None:
    """`x[j + 3] for j < 53, x[j - 53] from there on`, where x has 56 elements, is `x[(j + 3) % 56]`."""
    along, starts, end = opened(f["it"].what[0]), *f["it"].what[1:]
    (v, factor), *others = along.terms.items() or [(None, 0)]
    if len(starts) != 2 or starts[0] != 0 or others or factor != 1 or not isinstance(v, Variable):
        return None
    first, second = f["it"].args
    around, rest = {v: Index.of(v) + -end}, end - starts[1]
    plain = graph.reindexed(first, {v}, lambda there: replaced(opened(there), around))
    if v not in first.axes or plain is not graph.reindexed(second, {v}, opened):
        return None
    return _at_any(graph, first, {v: (along + rest) % end + (-rest - along.constant)})


def _repeated_function(concat: Node) -> str | None:
    """A transcendental function of one operand that several pieces are, which are too short for kernels of their own:
    a kernel computes each piece for each element."""
    _, starts, end = concat.what
    if hint(end) >= SHORT * len(starts) and len(starts) <= MOST_LIKE:
        return None
    pieces = {p for p in concat.args if len(p.args) == 1 and p.op in FUNCTIONS and FUNCTIONS[p.op].rate == "exp"}
    counts = Counter((p.op, p.args[0].dtype) for p in pieces)
    return next((op for (op, _), n in counts.most_common(1) if n > 1), None)


def _of_one_operand(graph: Graph, f: Bindings) -> Node:
    """`sin(x[j]) for j < 3, cos(x[j - 3]) for j < 6, sin(x[j - 6]) from there on` computes one sine of each element, of
    the concatenation of its operands. Where a piece is no sine, its operand is 0."""
    concat, op = f["it"], _repeated_function(f["it"])
    kind = next(p for p in concat.args if p.op == op).args[0].dtype
    zero = graph.make("constant", (), kind, 0.0)
    is_own = [p.op == op and p.args[0].dtype is kind for p in concat.args]
    operands = [p.args[0] if own else zero for p, own in zip(concat.args, is_own, strict=True)]
    shared = graph.make(op, (graph.make("concat", operands, kind, concat.what),), concat.dtype)
    pieces = [shared if own else p for p, own in zip(concat.args, is_own, strict=True)]
    return graph.make("concat", pieces, concat.dtype, concat.what)


def _joined(graph: Graph, f: Bindings) -> Node | None:
    """`x[0, j] for j < 8, x[1, j - 8] from there on` is `x[j // 8, j % 8]`."""
    along, starts, end = opened(f["it"].what[0]), *f["it"].what[1:]
    pieces, count, size = f["it"].args, len(starts), starts[1] if len(starts) > 1 else end
    if not 1 < count <= MOST_LIKE or any(n != k * size for k, n in enumerate((*starts, end))):
        return None
    number, by = Variable("piece", count), dict[Variable, Index]()
    (v, factor), *others = along.terms.items() or [(None, 0)]
    if not others and factor == 1 and isinstance(v, Variable):
        inner = Variable("within", size)
        start = Index.of(inner) + -along.constant
        pieces = [
            graph.reindexed(piece, {v}, functools.partial(_reindexed, v, start + k * size))
            for k, piece in enumerate(pieces)
        ]
        by[inner] = along % size
    elif size != 1:
        return None
    merged = _merged(graph, pieces, Index.of(number))
    return None if merged is None else _at_any(graph, merged, by | {number: along // size})


def _at_any(graph: Graph, node: Node, by: dict[Variable, Index]) -> Node | None:
    """A piece at all indices of its concatenation; None where it reads outside of a buffer there, as far as that is
    known."""

    def change(index: Index) -> Index:
        for v in by:
            index = _opened_by(v, index)
        return replaced(index, by)

    result = graph.reindexed(node, {*by}, change)
    loads = [n for n in in_order([result]) if n.op == "load"]
    inside = (i.is_inside(0, size) for n in loads for i, size in zip(n.what[1], n.what[0].shape, strict=True))
    return result if all(inside) else None


def _reindexed(v: Variable, by: Index, index: Index) -> Index:
    return replaced(_opened_by(v, index), {v: by})


def _opened_by(v: Variable, index: Index) -> Index:
    """An equal index that says no more of the range of parts in which a variable is than their terms do."""
    total = Index.of(index.constant)
    for atom, factor in index.terms.items():
        is_open = isinstance(atom, Part) and atom.remainder is None and v in variables_of(atom.index)
        total = total + (_opened_by(v, atom.index) if is_open else Index({atom: 1}, 0)) * factor
    return total


MOST_LIKE = 16  # pieces that are compared, or that have kernels of their own
SHORT = 16  # elements of a piece along its dimension, below which it has none


def _merged(graph: Graph, pieces: Sequence[Node], number: Index) -> Node | None:
    """One node for pieces that differ in the constants of their indices alone; None where there is none. number: of the
    piece."""
    known: dict[tuple[Node, ...], Node] = {}
    stack = [tuple(pieces)]
    while stack:
        nodes = stack[-1]
        first = nodes[0]
        if nodes in known or all(n is first for n in nodes):
            known.setdefault(nodes, first)
            stack.pop()
            continue
        is_like = all(n.op == first.op and n.dtype is first.dtype and len(n.args) == len(first.args) for n in nodes)
        if not is_like or first.op in BINDERS:  # a reduction at quotients of axes is computed more often than once
            return None
        below = [*zip(*(n.args for n in nodes), strict=True)]
        if missing := [those for those in below if those not in known]:
            stack += missing
            continue
        what = _merged_what([n.what for n in nodes], first.op, number)
        if what is None:
            return None
        known[nodes] = graph.make(first.op, [known[those] for those in below], first.dtype, what.value)
    return known[tuple(pieces)]


class _What(NamedTuple):
    """A description of a node, which may be None itself."""

    value: Any


def _merged_what(each: Sequence[Any], op: str, number: Index) -> _What | None:
    """The description of a node that stands for several, chosen by an index; None where there is none."""
    if op == "constant":  # 0.0 and -0.0 are two
        return _What(each[0]) if len({repr(what) for what in each}) == 1 else None
    if all(what == each[0] for what in each):
        return _What(each[0])
    if op == "load" and all(what[0] is each[0][0] and what[2] == each[0][2] for what in each):
        indices = [_merged_index(those, number) for those in zip(*(what[1] for what in each), strict=True)]
        return None if None in indices else _What((each[0][0], tuple(indices), each[0][2]))
    if op == "index":
        index = _merged_index(each, number)
        return None if index is None else _What(index)
    return None


def _merged_index(indices: Sequence[Index], number: Index) -> Index | None:
    """`3 * j + 2 * (k // 2)` for `3 * j, 3 * j, 3 * j + 2, 3 * j + 2`, where k is the number."""
    first, constants = indices[0], [i.constant for i in indices]
    if any((i + -i.constant).key != (first + -first.constant).key for i in indices):
        return None
    steps = [n - constants[0] for n in constants]
    for period in range(1, len(steps) + 1):
        if len(steps) % period:
            continue
        small, large = (steps[1] if period > 1 else 0), (steps[period] if period < len(steps) else 0)
        if all(n == small * (k % period) + large * (k // period) for k, n in enumerate(steps)):
            return first + number % period * small + number // period * large
    return None


def _are_apart(f: Bindings) -> bool:
    """Two concatenations of the same ranges, of which one at least is a constant in each, or they are apart there."""
    x, y = f["x"], f["y"]
    if x.op != "concat" or y.op != "concat" or x.what[0].key != y.what[0].key or x.what[1:] != y.what[1:]:
        return False
    pairs = zip(x.args, y.args, strict=True)
    return all("constant" in (a.op, b.op) or _are_apart({"x": a, "y": b}) for a, b in pairs)


def _added_apart(graph: Graph, f: Bindings) -> Node:
    kind, x, y = f["it"].dtype, f["x"], f["y"]
    pieces = [graph.make("add", (a, b), kind) for a, b in zip(x.args, y.args, strict=True)]
    return graph.make("concat", pieces, kind, x.what)


def _is_padded(f: Bindings) -> bool:
    x, c = f["x"], f["c"]
    return c.op == "constant" and x.op == "concat" and any(piece.op == "constant" for piece in x.args)


def _added_inside(graph: Graph, f: Bindings) -> Node:
    kind, x = f["it"].dtype, f["x"]
    return graph.make("concat", [graph.make("add", (piece, f["c"]), kind) for piece in x.args], kind, x.what)


def _binds_nothing(f: Bindings) -> bool:
    combine, bound = f["it"].what
    return f["x"].axes.isdisjoint(bound) and (combine != Combine.PROD or all(type(a.size) is int for a in bound))


def _power(graph: Graph, x: Node, count: int) -> Node:
    """Of integers, which libraries have no power of."""
    if count < 2:
        return x if count else graph.make("constant", (), x.dtype, 1)
    half = _power(graph, x, count // 2)
    square = graph.make("mul", (half, half), x.dtype)
    return graph.make("mul", (square, x), x.dtype) if count % 2 else square


def _of_equal(graph: Graph, f: Bindings) -> Node:
    """A reduction of elements that are all the same."""
    combine, bound = f["it"].what
    count = math.prod(a.size for a in bound)
    if combine in EXTREMES:
        return f["x"]
    kind = f["it"].dtype
    if combine == Combine.PROD and kind.category != FLOAT:
        return _power(graph, f["x"], count)
    number = _number(graph, count, kind)
    return graph.make("mul" if combine == Combine.SUM else "pow", (f["x"], number), kind)


def _number(graph: Graph, n: int | Extent, kind: dtype) -> Node:
    if isinstance(n, Extent):
        number = graph.make("index", (), int64, Index.of(n))
        return number if kind is int64 else graph.make("cast", (number,), kind)
    return graph.make("constant", (), kind, float(n) if kind.category == FLOAT else n)


def _is_read_backwards(f: Bindings) -> bool:
    factors = f["it"].what[2].terms.values()
    return bool(factors) and all(at_least(-1, factor) for factor in factors)


def _turned(graph: Graph, f: Bindings) -> Node:
    """The scan of the elements in the other order, read in the other order."""
    combine, bound, index, is_backwards = f["it"].what
    last = bound.size - 1
    body = graph.substitute(f["x"], {bound: Index.of(bound) * -1 + last})
    return graph.make("scan", (body,), f["it"].dtype, (combine, bound, index * -1 + last, not is_backwards))


def _is_read_at_an_end(f: Bindings) -> bool:
    combine, bound, index, is_backwards = f["it"].what
    return combine in COMBINES and not index.terms and index.constant == (0 if is_backwards else bound.size - 1)


def _reduced(graph: Graph, f: Bindings) -> Node:
    combine, bound, _, _ = f["it"].what
    return graph.make("reduce", (f["x"],), f["it"].dtype, (Combine(combine), (bound,)))


_BOTH = ("logical_and", "bitwise_and")  # of truth values


def _one_hot(f: Bindings) -> tuple[list[Node], Node, Node] | None:
    """Of a sum over r of `where(c & (r == i), y, 0)`, in which r is nowhere else: the parts of c, i and y."""
    combine, bound = f["it"].what
    c, y, rest = f["x"].args if f["x"].op == "where" else (None,) * 3
    if combine != Combine.SUM or len(bound) != 1 or c is None or rest.op != "constant" or rest.what != 0:
        return None
    (r,) = bound
    tests = [c]
    while any(t.op in _BOTH for t in tests):
        tests = [a for t in tests for a in (t.args if t.op in _BOTH else (t,))]
    own = [t for t in tests if r in t.axes]
    if len(own) != 1 or own[0].op != "eq" or r in y.axes or any(t.dtype.category != BOOL for t in tests):
        return None
    for at, i in (own[0].args, own[0].args[::-1]):
        if at.op == "index" and at.what.is_variable(r) and r not in i.axes:
            return [t for t in tests if t is not own[0]], i, y
    return None


def _of_one_hot(graph: Graph, f: Bindings) -> Node:
    """The only element that may be other than 0, where there is one. A sum of zeros is no -0.0."""
    tests, i, y = _one_hot(f) or ([], f["x"], f["x"])
    (r,) = f["it"].what[1]
    first, size = (_number(graph, n, i.dtype) for n in (0, r.size))
    tests = [*tests, graph.make("ge", (i, first), bool8), graph.make("lt", (i, size), bool8)]
    c = functools.reduce(lambda a, b: graph.make("logical_and", (a, b), bool8), tests)
    zero = graph.make("constant", (), y.dtype, 0.0 if y.dtype.category == FLOAT else 0)
    return graph.make("where", (c, graph.make("add", (y, zero), y.dtype), zero), y.dtype)


def _are_constants(f: Bindings) -> bool:
    it = f["it"]
    return it.op in _FOLDED and bool(it.args) and all(a.op == "constant" for a in it.args)


def _fold(graph: Graph, f: Bindings) -> Node:
    it = f["it"]
    value = _FOLDED[it.op](*(a.what for a in it.args))
    return graph.make("constant", (), it.dtype, _rounded(value, it.dtype))


def _rounded(value: Any, kind: dtype) -> Any:
    """A number as an element of a type holds it. The double result of one operation on float32s rounds to float32 as
    the operation itself does."""
    if kind.category == BOOL:
        return bool(value)
    if kind.category == INTEGER:
        bits = 8 * kind.bytes
        value = int(value) & ((1 << bits) - 1)
        return value - (1 << bits) if kind.signed and value >> (bits - 1) else value
    if kind.name == "float32" and math.isfinite(value):
        try:
            return struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            return math.copysign(math.inf, value)
    return float(value)


def _constant_of(graph: Graph, f: Bindings, value: Any) -> Node:
    return graph.make("constant", (), f["it"].dtype, value)


def _is_foldable_cast(f: Bindings) -> bool:
    x, kind = f["x"], f["it"].dtype
    if x.op != "constant" or kind.bytes == 2 and kind.category == FLOAT:
        return False
    return kind.category in (BOOL, FLOAT) or x.dtype.category != FLOAT


_FOLDED: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "eq": operator.eq,
    "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "logical_and": lambda a, b: bool(a) and bool(b), "logical_or": lambda a, b: bool(a) or bool(b),
    "logical_not": operator.not_,
}  # fmt: skip


def _is_index_and_number(f: Bindings) -> bool:
    """An index, and a number that it can be combined with."""
    x, c = f["x"], f["c"]
    return x.op == "index" and c.op == "constant" and f["it"].dtype.name == "int64" and abs(c.what) < 1 << 40


def _is_divided_index(f: Bindings) -> bool:
    return _is_index_and_number(f) and f["c"].what > 0 and at_least(f["x"].what.low, 0)


def _index_by(combine: Callable[[Index, int], Index]) -> Callable[[Graph, Bindings], Node]:
    return lambda g, f: g.make("index", (), f["it"].dtype, combine(f["x"].what, f["c"].what))


def _index_of(graph: Graph, f: Bindings, index: Index) -> Node:
    return graph.make("index", (), f["it"].dtype, index)


def _are_indices(f: Bindings) -> bool:
    return f["x"].op == f["y"].op == "index" and f["it"].dtype.name == "int64"


RULES: list[Rule] = [
    # constants
    Rule(("*",), _are_constants, _fold),
    Rule(("cast", "x"), _is_foldable_cast, lambda g, f: _constant_of(g, f, _rounded(f["x"].what, f["it"].dtype))),
    # what changes nothing
    Rule(("mul", "x", 1), _always, "x"),
    Rule(("mul", 1, "x"), _always, "x"),
    Rule(("true_divide", "x", 1), _always, "x"),
    Rule(("sub", "x", 0), lambda f: math.copysign(1, f["it"].args[1].what) > 0, "x"),
    Rule(("add", "x", 0), _of(INTEGER), "x"),
    Rule(("add", 0, "x"), _of(INTEGER), "x"),
    Rule(("neg", ("neg", "x")), _always, "x"),
    Rule(("abs", ("abs", "x")), _always, ("abs", "x")),
    Rule(("abs", ("neg", "x")), _of(FLOAT), ("abs", "x")),
    Rule(("where", True, "x", "y"), _always, "x"),
    Rule(("where", False, "x", "y"), _always, "y"),
    Rule(("where", "c", "x", "x"), _always, "x"),
    Rule(("logical_not", ("logical_not", "x")), lambda f: f["x"].dtype.category == BOOL, "x"),
    Rule(("logical_and", "x", True), lambda f: f["x"].dtype.category == BOOL, "x"),
    Rule(("logical_and", True, "x"), lambda f: f["x"].dtype.category == BOOL, "x"),
    Rule(("logical_or", "x", False), lambda f: f["x"].dtype.category == BOOL, "x"),
    Rule(("logical_or", False, "x"), lambda f: f["x"].dtype.category == BOOL, "x"),
    Rule(("maximum", "x", "x"), _always, "x"),
    Rule(("minimum", "x", "x"), _always, "x"),
    # casts
    Rule(("cast", ("cast", "x")), _is_exact_and_back, "x"),
    # powers that PyTorch computes otherwise
    Rule(("pow", "x", 0), _always, lambda g, f: _constant_of(g, f, 1.0)),
    Rule(("pow", "x", 1), _always, "x"),
    Rule(("pow", "x", 2), _always, ("mul", "x", "x")),
    Rule(("pow", "x", 3), _always, ("mul", ("mul", "x", "x"), "x")),
    Rule(("pow", "x", 0.5), _always, ("sqrt", "x")),
    Rule(("pow", "x", -0.5), _always, ("rsqrt", "x")),
    Rule(("pow", "x", -1), _always, ("reciprocal", "x")),
    Rule(("pow", "x", -2), _always, ("reciprocal", ("mul", "x", "x"))),
    Rule(("square", "x"), _always, ("mul", "x", "x")),
    # cheaper
    Rule(("true_divide", "x", "c"), _is_power_of_two, _inverse),
    # indices
    Rule(("remainder", "x", "c"), _is_divided_index, _index_by(operator.mod)),
    Rule(("floor_divide", "x", "c"), _is_divided_index, _index_by(operator.floordiv)),
    Rule(("add", "x", "c"), _is_index_and_number, _index_by(operator.add)),
    Rule(("add", "c", "x"), _is_index_and_number, _index_by(operator.add)),
    Rule(("sub", "x", "c"), _is_index_and_number, _index_by(lambda x, c: x + -c)),
    Rule(("mul", "x", "c"), lambda f: _is_index_and_number(f) and f["c"].what != 0, _index_by(operator.mul)),
    Rule(("sub", "c", "x"), _is_index_and_number, _index_by(lambda x, c: x * -1 + c)),
    Rule(("add", "x", "y"), _are_indices, lambda g, f: _index_of(g, f, f["x"].what + f["y"].what)),
    Rule(("sub", "x", "y"), _are_indices, lambda g, f: _index_of(g, f, f["x"].what + f["y"].what * -1)),
    Rule(("concat", "..."), _is_between, _only_piece),
    Rule(("concat", "..."), lambda f: _like_pieces(f["it"]), _rotated),
    Rule(("concat", "..."), lambda f: _like_pieces(f["it"]), _joined),
    Rule(("concat", "..."), lambda f: _repeated_function(f["it"]) is not None, _of_one_operand),
    # sums of what is apart, as of gradients of slices
    Rule(("add", "x", "y"), _are_apart, _added_apart),
    Rule(("add", 0, "x"), _of(FLOAT), lambda g, f: g.make("add", f["it"].args[::-1], f["it"].dtype)),
    Rule(("add", ("add", "x", "c"), "c"), lambda f: f["c"].op == "constant" and f["c"].what == 0, ("add", "x", "c")),
    Rule(("add", "x", "c"), _is_padded, _added_inside),
    Rule(("reduce", "x"), _binds_nothing, _of_equal),
    Rule(("scan", "x"), _is_read_backwards, _turned),
    Rule(("scan", "x"), _is_read_at_an_end, _reduced),
    Rule(("reduce", "x"), lambda f: _one_hot(f) is not None, _of_one_hot),
]


def _by_op(rules: list[Rule]) -> dict[str, list[Rule]]:
    ops = {r.pattern[0] for r in rules} | _FOLDED.keys()
    return {op: [r for r in rules if r.pattern[0] in (op, "*")] for op in ops}


_BY_OP = _by_op(RULES)


def rewrite(graph: Graph, node: Node) -> Node | None:
    """What takes a node's place; None where no rule fits. Operands are rewritten already."""
    for rule in _BY_OP.get(node.op, ()):
        names: Bindings = {"it": node}
        with contextlib.suppress(Undecided):
            if _matches(rule.pattern, node, names) and rule.condition(names):
                result = _built(graph, rule.replacement, names)
                if result is not None:
                    return result
    return None


def _matches(pattern: Any, node: Node, names: Bindings) -> bool:
    """Whether a node is of a pattern: a name, an operation with operands, or a constant. names: gets the nodes of
    names."""
    if isinstance(pattern, str):
        return names.setdefault(pattern, node) is node
    if isinstance(pattern, tuple):
        if pattern[0] == "*" or pattern[1:] == ("...",):
            return pattern[0] in ("*", node.op)
        return (
            node.op == pattern[0]
            and len(node.args) == len(pattern) - 1
            and all(_matches(p, a, names) for p, a in zip(pattern[1:], node.args, strict=True))
        )
    return node.op == "constant" and node.what == pattern


def _built(graph: Graph, replacement: Any, names: Bindings) -> Node | None:
    if isinstance(replacement, str):
        return names[replacement]
    if isinstance(replacement, tuple):
        args = [_built(graph, r, names) for r in replacement[1:]]
        assert None not in args, "patterns fit"
        return graph.make(replacement[0], args, names["it"].dtype)  # type: ignore[arg-type]
    return replacement(graph, names)
