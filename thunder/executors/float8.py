"""The float8 executor: rounds matrices to float8 (`thunder/ops/families/float8.py`) by a kernel that writes the matrix
and its transpose. Their largest absolute values are found by the fuser, in the kernel that computes a matrix.

`Float8Transform`, which writes such operations, adds this executor. Without a GPU and Triton their decomposition runs.
"""

from __future__ import annotations

import torch

from thunder.core.proxies import TensorProxy
from thunder.core.utils import has_triton
from thunder.executors.handwritten import Handwritten, Steps, launching
from thunder.executors.triton_kernels.launcher import interpreting
from thunder.extend import OperatorExecutor, register_executor
from thunder.kernels.sizes import power_of_two
from thunder.ops.families.float8 import quantize
from thunder.ops.shape_rules import ceil_div


def _takes(x: TensorProxy, *rest) -> bool:
    return has_triton() and x.device.type == "cuda" and 0 not in x.shape and all(isinstance(n, int) for n in x.shape)


HEIGHT, WIDTH = 64, 128  # of a tile that is written, by 4 warps: a line of the cache, and half of one in the transpose
COLUMNS, ROWS = 32, 128  # that a program scales, and sees at a time
_write_both, _write_each_row, _write_each_column = (
    Handwritten("float8_kernels.py", name) for name in ("_write", "_write_rows", "_write_columns")
)


def _of_type(to: torch.dtype) -> tuple:
    """What kernels are told of a float8 type."""
    name, digits = {torch.float8_e4m3fn: ("tl.float8e4nv", 3), torch.float8_e5m2: ("tl.float8e5", 2)}[to]
    return torch.finfo(to).max, name, digits if interpreting() else 0


def whole(
    steps: Steps, x: torch.Tensor, amax: torch.Tensor, to: torch.dtype, transposed: bool
) -> tuple[torch.Tensor, ...]:
    """A matrix (m, k) of any strides with one scale, by its largest absolute value: float8 (m, k), scale (), and with
    `transposed` float8 (k, m)."""
    (m, k), (down, across) = x.shape, x.stride()
    q, scale = steps.empty((m, k), to), steps.empty((), torch.float32)
    columns = steps.empty((k, m), to) if transposed else q  # which is not written to then
    # Triton 3.6 turns such a tile as single bytes, and on an H200 some were wrong
    twice = transposed and x.element_size() > 2

    def write(m: int, k: int, down: int, across: int, rows: torch.Tensor, columns: torch.Tensor, both: bool) -> None:
        numbers = m, k, down, across, *_of_type(to), both, HEIGHT, WIDTH
        programs = ceil_div(m, HEIGHT) * ceil_div(k, WIDTH)
        steps.launch(_write_both, (x, amax, rows, columns, scale), ((programs,), numbers, 4))

    write(m, k, down, across, q, columns, transposed and not twice)
    if twice:
        write(k, m, across, down, columns, columns, False)
    return (q, scale, columns) if transposed else (q, scale)


def by_rows(steps: Steps, x: torch.Tensor, to: torch.dtype, transposed: bool) -> tuple[torch.Tensor, ...]:
    """A matrix (m, k) of any strides with a scale for each row: float8 (m, k), scales (m, 1), and with `transposed` the
    same of its transpose: (k, m), (k, 1)."""
    m, k = x.shape
    q, scale = steps.empty((m, k), to), steps.empty((m, 1), torch.float32)
    numbers = k, *x.stride(), *_of_type(to), min(4096, power_of_two(k))
    steps.launch(_write_each_row, (x, q, scale), ((m,), numbers, 8))
    if not transposed:
        return q, scale
    columns, columns_scale = steps.empty((k, m), to), steps.empty((k, 1), torch.float32)
    numbers = m, k, *x.stride(), *_of_type(to), COLUMNS, ROWS
    steps.launch(_write_each_column, (x, columns, columns_scale), ((ceil_div(k, COLUMNS),), numbers, 8))
    return q, scale, columns, columns_scale


@launching
def quantized(
    steps: Steps, x: torch.Tensor, amax: torch.Tensor | None, to: torch.dtype, transposed: bool
) -> tuple[torch.Tensor, ...]:
    """`whole`, and `by_rows` where no largest absolute value is given."""
    return by_rows(steps, x, to, transposed) if amax is None else whole(steps, x, amax, to, transposed)


float8_ex = OperatorExecutor("float8")
float8_ex.capturable = True
_quantize = float8_ex.register_operator("quantize_float8", meta=quantize.meta, fn=quantized)
float8_ex.register_implementation(quantize, _quantize, checker=_takes)
register_executor(float8_ex)
