"""The target of CPUs: kernels as C++ in vectors, with OpenMP's threads as PyTorch has them.

A kernel is a loop over rows, which threads share, with a loop over vectors for each sweep. The text has one function,
`region(buffers, threads, status)`. The system's compiler makes a shared object of it, which is kept on disk by its
text; without a compiler there are no kernels.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder.core.dtypes import BOOL, FLOAT, INTEGER, dtype
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import Index, Part, Variable
from thunder.kernels.ir import EXTREMES, Buffer, Combine, Node, in_order, variables_of
from thunder.kernels.machine import Machine
from thunder.kernels.numbers import Scalar
from thunder.kernels.schedule import Column, Kernel, Write, is_of_rows, seconds_of
from thunder.kernels.sizes import (
    Atom,
    Extent,
    Undecided,
    at_least,
    atoms_of,
    divides,
    factor_text,
    hint,
    largest,
    least,
    rounded_up,
)
from thunder.options import CXX_COMPILER, SEARCH_PATH, environment_of_children
from thunder.runtime import disk_cache

COMPILERS = ("g++", "clang++", "c++")
TYPES = {
    "bool8": "u8", "uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "bfloat16": "u16",
    "float16": "u16", "float32": "float", "float64": "double",
}  # fmt: skip
Size = int | Extent
FLUSH = 128  # rows, or vectors, that are added up before the sum is added to that of others, so that roundings stay few

# ------------------------------------------------------------------------------------------------ the compiler


def compiler() -> str | None:
    """The path of the C++ compiler: that of the environment variable CXX, or the system's."""
    named = CXX_COMPILER.value
    return _located((named,) if named else COMPILERS, _search_path())


@functools.lru_cache(8)
def _located(names: tuple[str, ...], path: str) -> str | None:
    return next((p for n in names if (p := shutil.which(n, path=path))), None)


def _search_path() -> str:
    return SEARCH_PATH.value or os.defpath


def unavailable() -> str | None:
    """Why no kernel can be compiled here; None where one can."""
    if platform.system() != "Linux":
        return f"C++ kernels need Linux, not {platform.system()}"
    return None if compiler() is not None else "it needs a C++ compiler: install g++, or set CXX"


@functools.cache
def lanes() -> int:
    """The float32 elements of this processor's vectors."""
    capability = torch.backends.cpu.get_cpu_capability()
    return 16 if "512" in capability else 8 if "AVX2" in capability else 4


@functools.cache
def processor() -> str:
    """What machine code depends on: the processor's instructions and the version of PyTorch."""
    text = platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            text += next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        text += platform.processor()
    return f"{text} {torch.backends.cpu.get_cpu_capability()} {torch.__version__}"


def _library_directory() -> str:
    return os.path.join(os.path.dirname(torch.__file__), "lib")


@functools.cache
def _openmp() -> str | None:
    """The file of the OpenMP library that PyTorch has loaded: another one would have threads of its own."""
    own = glob.glob(os.path.join(_library_directory(), "libgomp*.so*"))
    beside = glob.glob(os.path.join(_library_directory(), "..", "..", "torch.libs", "libgomp*.so*"))
    return next(iter([*own, *beside]), None)


@functools.cache
def _torch_library() -> ctypes.CDLL:
    return ctypes.CDLL(os.path.join(_library_directory(), "libtorch_cpu.so"))


# name here: name in Sleef, accuracy, and the name in C's library
_VECTOR_FUNCTIONS = {
    **{f"{n}_": (n, "_u10", n) for n in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "atanh", "lgamma",
    )},
    "erfc_": ("erfc", "_u15", "erfc"), "tanh_of_sleef": ("tanh", "_u10", "tanh"),
    "erf_of_sleef": ("erf", "_u10", "erf"),
    # those of Sleef overflow above 1e19
    **{f"{n}_": (f"no {n}", "", n) for n in ("asinh", "acosh")},
}  # fmt: skip
_OF_TWO = {"pow_": ("pow", "_u10", "pow"), "atan2_": ("atan2", "_u10", "atan2"), "hypot_": ("hypot", "_u05", "hypot"),
           "fmod_": ("fmod", "", "fmod")}  # fmt: skip
# In float32, faster than those of Sleef, within 2 ulp: a series where the closed form cancels. The polynomials of erf
# are minimax: of erf(x) / x - 1 in the square of x, and of -log(1 - erf(x)) / x up to 4, above which erf rounds to 1.
_FASTER = """
static inline V<double> tanh_(V<double> x) { return tanh_of_sleef(x); }
static inline V<float> tanh_(V<float> x) {
  V<float> s = x * x, a = abs_(x);
  V<float> near = -0.05374348908662796f + s * (0.020650558173656464f + s * -0.00571701442822814f);
  near = a * (1 + s * (-0.3333328366279602f + s * (0.13331490755081177f + s * near)));
  V<float> e = exp_(-2 * a), r = (a < 0.625f) ? near : 1 - 2 * e / (1 + e);
  return bits<V<float>>(bits<V<i32>>(r) | (bits<V<i32>>(x) & (i32)0x80000000));
}
static inline V<double> erf_(V<double> x) { return erf_of_sleef(x); }
static inline V<float> erf_(V<float> x) {
  V<float> s = x * x, a = abs_(x), t = (a > 4.0f) ? splat<float>(4.0f) : a;
  V<float> near = -0.02675703469829473f + s * (0.0049791299573252405f + s * -0.0005919415984805673f);
  near = 0.12837914581214f + s * (-0.3761246863784963f + s * (0.11281552480967165f + s * near));
  V<float> far = -0.022873711315153433f + t * (0.0032099130622378473f + t * -0.0002133759825771324f);
  far = 1 - exp_(-(t * (1.128508557753449f + t * (0.6357377958809797f + t * (0.10523634549581308f + t * far)))));
  V<float> r = (a < 0.9375f) ? a + a * near : far;
  return bits<V<float>>(bits<V<i32>>(r) | (bits<V<i32>>(x) & (i32)0x80000000));
}
"""


@functools.cache
def _functions_text() -> str:
    """Functions of vectors: those of PyTorch's library where it has them, so that they give eager's numbers."""
    lines = []
    for functions, kind in ((_VECTOR_FUNCTIONS, ""), (_OF_TWO, "2")):
        for name, (sleef, accuracy, usual) in functions.items():
            narrow, wide = f"Sleef_{sleef}f{lanes()}{accuracy}", f"Sleef_{sleef}d{lanes() // 2}{accuracy}"
            if hasattr(_torch_library(), narrow) and hasattr(_torch_library(), wide):
                lines.append(f"VECTORS{kind}({name}, {narrow}, {wide})")
            else:
                lines.append(f"LANEWISE{kind}({name}, __builtin_{usual}f, __builtin_{usual})")
    return "\n".join(lines) + _FASTER


PRELUDE = Path(__file__).with_name("prelude.h").read_text()


def _text(source: str) -> str:
    return f"#define L {lanes()}\n{source.replace(PRELUDE, PRELUDE + _functions_text())}"


def key_of(source: str) -> str:
    """The name of a shared object on disk."""
    return disk_cache.key_of("c++ kernel", _text(source), _FLAGS, processor(), compiler())


def compiled(source: str) -> ctypes.CDLL:
    """The shared object of a text, from the disk or compiled now. Raises RuntimeError with the compiler's words."""
    key = key_of(source)
    known = disk_cache.load(key)
    path = known[1] if known is not None else disk_cache.store(key, {}, _compile(_text(source)))
    return ctypes.CDLL(str(path))


_FLAGS = (
    "-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-fwrapv", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-strict-aliasing", "-fno-exceptions", "-w", "-Wno-psabi",
)  # fmt: skip


def _compile(text: str) -> bytes:
    openmp = _openmp()
    return _run_compiler(
        text, *_FLAGS, *(["-fopenmp"] if openmp else []), "-nostdlib", "-Wl,--unresolved-symbols=ignore-all",
        "-Wl,--no-as-needed", str(_stand_in()), *([openmp] if openmp else []), "-lm", "-lc", "-lgcc",
    )  # fmt: skip


def _run_compiler(text: str, *flags: str) -> bytes:
    """The file that the compiler makes of a text. Raises RuntimeError with its words."""
    program = compiler()
    if program is None:
        raise RuntimeError("there is no C++ compiler")
    with disk_cache.scratch_directory() as directory:
        source, result = os.path.join(directory, "kernel.cpp"), os.path.join(directory, "kernel.so")
        Path(source).write_text(text)
        # the source first: libraries are searched for what is missing before them
        command, environment = (
            [program, source, "-o", result, *flags],
            environment_of_children() | {"PATH": _search_path()},
        )
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{os.path.basename(program)} fails: {done.stderr[:2000]}")
        return Path(result).read_bytes()


def _stand_in() -> Path:
    """An empty library of the name of PyTorch's, which takes a second to link with. Kernels are loaded with the real
    one."""
    key = disk_cache.key_of("empty library", processor(), compiler())
    known = disk_cache.load(key)
    if known is not None:
        return known[1]
    name = "libtorch_cpu.so"
    return disk_cache.store(key, {}, _run_compiler("", "-shared", "-nostdlib", f"-Wl,-soname,{name}"))


# ------------------------------------------------------------------------------------------------ functions

_INFIX = {"add": "+", "sub": "-", "mul": "*", "true_divide": "/", "bitwise_and": "&", "bitwise_or": "|",
          "bitwise_xor": "^", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>"}  # fmt: skip
_CALLS = {
    **{n: f"{n}({{}}, {{}})" for n in ("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "floor_divide")},
    "remainder": "remainder_({}, {})", "fmax": "fmax_({}, {})", "fmin": "fmin_({}, {})", "atan2": "atan2_({}, {})",
    "pow": "pow_({}, {})", "hypot": "hypot_({}, {})", "fmod": "fmod_({}, {})", "copysign": "copysign_({}, {})",
    **{n: f"{n}_({{}})" for n in (
        "abs", "sign", "floor", "ceil", "trunc", "sqrt", "exp", "exp2", "log", "log2", "log10", "expm1", "log1p",
        "tanh", "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
        "lgamma", "signbit",
    )},
    "neg": "-{}", "round_to_even": "round_({})", "rsqrt": "1 / sqrt_({})", "reciprocal": "1 / {}",
    "sigmoid": "1 / (1 + exp_(-{}))", "isnan": "ne({0}, {0})", "bitwise_not": "~{}",
    "logical_not": "~truth({})", "logical_and": "truth({}) & truth({})", "logical_or": "truth({}) | truth({})",
    "logical_xor": "truth({}) ^ truth({})",
}  # fmt: skip


def computes(op: str) -> bool:
    """Whether a kernel computes a function."""
    return op in _INFIX or op in _CALLS or op in ("isinf", "isfinite", "isposinf", "isneginf", "where")


def _infinity(t: str) -> str:
    return f"splat<{t}>(__builtin_inf{'f' if t == 'float' else ''}())"


def _function(op: str, t: str, args: Sequence[str]) -> str:
    """The expression of a function of operands of a type."""
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op == "isinf":
        return f"eq(abs_({args[0]}), {_infinity(t)})"
    if op == "isfinite":
        return f"lt(abs_({args[0]}), {_infinity(t)})"
    if op in ("isposinf", "isneginf"):
        return f"eq({args[0]}, {'-' if op == 'isneginf' else ''}{_infinity(t)})"
    return _CALLS[op].format(*args)


def _element(kind: dtype) -> str:
    """The type of an element in a vector."""
    return "i32" if kind.category == BOOL else TYPES[kind.name]


def _literal(value: Any, kind: dtype) -> str:
    """The text of a number in all lanes of a vector."""
    t = _element(kind)
    if kind.category == BOOL:
        return f"splat<i32>({-1 if value else 0})"
    if kind.category == INTEGER:
        return (
            f"splat<{t}>(({t})({value - 1 if value == -(1 << 63) else value}LL{' + 1' * (value == -(1 << 63))}))"
            if (value != -(1 << 63))
            else "splat<i64>(-9223372036854775807LL - 1)"
        )
    suffix = "f" if t == "float" else ""
    if math.isnan(value):
        return f'splat<{t}>(__builtin_nan{suffix}(""))'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}{_infinity(t)}"
    return f"splat<{t}>({_float_text(value, t)})"


def _float_text(value: float, t: str) -> str:
    return f"{float(value).hex()}{'f' if t == 'float' else ''}" if t == "double" else f"(float){float(value).hex()}"


_SHUFFLES = {2: "every_second", -1: "backwards"}  # by step
_IDENTITY = {Combine.SUM: 0, Combine.PROD: 1, Combine.AMAX: -math.inf, Combine.AMIN: math.inf}
# functions of the C++ text
_COMBINE = {Combine.SUM: "add_", Combine.PROD: "mul_", Combine.AMAX: "maximum", Combine.AMIN: "minimum"}


def _identity(combine: Combine, kind: dtype) -> str:
    value = _IDENTITY[combine]
    if kind.category == INTEGER and combine in EXTREMES:
        bits = 8 * kind.bytes
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind.signed else (0, (1 << bits) - 1)
        value = low if combine == Combine.AMAX else high
    return _literal(value if kind.category == INTEGER else float(value), kind)


# ------------------------------------------------------------------------------------------------ a kernel


class _Scope:
    """Lines of C++ in one block. mask: of the lanes that a choice leaves to this block; None: all. guarded: whether it
    does not run for each row or vector, so that nothing in it moves out."""

    def __init__(self, parent: _Scope | None = None, guarded: bool = False, mask: str | None = None):
        self.parent, self.lines = parent, list[str]()
        self.names: dict[Any, str] = {}
        self.guarded = guarded or parent is not None and parent.guarded
        self.mask = mask if mask is not None else parent.mask if parent is not None else None

    def known(self, key: Any) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if key in scope.names:
                return scope.names[key]
            scope = scope.parent
        return None


class Emitted:
    """The text of a region's kernels. scratch: bytes for all threads; thread_scratch: for each one. sizes, floats: the
    names of the numbers that it takes."""

    def __init__(self, text: str, scratch: Size, thread_scratch: Size, sizes: tuple[str, ...], floats: tuple[str, ...]):
        self.text, self.scratch, self.thread_scratch = text, scratch, thread_scratch
        self.sizes, self.floats = sizes, floats


class _Writer:
    """Writes the function of one kernel."""

    def __init__(self, kernel: Kernel, name: str, buffers: Mapping[Buffer, str], machine: Machine):
        self.kernel, self.name, self.buffers, self.machine = kernel, name, buffers, machine
        self.count = 0
        self.stages = kernel.stages()
        self.inner = frozenset(kernel.sweep)
        self.vector = kernel.loops[-1]
        self.is_flat = kernel.outer == 0
        self.bytes: Size = 0  # of each thread's scratch
        self.numbers: dict[Atom | Scalar, None] = {}
        self.row_buffers: dict[Node, str] = {}
        self.stored: set[Node] = set()  # in row buffers, by sweeps so far
        self.range: tuple[Size, Size] | None = None  # of the vector loop
        self.n = ""  # the number of lanes in use; "" for all
        self.is_last = False
        self.bound: dict[Variable, str] = {}  # the indices that the load which is written has read

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def emit(self, scope: _Scope, t: str, text: str) -> str:
        name = self.fresh()
        scope.lines.append(f"{t} {name} = {text};")
        return name

    def thread_memory(self, size: Size) -> Size:
        start, self.bytes = self.bytes, self.bytes + in_lines(size)
        return start

    def size(self, n: Size) -> str:
        """A size as an operand."""
        self.numbers |= dict.fromkeys(atoms_of([n]))
        return f"{n}LL" if isinstance(n, int) else factor_text(n)

    # -------------------------------------------------------------------------------------------- indices
    def is_scalar(self, index: Index) -> bool:
        """Whether all lanes have the same index."""
        return all(v is not self.vector and v.name[0] != "g" for v in variables_of(index))

    def scalar(self, index: Index, scope: _Scope, at_vector: str = "0") -> str:
        """An index as an expression of C++, with `at_vector` for the vector loop."""
        parts = []
        for atom, factor in index.terms.items():
            if isinstance(atom, Part):
                inner = self.scalar(atom.index, scope, at_vector)
                operator = "" if atom.remainder is None else f" {'%' if atom.remainder else '/'} {self.size(atom.by)}"
                text = f"(({inner}){operator})"
            elif atom is self.vector:
                text = at_vector
            else:
                text = self.bound.get(atom, atom.name)
            parts.append(text if factor == 1 else f"{text} * {self.size(factor)}")
        if index.constant or not parts:
            parts.append(self.size(index.constant))
        return " + ".join(parts)

    def lanes(self, index: Index, scope: _Scope) -> str:
        """An index as a vector of i64."""
        parts = []
        for atom, factor in index.terms.items():
            if isinstance(atom, Part):
                inner = self.lanes(atom.index, scope)
                sign = "%" if atom.remainder else "/"
                text = inner if atom.remainder is None else f"(({inner}) {sign} {self.size(atom.by)})"
            elif atom is self.vector:
                text = f"lanes({atom.name})"
            else:
                text = self.bound.get(atom, atom.name)
            parts.append(f"({text})" if factor == 1 else f"({text}) * {self.size(factor)}")
        parts.append(f"splat<i64>({self.size(index.constant)})")
        return " + ".join(parts)

    # -------------------------------------------------------------------------------------------- values
    def scope_of(self, node: Node, scope: _Scope) -> _Scope:
        """Where a node is computed: outside of the vectors' loop where it does not depend on it."""
        if scope.guarded or node.axes & self.inner:
            return scope
        while scope.parent is not None and scope.parent.parent is not None:
            scope = scope.parent
        return scope

    def value(self, node: Node, scope: _Scope) -> str:
        """The name of a node's value, with the lines that compute it, without recursion over long chains."""
        stack = [node]
        while stack:
            n = stack[-1]
            if scope.known(n) is not None:
                stack.pop()
                continue
            if n in self.row_buffers and n in self.stored:
                name = self.emit(scope, f"V<{_element(n.dtype)}>", self._from_row(n))
                scope.names[n] = name
                continue
            needed = [] if n.op in ("concat", "reduce") else [a for a in n.args if scope.known(a) is None]
            if needed:
                stack += reversed(needed)
                continue
            home = self.scope_of(n, scope)
            if n.op == "concat":
                home.names[n] = self.concat(n, home)
            else:
                home.names[n] = self.emit(home, f"V<{_element(n.dtype)}>", self.computed(n, home))
        name = scope.known(node)
        assert name is not None, "its lines have been written"
        return name

    def computed(self, n: Node, scope: _Scope) -> str:
        """The text that computes a node of nodes that have names in this scope."""
        args = []
        for a in n.args:
            name = scope.known(a)
            assert name is not None, f"{a} is computed before {n}"
            args.append(name)
        if n.op == "load":
            return self.load(n, args, scope)
        if n.op == "constant":
            return _literal(n.what, n.dtype)
        if n.op == "index":
            return self.lanes(n.what, scope)
        if n.op == "argument":
            self.numbers[n.what] = None
            return f"splat<double>({n.what.name})"
        if n.op == "cast":
            return self.cast(args[0], n.args[0].dtype, n.dtype)
        if n.op == "random":
            return f"uniform({args[0]}, {n.what}, {args[1]})"
        if n.op == "where":
            return f"choose<{_element(n.dtype)}>({', '.join(args)})"
        assert n.op in FUNCTIONS, f"{n.op} is computed by a sweep before"
        kind = n.args[0].dtype
        return _function(n.op, _element(kind), args)

    def cast(self, x: str, source: dtype, target: dtype) -> str:
        """The text of a conversion. 16-bit floats are computed in float, truth values are masks."""
        if target.category == BOOL:
            return f"truth({self._wide(x, source)})"
        if source.category == BOOL:
            x, source_type = f"of_truth<i32>({x})", "i32"
        else:
            x, source_type = (
                self._wide(x, source),
                "float" if source.bytes == 2 and source.category == FLOAT else TYPES[source.name],
            )
        if target.category == FLOAT and target.bytes == 2:
            return f"to_{target.name}({x if source_type == 'float' else f'convert<float>({x})'})"
        t = TYPES[target.name]
        if source_type in ("float", "double") and target.category == INTEGER and target.bytes < 4:
            x = f"convert<i32>({x})"
        return x if source_type == t else f"convert<{t}>({x})"

    def _wide(self, x: str, kind: dtype) -> str:
        return f"of_{kind.name}({x})" if kind.category == FLOAT and kind.bytes == 2 else x

    def load(self, n: Node, args: Sequence[str], scope: _Scope) -> str:
        """The text that reads a buffer: one element in all lanes, consecutive ones, a stride, or each lane's own."""
        buffer, _, variables = n.what
        self.bound = {
            variable: self.read_index(variable, argument, node, scope)
            for variable, argument, node in zip(variables, args, n.args, strict=True)
        }
        index, t, pointer = self.kernel.loads[n], TYPES[buffer.dtype.name], self.buffers[buffer]
        inside = [v for v in variables if not self.bound[v].startswith("s_")]
        affine = not any(isinstance(a, Part) and self.vector in variables_of(a.index) for a in index.terms)
        step = index.terms.get(self.vector, 0)
        count = self.n or "L"
        if not inside and affine and step == 0:
            text = f"splat<{t}>({pointer}[{self.scalar(index, scope)}])"
            if scope.mask is not None:
                text = self._apart(pointer, index, scope, count)
        elif inside or not affine or scope.mask is not None:
            text = self._apart(pointer, index, scope, count)
        else:
            at = f"{pointer} + {self.scalar(index, scope, self.vector.name)}"
            if step == 1:
                text = f"load<{t}>({at}{', ' + self.n if self.n else ''})"
            else:
                shuffle = _SHUFFLES.get(step) if not self.n and buffer.dtype.bytes == 4 else None
                text = f"{shuffle}<{t}>({at})" if shuffle else f"strided<{t}>({at}, {self.size(step)}, {count})"
        return f"truth({text})" if buffer.dtype.category == BOOL else text

    def _apart(self, pointer: str, index: Index, scope: _Scope, count: str) -> str:
        mask = f", {scope.mask}" if scope.mask is not None else ""
        return f"apart({pointer}, {self.lanes(index, scope)}, {count}{mask})"

    def read_index(self, variable: Variable, argument: str, node: Node, scope: _Scope) -> str:
        """Checks an index that was read, and returns its name: one that is outside ends the region, which PyTorch then
        runs."""
        home, key = self.scope_of(node, scope), ("index", node, variable.size)
        known = home.known(key)
        if known is not None:
            return known
        if node.axes & self.inner and self.vector in node.axes:
            name = self.emit(home, "V<i64>", f"inside({argument}, {self.size(variable.size)}, bad, {self.n or 'L'})")
        else:
            name = f"s_{self.fresh()}"
            home.lines.append(f"i64 {name} = inside({argument}[0], {self.size(variable.size)}, bad);")
        home.names[key] = name
        return name

    def concat(self, n: Node, scope: _Scope) -> str:
        """The text of a concatenation: the one piece that this loop reaches, branches on a scalar index, or a choice
        for each lane."""
        along, starts, end = n.what
        ranges = [*zip(n.args, starts, (*starts[1:], end), strict=True)]
        low, high = self.bounds(along)
        reached = [r for r in ranges if not at_least(low, r[2]) and not at_least(r[1] - 1, high)]
        if len(reached) == 1:
            return self.value(reached[0][0], scope)
        t = f"V<{_element(n.dtype)}>"
        name = self.fresh()
        if self.is_scalar(along):
            at = self.emit(scope, "i64", self.scalar(along, scope))
            scope.lines.append(f"{t} {name};")
            for i, (piece, _, hi) in enumerate(reached):
                block = _Scope(scope, guarded=True)
                text = self.value(piece, block)
                test = "else" if i + 1 == len(reached) else f"{'else ' * (i > 0)}if ({at} < {self.size(hi)})"
                scope.lines += [f"{test} {{", *block.lines, f"{name} = {text};", "}"]
            return name
        at = self.emit(scope, "V<i64>", self.lanes(along, scope))
        scope.lines.append(f"{t} {name}{{}};")
        outer = f" & {scope.mask}" if scope.mask is not None else ""
        masks: dict[Node, list[str]] = {}  # where each piece is needed
        for piece, lo, hi in reached:
            test = f"(convert<i32>({at} >= {self.size(lo)}) & convert<i32>({at} < {self.size(hi)})){outer}"
            masks.setdefault(piece, []).append(self.emit(scope, "M", test))
        for piece, own in masks.items():
            mask = own[0] if len(own) == 1 else self.emit(scope, "M", " | ".join(own))
            block = _Scope(scope, guarded=True, mask=mask)
            text = self.value(piece, block)
            scope.lines += ["{", *block.lines, f"{name} = choose<{_element(n.dtype)}>({mask}, {text}, {name});", "}"]
        return name

    def bounds(self, index: Index) -> tuple[Size, Size]:
        """The least and the largest value of an index in the range of the vector loop."""
        factor = index.terms.get(self.vector, 0)
        if self.range is None or not factor:
            return index.low, index.high
        rest = index + Index.of(self.vector) * -factor
        ends = [factor * self.range[0], factor * (self.range[1] - 1)]
        try:
            low, high = rest.low + least(ends), rest.high + largest(ends)
        except Undecided:
            return index.low, index.high
        return (
            index.low if at_least(index.low, low) else low,
            index.high if at_least(high, index.high) else high,
        )

    # -------------------------------------------------------------------------------------------- row buffers
    def _from_row(self, n: Node) -> str:
        t = _element(n.dtype)
        return f"load<{t}>({self.row_buffers[n]} + {self._in_row()}{', ' + self.n if self.n else ''})"

    def _in_row(self) -> str:
        text: list[str] = []
        step: Size = 1
        for v in reversed(self.kernel.sweep):
            text.append(f"{v.name} * {self.size(step)}" if step != 1 else v.name)
            step = step * v.size
        return " + ".join(text)

    def choose_row_buffers(self) -> None:
        """Values that several sweeps need, and that take longer to recompute than to read from a cache."""
        if self.is_flat:
            return
        sweeps: dict[int, list[Node]] = {}
        for stage, roots in self.roots().items():
            sweeps[stage] = [n for n in self.below(roots) if n.axes & self.inner]
        later: dict[Node, int] = {}
        for nodes in sweeps.values():
            for n in nodes:
                later[n] = later.get(n, 0) + 1
        width = math.prod(v.size for v in self.kernel.sweep)
        again = 4 * self.machine.element["simple"] + 8 * self.machine.byte["L2"]
        chosen: set[Node] = set()
        for n in reversed(in_order(later)):
            if (
                later.get(n, 0) < 2
                or n.op in ("load", "constant", "index")
                or any(n in self._inside(c) for c in chosen)
            ):
                continue
            if seconds_of([m for m in in_order([n]) if m.axes & self.inner and m.op != "reduce"], self.machine) > again:
                chosen.add(n)
        for n in chosen:
            start = self.thread_memory(width * (4 if n.dtype.category == BOOL else n.dtype.bytes))
            self.row_buffers[n] = f"(({_element(n.dtype)}*)(own + {self.size(start)}))"

    @functools.cache  # noqa: B019  a writer lives as long as its text is written
    def _inside(self, node: Node) -> frozenset[Node]:
        return frozenset(self.below([node]))

    def below(self, roots: Sequence[Node]) -> list[Node]:
        """The nodes that a sweep computes for its roots."""
        order: dict[Node, None] = {}
        stack = [*roots]
        while stack:
            n = stack.pop()
            if n not in order:
                order[n] = None
                if n not in self.kernel.rows:
                    stack += n.args
        return [*order]

    def roots(self) -> dict[int, list[Node]]:
        """By sweep, the values that it computes."""
        by_stage: dict[int, list[Node]] = {}
        for node, body in self.kernel.rows.items():
            by_stage.setdefault(self.stages[node], []).append(body)
        for c in (*self.kernel.columns, *self.kernel.writes):
            if self.is_inner(c):
                by_stage.setdefault(self.kernel._stage_of(c.value, self.stages), []).append(c.value)
        return dict(sorted(by_stage.items()))

    def is_inner(self, c: Column | Write) -> bool:
        """Whether it is done for each element of a row: a scatter also adds what is the same for all of them."""
        is_scatter = isinstance(c, Write) and c.scatter is not None
        return is_scatter or bool((c.value.axes | variables_of(c.index)) & self.inner)

    # -------------------------------------------------------------------------------------------- the function
    def text(self) -> str:
        """The function of one kernel: pointers, the loop over rows, the stages of a row, and what is accumulated over
        rows."""
        pointers = [*self._pointers()]
        self.choose_row_buffers()
        accumulators = [(c, self._accumulator(c)) for c in self.kernel.columns]
        top, row = _Scope(), _Scope()
        row.parent = top
        begin = [line for c, start in accumulators for line in self._begin(c, start)]
        for stage in self.roots():
            self.sweep(stage, row, accumulators)
        for c, start in accumulators:
            if not self.is_inner(c):
                self.accumulate_scalar(c, start, row)
        for w in self.kernel.writes:
            if not self.is_inner(w):
                self.write_scalar(w, row)
        outer = self.kernel.loops[: self.kernel.outer]
        count = math.prod(v.size for v in outer)
        head: list[str] = []
        if self.is_flat:
            size = self.size(self.vector.size)
            body = [
                f"const i64 share = (({size} + threads * L - 1) / (threads * L)) * L;",
                f"const i64 first = t * share < {size} ? t * share : {size};",
                f"const i64 last = first + share < {size} ? first + share : {size};",
                *begin, *row.lines,
            ]  # fmt: skip
        else:
            rest = "row"
            for v in reversed(outer):
                head.append(
                    f"const i64 {v.name} = {rest} % {self.size(v.size)};"
                    if v is not outer[0]
                    else f"const i64 {v.name} = {rest};"
                )
                rest = f"({rest} / {self.size(v.size)})"
            flush = [line for c, start in accumulators for line in self._flush(c, start)]
            flush = [f"if (++done % {FLUSH} == 0) {{", *flush, "}"] if flush else []
            body = [
                f"const i64 first = t * {self.size(count)} / threads, last = (t + 1) * {self.size(count)} / threads;",
                "i64 done = 0;", *begin, "for (i64 row = first; row < last; ++row) {", *head, *row.lines, *flush, "}",
            ]  # fmt: skip
        ends = [line for c, start in accumulators for line in self._combine(c, start)]
        return "\n".join([
            f"static void {self.name}(char* const* p, int threads, int* status, char* shared, char* owned, "
                f"i64 stride{', '.join(['', *map(parameter_of, self.numbers)])}) {{",
            *pointers,
            "i64 team = 1;",
            "#pragma omp parallel num_threads(threads) if(threads > 1)", "{",
            "const i64 t = omp_get_thread_num(), threads = omp_get_num_threads();",  # fewer inside of another loop
            "if (t == 0) team = threads;",
            "char* own = owned + t * stride; int bad = 0;",
            *top.lines, *body, "if (bad) *status = 1;", "}",
            *ends, "}",
        ])  # fmt: skip

    def _pointers(self) -> Iterator[str]:
        written = {w.buffer for w in (*self.kernel.writes, *self.kernel.columns)}
        read = {n.what[0] for n in self.kernel.loads}
        for buffer in sorted(written | read, key=lambda b: b.name):
            t = TYPES[buffer.dtype.name]
            yield f"{t}* const __restrict {buffer.name} = ({t}*)({self.buffers[buffer]});"
        self.buffers = {b: b.name for b in written | read}

    def sweep(self, stage: int, row: _Scope, accumulators: Sequence[tuple[Column, int]]) -> None:
        """The loops of one sweep, and the row reductions that it ends."""
        parts = _Sweep(self, stage, accumulators)
        for n, name in parts.sums.items():
            row.lines.append(f"V<{_element(n.dtype)}> {name} = {_identity(n.what[0], n.dtype)};")
        for w, name in parts.scans.items():
            kind = "double" if w.value.dtype.category == FLOAT else "i64"
            row.lines.append(f"{kind} {name} = {_IDENTITY[w.scan]};")
        inner: list[str] = []
        for c, name in parts.held.items():
            inner.append(f"V<{_element(c.value.dtype)}> {name} = {_identity(c.combine, c.value.dtype)};")
        for name, kind in parts.far.items():
            inner.append(f"V<{_element(kind)}> far_{name} = splat<{_element(kind)}>(0);")
        for low, high in self.segments(parts.values):
            inner += self.segment(parts, row, low, high)
        self.range = None
        inner += [f"{name} += far_{name};" for name in parts.far]
        for c, start in parts.columns:
            if c in parts.held:
                inner += self._held(c, start, parts.held[c], row)
        for v in reversed(self.kernel.sweep[:-1]):
            inner = [f"for (i64 {v.name} = 0; {v.name} < {self.size(v.size)}; ++{v.name}) {{", *inner, "}"]
        row.lines += inner
        for n, name in parts.sums.items():
            t = _element(n.dtype)
            row.names[n] = self.emit(row, f"V<{t}>", f"splat<{t}>(across_{n.what[0]}<{t}>({name}))")
        self.stored |= self.buffered_now
        self.buffered_now = set()

    def segment(self, parts: _Sweep, row: _Scope, low: Size, high: Size) -> list[str]:
        """The loop over the vectors of a range, and what is left of it."""
        self.range = (low, high)
        v = self.vector.name
        begin, end = self.size(low), self.size(high)
        if self.is_flat:
            begin, end = f"({begin} > first ? {begin} : first)", f"({end} < last ? {end} : last)"
        lines = ["{", f"i64 {v} = {begin}; const i64 end_ = {end};"]
        full = self.body(parts, row, "")
        if parts.far:
            lines.append("i64 many = 0;")
            full.append(f"if (++many % {FLUSH} == 0) {{")
            full += [f"far_{name} += {name}; {name} = splat<{_element(d)}>(0);" for name, d in parts.far.items()]
            full.append("}")
        is_open = self.is_flat or not isinstance(high - low, int)  # whether it may have any number of elements
        may_fill = is_open or at_least(high - low, lanes())
        if may_fill:
            lines += [f"const i64 begin_ = {v};", f"for (; {v} + L <= end_; {v} += L) {{", *full, "}"]
        if self.is_flat or not divides(lanes(), high - low):
            lines += self.remainder(parts, row, may_fill and not parts.scans and not parts.scatters, is_open)
        return [*lines, "}"]

    def remainder(self, parts: _Sweep, row: _Scope, may_fill: bool, is_open: bool) -> list[str]:
        """What a range has left behind its whole vectors. may_fill: whether it may have one; is_open: or none."""
        v = self.vector.name
        lines = [f"if ({v} < end_) {{", f"const i64 left = end_ - {v};"]
        if may_fill:  # the last whole vector, of which the lanes that are done count no more
            tail = [f"{v} = end_ - L;", *self.body(parts, row, "", is_last=True)]
            lines += ["if (end_ - begin_ >= L) {", *tail, "} else {"] if is_open else tail
        if not may_fill or is_open:
            lines += self.body(parts, row, "left")
        return [*lines, *["}"] * (2 if may_fill and is_open else 1)]

    buffered_now: set[Node] = set()

    def body(self, parts: _Sweep, row: _Scope, n: str, is_last: bool = False) -> list[str]:
        """What a sweep does for one vector of n elements; "" for a whole one. is_last: only its `left` last lanes are
        new."""
        self.n, self.is_last = n, is_last
        scope = _Scope(row)
        for node, name in parts.sums.items():
            value, combine = self.value(self.kernel.rows[node], scope), node.what[0]
            scope.lines.append(f"{name} = {_COMBINE[combine]}({name}, {self._in_lanes(value, combine, node.dtype)});")
        for c, start in parts.columns:
            value = self.value(c.value, scope)
            if c in parts.held:
                name, value = parts.held[c], self._in_lanes(value, c.combine, c.value.dtype)
                scope.lines.append(f"{name} = {_COMBINE[c.combine]}({name}, {value});")
            else:
                self.accumulate(c, start, value, scope)
        for w in parts.scatters:
            self.scatter(w, scope)
        for w in parts.writes:
            value = self.value(w.value, scope)
            if w in parts.scans:
                t = _element(w.value.dtype)
                value = self.emit(scope, f"V<{t}>", f"running_{w.scan}<{t}>({value}, {parts.scans[w]}, {n or 'L'})")
            self.write(w, value, scope)
        for node, pointer in self.row_buffers.items():
            if node not in self.stored and (name := scope.names.get(node)) is not None:
                self.buffered_now = self.buffered_now | {node}
                scope.lines.append(
                    f"store<{_element(node.dtype)}>({pointer} + {self._in_row()}, {name}{', ' + n if n else ''});"
                )
        self.n, self.is_last = "", False
        return scope.lines

    def _in_lanes(self, value: str, combine: Combine, kind: dtype) -> str:
        if not self.n and not self.is_last:
            return value
        lanes_in_use = "last_lanes(left)" if self.is_last else f"active({self.n})"
        return f"choose<{_element(kind)}>({lanes_in_use}, {value}, {_identity(combine, kind)})"

    def segments(self, values: Sequence[Node]) -> list[tuple[Size, Size]]:
        """The ranges of the vector loop in each of which a concatenation has one piece."""
        size, cuts = self.vector.size, set[Size]()
        for n in self.below(values):
            if n.op != "concat":
                continue
            along, starts, _ = n.what
            if along.terms.keys() != {self.vector} or along.terms[self.vector] != 1:
                continue
            at = {s - along.constant for s in starts}
            cuts |= {s for s in at if at_least(s, 1) and at_least(size - 1, s)}
        ends = [*sorted(cuts, key=hint), size]
        if len(cuts) > 16 or not all(at_least(b, a) for a, b in zip(ends, ends[1:], strict=False)):
            ends = [size]
        return [*zip([0, *ends], ends, strict=False)]

    # -------------------------------------------------------------------------------------------- memory
    def write(self, w: Write, value: str, scope: _Scope) -> None:
        t, pointer = TYPES[w.buffer.dtype.name], self.buffers[w.buffer]
        if w.buffer.dtype.category == BOOL:
            value = f"of_truth<u8>({value})"
        self._store(t, pointer, w.index, value, scope)

    def _store(self, t: str, pointer: str, index: Index, value: str, scope: _Scope) -> None:
        """Adds the statement that writes a vector: to consecutive elements, by a stride, or to each lane's own."""
        step, count = index.terms.get(self.vector, 0), self.n or "L"
        affine = not any(isinstance(a, Part) and self.vector in variables_of(a.index) for a in index.terms)
        if not affine:
            scope.lines.append(f"apart<{t}>({pointer}, {self.lanes(index, scope)}, {value}, {count});")
            return
        at = f"{pointer} + {self.scalar(index, scope, self.vector.name)}"
        if step == 1:
            scope.lines.append(f"store<{t}>({at}, {value}{', ' + self.n if self.n else ''});")
        else:
            scope.lines.append(f"strided<{t}>({at}, {self.size(step)}, {value}, {count});")

    def scatter(self, w: Write, scope: _Scope) -> None:
        """Combines a value with the elements at the indices that are read, one after the other: they may be equal."""
        assert w.scatter is not None, "a scatter"
        value, *read = [self.value(a, scope) for a in w.value.args]
        self.bound = {
            variable: self.read_index(variable, name, node, scope)
            for variable, name, node in zip(w.scatter.variables, read, w.value.args[1:], strict=True)
        }
        t, pointer, combine = TYPES[w.buffer.dtype.name], self.buffers[w.buffer], w.scatter.combine
        if is_of_rows(w, self.vector):
            at = f"{pointer} + {self.scalar(w.index, scope, self.vector.name)}"
            count = f", {self.n}" if self.n else ""
            value = value if combine is None else f"{_COMBINE[combine]}(load<{t}>({at}{count}), {value})"
            scope.lines.append(f"store<{t}>({at}, {value}{count});")
        else:
            function = "apart" if combine is None else f"scatter_{combine}"
            scope.lines.append(f"{function}<{t}>({pointer}, {self.lanes(w.index, scope)}, {value}, {self.n or 'L'});")

    def write_scalar(self, w: Write, row: _Scope) -> None:
        value = self.value(w.value, row)
        if w.buffer.dtype.category == BOOL:
            value = f"of_truth<u8>({value})"
        text = f"{self.buffers[w.buffer]}[{self.scalar(w.index, row)}] = ({value})[0];"
        row.lines.append(f"if (t == 0) {text}" if self.is_flat else text)

    def _accumulator(self, c: Column) -> Size:
        size = math.prod(c.buffer.shape) * c.value.dtype.bytes
        return self.thread_memory((in_lines(size) + 64) * 2)

    def _near(self, c: Column, start: Size) -> tuple[str, str, str]:
        """The type, the thread's accumulator, and how many elements it has."""
        t = _element(c.value.dtype)
        return t, f"(({t}*)(own + {self.size(start)}))", self.size(math.prod(c.buffer.shape))

    def _is_twofold(self, c: Column) -> bool:
        return c.combine == Combine.SUM and c.value.dtype.category == FLOAT and not self.is_flat

    def _second(self, c: Column, start: Size) -> Size:
        """The start of the second step of a sum."""
        return start + in_lines(math.prod(c.buffer.shape) * c.value.dtype.bytes) + 64

    def _far(self, c: Column, start: Size) -> str:
        return f"(({_element(c.value.dtype)}*)(own + {self.size(self._second(c, start))}))"

    def _begin(self, c: Column, start: Size) -> list[str]:
        t, near, count = self._near(c, start)
        first = f"{_identity(c.combine, c.value.dtype)}[0]"
        lines = [f"{{ const {t} none = {first}; for (i64 i = 0; i < {count}; ++i) {near}[i] = none; }}"]
        if self._is_twofold(c):
            lines.append(f"for (i64 i = 0; i < {count}; ++i) {self._far(c, start)}[i] = 0;")
        return lines

    def _flush(self, c: Column, start: Size) -> list[str]:
        if not self._is_twofold(c):
            return []
        _, near, count = self._near(c, start)
        far = self._far(c, start)
        return [f"for (i64 i = 0; i < {count}; ++i) {{ {far}[i] += {near}[i]; {near}[i] = 0; }}"]

    def accumulate(self, c: Column, start: Size, value: str, scope: _Scope) -> None:
        """Adds the statements that combine a vector with an accumulator over rows, in memory near the thread."""
        t, near, _ = self._near(c, start)
        index, count = c.index, self.n or "L"
        step = index.terms.get(self.vector, 0)
        affine = not any(isinstance(a, Part) and self.vector in variables_of(a.index) for a in index.terms)
        if affine and step == 1:
            at = f"{near} + {self.scalar(index, scope, self.vector.name)}"
            old = f"load<{t}>({at}{', ' + self.n if self.n else ''})"
        elif affine:
            at = f"{near} + {self.scalar(index, scope, self.vector.name)}"
            old = f"strided<{t}>({at}, {self.size(step)}, {count})"
        else:
            old = f"apart({near}, {self.lanes(index, scope)}, {count})"
        if self.is_last:
            value = self._in_lanes(value, c.combine, c.value.dtype)
        name = self.emit(scope, f"V<{t}>", f"{_COMBINE[c.combine]}({old}, {value})")
        self._store(t, near, index, name, scope)

    def _held(self, c: Column, start: Size, name: str, row: _Scope) -> list[str]:
        t, near, _ = self._near(c, start)
        at = f"{near}[{self.scalar(c.index, row)}]"
        across = f"across_{c.combine}<{t}>({name})"
        return [f"{at} = {_COMBINE[c.combine]}(splat<{t}>({at}), splat<{t}>({across}))[0];"]

    def accumulate_scalar(self, c: Column, start: Size, row: _Scope) -> None:
        value = self.value(c.value, row)
        t, near, _ = self._near(c, start)
        at = f"{near}[{self.scalar(c.index, row)}]"
        row.lines.append(f"{at} = {_COMBINE[c.combine]}(splat<{t}>({at}), {value})[0];")

    def _combine(self, c: Column, start: Size) -> list[str]:
        """Combines what the threads have, in their order."""
        t, _, count = self._near(c, start)
        offsets = [start]
        if self._is_twofold(c):
            offsets.append(self._second(c, start))
        lines = [
            f"for (i64 i = 0; i < {count}; i += L) {{",
            f"const i64 n = {count} - i < L ? {count} - i : L;",
            f"V<{t}> all = {_identity(c.combine, c.value.dtype)};",
            "for (i64 k = 0; k < team; ++k) {",
        ]
        for o in offsets:
            lines.append(
                f"all = {_COMBINE[c.combine]}(all, load<{t}>(({t}*)(owned + k * stride + {self.size(o)}) + i, n));"
            )
        lines += ["}", f"store<{t}>({c.buffer.name} + i, all, n);", "}"]
        return lines


class _Sweep:
    """What one sweep of a kernel computes. columns: with the start of the thread's accumulator.

    scans: for writes of scans, the names of the combinations so far. sums: the names of the vectors that row reductions
    add up in. held: of those of columns that stay at one element. far: of those names, with their types, the long sums:
    after each `FLUSH` vectors they are added to another vector.
    """

    def __init__(self, writer: _Writer, stage: int, accumulators: Sequence[tuple[Column, int]]):
        kernel = writer.kernel

        def is_computed_here(x: Column | Write) -> bool:
            return writer.is_inner(x) and kernel._stage_of(x.value, writer.stages) == stage

        reductions = [n for n in kernel.rows if writer.stages[n] == stage]
        self.columns = [(c, start) for c, start in accumulators if is_computed_here(c)]
        self.writes = [w for w in kernel.writes if w.scatter is None and is_computed_here(w)]
        self.scatters = [w for w in kernel.writes if w.scatter is not None and is_computed_here(w)]
        self.scans = {w: writer.fresh() for w in self.writes if w.scan is not None}
        self.values = [kernel.rows[n] for n in reductions]
        self.values += [x.value for x in (*dict(self.columns), *self.writes, *self.scatters)]
        self.sums = {n: writer.fresh() for n in reductions}
        self.held = {c: writer.fresh() for c, _ in self.columns if writer.vector not in variables_of(c.index)}
        self.far: dict[str, dtype] = {}
        if not at_least(4 * FLUSH * lanes(), writer.vector.size):
            added = [(name, n.dtype) for n, name in self.sums.items() if n.what[0] == Combine.SUM]
            added += [(name, c.value.dtype) for c, name in self.held.items() if c.combine == Combine.SUM]
            self.far = {name: kind for name, kind in added if kind.category == FLOAT}


def in_lines(size: Size) -> Size:
    """Bytes that begin and end with lines of a cache."""
    return rounded_up(size, 64) * 64 if size else 0


def parameter_of(n: Atom | Scalar) -> str:
    return f"{'double' if isinstance(n, Scalar) else 'i64'} {n.name}"


def emitted(kernels: Sequence[Kernel], machine: Machine, inputs: int, outputs: int) -> Emitted:
    """The text of a region's kernels. buffers of `region`: inputs, outputs, scratch memory, sizes and other numbers."""
    buffers: dict[Buffer, str] = {}
    numbers: dict[Atom | Scalar, None] = {}

    def text(n: Size) -> str:
        numbers.update(dict.fromkeys(atoms_of([n])))
        return f"{n}LL" if isinstance(n, int) else factor_text(n)

    start: Size = 0
    for kernel in kernels:
        used = {n.what[0] for n in kernel.loads} | {w.buffer for w in (*kernel.writes, *kernel.columns)}
        for buffer in sorted(used, key=lambda b: b.name):
            if buffer in buffers:
                continue
            if buffer.kind == "scratch":
                buffers[buffer] = f"shared + {text(start)}"
                start = start + in_lines(math.prod(buffer.shape) * buffer.dtype.bytes)
            else:
                buffers[buffer] = f"p[{buffer.number + (inputs if buffer.kind == 'output' else 0)}]"
    writers = [_Writer(k, f"kernel{i}", buffers, machine) for i, k in enumerate(kernels)]
    for writer in writers:  # which may take the sizes of scratch memory that lies before its own
        writer.numbers |= dict.fromkeys(atoms_of([start]))
    texts = [w.text() for w in writers]
    most = _most([w.bytes for w in writers])
    lines = []
    for k, w in zip(kernels, writers, strict=True):
        numbers |= w.numbers
        arguments = "".join(f", {n.name}" for n in w.numbers)
        threads = _threads_text(k, text)
        lines.append(f"  {w.name}(p, {threads}, status, shared, shared + {text(start)}, {text(most)}{arguments});")
    sizes, floats, head = _numbers_text(numbers, inputs + outputs + 1)
    entry = [
        'extern "C" void region(char* const* p, int threads, int* status) {',
        f"  char* shared = p[{inputs + outputs}];", *head, *lines, "}",
    ]  # fmt: skip
    return Emitted("\n".join([PRELUDE, *texts, *entry]), start, most, sizes, floats)


def _numbers_text(numbers: Iterable[Atom | Scalar], at: int) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """The sizes and floats that a region takes, by name, and the lines that read them. at: the number of their
    buffers."""
    atoms = [n for n in numbers if isinstance(n, Atom)]
    quotients = {n: n.of for n in atoms if n.of is not None}
    sizes = [*dict.fromkeys([*(a for a in atoms if a.of is None), *atoms_of([n for n, _ in quotients.values()])])]
    floats = [n for n in numbers if isinstance(n, Scalar)]
    lines = [f"  const i64 {n.name} = ((const i64*)p[{at}])[{i}];" for i, n in enumerate(sizes)]
    lines += [f"  const i64 {a.name} = ({factor_text(n)} + {by - 1}) / {by};" for a, (n, by) in quotients.items()]
    lines += [f"  const double {n.name} = ((const double*)p[{at + 1}])[{i}];" for i, n in enumerate(floats)]
    return tuple(n.name for n in sizes), tuple(n.name for n in floats), lines


def _most(sizes: Sequence[Size]) -> Size:
    """A bound of sizes."""
    try:
        return largest([0, *sizes])
    except Undecided:
        total: Size = 0
        for n in sizes:
            total = total + n
        return total


def _threads_text(kernel: Kernel, text: Callable[[Size], str]) -> str:
    """How many threads run a kernel: one for few elements."""
    total = math.prod(v.size for v in kernel.loops)
    if isinstance(total, int):
        return "threads" if kernel.is_parallel else "1"
    return f"({text(total)} > {kernel.least_parallel}LL ? threads : 1)"
