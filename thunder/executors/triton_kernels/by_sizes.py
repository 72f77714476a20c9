"""A region's functions by the strides of its inputs in terms of sizes, where sizes stay symbolic."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.core.codegen import compile_source
from thunder.core.proxies import TensorProxy
from thunder.core.regions import KernelScript, Region
from thunder.executors.triton_kernels.by_strides import ByStrides, own_results
from thunder.executors.triton_kernels.launcher import function_text
from thunder.executors.triton_kernels.strides import fit, fits_text, ordered_like, stride_atoms, strides_in_words
from thunder.kernels.index import strides_of
from thunder.kernels.ir import Buffer, Program
from thunder.kernels.layout import layout_of
from thunder.kernels.numbers import Numbers
from thunder.kernels.sizes import Atom, Extent, atoms_of, factor_text, hint, value_of
from thunder.ops.infer import run_line

GUESSES = 2  # of how an input's strides follow from sizes, before they are numbers that kernels are given


class BySizes(ByStrides):
    """Takes the numbers of a region behind its tensors. Kernels are made once for all sizes, for strides in terms of
    sizes."""

    def __init__(self, region: Region):
        super().__init__()
        self.region = region
        self.numbers = Numbers(region)
        self.shapes = [self.numbers.shape(p.shape) for p in region.inputs if isinstance(p, TensorProxy)]

    def _parted(self, args: tuple) -> tuple[tuple, tuple]:
        count = len(self.shapes)
        return args[:count], args[count:]

    def _by_strides(self, *args) -> list[torch.Tensor]:
        if assumed := self.numbers.assumed():
            values = self.numbers.values(self._parted(args)[1])
            if any(values[name] < least for name, least in assumed):
                return self.by_operations(*args)
        return super()._by_strides(*args)

    def _strides(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> tuple:
        """The strides of the inputs in terms of the sizes: those of existing kernels, where they fit."""
        strides = tuple([t.stride() for t in tensors])
        if not numbers:
            return strides
        values = dict(self.numbers.values(numbers))
        values |= {f"s{i}_{d}": n for i, each in enumerate(strides) for d, n in enumerate(each)}
        for known in self._variants:
            if all(fit(k, s, values) for k, s in zip(known, strides, strict=True)):
                return known
        sizes = [*self.numbers.sizes, *dict.fromkeys(n for s in self.shapes for n in s if isinstance(n, Extent))]

        def number(i: int) -> Callable[[int], Extent] | None:
            guesses = {known[i] for known in self._variants}
            if len(guesses) < GUESSES:
                return None
            return lambda d: Extent.of(Atom(f"s{i}_{d}", 1, strides[i][d]))

        return tuple(
            strides_in_words(shape, s, values, sizes, number(i))
            for i, (shape, s) in enumerate(zip(self.shapes, strides, strict=True))
        )

    def _check(self, key: tuple, tensors: Sequence[torch.Tensor]) -> Callable | None:
        """Whether a call fits the kernels for some strides, as a function of its arguments; None where PyTorch has
        no check of a list of tensors."""
        count = len(tensors)
        if not self.numbers.assumed() and all(
            isinstance(n, int) for shape, s in zip(self.shapes, key, strict=True) for n in (*shape, *s)
        ):
            check = compat.native_batch_check(tensors, [t.shape for t in tensors], strides=True)
            if check is None or not self.numbers.names:
                return check
            return lambda *args: check(*args[:count])
        names = [f"in{i}" for i in range(count)]
        tests = [f"{name} >= {least}" for name, least in self.numbers.assumed()]
        tests += [
            f"{name}.is_contiguous()" if s == strides_of(shape) else fits_text(name, s)
            for name, s, shape in zip(names, key, self.shapes, strict=True)
        ]
        lines = [*self.derived(key), f"return {' and '.join(tests)}"]
        return compile_source(function_text("fits", [*names, *self.numbers.names], lines), "fits", {"math": math})

    def derived(self, key: tuple, atoms: Iterable[Atom] = ()) -> list[str]:
        """The lines of Python that compute the arguments of kernels for some strides beside the sizes. atoms: those of
        the kernels, which may be quotients."""
        own = [name for strides in key for name in stride_atoms(strides)]
        return [
            *(f"{name} = {expression}" for name, expression in self.numbers.derived()),
            *(f"{name} = in{name[1:].replace('_', '.stride(')})" for name in own),
            *(f"{a.name} = -(-{factor_text(a.of[0])} // {a.of[1]})" for a in atoms if a.of is not None),
        ]

    def by_operations(self, *args) -> list[torch.Tensor]:
        """The call by PyTorch's operations."""
        tensors, numbers = self._parted(args)
        values: dict = dict(zip(self.region.inputs, tensors, strict=True))
        with torch.no_grad():
            for operation in self.region.bound_symbols:
                run_line(operation, values, lambda n: self.numbers.evaluate(n, numbers))
        return own_results([values[o] for o in self.region.outputs], tensors)

    def layout_for(self, strides: tuple, fakes: bool = True) -> list[tuple]:
        """The strides of the results for inputs of these strides, in terms of sizes."""
        if not self.numbers.names:
            return layout_of(self.region, strides, fakes=fakes)
        seen = [tuple(map(hint, s)) for s in strides]
        results = layout_of(self.region, seen, fakes=fakes, seen=self.numbers.seen)
        shapes = [self.numbers.shape(p.shape) for p in self.region.outputs if isinstance(p, TensorProxy)]
        return [ordered_like(shape, s) for shape, s in zip(shapes, results, strict=True)]

    def of_buffers(
        self, program: Program, strides: tuple, fakes: bool = True
    ) -> tuple[dict[Buffer, tuple], list[tuple]]:
        """The strides of a program's inputs and outputs, for inputs of these strides; and those of the results."""
        layout = self.layout_for(strides, fakes)
        known = dict(zip(program.inputs, strides, strict=True))
        outputs = [s.buffer for s in program.stores if s.buffer.kind == "output"]
        return known | {b: layout[b.number] for b in outputs}, layout

    def script(self, numbers: Sequence[Any]) -> KernelScript:
        strides = next(reversed(self._variants), None) or self.usual_strides()
        values = {a.name: a.hint for a in atoms_of([n for s in strides for n in s])} | {**self.numbers.values(numbers)}
        return KernelScript(self.script_text(strides), [tuple(value_of(n, values) for n in s) for s in strides])

    @abstractmethod
    def script_text(self, strides: tuple) -> str:
        """The text of a `KernelScript` for inputs of these strides."""

    def usual_strides(self) -> tuple:
        """The expected strides of inputs: row-major ones."""
        return tuple(map(strides_of, self.shapes))
