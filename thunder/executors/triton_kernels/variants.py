"""A region for inputs of certain strides: the function that allocates what its kernels write, and launches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.executors.triton_kernels.binary import Binary, Request, binary_of
from thunder.executors.triton_kernels.expressions import LIMIT, stored_type
from thunder.executors.triton_kernels.launcher import (
    POINTERS,
    Launch,
    entry_lines,
    function_text,
    index_of,
    interpreted_line,
    launch_line,
)
from thunder.executors.triton_kernels.source import HEADER, Source
from thunder.executors.triton_kernels.tiles import Tile
from thunder.kernels.index import strides_of
from thunder.kernels.numbers import Scalar
from thunder.kernels.sizes import at_least, text, tuple_text
from thunder.kernels.triton_helpers import HELPERS
from thunder.ops.torch_types import to_torch_dtype


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
        return self.launch().function(self.region.device, self.region.called())

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
            lines.append(interpreted_line(f"kernel{i}", source.grid, source.warps, arguments))
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
        lines = entry_lines(self.inputs, self.parameters, index, self.checked)
        lines += [*self.allocations, f"stream = current_stream({index})"]
        lines += [f"a_{name} = {name}.data_ptr()" for name in self.names.values() if name not in self.inputs]
        for i, source in enumerate(self.sources):
            if i in self.idle:
                continue
            kernels[f"kernel{i}"] = binary = self.binaries[i].result()
            kinds = ["d" if isinstance(n, Scalar) else "l" if self.wide else "i" for n in source.sizes]
            numbers = [(kind, n.name) for kind, n in zip(kinds, source.sizes, strict=True)]
            tensors = [self.names[b] for b in source.buffers]
            lines.append(launch_line(f"kernel{i}", binary, source.grid, source.warps, tensors, numbers))
        return self._launch(lines, kernels)
