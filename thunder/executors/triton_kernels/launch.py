"""A region as a function of tensors: kernels made for the strides that come in, buffers, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder._torch_compat import current_device, current_stream
from thunder.core.codegen import compile_source
from thunder.core.dtypes import FLOAT
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.regions import Region
from thunder.executors.triton_kernels.emit import HEADER, Source, emit, stored_type
from thunder.executors.triton_kernels.functions import HELPERS
from thunder.executors.triton_kernels.index import strides_of
from thunder.executors.triton_kernels.schedule import in_order, schedule
from thunder.executors.triton_kernels.values import program_of
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
        return self._first(key, tensors) if run is None else run(*tensors)

    def _first(self, key: tuple, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A call with strides that did not come in before: kernels are compiled, and later calls launch what this one compiled."""
        variant = _Variant(self, key)
        if self.interpreted:
            self._variants[key] = variant.run
            return variant.run(*tensors)
        outputs, compiled = variant.launch(*tensors)
        if compiled and not any(t.data_ptr() % ALIGNMENT for t in tensors):
            self._variants[key] = variant.prepared(compiled)
        return outputs

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


class _Variant:
    """A region for inputs of certain strides, as Python functions that allocate what the kernels write and launch them."""

    def __init__(self, region: FusedRegion, strides: tuple):
        program, temporaries = region.schedule.program, region.schedule.temporaries
        self.region = region
        self.sources, layout = region._sources(strides)
        self.names = {v: f"in{i}" for i, v in enumerate(program.inputs)}
        self.context: dict = {"empty_strided": torch.empty_strided, "device": region.device}
        self.inputs = list(self.names.values())
        self.allocations = []
        for i, (v, s) in enumerate(zip((*program.outputs, *temporaries), (*layout, *(strides_of(t.shape) for t in temporaries)), strict=True)):
            self.names[v] = f"out{i}"
            self.allocations.append(f"out{i} = empty_strided({v.shape}, {tuple(s)}, dtype=dtype{i}, device=device)")
            self.context[f"dtype{i}"] = to_torch_dtype(stored_type(v, program.outputs))
        # a tensor may be a negative of its memory's numbers, which kernels do not see
        self.negative = " or ".join(f"{self.names[v]}.is_neg()" for v in program.inputs if v.dtype.category == FLOAT)
        again = ", ".join(f"{name}.resolve_neg()" for name in self.inputs)
        self.plain = [f"if {self.negative}: return again({again})"] if self.negative else []
        self.context["again"] = region
        self.results = f"[{', '.join(self.names[v] for v in program.outputs)}]"
        for i, source in enumerate(self.sources):
            text = "\n\n".join([HEADER, *(HELPERS[h].strip("\n") for h in source.helpers), source.text])
            self.context[f"kernel{i}"] = compile_source(text, source.name, {})

    def _function(self, lines: Sequence[str], result: str) -> Callable:
        text = "\n    ".join([f"def launch({', '.join(self.inputs)}):", *lines, f"return {result}"]) + "\n"
        return compile_source(text, "launch", self.context)

    def _launches(self) -> list[str]:
        return [f"kernel{i}[{s.grid}]({', '.join(self.names[b] for b in s.buffers)}, num_warps={s.warps})" for i, s in enumerate(self.sources)]

    @property
    def run(self) -> Callable:
        return self._function([*self.plain, *self.allocations, *self._launches()], self.results)

    @property
    def launch(self) -> Callable:
        """Returns the kernels that Triton compiled as well."""
        launches = [f"compiled{i} = {text}" for i, text in enumerate(self._launches())]
        lines = [*(f"{line}, []" for line in self.plain), "with on_device(device):", *(f"    {line}" for line in (*self.allocations, *launches))]
        self.context["on_device"] = torch.cuda.device
        return self._function(lines, f"{self.results}, [{', '.join(f'compiled{i}' for i in range(len(self.sources)))}]")

    def prepared(self, compiled: Sequence) -> Callable:
        """Launches compiled kernels without looking at arguments again, but for their alignment, which the kernels were compiled for."""
        index = self.region.device.index if self.region.device.index is not None else torch.cuda.current_device()
        slow = self.launch
        self.context |= {"general": lambda *tensors: slow(*tensors)[0], "current_device": current_device, "current_stream": current_stream}
        written = [name for name in self.names.values() if name not in self.inputs]
        lines = [f"a_{name} = {name}.data_ptr()" for name in self.inputs]
        pointers = " | ".join(f"a_{name}" for name in self.inputs)
        unusual = [f"({pointers}) % {ALIGNMENT}"] if pointers else []
        unusual += [f"current_device() != {index}"] + ([self.negative] if self.negative else [])
        lines += [f"if {' or '.join(unusual)}: return general({', '.join(self.inputs)})", *self.allocations, f"stream = current_stream({index})"]
        lines += [f"a_{name} = {name}.data_ptr()" for name in written]
        for i, (source, kernel) in enumerate(zip(self.sources, compiled, strict=True)):
            self.context |= {f"run{i}": kernel.run, f"function{i}": kernel.function, f"metadata{i}": kernel.packed_metadata}
            arguments = ", ".join(f"a_{self.names[b]}" for b in source.buffers)
            lines.append(f"run{i}({source.grid[0]}, {source.grid[1]}, 1, stream, function{i}, metadata{i}, None, None, None, {arguments})")
        return self._function(lines, self.results)


def _keeps_order(v) -> bool:
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
