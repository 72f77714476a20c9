"""Every private name of PyTorch that thunder uses, in one place, with the versions it was tried on and what happens without it.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from unittest import mock  # torch imports it as well

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.utils._device import DeviceContext

__all__ = [
    "current_device", "current_stream", "set_stream", "empty_strided_cuda",
    "load_kernel", "launch_kernel", "set_device", "modes_restored", "without_function_modes", "OpOverload", "OpOverloadPacket",
    "storage_uses", "modes_key", "set_data_parallel", "default_device", "function_modes", "describe_modes", "grad_enabled_in", "inference_in", "autocast_in", "is_dynamo_compiling",
    "function_modes_in", "foreign_tracer", "any_autocast",
    "autocast_state", "autocast_casts", "autocast_on", "autocast_off", "autocast_nesting", "tensor_batch_check", "native_batch_check", "saved_tensors_hooks", "keeps_graph",
    "is_batch", "in_forward_mode", "in_functorch", "applying", "unwrap_of", "functorch_implementations", "children_of", "fake_mode_of_sizes", "quiet_fake_tensors",
    "attention_backends", "attention_among", "compile_with_inductor", "kernel_flags", "distributed_is_used", "default_store", "timeout_of",
]  # fmt: skip

OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket  # operators registered with torch.library, and PyTorch's own
any_autocast = torch._C._is_any_autocast_enabled
# without the checks of torch.cuda's functions; there is none in a build without CUDA, where no kernel is launched
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
set_stream = getattr(torch._C, "_cuda_setStream", None)  # (stream_id=, device_index=, device_type=)
set_device = getattr(torch._C, "_cuda_setDevice", torch.cuda.set_device)
storage_uses = torch._C._storage_Use_Count  # of the address of a storage (`_cdata`): how many tensors hold it. 2.11, 2.13
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # (size, stride, dtype) on the current device, at half the price of torch.empty_strided
_static_launcher = getattr(torch._C, "_StaticCudaLauncher", None)
# (handle, grid x, y, z, warps, shared memory, a letter for each argument, arguments, stream)
launch_kernel = getattr(_static_launcher, "_launch_kernel", None)
_FLAGS = [  # float32_matmul_precision is the first one; "medium" and "high" differ on CPUs
    getattr(torch._C, f"_get_{name}")
    for name in (
        "cublas_allow_tf32", "cudnn_allow_tf32", "cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation", "deterministic_algorithms", "cudnn_deterministic", "cudnn_enabled",
    )
    if hasattr(torch._C, f"_get_{name}")
]  # fmt: skip
_function_modes = torch._C._len_torch_function_stack  # torch.set_default_device and user's TorchFunctionModes stand there
function_modes = _function_modes
_function_mode_at = torch._C._get_function_stack_at
_functorch_stack = torch._C._functorch.peek_interpreter_stack

is_dynamo_compiling = torch.compiler.is_dynamo_compiling

_AUTOCAST_KINDS = ("cpu", "cuda")


_tracing, _dispatch_modes = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_is_batch, _is_legacy_batch = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
_data_parallel: tuple | None = None


def _proxy_mode():
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)


def set_data_parallel(state: tuple) -> None:
    """What thunder.distributed adds to the key of compiled programs."""
    global _data_parallel
    _data_parallel = state


def modes_key() -> tuple:
    """The state outside of a program that its meaning depends on: grad mode, inference mode, default dtype, autocast, torch-function modes, data parallelism, and whether others
    trace or transform what runs, which guards on tensors do not tell."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        autocast_state() if any_autocast() else None,
        _stack_of_modes() if _function_modes() else None,
        _data_parallel,
        _functorch_stack() is not None or _forward_ad._current_level >= 0 or _tracing() is not None or _dispatch_modes() and _proxy_mode() is not None,
    )


def load_kernel(path: str, name: str, shared: int, device: int) -> int:
    """The handle of a function in a file of machine code, in the context of the current device."""
    return _static_launcher._load_kernel(path, name, shared, device)[-3]  # from torch 2.13 on the module comes first; then registers and spills


@contextlib.contextmanager
def without_function_modes():
    """The block runs without torch-function modes, those of subclasses' own rules stay."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(_function_modes())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


_NAMES = ("grad mode", "inference mode", "default dtype", "autocast", "torch-function modes or default device", "placement of parameters, and no_sync,", "tracing by others")


def autocast_state() -> tuple | None:
    """(((device kind, dtype) for each kind that autocast is on for), whether its cache of casts is on); None where it is off."""
    kinds = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_KINDS if torch.is_autocast_enabled(kind))
    return (kinds, torch.is_autocast_cache_enabled()) if kinds else None


def autocast_casts(operator: str, kind: str) -> bool:
    """Whether torch.autocast has a rule for an operator of aten on a kind of device: the lists differ from version to version. 2.11, 2.13."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{kind.upper()}")


def autocast_nesting() -> int:
    """How many `with torch.autocast(...)` are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def autocast_off():
    """Autocast is off in the block, for every kind of device."""
    with modes_restored():
        for kind in _AUTOCAST_KINDS:
            torch.set_autocast_enabled(kind, False)
        yield


@contextlib.contextmanager
def autocast_on(kinds: tuple, cached: bool = False):
    """torch.autocast for ((device kind, dtype), ...), whether there is such a device or not. cached: with its cache of casts, which is not emptied at the end."""
    with modes_restored():
        with torch._C.DisableTorchFunction():
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(cached)
            for kind, dtype in kinds:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)
        yield


def default_device() -> torch.device | None:
    """The device of the innermost `with torch.device(...)` or torch.set_default_device, None where there is none."""
    for i in reversed(range(_function_modes())):
        mode = _function_mode_at(i)
        if type(mode) is DeviceContext:
            return mode.device
    return None


@contextlib.contextmanager
def modes_restored():
    """What the block leaves of grad mode, default dtype, autocast and torch-function modes is what it found: a program that fails half way leaves its own on."""
    with torch._C.DisableTorchFunction():
        depth, grad, dtype, cache = _function_modes(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_cache_enabled()
        casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_KINDS]
        nesting = autocast_nesting()
    try:
        yield
    finally:
        while _function_modes() > depth:
            torch._C._pop_torch_function_stack()
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(grad)
            torch.set_default_dtype(dtype)
            for kind, enabled, cast in casts:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, cast)
            torch.set_autocast_cache_enabled(cache)
            for _ in range(autocast_nesting() - nesting):
                torch.autocast_decrement_nesting()


def _stack_of_modes() -> tuple:
    found = []
    for i in range(_function_modes()):
        mode = _function_mode_at(i)
        found.append((type(mode), str(getattr(mode, "device", None)) if hasattr(mode, "device") else id(mode)))
    return tuple(found)


_ATTENTION_FLAGS = tuple(getattr(torch._C, f"_get_{name}_sdp_enabled") for name in ("flash", "mem_efficient", "math", "cudnn"))
_deterministic = torch._C._get_deterministic_algorithms
_attention_order = getattr(torch._C, "_get_sdp_priority_order", list)


def kernel_flags() -> list:
    """The flags by which PyTorch chooses kernels on a GPU when it runs them."""
    return [flag() for flag in _FLAGS]


_USUAL_ORDERS = ([], [1, 2, 0, 3, 4], [3, 1, 2, 0, 4])  # the second one becomes the third at the first call where PyTorch prefers cuDNN; none before torch 2.6


def attention_backends() -> tuple:
    """What scaled_dot_product_attention may use: flash, memory-efficient, products, cuDNN; whether it is to be deterministic; in which order it looks, None for PyTorch's own."""
    flash, efficient, products, cudnn = _ATTENTION_FLAGS
    order = _attention_order()
    return flash(), efficient(), products(), cudnn(), _deterministic(), None if order in _USUAL_ORDERS else tuple(order)


@contextlib.contextmanager
def attention_among(backends: tuple):
    """In the block, scaled_dot_product_attention may use what `attention_backends` gave."""
    before, order = attention_backends(), _attention_order()
    try:
        _allow(backends)
        yield
    finally:
        _allow(before)
        if _attention_order() != order:
            torch._C._set_sdp_priority_order(order)


def _allow(backends: tuple) -> None:
    for name, enabled in zip(("flash", "mem_efficient", "math", "cudnn"), backends, strict=False):
        getattr(torch._C, f"_set_sdp_use_{name}")(enabled)
    if backends[-1] is not None:
        torch._C._set_sdp_priority_order(list(backends[-1]))


def describe_modes(old: tuple, new: tuple) -> str:
    """In words, what differs between two keys."""
    return ", ".join(f"{name} was {a}, is {b}" for name, a, b in zip(_NAMES, old, new, strict=True) if a != b)


def tensor_batch_check(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool = False) -> Callable:
    """A function of as many tensors that is True when each has the type, dtype, device, requires_grad and shape (None: any size) of its example, and its strides, if asked for.

    The C++ check also compares dispatch keys, so it holds only in the inference and autocast mode it was made in. It keeps no tensor alive.
    """
    return native_batch_check(tensors, sizes, strides) or _python_batch_check(tensors, sizes, strides)


def native_batch_check(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool = False) -> Callable | None:
    """The C++ check, None where there is none or it does not take these tensors: one in two places, for example."""
    try:
        dims = [t.stride() if strides else [None] * t.dim() for t in tensors]
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=[list(s) for s in sizes], dynamic_dims_strides=[list(d) for d in dims])
    except (AttributeError, TypeError):
        return None
    return guards.check if guards.check(*tensors) else None


def _python_batch_check(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool):
    def facts(t: torch.Tensor) -> list:
        return [t.dtype, t.device, t.requires_grad, t.is_conj(), t.is_neg(), unwrap_of(t), t.stride() if strides else None]

    expected = [(type(t), facts(t), s) for t, s in zip(tensors, sizes, strict=True)]

    def check(*given) -> bool:
        for x, (kind, rest, shape) in zip(given, expected, strict=True):
            if type(x) is not kind or facts(x) != rest:
                return False
            if len(x.shape) != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
                return False
        return True

    return check


def saved_tensors_hooks() -> tuple | None:
    """The hooks that see what is saved for a backward now; None where PyTorch does not say."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError):
        return None


def keeps_graph() -> bool:
    """Whether the backward that runs now was asked to keep its graph; True where PyTorch does not say."""
    try:
        return torch._C._autograd._get_current_graph_task_keep_graph()
    except AttributeError:
        return True


def applying(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` of a first argument and others, none of which torch.func has left behind: that it would look for in each. 2.11, 2.13"""
    apply, transforming = super(torch.autograd.Function, function).apply, torch._C._are_functorch_transforms_active

    def run(first, others):
        return function.apply(first, *others) if transforming() else apply(first, *others)

    return run


def unwrap_of(tensor: torch.Tensor) -> Callable | None:
    """What gives the tensor that a wrapper of torch.func's stands for; None for what is no wrapper. 2.11, 2.13"""
    return torch._C._functorch.unwrap_if_dead if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else None


def grad_enabled_in(modes: tuple) -> bool:
    return modes[0]


def inference_in(modes: tuple) -> bool:
    return modes[1]


def autocast_in(modes: tuple):
    return modes[3]


def function_modes_in(modes: tuple) -> bool:
    return modes[4] is not None


SCRIPTED = torch._C.ScriptFunction, torch._C.ScriptMethod


def scripted_from(function) -> Callable | None:
    """What torch.jit.script made a function of TorchScript's of, as torch.compile asks for it; None for methods, and for what was traced, which decides nothing. 2.11, 2.13"""
    return getattr(function, "_torchdynamo_inline", None) if getattr(function, "__qualname__", "") == "torch.jit.ScriptFunction" else None


def children_of(spec) -> list:
    """The parts of a pytree's structure; `children_specs` before torch 2.12."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def is_batch(value) -> bool:
    """Whether a tensor is a batch of vmap's, or of what `is_grads_batched=True` and `jacobian(vectorize=True)` use in its place. 2.11, 2.13"""
    return value is not None and (_is_batch(value) or _is_legacy_batch(value))


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is entered, of whose tangents kernels know nothing."""
    return _forward_ad._current_level >= 0


def in_functorch() -> bool:
    """Whether a torch.func transform runs now."""
    return _functorch_stack() is not None


def functorch_implementations() -> dict:
    """The functions behind torch.func's transforms, by the transform's name, where this PyTorch has them: calls of them are read. Without, they are refused."""
    from torch._functorch import eager_transforms, vmap

    found = {
        "grad": getattr(eager_transforms, "grad_impl", None),
        "grad_and_value": getattr(eager_transforms, "grad_and_value_impl", None),
        "vjp": getattr(eager_transforms, "_vjp_with_argnums", None),
        "jvp": getattr(eager_transforms, "_jvp_with_argnums", None),
        "vmap": getattr(vmap, "vmap_impl", None),
        "basis": getattr(eager_transforms, "_construct_standard_basis_for", None),
        "basis in chunks": getattr(eager_transforms, "_chunked_standard_basis_for_", None),
    }
    return {name: function for name, function in found.items() if function is not None}


def foreign_tracer(args: tuple, kwargs: dict) -> str | None:
    """The name of another system that is tracing or transforming this call (torch.func, forward mode, a FakeTensorMode, torch.export, make_fx), or None."""
    if in_functorch():
        return "a torch.func transform"
    if in_forward_mode():
        return "forward-mode differentiation"
    if _tracing() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return "a FakeTensorMode"
    if _proxy_mode() is not None:  # which does not see what kernels of executors compute
        return "make_fx"
    if any(isinstance(x, torch._subclasses.FakeTensor) for x in torch.utils._pytree.tree_leaves((args, kwargs))):
        return "a FakeTensorMode"
    return None


def fake_mode_of_sizes():
    """A FakeTensorMode in which sizes that data decides are symbols; it has no kernel run on zeros, whose sizes mean nothing. Without it such operations are refused."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_fallback_kernels=False, shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True))


@contextlib.contextmanager
def quiet_fake_tensors():
    """PyTorch writes a traceback to its log where an operation refuses fake tensors. Here that is an answer; without this it is noise."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def compile_with_inductor(
    function: Callable, tensors: Sequence[torch.Tensor], reused: Sequence[int] = (), rewritten: Callable = lambda graph: None
) -> tuple[Callable, list[torch.Tensor], Callable]:
    """What Inductor makes of a function of tensors, for those that are laid out as `tensors`, the results on fake tensors, and a function that waits until it can be called: on the
    CPU, C++ compilers run in the background.

    function: returns a list of tensors, and does nothing to memory that is not its own; it is run under no_grad on fake tensors. What is made of it takes a list, which it
    empties, and returns a sequence; Inductor keeps PyTorch's strides where it sees them. Its caches on disk are used as torch.compile uses them. Tried on 2.13.
    reused: places of tensors on the CPU that results may be written over, as Inductor does with what only a backward has. rewritten: for the graph of ATen operations that the
    function is, another function that does the same, or None.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())  # without a ShapeEnv nothing is kept on disk
    with torch._C.DisableTorchFunction(), without_function_modes(), torch.no_grad(), mode:
        examples = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
        results = function(*examples)
        functional = torch.func.functionalize(function, remove="mutations")
        graph = make_fx(functional, decomposition_table=select_decomp_table())(*examples)
        if (other := rewritten(graph)) is not None:
            graph = make_fx(other)(*examples)
            graph.graph.eliminate_dead_code()
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    _find_vectors()
    waiting: list[Callable] = []
    # shapes are guarded, and strides looked at, before a region is called
    with config.patch(size_asserts=False), tracing(TracingContext(mode)) as context, _waits_left_to(waiting) if results[0].device.type == "cpu" else contextlib.nullcontext():
        if reused:
            context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(reused))
        # its caches do not go by what is reused, but by what is static, which means something on GPUs only; with -1 nobody else's graph is taken for one of these
        compiled = compile_fx_inner(graph, examples, is_inference=not reused, is_backward=bool(reused), static_input_idxs=[-1, *reused] if reused else ())

    def wait() -> None:
        while waiting:
            waiting.pop()()

    return getattr(compiled, "current_callable", None) or compiled, results, wait


def _waits_left_to(waiting: list[Callable]):
    """What Inductor generates waits for its compilers when it is loaded. What this thread loads in the block leaves functions that do so in `waiting`."""
    from torch._inductor.async_compile import AsyncCompile

    own, thread = AsyncCompile.wait, threading.get_ident()

    def leave(self, scope: dict) -> None:
        if threading.get_ident() == thread:
            waiting.append(lambda: own(self, scope))
        else:
            own(self, scope)

    return mock.patch.object(AsyncCompile, "wait", leave)


@functools.cache
def _find_vectors() -> None:
    """Lets Inductor know which vector instructions there are. It compiles and loads a program for each set, and part of one, that the processor has, which takes longer than a
    model's kernels; where PyTorch runs kernels with them, it is enough that the C++ compiler takes the flags. Inductor asks once in a process. Tried on 2.13."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.cpp_builder import get_cpp_compiler

    @functools.cache
    def taken(flags: str) -> bool:
        return subprocess.run([get_cpp_compiler(), *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True).returncode == 0

    sees = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or sees not in ("AVX2", "AVX512") or (sees == "AVX2" and torch.cpu._is_avx512_supported()):
        return
    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", lambda isa, code: taken(isa.build_arch_flags())):
        cpu_vec_isa.valid_vec_isa_list()


def distributed_is_used() -> bool:
    """Whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def default_store():
    """The store of the default process group. 2.11, 2.13"""
    return torch.distributed.distributed_c10d._get_default_store()


def timeout_of(group) -> float:
    """Seconds after which collectives of a process group give up. 2.11, 2.13; where its backend does not say, torch's default"""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", torch.distributed.default_pg_timeout).total_seconds()
