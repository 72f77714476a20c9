"""The launcher of all Triton kernels: the text of a Python function that allocates what kernels write, and launches
them. What depends on the types, shapes and strides of its arguments stands in the text as a constant."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thunder import compat
from thunder.compat.torch_settings import tensor_cores_multiply_float32
from thunder.core.codegen import compile_source
from thunder.executors.triton_kernels.binary import Binary
from thunder.options import TRITON_INTERPRET

ALIGNMENT = 16  # bytes; what the caching allocator gives is, what a view begins at may not be


def interpreting() -> bool:
    """Whether Triton's interpreter runs kernels, on tensors of any device."""
    # importing Triton takes as long as compiling a kernel; a thread may be half way through it
    runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    return bool(runtime.interpret) if runtime is not None else TRITON_INTERPRET.value


def function_text(name: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
    return "\n    ".join([f"def {name}({', '.join(parameters)}):", *lines]) + "\n"


class Launch(NamedTuple):
    """The text of a function, `launch`, and what it names: objects, as types of buffers, and kernels, each as its
    machine code or, for Triton's interpreter, as name and text."""

    text: str
    objects: dict[str, Any]
    kernels: dict[str, Binary | tuple[str, str]]

    def function(self, device: torch.device, called: Mapping[str, Callable]) -> Callable:
        """The function. called: what it calls in its own place, by name."""
        context: dict[str, Any] = {
            "allocate": _allocator(device), "math": math, "deterministic": torch.are_deterministic_algorithms_enabled,
            "rounds_float32": tensor_cores_multiply_float32,
            **called,
        }  # fmt: skip
        for name, kernel in self.kernels.items():
            if type(kernel) is tuple:
                context[name] = compile_source(kernel[1], kernel[0], {"__name__": "kernels"})
            else:
                context[name] = kernel.load(index_of(device))
                context |= {
                    "launch_kernel": compat.launch_kernel, "current_stream": compat.current_stream,
                    "current_device": compat.current_device, "set_device": compat.set_device,
                }  # fmt: skip
        return compile_source(self.text, "launch", context | self.objects)

    def script_text(self, device: torch.device, inputs: int) -> str:
        """The text of a `KernelScript`, of kernels that are given as text. inputs: the number of tensors."""
        lines = ['import os\n\nos.environ["TRITON_INTERPRET"] = "1"'] if interpreting() else []
        lines += [
            "import math\n\nfrom thunder.compat.torch_settings import tensor_cores_multiply_float32 as rounds_float32",
            "from thunder.core.codegen import compile_source\n",
        ]
        for name, (entry, text) in self.kernels.items():  # type: ignore[misc]
            lines.append(f'{name} = compile_source(r"""\n{text}""", "{entry}", {{"__name__": "kernels"}})')
        lines += [
            f"deterministic = torch.are_deterministic_algorithms_enabled\ndevice = torch.device({str(device)!r})",
            "allocate = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)",
            f"unusual = wide = by_operations = lambda *arguments: [*operations(*arguments[:{inputs}])]",
            *(f"{name} = {value}" for name, value in self.objects.items()),
            f"\n\n{self.text}\n\nkernel = launch",
        ]
        return "\n".join(lines)


def index_of(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def entry_lines(names: Sequence[str], parameters: Sequence[str], index: int, is_checked: bool) -> list[str]:
    """Takes the addresses of tensors. is_checked: passes a call on to `unusual` whose tensors are not aligned, or whose
    device is not the current one."""
    lines = [f"a_{name} = {name}.data_ptr()" for name in names]
    if is_checked:
        pointers = " | ".join(f"a_{name}" for name in names)
        unusual = [f"({pointers}) % {ALIGNMENT}"] if pointers else []
        lines.append(
            f"if {' or '.join([*unusual, f'current_device() != {index}'])}: return unusual({', '.join(parameters)})"
        )
    # a thread that only uses the device by PyTorch may have no context of it yet, and the launcher would take
    # device 0's
    return [*lines, f"set_device({index})"] if index else lines


def launch_line(
    kernel: str, binary: Binary, grid: Sequence[int | str], warps: int, tensors: Sequence[str],
    numbers: Sequence[tuple[str, str]],
) -> str:  # fmt: skip
    """Launches machine code on the stream `stream`. tensors: their names, whose addresses were taken. numbers: the kind
    of each, as PyTorch's launcher names it, and its text."""
    kinds = "O" * len(tensors) + "".join([kind for kind, _ in numbers]) + "O" * binary.scratch
    arguments = [*(f"a_{name}" for name in tensors), *(text for _, text in numbers), *["None"] * binary.scratch]
    x, y = (*grid, 1)[:2]
    return (
        f"launch_kernel({kernel}, {x}, {y}, 1, {warps}, {binary.shared}, '{kinds}', ({', '.join(arguments)},), stream)"
    )


def interpreted_line(
    kernel: str, grid: Sequence[int | str], warps: int, arguments: Sequence[str], stages: int | None = None
) -> str:
    """The same by Triton's interpreter or its own launcher, which take tensors."""
    x, y = (*grid, 1)[:2]
    options = [f"num_warps={warps}", *([] if stages is None else [f"num_stages={stages}"])]
    return f"{kernel}[({x}, {y})]({', '.join([*arguments, *options])})"


# Triton's names
POINTERS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


def _allocator(device: torch.device) -> Callable:
    """(size, stride, dtype) -> a tensor."""
    if device.type == "cuda":
        return compat.empty_strided_cuda
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
