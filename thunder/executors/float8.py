"""The float8 executor: what rounds matrices to float8 (`thunder/ops/float8.py`), by two kernels: one that finds the scale, one that writes the matrix and its transpose.

The transform that writes such operations brings it. Elsewhere than on a GPU with Triton their decomposition runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor, register_executor
from thunder.ops.float8 import quantize
from thunder.ops.torch_types import to_torch_dtype

__all__ = ["float8_ex"]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _takes(x: TensorProxy, to, by_rows: bool, transposed: bool) -> bool:
    return _has_triton() and x.device.type == "cuda" and 0 not in x.shape and all(isinstance(n, int) for n in x.shape)


def _run(x: torch.Tensor, to, by_rows: bool, transposed: bool) -> tuple[torch.Tensor, ...]:
    kernels = importlib.import_module("thunder.executors.float8_kernels")
    return (kernels.by_rows if by_rows else kernels.whole)(x, to_torch_dtype(to), transposed)


float8_ex = OperatorExecutor("float8")
float8_ex.capturable = True
_operation = float8_ex.register_operator("quantize_float8", meta=quantize.meta, fn=_run)
float8_ex.register_implementation(quantize, _operation, checker=_takes)
register_executor(float8_ex)
