"""A region as a function of tensors: kernels made for the strides that come in, buffers, launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder.core.codegen import compile_source
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.regions import Region
from thunder.executors.triton_kernels.emit import HEADER, Source, emit, stored_type
from thunder.executors.triton_kernels.functions import HELPERS
from thunder.executors.triton_kernels.index import strides_of
from thunder.executors.triton_kernels.schedule import in_order, schedule
from thunder.executors.triton_kernels.values import Value, program_of
from thunder.ops.layout import run_line
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

__all__ = ["FusedRegion", "interpreting"]

ALIGNMENT = 16  # bytes; what the caching allocator gives is, what a view begins at may not be


def interpreting() -> bool:
    """Whether Triton's interpreter runs kernels, on tensors of any device."""
    import triton

    return bool(triton.knobs.runtime.interpret)


class FusedRegion:
    """Runs a region: called with its inputs, it returns the list of its outputs, laid out in memory as PyTorch lays them out.

    Kernels are compiled when strides come in for the first time. `source` is their text, `kernels` how many there are.

    Raises `schedule.TooLarge` for a region that has to be smaller.
    """

    def __init__(self, region: Region, device: torch.device):
        self.region, self.device = region, device
        self.interpreted = interpreting()
        programs = 4 if self.interpreted else 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self.schedule = schedule(program_of(region), programs)
        self.permutes = any(v.kind in ("permute", "broadcast") and not _keeps_order(v) for v in in_order(self.schedule.program.outputs))
        self._variants: dict[tuple, Callable] = {}
        self._source = ""

    @property
    def kernels(self) -> int:
        return len(self.schedule.kernels)

    @property
    def source(self) -> str:
        """The text of the kernels; of those for row-major inputs where none were compiled yet."""
        if not self._source:
            self._sources(tuple(strides_of(v.shape) for v in self.schedule.program.inputs))
        return self._source

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        key = tuple([t.stride() for t in tensors])
        run = self._variants.get(key)
        if run is None:
            run = self._variants[key] = self._variant(key)
        return run(*tensors)

    def _sources(self, strides: tuple) -> tuple[list[Source], list[tuple]]:
        program = self.schedule.program
        layout = self._layout(strides)
        known = dict(zip(program.inputs, strides, strict=True)) | dict(zip(program.outputs, layout, strict=True))
        sources = [emit(f"{k.kind}{i}", self.schedule, k, known, self.interpreted) for i, k in enumerate(self.schedule.kernels)]
        helpers = dict.fromkeys(h for s in sources for h in s.helpers)
        self._source = "\n\n".join([HEADER, *(HELPERS[h].strip("\n") for h in helpers), *(s.text for s in sources)])
        return sources, layout

    def _layout(self, strides: tuple) -> list[tuple]:
        """The strides of the outputs: PyTorch's, for inputs of these strides."""
        inputs, outputs = self.region.inputs, self.region.outputs
        if not self.permutes and all(s == strides_of(p.shape) for p, s in zip(inputs, strides, strict=True) if isinstance(p, TensorProxy)):
            return [strides_of(o.shape) for o in outputs if isinstance(o, TensorProxy)]
        values: dict[Proxy, object] = {}
        with torch._C.DisableTorchFunction(), FakeTensorMode(), torch.no_grad():
            for p, s in zip(inputs, strides, strict=True):
                values[p] = torch.empty_strided(p.shape, s, dtype=to_torch_dtype(p.dtype), device=to_torch_device(p.device))
            for line in self.region.lines:
                run_line(line, values)
        return [_dense(values[o]) for o in outputs]

    def _variant(self, strides: tuple) -> Callable:
        """The Python function that allocates what the kernels write and launches them."""
        program = self.schedule.program
        sources, layout = self._sources(strides)
        names = {v: f"in{i}" for i, v in enumerate(program.inputs)}
        context: dict = {"empty_strided": torch.empty_strided, "device": self.device}
        lines = []
        for i, (v, s) in enumerate(zip((*program.outputs, *self.schedule.temporaries), (*layout, *(strides_of(t.shape) for t in self.schedule.temporaries)), strict=True)):
            names[v] = f"out{i}"
            lines.append(f"out{i} = empty_strided({v.shape}, {tuple(s)}, dtype=dtype{i}, device=device)")
            context[f"dtype{i}"] = to_torch_dtype(stored_type(v, program.outputs))
        for i, source in enumerate(sources):
            arguments = ", ".join(names[b] for b in source.buffers)
            text = "\n\n".join([HEADER, *(HELPERS[h].strip("\n") for h in source.helpers), source.text])
            context[f"kernel{i}"] = compile_source(text, source.name, {})
            lines.append(f"kernel{i}[{source.grid}]({arguments}, num_warps={source.warps})")
        taken = [names[v] for v in program.inputs]
        text = "\n    ".join([f"def launch({', '.join(taken)}):", *lines, f"return [{', '.join(names[v] for v in program.outputs)}]"]) + "\n"
        return compile_source(text, "launch", context)


def _keeps_order(v: Value) -> bool:
    """Whether the dimensions of the operand follow each other in memory as they did."""
    order = v.what[0] if v.kind == "permute" else v.what[1]
    long = [d for d, n in zip(order, v.operands[0].shape if v.kind == "broadcast" else v.shape, strict=True) if n != 1]
    return long == sorted(long)


def _dense(tensor) -> tuple:
    """The strides of a tensor, row-major ones where elements overlap or have gaps."""
    expected = 1
    for step, n in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if step != expected:
            return strides_of(tensor.shape)
        expected *= n
    return tensor.stride()
