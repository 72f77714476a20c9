"""Launch loops: runs of bound symbols that the extension executes without Python between them.

A program that was called a few times gets its loops (`take_loops`): each run of consecutive bound symbols that are one
operator of PyTorch, or the kernels of a fused region on the CPU, becomes one call.

    t0 = torch.add(x, y)                       _inputs = [x, y]; del x, y; t2 = loop_0(_inputs)
    del x
    t1 = torch.nn.functional.relu(t0)
    del t0
    t2 = torch.mm(t1, y)
    del y, t1
    return t2                                  return t2

The operator of a bound symbol is not looked up in a table: its function is called once with meta tensors, and the
extension observes the operator that PyTorch's own binding of that function calls, and its arguments. What is
not one operator stays Python. The text of the program, and its lines in tracebacks, stay as they are.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.core.codegen import PerCall, Printer
from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, has_numbers, map_structure
from thunder.core.regions import FusedFunction
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.runtime import extensions
from thunder.transforms.del_last_used import python_del

FEWEST = 2  # operators of a loop
LARGE = 1 << 16  # bytes of an input that is freed at its last use; smaller ones are freed at the end of the loop


def take_loops(trace: Trace) -> int:
    """Lets the function of a trace run loops from its next call on. Returns their number: 0 without the extension."""
    native, function = extensions.loaded_extension(), trace.python_callable()
    if native is None or not isinstance(function, types.FunctionType):
        return 0
    names, filename = function.__globals__, function.__code__.co_filename
    lines = [*linecache.getlines(filename)]
    with torch.no_grad(), compat.without_function_modes(), compat.without_dispatch_modes():
        numbered, loops = native.unseen(lambda: _lines_and_loops(trace, lines, native, names))
    taken = {*names, *function.__code__.co_varnames}
    variable = _free("inputs", taken)
    for loop in loops:
        numbers = [line for operation in loop.operations for line in numbered[operation]]
        text = "".join(lines[line - 1] for line in numbers)
        for line in numbers:
            lines[line - 1] = "\n"
        name = _free("loop", taken)
        lines[numbers[0] - 1] = f"  {loop.call(name, variable)}\n"
        otherwise = functools.partial(_run_text, loop.as_text(text, numbers[0]), filename)
        names[name] = loop.compiled(native, filename, trace.name, otherwise)
    if loops:
        space: dict[str, Any] = {}
        exec(compile("".join(lines), filename, "exec"), space)
        function.__code__ = space[trace.name].__code__
    return len(loops)


def _numbered(trace: Trace, lines: list[str]) -> dict[BoundSymbol, range] | None:
    """The numbers of the lines of each bound symbol; None where another text than the trace's runs."""
    printer = Printer(print_depth=1)
    printer.variables = {p.name for p in trace.args} | {o.name for b in trace.bound_symbols for o in b.outputs}
    texts = [printer.line(b) for b in trace.bound_symbols]
    line = len(lines) - sum(map(len, texts)) - 1
    if lines[line:-1] != [f"  {text}\n" for own in texts for text in own]:
        return None
    lines_of = {}
    for operation, own in zip(trace.bound_symbols, texts, strict=True):
        lines_of[operation] = range(line + 1, line + 1 + len(own))
        line += len(own)
    return lines_of


def _lines_and_loops(
    trace: Trace, lines: list[str], native: types.ModuleType, names: dict[str, Any]
) -> tuple[dict[BoundSymbol, range], list[_Loop]]:
    """The numbers of the lines of each bound symbol, and the loops; none where another text than the trace's runs."""
    numbered = _numbered(trace, lines)
    loops = [] if numbered is None else _loops(trace.bound_symbols, _Observer(native, names, numbered))
    return numbered or {}, loops


def _free(stem: str, taken: set[str]) -> str:
    name = next(n for n in (f"{stem}_{i}" for i in itertools.count()) if n not in taken)
    taken.add(name)
    return name


def _run_text(text: str, filename: str, inputs: list) -> Any:
    """The printed lines of a loop, for inputs that no loop takes: tensors of subclasses. The caller is the program,
    which a reference to its globals from here would keep alive."""
    space = dict(sys._getframe(1).f_globals)
    exec(compile(text, filename, "exec"), space)
    return space["lines"](*inputs)


def _loops(operations: Sequence[BoundSymbol], observer: _Observer) -> list[_Loop]:
    """The runs of bound symbols that a loop takes, with the `del` statements behind each."""
    loops = [_Loop()]
    at = 0
    while at < len(operations):
        end = next((i for i in range(at + 1, len(operations)) if operations[i].sym is not python_del), len(operations))
        if not loops[-1].add(operations[at], operations[at + 1 : end], observer) and loops[-1].instructions:
            loops.append(_Loop())
        at = end
    return [loop for loop in loops if len(loop.instructions) >= FEWEST]


class _Observer:
    """Turns bound symbols into the extension's instructions. names: the globals of the program; where: the lines of
    each bound symbol. Instructions know values by numbers."""

    def __init__(self, native: types.ModuleType, names: dict[str, Any], where: dict[BoundSymbol, range]):
        self._native, self._names, self._lines = native, names, where
        self._tensors: dict[Proxy, torch.Tensor] = {}
        self.numbers: dict[Proxy, int] = {}

    def instruction(self, operation: BoundSymbol, dead: Sequence[Proxy]) -> Any:
        """dead: values that are freed behind it. None where the bound symbol is neither one operator nor kernels in
        C."""
        results = _results(operation)
        if isinstance(operation.sym.fn, FusedFunction):
            return self._kernels(operation.sym.fn, operation, results, dead)
        function = self._function(operation.sym)
        if function is None or results is None:
            return None
        arguments = operation.args, operation.kwargs
        if not all(type(x) is TensorProxy for x in operation.inputs) or not _is_known(arguments):
            return None
        is_item = function is torch.Tensor.__getitem__
        is_python = isinstance(function, types.FunctionType)
        if (is_item or is_python) and any(has_numbers(x) for x in operation.inputs):
            return None  # it may look at sizes
        args, kwargs = map_structure(self._real, arguments)
        return self._native.observed(
            function, None if is_item else _name_of(function), is_item or is_python,
            args, kwargs,
            tuple(self._tensors[x] for x in operation.inputs), tuple(map(self.number, operation.inputs)),
            tuple(-1 if x is None else self.number(x) for x in results), tuple(map(self.number, dead)),
            self._lines[operation][-1],
        )  # fmt: skip

    def _kernels(
        self, region: FusedFunction, operation: BoundSymbol, results: list[TensorProxy | None] | None,
        dead: Sequence[Proxy],
    ) -> Any:  # fmt: skip
        """The launches of a fused region for the loop; None where Python has to run it."""
        known = region.native()
        if known is None or results is None:
            return None
        return self._native.kernels(
            *known, region, tuple(map(self.number, operation.inputs)),
            tuple(-1 if x is None else self.number(x) for x in results), tuple(map(self.number, dead)),
            self._lines[operation][-1],
        )  # fmt: skip

    def number(self, value: Proxy) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def _function(self, symbol: Symbol) -> Callable | None:
        """The function of PyTorch that the line of a symbol calls."""
        if symbol.python_printer is not None or symbol.condition is not None or isinstance(symbol.fn, PerCall):
            return None
        if symbol.module is None:
            return symbol.fn if isinstance(symbol.fn, compat.OpOverload) else None
        root, *path = f"{symbol.module}.{symbol.name}".split(".")
        if root not in ("torch", "Tensor"):
            return None
        function = functools.reduce(getattr, path, self._names[root])
        return function if isinstance(function, (*_IN_C, types.FunctionType, compat.OpOverload)) else None

    def _real(self, x: Any) -> Any:
        """The value of an argument; a tensor without memory in the place of one of the program's."""
        if type(x) is TensorProxy:
            if x not in self._tensors:
                shape = [n if isinstance(n, int) else 2 for n in x.shape]
                self._tensors[x] = torch.empty(shape, dtype=to_torch_dtype(x.dtype), device="meta")
            return self._tensors[x]
        return to_torch_dtype(x) if type(x) is dtype else to_torch_device(x) if type(x) is Device else x


_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_CONSTANTS = (int, float, bool, complex, str, type(None), type(...), torch.Tensor)
_ARGUMENTS = (TensorProxy, dtype, Device, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _is_known(x: Any) -> bool:
    """Whether arguments are the same in each call, but for the tensors of the program."""
    if isinstance(x, (tuple, list)):
        return all(map(_is_known, x))
    if isinstance(x, dict):
        return all(map(_is_known, x.values()))
    if isinstance(x, slice):
        return all(map(_is_known, (x.start, x.stop, x.step)))
    return type(x) in _CONSTANTS or isinstance(x, _ARGUMENTS)


def _name_of(function: Any) -> str:
    return function._schema.name if isinstance(function, compat.OpOverload) else function.__name__


def _results(operation: BoundSymbol) -> list[TensorProxy | None] | None:
    """The results of a bound symbol, None for one that its line drops. None where they are not a list of tensors."""
    output = operation.output
    outputs = [] if output is None else list(output) if isinstance(output, (tuple, list)) else [output]
    if any(isinstance(x, (tuple, list, dict)) for x in outputs):
        return None
    results = [x if isinstance(x, Proxy) else None for x in outputs]
    return results if all(x is None or type(x) is TensorProxy for x in results) else None  # type: ignore[return-value]


class _Loop:
    """Bound symbols that follow each other. instructions: their operators. operations: the bound symbols, `del` among
    them. inputs, produced: values in order. dead: those that the loop frees, and the index of the instruction behind
    which it does. unread: values from outside that `del` frees and no operator reads."""

    def __init__(self):
        self.operations: list[BoundSymbol] = []
        self.instructions: list[Any] = []
        self.inputs: list[Proxy] = []
        self.produced: list[Proxy] = []
        self.dead: dict[Proxy, int] = {}
        self.unread: list[Proxy] = []
        self._values: set[Proxy] = set()
        self._numbers: dict[Proxy, int] = {}

    def add(self, operation: BoundSymbol, freeing: Sequence[BoundSymbol], observer: _Observer) -> bool:
        """Takes a bound symbol and the `del` statements behind it, where it is one operator."""
        freed = [p for statement in freeing for p in statement.args]
        own = {*operation.inputs, *operation.outputs}
        dead = [p for p in freed if p in own or p in self._values]
        instruction = observer.instruction(operation, dead)
        if instruction is None:
            return False
        self.inputs += [p for p in dict.fromkeys(operation.inputs) if p not in self._values]
        self.produced += operation.outputs
        self._values |= own
        self.dead |= dict.fromkeys(dead, len(self.instructions))
        self.unread += [p for p in freed if p not in self._values]
        self.instructions.append(instruction)
        self.operations += [operation, *freeing]
        self._numbers = observer.numbers
        return True

    @property
    def outputs(self) -> list[Proxy]:
        return [p for p in self.produced if p not in self.dead]

    def call(self, name: str, variable: str) -> str:
        """The line that runs the loop. The program holds no reference to inputs that the loop frees."""
        inputs = f"[{', '.join(p.name for p in self.inputs)}]"
        freed = [*(p.name for p in self.inputs if p in self.dead), *(p.name for p in self.unread)]
        before = ""
        if freed:
            before, inputs = f"{variable} = {inputs}; del {', '.join(freed)}; ", variable
        outputs = ", ".join(p.name for p in self.outputs)
        return f"{before}{outputs}{' = ' if outputs else ''}{name}({inputs})"

    def as_text(self, lines: str, first: int) -> str:
        """The lines as a function, which stand where they stand in the program."""
        outputs = ", ".join(p.name for p in self.outputs)
        head = f"def lines({', '.join(p.name for p in self.inputs)}):"
        return "\n" * (first - 2) + f"{head}\n{lines}  return {outputs or '()'}\n"

    def compiled(self, native: types.ModuleType, filename: str, name: str, otherwise: Callable) -> Callable:
        """The loop as a function of the list of its inputs. otherwise: runs in its place for subclasses."""
        inputs = {p: i for i, p in enumerate(self.inputs)}
        released = [(inputs[p], i) for p, i in self.dead.items() if p in inputs and _is_large(p)]
        return native.loop_of(
            tuple(self.instructions), self._slots(), len(inputs), tuple(self._numbers[p] for p in self.outputs),
            tuple(released), filename, name, otherwise,
        )  # fmt: skip

    def _slots(self) -> tuple[int, ...]:
        """By number, the slot of a value: one that is free again takes the next value."""
        slots = {p: i for i, p in enumerate(self.inputs)}
        free: list[int] = []
        most, dying = len(slots), dict[int, list[Proxy]]()
        for p, i in self.dead.items():
            dying.setdefault(i, []).append(p)
        operators = [b for b in self.operations if b.sym is not python_del]
        for i, operation in enumerate(operators):
            for p in operation.outputs:
                slots[p] = free.pop() if free else most
                most = max(most, slots[p] + 1)
            free += [slots[p] for p in dying.get(i, ())]
        numbered = {n: slots.get(p, -1) for p, n in self._numbers.items()}
        return tuple(numbered[n] for n in range(len(numbered)))


def _is_large(p: Proxy) -> bool:
    if type(p) is not TensorProxy or any(isinstance(n, NumberProxy) for n in p.shape):
        return True
    return math.prod(p.shape) * p.dtype.bytes >= LARGE
