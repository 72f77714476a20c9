"""The matvec executor: linear layers of few rows, as in decoding, by kernels that read the weight once.

    thunder.jit(model, executors=["matvec"])

Before: `t0 = torch.nn.functional.linear(x, w)` with x of (1, 1, 4096). After: `t0 = few_rows_linear(x, w)`. Taken are at most 16 rows, on a GPU. One row is multiplied
element by element, several, of two bytes an element, are products of tiles of 16 rows. Each program makes all of some columns of the result, so that no partial sums
are added up and every run gives the same. Sums are in float32.

On request only: whether it is faster than PyTorch's call depends on the sizes and on the machine (docs/performance.md).
"""

from __future__ import annotations

import functools
import importlib.util
import math

import torch
import torch.nn.functional as F

from thunder.core.devices import Device
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import OpTags
from thunder.extend import OperatorExecutor, register_executor
from thunder.ops import LTORCH
from thunder.ops.torch_types import to_torch_device

__all__ = ["matvec_ex"]

ROWS = 16  # at most
SMALLEST = 1 << 22  # elements of a weight; smaller ones were not measured
LARGEST = 1 << 31  # what kernels count to


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not weight.is_contiguous():
        return F.linear(x, weight, bias)
    from thunder.executors.matvec_kernel import few_rows

    return few_rows(x, weight, bias)


class MatvecExecutor(OperatorExecutor):
    """Takes linear layers of few rows."""

    capturable = True

    def unavailable(self) -> str | None:
        return None if _has_triton() else "it needs the package triton: install it"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_large(device: Device) -> bool:
    """Whether a GPU is of the kind that was measured, by the memory its programs have: A100, H100 and later ones."""
    return torch.cuda.get_device_properties(to_torch_device(device)).shared_memory_per_block_optin >= 1 << 17


def _checker(x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
    if x.device.type != "cuda" or not _has_triton() or not _is_large(x.device) or len(weight.shape) != 2 or any(isinstance(n, NumberProxy) for n in (*x.shape, *weight.shape)):
        return False
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return False
    n, k = weight.shape
    rows = math.prod(x.shape[:-1])
    if x.dtype not in (bfloat16, float16) and not (x.dtype is float32 and rows == 1):
        return False
    return 0 < rows <= ROWS and SMALLEST <= n * k < LARGEST and k % 8 == 0


matvec_ex = MatvecExecutor("matvec", version=torch.__version__)
few_rows_linear = matvec_ex.register_operator("few_rows_linear", like=lambda x, weight, bias=None: LTORCH["linear"](x, weight, bias), fn=_linear, tags=(OpTags.MATMUL_OP,))
matvec_ex.register_implementation(LTORCH["linear"], few_rows_linear, checker=_checker)
register_executor(matvec_ex)
