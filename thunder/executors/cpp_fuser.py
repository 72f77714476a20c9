"""The executor cpp: regions of operations on the CPU as C++ kernels of `thunder.kernels`.

    thunder.jit(model, executors=["cpp"])

Before: `t0 = ltorch.mul(a, b)`, `t1 = ltorch.softmax(t0, -1)`. After: `[t1] = Kernels0(a, b)`, the two operations as
comments below; `thunder.last_kernels(jitted)` shows the kernels. PyTorch runs matrix products, attention, random
operations, and regions that it is predicted to run faster. The system's C++ compiler makes the kernels; without one
PyTorch runs everything.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from thunder import compat
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import nbytes, tensors_in
from thunder.core.codegen import compile_source
from thunder.core.proxies import TensorProxy, element_count
from thunder.core.regions import NativeKernels, Region
from thunder.core.signals import interrupts
from thunder.core.symbol import BoundSymbol, Names, OpTags
from thunder.core.trace import Trace
from thunder.errors import warn_user
from thunder.executors.triton_kernels.by_sizes import BySizes
from thunder.executors.triton_kernels.expected import expected_strides
from thunder.executors.triton_kernels.launcher import function_text
from thunder.extend import register_executor
from thunder.extend.fusion import FusionExecutor, TooLarge, Unfused, computing, fusible
from thunder.kernels import cpp, lower, schedule, windows
from thunder.kernels.functions import FUNCTIONS
from thunder.kernels.ir import Program
from thunder.kernels.machine import Machine
from thunder.kernels.measure import MEASURED_WINDOW, machine
from thunder.kernels.sizes import Undecided, atoms_of, text, tuple_text
from thunder.ops.torch_types import to_torch_dtype

HALVED = 4  # operations of a region, beyond which its halves are tried where PyTorch is predicted to be faster


class CppFuser(FusionExecutor):
    """Takes operations that decompose into the rows of `thunder.kernels.lower`, on the CPU.

    always: whether it runs regions that PyTorch is predicted to run faster as well.
    """

    needs_sizes = False
    capturable = owns_results = compiles_ahead = keeps_kernels = True

    def __init__(self, name: str, always: bool = False):
        super().__init__(name, version=torch.__version__)
        self.always = always
        # by the names of a program: the strides of the forward's values, which its backward reads
        self._strides: weakref.WeakKeyDictionary[Names, dict[str, tuple]] = weakref.WeakKeyDictionary()

    def unavailable(self) -> str | None:
        return cpp.unavailable()

    def runs_on(self, kinds: set[str]) -> bool:
        return "cpu" in kinds and cpp.unavailable() is None

    def can_fuse(self, operation: BoundSymbol) -> bool:
        tensors = [p for p in (*operation.inputs, *operation.outputs) if isinstance(p, TensorProxy)]
        return (
            bool(tensors)
            and all(t.device.type == "cpu" for t in tensors)
            and fusible(operation, numbers=True)
            and lower.lowers(operation, _computes, numbers=True)
            and cpp.unavailable() is None
        )

    def is_cheap(self, operation: BoundSymbol) -> bool:
        """Whether recomputing it takes less than reading it: nothing that reduces, and no exponential."""
        return all(_is_cheap(p) for p in lower.primitives(operation))

    def keeps(self, operation: BoundSymbol) -> bool:
        """On a CPU a pass over memory costs much, and memory little."""
        return operation.outputs[0].device.type == "cpu"

    def should_fuse(self, region: Region) -> bool:
        return bool(region.outputs) if self.always else len(computing(region)) > 1

    def fuse(self, region: Region, counter: int) -> BoundSymbol:
        """A region as one call of kernels for the CPU. Raises Unfused where PyTorch is predicted to be faster, TooLarge
        where halves of the region may be worth it."""
        try:
            run = self.once(region, lambda: KernelRegion(region))
        except Undecided:
            raise Unfused("a kernel would have to know more of sizes that stay symbolic") from None
        if run.seconds >= run.eager_seconds and not self.always:
            if len(computing(region)) > HALVED:
                raise TooLarge
            raise Unfused("PyTorch's kernels are predicted to be faster")
        return self.operation_of(region, f"Kernels{counter}", run)

    def expect(self, trace: Trace) -> None:
        """Begins to compile kernels for the strides that inputs of regions will have."""
        self._begin(trace, dict(trace.info.strides))

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        regions = self._begin(forward, strides)
        if backward is not None:
            regions += self._begin(backward, strides)
        for region in regions:
            region.finish()

    def _begin(self, trace: Trace, strides: dict[str, tuple]) -> list[KernelRegion]:
        known = self._strides.setdefault(trace.names, dict(strides))
        regions = []
        for region, inputs in expected_strides(trace, known, KernelRegion):
            region.expect(inputs)
            regions.append(region)
        return regions


def _computes(primitive: BoundSymbol) -> bool:
    """Whether the target has what a primitive is lowered to: scans of rows; others are PyTorch's."""
    if lower.is_scan(primitive):
        a, dim = primitive.args[:2]
        return lower.is_stored_scan(primitive) and dim % len(a.shape) == len(a.shape) - 1
    name = lower.NAMES.get(primitive.sym.name, primitive.sym.name)
    return name not in FUNCTIONS or cpp.computes(name)


def _is_cheap(primitive: BoundSymbol) -> bool:
    row = lower.ROWS[primitive.sym.id]
    function = FUNCTIONS.get(primitive.sym.name)
    return (
        row not in lower.DEAR_ROWS
        and (function is None or function.rate == "simple")
        and not lower.is_formula(primitive)
    )


class KernelRegion(BySizes):
    """A region as a function from its inputs to the list of its outputs, which have PyTorch's strides.

    Kernels are compiled for the strides of inputs. program: in the IR. seconds, eager_seconds: predicted, for row-major
    inputs, of the kernels and of PyTorch's. Raises Unfused where no kernels are made, and Undecided where they would
    have to know more of symbolic sizes.
    """

    def __init__(self, region: Region):
        super().__init__(region)
        self.program: Program = lower.lowered(region, self.numbers, stores_scans=True)
        self.machine = machine()
        self._schedules: dict[tuple, tuple[list[schedule.Kernel], list[tuple]]] = {}
        self._texts: dict[tuple, str] = {}  # of what is compiled, by strides
        self._native: dict[tuple, NativeKernels] = {}  # by strides
        usual = self.usual_strides()
        try:
            kernels, _ = self.scheduled(usual)
            if region.numbers:
                self._emitted(usual)  # raises Undecided
        except schedule.TooComplex as error:
            raise Unfused(str(error)) from None
        self.seconds = sum(k.seconds for k in kernels) + self.machine.call
        self.eager_seconds = seconds_of_operations(region, self.machine)
        self._shown = usual

    def scheduled(self, strides: tuple) -> tuple[list[schedule.Kernel], list[tuple]]:
        """The kernels for inputs of these strides, and the strides of the results."""
        if strides not in self._schedules:
            of_buffers, layout = self.of_buffers(self.program, strides)
            threads = torch.get_num_threads()
            self._schedules[strides] = (
                schedule.scheduled(self.program, of_buffers, self.machine, threads), layout
            )  # fmt: skip
        return self._schedules[strides]

    @property
    def strides(self) -> list[tuple]:
        """Those of inputs that it was called with."""
        return [*self._variants]

    def layout(self, strides: tuple) -> list[tuple]:
        return self.scheduled(strides)[1]

    @property
    def kernels(self) -> int:  # type: ignore[override]
        return len(self.scheduled(self._shown)[0])

    @property
    def source(self) -> str:  # type: ignore[override]
        """The text of the kernels, without what all have in common."""
        return self._emitted(self._shown).text.removeprefix(cpp.PRELUDE).strip()

    @property
    def description(self) -> str:
        """The program in the IR, the schedule with its predictions, and the text."""
        kernels, _ = self.scheduled(self._shown)
        predicted = f"{1e6 * self.seconds:.1f} us predicted; PyTorch's operations {1e6 * self.eager_seconds:.1f} us"
        return f"{self.program}\n\n{schedule.describe(kernels)}\n{predicted}\n\n{self.source}"

    def _emitted(self, strides: tuple) -> cpp.Emitted:
        kernels, _ = self.scheduled(strides)
        return cpp.emitted(kernels, self.machine, len(self.region.inputs), len(self.region.outputs))

    # ---------------------------------------------------------------------------------------------- compiling
    def expect(self, strides: tuple) -> None:
        """Begins to compile kernels for inputs of these strides."""
        self._library(strides)

    def finish(self) -> None:
        """Waits for all kernels. Raises RuntimeError where one cannot be compiled."""
        for source in [*self._texts.values()]:
            compile_soon(source).result()

    def _library(self, strides: tuple) -> Future:
        if strides not in self._texts:
            self._shown = strides
            self._texts[strides] = self._emitted(strides).text
        return compile_soon(self._texts[strides])

    # ---------------------------------------------------------------------------------------------- calls
    def _first(self, key: tuple, args: tuple) -> Callable:
        """The function for arguments with these strides, compiled when they come first; PyTorch's operations where that
        fails."""
        try:
            emitted, library = self._emitted(key), self._library(key).result()
        except (RuntimeError, OSError, schedule.TooComplex, Undecided) as error:
            if interrupts(error):
                raise
            names = ", ".join(dict.fromkeys(b.sym.name for b in self.region.bound_symbols))
            warn_user(f"the executor cpp: PyTorch runs {names}: no kernel is compiled: {error}", UserWarning)
            return self.by_operations
        if not self.numbers.names:
            self._native[key] = self._compiled(emitted, library, key)
        return self._launch(emitted, library, key)

    def native(self) -> NativeKernels | None:
        return next(iter(self._native.values())) if len(self._native) == len(self._variants) == 1 else None

    def _compiled(self, emitted: cpp.Emitted, library: ctypes.CDLL, strides: tuple) -> NativeKernels:
        """Where no size is symbolic."""
        inputs, outputs = self.region.inputs, self.region.outputs

        def forms(tensors: Sequence[TensorProxy], strides: Sequence[tuple]) -> tuple[tuple, ...]:
            return tuple((t.shape, s, to_torch_dtype(t.dtype)) for t, s in zip(tensors, strides, strict=True))

        address = ctypes.cast(library.region, ctypes.c_void_p).value
        assert address is not None, "a compiled region has an address"
        return NativeKernels(
            address, forms(inputs, strides), forms(outputs, self.layout(strides)),  # type: ignore[arg-type]
            emitted.scratch, emitted.thread_scratch,  # type: ignore[arg-type]
        )  # fmt: skip

    def _launch(self, emitted: cpp.Emitted, library: ctypes.CDLL, strides: tuple) -> Callable:
        library.region.restype = None
        names = {"function": library.region, "by_operations": self.by_operations}
        return compile_source(self._launch_text(emitted, strides), "launch", names)

    def _launch_text(self, emitted: cpp.Emitted, strides: tuple) -> str:
        """The text of a function `launch` that allocates what kernels write, and calls them: `function`, in C."""
        layout, inputs = self.layout(strides), [f"in{i}" for i in range(len(strides))]
        sizes = [self.numbers.shape(o.shape) for o in self.region.outputs]  # type: ignore[union-attr]
        outputs = [f"out{i}" for i in range(len(sizes))]
        dtypes = [str(to_torch_dtype(o.dtype)).removeprefix("torch.") for o in self.region.outputs]  # type: ignore
        parameters, shared, own = [*inputs, *self.numbers.names], emitted.scratch, emitted.thread_scratch
        lines = self.derived(strides, atoms_of([shared, own, *(n for s in (*sizes, *layout) for n in s)]))
        lines += [f"{name} = {expression}" for name, expression in self.numbers.floats()]
        lines += [
            f"{o} = empty_strided({tuple_text(shape)}, {tuple_text(s)}, dtype={d})"
            for o, shape, s, d in zip(outputs, sizes, layout, dtypes, strict=True)
        ]
        lines.append("threads, status = get_num_threads(), c_int(0)")
        addresses = [f"{name}.data_ptr()" for name in (*inputs, *outputs)]
        if shared or own:
            lines.append(f"scratch = empty({text(shared)} + ({text(own)}) * threads, dtype=uint8)")
        addresses.append("scratch.data_ptr()" if shared or own else "0")
        for name, kind, values in (("sizes", "i64s", emitted.sizes), ("floats", "doubles", emitted.floats)):
            if values:
                lines.append(f"{name} = {kind}({', '.join(values)})")
            addresses.append(f"addressof({name})" if values else "0")
        lines += [
            f"function(pointers({', '.join(addresses)}), threads, byref(status))",
            f"return by_operations({', '.join(parameters)}) if status.value else [{', '.join(outputs)}]",
        ]
        names = ", ".join(sorted({"empty", "empty_strided", "get_num_threads", "uint8", *dtypes}))
        imports = [
            "import math", "from ctypes import addressof, byref, c_double, c_int, c_int64, c_void_p",
            f"from torch import {names}", f"pointers = c_void_p * {len(addresses)}",
            f"i64s, doubles = c_int64 * {len(emitted.sizes)}, c_double * {len(emitted.floats)}",
        ]  # fmt: skip
        return "\n".join([*imports, function_text("launch", parameters, lines)])

    def script_text(self, strides: tuple) -> str:
        emitted, count = self._emitted(strides), len(strides)
        return (
            f'from thunder.kernels import cpp\n\nSOURCE = r"""\n{emitted.text.removeprefix(cpp.PRELUDE).strip()}\n"""\n'
            "function = cpp.compiled(cpp.PRELUDE + SOURCE).region\nfunction.restype = None\n"
            f"by_operations = lambda *arguments: [*operations(*arguments[:{count}])]\n"
            f"{self._launch_text(emitted, strides)}\nkernel = launch"
        )


def seconds_of_operations(region: Region, on: Machine) -> float:
    """What PyTorch takes for the operations of a region, one after the other."""
    total, threads = 0.0, torch.get_num_threads()
    for operation in region.bound_symbols:
        if may_view(operation):
            total += on.view
            continue
        tensors = tensors_in((*operation.inputs, *operation.outputs))
        moved, elements = sum(map(nbytes, tensors)), max(map(element_count, tensors), default=1)
        where = "L2" if moved < on.caches[1] * threads else "memory"
        suffix = "16" if any(t.dtype.bytes == 2 for t in tensors) else ""
        function = operation.sym.fn
        name = operation.sym.name
        if isinstance(function, compat.OpOverload):
            name = function._schema.name.partition("::")[2]
        classes = [c + suffix for c in ({name} if name in on.eager else _classes(operation))]
        work = max((on.eager[c] for c in classes), default=0.0) * elements
        if lower.is_pool(operation):
            work *= windows.visits(operation) / (MEASURED_WINDOW * elements)
        call = max((on.eager_calls[c] for c in classes), default=on.call)
        total += call + max(work, moved * on.byte[where]) / (threads if elements > 32768 else 1)
    return total


def _classes(operation: BoundSymbol) -> set[str]:
    """The classes of `Machine.eager` that an operation is in."""
    primitives = lower.primitives(operation)
    classes = set()
    for p in primitives:
        function = FUNCTIONS.get(p.sym.name)
        if lower.is_scan(p):
            classes.add("scan")
        elif lower.is_scatter(p):
            classes.add("index_add")
        elif lower.is_pool(p):
            classes.add("pool")
        elif OpTags.REDUCTION_OP in p.sym.tags:
            is_of_rows = len(p.args[0].shape) - 1 in p.args[1]
            classes.add("softmax" if len(primitives) > 4 else "rows" if is_of_rows else "columns")
        else:
            is_slow = function is not None and function.rate == "exp" or lower.is_formula(p)
            classes.add("function" if is_slow else "map")
    return classes


# ------------------------------------------------------------------------------------------------ the compiler

_lock = threading.Lock()
_pool: list[ThreadPoolExecutor] = []
_compiling: dict[str, Future[Any]] = {}


def compile_soon(source: str) -> Future[Any]:
    """The shared object of a text. It is compiled once in a process, unless that fails: then the next one that asks
    tries again."""
    key = cpp.key_of(source)
    with _lock:
        known = _compiling.get(key)
        if known is None or known.done() and (known.cancelled() or known.exception() is not None):
            if not _pool:
                _pool.append(ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="thunder_cpp"))
            known = _compiling[key] = _pool[0].submit(_compiled, source)
        return known


def _compiled(source: str) -> ctypes.CDLL:
    """In a thread of the pool, which Python waits for at the end of the process: nothing is compiled by then."""
    if not threading.main_thread().is_alive():
        raise RuntimeError("the process ends")
    return cpp.compiled(source)


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _pool.clear()
    for key in [k for k, future in _compiling.items() if not future.done()]:
        del _compiling[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

cpp_fuser = CppFuser("cpp")
register_executor(cpp_fuser)
