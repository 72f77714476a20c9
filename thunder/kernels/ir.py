"""The kernel IR: immutable, hash-consed nodes, each a typed function of the axes that occur in it.

An element of `exp(x.t() - x.t().amax(1, keepdim=True))` at (i, j) is

    exp(sub(load x[j, i], reduce amax over k of load x[k, i]))

Views have no nodes: they are indices of loads. A node knows its free axes; `reduce` binds its own. A `Program` is a
list of stores, one for each buffer that is written.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from thunder.core.dtypes import BOOL, FLOAT, INTEGER, dtype
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Part, Variable, bare, join, opened, within
from thunder.kernels.sizes import Extent, at_least, divides, exact, factor_text, hint

AXES: dict[tuple, Variable] = {}  # one object for each axis, so that equal nodes are one


def axis(kind: str, number: Any, size: int | Extent) -> Variable:
    """The axis of this name and size. kind: "d" for a dimension of a value, "r" for one that a reduction binds, "l" for
    a loop of a kernel, "g" for an index that was read from memory."""
    key = kind, number, size
    if key not in AXES:
        AXES[key] = Variable(f"{kind}{'_'.join(map(str, number)) if isinstance(number, tuple) else number}", size)
    return AXES[key]


class Combine(enum.StrEnum):
    """How a `reduce` combines elements. Primitives of the same names are lowered to it."""

    SUM = "sum"
    PROD = "prod"
    AMAX = "amax"
    AMIN = "amin"


COMBINES = frozenset(Combine)
EXTREMES = (Combine.AMAX, Combine.AMIN)
SCANS = (Combine.SUM, Combine.PROD)  # that are written to memory
# how a scan combines, and how many operands; the last one's combination is its value. linear: of a and b, the sequence
# h = a * (the one before) + b; argmax, argmin: of elements and numbers, the number of the last one that is an extreme
SCANNED = {"sum": 1, "prod": 1, "amax": 1, "amin": 1, "logsumexp": 1, "linear": 2, "argmax": 2, "argmin": 2}
BINDERS = ("reduce", "scan", "dot")  # nodes that bind axes


class Buffer:
    """Memory of a region. kind: "input", "output" or "scratch"; number: among those of its kind. `lower` may make
    scratch an output."""

    __slots__ = ("kind", "number", "shape", "dtype")

    def __init__(self, kind: str, number: int, shape: tuple[int | Extent, ...], dtype: dtype):
        self.kind, self.number, self.shape, self.dtype = kind, number, shape, dtype

    @property
    def name(self) -> str:
        return f"{self.kind}{self.number}"

    def __repr__(self) -> str:
        return self.name


class Node:
    """op: "load", "constant", "index", "argument", "cast", "reduce", "scan", "dot", "concat", "random", "tuple", or an
    elementwise function of `FUNCTIONS`.

    what, by op: load: (buffer, index in each dimension, the variables that stand for the operands); constant: a
    number; index: an Index; argument: a `Scalar`, a float that kernels are given; reduce: (combine, bound axes);
    scan: (combine, the bound axis, an index along it, whether it is backwards): the combination of all elements up to
    the index, or from there on; dot: (the bound axis, whether float32 operands may be rounded to TensorFloat-32): the
    sum of the products of two operands, added up in float32; concat: (index along the dimension, the start of each
    piece, the end of the last one); random: the offset of a random operation, whose numbers from [0, 1) are Philox of
    the operands, the seed and the number of the element. A "tuple" is the value of a scatter and the indices that it
    reads, or the body of a scan of several operands.
    """

    __slots__ = ("op", "args", "dtype", "what", "axes", "depth", "number")

    def __init__(self, op: str, args: tuple[Node, ...], dtype: dtype, what: Any, number: int):
        self.op, self.args, self.dtype, self.what, self.number = op, args, dtype, what, number
        axes = frozenset[Variable]().union(*(a.axes for a in args))
        self.depth = max((a.depth for a in args), default=0)  # of reductions inside of each other
        if op == "load":
            axes = axes.union(*map(variables_of, what[1])).difference(what[2])
        elif op == "index":
            axes = variables_of(what)
        elif op == "concat":
            axes = axes | variables_of(what[0])
        elif op == "reduce":
            axes = axes.difference(what[1])
            self.depth += 1
        elif op == "scan":
            axes = axes.difference(what[1:2]) | variables_of(what[2])
            self.depth += 1
        elif op == "dot":
            axes = axes.difference(what[:1])
            self.depth += 1
        self.axes: frozenset[Variable] = axes

    def __repr__(self) -> str:
        return f"%{self.number}"


def variables_of(index: Index) -> frozenset[Variable]:
    """The variables in an index."""
    result: set[Variable] = set()
    for atom in index.terms:
        result |= variables_of(atom.index) if isinstance(atom, Part) else {atom}
    return frozenset(result)


def replaced(index: Index, by: Mapping[Variable, Index]) -> Index:
    """An index with other indices in the place of variables."""
    if by.keys().isdisjoint(variables_of(index)):
        return index
    total = Index.of(index.constant)
    for atom, factor in index.terms.items():
        if not isinstance(atom, Part):
            total = total + by.get(atom, Index.of(atom)) * factor
            continue
        inner = replaced(atom.index, by)
        if atom.remainder is None:
            inner = within(inner, atom.by)
        else:
            inner = inner % atom.by if atom.remainder else inner // atom.by
        total = total + inner * factor
    return total


class Graph:
    """Makes nodes, each once. rewrite: is shown each new node, and returns the one that takes its place; None where it
    stays."""

    def __init__(self, rewrite: Callable[[Graph, Node], Node | None] | None = None):
        self._nodes: dict[tuple, Node] = {}
        self._rewrite = rewrite
        self._simplified: dict[Node, Node] = {}
        self._stored: dict[Node, dtype] = {}
        self.canonical: dict[Node, tuple] = {}  # see `schedule.canonical_form`

    def stored_dtype(self, node: Node) -> dtype:
        """The type in which a value may be written to memory: the program's, where it is computed in a wider one."""
        return self._stored.get(node, node.dtype)

    def set_stored_dtype(self, node: Node, kind: dtype) -> None:
        """A value of the program has this type; one that has several is written in the type that it is computed in."""
        if self._stored.setdefault(node, kind) is not kind:
            self._stored[node] = node.dtype

    def make(self, op: str, args: Sequence[Node] = (), dtype: dtype | None = None, what: Any = None) -> Node:
        """The node, rewritten to a fixed point."""
        assert dtype is not None, "nodes are typed"
        key = op, tuple(a.number for a in args), dtype, _key(op, what)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(op, tuple(args), dtype, what, len(self._nodes))
        simple = self._simplified.get(node)
        if simple is None:
            other = self._rewrite(self, node) if self._rewrite is not None else None
            simple = self._simplified[node] = node if other is None else other
        return simple

    def substitute(self, node: Node, by: Mapping[Variable, Index], known: dict[Node, Node] | None = None) -> Node:
        """A node at other indices. known: results for the same `by`, which are added to."""
        changed = frozenset(v for v, index in by.items() if not index.is_variable(v))
        return self.reindexed(node, changed, lambda index: replaced(index, by), known)

    def reindexed(
        self,
        node: Node,
        changed: Set[Variable],
        change: Callable[[Index], Index],
        known: dict[Node, Node] | None = None,
    ) -> Node:
        """A node with changed indices. changed: the axes of indices that change."""

        def rebuilt(n: Node, args: tuple[Node, ...]) -> Node:
            return self.make(n.op, args, n.dtype, _changed_what(n, change))

        return self.transform(node, rebuilt, lambda n: not n.axes.isdisjoint(changed), known)

    def replace(self, node: Node, by: dict[Node, Node]) -> Node:
        """A node with others in the place of some below it. by: is added to."""
        return self.transform(node, lambda n, args: self.make(n.op, args, n.dtype, n.what), known=by)

    def transform(
        self,
        node: Node,
        rebuild: Callable[[Node, tuple[Node, ...]], Node],
        reaches: Callable[[Node], bool] = lambda n: True,
        known: dict[Node, Node] | None = None,
    ) -> Node:
        """Rebuilds a node from its operands up, with no recursion. reaches: whether something below may change."""
        known = {} if known is None else known
        stack = [node]
        while stack:
            n = stack[-1]
            if n in known:
                stack.pop()
            elif not reaches(n):
                known[n] = n
            elif missing := [a for a in n.args if a not in known]:
                stack += missing
            else:
                known[n] = rebuild(n, tuple(known[a] for a in n.args))
                if n in self._stored:
                    self.set_stored_dtype(known[n], self._stored[n])
        return known[node]


def _key(op: str, what: Any) -> Any:
    """What identifies a node of an operation, beside its operands and its type."""
    if op == "load":
        buffer, index, variables = what
        return buffer, tuple(i.key for i in index), variables
    if op == "index":
        return what.key
    if op == "concat":
        return what[0].key, what[1], what[2]
    if op == "scan":
        return what[0], what[1], what[2].key, what[3]
    return (type(what), repr(what)) if op == "constant" else what


def _changed_what(node: Node, change: Callable[[Index], Index]) -> Any:
    """The description of a node with each of its indices changed."""
    what = node.what
    if node.op == "load":
        return what[0], tuple(map(change, what[1])), what[2]
    if node.op == "index":
        return change(what)
    if node.op == "concat":
        return change(what[0]), what[1], what[2]
    if node.op == "scan":
        return what[0], what[1], change(what[2]), what[3]
    return what


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """All nodes below, operands first."""
    order: dict[Node, None] = {}
    stack = [(n, False) for n in reversed([*nodes])]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order[node] = None
        elif node not in order:
            stack.append((node, True))
            stack += [(a, False) for a in reversed(node.args) if a not in order]
    return [*order]


class Scatter(NamedTuple):
    """Where a store writes, of which the indices are read. index: in the buffer, over the store's axes and `variables`,
    which stand for the operands of the store's "tuple" behind the first. combine: with the elements that are there;
    None: it replaces them."""

    combine: Combine | None
    index: tuple[Index, ...]
    variables: tuple[Variable, ...]


class Store:
    """Writes a value to all elements of a buffer. axes: one for each dimension. scan: (combine, dimension): written is
    the combination of the values up to each element, along the dimension. scatter: where it writes, for a store whose
    axes are those of its value; another store has written the buffer before."""

    __slots__ = ("buffer", "axes", "value", "scan", "scatter")

    def __init__(
        self,
        buffer: Buffer,
        axes: tuple[Variable, ...],
        value: Node,
        scan: tuple[Combine, int] | None = None,
        scatter: Scatter | None = None,
    ):
        self.buffer, self.axes, self.value, self.scan, self.scatter = buffer, axes, value, scan, scatter

    def of(self, value: Node) -> Store:
        """The store of another value."""
        return Store(self.buffer, self.axes, value, self.scan, self.scatter)

    @property
    def index(self) -> tuple[Index, ...]:
        """Where in the buffer it writes."""
        return tuple(map(Index.of, self.axes)) if self.scatter is None else self.scatter.index


class Program:
    """inputs: the buffers that are read, in the order of the region's. stores: in an order in which they can run; of
    outputs and of scratch."""

    __slots__ = ("graph", "inputs", "stores")

    def __init__(self, graph: Graph, inputs: Sequence[Buffer], stores: Sequence[Store]):
        self.graph, self.inputs, self.stores = graph, tuple(inputs), tuple(stores)

    def __str__(self) -> str:
        return show(self)


# ------------------------------------------------------------------------------------------------ the verifier


class Invalid(AssertionError):
    """A node that means nothing: a mistake of ours."""


def verify(program: Program) -> None:
    """Raises Invalid where an index may be outside of its buffer, where types do not fit, where an axis is bound by
    nothing, and where scratch is read before it is written."""
    written: set[Buffer] = set(program.inputs)
    for store in program.stores:
        if not store.value.axes <= set(store.axes):
            raise Invalid(f"{store.buffer}: its value depends on axes that it does not have")
        if store.scatter is not None:
            _verify_scatter(store, written)
        elif tuple(a.size for a in store.axes) != store.buffer.shape:
            raise Invalid(f"{store.buffer}: its axes are not those of its shape")
        if store.value.dtype is not store.buffer.dtype:
            raise Invalid(f"{store.buffer} of {store.buffer.dtype} gets {store.value.dtype}")
        if store.scan is not None and (store.scan[0] not in SCANS or not 0 <= store.scan[1] < len(store.axes)):
            raise Invalid(f"{store.buffer}: no such scan")
        for node in in_order(store.value.args if store.scatter is not None else [store.value]):
            if node.op != "tuple":
                _verify_node(node, FUNCTIONS, written)
        written.add(store.buffer)


def _verify_scatter(store: Store, written: set[Buffer]) -> None:
    """Raises Invalid for a scatter into nothing, without an index for each dimension, or outside of its buffer."""
    assert store.scatter is not None, "a scatter"
    combine, index, variables = store.scatter
    if store.buffer not in written:
        raise Invalid(f"{store.buffer}: a scatter into memory that nothing has written")
    if store.value.op != "tuple" or len(store.value.args) != 1 + len(variables):
        raise Invalid(f"{store.buffer}: one operand for each index that is read")
    if combine is not None and combine not in COMBINES:
        raise Invalid(f"{store.buffer}: no such combination")
    if len(index) != len(store.buffer.shape) or any(
        not i.is_inside(0, n) for i, n in zip(index, store.buffer.shape, strict=True)
    ):
        raise Invalid(f"{store.buffer}: a scatter outside of the buffer")


def _verify_node(node: Node, functions: Mapping[str, Any], written: set[Buffer]) -> None:
    """Raises Invalid for a node whose operands, type or indices do not fit its operation."""

    def check(holds: bool, words: str) -> None:
        if not holds:
            raise Invalid(f"{line(node)}: {words}")

    if node.op == "load":
        buffer, index, variables = node.what
        check(buffer in written, "nothing has written it yet")
        check(len(index) == len(buffer.shape), "one index for each dimension")
        check(node.dtype is buffer.dtype, f"the buffer is of {buffer.dtype}")
        check(len(variables) == len(node.args), "one variable for each index that is read")
        check(all(i.is_inside(0, n) for i, n in zip(index, buffer.shape, strict=True)), "outside of the buffer")
    elif node.op == "reduce":
        combine, bound = node.what
        check(node.dtype is node.args[0].dtype, "it has the type of its operand")
        check(combine in COMBINES and node.dtype.category in (FLOAT, INTEGER), "no such combination")
        check(len(bound) > 0, "it reduces nothing")
    elif node.op == "scan":
        combine, bound, index, _ = node.what
        body = node.args[0]
        check(node.dtype is body.dtype, "it has the type of its operand")
        check(combine in SCANNED, "no such combination")
        check(SCANNED[combine] == (len(body.args) if body.op == "tuple" else 1), "as many operands as are combined")
        check(index.is_inside(0, bound.size), "outside of the scan")
    elif node.op == "dot":
        check(len(node.args) == 2 and node.args[0].dtype is node.args[1].dtype, "two operands of one type")
        check(node.args[0].dtype.category == FLOAT and node.args[0].dtype.bytes <= 4, f"not for {node.args[0].dtype}")
        check(node.dtype.name == "float32", "it is added up in float32")
        check(any(node.what[0] in a.axes for a in node.args), "no operand has the axis that it binds")
    elif node.op == "concat":
        along, starts, end = node.what
        in_order = all(at_least(b, a) for a, b in zip(starts, starts[1:], strict=False))
        check(len(starts) == len(node.args) and in_order, "one range for each piece")
        check(along.is_inside(starts[0], end), "outside of the pieces")
        check(all(a.dtype is node.dtype for a in node.args), "pieces have its type")
    elif node.op == "random":
        check([a.dtype.name for a in node.args] == ["int64", "int64"], "a seed and the number of an element")
        check(node.dtype.name == "float32" and 0 <= node.what < 1 << 31, "24 random bits of a known offset")
    elif node.op not in ("constant", "index", "argument", "cast"):
        check(node.op in functions, "no such function")
        function = functions[node.op]
        kinds = [a.dtype for a in (node.args[1:] if node.op == "where" else node.args)]
        check(len(set(kinds)) == 1, "operands have one type")
        check(kinds[0].category in function.categories, f"not for {kinds[0]}")
        result = node.dtype.category == BOOL if function.truth else node.dtype is kinds[0]
        check(result, f"it is of {node.dtype}")


def reads_inside(node: Node) -> bool:
    """Whether all that a value reads is inside of its buffers, and of the pieces of its concatenations. False where
    that is not known."""
    return next(loads_outside([node], ()), None) is None


def loads_outside(nodes: Iterable[Node], known: Container[Node]) -> Iterator[tuple[Node, Index, int | Extent]]:
    """The loads that may be outside of their buffers, with an index and the size of its dimension, and the
    concatenations that may be outside of their pieces, with the index from the first piece and the size of all. known:
    values that are computed elsewhere."""
    stack: list[tuple[Node, tuple]] = [(n, ()) for n in nodes]
    seen = set(stack)
    while stack:
        n, guards = stack.pop()
        below = [(a, guards) for a in n.args if n not in known]
        if n.op == "load":
            for i, size in zip(n.what[1], n.what[0].shape, strict=True):
                if not _is_inside(i, size, guards):
                    yield n, bare(i), size
                for dividend in _dividends(i):  # kernels divide numbers from 0 on
                    if not _is_inside(dividend, None, guards):
                        plain = bare(dividend)
                        yield n, plain, plain.high + 1
        elif n.op == "concat":
            along, starts, end = n.what
            if not _is_inside(along + -starts[0], end - starts[0], guards):
                yield n, bare(along) + -starts[0], end - starts[0]
            ranges = zip(n.args, starts, (*starts[1:], end), strict=True)
            below = [(piece, (*guards, (opened(along), low, high))) for piece, low, high in ranges]
        stack += [b for b in below if b not in seen]
        seen.update(below)


def _dividends(index: Index) -> Iterator[Index]:
    """What quotients and remainders in an index are of."""
    for atom in index.terms:
        if isinstance(atom, Part):
            if atom.remainder is not None:
                yield atom.index
            yield from _dividends(atom.index)


def _is_inside(
    index: Index, size: int | Extent | None, guards: Sequence[tuple[Index, int | Extent, int | Extent]]
) -> bool:
    """Whether an index is one of a dimension, where indices of concatenations are in the ranges of `guards`. An index
    with the bounds of its terms is that of a verified program: narrower bounds are those of a piece. size: None where
    any number from 0 on is one."""
    plain = bare(index)
    bounds = plain.low, plain.high, index.low, index.high
    are_known = all(isinstance(n, int) for n in bounds)  # those of symbolic sizes may differ in form alone
    if plain.key == index.key and (not are_known or bounds[:2] == bounds[2:]):
        return True
    is_above, is_below = at_least(plain.low, 0), size is None or at_least(size - 1, plain.high)
    for along, start, end in guards:
        atom, by = next(iter(along.terms.items()), (None, 1))
        factor = exact(plain.terms.get(atom, 0), by) if divides(by, plain.terms.get(atom, 0)) else 0
        if not isinstance(factor, int) or factor == 0:
            continue
        rest = plain + along * -factor  # the index is so many times that of the concatenation, and the rest
        first, last = (start, end - 1) if factor > 0 else (end - 1, start)
        is_above = is_above or at_least(rest.low + first * factor, 0)
        is_below = is_below or size is None or at_least(size - 1, rest.high + last * factor)
    return is_above and is_below


# -------------------------------------------------------------------------------------------------- the printer


def show(program: Program) -> str:
    """The text of a program: a line for each node, numbered within the store that needs it first."""
    numbers: dict[Node, str] = {}
    lines: list[str] = []
    for store in program.stores:
        for node in in_order(store.value.args if store.scatter is not None else [store.value]):
            if node not in numbers:
                numbers[node] = f"v{len(numbers)}"
                lines.append(f"    {numbers[node]}: {node.dtype.name} = {line(node, numbers)}")
        axes = ", ".join(f"{a.name}:{a.size}" for a in store.axes)
        if store.scatter is not None:
            lines.append(_scatter_line(store, [numbers[a] for a in store.value.args], axes))
            continue
        scan = f"{store.scan[0]} along {store.axes[store.scan[1]].name} of " if store.scan is not None else ""
        lines.append(f"store {store.buffer}[{axes}] = {scan}{numbers[store.value]}")
    return "\n".join(lines)


def _scatter_line(store: Store, names: Sequence[str], axes: str) -> str:
    assert store.scatter is not None, "a scatter"
    combine, index, variables = store.scatter
    read = "".join(f", {v.name} = {n}" for v, n in zip(variables, names[1:], strict=True))
    how = f" {combine} with" if combine is not None else ""
    return f"scatter over {axes} to {store.buffer}[{', '.join(map(index_text, index))}]{read}:{how} {names[0]}"


def line(node: Node, numbers: Mapping[Node, str] | None = None) -> str:
    """A node as text, without those below."""
    names = [numbers.get(a, repr(a)) if numbers else repr(a) for a in node.args]
    if node.op == "load":
        buffer, index, variables = node.what
        read = "".join(f", {v.name} = {n}" for v, n in zip(variables, names, strict=True))
        return f"load {buffer}[{', '.join(map(index_text, index))}]{read}"
    if node.op == "constant":
        return repr(node.what)
    if node.op == "index":
        return f"index {index_text(node.what)}"
    if node.op == "argument":
        return f"argument {node.what.name}"
    if node.op == "reduce":
        combine, bound = node.what
        return f"{combine} over {', '.join(f'{a.name}:{a.size}' for a in bound)} of {names[0]}"
    if node.op == "scan":
        combine, bound, index, is_backwards = node.what
        way = "from" if is_backwards else "up to"
        return f"{combine} over {bound.name}:{bound.size} {way} {index_text(index)} of {names[0]}"
    if node.op == "dot":
        bound, is_rounded = node.what
        return f"dot over {bound.name}:{bound.size} of {', '.join(names)}{' in TensorFloat-32' if is_rounded else ''}"
    if node.op == "concat":
        along, starts, end = node.what
        pieces = ", ".join(f"{lo}..{hi}: {n}" for lo, hi, n in zip(starts, (*starts[1:], end), names, strict=True))
        return f"concat at {index_text(along)} of {pieces}"
    offset = f", offset {node.what}" if node.op == "random" else ""
    return f"{node.op}({', '.join(names)}{offset})"


def index_text(index: Index) -> str:
    """An index as text."""
    parts = []
    for atom, factor in sorted(index.terms.items(), key=lambda t: (-abs(hint(t[1])), _atom_text(t[0]))):
        text = _atom_text(atom)
        parts.append(text if factor == 1 else f"{factor_text(factor)} * {text}")
    if index.constant or not parts:
        parts.append(str(index.constant))
    return " + ".join(parts)


def _atom_text(atom: Variable | Part) -> str:
    if isinstance(atom, Variable):
        return atom.name
    inner = index_text(atom.index)
    inner = f"({inner})" if " " in inner else inner
    return inner if atom.remainder is None else f"{inner} {'%' if atom.remainder else '//'} {factor_text(atom.by)}"


def offset(index: Sequence[Index], strides: Sequence[int | Extent]) -> Index:
    """The distance from a buffer's first element, in elements."""
    return join(index, strides)
