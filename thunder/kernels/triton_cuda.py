"""The target of NVIDIA's GPUs: kernels of tiles as Triton.

A launch is one function of its buffers. Each of its kernels is a function of the number of a program and of buffers,
which the launch calls for a range of programs:

    @triton.jit
    def kernel_0(program, b0, b1): ...

    @triton.jit
    def fused_exp_sum(b0, b1):
        kernel_0(tl.program_id(0), b0, b1)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thunder.core.dtypes import BOOL, FLOAT, INTEGER, dtype
from thunder.kernels.accesses import written_over
from thunder.kernels.combining import neutral, neutrals
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Part, Variable, opened, strides_of
from thunder.kernels.index import join as joined
from thunder.kernels.ir import BINDERS, EXTREMES, Buffer, Combine, Node, in_order, variables_of
from thunder.kernels.numbers import Scalar
from thunder.kernels.schedule import Kernel, Write
from thunder.kernels.sizes import Atom, Extent, at_least, atoms_of, divides, factor_text, text
from thunder.kernels.tiled import Launch
from thunder.kernels.tiles import Tile, programs_of
from thunder.kernels.triton_helpers import HELPERS as SHARED_HELPERS

Size = int | Extent
LIMIT = 2**31 - 2**20  # of offsets that are computed with 32 bits
HEADER = "import triton\nimport triton.language as tl\n"

# ------------------------------------------------------------------------------------------------ functions

_INFINITY = 'float("inf")'
_NAN_TOO = "propagate_nan=tl.PropagateNan.ALL"
TEXTS: dict[str, str] = {
    "abs": "tl.abs({})", "neg": "-{}", "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "square": "{0} * {0}",
    "true_divide": "{} / {}", "reciprocal": "1.0 / {}",
    "maximum": "tl.maximum({}, {}, " + _NAN_TOO + ")", "minimum": "tl.minimum({}, {}, " + _NAN_TOO + ")",
    "fmax": "tl.maximum({}, {})", "fmin": "tl.minimum({}, {})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({0}.dtype)",
    "floor": "tl.floor({})", "ceil": "tl.ceil({})", "trunc": "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))",
    "sqrt": "_sqrt({})", "rsqrt": "_rsqrt({})", "exp": "tl.exp({})", "exp2": "tl.exp2({})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{}))", "log": "tl.log({})", "log2": "tl.log2({})",
    "log10": "tl.log({}) * 0.4342944819032518", "sin": "tl.sin({})", "cos": "tl.cos({})", "tanh": "_tanh({})",
    "expm1": "_expm1({})", "log1p": "_log1p({})", "erf": "tl.erf({})",
    "eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}",
    "ge": "{} >= {}", "isnan": "{0} != {0}", "isinf": "tl.abs({}) == " + _INFINITY,
    "isfinite": "tl.abs({}) < " + _INFINITY, "isposinf": "{} == " + _INFINITY, "isneginf": "{} == -" + _INFINITY,
    "logical_and": "({} != 0) & ({} != 0)", "logical_or": "({} != 0) | ({} != 0)",
    "logical_xor": "({} != 0) != ({} != 0)", "logical_not": "{} == 0",
    "bitwise_and": "{} & {}", "bitwise_or": "{} | {}", "bitwise_xor": "{} ^ {}",
    # -1, which Triton writes ~ with, is no number of 8 bits without a sign to the interpreter of Triton 3.5
    "bitwise_not": "(~{0}.to(tl.int64)).to({0}.dtype)",
    "bitwise_left_shift": "{} << {}", "bitwise_right_shift": "{} >> {}", "floor_divide": "_floor_divide({}, {})",
    "remainder": "_remainder({}, {})", "where": "tl.where({}, {}, {})",
}  # fmt: skip
_OF_SINGLE = {"tanh", "expm1", "log1p", "log10"}  # those whose texts are right to float32 only
# the names of CUDA's library, whose numbers PyTorch's kernels give; and of PyTorch's functions, for the interpreter
_LIBRARY = {
    **{n: (n, n) for n in (
        "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "erfinv", "lgamma",
        "hypot", "fmod", "pow", "copysign", *_OF_SINGLE,
    )},
    "round_to_even": ("rint", "round"),
}  # fmt: skip
_TRUTH_TEXTS = {"bitwise_not": "{} == 0"}
HELPERS: dict[str, str] = SHARED_HELPERS | {
    "libdevice": "from triton.language.extra import libdevice",
    "_library": '''
def _library(name, *operands):
    """A function of PyTorch's, for Triton's interpreter, which has no libraries of devices."""
    import torch
    first = operands[0]
    operands = operands if len(operands) == 1 else tl.broadcast(*operands)
    numbers = [torch.from_numpy(x.handle.data.copy()) for x in operands]
    result = getattr(torch, name)(*numbers).numpy()
    return tl.tensor(type(first.handle)(result, first.handle.dtype), operands[0].type)
''',
    "_cumsum": """
@triton.jit
def _cumsum(a, b):
    return a + b
""",
    # of h = a * (the one before) + b
    "_cumlinear": """
@triton.jit
def _cumlinear(a, b, c, d):
    return c * a, c * b + d
""",
    # NaNs are extremes, the last of equal ones counts
    "_cumamax": """
@triton.jit
def _cumamax(a, b):
    return tl.where((b >= a) | (b != b), b, a)
""",
    "_cumamin": """
@triton.jit
def _cumamin(a, b):
    return tl.where((b <= a) | (b != b), b, a)
""",
    "_cumargmax": """
@triton.jit
def _cumargmax(a, i, b, j):
    last = (b >= a) | (b != b)
    return tl.where(last, b, a), tl.where(last, j, i)
""",
    "_cumargmin": """
@triton.jit
def _cumargmin(a, i, b, j):
    last = (b <= a) | (b != b)
    return tl.where(last, b, a), tl.where(last, j, i)
""",
    "_cumlogsumexp": """
@triton.jit
def _cumlogsumexp(a, b):
    high = tl.maximum(a, b)
    part = tl.exp(tl.minimum(a, b) - high)
    above = 1 + part
    total = tl.where(tl.abs(high) == float("inf"), high, high + tl.log(above) + (part - (above - 1)) / above)
    return tl.where((a != a) | (b != b), a + b, total)
""",
    "_cumprod": """
@triton.jit
def _cumprod(a, b):
    return a * b
""",
}


def computes(op: str, kind: dtype) -> bool:
    """Whether a kernel computes a function of operands of a type."""
    return op in TEXTS or op == "signbit" or op in _LIBRARY and kind.category == FLOAT


def _type(kind: dtype) -> str:
    return "tl.int1" if kind.category == BOOL else f"tl.{kind.name}"


def literal(value: Any, kind: dtype) -> str:
    """A number as text. Numbers of types other than float32 say their type."""
    if kind.category == BOOL:
        return f"tl.full([], {bool(value)}, tl.int1)"
    if kind.category == INTEGER:
        return f"tl.full([], {int(value)}, {_type(kind)})"
    value = float(value)
    if kind.name == "float64":
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        return f"tl.full([], {text}, tl.float64)"
    if math.isfinite(value):
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if 0 < abs(value) < 2.0**-126:  # which Triton would take for a double
        return f"tl.full([], {value!r}, tl.float64).to(tl.float32)"
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full([], {text}, tl.float32)"


# ------------------------------------------------------------------------------------------------ a kernel


class Emitted(NamedTuple):
    """A launch: the name and the text of its function, the buffers and the numbers that it takes, and its programs, a
    number or an expression of sizes. limits: what has to be less than LIMIT, and more than -LIMIT. stages: how many
    tiles its programs read ahead."""

    name: str
    text: str
    buffers: tuple[Buffer, ...]
    numbers: tuple[Atom | Scalar, ...]
    programs: str
    warps: int
    limits: tuple[Extent, ...]
    stages: int | None = None


def limit_tests(limits: Iterable[Extent]) -> list[str]:
    """Expressions of sizes that hold where 32 bits are too few."""
    each = [*dict.fromkeys(limits)]
    tests = [f"{text(n)} >= {LIMIT}" for n in each if not any(m != n and at_least(m, n) for m in each)]
    return tests + [f"{text(n)} < -{LIMIT}" for n in each if not at_least(n, 0)]


class Memory(NamedTuple):
    """Of the buffers of a launch. late: those that are written over what the same kernel reads. rows: those whose rows
    have memory of their own behind them, which may be read and written: the elements of a row, and from each row to the
    next."""

    late: Container[Buffer] = ()
    rows: Mapping[Buffer, tuple[int, int]] = {}


class Scope:
    """Lines of Triton in one block, and what they compute."""

    def __init__(self, parent: Scope | None = None):
        self.parent, self.lines = parent, list[str]()
        self.names: dict[Any, str] = {}

    def known(self, key: Any) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope.names:
                return scope.names[key]
            scope = scope.parent
        return None


class Writer:
    """Writes the function of one kernel."""

    def __init__(self, kernel: Kernel, tile: Tile, interpreted: bool, wide: bool, memory: Memory, whole: bool = False):
        """wide: whether indices have 64 bits for any sizes. whole: whether all tiles of one dimension that it computes
        are inside, so that none is masked."""
        self.kernel, self.tile, self.interpreted, self.memory = kernel, tile, interpreted, memory
        self.is_flat = not tile.second
        self.first = kernel.loops if self.is_flat else kernel.loops[: kernel.outer]
        self.second = () if self.is_flat else kernel.sweep
        self.rows, self.width = (math.prod(v.size for v in loops) for loops in (self.first, self.second))
        self.stages = kernel.stages()
        self.buffers: dict[Buffer, str] = {}
        self.numbers: dict[Atom | Scalar, str] = {}
        self.helpers: dict[str, None] = {}
        self.computed_ops: dict[str, None] = {}
        self.count = 0
        self.top = Scope()
        # a program that adds up columns loops over rows, others may loop over the sweep
        self.body = Scope(self.top) if kernel.columns else self.top
        self.looped = self.first if kernel.columns else self.second
        self.bound: dict[Variable, tuple[str, Node]] = {}  # the indices that the load which is written has read
        reach = _reach(kernel, self.rows * self.width * 2)
        self.is_wide = wide or any(not isinstance(n, Extent) and abs(n) >= LIMIT for n in reach)
        self.limits = [n for n in reach if isinstance(n, Extent)] if not self.is_wide else []
        self.integer = "tl.int64" if self.is_wide else "tl.int32"
        self.masks_first = not divides(tile.first * tile.steps, self.rows) and not whole
        self.masks_second = not self.is_flat and not divides(tile.second, self.width)
        # by the names of loops of one dimension, the ends of rows with the memory behind them
        used = {*(n.what[0] for n in kernel.loads), *(w.buffer for w in kernel.writes)}
        self.row_ends: dict[Variable, dict[int, str]] = {}
        for loops, name in ((self.first, "x"), (self.second, "r")):
            if len(loops) == 1:
                ends = {end for b, (n, end) in memory.rows.items() if b in used and n == loops[0].size}
                self.row_ends[loops[0]] = {end: f"{name}_inside_{end}" for end in sorted(ends)}

    def size(self, n: Size) -> str:
        """A size as an operand."""
        self.numbers |= {a: a.name for a in atoms_of([n])}
        return factor_text(n)

    # -------------------------------------------------------------------------------------------- lines
    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def emit(self, scope: Scope, text: str) -> str:
        if text.isidentifier():
            return text
        name = self.fresh()
        scope.lines.append(f"{name} = {text}")
        return name

    def emit_once(self, scope: Scope, text: str) -> str:
        """A line that is written once for each text."""
        known = scope.known(text)
        if known is None:
            known = scope.names[text] = self.emit(scope, text)
        return known

    # -------------------------------------------------------------------------------------------- indices
    def scope_of(self, axes: Iterable[Variable], scope: Scope) -> Scope:
        """Where what depends on these loops is computed: outside of the program's loop where it may be."""
        return scope if any(v in self.looped for v in axes) else self.top

    def space(self, v: Variable) -> tuple[Sequence[Variable], str]:
        """The loops of a tile's dimension that a loop is in, and the name of their element's number."""
        return (self.second, "r") if v in self.second else (self.first, "x")

    def home(self, n: Node, scope: Scope) -> Scope:
        """Where a value is computed."""
        return self.scope_of(n.axes, scope)

    def loop(self, v: Variable, scope: Scope) -> str:
        """A loop's index as a tile of one dimension."""
        loops, name = self.space(v)
        number = loops.index(v)
        after = math.prod(u.size for u in loops[number + 1 :])
        text = name if after == 1 else f"{name} // {self.size(after)}"
        if number:
            text = f"({text}) % {self.size(v.size)}" if after != 1 else f"{text} % {self.size(v.size)}"
        return self.emit_once(self.scope_of([v], scope), text)

    def index(self, index: Index, scope: Scope) -> str:
        """An index as an expression."""
        parts = []
        for atom, factor in index.terms.items():
            if isinstance(atom, Part):
                inner = self.index(atom.index, scope)
                sign = "%" if atom.remainder else "//"
                text = inner if atom.remainder is None else f"({inner}) {sign} {self.size(atom.by)}"
                axes, bound = self.of(atom.index)
                home = scope if bound else self.scope_of(axes, scope)
                text = self.emit_once(home, text)
            elif atom in self.bound:
                text = self.bound[atom][0]
            else:
                text = self.loop(atom, scope)
            parts.append(text if factor == 1 else f"{text} * {self.size(factor)}")
        if index.constant or not parts:
            parts.append(self.size(index.constant))
        return " + ".join(parts)

    def of(self, index: Index) -> tuple[set[Variable], bool]:
        """The loops that an index depends on, and whether it depends on what was read."""
        axes: set[Variable] = set()
        is_bound = False
        for v in variables_of(index):
            if v in self.bound:
                axes |= self.bound[v][1].axes
                is_bound = True
            else:
                axes.add(v)
        return axes, is_bound

    def masks(self, axes: Iterable[Variable], buffer: Buffer | None = None, index: Index | None = None) -> list[str]:
        """The masks of tiles that depend on these loops. buffer, index: what is read or written, and where."""
        result = []
        if self.masks_first and any(v in self.first for v in axes):
            result.append(self.row_mask(self.first, buffer, index) or "x_inside")
        if self.masks_second and any(v in self.second for v in axes):
            result.append(self.row_mask(self.second, buffer, index) or "r_inside")
        return result

    def row_mask(self, loops: Sequence[Variable], buffer: Buffer | None, index: Index | None) -> str | None:
        """The mask of a row with the memory behind it: where a loop runs along it, and other loops from row to row."""
        if buffer is None or index is None or buffer not in self.memory.rows or len(loops) != 1:
            return None
        count, end = self.memory.rows[buffer]
        if count != loops[0].size:
            return None
        terms = dict(opened(index).terms)
        is_along = terms.pop(loops[0], 0) == 1 and opened(index).constant == 0
        is_apart = all(f % end == 0 and not (isinstance(a, Part) and loops[0] in variables_of(a.index))
                       for a, f in terms.items())  # fmt: skip
        return self.row_ends[loops[0]][end] if is_along and is_apart else None

    # -------------------------------------------------------------------------------------------- values
    def value(self, node: Node, scope: Scope, mask: str | None = None) -> str:
        """The name of a node's value, with the lines that compute it. mask: where it is needed."""
        stack = [node]
        while stack:
            n = stack[-1]
            if self.known(n, scope, mask) is not None:
                stack.pop()
                continue
            needed = [] if n.op in ("concat", *BINDERS) else [
                a for a in n.args if self.known(a, scope, mask) is None
            ]  # fmt: skip
            if needed:
                stack += reversed(needed)
                continue
            is_masked = mask is not None and _reads(n)
            home = scope if is_masked else self.home(n, scope)
            if n.op == "scan":
                text = self.scanned(n, scope)
            else:
                text = self.concat(n, home, mask) if n.op == "concat" else self.computed(n, scope, mask)
            home.names[n, mask if is_masked else None] = self.emit(home, text)
        name = self.known(node, scope, mask)
        assert name is not None, "its lines have been written"
        return name

    def known(self, n: Node, scope: Scope, mask: str | None) -> str | None:
        name = scope.known((n, None))
        return name if name is not None or mask is None else scope.known((n, mask))

    def computed(self, n: Node, scope: Scope, mask: str | None) -> str:
        """The text that computes a node of nodes that have names in this scope."""
        args = []
        for a in n.args:
            name = self.known(a, scope, mask)
            assert name is not None, f"{a} is computed before {n}"
            args.append(name)
        if n.op == "load":
            return self.load(n, args, scope, mask)
        if n.op == "constant":
            return literal(n.what, n.dtype)
        if n.op == "index":
            if not n.axes:
                return self.number(n.what.constant, n.dtype)
            return f"({self.index(n.what, scope)}).to({_type(n.dtype)})"
        if n.op == "argument":
            self.numbers[n.what] = n.what.name
            return f"tl.full([], {n.what.name}, tl.float64)"
        if n.op == "cast":
            return self.cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "random":
            return self.random(n, *args)
        assert n.op in FUNCTIONS, f"{n.op} is computed by a sweep before"
        self.computed_ops[n.op] = None
        if n.op == "true_divide" and n.args[1].op == "constant" and n.dtype.name == "float32":
            return f"tl.div_rn({args[0]}, {args[1]})"  # as of a mean, rounded to the nearest
        text = self.function(n.op, n.args[0].dtype, args)
        self.helpers |= dict.fromkeys(h for h in HELPERS if h in text)
        return text

    def function(self, op: str, kind: dtype, args: Sequence[str]) -> str:
        """A function of operands of a type."""
        if kind.category == BOOL and op in _TRUTH_TEXTS:
            return _TRUTH_TEXTS[op].format(*args)
        if op == "neg" and kind.category == INTEGER:
            # ptxas 12.8 reads max(max(-a, -b), -c) as max(max(-a, b), -c) on capability 9.0: it is not shown that the
            # 0 is one
            return "tl.program_id(2).to({0}.dtype) - {0}".format(*args)
        if op == "signbit":
            return f"{args[0]}.to(tl.int{8 * kind.bytes}, bitcast=True) < 0"
        if op in TEXTS and not (kind.name == "float64" and op in _OF_SINGLE):
            return TEXTS[op].format(*args)
        name, of_torch = _LIBRARY[op]
        operands = ", ".join(args)
        return f'_library("{of_torch}", {operands})' if self.interpreted else f"libdevice.{name}({operands})"

    def random(self, n: Node, seed: str, element: str) -> str:
        self.helpers["_uniform"] = self.computed_ops[n.op] = None
        at = n.args[1]
        is_short = at.op == "index" and at_least((1 << 31) - 1, at.what.high)
        page = "0" if is_short else f"({element} >> 32).to(tl.int32)"
        return f"_uniform({seed}, {n.what}, {element}.to(tl.int32), {page})"

    def number(self, n: Size, kind: dtype) -> str:
        """A number of elements, or one that elements are combined with."""
        return literal(n, kind) if isinstance(n, int) else f"tl.full([], {self.size(n)}, {_type(kind)})"

    def cast(self, x: str, source: dtype, target: dtype) -> str:
        if target.category == BOOL:
            return f"{x} != 0"
        if target.name == "bfloat16" and self.interpreted:
            self.helpers["_nearest_bfloat16"] = None
            x = f"_nearest_bfloat16({x}.to(tl.float32))"
        return f"{x}.to({_type(target)})"

    def load(self, n: Node, args: Sequence[str], scope: Scope, mask: str | None) -> str:
        """The text that reads a buffer, with the masks of the axes whose last block is not full."""
        buffer, _, variables = n.what
        self.bound = {
            v: (self.read_index(v, a, node, scope, mask), node)
            for v, a, node in zip(variables, args, n.args, strict=True)
        }
        index = self.kernel.loads[n]
        axes, _ = self.of(index)
        masks = self.masks(axes, None if n.args else buffer, index) + ([mask] if mask is not None else [])
        offset = self.index(index, scope)
        self.bound = {}
        if mask is not None and not axes:  # which is inside, and no tile
            masks = []
        masked = f", mask={' & '.join(masks)}, other=0" if masks else ""
        text = f"tl.load({self.buffer(buffer)} + ({offset}){masked})"
        return f"{text}.to(tl.int1)" if buffer.dtype.category == BOOL else text

    def buffer(self, buffer: Buffer) -> str:
        return self.buffers.setdefault(buffer, f"b{len(self.buffers)}")

    def read_index(self, variable: Variable, argument: str, node: Node, scope: Scope, mask: str | None) -> str:
        """Checks an index that was read, and returns its name: one that is outside ends the program, as in PyTorch's
        kernels."""
        home = scope if mask is not None else self.scope_of(node.axes, scope)
        key = ("index", node, variable.size, mask)
        known = home.known(key)
        if known is not None:
            return known
        masks = self.masks(node.axes) + ([mask] if mask is not None and node.axes else [])
        inside = f"({argument} >= 0) & ({argument} < {self.size(variable.size)})"
        if masks:
            inside = f"({inside}) | (({' & '.join(masks)}) == 0)"
        if self.interpreted:  # which has no assertions
            home.lines.append(f"if not ({inside}).handle.data.all(): raise IndexError('index out of range')")
        else:
            home.lines.append(f"tl.device_assert({inside}, 'index out of range')")
        home.names[key] = name = self.emit(home, f"{argument}.to({self.integer})")
        return name

    def concat(self, n: Node, scope: Scope, mask: str | None) -> str:
        """Each piece where it is needed, and one of them for each element."""
        along, starts, end = n.what
        ranges = [*zip(n.args, starts, (*starts[1:], end), strict=True)]
        reached = [
            (piece, lo, hi) for piece, lo, hi in ranges
            if not at_least(along.low, hi) and not at_least(lo - 1, along.high)
        ]  # fmt: skip
        home = self.scope_of(variables_of(along), scope)
        at = self.emit_once(home, self.index(along, scope))
        masks = []  # where each piece is needed, and the outer value is
        insides = []
        for number, (_, lo, hi) in enumerate(reached):
            tests = [f"({at} >= {self.size(lo)})"] * (number > 0)
            tests += [f"({at} < {self.size(hi)})"] * (number + 1 < len(reached))
            insides.append(self.emit_once(home, " & ".join(tests)))
            masks.append(insides[-1] if mask is None else self.emit_once(scope, f"{insides[-1]} & {mask}"))
        of: dict[Node, list[str]] = {}
        for (piece, *_), both in zip(reached, masks, strict=True):
            of.setdefault(piece, []).append(both)
        result = ""
        for number, (piece, _, hi) in reversed([*enumerate(reached)]):
            inside, own = insides[number], of[piece]
            value = self.value(piece, scope, own[0] if len(own) == 1 else self.emit_once(scope, " | ".join(own)))
            if not result:
                result = value
            else:
                test = inside if number else self.emit_once(home, f"{at} < {self.size(hi)}")
                result = self.emit(scope, f"tl.where({test}, {value}, {result})")
        return result

    # -------------------------------------------------------------------------------------------- reductions
    def tile_of(self, node: Node, scope: Scope) -> str:
        """A value as a whole tile: elements that lie in memory once are not loaded for each index."""
        return f"tl.broadcast_to({self.value(node, scope)}, [{self.tile.first}, {self.tile.second}])"

    def counted(self, node: Node, value: str) -> str:
        """A tile with what changes nothing where the sweep has ended."""
        if not self.masks_second:
            return value
        return f"tl.where(r_inside, {value}, {literal(neutral(node.what[0], node.dtype), node.dtype)})"

    # -------------------------------------------------------------------------------------------- scans
    def scanned(self, node: Node, scope: Scope) -> str:
        """The combinations up to each element of a tile. In a loop over the sweep they begin with what the tiles before
        it are combined to; each sweep that needs a scan computes it."""
        combine, _, index, is_backwards = node.what
        inner = strides_of([v.size for v in self.second])
        assert index.key == joined(list(map(Index.of, self.second)), inner).key, "a scan combines in the sweep's order"
        self.computed_ops[f"cum{combine}"] = None
        body = self.kernel.rows[node]
        parts = body.args if body.op == "tuple" else (body,)
        starts = [literal(n, p.dtype) for n, p in zip(neutrals(combine, parts), parts, strict=True)]
        tiles = []
        for part, start in zip(parts, starts, strict=True):
            tile = self.tile_of(part, scope)
            tiles.append(self.emit(scope, f"tl.where(r_inside, {tile}, {start})" if self.masks_second else tile))
        names = [self.fresh() for _ in parts]
        text = _SCANS[combine].format(*tiles, reverse=is_backwards)
        self.helpers |= dict.fromkeys(h for h in HELPERS if h in text)
        scope.lines.append(f"{', '.join(names)} = {text}")
        if len(parts) == 1:
            scope.lines[-1] += f".to({_type(node.dtype)})"
        if self.tile.is_whole:
            return names[-1]
        end = 0 if is_backwards else self.tile.second - 1
        at_end = self.emit_once(self.top, f"tl.arange(0, {self.tile.second})[None, :] == {end}")
        so_far = [self.emit(self.top, f"tl.broadcast_to({s}, [{self.tile.first}, 1])") for s in starts]
        lasts = [
            self.emit(scope, f"tl.sum(tl.where({at_end}, {name}, 0), 1)[:, None].to({_type(part.dtype)})")
            for name, part in zip(names, parts, strict=True)
        ]
        results = [self.fresh() for _ in parts]
        for into, others in ((results, names), (so_far, lasts)):
            text = f"_cum{combine}({', '.join([*so_far, *others])})"
            scope.lines.append(f"{', '.join(into)} = {text}")
        self.helpers[f"_cum{combine}"] = None
        return results[-1]

    def reduced(self, node: Node, tile: str) -> str:
        """The text that reduces a tile along its second axis. NaNs are kept, as PyTorch does."""
        combine = node.what[0]
        self.computed_ops[str(combine)] = None
        kind = _type(node.dtype)
        if combine == Combine.SUM:
            return f"tl.sum({tile}, 1)[:, None].to({kind})"
        if combine == Combine.PROD:
            self.helpers["_cumprod"] = None
            return f"tl.reduce({tile}, 1, _cumprod)[:, None]"
        best = f"tl.{combine[1:]}({tile}, 1)"
        if node.dtype.category == FLOAT:  # which passes NaNs over
            best = f'tl.where(tl.max(({tile} != {tile}).to(tl.int32), 1) > 0, float("nan"), {best})'
        return f"{best}[:, None].to({kind})"

    def combined(self, node: Node, old: str, new: str) -> str:
        combine = node.what[0]
        if combine in EXTREMES:
            nan = f", {_NAN_TOO}" if node.dtype.category == FLOAT else ""
            return f"tl.{combine[1:]}imum({old}, {new}{nan})"
        return f"{old} {'+' if combine == Combine.SUM else '*'} {new}"

    # -------------------------------------------------------------------------------------------- the function
    def text(self, name: str) -> str:
        """The Triton function of one kernel: indices of its block, the loop over columns, the writes."""
        first, second = self.tile.first, self.tile.second
        lines = self.top.lines
        program = "program.to(tl.int64)" if self.is_wide else "program"
        blocks = self.blocks() if second and not self.kernel.rows and self.tile.is_whole else "1"
        row = program if blocks == "1" else f"({program} // {blocks})"
        if self.is_flat:
            lines.append(f"x = {program} * {first} + tl.arange(0, {first})")
        elif not self.kernel.columns:
            lines.append(f"x = {row} * {first} + tl.arange(0, {first})[:, None]")
        if second and self.tile.is_whole:
            start = f"({program} % {blocks}) * {second} + " if blocks != "1" else ""
            lines.append(f"r = {start}tl.arange(0, {second})[None, :]")
            lines += self.mask_lines("r", self.second) if self.masks_second else []
        if self.kernel.columns:
            self.added_up(row)
        else:
            lines += self.mask_lines("x", self.first) if self.masks_first else []
            self.whole() if self.tile.is_whole else self.loops()
        body = "\n".join(f"    {line}" for line in self.top.lines)
        parameters = ["program", *self.buffers.values(), *self.numbers.values()]
        return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}\n"

    def blocks(self) -> str:
        """How many tiles there are along the second dimension."""
        self.size(self.width)
        return quotient_text(self.width, self.tile.second)

    def mask_lines(self, name: str, loops: Sequence[Variable]) -> list[str]:
        ends = self.row_ends.get(loops[0], {}) if loops else {}
        size = math.prod(v.size for v in loops)
        inside = f"{name}_inside = {name} < {self.size(size)}"
        return [inside, *(f"{mask} = {name} < {end}" for end, mask in ends.items())]

    def whole(self) -> None:
        self.reductions()
        self.write_all(self.kernel.writes, self.body)

    def reductions(self) -> None:
        """Those of whole rows."""
        for n in (n for n in self.stages if n.op == "reduce"):
            tile = self.emit(self.body, self.counted(n, self.tile_of(self.kernel.rows[n], self.body)))
            self.body.names[n, None] = self.emit(self.body, self.reduced(n, tile))

    def added_up(self, row: str) -> None:
        """A loop over tiles of rows, whose columns are added up. row: the number of the program among those of the
        same columns."""
        tile, top = self.tile, self.top
        shape = f"[{tile.first}, {tile.second}]"
        columns = self.kernel.columns
        names = [self.emit(top, f"tl.zeros({shape}, {_type(c.buffer.dtype)})") for c in columns]
        head = [f"x = ({row} * {tile.steps} + step) * {tile.first} + tl.arange(0, {tile.first})[:, None]"]
        head += self.mask_lines("x", self.first) if self.masks_first else []
        self.reductions()
        for c, name in zip(columns, names, strict=True):
            value = self.tile_of(c.value, self.body)
            value = f"tl.where(x_inside, {value}, 0)" if self.masks_first else value
            self.body.lines.append(f"{name} = {name} + {value}")
        self.write_all(self.kernel.writes, self.body)  # which may be over what the columns read
        top.lines.append(f"for step in range({tile.steps}):")
        top.lines += [f"    {line}" for line in (*head, *self.body.lines)]
        for c, name in zip(columns, names, strict=True):
            self.computed_ops[str(c.combine)] = None
            total = self.emit(top, f"tl.sum({name}, 0)[None, :].to({_type(c.buffer.dtype)})")
            offset = f"{row} * {self.size(self.width)} + {self.index(c.index, top)}"
            masked = ", mask=r_inside" if self.masks_second else ""
            top.lines.append(f"tl.store({self.buffer(c.buffer)} + ({offset}), {total}{masked})")

    def loops(self) -> None:
        """A loop over the sweep for each level of reductions, and one for what is written."""
        sweeps: dict[int, list[Node]] = {}
        for n, stage in self.stages.items():
            if n.op == "reduce":
                sweeps.setdefault(stage, []).append(n)
        is_backwards = any(n.op == "scan" and n.what[3] for n in self.stages)
        inner = [w for w in self.kernel.writes if any(v in self.second for v in written_over(w, self.kernel))]
        writes: dict[int, list[Write]] = {}
        for w in inner:
            writes.setdefault(self.kernel.stage_of(w.value), []).append(w)
        for stage in sorted({*sweeps, *writes}):
            scope = Scope(self.top)
            names = {}
            for n in sweeps.get(stage, ()):
                start = literal(neutral(n.what[0], n.dtype), n.dtype)
                shape = f"[{self.tile.first}, {self.tile.second}]"
                names[n] = self.emit(self.top, f"tl.broadcast_to({start}, {shape})")
            for n, name in names.items():
                value = self.counted(n, self.tile_of(self.kernel.rows[n], scope))
                scope.lines.append(f"{name} = {self.combined(n, name, value)}")
            self.write_all(writes.get(stage, ()), scope)
            start, width = "start", self.size(self.width)
            if is_backwards:
                start = f"({width} - 1) // {self.tile.second} * {self.tile.second} - start"
            head = [f"r = {start} + tl.arange(0, {self.tile.second})[None, :]"]
            head += self.mask_lines("r", self.second) if self.masks_second else []
            self.top.lines.append(f"for start in range(0, {width}, {self.tile.second}):")
            self.top.lines += [f"    {line}" for line in (*head, *scope.lines)]
            for n, name in names.items():
                self.top.names[n, None] = self.emit(self.top, self.reduced(n, name))
        self.write_all([w for w in self.kernel.writes if w not in inner], self.top)

    def write_all(self, writes: Sequence[Write], scope: Scope) -> None:
        """What is written over something that the kernel reads is written last, when all threads of the program have
        read it."""
        late = [w for w in writes if w.buffer in self.memory.late and w.scatter is None]
        for w in late:
            self.value(w.value, scope)
        for w in writes:
            if w not in late:
                self.write(w, scope)
        if late:
            scope.lines.append("tl.debug_barrier()")
        for w in late:
            self.write(w, scope)

    def scatter(self, w: Write, scope: Scope) -> None:
        """A write at indices that are read: of a whole tile, since each of its elements is combined with what is
        there."""
        assert w.scatter is not None, "a scatter"
        value, *indices = [self.value(a, scope) for a in w.value.args]
        self.bound = {
            v: (self.read_index(v, name, node, scope, None), node)
            for v, name, node in zip(w.scatter.variables, indices, w.value.args[1:], strict=True)
        }
        offset = self.index(w.index, scope)
        self.bound = {}
        loops = [*written_over(w, self.kernel)]
        shape = [self.tile.first]
        if not self.is_flat:
            shape.append(self.tile.second if any(v in self.second for v in loops) else 1)
        masks = self.masks(loops)
        pointer = f"{self.buffer(w.buffer)} + ({offset} + tl.zeros({shape}, {self.integer}))"
        value = f"tl.broadcast_to({value}, {shape})"
        masked = f", mask=tl.broadcast_to({' & '.join(masks)}, {shape})" if masks else ""
        if w.scatter.combine is None:
            if w.buffer.dtype.category == BOOL and self.interpreted:
                value = f"{value}.to(tl.int1)"
            scope.lines.append(f"tl.store({pointer}, {value}{masked})")
            return
        self.computed_ops["scatter"] = None
        scope.lines.append(f'tl.atomic_{_ATOMIC[w.scatter.combine]}({pointer}, {value}{masked}, sem="relaxed")')

    def spread(self, w: Write, axes: Container[Variable]) -> tuple[list[int], list[str]]:
        """The shape of a value whose index has fewer dimensions, and the masks of those that it does not have."""
        return ([] if axes else [1] if self.is_flat else [1, 1]), []  # a tile of one element, as values are

    def write(self, w: Write, scope: Scope) -> None:
        """Adds the statement that stores a value, by a mask where its axes are not full."""
        if w.scatter is not None:
            self.scatter(w, scope)
            return
        value = self.value(w.value, scope)
        axes = variables_of(w.index)
        masks = self.masks(axes, w.buffer, w.index)
        offset = self.index(w.index, scope)
        shape, rest = self.spread(w, axes)
        masks += rest
        if shape:
            offset = f"{offset} + tl.zeros({shape}, tl.int32)"
        masked = f", mask={' & '.join(masks)}" if masks else ""
        if w.buffer.dtype.category == BOOL and self.interpreted:
            value = f"{value}.to(tl.int1)"
        scope.lines.append(f"tl.store({self.buffer(w.buffer)} + ({offset}), {value}{masked})")


_SCANS = {"sum": "tl.cumsum({0}, 1, reverse={reverse})", "prod": "tl.cumprod({0}, 1, reverse={reverse})"}
_SCANS |= {c: f"tl.associative_scan({{0}}, 1, _cum{c}, reverse={{reverse}})" for c in ("amax", "amin", "logsumexp")}
_SCANS |= {
    c: f"tl.associative_scan(({{0}}, {{1}}), 1, _cum{c}, reverse={{reverse}})" for c in ("linear", "argmax", "argmin")
}
_ATOMIC = {Combine.SUM: "add", Combine.AMAX: "max", Combine.AMIN: "min"}


def _reads(n: Node) -> bool:
    """Whether a value is read, or computed of what is read, other than reductions and scans."""
    stack, seen = [n], set[Node]()
    while stack:
        m = stack.pop()
        if m.op == "load":
            return True
        if m not in seen and m.op not in BINDERS:
            seen.add(m)
            stack += m.args
    return False


# ------------------------------------------------------------------------------------------------ a launch

# by type of kernels that are written otherwise, what writes them
PROGRAMS: dict[type[Kernel], Callable[[Any, Any, bool, bool, Memory], Programs]] = {}


class Programs(NamedTuple):
    """Programs of a kernel, from a number on, that one function computes: all, or all but the last, or that one."""

    writer: Writer
    first: str
    count: str


def quotient_text(n: Size, by: int) -> str:
    """n / by, rounded up, as an operand for Triton and Python. n is at least 1."""
    if isinstance(n, int):
        return str(-(-n // by))
    return factor_text(n) if by == 1 else f"(({factor_text(n)} + {by - 1}) // {by})"


def _programs_text(kernel: Kernel, tile: Tile) -> str:
    """The number of a kernel's programs."""

    def total(loops: Sequence[Variable]) -> Size:
        return math.prod(v.size for v in loops)

    if not tile.second or kernel.rows:
        rows = kernel.loops if not tile.second else kernel.loops[: kernel.outer]
        return quotient_text(total(rows), tile.first * tile.steps)
    counts = [quotient_text(total(kernel.loops[: kernel.outer]), tile.first * tile.steps)]
    counts.append(quotient_text(total(kernel.sweep), tile.second))
    return _combined_text("*", counts)


def _combined_text(sign: str, counts: Sequence[str]) -> str:
    """A sum or product of counts, of which those that are known are combined."""
    known = [int(c) for c in counts if c.isdigit()]
    number = math.prod(known) if sign == "*" else sum(known)
    texts = [c for c in counts if not c.isdigit()]
    if number != int(sign == "*") or not texts:
        texts.append(str(number))
    return texts[0] if len(texts) == 1 else f"({f' {sign} '.join(texts)})"


def _parts(kernel: Kernel, tile: Tile, interpreted: bool, wide: bool, memory: Memory) -> list[Programs]:
    """Of a kernel with tiles of one dimension, the last one has a function of its own: memory is read and written in
    vectors where nothing is masked."""
    if (part := next((of for kind, of in PROGRAMS.items() if isinstance(kernel, kind)), None)) is not None:
        return [part(kernel, tile, interpreted, wide, memory)]
    count, total = _programs_text(kernel, tile), math.prod(v.size for v in kernel.loops)
    if tile.second or programs_of(kernel, tile) < 4 or divides(tile.first, total):
        return [Programs(Writer(kernel, tile, interpreted, wide, memory), "0", count)]
    others = str(int(count) - 1) if count.isdigit() else f"({count} - 1)"
    return [
        Programs(Writer(kernel, tile, interpreted, wide, memory, whole=True), "0", others),
        Programs(Writer(kernel, tile, interpreted, wide, memory), others, "1"),
    ]


def _reach(kernel: Kernel, elements: Size) -> list[Size]:
    """The bounds of the integers that a kernel computes with: of offsets, of indices of elements, and of what is
    divided in them."""
    values = [*kernel.rows.values(), *(w.value for w in kernel.writes), *(c.value for c in kernel.columns)]
    stack = [*kernel.loads.values(), *(w.index for w in kernel.writes)]
    stack += [n.what if n.op == "index" else n.what[0] for n in in_order(values) if n.op in ("index", "concat")]
    reach: dict[Size, None] = {elements: None}
    while stack:
        index = stack.pop()
        reach |= {index.low: None, index.high: None}
        stack += [a.index for a in index.terms if isinstance(a, Part)]
    return [*reach]


def emitted(launch: Launch, interpreted: bool, wide: bool = False, memory: Memory = Memory()) -> Emitted:
    """The text of a launch. wide: for any sizes, with indices of 64 bits."""
    parts = [part for k, tile in launch.kernels for part in _parts(k, tile, interpreted, wide, memory)]
    functions = _functions(parts)
    parts = [part for those in functions.values() for part in those]
    helpers = dict.fromkeys(h for p in parts for h in p.writer.helpers)
    buffers = {b: f"b{i}" for i, b in enumerate(dict.fromkeys(b for p in parts for b in p.writer.buffers))}
    numbers = dict.fromkeys(n for p in parts for n in p.writer.numbers)
    if len(parts) > 1:  # and where each kernel begins
        sizes = [v.size for k, _ in launch.kernels for v in k.loops]
        numbers |= dict.fromkeys(atoms_of(sizes))
    names = dict.fromkeys(op for p in parts for op in p.writer.computed_ops)
    name = "_".join(["fused", *list(names or ["copy"])[:8]])
    body = "\n".join(f"    {line}" for line in _calls([*functions.values()], buffers))
    # Triton 3.6 makes no number of an argument for range() with NumPy 2.4, where it interprets
    parameters = [*buffers.values(), *(f"{n.name}{': tl.constexpr' if interpreted else ''}" for n in numbers)]
    entry = f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}\n"
    text = "\n\n".join([HEADER, *(HELPERS[h].strip("\n") for h in helpers), *functions, entry])
    limits = _limits(parts, numbers) if not wide else ()
    programs = _combined_text("+", [p.count for p in parts])
    return Emitted(name, text, tuple(buffers), tuple(numbers), programs, launch.warps, limits, launch.stages)


def _functions(parts: Sequence[Programs]) -> dict[str, list[Programs]]:
    """The texts of functions, with the parts that each one computes: equal ones are one function, of the buffers of the
    part that a program is in."""
    functions: dict[tuple, list[Programs]] = {}
    for part in parts:
        key = part.writer.text("kernel"), *(b.dtype for b in part.writer.buffers), *part.writer.numbers.values()
        functions.setdefault(key, []).append(part)
    return {
        key[0].replace("def kernel(", f"def kernel_{i}(", 1): those for i, (key, those) in enumerate(functions.items())
    }


def _limits(parts: Sequence[Programs], numbers: Iterable[Atom | Scalar]) -> tuple[Extent, ...]:
    """What has to fit into 32 bits: what kernels compute with them, and arguments."""
    arguments = [Extent.of(n) for n in numbers if isinstance(n, Atom)]
    return tuple(dict.fromkeys([*(n for p in parts for n in p.writer.limits), *arguments]))


def _calls(functions: Sequence[Sequence[Programs]], buffers: Mapping[Buffer, str]) -> list[str]:
    """The lines that call the kernel of a program. functions: the parts that each one computes."""
    calls, ends = [], list[str]()
    for i, parts in enumerate(functions):
        ranges, start = [], "0"
        names = [f"k{i}_{name}" for name in parts[0].writer.buffers.values()]
        for part in parts:
            start = _combined_text("+", ends) if ends else "0"
            own = [buffers[b] for b in part.writer.buffers]
            lines = [f"k{i}_program = {_number_text(start, part.first)}"]
            lines += [f"{n} = {b}" for n, b in zip(names, own, strict=True)]
            ends.append(part.count)
            ranges.append((_combined_text("+", ends), lines))
        arguments = [f"k{i}_program", *names]
        if len(parts) == 1:
            arguments = [_number_text(start, parts[0].first), *(buffers[b] for b in parts[0].writer.buffers)]
        call = f"kernel_{i}({', '.join([*arguments, *parts[0].writer.numbers.values()])})"
        calls.append((ranges[-1][0], [*(_chosen(ranges) if len(parts) > 1 else ()), call]))
    return ["program = tl.program_id(0)", *_chosen(calls)]


def _chosen(ranges: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The lines of the range that a program is in. ranges: the end of each, and its lines."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    first, second = ([f"    {line}" for line in _chosen(half)] for half in (ranges[:middle], ranges[middle:]))
    return [f"if program < {ranges[middle - 1][0]}:", *first, "else:", *second]


def _number_text(start: str, first: str) -> str:
    """The number of a program in its kernel. start: the first of the launch's programs that the part computes; first:
    the number of that one in its kernel."""
    if start == first:
        return "program"
    if not (start.isdigit() and first.isdigit()):
        return f"program - {start} + {first}" if first != "0" else f"program - {start}"
    ahead = int(first) - int(start)
    return f"program {'+' if ahead > 0 else '-'} {abs(ahead)}"
