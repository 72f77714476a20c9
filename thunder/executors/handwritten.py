"""Handwritten Triton kernels: compiled and launched as those of the Triton fuser are.

The file of a kernel is not imported. Its kernels, with what they call, are text, which a process compiles
(`triton_kernels/binary.py`), and PyTorch's launcher launches the machine code: neither Triton's import nor the C
compiler of Triton's launcher keeps a first call waiting, and a launch takes the host less time.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder import compat
from thunder.core.codegen import compile_source
from thunder.executors.triton_kernels.binary import Binary, binary_of
from thunder.executors.triton_kernels.compiling import Request
from thunder.executors.triton_kernels.variants import ALIGNMENT, POINTERS, interpreting

Settings = tuple[tuple[int, ...], tuple[Any, ...], int]  # numbers of programs, numbers behind the tensors, warps


class Handwritten:
    """A kernel of a file, whose arguments are tensors of one device and, after them, whole numbers and constants."""

    def __init__(self, file: str, name: str):
        """file: beside this one."""
        self.file, self.name = file, name
        self._known: dict[tuple, Callable[[Sequence[int], int], None]] = {}

    def __call__(self, key: tuple, tensors: Sequence[torch.Tensor], settings: Callable[[], Settings]) -> None:
        """key: all that the tensors' types and the settings depend on."""
        addresses = [t.data_ptr() for t in tensors]
        together = 0
        for address in addresses:
            together |= address
        device = tensors[0].get_device()
        key = (*key, device)
        launch = None if together % ALIGNMENT else self._known.get(key)
        if launch is not None and compat.current_device() == device:
            launch(addresses, compat.current_stream(device))
            return
        grid, numbers, warps = settings()
        if interpreting():
            self._interpreted[grid](*tensors, *map(_constant, numbers), num_warps=warps)
            return
        aligned = [not address % ALIGNMENT for address in addresses]
        kinds, request = self._request([t.dtype for t in tensors], aligned, numbers, warps, tensors[0].device)
        with torch.cuda.device_of(tensors[0]):
            launch = _launcher(binary_of(request).result(), grid, warps, len(tensors), numbers, kinds, device)
            launch(addresses, compat.current_stream(device))
        if all(aligned):
            self._known[key] = launch

    def start(self, dtypes: Sequence[torch.dtype], settings: Settings, device: torch.device) -> None:
        """Compiles it in the background for tensors of these types. Nothing where there is no GPU: a program that is
        only looked at may be one for GPUs."""
        if torch.cuda.is_available() and not interpreting():
            _, numbers, warps = settings
            binary_of(self._request(dtypes, [True] * len(dtypes), numbers, warps, device)[1])

    def _request(
        self, dtypes: Sequence[torch.dtype], aligned: Sequence[bool], numbers: tuple, warps: int, device: torch.device
    ) -> tuple[list[str], Request]:
        """The kinds of the numbers, as PyTorch's launcher names them, empty for constants; and what compiles them."""
        text, parameters = _kernels(self.file)
        names, constant = zip(*parameters[self.name], strict=True)
        tensors = [(f"*{POINTERS[d]}", a) for d, a in zip(dtypes, aligned, strict=True)]
        # a number of 1 is a constant, as for Triton: a stride of 1 makes wide loads
        kinds = ["" if c or n == 1 else "i" if -(1 << 31) <= n < 1 << 31 else "l"
                 for n, c in zip(numbers, constant[len(tensors) :], strict=True)]  # fmt: skip
        given = [(_TYPES[kind], bool(kind) and n % ALIGNMENT == 0) for kind, n in zip(kinds, numbers, strict=True)]
        behind = zip(names[len(tensors) :], numbers, kinds, strict=True)
        constants = tuple((name, n) for name, n, kind in behind if not kind)
        major, minor = torch.cuda.get_device_capability(device)
        return kinds, Request(self.name, text, (*tensors, *given), warps, 10 * major + minor, constants)

    @functools.cached_property
    def _interpreted(self) -> Any:
        return compile_source(_kernels(self.file)[0], self.name, {"__name__": "kernels"})


_TYPES = {"i": "i32", "l": "i64", "": "constexpr"}


def _constant(given: Any) -> Any:
    """A constant as Triton's interpreter takes it."""
    import triton.language as tl

    return getattr(tl, given.removeprefix("tl.")) if type(given) is str else given


@functools.cache
def _kernels(file: str) -> tuple[str, dict[str, list[tuple[str, bool]]]]:
    """The text of a file of kernels, and the parameters of each, with whether they are constants."""
    text = Path(__file__).with_name(file).read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return text, {f.name: [(a.arg, a.annotation is not None) for a in f.args.args] for f in functions}


def _launcher(
    made: Binary, grid: tuple[int, ...], warps: int, tensors: int, numbers: tuple, kinds: list[str], device: int
) -> Callable[[Sequence[int], int], None]:
    """A function of addresses and a stream."""
    rest = *(n for n, kind in zip(numbers, kinds, strict=True) if kind), *[None] * made.scratch
    launch_kernel, function, shared = compat.launch_kernel, made.load(device), made.shared
    text = "O" * tensors + "".join(kinds) + "O" * made.scratch
    x, y = (*grid, 1)[:2]

    def launch(addresses: Sequence[int], stream: int) -> None:
        if device:  # PyTorch's launcher takes device 0 in a thread that has no context yet
            compat.set_device(device)
        launch_kernel(function, x, y, 1, warps, shared, text, (*addresses, *rest), stream)

    return launch
