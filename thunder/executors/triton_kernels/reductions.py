"""The order of dimensions of a reduction, and its steps.

A reduction runs over its operand in the order of memory, with neighbouring dimensions of one kind merged: a batch norm
reduces the first and the last of (N, C, H * W), with channels last the first of (N * H * W, C). Where one kernel would
leave most of the device idle, or would read memory in pieces or several times, the reduction becomes a chain:

- one of several reduced dimensions at a time, the largest first: (N, C, H * W) -> (N, C) -> (C);
- a long row in chunks: (rows, columns) -> (rows, chunks) -> (rows);
- a dimension that is not the last in memory by partial results: each program reduces a part, a later kernel the parts.

Sums of squared deviations from the mean go the same ways in one pass: those of the parts, and of the parts' means, are
added up (T. Chan, G. Golub and R. LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
variances"); the partial ones of a program by B. Welford 1962.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from thunder.core.dtypes import FLOAT, bool8
from thunder.executors.triton_kernels.literals import compute_type
from thunder.executors.triton_kernels.one_hot import of_one_term
from thunder.executors.triton_kernels.reduction_places import Space, Strides, memory_order, space_of
from thunder.executors.triton_kernels.values import Program, Value, in_order, sources
from thunder.kernels.index import Index, Variable
from thunder.kernels.sizes import Extent, hint

ON_CHIP = 16384  # elements of a row that one program holds
WHOLE = 8192  # elements that one program reduces to one number
REDUCED = 4096  # elements of a block where several programs reduce everything
FEW_ROWS = 64  # rows that are reduced without a partial
MANY_ROWS = 4096  # that are expected at least where their number changes
LAUNCH = 1 << 23  # bytes that are moved in the time that a kernel takes to start
SECTOR = 32  # bytes that memory gives at least
CHUNK = 8192  # elements of a row that is reduced in chunks


def fits(columns: int | Extent) -> bool:
    """Whether a row surely fits on chip."""
    return isinstance(columns, int) and columns <= ON_CHIP


# ----------------------------------------------------------------------------------------------------------------
# a program with steps


def with_steps(program: Program, programs: int, strides: Strides) -> Program:
    """The program with its reductions in the order of memory and in steps. programs: the number of programs that keep a
    device busy."""
    order = in_order(program.outputs)
    if not any(v.kind == "reduce" for v in order):
        return program
    steps = _Steps(order, program, programs, strides)
    made = steps.made
    for value in order:
        operands = [made[x] if isinstance(x, Value) else x for x in value.operands]
        same = all(a is b for a, b in zip(operands, value.operands, strict=True))
        new = value if same else Value(value.kind, operands, value.shape, value.dtype, value.what)
        made[value] = steps.of(value, new) if value.kind == "reduce" else new
        if value.kind == "partials" and (terms := terms_of(new)) is not None and terms.shape == new.shape:
            kind, operands = (terms.kind, terms.operands) if terms.kind == "partial" else ("reshape", (terms,))
            made[value] = Value(kind, operands, new.shape, new.dtype, terms.what)
    return Program(program.inputs, [made[v] for v in program.outputs])


def terms_of(v: Value) -> Value | None:
    """The partial sums of an earlier kernel, if a value is only their sum over the first dimension, reshaped or rounded
    once; else None."""
    dtypes, casts = {compute_type(v.dtype)}, 0
    while v.kind in ("cast", "partials") or _reshapes(v):
        casts += v.kind == "cast"
        v = v.operands[0]
        dtypes.add(compute_type(v.dtype))
    if v.kind != "reduce" or v.what != ("sum", (0,)) or v.dtype.category != FLOAT or casts > 1 or len(dtypes) > 1:
        return None
    terms = source = v.operands[0]
    while _reshapes(source):
        source = source.operands[0]
    return terms if source.kind in ("partial", "reduce") and source.what[0] == "sum" else None


def _reshapes(v: Value) -> bool:
    return v.kind == "reshape" or v.kind == "broadcast" and v.numel == v.operands[0].numel


class _Merged(NamedTuple):
    """value: the operand in the order of its memory, kept and reduced dimensions in turn. kept: the dimensions of the
    operand that are kept, in that order. bytes: of an element in memory."""

    value: Value
    reduced: tuple[int, ...]
    kept: tuple[int, ...]
    bytes: int

    def count(self, reduced: bool) -> int | Extent:
        return math.prod(n for d, n in enumerate(self.value.shape) if (d in self.reduced) is reduced)


class _Norm(NamedTuple):
    """The uses of the sum of an operand beside itself. squares: squared deviations from the mean are summed as well.
    again: a value as large as the operand depends on the sums."""

    squares: bool
    again: bool


class _Parts(NamedTuple):
    """sums, squares: of the operand, and of its squared deviations, of parts. count: how many elements a part has.
    reduced: dimensions of `sums` to reduce yet; last: in one step."""

    sums: Value
    squares: Callable[[], Value]
    count: int | Extent | Value
    reduced: tuple[int, ...]
    last: bool = False


class _Steps:
    """The steps of a program's reductions. made: the new value of each."""

    def __init__(self, order: Sequence[Value], program: Program, programs: int, strides: Strides):
        self.programs, self.strides = programs, strides
        self.made: dict[Value, Value] = {v: v for v in program.inputs}
        self.means = {v: s for v in order if v.kind == "reduce" and (s := _mean_of(v)) is not None}
        self.again = _read_again(order, program, self.means)
        self.reductions = [v for v in order if v.kind == "reduce"]
        self.norms: dict[tuple, _Norm] = {}
        self.known: dict[tuple, Value] = {}
        self.merges: dict[tuple, _Merged] = {}
        self.splits: dict[tuple, _Parts | None] = {}

    def of(self, old: Value, new: Value) -> Value:
        """The replacement of a reduction whose operand is new."""
        how, dims, *in_one_step = new.what
        operand = new.operands[0]
        if in_one_step:
            return new
        if how == "sum" and len(dims) == 1 and (found := of_one_term(operand, dims[0], new.shape)) is not None:
            return found
        mean = self.means.get(old)
        if mean is not None:
            whole = self.made[mean.operands[0]]
            return self.squares(whole, dims) if self.parts(whole, dims, "sum") is not None else self.at_once(new)
        self.norms[operand, dims] = _Norm(any(s is old for s in self.means.values()), old in self.again)
        return self.reduced(operand, dims, how, new)

    def reduced(self, x: Value, dims: tuple[int, ...], how: str, whole: Value | None = None) -> Value:
        """A reduction, by steps. whole: the reduction, where there is one."""
        key = x, dims, how
        if key not in self.known:
            parts = self.parts(x, dims, how)
            self.known[key] = (
                self.at_once(whole or _reduce(x, dims, how))
                if parts is None
                else self.rest(x, dims, parts.sums, parts, how)
            )
        return self.known[key]

    def squares(self, x: Value, dims: tuple[int, ...]) -> Value:
        """The sum of squared deviations from the mean over some dimensions."""
        key = x, dims, "squares"
        if key not in self.known:
            parts = self.parts(x, dims, "sum")
            self.known[key] = self.squares_at_once(x, dims) if parts is None else self.joined(x, dims, parts)
        return self.known[key]

    def squares_at_once(self, x: Value, dims: tuple[int, ...]) -> Value:
        mean = _map("true_divide", self.reduced(x, dims, "sum"), math.prod(x.shape[d] for d in dims))
        apart = _map("sub", x, _along(mean, x, dims))
        return self.at_once(_reduce(_map("mul", apart, apart), dims, "sum"))

    def joined(self, x: Value, dims: tuple[int, ...], parts: _Parts) -> Value:
        """Squared deviations from those of parts: those of their means, for each of their elements, come to them."""
        sums, count = parts.sums, parts.count
        if not isinstance(count, Value):
            between = _map("true_divide", self.squares(sums, parts.reduced), count)
            return _map("add", self.rest(x, dims, parts.squares(), parts, "sum"), self.in_shape(between, x, dims))
        total = self.left(sums, parts, "sum")
        mean = _map("true_divide", total, math.prod(x.shape[d] for d in dims))
        own = _map("true_divide", sums, _map("maximum", count, 1.0))
        apart = _map("sub", own, _along(mean, sums, parts.reduced))
        terms = _map("add", parts.squares(), _map("mul", count, _map("mul", apart, apart)))
        return self.rest(x, dims, terms, parts, "sum")

    def rest(self, x: Value, dims: tuple[int, ...], terms: Value, parts: _Parts, how: str) -> Value:
        """The remaining reduction of parts."""
        return self.in_shape(self.left(terms, parts, how), x, dims)

    def left(self, terms: Value, parts: _Parts, how: str) -> Value:
        key = terms, parts.reduced, how
        if parts.last and key not in self.known:
            self.known[key] = _reduce(terms, parts.reduced, how)
        return self.reduced(*key)

    def in_shape(self, v: Value, x: Value, dims: tuple[int, ...]) -> Value:
        """A result in the order of the operand's memory, reshaped to that of the reduction."""
        kept = self.merged(x, dims).kept
        v = _shaped(v, [x.shape[d] for d in kept])
        if list(kept) != sorted(kept):
            order = tuple(kept.index(d) for d in sorted(kept))
            v = Value("permute", (v,), _kept(x, dims), v.dtype, (order,))
        return v

    def at_once(self, reduction: Value) -> Value:
        """A reduction in the order of memory."""
        (x,), (how, dims) = reduction.operands, reduction.what
        merged = self.merged(x, dims)
        if merged.value.operands[0] is x:  # its order is that of memory
            return reduction
        return self.in_shape(_reduce(merged.value, merged.reduced, how), x, dims)

    def merged(self, x: Value, dims: tuple[int, ...]) -> _Merged:
        key = x, dims
        if key not in self.merges:
            order, size = memory_order(x, self.strides)
            long = [d for d in order if x.shape[d] != 1]
            turned = x
            if long != sorted(long):
                turned = Value("permute", (x,), [x.shape[d] for d in order], x.dtype, (order,))
            sizes: list[int | Extent] = []
            kinds: list[bool] = []
            for d in long:
                if kinds and kinds[-1] is (d in dims):
                    sizes[-1] = sizes[-1] * x.shape[d]
                else:
                    sizes.append(x.shape[d])
                    kinds.append(d in dims)
            reduced = tuple(i for i, kind in enumerate(kinds) if kind)
            kept = tuple(d for d in (order if turned is not x else range(len(order))) if d not in dims)
            self.merges[key] = _Merged(Value("reshape", (turned,), sizes, x.dtype), reduced, kept, size)
        return self.merges[key]

    # ------------------------------------------------------------------------------------------------------------
    # the first step
    def parts(self, x: Value, dims: tuple[int, ...], how: str) -> _Parts | None:
        """The first step of a reduction; None where it has one step only."""
        key = x, dims, how
        if key not in self.splits:
            self.splits[key] = self.first(x, dims, how)
        return self.splits[key]

    def first(self, x: Value, dims: tuple[int, ...], how: str) -> _Parts | None:
        merged = self.merged(x, dims)
        shape, reduced = merged.value.shape, merged.reduced
        rows, columns = merged.count(True), merged.count(False)
        if not reduced:
            return None
        if len(shape) == 1:
            blocks = min(2 * self.programs, -(-hint(rows) // REDUCED))
            return self.partial(x, tuple(dims), how, blocks) if hint(rows) > WHOLE else None
        norm = self.norms.get((x, dims), _Norm(False, False))
        if len(reduced) == 1 and reduced[0] == 0 and len(shape) == 2:  # a sum of rows
            at_once = _many(rows) <= FEW_ROWS or norm.again and self.in_one_kernel(merged, norm)
        elif len(reduced) == 1 and reduced[0] == len(shape) - 1:  # a sum of columns
            whole = fits(rows) or not isinstance(rows, int) or norm.again and not norm.squares
            at_once = whole or self.in_one_kernel(merged, norm)
        else:
            at_once = self.in_one_kernel(merged, norm)
        if at_once:
            return None
        if len(reduced) > 1:
            return self.of_one_dimension(merged, how, norm)
        if reduced[0] < len(shape) - 1:
            return self.partial(merged.value, reduced, how, self.blocks(rows, columns))
        return self.chunks(merged, how)

    def in_one_kernel(self, merged: _Merged, norm: _Norm) -> bool:
        """Whether reducing at once takes less time than in steps, by the bytes that are moved and by launches. A row on
        chip is read once for all that is computed of it; a longer one for its mean, for squares and for what is
        computed of both. What neighbours in memory, but not in a block, is read in pieces."""
        shape, columns, rows = merged.value.shape, merged.count(True), merged.count(False)
        size = hint(merged.value.numel) * merged.bytes
        wide, along = 1 << (hint(columns) - 1).bit_length(), merged.reduced[-1] == len(shape) - 1
        block = max(1, 4096 // wide) if along else min(max(32, 4096 // wide), max(1, ON_CHIP // wide))
        block = min(block, hint(rows)) if fits(columns) else 1
        run = merged.bytes * (hint(shape[-1]) if along else min(block, hint(shape[-1])))
        reads = 1 if fits(columns) else 1 + norm.squares + norm.again
        slower = max(1.0, SECTOR / run) * max(1.0, self.programs / 2 * block / hint(rows))
        at_once = LAUNCH + size * (reads + norm.again) * slower
        return at_once <= (2 + norm.again) * LAUNCH + size * (1 + 2 * norm.again)

    def blocks(self, rows: int | Extent, columns: int | Extent) -> int:
        """The number of programs that share the rows of a partial."""
        if fits(columns) and self.of_rows((rows, columns)):
            return _programs(_many(rows), hint(columns), self.programs)
        return min(-(-_many(rows) // FEW_ROWS), max(2, 4 * self.programs // -(-hint(columns) // 128)))

    def of_rows(self, space: Space) -> bool:
        """Whether rows of a space are reduced, in a kernel that leaves partial results as well."""
        for v in self.reductions:
            merged = self.merged(v.operands[0], v.what[1]) if space_of(v) == space else None
            if merged is not None and merged.reduced[-1:] == (len(merged.value.shape) - 1,):
                return True
        return False

    def partial(self, x: Value, dims: tuple[int, ...], how: str, blocks: int) -> _Parts:
        """The partial results of a number of programs."""
        kept = math.prod(n for d, n in enumerate(x.shape) if d not in dims)
        shape = (blocks,) if kept == 1 else (blocks, kept)

        def of(operand: Value, how: str) -> Value:
            return Value("partial", (operand,), shape, x.dtype, (how, dims))

        squares = lambda: of(x, "squares")  # noqa: E731
        return _Parts(of(x, how), squares, of(Value("number", (), x.shape, x.dtype, 1.0), "sum"), (0,), last=True)

    def of_one_dimension(self, merged: _Merged, how: str, norm: _Norm) -> _Parts:
        """The largest of several reduced dimensions, in steps of its own."""
        x, dim = merged.value, max((hint(merged.value.shape[d]), d) for d in merged.reduced)[1]
        rest = tuple(d - (d > dim) for d in merged.reduced if d != dim)
        self.norms[x, (dim,)] = _Norm(norm.squares, False)
        return _Parts(self.reduced(x, (dim,), how), lambda: self.squares(x, (dim,)), x.shape[dim], rest)

    def chunks(self, merged: _Merged, how: str) -> _Parts | None:
        """The chunks of a row, the last of which may be shorter."""
        x, (rows, columns) = merged.value, merged.value.shape
        assert isinstance(columns, int), "an extent is not cut into chunks"
        wanted = min(columns // 1024, max(-(-columns // CHUNK), -(-self.programs // hint(rows))))
        length = 1 << (columns // max(1, wanted)).bit_length() - 1
        count = -(-columns // length)
        missing = count * length - columns
        if count == 1 or missing and how != "sum":
            return None
        shape = (rows, count, length)

        def cut(v: Value, filled) -> Value:
            if missing:
                v = Value("pad", (v,), (rows, count * length), v.dtype, (filled, ((0, 0), (0, missing))))
            return Value("reshape", (v,), shape, v.dtype)

        whole = cut(x, 0.0)
        sums = self.reduced(whole, (2,), how)
        if not missing:
            return _Parts(sums, lambda: self.squares(whole, (2,)), length, (1,))
        one = Value("iota", (), (count,), x.dtype, (float(columns), float(-length)))
        counts = Value(
            "broadcast", (_map("minimum", one, float(length)),), (rows, count), x.dtype, ((rows, count), (1,))
        )

        def squares() -> Value:
            apart = _map("sub", whole, _along(_map("true_divide", sums, counts), whole, (2,)))
            inside = cut(Value("number", (), x.shape, bool8, True), False)
            terms = Value("map", (inside, _map("mul", apart, apart), 0.0), shape, x.dtype, "where")
            return self.reduced(terms, (2,), "sum")

        return _Parts(sums, squares, counts, (1,))


def _many(rows: int | Extent) -> int:
    return rows if isinstance(rows, int) else max(MANY_ROWS, hint(rows))


def _programs(rows: int, columns: int, programs: int) -> int:
    """The number of programs that share the rows of a normalization: half as many where each would have few blocks,
    since their sums are written and read again."""
    blocks = -(-rows // max(1, 4096 // columns))
    return min(blocks, programs if blocks >= 2 * programs else -(-programs // 2))


# ----------------------------------------------------------------------------------------------------------------
# values


def _kept(x: Value, dims: Sequence[int]) -> tuple:
    return tuple(n for d, n in enumerate(x.shape) if d not in dims)


def _reduce(x: Value, dims: tuple[int, ...], how: str) -> Value:
    return Value("reduce", (x,), _kept(x, dims), x.dtype, (how, dims))


def _map(name: str, *operands) -> Value:
    return Value("map", operands, operands[0].shape, operands[0].dtype, name)


def _shaped(v: Value, shape: Sequence[int | Extent]) -> Value:
    return v if v.shape == tuple(shape) else Value("reshape", (v,), shape, v.dtype)


def _along(v: Value, x: Value, dims: Sequence[int]) -> Value:
    """A reduction's result at each place of its operand."""
    return Value("broadcast", (v,), x.shape, v.dtype, (x.shape, tuple(d for d in range(len(x.shape)) if d not in dims)))


def _mean_of(reduction: Value) -> Value | None:
    """The sum of x in sum((x - sum(x) / n) ** 2) over the same n elements."""
    (square,), (how, dims, *_) = reduction.operands, reduction.what
    if how != "sum" or square.kind != "map" or square.dtype.category != FLOAT:
        return None
    factors = set(square.operands if square.what in ("mul", "multiply") else square.operands[:1])
    squared = square.what in ("mul", "multiply", "square") or square.what == "pow" and square.operands[1] == 2
    apart = factors.pop()
    if factors or not squared or not isinstance(apart, Value) or apart.kind != "map" or apart.what != "sub":
        return None
    x, mean = (_seen_through(v) if i else v for i, v in enumerate(apart.operands))
    if not isinstance(mean, Value) or mean.kind != "map" or mean.what != "true_divide":
        return None
    total, count = _seen_through(mean.operands[0]), mean.operands[1]
    if not isinstance(total, Value) or total.kind != "reduce" or total.operands[0] is not x:
        return None
    same = total.what == ("sum", dims) and count == space_of(total)[1]
    return total if same and _is_along(apart.operands[1], total, dims) else None


def _is_along(v: Value, total: Value, dims: Sequence[int]) -> bool:
    """Whether `v` is the broadcast of a reduction to the dimensions of its operand."""
    whole = tuple(Index.of(Variable(f"d{d}", n)) for d, n in enumerate(v.shape))
    place = whole
    while v is not total:
        ((v, place, _),) = [(v.operands[0], place, ())] if v.kind == "map" else sources(v, place)
    return [i.key for i in place] == [i.key for d, i in enumerate(whole) if d not in dims]


def _seen_through(v):
    while isinstance(v, Value) and v.kind in ("broadcast", "reshape"):
        v = v.operands[0]
    return v


def _read_again(order: Sequence[Value], program: Program, means: Mapping[Value, Value]) -> set[Value]:
    """The reductions that values as large as their operands depend on, other than their own squared deviations."""
    depends: dict[Value, frozenset[Value]] = {}
    found: set[Value] = set()
    outputs = set(program.outputs)
    for v in order:
        below = frozenset().union(*(depends[x] for x in v.operands if isinstance(x, Value)))
        if v.kind == "reduce":
            operand = v.operands[0].numel
            found |= {s for s in below if s is not means.get(v) and hint(s.operands[0].numel) <= hint(operand)}
            below |= {v}
        elif v in outputs:
            found |= {s for s in below if hint(s.operands[0].numel) <= hint(v.numel)}
        depends[v] = below
    return found
