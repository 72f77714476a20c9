"""A region as a function of tensors: kernels for the strides of its inputs, buffers and launches."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch

from thunder.core.proxies import TensorProxy
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol
from thunder.errors import warn_user
from thunder.executors.triton_kernels.autotune import tuned
from thunder.executors.triton_kernels.emit import emit
from thunder.executors.triton_kernels.launched import LaunchedRegion
from thunder.executors.triton_kernels.reductions import terms_of
from thunder.executors.triton_kernels.schedule import Schedule, may_share, schedule
from thunder.executors.triton_kernels.source import HEADER, Source, joined
from thunder.executors.triton_kernels.strides import (
    ordered,
)
from thunder.executors.triton_kernels.tiles import Tile
from thunder.executors.triton_kernels.values import Program, Value, in_order, program_of
from thunder.executors.triton_kernels.variants import Compiled, Interpreted
from thunder.extend.fusion import TooLarge
from thunder.kernels.index import strides_of
from thunder.kernels.sizes import Undecided
from thunder.kernels.triton_helpers import HELPERS
from thunder.ops.layout import padded_strides

PLANNED = 132, 228 << 10  # multiprocessors of an H100 or H200, and bytes of shared memory that each has


def _facts(device: torch.device) -> tuple[int, int]:
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.shared_memory_per_multiprocessor


class FusedRegion(LaunchedRegion):
    """A region as a function from its inputs to the list of its outputs, which have PyTorch's strides.

    `expect` compiles kernels for strides in the background; those for other strides are compiled at their first call.
    `source` is the text of the kernels, `kernels` their number.

    Symbolic sizes are arguments behind the tensors. The kernels are compiled once for all sizes, for strides in terms
    of sizes.

    planned: kernels are those of an H100 or H200 and are not compiled, so that no GPU is needed.

    Raises TooLarge for a region that has to be split.
    """

    def __init__(self, region: Region, device: torch.device, autotune: bool = False, planned: bool = False):
        super().__init__(region, device, planned)
        self.autotune = autotune and not self.interpreted and not region.numbers and not region.parts
        self.multiprocessors, self.shared = (2, 0) if self.interpreted else PLANNED if planned else _facts(device)
        self.program = program_of(region, self.numbers)
        tensors = (*(p for p in region.inputs if isinstance(p, TensorProxy)), *region.outputs)
        self.padded = [p in region.padded for p in tensors]  # inputs and outputs
        values = in_order(self.program.outputs)
        self.permutes = any(v.kind in ("permute", "broadcast") and not _keeps_order(v) for v in values) or any(
            map(_chooses_layout, region.bound_symbols)
        )
        self.reduces, self.adds = (any(v.kind == kind for v in values) for kind in ("reduce", "added"))
        self._layouts: dict[tuple, list[tuple]] = {}
        self.schedule = self._scheduled(self.usual_strides())
        self.schedules = {self._order(self.usual_strides()): self.schedule}
        self._source = ""
        if region.numbers:
            self._sources(self.usual_strides())  # raises Undecided

    def expect(self, strides: tuple) -> None:
        """Compiles kernels for inputs of these strides in the background."""
        if strides not in self._variants and strides not in self._expected and not (
            self.interpreted or self.autotune or self.is_planned
        ):  # fmt: skip
            self._expected[strides] = Compiled(self, strides)

    @property
    def partial_sums(self) -> dict[int, Value]:
        """By place of an output, the partial sums that a kernel reduces to it, where that kernel does nothing else and
        may share a launch."""
        place, found = {v: i for i, v in enumerate(self.schedule.program.outputs)}, {}
        for kernel in self.schedule.kernels:
            terms = {place[v]: terms_of(v) for v in kernel.stores if v in place}
            sums = [*terms.values(), *map(terms_of, kernel.reductions)]
            if len(terms) == len(kernel.stores) and None not in sums and may_share(kernel):
                found |= terms
        return found

    @property
    def kernels(self) -> int:  # type: ignore[override]
        return len(self.schedule.launches)

    @property
    def scratch_bytes(self) -> int:  # type: ignore[override]
        return sum(v.numel * v.dtype.bytes for v in self.schedule.temporaries)

    @property
    def source(self) -> str:
        """The text of the kernels; of those for row-major inputs where none is compiled yet."""
        if not self._source:
            self._sources(self.usual_strides())
        return self._source

    def rows_apart(self, program: Program, strides: Mapping[Value, Sequence]) -> set[Value]:
        """The inputs and outputs of a schedule's program that have padded rows, if they have these strides."""
        values = zip(self.padded, (*program.inputs, *program.outputs), strict=True)
        return {v for p, v in values if p and tuple(strides[v]) == padded_strides(v.shape, v.dtype.bytes)}

    def _scheduled(self, strides: tuple) -> Schedule:
        return schedule(self.program, 2 * self.multiprocessors, strides, self.layout(strides), self.region.parts)

    def _order(self, strides: tuple) -> tuple:
        """The part of strides that a schedule depends on: the order of dimensions in memory, if there are
        reductions."""
        return tuple(tuple(ordered(s)) for s in strides) if self.reduces else ()

    def scheduled(self, strides: tuple) -> Schedule:
        """The schedule for inputs of these strides; that for row-major ones where kernels have numbers elsewhere, and
        where there would be too many."""
        key = self._order(strides)
        if key not in self.schedules:
            try:
                self.schedules[key] = self._scheduled(strides)
            except (TooLarge, Undecided):
                self.schedules[key] = self.schedule
        return self.schedules[key]

    def _overwritable(self, strides: tuple) -> dict[int, int]:
        """Which outputs may be written over which of the inputs that die or have a home for them: what writes one reads
        the input there and nowhere else, no later kernel does."""
        program, dying, homes = self.scheduled(strides).program, self.dying, self.homes
        sources, _ = self._sources(strides)
        taken: dict[int, int] = {}
        for o, out in enumerate(program.outputs):
            number, source = next(((n, s) for n, s in enumerate(sources) if out in s.stores), (0, None))
            free = dying.union(i for i in homes if homes[i] == o).difference(taken.values())
            for i in sorted(free) if source is not None else ():  # none stores all of it
                x = program.inputs[i]
                same = x.numel == out.numel and x.dtype is out.dtype and source.loads.get(x) == {source.stores[out]}
                if same and not any(x in s.loads for s in sources[number + 1 :]):
                    taken[o] = i
                    break
        return taken

    def usual_strides(self) -> tuple:
        """The expected strides of inputs: row-major ones, with the row strides of padded values."""
        return tuple(
            padded_strides(v.shape, v.dtype.bytes) if p else strides_of(v.shape)
            for p, v in zip(self.padded, self.program.inputs, strict=False)
        )

    def _first(self, key: tuple, args: tuple) -> Callable:
        """The function for new strides."""
        if self.autotune:
            with torch.cuda.device(self.device):
                kernels = self.scheduled(key).kernels
                tiles = tuned(kernels, self.device, lambda tiles: Compiled(self, key, tiles=tiles))
                variant = Compiled(self, key, tiles=tiles)
        else:
            variant = self._expected.get(key) or (Interpreted if self.interpreted else Compiled)(self, key)
        self._expected.pop(key, None)
        try:
            launch = variant.launch()
        except RuntimeError as error:
            if self.over:  # the program reads what is written over
                raise
            names = ", ".join(dict.fromkeys(b.sym.name for b in self.region.bound_symbols))
            warn_user(f"PyTorch runs {names}: no kernel is compiled: {error}", UserWarning)
            return self.by_operations
        self.launches[key] = launch
        return launch.function(self.device, self.called())

    def _for_any_inputs(self, strides: tuple, aligned: tuple[bool, ...], wide: bool) -> Callable:
        if self.interpreted:
            return Interpreted(self, strides, wide=wide).function()
        return Compiled(self, strides, aligned, wide=wide).function()

    def _sources(
        self, strides: tuple, tiles: Sequence[Tile] | None = None, late: Container[Value] = (), wide: bool = False
    ) -> tuple[list[Source], list[tuple]]:
        scheduled, layout = self.scheduled(strides), self.layout(strides)
        program = scheduled.program
        known = dict(zip(program.inputs, strides, strict=True)) | dict(zip(program.outputs, layout, strict=True))
        padded = self.rows_apart(program, known)
        sources, tiles = [], iter(tiles or [None] * len(scheduled.kernels))
        for launch in scheduled.launches:
            given, shares = (known, self.interpreted, self.shared), len(launch) > 1
            made = [emit(scheduled, k, *given, next(tiles), late, wide, padded, shares) for k in launch]
            sources.append(joined(made, self.interpreted))
        helpers = dict.fromkeys(h for s in sources for h in s.helpers)
        self._source = "\n\n".join([HEADER, *(HELPERS[h].strip("\n") for h in helpers), *(s.text for s in sources)])
        return sources, layout

    def layout(self, strides: tuple) -> list[tuple]:
        """The strides of the outputs: PyTorch's for inputs of these strides, with padded rows where they are padded."""
        if strides not in self._layouts:
            self._layouts[strides] = self._layout(strides)
        return self._layouts[strides]

    def _layout(self, strides: tuple) -> list[tuple]:
        inputs, outputs = self.program.inputs, self.program.outputs
        row_major = all(s == strides_of(v.shape) for v, s in zip(inputs, strides, strict=True))
        if not self.permutes and not self.region.padded and row_major:
            return [strides_of(v.shape) for v in outputs]
        return self.layout_for(strides, fakes=not self.is_planned)


def _chooses_layout(operation: BoundSymbol) -> bool:
    """Whether the arguments of an operation choose the layout of its result, as
    `x.to(memory_format=torch.channels_last)`."""
    return any(type(v) is torch.memory_format for v in (*operation.args, *operation.kwargs.values()))


def _keeps_order(v) -> bool:
    """Whether the result keeps the order of the operand's dimensions in memory."""
    order = v.what[0] if v.kind == "permute" else v.what[1]
    long = [d for d, n in zip(order, v.operands[0].shape if v.kind == "broadcast" else v.shape, strict=True) if n != 1]
    return long == sorted(long)
