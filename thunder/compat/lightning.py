"""Names that Lightning Thunder's users bring, and that thunder has under others. `thunder.NAME` loads this file.

`docs/from_lightning_thunder.md` has the whole list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder import functional_transforms, tracing
from thunder.api import jit
from thunder.core.trace import Trace
from thunder.errors import OptionError, warn_user
from thunder.extend import Executor, get_executor
from thunder.recipes import Recipe, get_recipes
from thunder.transforms.autocast import autocast as autocast_transform

__all__ = ["grad", "trace", "autocast", "Plugin", "get_plugin", "get_plugin_names", "absent_executor"]

grad = functional_transforms.grad
Plugin = Recipe


def trace(
    compile_data: Any = None,
    *,
    inline_trace: bool = True,
    rename_proxies: bool = True,
    include_return_statement: bool = True,
    use_dce: bool = True,
    insert_ddp_syncs: bool = False,
) -> Callable[..., Trace]:
    """`thunder.trace` with the keywords of Lightning Thunder's. Raises OptionError for values that nothing here has:
    a trace is always of its own, with names of its own and its output, and `thunder.distributed` writes collectives."""
    said = {
        "compile_data": compile_data is None, "rename_proxies": rename_proxies is True,
        "include_return_statement": include_return_statement is True, "insert_ddp_syncs": insert_ddp_syncs is False,
    }  # fmt: skip
    refused = [name for name, usual in said.items() if not usual]
    if refused:
        raise OptionError(f"thunder.trace({', '.join(refused)}): leave it out; valid: use_dce=True, False")
    return tracing.trace(use_dce=use_dce)


def autocast(fn: Callable, dtype: torch.dtype = torch.bfloat16) -> Any:
    """`fn` compiled to compute as if it were called under `torch.autocast`: `thunder.autocast` is the transform."""
    return jit(fn, transforms=[autocast_transform(dtype)])


def get_plugin(name: str) -> type[Recipe]:
    """The recipe of a name. Raises OptionError, which lists the names, for another one."""
    recipe = get_recipes().get(name)
    if recipe is None:
        raise OptionError(f"{name!r} is not a plugin; valid: {', '.join(map(repr, get_recipes()))}")
    return recipe


def get_plugin_names() -> list[str]:
    return list(get_recipes())


# ----------------------------------------------------------------------------------------------------------- executors

_ATTENTION = "attention by the kernels of cuDNN, flash attention and PyTorch is the executor 'sdpa', a default one"
_LOSS = "the executors 'cross_entropy' and 'linear_cross_entropy', default ones on GPUs, have kernels for it"
_FUSED = "the executors 'triton_fuser' and 'inductor' fuse such regions"
_INSTEAD = {
    "cudnn": _ATTENTION,
    "fa3": _ATTENTION,
    "cudnn_layernorm": _FUSED,
    "torchcompile_cat": _FUSED,
    "torchcompile_xentropy": _LOSS,
    "triton": _LOSS,
    "nvfuser": f"no wheel of nvFuser loads on the PyTorch that thunder runs on; {_FUSED}",
    "custom_op": "operators of torch.library run without an executor",
    "transformer_engine": "thunder.transforms.float8.Float8Transform has linear layers in float8",
    "bitsandbytes": "thunder.quantization has weights in 8 and 4 bits",
    "nvtx_profiler_ex": "thunder.profiler_ranges names operations in torch.profiler and NVTX",
}


class _Absent(Executor):
    """Takes nothing, and names its replacement."""

    def unavailable(self) -> str:
        return f"Lightning Thunder's executor of this name is not here: {_INSTEAD[self.name]}"

    def __reduce__(self):
        return absent_executor, (self.name,)


def absent_executor(name: str) -> Executor | None:
    """The executor that stands for one of Lightning Thunder's, which takes nothing; None for another name."""
    return _Absent(name, exact=True) if name in _INSTEAD else None


_ATTRIBUTES = {
    "pytorch_executor": "torch", "sdpa_executor": "sdpa", "apex_executor": "apex", "nvfuser_executor": "nvfuser",
    "cudnn_executor": "cudnn", "custom_op_executor": "custom_op", "torchcompile_cat_executor": "torchcompile_cat",
    "torchcompile_xentropy_executor": "torchcompile_xentropy",
}  # fmt: skip


def __getattr__(name: str) -> Executor:
    """`thunder.cudnn_executor` and its like. Warns where it takes nothing here, and says why."""
    if name not in _ATTRIBUTES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    executor = get_executor(_ATTRIBUTES[name]) or absent_executor(_ATTRIBUTES[name])
    assert executor is not None, "each of them is registered or absent"
    if (why := executor.unavailable()) is not None:
        warn_user(f"thunder.{name} has no effect here: {why}", UserWarning)
    return executor
