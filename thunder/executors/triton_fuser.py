"""The Triton fuser: generates Triton kernels for regions of elementwise operations, reductions and data movement.

    thunder.jit(model, executors=["triton_fuser"])

Before: `t0 = ltorch.mul(a, b)`, `t1 = ltorch.softmax(t0, -1)`. After: `[t1] = TritonFusion0(a, b)`, the two operations
as comments below; the text of the kernel is `thunder.examine.get_fusions(trace)[0][1].source`. PyTorch runs matrix
products, attention and, unless `rng="fused"`, random operations. The compiler is in `thunder/executors/triton_kernels`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from thunder.analysis.aliases import may_view
from thunder.analysis.cost import bytes_moved, nbytes, region_bytes, tensors_in
from thunder.core.proxies import Proxy, TensorProxy, UnbackedNumber, has_numbers
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol, Names, OpTags
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.executors.thin_products import (
    is_thin_layer,
    is_thin_product,
    thin_layer,
    thin_product,
)
from thunder.executors.triton_kernels.by_strides import KeptRegion
from thunder.executors.triton_kernels.executor import TritonExecutor, runs_on
from thunder.executors.triton_kernels.expected import expected_strides
from thunder.executors.triton_kernels.functions import FUNCTIONS
from thunder.executors.triton_kernels.last_sums import without_last_sums
from thunder.executors.triton_kernels.launch import FusedRegion
from thunder.executors.triton_kernels.launcher import interpreting
from thunder.executors.triton_kernels.values import is_map, primitive
from thunder.extend import add_default_executor_of_gpus, register_executor
from thunder.extend.fusion import TooLarge, Unfused, computing, fusible
from thunder.kernels.sizes import Undecided
from thunder.ops import ltorch, prims
from thunder.ops.backward import index_backward
from thunder.ops.families.random import uniform_philox
from thunder.ops.rules import products
from thunder.ops.torch_types import to_torch_device
from thunder.options import compile_option

SHARED = 1 << 26  # bytes that a launch moves which others may share: a larger one is as fast alone
DEAR = 40  # instructions for an element, of a table of sines
TRITON_AUTOTUNE = compile_option(
    "triton_autotune", bool, False,
    "whether blocks of kernels are chosen by measuring when a region runs first, and kept on the disk",
    owner="triton_fuser",
)  # fmt: skip


class TritonFuser(TritonExecutor):
    """Takes operations that decompose into the primitives of `triton_kernels.values`, on one GPU; under Triton's
    interpreter on any device.

    autotune: block sizes are measured when a region runs for the first time: `thunder.jit(..., triton_autotune=True)`.
    """

    needs_sizes = False
    capturable = True
    owns_results = takes_padding = adds_biases = True

    def __init__(self, name: str, *, autotune: bool = False, **options):
        super().__init__(name, **options)
        self.autotune = autotune
        self._tuning: TritonFuser | None = None
        self._plans: TritonFuser | None = None
        # by the names of a program: the forward's, which its backward reads
        self._strides: weakref.WeakKeyDictionary[Names, dict[str, tuple]] = weakref.WeakKeyDictionary()
        self.register_supported(ltorch.mm, self._takes_product, execution_transform=thin_product)
        self.register_supported(ltorch.linear, self._takes_layer, execution_transform=thin_layer)

    def configured(self, options) -> TritonFuser:
        if not options.get(TRITON_AUTOTUNE):
            return self
        if self._tuning is None:
            self._tuning = type(self)(self.name, autotune=True, version=self.version)
        return self._tuning

    def planned(self) -> TritonFuser:
        if self._plans is None:
            self._plans = _Plans(self.name, autotune=self.autotune, version=self.version)
        return self._plans

    def can_fuse(self, operation: BoundSymbol) -> bool:
        return (
            self.is_on_one(operation)
            and fusible(operation, numbers=True)
            and self.has_triton()
            and _in_primitives(operation)
        )

    def _takes_product(self, a: TensorProxy, b: TensorProxy) -> bool:
        return runs_on(a.device.name) and self.has_triton() and is_thin_product(a, b)

    def _takes_layer(self, x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
        return runs_on(x.device.name) and self.has_triton() and is_thin_layer(x, weight, bias)

    def is_cheap(self, operation: BoundSymbol) -> bool:
        """Elementwise operations are, but for tables of sines, which are stored once and not recomputed in each
        layer."""
        return not _reduces(operation) and not is_dear(operation)

    def should_fuse(self, region: Region) -> bool:
        """Not for one operation, unless PyTorch has no fast kernel for it. Several operations that only move data have
        to move fewer bytes as one."""
        found = computing(region)
        if len(found) > 1 or any(operation.sym in _ALONE for operation in found):
            return True
        kernels = [operation for operation in region.bound_symbols if not may_view(operation)]
        return len(kernels) > 1 and region_bytes(region) < sum(map(bytes_moved, kernels))

    def shares_launch(self, region: Region, producer: Mapping[Proxy, BoundSymbol]) -> bool:
        """A small map over one iteration space, or sums of partial sums. Not a single operation on a product."""
        found = computing(region)
        tensors = tensors_in((*region.inputs, *region.outputs))
        return (
            bool(found)
            and has_numbers([t.shape for t in tensors]) is False
            and len({math.prod(o.shape) for o in region.outputs if isinstance(o, TensorProxy)}) == 1
            and sum(map(nbytes, tensors)) <= SHARED
            and all(_is_map(o) or o.sym is prims.sum_of_partials for o in region.bound_symbols)
            and not any(
                i in producer and products.in_float32.of(producer[i].sym) is not None
                for i in region.inputs
                if len(found) == 1
            )
        )

    def cut_last(self, region: Region, names: Names) -> list[Region]:
        """The sums of partial sums, which have kernels of their own, and the maps of these sums."""
        if has_numbers([t.shape for t in tensors_in((*region.inputs, *region.outputs))]):
            return []
        try:
            return without_last_sums(region, names, _reduces, _is_map, lambda r: self.scheduled(r).partial_sums)
        except (TooLarge, Undecided):
            return []

    def scheduled(self, region: Region) -> FusedRegion:
        device = next(o.device for o in region.outputs if isinstance(o, TensorProxy))
        return self.once(region, lambda: self.made_of(region, to_torch_device(device)))

    def fuse(self, region: Region, counter: int) -> BoundSymbol | None:
        try:
            run = self.scheduled(region)
        except Undecided:
            raise Unfused("a kernel would have to know more of sizes that stay symbolic") from None
        return self.register_temporary_operation(
            f"TritonFusion{counter}",
            run,
            inputs=(*region.inputs, *region.numbers),
            outputs=region.outputs,
            bsyms=region.bound_symbols,
        )

    def made_of(self, region: Region, device) -> FusedRegion:
        return FusedRegion(region, device, self.autotune)

    def writing_over(
        self, function: Callable, dying: Sequence[int], homes: Mapping[int, int] | None = None
    ) -> tuple[Callable, dict[int, int]] | None:
        found = function.writing_over(frozenset(dying), homes) if isinstance(function, FusedRegion) else None
        return (found, found.over) if found is not None and found.over else None

    def expect(self, trace: Trace) -> None:
        """Compiles kernels in the background, for the strides that inputs of regions will have."""
        known = self._strides.setdefault(trace.names, dict(trace.info.strides))
        for region, strides in expected_strides(trace, known, FusedRegion):
            region.expect(strides)

    compiles_ahead = keeps_kernels = True

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        for trace in (forward, backward):
            for operation in trace.bound_symbols if trace is not None else ():
                if isinstance(region := operation.sym.fn, FusedRegion):
                    region.finish()

    def as_text(self, function: Callable) -> dict | None:
        return function.as_text() if isinstance(function, FusedRegion) else None

    def from_text(self, said: dict, operations: Callable, unusual: Callable[[], None]) -> KeptRegion:
        return KeptRegion(said, operations, unusual)


class _Plans(TritonFuser):
    """Generates kernels without compiling them, for plans."""

    def has_triton(self) -> bool:
        return True

    def made_of(self, region: Region, device) -> FusedRegion:
        return FusedRegion(region, device, planned=True)


_ALONE = {uniform_philox, prims.sum_of_partials, index_backward}  # that PyTorch has no kernel for, or sorts for


def _in_primitives(operation: BoundSymbol) -> bool:
    """Whether an operation, or each one of its decomposition, is a primitive of kernels."""
    if primitive(operation):
        return True
    if operation.sym.decomposition is None:
        return False
    if not all(isinstance(p, (TensorProxy, UnbackedNumber)) for p in (*operation.inputs, *operation.outputs)):
        return False
    operations = operation.subsymbols
    # an operation without a decomposition returns its input, which a kernel would copy
    return bool(operations) and all(fusible(sub, numbers=True) and _in_primitives(sub) for sub in operations)


def _is_map(operation: BoundSymbol) -> bool:
    """Whether each element of the results depends on elements at the same place, and on numbers, only."""
    if operation.sym.reshapes:
        return True
    return is_map(operation) if primitive(operation) else all(map(_is_map, operation.subsymbols))


def _reduces(operation: BoundSymbol) -> bool:
    return (
        OpTags.REDUCTION_OP in operation.sym.tags
        or not primitive(operation)
        and any(map(_reduces, operation.subsymbols))
    )


def is_dear(operation: BoundSymbol) -> bool:
    if primitive(operation):
        return operation.sym.name in FUNCTIONS and FUNCTIONS[operation.sym.name].work >= DEAR
    return any(map(is_dear, operation.subsymbols))


def _is_default() -> bool:
    """Whether it is a default executor: where PyTorch is built for CUDA, and Triton does not interpret."""
    return torch.version.cuda is not None and has_triton() and not interpreting()


triton_fuser = TritonFuser("triton_fuser", version=torch.__version__)
register_executor(triton_fuser)
add_default_executor_of_gpus(triton_fuser, here=_is_default())
