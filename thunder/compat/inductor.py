"""One graph compiled by Inductor."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock  # torch imports it as well

import torch

from thunder import compat
from thunder.options import INDUCTOR_CACHE_DIR


def compile_with_inductor(
    function: Callable,
    tensors: Sequence[torch.Tensor],
    reused: Sequence[int] = (),
    rewritten: Callable = lambda graph: None,
) -> tuple[Callable, list[torch.Tensor], Callable]:
    """Compile a function of tensors with Inductor, for those that are laid out as `tensors`. Returns the compiled
    function, its results on fake tensors, and a function that waits until it can be called: on the CPU, C++ compilers
    run in the background.

    function: returns a list of tensors, and does nothing to memory that is not its own; it is run under no_grad on fake
    tensors. The compiled one takes a list, which it empties, and returns a sequence; Inductor keeps PyTorch's strides
    where it sees them. Its caches on disk are used as torch.compile uses them. Tried on 2.13. reused: places of tensors
    on the CPU that results may be written over, as Inductor does with tensors of a backward. rewritten: for the graph
    of ATen operations that the function is, another function that does the same, or None.
    """
    graph, examples, results, mode = _graph_of(function, tensors, rewritten)
    compiled, wait = _compiled(graph, examples, mode, results[0].device.type == "cpu", reused)
    return compiled, results, wait


def graph_job(
    function: Callable,
    tensors: Sequence[torch.Tensor],
    reused: Sequence[int] = (),
    rewritten: Callable = lambda graph: None,
) -> GraphJob | None:
    """A job for another process, by which `compile_with_inductor` finds the code in Inductor's caches; None for a graph
    that holds tensors or modules."""
    graph, examples, _, _ = _graph_of(function, tensors, rewritten)
    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes):
        return None
    shapes = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in examples]
    config = {k: v for k, v in compat.config.get_config_copy().items() if _pickles(v)}
    return GraphJob(graph.code, shapes, tuple(reused), compat.picklable_settings(), config, INDUCTOR_CACHE_DIR.value)


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):  # functions made in functions, handles
        return False
    return True


def _graph_of(function: Callable, tensors: Sequence[torch.Tensor], rewritten: Callable) -> tuple[Any, list, list, Any]:
    """The graph of a function on fake tensors like `tensors`, these, its results, and their mode."""
    mode = _fake_mode()
    with compat.DisableTorchFunction(), compat.without_function_modes(), torch.no_grad(), mode:
        examples = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        results = function(*examples)
        functional = torch.func.functionalize(function, remove="mutations")
        graph = _traced(functional, examples)
        if (other := rewritten(graph)) is not None:
            graph = _traced(other, examples)
            graph.graph.eliminate_dead_code()
    return graph, examples, results, mode


class GraphJob(NamedTuple):
    """A graph of ATen operations, and all that Inductor's caches go by, for another process to compile."""

    source: str
    tensors: list[tuple]
    reused: tuple[int, ...]
    settings: dict[str, Any]
    config: dict[str, Any]
    folder: str | None

    def compile(self) -> None:
        """Compile the graph into Inductor's caches. For a process that does nothing else."""
        INDUCTOR_CACHE_DIR.assign(self.folder)
        compat.set_settings(self.settings)
        compat.config.load_config(self.config)
        names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
        exec(self.source, names)
        forward, mode = names["forward"], _fake_mode()
        with torch.no_grad(), mode:
            examples = [torch.empty_strided(n, s, dtype=d, device=where) for n, s, d, where in self.tensors]
            graph = _traced(lambda *tensors: forward(None, *tensors), examples)
        on_cpu = all(where.type == "cpu" for *_, where in self.tensors)
        _compiled(graph, examples, mode, on_cpu, self.reused)[1]()


def _fake_mode() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return compat.FakeTensorMode(shape_env=ShapeEnv())  # without a ShapeEnv nothing is kept on disk


def _traced(function: Callable, examples: Sequence[Any]) -> Any:
    """The graph of a function that calls no module. FX would write over methods of `nn.Module` while it traces, which
    other threads call, and say of all threads that they trace: a function of torch.compile's raises then."""
    from torch.fx.experimental.proxy_tensor import make_fx

    symbolic_trace = compat.symbolic_trace
    original, thread = symbolic_trace._new_patcher, threading.get_ident()
    traces = getattr(symbolic_trace, _TRACES, None)

    class NoPatches(symbolic_trace._Patcher):
        def patch(self, *args, **kwargs) -> None:
            pass

        patch_method = patch

    @contextlib.contextmanager
    def patcher():
        if threading.get_ident() == thread and traces is not None:
            setattr(symbolic_trace, _TRACES, traces)
        with contextlib.nullcontext(NoPatches()) if threading.get_ident() == thread else original() as patches:
            yield patches

    with mock.patch.object(symbolic_trace, "_new_patcher", patcher):
        return make_fx(function, decomposition_table=compat.select_decomp_table())(*examples)


_TRACES = "_is_fx_tracing_flag"


def compile_for_sizes(
    function: Callable,
    numbers: Sequence[int],
    described: Callable[[Sequence[Any]], Sequence[tuple]],
) -> tuple[Callable, Callable, Callable, Callable]:
    """Compile a function of integers, each at least 2, and tensors with Inductor, for all integers that it is right
    for.

    numbers: the integers of a call. described: for integers, those of a call or symbolic ones, (shape, strides, dtype,
    device) of each tensor. Returns the compiled function, which takes a list and empties it; whether it is right for
    integers; the strides that PyTorch gives its results, for integers; and a function that waits until it can be
    called. Tried on 2.13.
    """
    from sympy import Integer
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    known = ShapeEnv()
    mode = compat.FakeTensorMode(shape_env=known)
    with compat.DisableTorchFunction(), compat.without_function_modes(), torch.no_grad(), mode:
        sources = [ConstantSource(f"n{i}") for i in range(len(numbers))]
        symbols = [
            known.create_symbol(n, source, dynamic_dim=DimDynamic.DYNAMIC)
            for n, source in zip(numbers, sources, strict=True)
        ]
        sizes = [
            known.create_symintnode(symbol, hint=n, source=source)
            for symbol, n, source in zip(symbols, numbers, sources, strict=True)
        ]
        tensors = [torch.empty_strided(n, s, dtype=d, device=where) for n, s, d, where in described(sizes)]
        results = function(*sizes, *tensors)
        functional = torch.func.functionalize(function, remove="mutations")
        graph = _traced(functional, [*sizes, *tensors])
    compiled, wait = _compiled(graph, [*sizes, *tensors], mode, results[0].device.type == "cpu")
    strides = [[getattr(getattr(s, "node", None), "expr", s) for s in r.stride()] for r in results]

    def at(expression: Any, numbers: Sequence[int]) -> Any:
        if isinstance(expression, int):
            return expression
        return expression.xreplace(dict(zip(symbols, map(Integer, numbers), strict=True)))

    def right(numbers: Sequence[int]) -> bool:
        return all(bool(at(guard.expr, numbers)) for guard in known.guards)

    def laid_out(numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(int(at(s, numbers)) for s in each) for each in strides]

    return compiled, right, laid_out, wait


def _compiled(
    graph: Any, examples: Sequence[Any], mode: Any, on_cpu: bool, reused: Sequence[int] = ()
) -> tuple[Callable, Callable]:
    """A function that runs a graph of ATen operations, and one that waits until it can be called."""
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    _find_vectors()
    waiting: list[Callable] = []
    # shapes are guarded, and strides looked at, before a region is called
    left = _waits_left_to(waiting) if on_cpu else contextlib.nullcontext()
    settings = {"size_asserts": False} | (_vector_setting() if on_cpu else {})
    with compat.config.patch(settings), compat.tracing(compat.TracingContext(mode)) as context, left:
        if reused:
            context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(reused))
        # its caches ignore reused inputs, and look at static ones, which mean something on GPUs only; with -1 nobody
        # else's graph is taken for one of these
        compiled = compat.compile_fx_inner(
            graph,
            examples,
            is_inference=not reused,
            is_backward=bool(reused),
            static_input_idxs=[-1, *reused] if reused else (),
        )

    def wait() -> None:
        while waiting:
            waiting.pop()()

    return getattr(compiled, "current_callable", None) or compiled, wait


def inductor_source(run: Callable) -> str:
    """The text of the module that Inductor has made a function in; empty where it has made none, or it is gone."""
    code = getattr(run, "__code__", None)
    path = Path(code.co_filename) if code is not None else Path()
    return path.read_text(encoding="utf-8") if path.is_file() and "_inductor" in run.__module__ else ""


def _vector_setting() -> dict[str, object]:
    """The width of the vectors that Inductor would choose, as its setting. Its caches on disk go by settings and not by
    the instructions that the processor or ATEN_CPU_CAPABILITY allows: code for others would be taken from them."""
    if compat.cpu_vec_isa is None or compat.config.cpp.simdlen is not None:
        return {}
    return {"cpp.simdlen": compat.cpu_vec_isa.pick_vec_isa().bit_width()}


def _waits_left_to(waiting: list[Callable]):
    """Inductor's generated code waits for its compilers when it is loaded. Code that this thread loads in the block
    leaves functions that do so in `waiting`."""
    AsyncCompile = compat.AsyncCompile
    own, thread = AsyncCompile.wait, threading.get_ident()

    def leave(self, scope: dict) -> None:
        if threading.get_ident() == thread:
            waiting.append(lambda: own(self, scope))
        else:
            own(self, scope)

    return mock.patch.object(AsyncCompile, "wait", leave)


@functools.cache
def _find_vectors() -> None:
    """Lets Inductor know which vector instructions there are. It compiles and loads a program for each set, and part of
    one, that the processor has, which takes longer than a model's kernels; where PyTorch runs kernels with them, it is
    enough that the C++ compiler takes the flags. Inductor asks once in a process. Tried on 2.13."""
    cpu_vec_isa = compat.cpu_vec_isa

    @functools.cache
    def taken(flags: str) -> bool:
        command = [compat.get_cpp_compiler(), *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True).returncode == 0

    sees = torch.backends.cpu.get_cpu_capability()
    if (
        cpu_vec_isa is None
        or sys.platform != "linux"
        or sees not in ("AVX2", "AVX512")
        or (sees == "AVX2" and compat.has_avx512())
    ):
        return
    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", lambda isa, code: taken(isa.build_arch_flags())):
        cpu_vec_isa.valid_vec_isa_list()
