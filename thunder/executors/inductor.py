"""The inductor executor: regions of operations as kernels that PyTorch's Inductor generates, C++ on the CPU and Triton
on GPUs.

    thunder.jit(model, executors=["inductor"])

Before: `t0 = ltorch.mul(a, b)`, `t1 = ltorch.sin(t0)`. After: `[t1] = Inductor0(a, b)`, the two operations as comments
below. A region goes to Inductor as a graph of ATen operations, without Dynamo and AOTAutograd, whose results are in the
trace already. PyTorch runs matrix products and attention, for which Inductor calls it too. So the regions between them
are equal in all layers of a model, and are compiled once. PyTorch also runs lookups, whose kernels would end the
process for a bad index rather than raise IndexError, and random operations, so that seeds keep their meaning. The
executor `torchcompile` takes the products as well: its regions are as large as those of torch.compile."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.analysis.lifetimes import first_uses
from thunder.core.dtypes import COMPLEX
from thunder.core.proxies import Proxy, TensorProxy, has_numbers, numbers_in
from thunder.core.regions import FusedFunction, Region
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.errors import MissingImplementationError
from thunder.executors.inductor_joins import joined_by_parts
from thunder.executors.inductor_sizes import RegionOfSizes, alike, apart, laid_out
from thunder.executors.torchex import torch_ex
from thunder.extend import register_executor
from thunder.extend.fusion import FusionExecutor, computing, fusible, has_data_dependent_sizes
from thunder.ops.infer import run_line
from thunder.ops.registry import PRIMS
from thunder.ops.rules import effects, kernels
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.options import CXX_COMPILER, SEARCH_PATH
from thunder.runtime import background

_COMPILERS = ("g++", "clang++", "c++", "cl")


class InductorExecutor(FusionExecutor):
    """label: the name of its regions. products: whether regions contain matrix products and attention."""

    needs_sizes = False
    capturable = owns_results = permits = compiles_ahead = True

    def __init__(self, name: str, label: str, products: bool):
        super().__init__(name, version=torch.__version__)
        self.label, self.products = label, products
        self._last: Callable[[], _Program | None] = _nothing

    def unavailable(self) -> str | None:
        if _missing("cpu") is None or (torch.cuda.is_available() and _missing("cuda") is None):
            return None
        return _missing("cpu")

    def can_fuse(self, operation: BoundSymbol) -> bool:
        """`Executor.can_fuse`: operations on tensors of one device for which Inductor has a compiler, and whose sizes
        it knows."""
        if (
            not fusible(operation, numbers=True)
            or has_data_dependent_sizes(operation)
            or not _is_of_sizes(operation)
            or not all(isinstance(p, TensorProxy) for p in (*operation.inputs, *operation.outputs))
        ):
            return False
        if torch_ex.implementation(operation) is None or not self._computes(operation):
            return False
        devices = {p.device.name for p in (*operation.inputs, *operation.outputs)}
        return len(devices) == 1 and _missing(next(iter(devices)).partition(":")[0]) is None

    def _computes(self, operation: BoundSymbol) -> bool:
        """Whether an operation, or each one of its decomposition, computes, reduces or moves elements at places that do
        not depend on data: Inductor writes loops for that."""
        symbol = operation.sym
        if (
            kernels.no_loop_of_inductor.of(symbol)
            or effects.checks_data.holds(operation)
            or OpTags.OPAQUE in symbol.tags
            or any(p.dtype.category == COMPLEX for p in (*operation.inputs, *operation.outputs))
        ):
            return False
        if OpTags.MATMUL_OP in symbol.tags:
            return self.products
        is_kernel = symbol.is_prim and symbol.decomposition is not None
        if symbol.id in _LEAVES or symbol.elementwise or is_kernel or symbol.tags & _LOOPS:
            return True
        return (
            symbol.decomposition is not None
            and bool(operation.subsymbols)
            and all(fusible(sub, numbers=True) and self._computes(sub) for sub in operation.subsymbols)
        )

    def keeps(self, operation: BoundSymbol) -> bool:
        """On a CPU a pass over memory costs much, and memory little."""
        return operation.outputs[0].device.type == "cpu"

    def should_fuse(self, region: Region) -> bool:
        """Not for views and copies alone, nor for a single product or other operation, which PyTorch runs as fast."""
        return len(computing(region)) > 1

    def fuse(self, region: Region, counter: int) -> BoundSymbol:
        run = self.once(region, lambda: RegionOfSizes(region) if region.numbers else InductorRegion(region))
        return self.operation_of(region, f"{self.label}{counter}", run)

    def expect(self, trace: Trace) -> None:
        """On a GPU, regions are compiled when they run: Inductor waits for Triton's compiler itself."""
        regions = {
            operation.sym.fn
            for operation in trace.bound_symbols
            if isinstance(operation.sym.fn, InductorRegion) and operation.outputs[0].device.type == "cpu"
        }
        of_sizes = any(isinstance(operation.sym.fn, RegionOfSizes) for operation in trace.bound_symbols)
        if len(regions) > 1 and not of_sizes:
            before = self._last()
            program = _Program(trace, before if before is not None and before.trace.names is trace.names else None)
            trace.info.compiled[trace.name] = program
            self._last = weakref.ref(program)
            for region in regions:
                region.program = self._last

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        state, before = (_threads(), _deterministic()), None
        traces = [trace for trace in (forward, backward) if trace is not None]
        if any(isinstance(b.sym.fn, RegionOfSizes) for trace in traces for b in trace.bound_symbols):
            raise MissingImplementationError("Inductor compiles regions of symbolic sizes when they run")
        for trace in traces:
            before = _Program(trace, before)
            before.compile_ahead(state, strides)

    def writing_over(
        self, function: Callable, dying: Sequence[int], homes: Mapping[int, int] | None = None
    ) -> tuple[Callable, dict[int, int]] | None:
        overwriting = function.writing_over(dying) if isinstance(function, InductorRegion) else None
        return (overwriting, overwriting.over) if overwriting is not None and overwriting.over else None


def _is_of_sizes(operation: BoundSymbol) -> bool:
    """Whether the symbolic numbers in an operation are sizes, which are at least 2."""
    if not has_numbers((operation.args, operation.kwargs, operation.output)):
        return True
    numbers = numbers_in((operation.args, operation.kwargs, operation.output), [])
    return all(n.decisions.is_size(name) for n in numbers for name in n.expression.symbols())


def _nothing() -> None:
    """A weak reference to nothing."""


_LEAVES = {symbol.id for symbol in PRIMS.values()}
_LOOPS = {OpTags.SHAPE_OP, OpTags.REDUCTION_OP, OpTags.VIEW}


class InductorRegion(FusedFunction):
    """A region as a function from its inputs to the list of its outputs, which have PyTorch's strides and share no
    memory.

    Inductor compiles kernels for the strides of inputs and the number of threads; `compilations` counts that. over: by
    place of an output, the place of the input that it may be written over; Inductor decides when it knows the strides.
    program: the last program with the region. A call of one of its regions compiles all of them, by as many C++
    compilers at a time as Inductor allows.
    """

    def __init__(self, region: Region, over: dict[int, int] | None = None):
        self.region, self.over = region, over or {}
        self.compilations = 0
        self._variants: dict[tuple, Callable] = {}
        # for what came in first: a check of tensors, and what runs
        self._usual: dict[tuple, tuple[Callable, Callable]] = {}
        self._overwriting: dict[tuple, InductorRegion] = {}
        self.program: Callable[[], _Program | None] = _nothing
        self._begun: dict[tuple, tuple] = {}  # by the keys of `_variants`

    @property
    def source(self) -> str:  # type: ignore[override]
        """The text of Inductor's kernels, for all strides so far."""
        return "\n\n".join(dict.fromkeys(compat.inductor_source(run) for run, *_ in [*self._begun.values()]))

    def writing_over(self, dying: Sequence[int]) -> InductorRegion:
        """The same region for calls in which the inputs at these places die and share their memory with no other value.
        None on a GPU, where the allocator reuses freed memory at no cost."""
        # by which operation first: what is read late, where results are made, has the better chance
        first = first_uses(self.region.bound_symbols)
        late = sorted(dying, key=lambda i: -first.get(self.region.inputs[i], 0))
        over: dict[int, int] = {}
        for o, out in enumerate(self.region.outputs):
            if isinstance(out, TensorProxy) and out.device.type == "cpu":
                source = next(
                    (i for i in late if i not in over.values() and _size(self.region.inputs[i]) == _size(out)), None
                )
                over |= {o: source} if source is not None else {}
        return self._overwriting.setdefault(tuple(over.items()), InductorRegion(self.region, over))

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        state = _threads(), _deterministic()
        fits, run = self._usual.get(state, _NONE)
        return run([*tensors]) if fits(*tensors) else self._unusual(tensors, state)

    def _unusual(self, tensors: Sequence[torch.Tensor], state: tuple) -> Sequence[torch.Tensor]:
        """A call with strides that may be new."""
        if any([t.is_neg() for t in tensors]):  # a negative of its memory's numbers, which kernels do not see
            return self(*[t.resolve_neg() for t in tensors])
        key = (*state, *[t.stride() for t in tensors])
        run = self._variants.get(key)
        if run is None:
            with _ONE_AT_A_TIME:
                if (run := self._variants.get(key)) is None:
                    program, self.program = self.program(), _nothing
                    if program is not None:
                        program.begin(state, self, tensors)
                    check = compat.tensor_batch_check(tensors, [t.shape for t in tensors], strides=True)
                    run, results = self._compiled_for(key, tensors)
                    self._variants[key] = run
                    self._usual.setdefault(state, (check, run))
                    return results
        return run([*tensors])

    def begin(self, key: tuple, tensors: Sequence[torch.Tensor]) -> tuple[Callable, list[tuple], Callable]:
        """Starts the compilation for tensors like these. Returns the function that runs the code, the strides that
        PyTorch gives the results, and a function that waits for the compiler."""
        if key not in self._begun:
            on_cpu = self.region.outputs[0].device.type == "cpu"
            run, results, wait = compat.compile_with_inductor(
                self._run_lines, tensors, self._reused(tensors), *([joined_by_parts] if on_cpu else ())
            )
            if any(r.dtype != to_torch_dtype(o.dtype) for r, o in zip(results, self.region.outputs, strict=True)):
                # its rules for fake tensors, and so Inductor's, say another type than its kernels: means of layer_norm
                # whose weight is of another type
                run = self._run_by_pytorch
            self._begun[key] = run, [r.stride() for r in results], wait
            self.compilations += 1
        return self._begun[key]

    def begin_elsewhere(self, key: tuple, tensors: Sequence[torch.Tensor]) -> tuple:
        """`begin` for a thread in the background: C++ compilers run in another process. Raises RuntimeError where they
        fail, and background.Ended."""
        if key not in self._begun:
            on_cpu = self.region.outputs[0].device.type == "cpu"
            rewritten = (joined_by_parts,) if on_cpu else ()
            with compat.compile_lock, _ONE_AT_A_TIME:
                job = compat.graph_job(self._run_lines, tensors, self._reused(tensors), *rewritten)
            if job is not None:
                background.elsewhere(job)
            with compat.compile_lock, _ONE_AT_A_TIME:
                self.begin(key, tensors)[2]()
        return self._begun[key]

    def _run_by_pytorch(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return self._run_lines(*tensors)

    def _reused(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [i for i in self.over.values() if tensors[i].is_contiguous()]

    def _compiled_for(self, key: tuple, tensors: Sequence[torch.Tensor]) -> tuple[Callable, Sequence[torch.Tensor]]:
        """The function that runs the region from now on, and its results for these tensors."""
        try:
            run, expected, wait = self.begin(key, tensors)
            wait()
        except Exception as error:
            self._begun.pop(key, None)
            names = ", ".join(dict.fromkeys(operation.sym.name for operation in self.region.bound_symbols))
            raise MissingImplementationError(
                f"Inductor does not compile a region of {names}: {error}\nLeave the executor inductor out, or "
                "set_fuel() to find the region and report it"
            ) from error
        reused = self._reused(tensors)
        if reused:
            run = functools.partial(_over, run, reused)
        results = run([*tensors])
        if alike(results, expected) and apart(results, [t for i, t in enumerate(tensors) if i not in reused]):
            return run, results
        return (lambda inputs: laid_out(run(inputs), expected)), laid_out(results, expected)

    def _run_lines(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        values: dict[Proxy, object] = dict(zip(self.region.inputs, tensors, strict=True))
        for operation in self.region.bound_symbols:
            run_line(operation, values)
        return [values[o] for o in self.region.outputs]  # type: ignore[misc]


class _Program:
    """The compilation of all regions of a program in the background, when one of them is needed, for the expected
    strides of their inputs.

    Views, products and attention run on fake tensors, Inductor knows the strides of the results of a region, and other
    results are assumed to be row-major. Where that is wrong, a region is compiled again when it runs. before: the
    program that computes the inputs of this one.
    """

    def __init__(self, trace: Trace, before: _Program | None):
        self.trace, self.before = trace, before
        self.mode = compat.FakeTensorMode()
        self.values: dict[Proxy, Any] = {}  # fake tensors
        self.strides: dict[str, tuple] = {}  # that are known, by names of values

    def begin(self, state: tuple, first: InductorRegion, tensors: Sequence[torch.Tensor]) -> None:
        """state: the settings that regions are compiled for. first: the region that is needed, for these tensors."""
        if self.values:
            return
        if self.before is not None:
            self.strides = {p.name: t.stride() for p, t in self.before.values.items()}
        operation = next(operation for operation in self.trace.bound_symbols if operation.sym.fn is first)
        self.strides |= {p.name: t.stride() for p, t in zip(operation.inputs, tensors, strict=True)}
        with compat.DisableTorchFunction(), torch.no_grad(), compat.quiet_fake_tensors():
            for operation in self.trace.bound_symbols:
                with contextlib.suppress(Exception):  # which comes again when it runs
                    self._follow(operation, state, InductorRegion.begin)

    def compile_ahead(self, state: tuple, strides: dict[str, tuple]) -> None:
        """Compiles all regions for arguments with these strides, in a background thread."""
        if self.before is not None:
            self.strides = {p.name: t.stride() for p, t in self.before.values.items()}
        self.strides |= strides
        for operation in self.trace.bound_symbols:
            region = operation.sym.fn if isinstance(operation.sym.fn, InductorRegion) else None
            if region is not None:
                region.program = _nothing
            with contextlib.suppress(Exception) if region is None else contextlib.nullcontext():
                with compat.DisableTorchFunction(), torch.no_grad(), compat.quiet_fake_tensors():
                    self._follow(operation, state, InductorRegion.begin_elsewhere)

    def _follow(self, operation: BoundSymbol, state: tuple, begin: Callable) -> None:
        """Computes the strides of an operation's results on fake tensors, as the operation or region before left them.
        begin: starts the compilation of a region."""
        symbol = operation.sym
        if isinstance(symbol.fn, InductorRegion):
            inputs = [self._value(p) for p in operation.inputs]
            _, strides, _ = begin(symbol.fn, (*state, *[t.stride() for t in inputs]), inputs)
            self.strides |= {p.name: s for p, s in zip(operation.outputs, strides, strict=True)}
        elif symbol.executor is torch_ex and symbol.tags & _FOLLOWED:
            values = {p: self._value(p) for p in operation.inputs}
            with self.mode:
                run_line(operation, values)
            self.values |= values

    def _value(self, p: TensorProxy) -> torch.Tensor:
        if p not in self.values:
            strides = self.strides.get(p.name)
            with self.mode:
                value = torch.empty(p.shape, dtype=to_torch_dtype(p.dtype), device=to_torch_device(p.device))
                self.values[p] = value if strides is None else value.new_empty_strided(p.shape, strides)
        return self.values[p]


_FOLLOWED = {OpTags.SHAPE_OP, OpTags.VIEW, OpTags.MATMUL_OP}
_NONE: tuple[Callable, Callable] = (lambda *tensors: False), list
_ONE_AT_A_TIME = threading.Lock()  # Inductor's settings are the process's
_threads, _deterministic = torch.get_num_threads, torch.are_deterministic_algorithms_enabled


def _size(value: Proxy) -> tuple | None:
    return (math.prod(value.shape), value.dtype) if isinstance(value, TensorProxy) else None


def _over(run: Callable, reused: Sequence[int], inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Runs a function that may return its inputs. PyTorch's linear returns a view of a base that nobody else has; under
    grad, a program could not write to such a result."""
    for i in reused:
        inputs[i] = inputs[i].detach()
    return run(inputs)


def _missing(kind: str) -> str | None:
    """The missing requirement of Inductor for a kind of device, in words; None where there is none."""
    if kind == "cpu":
        own = CXX_COMPILER.value
        if _is_there(own, SEARCH_PATH.value):
            return None
        return (
            f"Inductor needs a C++ compiler on the CPU, and none is found ({own or ', '.join(_COMPILERS)}): "
            "install one, or set CXX"
        )
    if kind == "cuda":
        return None if has_triton() else "Inductor needs triton on the GPU: install it"
    return f"Inductor is not used on {kind}"


@functools.cache
def _is_there(own: str | None, path: str | None) -> bool:
    return any(shutil.which(name, path=path) for name in ((own,) if own else _COMPILERS))


inductor_ex = InductorExecutor("inductor", "Inductor", products=False)
torch_compile_ex = InductorExecutor("torchcompile", "TorchCompile", products=True)
torch_compile_cat_ex = inductor_ex  # what it was for, joins and RoPE, are loops
register_executor(inductor_ex)
register_executor(torch_compile_ex)
