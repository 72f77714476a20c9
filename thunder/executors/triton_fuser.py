"""The Triton fuser: regions of operations on a GPU as Triton kernels of `thunder.kernels`.

    thunder.jit(model, executors=["triton_fuser"])

Before: `t0 = ltorch.mul(a, b)`, `t1 = ltorch.softmax(t0, -1)`. After: `[t1] = TritonFusion0(a, b)`, the two operations
as comments below; `thunder.last_kernels(jitted)` shows the kernels. PyTorch runs what `thunder.kernels.lower` has no
row for. Under Triton's interpreter it takes tensors of any device.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from thunder.analysis.aliases import may_view
from thunder.analysis.cost import bytes_moved, nbytes, region_bytes, rules, tensors_in
from thunder.core.proxies import Proxy, TensorProxy, element_count, has_numbers, number_value
from thunder.core.regions import NoScript, Region
from thunder.core.signals import interrupts
from thunder.core.symbol import BoundSymbol, Names, OpTags
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.errors import warn_user
from thunder.executors import product_regions
from thunder.executors.thin_products import is_thin_layer, is_thin_product, thin_layer, thin_product
from thunder.executors.triton_kernels.binary import Binary, Request, binary_of
from thunder.executors.triton_kernels.by_strides import KeptRegion
from thunder.executors.triton_kernels.executor import TritonExecutor, runs_on
from thunder.executors.triton_kernels.expected import expected_strides
from thunder.executors.triton_kernels.launched import LaunchedRegion
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
from thunder.executors.triton_kernels.search import Stopwatch
from thunder.extend import add_default_executor_of_gpus, register_executor
from thunder.extend.chains import is_chain
from thunder.extend.fusion import TooLarge, Unfused, computing, fusible
from thunder.kernels import (
    lower,
    overwriting,
    tiled,
    tiles,
    triton_chains,  # noqa: F401  whose kernels `triton_cuda` writes by its table, as those of
    triton_cuda,
    triton_products,  # noqa: F401  whose kernels `triton_cuda` writes by its table
    windows,
)
from thunder.kernels.formulas import functions_in
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.index import strides_of
from thunder.kernels.ir import Buffer, Node, Program, in_order
from thunder.kernels.machine import Gpu, planned_gpu
from thunder.kernels.numbers import Scalar
from thunder.kernels.schedule import TooComplex
from thunder.kernels.sizes import Atom, Undecided, atoms_of, divides, tuple_text
from thunder.ops import ltorch, prims
from thunder.ops.backward import index_backward
from thunder.ops.families.random import uniform_philox
from thunder.ops.layout import padded_row, padded_strides
from thunder.ops.rules import products
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.runtime import disk_cache

DEAR = 60  # instructions for an element
WORTH = 4  # launches that a kernel takes for other tiles to be measured
TRIED = 5  # other tiles of a kernel
NOISE = 0.03  # of a measured time
SURE = 0.9  # of the time of PyTorch's products, below which the model is sure that one kernel is faster
SHARED = 1 << 26  # bytes that a launch moves which others may share: a larger one is as fast alone
TABLES = {prims.sin.name, prims.cos.name}  # functions of positions, of which each layer reads the same table


class TritonFuser(TritonExecutor):
    """Takes operations that decompose into the rows of `thunder.kernels.lower`, on one GPU.

    always: whether it runs regions with scans and scatters that PyTorch is predicted to run faster as well.
    """

    needs_sizes = False
    chains_products = True
    capturable = owns_results = takes_padding = adds_biases = compiles_ahead = keeps_kernels = True

    def __init__(self, name: str, always: bool = False):
        super().__init__(name, version=torch.__version__)
        self.always = always
        # by the names of a program: the strides of the forward's values, which its backward reads
        self._strides: weakref.WeakKeyDictionary[Names, dict[str, tuple]] = weakref.WeakKeyDictionary()
        self._plans: TritonFuser | None = None
        self.register_supported(ltorch.mm, self._takes_product, execution_transform=thin_product)
        self.register_supported(ltorch.linear, self._takes_layer, execution_transform=thin_layer)

    def planned(self) -> TritonFuser:
        if self._plans is None:
            self._plans = _Plans(self.name, self.always)
        return self._plans

    def _takes_product(self, a: TensorProxy, b: TensorProxy) -> bool:
        return runs_on(a.device.name) and self.has_triton() and is_thin_product(a, b)

    def _takes_layer(self, x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
        return runs_on(x.device.name) and self.has_triton() and is_thin_layer(x, weight, bias)

    def can_fuse(self, operation: BoundSymbol) -> bool:
        return (
            self.is_on_one(operation)
            and fusible(operation, numbers=True)
            and lower.lowers(operation, _computes, numbers=True, products=is_chain(operation))
            and self.has_triton()
        )

    def is_cheap(self, operation: BoundSymbol) -> bool:
        """Elementwise operations are; tables of sines are stored once and not recomputed in each layer."""
        return not any(map(_is_dear, lower.primitives(operation)))

    def fusion_pass(self, trace: Trace) -> Trace:
        return super().fusion_pass(self._with_products(trace))

    def _with_products(self, trace: Trace) -> Trace:
        """The program with matrix products and what is computed beside them as one operation where that is faster.

        Before: `t0 = linear(x, w, b)`, `t1 = gelu(t0)`. After: `[t1] = TritonProduct0(x, w, b)`."""
        trace = self._with_chains(trace)
        finder = product_regions.Finder(trace, self.takes, self._multiplies)
        if not finder.product:
            return trace
        fused: dict[frozenset[int], BoundSymbol] = {}
        for group in finder.groups():
            if not finder.is_taken(group) and finder.is_convex(group):
                operation = self._product(product_regions.region_of(finder, group), finder, group, len(fused))
                if operation is not None:
                    finder.take(group)
                    fused[group] = operation
        if not fused:
            return trace
        by_first = {finder.operations[min(g)]: b for g, b in fused.items()}
        written: list[BoundSymbol] = []
        for region in product_regions.in_order(finder):
            operation = by_first.get(region.bound_symbols[0])
            written += [operation] if operation is not None else region.bound_symbols
        return trace.replace(bound_symbols=written)

    def takes_chain(self, operations: Sequence[BoundSymbol]) -> bool:
        if not all(map(self.can_fuse, operations)):
            return False
        region = Region(operations, {o for b in operations for o in b.outputs})
        device = to_torch_device(next(o.device for o in region.outputs if isinstance(o, TensorProxy)))
        try:
            run = self.once(region, lambda: self.region_of(region, device))
        except (Unfused, TooLarge, Undecided):
            return False
        return self.always or run.seconds < product_regions.seconds_apart(operations, self._machine(device))

    def _with_chains(self, trace: Trace) -> Trace:
        """The program with kernels for chains of products.

        Before: `(t1, t2) = attention(q, k, v)`. After: `[t1, t2] = TritonAttention0(q, k, v)`."""
        chains = {b: i for i, b in enumerate(b for b in trace.bound_symbols if is_chain(b))}
        if not chains:
            return trace
        read = {v for b in trace.bound_symbols for v in b.inputs}.union(trace.output_proxies)
        written = []
        for b in trace.bound_symbols:
            if b in chains:
                region = Region([b], read.intersection(b.outputs))
                device = to_torch_device(next(o.device for o in region.outputs if isinstance(o, TensorProxy)))
                run = self.once(region, functools.partial(self.region_of, region, device))
                b = self.operation_of(region, f"TritonAttention{chains[b]}", run)
            written.append(b)
        return trace.replace(bound_symbols=written)

    def _multiplies(self, operation: BoundSymbol) -> bool:
        return self.is_on_one(operation) and self.has_triton()

    def _product(
        self, region: Region, finder: product_regions.Finder, group: frozenset[int], number: int
    ) -> BoundSymbol | None:
        """The operation of a product's region; None where PyTorch's product and kernels for the rest are faster."""
        device = to_torch_device(next(o.device for o in region.outputs if isinstance(o, TensorProxy)))
        saving = product_regions.Saving(finder, group, self._machine(device))
        if saving.least > SURE * saving.separate and not self.always:
            return None
        try:
            run = self.once(region, lambda: self.region_of(region, device))
        except (Unfused, TooLarge, Undecided):
            return None
        if run.seconds + saving.reading > SURE * saving.separate and not self.always:
            return None
        return self.operation_of(region, f"TritonProduct{number}", run)

    def _machine(self, device: torch.device) -> Gpu:
        return planned_gpu() if interpreting() or device.type != "cuda" else _measured(device)

    def should_fuse(self, region: Region) -> bool:
        """Not for one operation, unless PyTorch has no kernel for it, sorts for it, copies into another layout for it,
        or computes addresses for longer than it moves data. Several operations that only move data have to move fewer
        bytes as one."""
        operations = computing(region)
        if len(operations) > 1 or any(o.sym in _ALONE or _lays_out(o) for o in operations):
            return bool(region.outputs)
        kernels = [operation for operation in region.bound_symbols if not may_view(operation)]
        if len(kernels) == 1 and operations and region.outputs:
            on, moved = self._machine(to_torch_device(kernels[0].outputs[0].device)), bytes_moved(kernels[0])
            return _address_seconds(kernels[0], on) > on.moving(moved) + on.launch
        return len(kernels) > 1 and region_bytes(region) < sum(map(bytes_moved, kernels))

    def fuse(self, region: Region, counter: int) -> BoundSymbol:
        """A region as one call of Triton kernels. Raises Unfused where PyTorch's kernels are predicted to be faster."""
        device = next(o.device for o in region.outputs if isinstance(o, TensorProxy))
        try:
            run = self.once(region, lambda: self.region_of(region, to_torch_device(device)))
        except Undecided:
            raise Unfused("a kernel would have to know more of sizes that stay symbolic") from None
        if run.seconds > run.eager_seconds and not self.always:
            raise Unfused("PyTorch's kernels are predicted to be faster")
        return self.operation_of(region, f"TritonFusion{counter}", run)

    def region_of(self, region: Region, device: torch.device) -> TileRegion:
        return TileRegion(region, device)

    def shares_launch(self, region: Region, producer: Mapping[Proxy, BoundSymbol]) -> bool:
        """A small map over one space of sizes. Not a single cast of a matmul, which the matmul itself writes (see
        `transforms.wide_products`)."""
        operations = computing(region)
        tensors = tensors_in((*region.inputs, *region.outputs))
        return (
            bool(operations)
            and has_numbers([t.shape for t in tensors]) is False
            and len({math.prod(o.shape) for o in region.outputs if isinstance(o, TensorProxy)}) == 1
            and sum(map(nbytes, tensors)) <= SHARED
            and all(b.sym.reshapes or all(map(lower.is_map, lower.primitives(b))) for b in region.bound_symbols)
            and not any(
                i in producer and products.in_float32.of(producer[i].sym) is not None
                for i in region.inputs
                if len(operations) == 1
            )
        )

    def writing_over(
        self, function: Callable, dying: Sequence[int], homes: Mapping[int, int] | None = None
    ) -> tuple[Callable, dict[int, int]] | None:
        region = function.writing_over(frozenset(dying), homes) if isinstance(function, TileRegion) else None
        return (region, region.over) if region is not None and region.over else None

    def expect(self, trace: Trace) -> None:
        """Compiles kernels in the background, for the strides that inputs of regions will have."""
        known = self._strides.setdefault(trace.names, dict(trace.info.strides))
        for region, strides in expected_strides(trace, known, TileRegion):
            region.expect(strides)

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        for trace in (forward, backward):
            for operation in trace.bound_symbols if trace is not None else ():
                if isinstance(region := operation.sym.fn, TileRegion):
                    region.finish()

    def as_text(self, function: Callable) -> dict | None:
        return function.as_text() if isinstance(function, TileRegion) else None

    def from_text(self, said: dict, operations: Callable, unusual: Callable[[], None]) -> KeptRegion:
        return KeptRegion(said, operations, unusual)


_ALONE = {uniform_philox, index_backward}  # that PyTorch has no kernel for, or sorts for


def _lays_out(operation: BoundSymbol) -> bool:
    """Whether an operation copies an image into a memory format. PyTorch's kernel reads or writes each element alone
    where that is another one."""
    return operation.sym is ltorch.clone and "memory_format" in operation.kwargs and len(operation.output.shape) > 3


def _is_dear(primitive: BoundSymbol) -> bool:
    """Whether an element of a primitive is read faster than recomputed, as that of a table of sines."""
    name = lower.NAMES.get(primitive.sym.name, primitive.sym.name)
    names = functions_in(name) if lower.is_formula(primitive) else (name,)
    return lower.ROWS[primitive.sym.id] in lower.DEAR_ROWS or any(
        n in TABLES or tiles.INSTRUCTIONS.get(n, 1) >= DEAR for n in names
    )


class _Plans(TritonFuser):
    """Makes kernels without compiling them, for plans."""

    def has_triton(self) -> bool:
        return True

    def region_of(self, region: Region, device: torch.device) -> TileRegion:
        return TileRegion(region, device, is_planned=True)

    def _machine(self, device: torch.device) -> Gpu:
        return planned_gpu()


def _computes(primitive: BoundSymbol) -> bool:
    """Whether the target has a text for a primitive."""
    name = lower.NAMES.get(primitive.sym.name, primitive.sym.name)
    kinds = {lower.computed(p.dtype) for p in primitive.inputs if isinstance(p, TensorProxy)}
    if lower.is_formula(primitive):
        return all(triton_cuda.computes(n, kind) for n in functions_in(name) for kind in kinds)
    if name not in FUNCTIONS:
        return True
    return all(triton_cuda.computes(name, kind) for kind in kinds)


def seconds_of_operations(region: Region, on: Gpu) -> float:
    """What PyTorch takes for the operations of a region, one after the other; infinity where none is a scan, a
    scatter or a pool, nor alone: only for these PyTorch has kernels that may be faster."""
    primitives = (p for operation in region.bound_symbols for p in lower.primitives(operation))
    operations = [operation for operation in region.bound_symbols if not may_view(operation)]
    is_alone = len(operations) == 1 and _address_seconds(operations[0], on) > 0.0
    if not is_alone and not any(map(_has_kernel, primitives)):
        return math.inf
    return sum(
        rules.of(o.sym).kernels * on.launch
        + max(on.moving(bytes_moved(o)), _column_seconds(o, on), _address_seconds(o, on), _window_seconds(o, on))
        for o in operations
    )


def _has_kernel(p: BoundSymbol) -> bool:
    """Whether PyTorch has a kernel for a primitive that may be faster."""
    return lower.is_scan(p) or lower.is_scatter(p) or lower.is_pool(p)


def _address_seconds(operation: BoundSymbol, on: Gpu) -> float:
    """What PyTorch's elementwise kernel takes to find its operands, where one is repeated along some dimensions only:
    it divides by their sizes for each element."""
    tensors = [p for p in operation.inputs if isinstance(p, TensorProxy)]
    out = operation.outputs[0] if len(operation.outputs) == 1 else None
    computed = [p for p in lower.primitives(operation) if OpTags.SHAPE_OP not in p.sym.tags]
    if (
        not computed
        or not all(map(lower.is_elementwise, computed))
        or not isinstance(out, TensorProxy)
        or has_numbers(out.shape)
    ):
        return 0.0
    wide = [t for t in tensors if _is_repeated_in_part(t.shape, out.shape)]
    return on.operand * (len(tensors) + 1) * number_value(element_count(out)) if wide else 0.0


def _window_seconds(operation: BoundSymbol, on: Gpu) -> float:
    """What PyTorch's pools take to find the elements of their windows."""
    return on.operand * sum(windows.visits(p) for p in lower.primitives(operation) if lower.is_pool(p))


def _is_repeated_in_part(shape: tuple, whole: tuple) -> bool:
    """Whether an operand of a shape is repeated along some dimensions of a result, and not along others."""
    own = (1,) * (len(whole) - len(shape)) + tuple(shape)
    is_repeated = [n == 1 for n, m in zip(own, whole, strict=False) if m != 1]
    return all(n in (1, m) for n, m in zip(own, whole, strict=False)) and 0 < sum(is_repeated) < len(is_repeated)


def _column_seconds(operation: BoundSymbol, on: Gpu) -> float:
    """What PyTorch waits in scans along other dimensions than the last: a thread has a column, and reads one element of
    it after the other. That takes about an eighth of a launch, which waits for memory as well."""
    total = 0.0
    for p in lower.primitives(operation):
        if lower.is_stored_scan(p) and p.args[1] % len(p.args[0].shape) != len(p.args[0].shape) - 1:
            total += number_value(p.args[0].shape[p.args[1]]) * on.launch / 8
    return total


def _measured(device: torch.device) -> Gpu:
    """The GPU of a program; the planned one where a program for a GPU is looked at on a machine without one."""
    if not torch.cuda.is_available():
        return planned_gpu()
    from thunder.kernels.gpu_probe import measured_gpu  # which needs Triton

    return measured_gpu(device)


class TileRegion(LaunchedRegion):
    """A region as a function from its inputs to the list of its outputs, which have PyTorch's strides.

    Kernels are compiled for the strides of inputs. program: in the IR. seconds, eager_seconds: predicted, for row-major
    inputs, of the kernels and of PyTorch's. Raises Unfused where no kernels are made, TooLarge where halves may have
    some, and Undecided where they would have to know more of symbolic sizes.
    """

    def __init__(self, region: Region, device: torch.device, is_planned: bool = False):
        super().__init__(region, device, is_planned)
        self.program: Program = lower.lowered(region, self.numbers)
        self.machine: Gpu = (
            planned_gpu() if interpreting() or is_planned or device.type != "cuda" else _measured(device)
        )
        self._schedules: dict[tuple, tuple[list[tiled.Launch], list[tuple]]] = {}
        self._fastest: dict[tuple, list[tiled.Launch]] = {}  # by strides
        self._trials: dict[tuple, Trial] = {}
        self._shown = self.usual_strides()
        try:
            launches, _ = self.scheduled(self._shown)
            if region.numbers:
                assert self.source  # which raises Undecided
        except TooComplex as error:
            reason = Unfused(str(error)) if len(region.bound_symbols) == 1 else TooLarge()
            raise reason from None
        self.seconds = sum(launch.seconds(self.machine) for launch in launches)
        self.eager_seconds = seconds_of_operations(region, self.machine)

    def scheduled(self, strides: tuple) -> tuple[list[tiled.Launch], list[tuple]]:
        """The launches for inputs of these strides, and the strides of the results."""
        if strides not in self._schedules:
            of_buffers, layout = self.of_buffers(self.program, strides, not self.is_planned)
            self._schedules[strides] = tiled.scheduled(self.program, of_buffers, self.machine), layout
        return self._schedules[strides]

    def layout(self, strides: tuple) -> list[tuple]:
        return self.scheduled(strides)[1]

    def chosen(self, strides: tuple) -> list[tiled.Launch]:
        """The launches for inputs of these strides, with the tiles that were measured to be the fastest."""
        return self._fastest.get(strides) or self.scheduled(strides)[0]

    # ---------------------------------------------------------------------------------------------- measured tiles
    def measure_next(self) -> None:
        for strides in [*self.launches] if not self.region.numbers else ():
            if strides not in self._trials and strides not in self._fastest:
                self._trials[strides] = Trial(self, strides)
            if self._variants.pop(strides, None) is not None:
                self._usual = None

    def _measured(self, trial: Trial, args: tuple) -> list[tiled.Launch]:
        """The launches with the fastest tiles; those of the model where a call cannot measure."""
        is_recorded = not self.interpreted and torch.cuda.is_current_stream_capturing()
        if is_recorded or any(t.data_ptr() % ALIGNMENT for t in args):
            return trial.launches
        try:
            clock = Stopwatch(self.device)
            trial.launch().function(self.device, self.called() | {"fastest": clock.fastest})(*args)
        except torch.OutOfMemoryError:
            return trial.launches
        fastest = trial.fastest(clock.times)
        chosen = [launch.kernels[0][1] if len(launch.kernels) == 1 else None for launch in fastest]
        disk_cache.store(self._key_of_tiles(trial.sources), {}, json.dumps(chosen).encode())
        return fastest

    def _key_of_tiles(self, sources: Sequence[triton_cuda.Emitted]) -> str:
        texts = [(source.text, source.programs, source.warps) for source in sources]
        return disk_cache.key_of("tiles", tiles.VERSION, str(self.machine), torch.__version__, texts)

    def kept_tiles(
        self, strides: tuple, launches: list[tiled.Launch], sources: Sequence[triton_cuda.Emitted]
    ) -> list[tiled.Launch]:
        """The launches with the tiles that another process has measured."""
        if strides in self._fastest or self.region.numbers or self.is_planned:
            return launches
        stored = disk_cache.load(self._key_of_tiles(sources))
        if stored is None:
            return launches
        result = []
        for launch, tile in zip(launches, json.loads(stored[1].read_bytes()), strict=True):
            known = {other.kernels[0][1]: other for other in launch.alternatives(self.machine)} if tile else {}
            result.append(known.get(tuple(tile), launch) if tile else launch)
        self._fastest[strides] = result
        return result

    def usual_strides(self) -> tuple:
        """The expected strides of inputs: row-major ones, of padded rows where they are padded."""
        tensors = (p for p in self.region.inputs if isinstance(p, TensorProxy))
        return tuple(
            padded_strides(shape, p.dtype.bytes) if p in self.region.padded else strides_of(shape)
            for p, shape in zip(tensors, self.shapes, strict=True)
        )

    # ------------------------------------------------------------------------------------------------ memory
    def rows_apart(self, strides: tuple) -> dict[Buffer, tuple[int, int]]:
        """The inputs and outputs with padded rows, if inputs have these strides: the elements of a row, and from each
        row to the next."""
        padded = self.region.padded
        if not padded:
            return {}
        inputs = zip(self.program.inputs, self.region.inputs, strides, strict=True)
        values = [(b, s) for b, p, s in inputs if p in padded]
        values += zip(self.outputs(), self.layout(strides), strict=True)  # which have gaps where they are padded alone
        rows: dict[Buffer, tuple[int, int]] = {}
        for buffer, own in values:
            d = row_of(buffer.shape, own)
            if d is None or not isinstance(buffer.shape[d], int):
                continue
            step = padded_row(buffer.shape[d], buffer.dtype.bytes)
            others = [m for i, (n, m) in enumerate(zip(buffer.shape, own, strict=True)) if i != d and n != 1]
            if step != buffer.shape[d] and all(divides(step, m) for m in others):
                rows[buffer] = buffer.shape[d], step
        return rows

    def outputs(self) -> list[Buffer]:
        """The buffers of the results, in their order."""
        buffers = dict.fromkeys(s.buffer for s in self.program.stores if s.buffer.kind == "output")
        return sorted(buffers, key=lambda b: b.number)

    def _overwritable(self, strides: tuple) -> dict[int, int]:
        launches, layout = self.scheduled(strides)
        inputs, outputs = self.program.inputs, self.outputs()
        known = dict(zip(inputs, strides, strict=True)) | dict(zip(outputs, layout, strict=True))
        with_gaps = self.rows_apart(strides)
        return overwriting.places(launches, inputs, outputs, known, self.dying, self.homes, with_gaps)

    def memory(self, strides: tuple, over: Mapping[int, int]) -> triton_cuda.Memory:
        outputs = self.outputs()
        return triton_cuda.Memory({outputs[o] for o in over}, self.rows_apart(strides))

    @property
    def kernels(self) -> int:  # type: ignore[override]
        return len(self.scheduled(self._shown)[0])

    @property
    def source(self) -> str:  # type: ignore[override]
        launches, _ = self.scheduled(self._shown)
        memory = self.memory(self._shown, self.overwritten(self._shown))
        return "\n\n".join(triton_cuda.emitted(launch, self.interpreted, memory=memory).text for launch in launches)

    @property
    def description(self) -> str:
        """The program in the IR, the schedule with its predictions, and the text."""
        return f"{self.program}\n\n{tiled.describe(self.scheduled(self._shown)[0])}\n\n{self.source}"

    def script_text(self, strides: tuple) -> str:
        if self.numbers.floats():
            raise NoScript("Triton's launcher rounds the numbers that this region takes to float32")
        launch = Variant(self, strides, (True,) * len(strides), is_direct=True).launch()
        return launch.script_text(self.device, len(strides))

    # ---------------------------------------------------------------------------------------------- compiling
    def expect(self, strides: tuple) -> None:
        """Compiles kernels for inputs of these strides in the background."""
        is_known = strides in self._variants or strides in self._expected
        if not is_known and not self.interpreted and not self.is_planned:
            with contextlib.suppress(TooComplex, Undecided):  # which its first call says
                self._expected[strides] = Variant(self, strides)

    # ---------------------------------------------------------------------------------------------- calls
    def _first(self, key: tuple, args: tuple) -> Callable:
        """The function for arguments with these strides, compiled when they come first; PyTorch's operations where that
        fails."""
        self._shown = key
        if (trial := self._trials.pop(key, None)) is not None:
            self._fastest[key] = self._measured(trial, args)
        variant = self._expected.pop(key, None) or Variant(self, key)
        try:
            launch = variant.launch()
        except (RuntimeError, TooComplex, Undecided) as error:
            if interrupts(error):
                raise
            names = ", ".join(dict.fromkeys(b.sym.name for b in self.region.bound_symbols))
            warn_user(f"PyTorch runs {names}: no kernel is compiled: {error}", UserWarning)
            return self.by_operations
        self.launches[key] = launch
        return launch.function(self.device, self.called())

    def _for_any_inputs(self, strides: tuple, aligned: tuple[bool, ...], wide: bool) -> Callable:
        return Variant(self, strides, aligned, wide).launch().function(self.device, self.called())


def row_of(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The dimension whose elements lie side by side, in a tensor of several rows."""
    if sum(n != 1 for n in shape) < 2:
        return None
    return next((d for d, (n, step) in enumerate(zip(shape, strides, strict=True)) if step == 1 and n != 1), None)


class Variant:
    """A region for inputs of certain strides: the text of a Python function that allocates buffers and launches
    kernels, whose compilation it starts.

    aligned: the inputs that begin at multiples of 16 bytes, for a function of such inputs on the current device.
    Without it the function takes any inputs, and passes those that it is not compiled for to `TileRegion.unusual`.
    wide: for any sizes. is_trial: whether the text is that of the function for any inputs, which may write results over
    inputs, though this one does not. is_direct: whether Triton compiles and launches the kernels' text itself.
    Raises Undecided.
    """

    def __init__(
        self,
        region: TileRegion,
        strides: tuple,
        aligned: Sequence[bool] | None = None,
        wide: bool = False,
        is_trial: bool = False,
        is_direct: bool = False,
    ):
        self.is_direct = is_direct or region.interpreted
        launches, layout = region.chosen(strides), region.layout(strides)
        self.region, self.strides, self.is_checked, self.is_wide = region, strides, aligned is None, wide
        over = region.overwritten(strides) if self.is_checked else {}
        memory = region.memory(strides, region.overwritten(strides) if is_trial else over)
        inputs, outputs = region.program.inputs, region.outputs()
        copies = {outputs[o]: inputs[i] for o, i in over.items()}

        def emit(launches: Sequence[tiled.Launch]) -> list[triton_cuda.Emitted]:
            self.launches = overwriting.without_copies(launches, copies)
            return [triton_cuda.emitted(launch, region.interpreted, wide, memory) for launch in self.launches]

        self.sources = emit(launches)
        if (fastest := region.kept_tiles(strides, launches, self.sources)) is not launches:
            self.sources = emit(fastest)
        self.names: dict[Buffer, str] = {b: f"in{i}" for i, b in enumerate(region.program.inputs)}
        self.inputs = [*self.names.values()]
        self.parameters = [*self.inputs, *region.numbers.names]
        self.allocations: list[str] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self.results: dict[int, str] = {}
        self.memory = memory
        self.over = {o: (self.inputs[i], region.program.inputs[i].shape, strides[i]) for o, i in over.items()}
        for buffer in (*(b for source in self.sources for b in source.buffers), *outputs):
            if buffer not in self.names:
                self._allocate(buffer, layout)
        begins = dict(zip(region.program.inputs, aligned or (), strict=False))
        self.binaries = [] if self.is_direct else [self._binary(s, begins) for s in self.sources]

    def _allocate(self, buffer: Buffer, layout: Sequence[tuple]) -> None:
        number = len(self.allocations)
        strides = layout[buffer.number] if buffer.kind == "output" else strides_of(buffer.shape)
        self.names[buffer] = f"out{number}"
        self.dtypes[f"dtype{number}"] = to_torch_dtype(buffer.dtype)
        if buffer.kind == "output":
            self.results[buffer.number] = f"out{number}"
        self.allocations.append(f"out{number} = {self._memory_of(buffer, number, tuple(strides))}")

    def _memory_of(self, buffer: Buffer, number: int, strides: tuple) -> str:
        """New memory, or that of an input, as an expression."""
        shape, steps = tuple(buffer.shape), tuple_text(strides)
        if buffer.kind == "output" and buffer.number in self.over:
            name, *there = self.over[buffer.number]
            shown = "" if there == [shape, strides] else f".as_strided({tuple_text(shape)}, {steps})"
            return f"{name}{shown}.detach()"  # the input may be a view for autograd, and a result is none
        if buffer in self.memory.rows:
            d, (count, step) = row_of(shape, strides), self.memory.rows[buffer]
            whole = tuple(step if i == d else n for i, n in enumerate(shape))
            return f"allocate({tuple_text(whole)}, {steps}, dtype{number}).narrow({d}, 0, {count})"
        return f"allocate({tuple_text(shape)}, {steps}, dtype{number})"

    def _binary(self, source: triton_cuda.Emitted, begins: Mapping[Buffer, bool]) -> Future[Binary]:
        pointers = [(f"*{POINTERS[to_torch_dtype(b.dtype)]}", begins.get(b, True)) for b in source.buffers]
        size = "i64" if self.is_wide else "i32"
        numbers = [("fp64" if isinstance(n, Scalar) else size, False) for n in source.numbers]
        major, minor = torch.cuda.get_device_capability(self.region.device)
        request = Request(
            source.name, source.text, (*pointers, *numbers), source.warps, 10 * major + minor, (), source.stages
        )
        return binary_of(request)

    def _numbers(self) -> list[str]:
        """The lines that compute the numbers of kernels, and pass a call on that 32 bits are too few for."""
        region = self.region
        atoms = dict.fromkeys(n for s in self.sources for n in s.numbers if isinstance(n, Atom))
        atoms |= dict.fromkeys(atoms_of([n for b in self.names for n in b.shape]))
        lines = region.derived(self.strides, atoms)
        lines += [f"{name} = {expression}" for name, expression in region.numbers.floats()]
        tests = triton_cuda.limit_tests(n for s in self.sources for n in s.limits)
        if tests:
            lines.append(f"if {' or '.join(tests)}: return wide({', '.join(self.parameters)})")
        return lines

    def _launched(self, number: int, source: triton_cuda.Emitted, kernels: dict[str, Any]) -> list[str]:
        """The lines of a launch, whose kernel is added to `kernels`."""
        binary = None if self.is_direct else self.binaries[number]
        return [self._launch_of(f"kernel{number}", source, binary, kernels)]

    def _launch_of(
        self, name: str, source: triton_cuda.Emitted, binary: Future[Binary] | None, kernels: dict[str, Any]
    ) -> str:
        """The line that launches a kernel. kernels: gets what the line calls, by name. binary: None under Triton's
        interpreter."""
        tensors, grid = [self.names[b] for b in source.buffers], (source.programs,)
        if binary is None:
            kernels[name] = source.name, source.text
            numbers = [n.name for n in source.numbers]
            return interpreted_line(name, grid, source.warps, [*tensors, *numbers], source.stages)
        kernels[name] = loaded = binary.result()
        size = "l" if self.is_wide else "i"
        numbers = [("d" if isinstance(n, Scalar) else size, n.name) for n in source.numbers]
        return launch_line(name, loaded, grid, source.warps, tensors, numbers)

    def launch(self) -> Launch:
        """The launch function of the region's kernels: its text, and the objects that the text names."""
        region = self.region
        lines, kernels = self._numbers(), dict[str, Any]()
        if not self.is_direct:
            index = index_of(region.device)
            lines += entry_lines(self.inputs, self.parameters, index, self.is_checked)
            lines += [*self.allocations, f"stream = current_stream({index})"]
            lines += [f"a_{name} = {name}.data_ptr()" for name in self.names.values() if name not in self.inputs]
        else:
            lines += self.allocations
        for i, source in enumerate(self.sources):
            lines += self._launched(i, source, kernels)
        for is_rounded in {n.what[1] for n in in_order(s.value for s in region.program.stores) if _in_float32(n)}:
            test = f"if rounds_float32() is not {is_rounded}"
            lines.insert(0, f"{test}: return by_operations({', '.join(self.parameters)})")
        if any(s.scatter is not None for s in region.program.stores):
            lines.insert(0, f"if deterministic(): return by_operations({', '.join(self.parameters)})")
        results = ", ".join(self.results[i] for i in range(len(region.region.outputs)))
        text = function_text("launch", self.parameters, [*lines, f"return [{results}]"])
        return Launch(text, self.dtypes, kernels)


def _in_float32(n: Node) -> bool:
    """Whether a node is a product of float32 operands, which may be rounded."""
    return n.op == "dot" and n.args[0].dtype.name == "float32"


class Trial(Variant):
    """A region for inputs of certain strides that begin at multiples of 16 bytes: a function that measures its kernels
    beside the same ones with other tiles. It writes no results over inputs, which every kernel reads.

    others: by launch, the same kernels with other tiles, their text and their machine code.
    """

    def __init__(self, region: TileRegion, strides: tuple):
        super().__init__(region, strides, (True,) * len(strides), is_trial=True)
        self.others: list[list[tuple[tiled.Launch, triton_cuda.Emitted, Future[Binary] | None]]] = []
        for launch in self.launches:
            is_long = launch.seconds(region.machine) > WORTH * region.machine.launch
            others = launch.alternatives(region.machine)[:TRIED] if is_long else []
            texts = [triton_cuda.emitted(other, region.interpreted, memory=self.memory) for other in others]
            binaries = [None if region.interpreted else self._binary(text, {}) for text in texts]
            self.others.append([*zip(others, texts, binaries, strict=True)])

    def _launched(self, number: int, source: triton_cuda.Emitted, kernels: dict[str, Any]) -> list[str]:
        (own,) = super()._launched(number, source, kernels)
        runs, compiled = [own], []
        for i, other in enumerate(self.others[number]):
            with contextlib.suppress(RuntimeError):  # it has no machine code
                runs.append(self._launch_of(f"kernel{number}_{i}", other[1], other[2], kernels))
                compiled.append(other)
        self.others[number] = compiled
        return [f"fastest({number}, [{', '.join(f'lambda: {run}' for run in runs)}])"]

    def fastest(self, times: Mapping[int, Sequence[float]]) -> list[tiled.Launch]:
        """The launches with the fastest tiles. times: by number of a launch, the seconds of its kernel and of others.
        The chosen tile stays where others are no faster than measurements differ."""
        result = list(self.launches)
        for number, (own, *others) in times.items():
            best = min(range(len(others)), key=others.__getitem__)
            if others[best] < own * (1 - NOISE):
                result[number] = self.others[number][best][0]
        return result


def _is_default() -> bool:
    """Whether it is a default executor: where PyTorch is built for CUDA, and Triton does not interpret."""
    return torch.version.cuda is not None and has_triton() and not interpreting()


triton_fuser = TritonFuser("triton_fuser")
register_executor(triton_fuser)
add_default_executor_of_gpus(triton_fuser, here=_is_default())
