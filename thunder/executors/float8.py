"""The float8 executor: rounds matrices to float8 (`thunder/ops/families/float8.py`) by two kernels, one for the largest
absolute value and one that writes the matrix and its transpose.

`Float8Transform`, which writes such operations, adds this executor. Without a GPU and Triton their decomposition runs.
"""

from __future__ import annotations

import torch

from thunder.core.proxies import TensorProxy
from thunder.core.utils import has_triton
from thunder.extend import OperatorExecutor, register_executor
from thunder.ops.families.float8 import largest, quantize
from thunder.ops.torch_types import to_torch_dtype


def _takes(x: TensorProxy, *rest) -> bool:
    return has_triton() and x.device.type == "cuda" and 0 not in x.shape and all(isinstance(n, int) for n in x.shape)


def _quantize(x: torch.Tensor, amax: torch.Tensor | None, to, transposed: bool) -> tuple[torch.Tensor, ...]:
    from thunder.executors.float8_kernels import by_rows, whole

    return (
        by_rows(x, to_torch_dtype(to), transposed) if amax is None else whole(x, amax, to_torch_dtype(to), transposed)
    )


def _find_largest(x: torch.Tensor) -> torch.Tensor:
    from thunder.executors.float8_kernels import largest_of

    return largest_of(x)


float8_ex = OperatorExecutor("float8")
float8_ex.capturable = True
for _symbol, _function in ((quantize, _quantize), (largest, _find_largest)):
    _operation = float8_ex.register_operator(f"{_function.__name__[1:]}_float8", meta=_symbol.meta, fn=_function)
    float8_ex.register_implementation(_symbol, _operation, checker=_takes)
register_executor(float8_ex)
