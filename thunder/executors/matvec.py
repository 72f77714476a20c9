"""The matvec executor: linear layers of few rows, as in decoding, by kernels that read the weight once, at the speed of memory.

    thunder.jit(model, executors=["matvec"])

Before: `t0 = torch.nn.functional.linear(x, w)` with x of (1, 1, 4096). After: `t0 = few_rows_linear(x, w)`. Taken are at most 16 rows, on a GPU, of weights for
which measurements say that PyTorch's call is slower. One row is multiplied element by element, several are products of tiles of 16 rows. Each program makes all of
some columns of the result, so that no partial sums are added up and every run gives the same. Sums are in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder.core.dtypes import bfloat16, float16
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import OpTags
from thunder.extend import OperatorExecutor, register_executor
from thunder.ops import LTORCH

__all__ = ["matvec_ex"]

ROWS = 16  # at most
SMALLEST = 1 << 22  # elements of a weight: smaller ones stay in the cache, and PyTorch's call is as fast


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not weight.is_contiguous():
        return F.linear(x, weight, bias)
    from thunder.executors.matvec_kernel import few_rows

    return few_rows(x, weight, bias)


def _checker(x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
    if not x.device.name.startswith("cuda") or len(weight.shape) != 2 or any(isinstance(n, NumberProxy) for n in (*x.shape, *weight.shape)):
        return False
    if x.dtype not in (bfloat16, float16) or bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return False
    return 0 < math.prod(x.shape[:-1]) <= ROWS and math.prod(weight.shape) >= SMALLEST and weight.shape[1] % 8 == 0


matvec_ex = OperatorExecutor("matvec", version=torch.__version__)
few_rows_linear = matvec_ex.register_operator("few_rows_linear", like=lambda x, weight, bias=None: LTORCH["linear"](x, weight, bias), fn=_linear, tags=(OpTags.MATMUL_OP,))
matvec_ex.register_implementation(LTORCH["linear"], few_rows_linear, checker=_checker)
matvec_ex.capturable = True
register_executor(matvec_ex)
