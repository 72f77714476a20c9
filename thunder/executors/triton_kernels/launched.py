"""A region whose functions launch kernels on one GPU: calls that differ from those that kernels are compiled for, and
results that are written over inputs."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, Self

import torch

from thunder.core.regions import Region
from thunder.executors.triton_kernels.binary import Binary
from thunder.executors.triton_kernels.by_sizes import BySizes
from thunder.executors.triton_kernels.by_strides import launch_as_text
from thunder.executors.triton_kernels.launcher import ALIGNMENT, Launch, interpreting


class Compiling(Protocol):
    """Kernels for inputs of some strides. binaries: those that are compiled in the background."""

    binaries: Sequence[Future[Binary]]

    def launch(self) -> Launch: ...


class LaunchedRegion(BySizes):
    """is_planned: whether it is compiled for no device, and is not called. over: by number of an output, that of the
    input that it is written over if both have the same strides; see `writing_over`."""

    def __init__(self, region: Region, device: torch.device, is_planned: bool):
        super().__init__(region)
        self.device, self.is_planned = device, is_planned
        self.interpreted = interpreting() and not is_planned
        self.launches: dict[tuple, Launch] = {}  # by strides, of functions that were made
        self._expected: dict[tuple, Compiling] = {}  # by strides
        self._unusual: dict[tuple, Callable] = {}
        self.dying: frozenset[int] = frozenset()
        self.homes: Mapping[int, int] = {}
        self.over: dict[int, int] = {}
        self._overwriting: dict[tuple, Self] = {}

    def finish(self) -> None:
        """Waits for the kernels that are expected. Raises RuntimeError where one is not compiled."""
        for compiling in [*self._expected.values()]:
            for binary in compiling.binaries:
                binary.result()

    def as_text(self) -> dict | None:
        """What `KeptRegion` needs, as far as calls have made it; None for a region that takes numbers."""
        if self.region.numbers:
            return None
        launches = [[list(map(list, strides)), launch_as_text(launch)] for strides, launch in [*self.launches.items()]]
        return {"device": str(self.device), "kernels": self.kernels, "launches": launches}

    # ------------------------------------------------------------------------------------------------ memory
    def writing_over(self, dying: frozenset[int], homes: Mapping[int, int] | None = None) -> Self:
        """The same region for calls in which these inputs die and share their memory with no other value: it writes
        outputs over as many of them as its kernels allow. homes: see `FusionExecutor.writing_over`."""
        homes = self.homes if homes is None else homes
        key = dying, tuple(sorted(homes.items()))
        known = self._overwriting.get(key)
        if known is None:
            known = self._overwriting[key] = copy.copy(self)
            known._overwriting, known._variants, known._unusual, known._usual = {}, {}, {}, None
            known._expected, known.launches = {}, {}
            known.dying, known.homes = dying, homes
            known.over = known._overwritable(self.usual_strides())
        return known

    def overwritten(self, strides: tuple) -> dict[int, int]:
        """By output, the input that it is written over for these strides."""
        if not self.over or strides == self.usual_strides():
            return self.over
        there = self._overwritable(strides)
        return {o: i for o, i in self.over.items() if there.get(o) == i}

    @abstractmethod
    def _overwritable(self, strides: tuple) -> dict[int, int]:
        """By output, the input that dies, or has a home for it, over which kernels may write it."""

    # ------------------------------------------------------------------------------------------------ calls
    def unusual(self, *args) -> list[torch.Tensor]:
        """A call with inputs that are not aligned as the kernels expect, or while another device is current."""
        return self._unusually(args, False)

    def wide(self, *args) -> list[torch.Tensor]:
        """A call with sizes that need 64-bit indices."""
        return self._unusually(args, True)

    def _unusually(self, args: tuple, wide: bool) -> list[torch.Tensor]:
        tensors, numbers = self._parted(args)
        strides, aligned = self._strides(tensors, numbers), tuple(t.data_ptr() % ALIGNMENT == 0 for t in tensors)
        run = self._unusual.get((strides, aligned, wide))
        if run is None:
            run = self._unusual[strides, aligned, wide] = self._for_any_inputs(strides, aligned, wide)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            return run(*args)

    @abstractmethod
    def _for_any_inputs(self, strides: tuple, aligned: tuple[bool, ...], wide: bool) -> Callable:
        """The function for inputs of these strides that begin at multiples of 16 bytes where `aligned` says so."""
