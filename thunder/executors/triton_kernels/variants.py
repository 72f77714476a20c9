"""A region for inputs of certain strides: the function that allocates what its kernels write, and launches them."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder import compat
from thunder.core.codegen import compile_source
from thunder.executors.triton_kernels.binary import Binary, Request, binary_of
from thunder.executors.triton_kernels.expressions import LIMIT, stored_type
from thunder.executors.triton_kernels.functions import HELPERS
from thunder.executors.triton_kernels.index import strides_of
from thunder.executors.triton_kernels.numbers import Scalar
from thunder.executors.triton_kernels.sizes import at_least, text, tuple_text
from thunder.executors.triton_kernels.source import HEADER, Source
from thunder.executors.triton_kernels.tiles import Tile
from thunder.ops.torch_types import to_torch_dtype
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
    """The text of a variant's function, `launch`, and what it names: types of buffers, and kernels, each as its machine
    code or, for Triton's interpreter, as name and text."""

    text: str
    dtypes: dict[str, torch.dtype]
    kernels: dict[str, Binary | tuple[str, str]]

    def function(self, region: Any) -> Callable:
        """The function. region: has `device`, `fork`, and what it calls in its place: `unusual`, `wide` and
        `by_operations`."""
        device = region.device
        context: dict[str, Any] = {
            "allocate": _allocator(device), "math": math, "fork": region.fork, "unusual": region.unusual,
            "wide": region.wide, "by_operations": region.by_operations,
            "deterministic": torch.are_deterministic_algorithms_enabled,
        }  # fmt: skip
        for name, made in self.kernels.items():
            if type(made) is tuple:
                context[name] = compile_source(made[1], made[0], {"__name__": "kernels"})
            else:
                context[name] = made.load(index_of(device))
                names = ("launch_kernel", "current_stream", "current_device", "set_device")
                context |= {name: getattr(compat, name) for name in names}
        return compile_source(self.text, "launch", context | self.dtypes)


def index_of(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


class Variant(ABC):
    """A region for inputs of certain strides, as the text of a Python function that allocates buffers and launches
    kernels."""

    def __init__(
        self,
        region: Any,  # a `FusedRegion`
        strides: tuple,
        tiles: Sequence[Tile] | None = None,
        over: bool = True,
        wide: bool = False,
    ):
        scheduled = region.scheduled(strides)
        program, temporaries = scheduled.program, scheduled.temporaries
        self.region, self.strides = region, strides
        pairs = region.overwritten(strides) if over else {}
        self.over = {program.outputs[o]: program.inputs[i] for o, i in pairs.items()}
        self.wide = wide
        self.sources, layout = region._sources(strides, tiles, self.over, wide)
        self.layout = (
            dict(zip(program.inputs, strides, strict=True))
            | dict(zip(program.outputs, layout, strict=True))
            | {v: strides_of(v.shape) for v in temporaries}
        )
        padded = region.rows_apart(program, self.layout)
        # launches that would store what lies there
        self.idle = {
            i for i, launch in enumerate(scheduled.launches)
            if all(v.kind == "part" and not v.what[1] and self.over.get(v.what[0]) is v.operands[0]
                   for kernel in launch for v in kernel.stores)
        }  # fmt: skip
        self.texts = ["\n\n".join([HEADER, *(HELPERS[h].strip("\n") for h in s.helpers), s.text]) for s in self.sources]
        self.names = {v: f"in{i}" for i, v in enumerate(program.inputs)}
        self.inputs = list(self.names.values())
        self.types = {v: to_torch_dtype(v.dtype) for v in program.inputs}
        self.allocations = []
        self.dtypes: dict[str, torch.dtype] = {}
        for i, (v, s) in enumerate(
            zip((*program.outputs, *temporaries), (*layout, *(strides_of(t.shape) for t in temporaries)), strict=True)
        ):
            self.names[v] = f"out{i}"
            self.types[v] = self.dtypes[f"dtype{i}"] = to_torch_dtype(stored_type(v, program.outputs))
            there, made = self.over.get(v), f"allocate({tuple_text(v.shape)}, {tuple_text(s)}, dtype{i})"
            if v in padded:
                whole = *v.shape[:-1], s[-2]
                made = f"allocate({tuple_text(whole)}, {tuple_text(s)}, dtype{i})[..., :{v.shape[-1]}]"
            if there is not None:  # which may be a view for autograd, and a result is none
                shown = (
                    f".as_strided({tuple_text(v.shape)}, {tuple_text(s)})"
                    if (there.shape, self.layout[there]) != (v.shape, tuple(s))
                    else ""
                )
                made = f"{self.names[there]}{shown}.detach()"
            self.allocations.append(f"out{i} = {made}")
        self.results = f"[{', '.join(self.names[v] for v in program.outputs)}]"

    @abstractmethod
    def launch(self) -> Launch:
        """The function of the inputs, which may call other functions of the region."""

    def function(self) -> Callable:
        return self.launch().function(self.region)

    def _launch(self, lines: Sequence[str], kernels: dict) -> Launch:
        text = function_text("launch", self.parameters, [*self.first, *lines, f"return {self.results}"])
        return Launch(text, self.dtypes, kernels)

    @property
    def parameters(self) -> list[str]:
        return [*self.inputs, *self.region.numbers.names]

    @property
    def first(self) -> list[str]:
        """The lines that compute the arguments of kernels beside tensors, and check that 32-bit indices are enough."""
        lines = self.region.derived(self.strides)
        lines += [f"{name} = {expression}" for name, expression in self.region.numbers.floats()]
        if self.region.adds:
            lines.insert(0, f"if deterministic(): return by_operations({', '.join(self.parameters)})")
        limits = dict.fromkeys(n for s in self.sources for n in s.limits)
        tests = [f"{text(n)} >= {LIMIT}" for n in limits if not any(m != n and at_least(m, n) for m in limits)]
        tests += [f"{text(n)} < -{LIMIT}" for n in limits if not at_least(n, 0)]
        if tests:
            lines.append(f"if {' or '.join(tests)}: return wide({', '.join(self.parameters)})")
        return lines


class Interpreted(Variant):
    """Launches by Triton's interpreter."""

    def launch(self) -> Launch:
        lines, kernels = [*self.allocations], {}
        for i, (source, whole) in enumerate(zip(self.sources, self.texts, strict=True)):
            if i in self.idle:
                continue
            kernels[f"kernel{i}"] = (source.name, whole)
            arguments = [*(self.names[b] for b in source.buffers), *(atom.name for atom in source.sizes)]
            lines.append(
                f"kernel{i}[({source.grid[0]}, {source.grid[1]})]({', '.join(arguments)}, num_warps={source.warps})"
            )
        return self._launch(lines, kernels)


class Compiled(Variant):
    """Launches machine code, whose compilation it starts in the background.

    aligned: the inputs that begin at multiples of 16 bytes, for a function of such inputs on the current device.
    Without it the function takes any inputs, and passes those that it is not compiled for to `FusedRegion.unusual`.
    """

    def __init__(
        self,
        region: Any,  # a `FusedRegion`
        strides: tuple,
        aligned: Sequence[bool] | None = None,
        tiles: Sequence[Tile] | None = None,
        wide: bool = False,
    ):
        super().__init__(region, strides, tiles, over=aligned is None, wide=wide)
        self.number = "i64" if wide else "i32"
        self.checked = aligned is None
        begins = dict(zip(region.program.inputs, aligned or (), strict=False))
        major, minor = torch.cuda.get_device_capability(region.device)
        self.binaries = [
            binary_of(
                Request(
                    s.name,
                    text,
                    (
                        *((f"*{POINTERS[self.types[b]]}", begins.get(b, True)) for b in s.buffers),
                        *(("fp64" if isinstance(n, Scalar) else self.number, False) for n in s.sizes),
                    ),
                    s.warps,
                    10 * major + minor,
                )
            )
            for s, text in zip(self.sources, self.texts, strict=True)
        ]

    def launches(self) -> list[Callable[[], None]]:
        """A launch of each kernel, on zeros, which are indices as well: for measuring."""
        tensors = {
            v: torch.empty_strided(v.shape, s, dtype=self.types[v], device=self.region.device).zero_()
            for v, s in self.layout.items()
        }

        def launch(source: Source, made: Binary) -> Callable[[], None]:
            addresses = (*(tensors[b].data_ptr() for b in source.buffers), *[None] * made.scratch)
            index = index_of(self.region.device)
            handle, stream = made.load(index), compat.current_stream(index)
            return lambda: (
                compat.launch_kernel(
                    handle,
                    source.grid[0],
                    source.grid[1],
                    1,
                    source.warps,
                    made.shared,
                    "O" * len(addresses),
                    addresses,
                    stream,
                ),
                tensors,
            )[0]

        return [launch(source, made.result()) for source, made in zip(self.sources, self.binaries, strict=True)]

    def launch(self) -> Launch:
        index, kernels = index_of(self.region.device), {}
        lines = [f"a_{name} = {name}.data_ptr()" for name in self.inputs]
        if self.checked:
            pointers = " | ".join(f"a_{name}" for name in self.inputs)
            unusual = [f"({pointers}) % {ALIGNMENT}"] if pointers else []
            lines.append(
                f"if {' or '.join([*unusual, f'current_device() != {index}'])}: return "
                f"unusual({', '.join(self.parameters)})"
            )
        # a thread that only uses the device by PyTorch may have no context of it yet, and the launcher would take
        # device 0's
        if index:
            lines.append(f"set_device({index})")
        lines += [*self.allocations, f"stream = current_stream({index})"]
        lines += [f"a_{name} = {name}.data_ptr()" for name in self.names.values() if name not in self.inputs]
        late = sorted(self.region.late)
        for i in [i for i in range(len(self.sources)) if i not in late and i not in self.idle] + late:
            source, binary = self.sources[i], self.binaries[i].result()
            if late and i == late[0]:
                lines.append(
                    f"stream = fork({index}, "
                    f"({', '.join(dict.fromkeys(self.names[b] for k in late for b in self.sources[k].buffers))},))"
                )
            kernels[f"kernel{i}"] = binary
            addresses = [f"a_{self.names[b]}" for b in source.buffers]
            numbers = [atom.name for atom in source.sizes]
            number_kinds = ["d" if isinstance(n, Scalar) else "l" if self.wide else "i" for n in source.sizes]
            kinds = "O" * len(addresses) + "".join(number_kinds) + "O" * binary.scratch
            arguments = ", ".join([*addresses, *numbers, *["None"] * binary.scratch])
            lines.append(
                f"launch_kernel(kernel{i}, {source.grid[0]}, {source.grid[1]}, 1, {source.warps}, {binary.shared}, "
                f"'{kinds}', ({arguments},), stream)"
            )
        return self._launch(lines, kernels)


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
