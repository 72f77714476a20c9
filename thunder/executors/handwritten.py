"""Handwritten Triton kernels: compiled and launched as those of the Triton fuser are.

The file of a kernel is not imported. Its kernels, with what they call, are text, which a process compiles
(`triton_kernels/binary.py`), and PyTorch's launcher launches the machine code: neither Triton's import nor the C
compiler of Triton's launcher keeps a first call waiting, and a launch takes the host less time.

What an operation does on the host is a function with the decorator `launching`: it says what is allocated, called and
launched. It runs once for arguments of the same types, shapes and strides, and what it said is the text of the function
that runs from then on:

    @launching
    def few_rows(steps, x, weight):
        out = steps.empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        steps.launch(_row, (x, weight, out), _settings(weight.shape))
        return out

    def launch(in0, in1):
        a_in0 = in0.data_ptr()
        a_in1 = in1.data_ptr()
        if (a_in0 | a_in1) % 16 or current_device() != 0: return unusual(in0, in1)
        out0 = allocate((1, 1, 4096), (4096, 4096, 1), object0)
        stream = current_stream(0)
        a_out0 = out0.data_ptr()
        launch_kernel(kernel0, 4096, 1, 1, 8, 0, 'OOOiOO', (a_in0, a_in1, a_out0, 4096, None, None), stream)
        return out0
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thunder.core.codegen import PerCall, compile_source
from thunder.core.proxies import leaves
from thunder.core.trace import Trace
from thunder.executors.triton_kernels.binary import binary_of, wait_for_kernels
from thunder.executors.triton_kernels.by_strides import ByStrides
from thunder.executors.triton_kernels.compiling import Request
from thunder.executors.triton_kernels.launcher import (
    ALIGNMENT,
    POINTERS,
    Launch,
    entry_lines,
    function_text,
    index_of,
    interpreted_line,
    interpreting,
    launch_line,
)
from thunder.kernels.index import strides_of

Settings = tuple[tuple[int, ...], tuple[Any, ...], int]  # numbers of programs, numbers behind the tensors, warps


class Handwritten:
    """A kernel of a file, whose arguments are tensors of one device and, after them, whole numbers and constants."""

    def __init__(self, file: str, name: str):
        """file: beside this one."""
        self.file, self.name = file, name

    def start(self, dtypes: Sequence[torch.dtype], settings: Settings, device: torch.device) -> None:
        """Compiles it in the background for tensors of these types. Nothing where there is no GPU: a program that is
        only looked at may be one for GPUs."""
        if device.type == "cuda" and torch.cuda.is_available() and not interpreting():
            _, numbers, warps = settings
            binary_of(self.request(dtypes, [True] * len(dtypes), numbers, warps, device)[1])

    def request(
        self, dtypes: Sequence[torch.dtype], aligned: Sequence[bool], numbers: tuple, warps: int, device: torch.device
    ) -> tuple[list[str], Request]:
        """The kinds of the numbers, as PyTorch's launcher names them, empty for constants; and what compiles them."""
        text, parameters = _kernels(self.file)
        names, constant = zip(*parameters[self.name], strict=True)
        tensors = [(f"*{POINTERS[d]}", a) for d, a in zip(dtypes, aligned, strict=True)]
        # a number of 1 is a constant, as for Triton: a stride of 1 makes wide loads
        kinds = ["" if c or n == 1 else "i" if -(1 << 31) <= n < 1 << 31 else "l"
                 for n, c in zip(numbers, constant[len(tensors) :], strict=True)]  # fmt: skip
        number_types = [
            (_TYPES[kind], bool(kind) and n % ALIGNMENT == 0) for kind, n in zip(kinds, numbers, strict=True)
        ]
        behind = zip(names[len(tensors) :], numbers, kinds, strict=True)
        constants = tuple((name, n) for name, n, kind in behind if not kind)
        major, minor = torch.cuda.get_device_capability(device)
        return kinds, Request(self.name, text, (*tensors, *number_types), warps, 10 * major + minor, constants)

    @property
    def source(self) -> tuple[str, str]:
        """Its name and text."""
        return self.name, _kernels(self.file)[0]


class CompilesKernels:
    """Of an executor whose `expect` starts its kernels: other ones run in the first of two tiers."""

    compiles_ahead = keeps_kernels = True

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        wait_for_kernels()


_TYPES = {"i": "i32", "l": "i64", "": "constexpr"}


def _constant(constant: Any) -> Any:
    """A constant as Triton's interpreter takes it."""
    import triton.language as tl

    return getattr(tl, constant.removeprefix("tl.")) if type(constant) is str else constant


@functools.cache
def _kernels(file: str) -> tuple[str, dict[str, list[tuple[str, bool]]]]:
    """The text of a file of kernels, and the parameters of each, with whether they are constants."""
    text = Path(__file__).with_name(file).read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return text, {f.name: [(a.arg, a.annotation is not None) for a in f.args.args] for f in functions}


class Steps:
    """What an operation does on the host, which becomes the text of a function of its tensors.

    Values that it allocates are on the meta device here; what it calls before the first launch is called.
    """

    def __init__(self, args: tuple):
        self._parameters = [f"in{i}" for i in range(len(args))]
        self._names: dict[int, str] = {}
        self._held: list[Any] = [args]  # an id is a value's while that lives
        self._before: list[str] = []
        for name, x in zip(self._parameters, args, strict=True):
            self._take(x, name, name)
        self.device = next(x.device for x in leaves(args) if isinstance(x, torch.Tensor))
        self._allocations: list[str] = []
        self._allocated: list[str] = []
        self._launches: list[tuple[Handwritten, tuple, Settings]] = []
        self._after: list[str] = []
        self._objects: dict[str, Any] = {}

    def _take(self, x: Any, name: str, expression: str) -> None:
        """Names the tensors in an argument."""
        if isinstance(x, (tuple, list)):
            for i, inner in enumerate(x):
                self._take(inner, f"{name}_{i}", f"{expression}[{i}]")
        elif isinstance(x, torch.Tensor):
            self._names.setdefault(id(x), name)
            self._before += [f"{name} = {expression}"] if name != expression else []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense tensor of this shape."""
        result, shape = torch.empty(shape, dtype=dtype, device="meta"), tuple(shape)
        name = self._name(result, "out")
        self._allocations.append(f"{name} = allocate({shape}, {strides_of(shape)}, {self._text(dtype)})")
        self._allocated.append(name)
        return result

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that depends on none of the arguments."""
        self._objects[self._name(x, "constant")] = x
        return x

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """A function of PyTorch's. What kernels read is called for before the first launch."""
        texts = [self._text(x) for x in args] + [f"{k}={self._text(x)}" for k, x in kwargs.items()]
        result = function(*args, **kwargs)
        lines = self._after if self._launches else self._before
        lines.append(f"{self._target(result)} = {self._text(function)}({', '.join(texts)})")
        return result

    def launch(self, kernel: Handwritten, tensors: Sequence[torch.Tensor], settings: Settings) -> None:
        self._launches.append((kernel, tuple(tensors), settings))

    def written(self, result: Any, is_checked: bool) -> Launch:
        """The function of the tensors. is_checked: it is for aligned tensors on the current device, and passes others
        on to `unusual`."""
        kernels: dict[str, Any] = {}
        if not self._launches:
            lines = [*self._before, *self._allocations]
        elif interpreting():
            lines = [*self._before, *self._allocations]
            for i, (kernel, tensors, (grid, numbers, warps)) in enumerate(self._launches):
                kernels[f"kernel{i}"] = kernel.source
                texts = *map(self._text, tensors), *(self._text(_constant(n)) for n in numbers)
                lines.append(interpreted_line(f"kernel{i}", grid, warps, texts))
        else:
            lines = self._compiled(kernels, is_checked)
        text = function_text("launch", self._parameters, [*lines, *self._after, f"return {self._text(result)}"])
        return Launch(text, self._objects, kernels)

    def _compiled(self, kernels: dict[str, Any], is_checked: bool) -> list[str]:
        """The lines of the launch function, with the compiled kernels in `kernels`. is_checked: each call checks the
        alignment of its tensors, so that none is assumed."""
        index = index_of(self.device)
        read = {self._text(t): t for _, tensors, _ in self._launches for t in tensors}
        for name in self._allocated:
            read.pop(name, None)
        misaligned = {n for n, t in read.items() if not is_checked and t.data_ptr() % ALIGNMENT}
        lines = [*self._before, *entry_lines([*read], self._parameters, index, is_checked), *self._allocations]
        lines += [f"stream = current_stream({index})", *(f"a_{n} = {n}.data_ptr()" for n in self._allocated)]
        compiled: list[tuple[Any, list[str], Settings, list[str]]] = []
        for kernel, tensors, settings in self._launches:
            names = [*map(self._text, tensors)]
            aligned = [n not in misaligned for n in names]
            kinds, request = kernel.request([t.dtype for t in tensors], aligned, *settings[1:], self.device)
            compiled.append((binary_of(request), names, settings, kinds))
        for i, (binary, names, (grid, numbers, warps), kinds) in enumerate(compiled):
            kernels[f"kernel{i}"] = loaded = binary.result()
            number_texts = [(kind, str(n)) for kind, n in zip(kinds, numbers, strict=True) if kind]
            lines.append(launch_line(f"kernel{i}", loaded, grid, warps, names, number_texts))
        return lines

    def _name(self, value: Any, stem: str) -> str:
        self._held.append(value)
        name = self._names[id(value)] = f"{stem}{len(self._held)}"
        return name

    def _target(self, result: Any) -> str:
        if isinstance(result, (tuple, list)):
            return f"({', '.join([self._target(x) for x in result])},)"
        return self._name(result, "t")

    def _text(self, x: Any) -> str:
        """A value, a number, a sequence of such, or an object that the text names."""
        if (name := self._names.get(id(x))) is not None:
            return name
        if isinstance(x, (tuple, list)):
            inside = "".join([f"{self._text(v)}, " for v in x])
            return f"[{inside}]" if isinstance(x, list) else f"({inside})"
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        assert not isinstance(x, torch.Tensor), "the steps of an operation do not know a tensor that it computes with"
        name = self._name(x, "object")
        self._objects[name] = x
        return name


class Launching(ByStrides, PerCall):
    """The function of an operation by its steps, `function(steps, *args)`, which may depend on the types, shapes,
    strides and device of the tensors among the arguments, and on all else there; see the top of the file."""

    def __init__(self, function: Callable):
        super().__init__()
        functools.update_wrapper(self, function)
        self._function, self.shared = function, self
        self._unusual: dict[tuple, Callable] = {}

    def for_call(self) -> Launching:
        launching = Launching(self._function)
        launching.shared = self
        return launching

    def called(self) -> dict[str, Callable]:
        return {"unusual": self.unusual}

    def unusual(self, *args) -> Any:
        """A call with tensors that are not aligned, or while another device is current."""
        tensors, _ = self._parted(args)
        key = self._strides(tensors, args), tuple([t.data_ptr() % ALIGNMENT == 0 for t in tensors])
        run = self._unusual.get(key)
        if run is None:
            run = self._unusual[key] = self._written_for(args, is_checked=False)
        device = tensors[0].device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return run(*args)

    def _parted(self, args: tuple) -> tuple[tuple, tuple]:
        return tuple([x for x in leaves(args) if isinstance(x, torch.Tensor)]), args

    def _strides(self, tensors: Sequence[torch.Tensor], numbers: Sequence) -> tuple:
        """All that the steps may depend on: of each tensor its facts, and which arguments are the same one; and the
        other arguments with their types."""
        places: dict[int, int] = {}

        def known(x: Any) -> tuple:
            if isinstance(x, (tuple, list)):
                return tuple(map(known, x))
            is_tensor = isinstance(x, torch.Tensor)
            return _Known(None, places.setdefault(id(x), len(places))) if is_tensor else _Known(type(x), x)

        return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors]), known(numbers)

    def _first(self, key: tuple, args: tuple) -> Callable:
        return self._written_for(args, is_checked=True)

    def _written_for(self, args: tuple, is_checked: bool) -> Callable:
        steps = Steps(args)
        return steps.written(self._function(steps, *args), is_checked).function(steps.device, self.called())

    def _check(self, key: tuple, tensors: Sequence[torch.Tensor]) -> Callable | None:
        _, arguments = key
        fits = self._fits(super()._check(key, tensors), arguments)
        if fits is None or self.shared is not self:  # a call in a program always has as many arguments
            return fits
        return lambda *args: len(args) == len(arguments) and fits(*args)

    def _fits(self, check: Callable | None, arguments: tuple) -> Callable | None:
        """Whether as many arguments are those of a key. check: whether the tensors among them are."""
        if check is None or all(isinstance(known, _Known) and known.kind is None for known in arguments):
            return check
        parameters = [f"in{i}" for i in range(len(arguments))]
        tests, checked, context = list[str](), list[str](), dict[str, Any](check=check)
        for name, known in zip(parameters, arguments, strict=True):
            _add_tests(name, known, tests, checked, context)
        tests.append(f"check({', '.join(checked)})")
        return compile_source(function_text("fits", parameters, [f"return {' and '.join(tests)}"]), "fits", context)


launching = Launching  # as a decorator


class _Known(NamedTuple):
    """An argument in a key: its type and value, or None and the place of a tensor among the distinct ones."""

    kind: type | None
    value: Any


def _add_tests(name: str, known: tuple, tests: list[str], tensors: list[str], context: dict[str, Any]) -> None:
    """Adds the tests whether an argument is the one of a key, the tensors in it, and what the tests name."""
    if not isinstance(known, _Known):
        tests.append(f"len({name}) == {len(known)}")
        for i, inner in enumerate(known):
            _add_tests(f"{name}[{i}]", inner, tests, tensors, context)
    elif known.kind is None:
        tensors.append(name)
    else:
        kind, value = f"type{len(context)}", f"value{len(context)}"
        context |= {kind: known.kind, value: known.value}
        tests.append(f"({name} is {value} or type({name}) is {kind} and {name} == {value})")
