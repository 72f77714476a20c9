"""The table of PyTorch's private names: where each is found, its use, and the loss without it.

`python -m thunder` prints the rows that this PyTorch lacks. A row with `otherwise` has a substitute; asking for another
row that is missing raises.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import signal
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder.errors import MissingImplementationError, warn_user

OLDEST, NEWEST = "2.9", "2.15"  # of the versions of PyTorch that thunder was tried on
ALL = "2.9, 2.11, 2.13, 2.15"
_ABSENT = object()


@dataclass(frozen=True)
class Private:
    """One private name.

    name: `compat.<name>`. path: where PyTorch has it. needed_for: its use. lost: features that do not work without it.
    otherwise: gives a substitute. tried: the versions of PyTorch that have it and that thunder's tests ran on. cuda:
    only builds with CUDA have it.
    """

    name: str
    path: str
    needed_for: str
    lost: str
    otherwise: Callable[[], Any] | None = None
    tried: str = ALL
    cuda: bool = False

    def find(self) -> Any:
        """The object, or None where this PyTorch has none."""
        value = _resolve(self.path)
        return None if value is _ABSENT else value

    def value(self) -> Any:
        """The object or its substitute. Raises MissingName where there is neither."""
        resolved = _resolve(self.path)
        if resolved is not _ABSENT:
            return resolved
        if self.otherwise is not None:
            return self.otherwise()
        raise MissingName(
            f"PyTorch {torch.__version__} has no {self.path}, which thunder uses for {self.needed_for}. Without it: "
            f"{self.lost}.\n"
            f"  It exists in PyTorch {self.tried}; use one of these versions."
        )


class MissingName(MissingImplementationError, AttributeError):
    """This PyTorch lacks a private name that the program needs."""


class AtFirstUse:
    """A function of this package that binds private names in a closure when it is first asked for, so that its calls
    look nothing up."""

    def __init__(self, make: Callable[[], Callable]):
        self.make = make


def _resolve(path: str) -> Any:
    """The object at a path of modules and attributes."""
    parts = path.split(".")
    owner: Any = torch
    for i, part in enumerate(parts[1:], 2):
        value = getattr(owner, part, _ABSENT)
        if value is _ABSENT and isinstance(owner, type(torch)):
            try:
                with interrupted_later():
                    value = importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return _ABSENT
        if value is _ABSENT:
            return _ABSENT
        owner = value
    return owner


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C inside of the block takes effect behind it. Inductor, imported in part, could not be imported again: its
    modules register operators."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupts: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: interrupts.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        handler(*interrupts[-1])


def missing() -> list[Private]:
    """The rows that this PyTorch does not have."""
    return [row for row in PRIVATE if row.find() is None and (not row.cuda or torch.backends.cuda.is_built())]


def _constant(value: Any) -> Callable:
    return lambda: lambda *args: value


def _aten(name: str, needed_for: str, **options) -> Private:
    """A kernel that only the dispatcher names."""
    return Private(
        f"aten{name}", f"torch.ops.aten.{name}", needed_for, "a program that needs this kernel raises", **options
    )


NOTHING_RUNS = "no program is compiled"
EVERY_CALL = "the key of compiled programs"
FAKE_TENSORS = "torch._subclasses.fake_tensor"
_TYPING = "typing of operations that have no rule of their own"
_MODULE = "torch.nn.modules.module"
_CALLS = "these programs raise"

FUNCTORCH_LEVELS = {
    "enter_vmap": "torch._C._functorch._vmap_increment_nesting",
    "leave_vmap": "torch._C._functorch._vmap_decrement_nesting",
    "add_batch": "torch._C._functorch._add_batch_dim", "remove_batch": "torch._C._functorch._remove_batch_dim",
    "enter_grad": "torch._C._functorch._grad_increment_nesting",
    "leave_grad": "torch._C._functorch._grad_decrement_nesting",
    "wrap": "torch._C._functorch._wrap_for_grad", "unwrap": "torch._C._functorch._unwrap_for_grad",
    "require_grad": "torch._functorch.eager_transforms._set_tensor_requires_grad",
    "gradients": "torch._functorch.eager_transforms._autograd_grad",
    "allow_inplace": "torch._C._functorch.set_inplace_requires_grad_allowed",
    "enter_jvp": "torch._C._functorch._jvp_increment_nesting",
    "enter_jvp_in_python": "torch._functorch.eager_transforms.enter_jvp_nesting",
    "leave_jvp_in_python": "torch._functorch.eager_transforms.exit_jvp_nesting",
    "load_decompositions": "torch._functorch.vmap.lazy_load_decompositions",
    "name_in_errors": "torch._functorch.vmap._get_name",
    "enter_functionalize": "torch._C._functorch._func_increment_nesting",
    "leave_jvp": "torch._C._functorch._jvp_decrement_nesting",
    "enter_dual": "torch._C._enter_dual_level", "leave_dual": "torch._C._exit_dual_level",
    "make_dual": "torch._VF._make_dual", "unpack_dual": "torch._VF._unpack_dual",
}  # fmt: skip

PRIVATE: Sequence[Private] = (
    # --- modes
    Private("DisableTorchFunction", "torch._C.DisableTorchFunction", "questions to tensors that torch-function modes "
        "must not see", NOTHING_RUNS),
    Private("HigherOrderOperator", "torch._ops.HigherOrderOperator", "torch.cond and other operators that take "
        "functions", _CALLS),
    Private("set_grad_enabled", "torch._C._set_grad_enabled", "grad mode without a frame", "some time at each call",
        lambda: torch.set_grad_enabled),
    Private("function_modes", "torch._C._len_torch_function_stack", EVERY_CALL, NOTHING_RUNS),
    Private("function_mode_at", "torch._C._get_function_stack_at", EVERY_CALL, NOTHING_RUNS),
    Private("pop_function_mode", "torch._C._pop_torch_function_stack", "running without torch-function modes",
        NOTHING_RUNS),
    Private("push_function_mode", "torch._C._push_on_torch_function_stack", "running without torch-function modes",
        NOTHING_RUNS),
    Private("DeviceContext", "torch.utils._device.DeviceContext", "torch.set_default_device", "tensors are made on "
        "the CPU", lambda: type(None)),
    Private("dispatch_modes", "torch._C._len_torch_dispatch_stack", "seeing make_fx and FakeTensorMode around a call",
        "they see kernels of executors", _constant(0)),
    Private("dispatch_mode", "torch._C._get_dispatch_mode", "seeing make_fx and FakeTensorMode around a call", "they "
        "see kernels of executors", _constant(None)),
    Private("TorchDispatchMode", "torch.utils._python_dispatch.TorchDispatchMode", "seeing writes to sparse and nested "
        "tensors", "operations on these raise"),
    Private("without_dispatch_modes", "torch.utils._python_dispatch._disable_current_modes", "probes of PyTorch that "
        "dispatch modes of the user's must not see", "they see them", contextlib.nullcontext),
    Private("dispatch_mode_at", "torch._C._get_dispatch_stack_at", "restoring dispatch modes of the user's that a "
        "failing compilation has taken off", "they stay off"),
    Private("push_dispatch_mode", "torch.utils._python_dispatch._push_mode", "restoring dispatch modes of the user's "
        "that a failing compilation has taken off", "they stay off"),
    Private("pop_dispatch_mode", "torch.utils._python_dispatch._pop_mode", "programs that enter dispatch modes, which "
        "are refused", "the mode stays on"),
    Private("DispatchModeKey", "torch._C._TorchDispatchModeKey", "seeing make_fx and FakeTensorMode around a call",
        "they see kernels of executors"),
    Private("tracing_state", "torch._C._get_tracing_state", "seeing torch.jit.trace around a call", "it records "
        "kernels of executors", _constant(None)),
    Private("profiler_records", "torch._C._autograd._profiler_enabled", "ranges of record_function in programs",
        "programs have no such ranges", _constant(False)),
    Private("any_autocast", "torch._C._is_any_autocast_enabled", EVERY_CALL, "some time at each call",
        lambda: _any_autocast),
    Private("forward_ad_level", "torch.autograd.forward_ad._current_level", "seeing forward-mode differentiation "
        "around a call", NOTHING_RUNS),
    Private("disabled_function", "torch._C._disabled_torch_function_impl", "telling plain tensors from subclasses",
        NOTHING_RUNS),
    Private("disabled_dispatch", "torch._C._disabled_torch_dispatch_impl", "telling plain tensors from subclasses",
        NOTHING_RUNS),
    # --- autocast
    Private("has_kernel_for_key", "torch._C._dispatch_has_kernel_for_dispatch_key", "the lists of torch.autocast",
        "programs under autocast raise"),
    # --- CUDA: without the checks of torch.cuda's functions; there is none of these in a build without CUDA, where no
    # kernel is launched
    Private("current_device", "torch._C._cuda_getDevice", "launches", "a microsecond a launch",
        lambda: torch.cuda.current_device, cuda=True),
    Private("current_stream", "torch._C._cuda_getCurrentRawStream", "launches", "a microsecond a launch",
        lambda: _current_stream, cuda=True),
    Private("set_device", "torch._C._cuda_setDevice", "launches", "a microsecond a launch",
        lambda: torch.cuda.set_device, cuda=True),
    Private("static_launcher", "torch._C._StaticCudaLauncher", "launches of fused kernels without Triton's launcher",
        "fused kernels do not run on a GPU", cuda=True),
    Private("launch_kernel", "torch._C._StaticCudaLauncher._launch_kernel", "the same", "fused kernels do not run on "
        "a GPU", cuda=True),
    Private("empty_strided_cuda", "torch._C._dynamo.guards._empty_strided_cuda", "memory of fused kernels", "a "
        "microsecond an output", lambda: _empty_strided_cuda),
    Private("storage_uses", "torch._C._storage_Use_Count", "telling whether a result of a CUDA graph is still held",
        "CUDA graphs raise"),
    Private("attention_order", "torch._C._get_sdp_priority_order", "sdpa_kernel(set_priority=True)",
        "its order is not seen", lambda: list),
    Private("attention_choice", "torch._fused_sdp_choice", "which kernel attention takes on the CPU", "keys of one "
        "head are taken by products", _constant(0)),
    Private("set_attention_order", "torch._C._set_sdp_priority_order", "sdpa_kernel(set_priority=True)",
        "its order is not seen", _constant(None)),
    # --- guards
    Private("TensorGuards", "torch._C._dynamo.guards.TensorGuards", "guards on tensors in one call", "microseconds "
        "at each call", lambda: None),
    # --- autograd
    Private("saved_hooks", "torch._C._autograd._top_saved_tensors_default_hooks", "saved_tensors_hooks that see each "
        "saved value", "they see packed ones", _constant(None)),
    Private("graph_is_kept", "torch._C._autograd._get_current_graph_task_keep_graph", "freeing saved values early",
        "memory in backwards", _constant(True)),
    Private("will_execute", "torch._C._will_engine_execute_node", "torch.autograd.grad of some inputs, where a "
        "checkpoint writes to tensors", "these are written to again whichever inputs are wanted",
        _constant(lambda node: True)),
    Private("make_gradients", "torch.autograd._make_grads", "backward() inside of programs", "backward() inside of "
        "programs raises"),
    Private("run_engine", "torch.autograd.graph._engine_run_backward", "backward() inside of programs", "backward() "
        "inside of programs raises"),
    Private("DelayedError", "torch._C._functions.DelayedError", "the error of a graph that is freed", "backward() "
        "inside of programs raises"),
    Private("group_tensors", "torch._C._group_tensors_by_device_and_dtype", "torch.optim and clip_grad_norm_ inside "
        "of programs", "these raise"),
    Private("version_of", "torch.Tensor._version", "seeing writes to saved values and to inputs of CUDA graphs",
        "backwards and CUDA graphs raise"),
    Private("base_of", "torch.Tensor._base", "views that programs return", "CUDA graphs raise"),
    Private("is_view", "torch.Tensor._is_view", "views that programs return", "programs that return views raise"),
    Private("creation_meta", "torch._C._autograd._get_creation_meta", "writes under grad to views that come in",
        "these programs raise"),
    Private("storage_address", "torch.UntypedStorage._cdata", "telling whether two tensors share memory", NOTHING_RUNS),
    # --- torch.func
    Private("functorch_level", "torch._C._functorch.peek_interpreter_stack", "seeing torch.func around a call", "it "
        "sees kernels of executors", _constant(None)),
    Private("transforms_are_active", "torch._C._are_functorch_transforms_active", "applying a backward",
        "microseconds at each call", lambda: _transforms_are_active),
    Private("is_batched", "torch._C._functorch.is_batchedtensor", "vmap over a compiled backward", "vmap over a "
        "compiled backward raises", _constant(False)),
    Private("is_legacy_batched", "torch._C._functorch.is_legacy_batchedtensor", "is_grads_batched=True",
        "is_grads_batched=True raises", _constant(False)),
    Private("is_wrapped", "torch._C._functorch.is_functorch_wrapped_tensor", "tensors that torch.func has left behind",
        "these raise", _constant(False)),
    Private("unwrap_if_dead", "torch._C._functorch.unwrap_if_dead", "tensors that torch.func has left behind",
        "these raise"),
    *(
        Private(f"functorch_{name}", path, "torch.func inside of programs", "it is refused", lambda: None)
        for name, path in FUNCTORCH_LEVELS.items()
    ),
    Private("tree_flatten", "torch.utils._pytree.tree_flatten", "vmap and torch.func inside of programs",
        "these raise"),
    Private("tree_unflatten", "torch.utils._pytree.tree_unflatten", "vmap and torch.func inside of programs",
        "these raise"),
    Private("tree_leaves", "torch.utils._pytree.tree_leaves", "vmap and torch.func inside of programs", NOTHING_RUNS),
    # --- fake tensors
    Private("FakeTensor", f"{FAKE_TENSORS}.FakeTensor", _TYPING, NOTHING_RUNS),
    Private("FakeTensorMode", f"{FAKE_TENSORS}.FakeTensorMode", _TYPING, NOTHING_RUNS),
    Private("without_fakes", f"{FAKE_TENSORS}.unset_fake_temporarily", "decisions that are asked for while an "
        "operation is typed", "programs that decide by data raise"),
    Private("DataDependentOutput", f"{FAKE_TENSORS}.DataDependentOutputException", _TYPING, "these operations raise "
        "another error"),
    Private("DynamicOutputShape", f"{FAKE_TENSORS}.DynamicOutputShapeException", _TYPING, "data-dependent sizes "
        "raise"),
    Private("UnsupportedOperator", f"{FAKE_TENSORS}.UnsupportedOperatorException", _TYPING, "these operations raise "
        "another error"),
    # --- Inductor, each without: executors=["inductor"] raises
    *(
        Private(path.rpartition(".")[2], path, "the Inductor executor", 'executors=["inductor"] raises')
        for path in (
            "torch._guards.TracingContext", "torch._guards.tracing", "torch._inductor.config",
            "torch._inductor.compile_fx.compile_fx_inner",
            "torch._inductor.decomposition.select_decomp_table", "torch._inductor.async_compile.AsyncCompile",
        )
    ),
    Private("aoti_compile_and_package", "torch._inductor.aoti_compile_and_package",
        'thunder.export(format="aot_inductor")', "it raises"),
    Private("export_error", "torch._dynamo.exc.UserError", "words of thunder.export for what torch.export refuses",
        "the error is torch.export's own", lambda: NotImplementedError),
    Private("number_by_data_error", "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
        "words of thunder.export for whole numbers that data makes", "the error is torch.export's own",
        lambda: NotImplementedError),
    Private("symbolic_trace", "torch.fx._symbolic_trace", "the Inductor executor", 'executors=["inductor"] raises'),
    Private("compile_lock", "torch._dynamo.convert_frame.compile_lock", "compiling in the background",
        "torch.compile may be disturbed meanwhile", contextlib.nullcontext),
    Private("cpu_vec_isa", "torch._inductor.cpu_vec_isa", "finding vector instructions quickly", "seconds at the "
        "first compilation", lambda: None),
    Private("get_cpp_compiler", "torch._inductor.cpp_builder.get_cpp_compiler", "the Inductor executor on CPUs",
        "it raises on CPUs"),
    Private("has_avx512", "torch.cpu._is_avx512_supported", "finding vector instructions quickly", "seconds at the "
        "first compilation", _constant(True)),
    # --- operators
    Private("C", "torch._C", "names of PyTorch's bindings", NOTHING_RUNS),
    Private("OpOverload", "torch._ops.OpOverload", "operators registered with torch.library", NOTHING_RUNS),
    Private("OpOverloadPacket", "torch._ops.OpOverloadPacket", "operators registered with torch.library", NOTHING_RUNS),
    Private("schemas_of", "torch._C._jit_get_schemas_for_operator", "names of operands", "keywords of operators raise",
        _constant(())),
    Private("schema_of", "torch.ops.aten.add.Tensor._schema", "custom operators that write to their arguments",
        "these raise"),
    Private("overload_name", "torch.ops.aten.add.Tensor._overloadname", "custom operators", "these raise"),
    Private("operator_name", "torch.ops.aten.add._qualified_op_name", "custom operators", "these raise"),
    Private("nn_bindings", "torch._C._nn", "functions of torch.nn.functional that are bindings", _CALLS,
        types.SimpleNamespace),
    Private("TensorBase", "torch._C.TensorBase", "methods of tensors", NOTHING_RUNS),
    Private("ScriptFunction", "torch._C.ScriptFunction", "functions of torch.jit.script", "these raise"),
    Private("ScriptMethod", "torch._C.ScriptMethod", "functions of torch.jit.script", "these raise"),
    Private("VF_meshgrid", "torch._VF.meshgrid", "torch.meshgrid", _CALLS, lambda: torch.functional.meshgrid),
    *(
        Private(name.strip("_"), f"torch.{name}", f"programs that call torch.{name}", _CALLS)
        for name in ("_assert", "_check_with", "_check_is_size", "_int_mm", "_scaled_mm")
    ),
    Private("weight_int8pack_mm", "torch._weight_int8pack_mm", "layers of few rows on weights of int8, on CPUs",
        "they raise"),
    Private("log_api_usage_once", "torch._C._log_api_usage_once", "programs that call it", "they raise"),
    Private("foreach_add", "torch._foreach_add", "optimizers with foreach=True", "these raise"),
    Private("foreach_copy", "torch._foreach_copy_", "copies into the inputs of CUDA graphs", "CUDA graphs raise"),
    Private("cudnn_attention", "torch._scaled_dot_product_cudnn_attention", "the attention executor", "it raises "
        "where it would take cuDNN"),
    Private("flash_attention", "torch._scaled_dot_product_flash_attention", "the attention executor", "it raises "
        "where it would take flash attention"),
    *(_aten(f"_scaled_dot_product_{kind}_attention_backward", "the attention executor") for kind in ("cudnn", "flash",
        "efficient")),
    _aten("_scaled_dot_product_efficient_attention", "the attention executor"),
    *(_aten(f"_scaled_dot_product_flash_attention_for_cpu{name}", "attention on CPUs") for name in ("", "_backward")),
    *(_aten(name, "programs that call it") for name in ("_safe_softmax", "_softmax_backward_data",
        "_log_softmax_backward_data")),
    *(_aten(name, "programs that call it") for name in ("_pack_padded_sequence", "_pad_packed_sequence",
        "_native_multi_head_attention", "_grouped_mm")),
    *(_aten(name, "batch norm in training") for name in ("_native_batch_norm_legit",
        "_native_batch_norm_legit_functional")),
    _aten("_index_put_impl_", "derivatives of indexing"),
    *(_aten(f"_embedding_bag{name}", "embedding_bag") for name in ("", "_backward")),
    *(_aten(f"_adaptive_avg_pool{rank}d_backward", "derivatives of adaptive_avg_pool") for rank in (2, 3)),
    *(_aten(f"_linalg_{name}", "torch.linalg") for name in ("eigh", "svd", "solve_ex", "check_errors")),
    _aten("_pdist_backward", "the derivative of pdist"),
    *(_aten(name, "prelu") for name in ("_prelu_kernel", "_prelu_kernel_backward")),
    *(_aten(name, "torch.fft") for name in ("_conj", "_fft_c2c", "_fft_r2c", "_fft_c2r")),
    *(_aten(f"_upsample_nearest_exact{rank}d_backward", "interpolate(mode='nearest-exact')") for rank in (1, 2, 3)),
    *(_aten(f"_upsample_{kind}2d_aa_backward", "interpolate(antialias=True)") for kind in ("bilinear", "bicubic")),
    # --- modules
    Private("call_module", "torch.nn.Module._call_impl", "modules", NOTHING_RUNS),
    Private("call_wrapped_module", "torch.nn.Module._wrapped_call_impl", "modules", NOTHING_RUNS),
    *(Private(name, f"{_MODULE}._{name}", "hooks of all modules", NOTHING_RUNS) for name in ("global_forward_hooks",
        "global_forward_pre_hooks")),
    *(Private(name, f"{_MODULE}._{name}", "hooks of all modules", NOTHING_RUNS) for name in ("global_backward_hooks",
        "global_backward_pre_hooks")),
    # --- torch.distributed
    Private("store_of_default_group", "torch.distributed.distributed_c10d._get_default_store", "agreement of ranks",
        "programs that communicate raise"),
    Private("group_backend", "torch.distributed.ProcessGroup._get_backend", "timeouts of collectives", "the default "
        "timeout is taken"),
)  # fmt: skip

BY_NAME = {row.name: row for row in PRIVATE}
KERNELS = {row.path.removeprefix("torch.ops.aten."): row for row in PRIVATE if row.name.startswith("aten_")}

# modules of PyTorch's, recognised by their names and never imported
READ_MODULES = (  # Python code in them is captured
    "torch.utils._contextlib", "torch.utils._foreach_utils", "torch.nn.utils.stateless",
    "torch.nn.utils._named_member_accessor",
    "torch._lowrank", "torch._linalg_utils", "torch._jit_internal",  # functions that choose one by a flag
    # NumPy's functions by operations of PyTorch, and how Dynamo's graphs call them
    "torch._numpy", "torch._dynamo.utils",
)  # fmt: skip
NN_BINDINGS = "torch._C._nn"
FUNCTORCH = "torch._functorch"
AROUND_DYNAMO = ("torch._compile", "torch._dynamo.eval_frame")  # wrappers of functions that Dynamo leaves alone
HIGHER_ORDER, AUTOCAST_MODE = "torch._higher_order_ops", "torch.amp.autocast_mode"
# asks for a distribution whether a check of its arguments holds, from torch 2.15 on
DISTRIBUTION_CHECK = "_all_true_or_runtime_assert"
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"


# ----------------------------------------------------------------------------------------------------------------
# substitutes


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _empty_strided_cuda(size, stride, dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _transforms_are_active() -> bool:
    return True  # the slow way always works


@functools.cache
def warn_of_untried_version() -> None:
    """Says once that this PyTorch is newer, or older, than those that thunder was tried on."""
    oldest, newest = (tuple(map(int, v.split("."))) for v in (OLDEST, NEWEST))
    if not oldest <= version() <= newest:
        lost = (
            "; ".join(f"{row.path} is missing: {row.lost}" for row in missing())
            or "it has every private name that thunder uses"
        )
        warn_user(
            f"thunder was tried on PyTorch {OLDEST} to {NEWEST}, this is {torch.__version__}; {lost}", UserWarning
        )


def version() -> tuple[int, ...]:
    """Of this PyTorch, without the suffix of its build."""
    return tuple(int(n) for n in torch.__version__.partition("+")[0].split(".")[:2])
