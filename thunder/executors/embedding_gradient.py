"""The embedding_gradient executor: the gradient of a large table of embeddings, whose rows are written once each.

Before: `t1 = torch.ops.aten.embedding_dense_backward.default(g, indices, 128256, -1, False)`. After: `t1 =
embedding_gradient(g, indices, 128256, -1, False)`.

The indices are sorted. A program for each row of the table writes zeros, or the sum of the gradients with its index, so
that no pass fills the table with zeros before. Sums are in float32 and in the order of the indices, so that all runs
give equal results. The executor takes tables and counts of indices above sizes from which it was measured to be faster
(docs/lab_log.md).
"""

from __future__ import annotations

import torch

from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import NumberProxy, TensorProxy, element_count
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.executors.handwritten import CompilesKernels, Handwritten, Settings, Steps, launching
from thunder.extend import OperatorExecutor, add_default_executor_of_gpus, register_executor
from thunder.kernels.sizes import power_of_two
from thunder.ops.backward import embedding_backward
from thunder.ops.shape_rules import ceil_div
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

SMALLEST, NARROWEST = 1 << 27, 1 << 12  # bytes of a table, and of a row
MOST = 64  # indices that a program for a row sums up; where there are more, others share the columns
INDICES = range(2048, (1 << 14) + 1)  # how many; of many that are all the same PyTorch sums up parts at a time


_each_row = Handwritten("embedding_gradient_kernel.py", "_each_row")
_long_rows = Handwritten("embedding_gradient_kernel.py", "_long_rows")


def _gradient(g: torch.Tensor, indices: torch.Tensor, count: int, padding_idx: int, scale: bool) -> torch.Tensor:
    return summed_by_index(g, indices, count, padding_idx)


def summed_by_index(g: torch.Tensor, indices: torch.Tensor, count: int, padding: int) -> torch.Tensor:
    """The sums (count, D) of those rows of g (..., D) that have the same of the indices (...), which are integers from
    0 to count - 1. The row `padding` is 0."""
    rows, order = torch.sort(indices.reshape(-1), stable=True)
    starts = torch.searchsorted(rows, torch.arange(count + 1, device=rows.device, dtype=rows.dtype), out_int32=True)
    return _summed(g.contiguous(), order, rows, starts, padding)


@launching
def _summed(
    steps: Steps, g: torch.Tensor, order: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, padding: int
) -> torch.Tensor:
    """order, rows: the indices' places and values, sorted by value. starts: where each value begins there."""
    count, width = len(starts) - 1, g.shape[-1]
    out = steps.empty((count, width), g.dtype)
    steps.launch(_each_row, (g, order, starts, out), _settings_of_rows(count, width, padding))
    of_long_rows = _settings_of_long_rows(rows.numel(), width, padding)
    steps.launch(_long_rows, (g, order, rows, starts, out), of_long_rows)
    return out


def _settings_of_rows(count: int, width: int, padding: int) -> Settings:
    block = min(4096, power_of_two(width))
    return (count, ceil_div(width, block)), (width, padding, MOST, 4, block), 4


def _settings_of_long_rows(count: int, width: int, padding: int) -> Settings:
    block = min(32, power_of_two(width))
    return (ceil_div(count, MOST), ceil_div(width, block)), (width, padding, MOST, 256, block), 4


def _checker(g: TensorProxy, indices: TensorProxy, count: int, padding_idx: int, scale: bool) -> bool:
    if scale or g.device.type != "cuda" or not has_triton() or g.dtype not in (bfloat16, float16, float32):
        return False
    if any(isinstance(n, NumberProxy) for n in (g.shape[-1], count)):
        return False
    row = g.shape[-1] * g.dtype.bytes
    return element_count(indices) in INDICES and row >= NARROWEST and count * row >= SMALLEST


class EmbeddingGradientExecutor(CompilesKernels, OperatorExecutor):
    """Takes gradients of embeddings on a GPU."""

    capturable = True

    def expect(self, trace: Trace) -> None:
        """Compiles the kernels in the background."""
        for b in trace.bound_symbols:
            if b.sym.executor is self:
                g, indices, count, padding, _ = b.args
                dtype, index, device = to_torch_dtype(g.dtype), to_torch_dtype(indices.dtype), to_torch_device(g.device)
                width, long, short = int(g.shape[-1]), torch.int64, torch.int32
                _each_row.start((dtype, long, short, dtype), _settings_of_rows(count, width, padding), device)
                types = dtype, long, index, short, dtype
                _long_rows.start(types, _settings_of_long_rows(1, width, padding), device)

    def unavailable(self) -> str | None:
        return None if has_triton() else "it needs the package triton: install it"


embedding_gradient_ex = EmbeddingGradientExecutor("embedding_gradient", version=torch.__version__)
embedding_gradient = embedding_gradient_ex.register_operator(
    "embedding_gradient", meta=embedding_backward.meta, fn=_gradient
)
embedding_gradient_ex.register_implementation(embedding_backward, embedding_gradient, checker=_checker)
register_executor(embedding_gradient_ex)
add_default_executor_of_gpus(embedding_gradient_ex, here=torch.version.cuda is not None and has_triton())
