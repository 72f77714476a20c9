"""A region's functions by the strides of its inputs, and a region of a program from the disk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import map_structure
from thunder.core.regions import FusedFunction
from thunder.executors.triton_kernels.binary import Binary
from thunder.executors.triton_kernels.launcher import Launch
from thunder.runtime import disk_cache


class ByStrides(FusedFunction):
    """Calls the function for the strides of its inputs."""

    def __init__(self):
        self._variants: dict[tuple, Callable] = {}
        # whether tensors are like those of the last variant, which is asked in one call, and that variant
        self._usual: tuple[Callable, Callable] | None = None

    def __call__(self, *args) -> list[torch.Tensor]:
        """args: the inputs, and after them the sizes that stay symbolic."""
        usual = self._usual
        if usual is not None and usual[0](*args):
            return usual[1](*args)
        return self._by_strides(*args)

    def _by_strides(self, *args) -> list[torch.Tensor]:
        """Runs the variant for the strides of these arguments, and makes the check by which the next call takes it at
        once."""
        tensors, numbers = self._parted(args)
        if any([t.is_neg() for t in tensors]):  # a negative of its memory's numbers, which kernels do not see
            return self(*map_structure(lambda x: x.resolve_neg() if isinstance(x, torch.Tensor) else x, args))
        key = self._strides(tensors, numbers)
        run = self._variants.get(key)
        if run is None:
            run = self._variants[key] = self._first(key, args)
            check = self._check(key, tensors)
            self._usual = None if check is None else (check, run)
        return run(*args)

    def called(self) -> dict[str, Callable]:
        """What a function for some strides calls in its place, by name."""
        names = "unusual", "wide", "by_operations"
        return {name: getattr(self, name) for name in names}

    def _parted(self, args: tuple) -> tuple[tuple, tuple]:
        """The tensors, and the numbers behind them."""
        return args, ()

    def _strides(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> tuple:
        return tuple([t.stride() for t in tensors])

    @abstractmethod
    def _first(self, key: tuple, args: tuple) -> Callable:
        """The function for new strides, which a call with these arguments has."""

    def by_operations(self, *args) -> list[torch.Tensor]:
        """The call by PyTorch's operations."""
        raise NotImplementedError

    def _check(self, key: tuple, tensors: Sequence[torch.Tensor]) -> Callable | None:
        """Whether a call fits the kernels for some strides, as a function of its arguments; None where PyTorch has
        no check of a list of tensors."""
        return compat.native_batch_check(tensors, [t.shape for t in tensors], strides=True)


def own_results(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results of which each has memory of its own."""
    memory, own = {t.untyped_storage().data_ptr() for t in inputs}, []
    for result in results:
        own.append(result.clone() if result.untyped_storage().data_ptr() in memory else result)
        memory.add(own[-1].untyped_storage().data_ptr())
    return own


def launch_as_text(launch: Launch) -> dict[str, Any]:
    """What JSON says of a launch. Machine code is in the cache, under its key."""
    kernels = {n: Path(k.path).stem if isinstance(k, Binary) else list(k) for n, k in launch.kernels.items()}
    return {
        "text": launch.text, "dtypes": {n: str(d).removeprefix("torch.") for n, d in launch.objects.items()},
        "kernels": kernels,
    }  # fmt: skip


class KeptRegion(ByStrides):
    """A region of a program from the disk: launches for the strides that were seen, without what made them.

    Other inputs (strides, alignment, a device that is not current) are given to PyTorch's operations, `operations`,
    after `unusual` was called once.
    """

    def __init__(self, said: dict, operations: Callable, unusual: Callable[[], None]):
        super().__init__()
        self.device = torch.device(said["device"])
        self.kernels, self.is_usual = said["kernels"], True
        self._operations, self._unusual = operations, unusual
        self._launches = {tuple(map(tuple, strides)): launch for strides, launch in said["launches"]}

    def _first(self, key: tuple, args: tuple) -> Callable:
        said = self._launches.get(key)
        launch = None if said is None else _launch_of(said)
        return self.unusual if launch is None else launch.function(self.device, self.called())

    def unusual(self, *args) -> list[torch.Tensor]:
        if self.is_usual:
            self.is_usual = False
            self._unusual()
        return self.by_operations(*args)

    wide = unusual

    def by_operations(self, *args) -> list[torch.Tensor]:
        return own_results(self._operations(*args), args)


def _launch_of(said: dict) -> Launch | None:
    """None where machine code is no longer there."""
    kernels: dict[str, Any] = {}
    for name, kernel in said["kernels"].items():
        if isinstance(kernel, str):
            entry = disk_cache.load(kernel)
            if entry is None:
                return None
            kernels[name] = Binary(path=str(entry[1]), **entry[0])
        else:
            kernels[name] = tuple(kernel)
    return Launch(said["text"], {n: getattr(torch, d) for n, d in said["dtypes"].items()}, kernels)
