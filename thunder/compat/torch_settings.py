"""PyTorch's settings: those that a program may leave in force, and those by which kernels are chosen when they run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder import compat

_FLAGS = (  # of torch._C: `_get_NAME` and `_set_NAME`; older ones of a pair that disagrees with newer ones raise
    "cublas_allow_tf32", "cudnn_allow_tf32", "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_fp16_accumulation",
    "cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction", "cudnn_benchmark",
    "cudnn_deterministic", "cudnn_enabled", "mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled",
    "deterministic_fill_uninitialized_memory", "blas_preferred_backend", "linalg_preferred_backend", "qengine",
)  # fmt: skip
_PRECISIONS = ("generic", "all"), *((b, op) for b in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))
_ATTENTION = "flash", "mem_efficient", "math", "cudnn"


class _Setting(NamedTuple):
    """How a setting is read, and set to such a value. kernels: operations follow it when they run, and nothing else of
    thunder does. key: `modes_key` has it, so that a program is for one value."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    kernels: bool = False
    key: bool = False

    def value(self) -> Any:
        """None where it has none: of an older and a newer name of one setting, the older one."""
        try:
            return self.read()
        except RuntimeError:
            return None


@functools.cache
def _settings() -> dict[str, _Setting]:
    """The settings of PyTorch that a program may read or change, by name."""
    C = compat.C
    settings = {
        "grad mode": _Setting(torch.is_grad_enabled, compat.set_grad_enabled, key=True),
        "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype, key=True),
        "autocast's cache": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, key=True),
        "warnings always": _Setting(torch.is_warn_always_enabled, torch.set_warn_always),
        "threads": _Setting(torch.get_num_threads, torch.set_num_threads),
        "deterministic": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, True),
    }
    for kind in compat.AUTOCAST_KINDS:
        enable, choose = torch.set_autocast_enabled, torch.set_autocast_dtype
        settings[f"autocast on {kind}"] = _of(torch.is_autocast_enabled, enable, kind, key=True)
        # `modes_key` has it where autocast is on
        settings[f"autocast's dtype on {kind}"] = _of(torch.get_autocast_dtype, choose, kind)
    settings["flush_denormal"] = _Setting(_flushes, torch.set_flush_denormal, True)
    for name in _FLAGS:
        read, write = getattr(C, f"_get_{name}", None), getattr(C, f"_set_{name}", None)
        if read is not None and write is not None:
            settings[name] = _Setting(read, functools.partial(_spread, write), True)
    # sets more than the flags before it do
    settings["float32_matmul_precision"] = _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, True
    )
    for name in _ATTENTION:
        settings[f"attention by {name}"] = _Setting(
            getattr(C, f"_get_{name}_sdp_enabled"), getattr(C, f"_set_sdp_use_{name}")
        )
    read, write = getattr(C, "_get_fp32_precision_getter", None), getattr(C, "_set_fp32_precision_setter", None)
    if read is not None and write is not None:  # behind the older names, which set these as well
        for backend, op in _PRECISIONS:
            settings[f"fp32_precision of {backend}.{op}"] = _of(read, write, backend, op, kernels=True)
    return settings


def _flushes(smallest: float = sys.float_info.min) -> bool:
    """The processor's mode for numbers below the smallest normal one, which Python's own numbers follow as well."""
    return smallest * 0.5 == 0.0


def _of(read: Callable, write: Callable, *which: str, kernels: bool = False, key: bool = False) -> _Setting:
    return _Setting(functools.partial(read, *which), functools.partial(write, *which), kernels, key)


def _spread(write: Callable, value: Any) -> None:
    write(*value) if type(value) is tuple else write(value)


def settings() -> dict[str, Any]:
    """The values of PyTorch's settings, by name."""
    return {name: setting.value() for name, setting in _settings().items()}


def beside_modes(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values of `settings` that are not part of `modes_key`."""
    return {name: value for name, value in values.items() if not _settings()[name].key}


def kernel_settings() -> dict[str, Any]:
    """Of those settings, the ones by which PyTorch chooses kernels. Those of attention are apart."""
    return {name: setting.value() for name, setting in _settings().items() if setting.kernels}


_ON_A_GPU = (
    "cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation", "cudnn_deterministic", "cudnn_enabled",
)  # fmt: skip
_PRECISION_ON_A_GPU = (
    ("fp32_precision of cuda.matmul", "fp32_precision of cuda.conv", "fp32_precision of cuda.rnn"),
    ("cublas_allow_tf32", "cudnn_allow_tf32"),
)


@functools.cache
def _flags() -> list[Callable[[], Any]]:
    known = _settings()
    precision = next(names for names in _PRECISION_ON_A_GPU if names[0] in known)
    flags = [known[name].read for name in (*precision, *_ON_A_GPU) if name in known]
    return [torch.are_deterministic_algorithms_enabled, *flags]


def kernel_flags() -> list[Any]:
    """Those of `kernel_settings` that kernels on a GPU follow; read before each replay of a graph."""
    return [read() for read in _flags()]


def tensor_cores_multiply_float32() -> bool:
    """Whether a GPU may round the operands of float32 products to TensorFloat-32."""
    known = _settings()
    names = "fp32_precision of cuda.matmul", "cublas_allow_tf32"
    return any(known[name].value() in (True, "tf32") for name in names if name in known)


def tensor_cores_convolve_float32() -> bool:
    """Whether a GPU may round the operands of float32 convolutions to TensorFloat-32."""
    known = _settings()
    names = "fp32_precision of cuda.conv", "cudnn_allow_tf32"
    return any(known[name].value() in (True, "tf32") for name in names if name in known)


def changed_settings(before: dict[str, Any]) -> dict[str, Any]:
    """The settings that have changed, as they are now."""
    return {name: value for name, value in settings().items() if value != before[name]}


def set_settings(values: dict[str, Any]) -> None:
    """Gives settings these values, in the order of `settings`: where one sets others as well, they come later."""
    known = _settings()
    for name, value in values.items():
        if value is not None and known[name].value() != value:
            known[name].write(value)


def picklable_settings() -> dict[str, Any]:
    """`settings`, for another process: without those whose values are classes of C++."""
    return {name: value for name, value in settings().items() if type(value).__module__ != "torch._C"}


def settings_are(values: dict[str, Any]) -> bool:
    known = _settings()
    return all(known[name].value() == value for name, value in values.items())
