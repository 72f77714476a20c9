"""The lines of a kernel that compute values at places: loads, expressions and the variables that hold them.

A value is computed once for each place at which it is used, by a line outside of all loops that it does not depend on.
Blocks are [X] in a map and [R, C] in other kernels; values that depend on rows only are [R, 1], on columns only [1, C].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence, Set
from typing import NamedTuple

from thunder.core.dtypes import BOOL, FLOAT, dtype, float32
from thunder.executors.triton_kernels.functions import FUNCTIONS
from thunder.executors.triton_kernels.joins import place_in_whole
from thunder.executors.triton_kernels.literals import bracketed, compute_type, literal
from thunder.executors.triton_kernels.reduction_places import reduced_place
from thunder.executors.triton_kernels.schedule import Kernel, Schedule
from thunder.executors.triton_kernels.tiles import Tile
from thunder.executors.triton_kernels.values import Place, Value, indexed_place, sources
from thunder.kernels.index import Index, Part, Variable, join, opened, split, strides_of
from thunder.kernels.numbers import Scalar
from thunder.kernels.sizes import Atom, Extent, at_least, hint
from thunder.kernels.sizes import text as text_of
from thunder.kernels.triton_helpers import HELPERS

LIMIT = 2**31 - 2**20  # of places that are computed with 32 bits
NONE: frozenset = frozenset()


def stored_type(v: Value, outputs: Sequence[Value]) -> dtype:
    """The type that a value is stored in: its own where it is an output; what later kernels read keeps the precision it
    was computed in."""
    return float32 if v.dtype.category == FLOAT and v.dtype.bytes < 4 and not any(v is o for o in outputs) else v.dtype


class Term(NamedTuple):
    """An expression, and the loop variables that it depends on."""

    text: str
    variables: frozenset


class Expressions(ABC):
    """The text of a kernel while it is written. outer, inner: its lines, and those of the current loop. memo: terms by
    value and place. buffers, sizes: its arguments."""

    def __init__(
        self,
        schedule: Schedule,
        kernel: Kernel,
        strides: dict[Value, Sequence[int]],
        interpreted: bool,
        shared: int,
        tile: Tile,
        late: Container[Value],
        wide: bool,
        padded: Set[Value],
        part: bool,
    ):
        self.part = part
        self.named: dict[int, str] = {}  # sizes of a part
        self.kernel, self.interpreted, self.shared, self.tile, self.late = kernel, interpreted, shared, tile, late
        self.types = {
            v: stored_type(v, schedule.program.outputs) for v in (*schedule.program.outputs, *schedule.temporaries)
        }
        before = schedule.kernels[: schedule.kernels.index(kernel)]
        parts = [v.what[1] if v.kind == "add" else v for v in kernel.stores if v.kind in ("part", "add")]
        self.types |= {v: self.types[v.what[0]] for v in parts}
        # loaded, where others that are elementwise are recomputed
        self.dear = {v for k in before for v in k.stores if v in schedule.dear}
        self.strides = {**strides, **{v: strides_of(v.shape) for v in schedule.temporaries}}
        self.outer: list[str] = []
        self.inner: list[str] = []  # of the loop that begins with `header`
        self.header = ""
        self.last: tuple[list[str], list[str]] = [], []  # stores behind everything else of the body, and of the loop
        self.looping: frozenset = NONE  # the variable of the loop that is being written
        self.memo: dict = {}
        self.of_loop: list = []  # keys of what the loop's body knows
        self.loaded: dict[str, frozenset] = {}
        self.buffers: dict[Value, str] = {}
        self.loads: dict[Value, set] = {}
        self.stores: dict[Value, tuple] = {}
        self.helpers: dict[str, None] = {}
        self.computes: dict[str, None] = {}  # names of operations
        self.count = 0
        self.keep = ""  # what the cache is told of the blocks that a pass reads
        self.ahead = 0  # bytes that a loop over blocks loads for one of them
        self.masks = {"x": False, "r": False, "c": False}
        # columns with the padding behind them: a vector of columns is read and written whole
        ends = {self.strides[v][-2] for v in padded if v.shape[-1] == kernel.columns}
        self.padded, self.padded_end = padded, min(ends, default=0)
        extents = [kernel.numel, *(_extent(v.shape, of_v) for v, of_v in self.strides.items())]
        self.wide = wide or max([n for n in extents if isinstance(n, int)], default=0) >= LIMIT
        self.limits = dict.fromkeys(n for n in extents if isinstance(n, Extent))
        self.sizes: dict[Atom | Scalar, None] = {}

    @abstractmethod
    def _reduction(self, v: Value) -> Term:
        """A reduction of this kernel, in the current row."""

    # ------------------------------------------------------------------------------------------------------------
    # lines
    def _emit(self, text: str, variables: frozenset) -> Term:
        """A line that computes an expression; equal expressions are one line."""
        if text.isidentifier():
            return Term(text, variables)
        key = "text", text
        if key not in self.memo:
            self.count += 1
            target = self.inner if variables & self.looping else self.outer
            target.append(f"v{self.count} = {text}")
            self._know(key, Term(f"v{self.count}", variables))
        return self.memo[key]

    def _know(self, key, term: Term) -> None:
        self.memo[key] = term
        if term.variables & self.looping:
            self.of_loop.append(key)

    def index(self, index: Index) -> Term:
        """An index as an integer expression; quotients and remainders are lines of their own."""
        texts, variables = [], NONE
        for atom, factor in index.terms.items():
            if isinstance(atom, Part):
                key = "part", atom
                if key not in self.memo:
                    inside = self.index(atom.index)
                    text = (
                        inside.text
                        if atom.remainder is None
                        else f"{bracketed(inside.text)} {'%' if atom.remainder else '//'} {self.size(atom.by)}"
                    )
                    self._know(key, self._emit(text, inside.variables))
                name, of_atom = self.memo[key]
            else:
                name, of_atom = atom.name, self.loaded[atom.name] if atom.loaded else frozenset(atom.name)
            variables |= of_atom
            texts.append(name if factor == 1 else f"{name} * {self.size(factor)}")
        if index.constant:
            texts.append(self.size(index.constant))
        if not variables:  # of a rank like all others
            texts.append(self._emit(f"tl.zeros({[1] * len(self.shape)}, tl.int32)", NONE).text)
        return Term(" + ".join(texts), variables)

    def size(self, n: int | Extent) -> str:
        """A size in the text of the kernel."""
        if isinstance(n, int):
            return self.named.setdefault(n, f"k{len(self.named)}") if self.part else str(n)
        self.limits[n] = None
        self.sizes |= dict.fromkeys(atom for monomial in n.terms for atom in monomial)
        return self._emit(text_of(n), NONE).text

    def _scalar(self, x: Scalar) -> str:
        """The name of a number in the text of the kernel."""
        self.sizes.setdefault(x)
        return f"number{list(self.sizes).index(x)}" if self.part else x.name

    # ------------------------------------------------------------------------------------------------------------
    # values
    def value(self, v: Value, place: Place, conditions: tuple) -> Term:
        if (
            v.kind == "reduce"
            and any(v is own for own in self.kernel.reductions)
            and reduced_place(v, place).is_variable(self.kernel.r)
        ):
            return self._reduction(v)
        key = (v, tuple(i.key for i in place), tuple((i.key, low, high) for i, low, high in conditions))
        found = self.memo.get(key)
        if found is None:
            found = self._computed(v, place, conditions)
            self._know(key, found)
        return found

    def _computed(self, v: Value, place: Place, conditions: tuple) -> Term:
        kind = v.kind
        if kind in ("input", "reduce", "partial", "added") or v in self.dear:
            return self._load(v, place, conditions)
        if kind == "map":
            return self._mapped(v, place, conditions)
        if kind == "cast":
            return self._cast(v.operands[0].dtype, v.dtype, self.value(v.operands[0], place, conditions))
        if kind == "number":
            return self._emit(self._of_number(v.what, v.dtype), NONE)
        if kind == "iota":
            start, step = v.what
            at = self.index(place[0])
            if (start, step) == (0, 1) and v.dtype.category != FLOAT:
                return self._emit(f"{bracketed(at.text)}.to({compute_type(v.dtype)})", at.variables)
            wide = "int64" if isinstance(start, int) and isinstance(step, int) else "float64"
            number = f"{bracketed(at.text)}.to(tl.{wide}) * {step} + {start}"
            return self._cast_text(number, v.dtype, at.variables)
        if kind == "philox":
            return self._drawn(v, place)
        if kind == "gather":
            return self._gathered(v, place, conditions)
        if kind in ("cat", "pad", "partials"):
            self.computes[kind] = None
            return self._chosen(v, place, conditions)
        ((operand, there, _),) = sources(v, place)
        return self.value(operand, there, conditions)

    def _drawn(self, v: Value, place: Place) -> Term:
        offset, low, high = v.what
        seed, at = self.value(v.operands[0], (), ()), self.index(join(place, strides_of(v.shape)))
        halves = f"{bracketed(at.text)}.to(tl.int32), ({at.text} >> 32).to(tl.int32)" if self.wide else f"{at.text}, 0"
        self.helpers["_uniform"] = self.computes["uniform"] = None
        return self._emit(f"_uniform({seed.text}, {offset}, {halves}) * {high - low} + {low}", at.variables)

    def _mapped(self, v: Value, place: Place, conditions: tuple) -> Term:
        function = FUNCTIONS[v.what]
        kind = next(x.dtype for x in reversed(v.operands) if isinstance(x, Value))
        if v.what == "where":
            kind = v.dtype
        texts, variables = [], NONE
        for x in v.operands:
            if isinstance(x, Value):
                term = self.value(x, place, conditions)
                if v.what in ("eq", "ne") and x.dtype.category == FLOAT and x.dtype.bytes < 4:
                    # as a saved extreme is, which is compared with recomputed values
                    term = self._cast_text(term.text, x.dtype, term.variables)
                texts.append(term.text)
                variables |= term.variables
            elif v.what == "pow":
                texts.append(repr(x))
            else:
                number = self._number(x, kind)
                texts.append(number if isinstance(x, int | float | bool) else self._emit(number, NONE).text)
        text = function.text(*texts)
        self.computes[v.what] = None
        self.helpers.update(dict.fromkeys(h for h in HELPERS if h in text))
        return self._emit(text, variables)

    def _number(self, x, d: dtype) -> str:
        if not isinstance(x, Extent | Scalar) and (d.name == "float32" or d.category == FLOAT and d.bytes < 4):
            return literal(x, d)
        return self._of_number(x, d)

    def _of_number(self, x, d: dtype) -> str:
        number = self.size(x) if isinstance(x, Extent) else self._scalar(x) if isinstance(x, Scalar) else literal(x, d)
        return f"tl.full({[1] * len(self.shape)}, {number}, {compute_type(d)})"

    def _cast(self, source: dtype, target: dtype, term: Term) -> Term:
        if target.category == BOOL:
            return term if source.category == BOOL else self._emit(f"{term.text} != 0", term.variables)
        if source.category == FLOAT and source.bytes < 4 and target.name == "float32":
            return term
        return self._cast_text(term.text, target, term.variables, compute_type(source))

    def _cast_text(self, text: str, target: dtype, variables: frozenset, known: str = "") -> Term:
        text = bracketed(text) + (f".to({compute_type(target)})" if known != compute_type(target) else "")
        if target.category == FLOAT and target.bytes < 4:
            text = self._rounded(text, target)
        return self._emit(text, variables)

    def _rounded(self, text: str, target: dtype) -> str:
        if self.interpreted and target.name == "bfloat16":
            self.helpers["_nearest_bfloat16"] = None
            return f"_nearest_bfloat16({text})"
        return f"{text}.to(tl.{target.name}).to(tl.float32)"

    def _chosen(self, v: Value, place: Place, conditions: tuple) -> Term:
        """A join or a padding: the operand that is read depends on conditions on the place."""
        options = [
            (o, there, [c for c in needed if not _always(c)])
            for o, there, needed in sources(v, place)
            if not any(map(_never, needed))
        ]
        if v.kind != "cat":
            term = Term(self._number(v.what[0], v.dtype), NONE)
            if not options:
                return self._computed(Value("number", (), (), v.dtype, v.what[0]), (), ())
        else:
            operand, there, needed = options.pop()
            term = self.value(operand, there, conditions + tuple(needed))
        for operand, there, needed in reversed(options):
            inside = self.value(operand, there, conditions + tuple(needed))
            if not needed:
                term = inside
                continue
            test = [self._test(c) for c in needed]
            variables = frozenset().union(term.variables, inside.variables, *(t.variables for t in test))
            term = self._emit(f"tl.where({' & '.join(t.text for t in test)}, {inside.text}, {term.text})", variables)
        return term

    def _gathered(self, v: Value, place: Place, conditions: tuple) -> Term:
        self.computes["gather"] = None
        a, *indices = v.operands
        there = indexed_place(v.what, a.shape, indices, place, lambda at, n: self._found(at, n, place, conditions))
        return self.value(a, there, conditions)

    def _found(self, at: Value, n: int | Extent, place: Place, conditions: tuple) -> Index:
        """The value of an index at a place. An index that is out of bounds ends the program, as in PyTorch's
        kernels."""
        term = self.value(at, place, conditions)
        test = self._emit(f"({term.text} >= 0) & ({term.text} < {self.size(n)})", term.variables)
        tests = [self._test(c) for c in conditions if not _always(c)]
        mask = self._mask(term.variables, tests)
        inside = f"{test.text} | (({mask}) == 0)" if mask else test.text
        target = self.inner if term.variables.union(*(t.variables for t in tests)) & self.looping else self.outer
        if self.interpreted:  # which has no assertions
            target.append(f"if not ({inside}).handle.data.all(): raise IndexError('index out of range')")
        else:
            target.append(f"tl.device_assert({inside}, 'index out of range')")
        loaded = self._emit(f"{term.text}.to(tl.{'int64' if self.wide else 'int32'})", term.variables)
        self.loaded[loaded.text] = loaded.variables
        return Index({Variable(loaded.text, n, loaded=True): 1}, 0)

    # ------------------------------------------------------------------------------------------------------------
    # memory
    def _in_memory_order(self, v: Value | None) -> Index:
        """The row-major place, in a tensor of the space's size, of the x-th element of `v` in memory: neighbours are
        written, and most often read, together."""
        x = Index.of(self.kernel.x)
        if v is None:
            return x
        steps = self._steps(v)
        order = sorted(range(len(v.shape)), key=lambda d: -hint(steps[d]))
        there = dict(zip(order, split(x, [v.shape[d] for d in order]), strict=True))
        return join([there[d] for d in range(len(v.shape))], strides_of(v.shape))

    def _steps(self, v: Value) -> Sequence[int]:
        """The distance in memory of a step in each dimension."""
        if v.kind != "part":
            return self.strides[v]
        variables = [Variable("step", n) for n in v.shape]
        offset = self._offset(v, tuple(map(Index.of, variables)))
        return [offset.terms.get(x, 0) for x in variables]

    def _offset(self, v: Value, place: Place) -> Index:
        return (
            join(place_in_whole(v, place), self.strides[v.what[0]])
            if v.kind == "part"
            else join(place, self.strides[v])
        )

    def _pointer(self, v: Value) -> str:
        v = v.what[0] if v.kind == "part" else v
        if v not in self.buffers:
            self.buffers[v] = f"{'in' if v.kind == 'input' else 'buffer'}{len(self.buffers)}"
        return self.buffers[v]

    def _load(self, v: Value, place: Place, conditions: tuple) -> Term:
        index = opened(join(place, self.strides[v]))
        offset = self.index(index)
        tests = [self._test(c) for c in conditions if not _always(c)]
        variables = offset.variables.union(*(t.variables for t in tests))
        mask = self._mask(variables, tests, self._is_by_rows(v, index))
        if variables & self.looping:
            self.ahead += v.dtype.bytes * math.prod(
                n
                for n, name in zip(self.shape, "rc" if len(self.shape) == 2 else "x", strict=True)
                if name in variables
            )
        self.loads.setdefault(v, set()).add(index.key)
        keep = f", eviction_policy='{self.keep}'" if self.keep and "c" in variables and "r" in variables else ""
        text = (
            f"tl.load({self._pointer(v)} + {bracketed(offset.text)}{f', mask={mask}, other=0' if mask else ''}{keep})"
        )
        if v.dtype.category == FLOAT and v.dtype.bytes < 4:
            text += ".to(tl.float32)"
        if v.dtype.category == BOOL:
            text += ".to(tl.int1)"
        return self._emit(text, variables)

    def _is_by_rows(self, v: Value, index: Index) -> bool:
        """Whether a place is a column of a padded row, for each column of the kernel."""
        if v not in self.padded or v.shape[-1] != self.kernel.columns:
            return False
        step = self.strides[v][-2]
        columns = [f for a, f in index.terms.items() if isinstance(a, Variable) and a.name == "c"]
        others = [f for a, f in index.terms.items() if not isinstance(a, Variable) or a.name != "c"]
        return columns == [1] and index.constant == 0 and all(type(f) is int and f % step == 0 for f in others)

    def _mask(self, variables: frozenset, tests: Sequence[Term], by_rows: bool = False) -> str:
        names = {"x": "x_inside", "r": "r_inside", "c": "c_in_row" if by_rows else "c_inside"}
        return " & ".join(
            [names[n] for n in ("x", "r", "c") if n in variables and self.masks[n]] + [t.text for t in tests]
        )

    def _test(self, condition: tuple) -> Term:
        where, low, high = condition
        at = self.index(where)
        texts = [] if at_least(where.low, low) else [f"({at.text} >= {self.size(low)})"]
        texts += [] if at_least(high - 1, where.high) else [f"({at.text} < {self.size(high)})"]
        return self._emit(" & ".join(texts), at.variables)


def _always(condition: tuple) -> bool:
    where, low, high = condition
    return at_least(where.low, low) and at_least(high - 1, where.high)


def _never(condition: tuple) -> bool:
    where, low, high = condition
    return at_least(low - 1, where.high) or at_least(where.low, high)


def _extent(shape: Sequence[int | Extent], strides: Sequence[int | Extent]) -> int | Extent:
    """The distance of the last element from the first."""
    total: int | Extent = 0
    for n, step in zip(shape, strides, strict=True):
        total = total + (n - 1) * (abs(step) if isinstance(step, int) else step)
    return total
