"""Regions of Inductor with symbolic sizes: compiled for strides in terms of sizes, and for all sizes that the guards of
Inductor allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder import compat
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.regions import Region
from thunder.errors import MissingImplementationError
from thunder.executors.triton_kernels.strides import fit, strides_in_words
from thunder.kernels.numbers import Numbers
from thunder.kernels.sizes import Extent, value_of
from thunder.ops.infer import run_line

MOST = 8  # variants of a region; what fits none of so many runs by PyTorch's kernels
KNOWN = 1024  # sizes of which a variant remembers what holds for them
_ONE_AT_A_TIME = threading.Lock()  # Inductor's settings are the process's


class _Variant(NamedTuple):
    """state: the settings of PyTorch. strides: of the inputs, in terms of sizes. right: whether Inductor's guards hold
    for sizes. layout: strides of the results for sizes. sizes: by sizes so far, whether the results have PyTorch's
    strides."""

    state: tuple
    strides: tuple
    run: Callable
    right: Callable[[Sequence[int]], bool]
    layout: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    sizes: dict[tuple, bool]


class RegionOfSizes:
    """A region as a function from its inputs and sizes to the list of its outputs, which have PyTorch's strides and
    share no memory. `compilations` counts those of Inductor."""

    def __init__(self, region: Region):
        self.region, self.numbers = region, Numbers(region)
        self.shapes = [self.numbers.shape(p.shape) for p in region.inputs if isinstance(p, TensorProxy)]
        self.variants: list[_Variant] = []
        self.compilations = 0

    def __call__(self, *args) -> Sequence[torch.Tensor]:
        count = len(self.shapes)
        tensors, numbers = args[:count], args[count:]
        if any([t.is_neg() for t in tensors]):  # a negative of its memory's numbers, which kernels do not see
            tensors = tuple([t.resolve_neg() for t in tensors])
        state = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        strides, values = [t.stride() for t in tensors], self.numbers.values(numbers)
        for variant in self.variants:
            if (
                variant.state == state
                and all(fit(k, s, values) for k, s in zip(variant.strides, strides, strict=True))
                and (numbers in variant.sizes or variant.right(numbers))
            ):
                return self._run(variant, tensors, numbers)
        with _ONE_AT_A_TIME:
            if len(self.variants) >= MOST:
                with torch.no_grad():
                    return self._by_operations(*numbers, *tensors)
            self.variants.insert(0, self._compiled(state, tensors, numbers, values))
        return self._run(self.variants[0], tensors, numbers)

    def _run(self, variant: _Variant, tensors: Sequence[torch.Tensor], numbers: tuple) -> Sequence[torch.Tensor]:
        results = variant.run([*numbers, *tensors])
        as_expected = variant.sizes.get(numbers)
        if as_expected is None:
            if len(variant.sizes) >= KNOWN:
                variant.sizes.clear()
            as_expected = alike(results, variant.layout(numbers)) and apart(results, tensors)
            variant.sizes[numbers] = as_expected
        return results if as_expected else laid_out(results, variant.layout(numbers))

    def _compiled(self, state: tuple, tensors: Sequence[torch.Tensor], numbers: tuple, values) -> _Variant:
        """The region compiled for a class of sizes and strides, in which the numbers of this call are examples."""
        sizes = [*self.numbers.sizes, *dict.fromkeys(n for s in self.shapes for n in s if isinstance(n, Extent))]
        strides = tuple(
            strides_in_words(shape, t.stride(), values, sizes) for shape, t in zip(self.shapes, tensors, strict=True)
        )

        def described(numbers: Sequence[Any]) -> list[tuple]:
            values = self.numbers.values(numbers)
            return [
                ([value_of(n, values) for n in shape], [value_of(n, values) for n in s], t.dtype, t.device)
                for shape, s, t in zip(self.shapes, strides, tensors, strict=True)
            ]

        try:
            run, right, layout, wait = compat.compile_for_sizes(self._by_operations, numbers, described)
            wait()
        except Exception as error:
            names = ", ".join(dict.fromkeys(operation.sym.name for operation in self.region.bound_symbols))
            raise MissingImplementationError(
                f"Inductor does not compile a region of {names} for sizes that change: {error}\nLeave the executor "
                "inductor out, or use dynamic=False"
            ) from error
        self.compilations += 1
        return _Variant(state, strides, run, right, layout, {})

    def _by_operations(self, *args) -> list[torch.Tensor]:
        """Runs the region by PyTorch's functions."""
        numbers, tensors = args[: len(self.numbers.names)], args[len(self.numbers.names) :]
        values: dict[Proxy, object] = dict(zip(self.region.inputs, tensors, strict=True))

        def number(x: NumberProxy):
            return self.numbers.evaluate(x, numbers)

        for operation in self.region.bound_symbols:
            run_line(operation, values, number)
        return [values[o] for o in self.region.outputs]  # type: ignore[misc]


def apart(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether no result shares memory: Inductor merges equal results, and returns inputs for operations that change
    nothing."""
    memory = [t.untyped_storage().data_ptr() for t in results if t.numel()]
    return len(set(memory)) == len(memory) and {t.untyped_storage().data_ptr() for t in others if t.numel()}.isdisjoint(
        memory
    )


def laid_out(results: Sequence[torch.Tensor], strides: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return [
        torch.empty_strided(o.shape, s, dtype=o.dtype, device=o.device).copy_(o)
        for o, s in zip(results, strides, strict=True)
    ]


def alike(results: Sequence[torch.Tensor], strides: Sequence[Sequence[int]]) -> bool:
    """Whether results have these strides, in dimensions of more than one element."""
    return all(_layout(o.shape, o.stride()) == _layout(o.shape, s) for o, s in zip(results, strides, strict=True))


def _layout(shape: Sequence[int], strides: Sequence[int]) -> list:
    """The strides of dimensions of more than one element."""
    return [s for n, s in zip(shape, strides, strict=True) if n != 1] if 0 not in shape else []
