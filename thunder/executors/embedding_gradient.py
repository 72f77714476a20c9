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
from thunder.core.utils import has_triton
from thunder.extend import OperatorExecutor, add_default_executor_of_gpus, register_executor
from thunder.ops.backward import embedding_backward

SMALLEST, NARROWEST = 1 << 27, 1 << 12  # bytes of a table, and of a row
INDICES = range(2048, (1 << 14) + 1)  # how many; of many that are all the same PyTorch sums up parts at a time


def _gradient(g: torch.Tensor, indices: torch.Tensor, count: int, padding_idx: int, scale: bool) -> torch.Tensor:
    from thunder.executors.embedding_gradient_kernel import summed_by_index

    return summed_by_index(g, indices, count, padding_idx)


def _checker(g: TensorProxy, indices: TensorProxy, count: int, padding_idx: int, scale: bool) -> bool:
    if scale or g.device.type != "cuda" or not has_triton() or g.dtype not in (bfloat16, float16, float32):
        return False
    if any(isinstance(n, NumberProxy) for n in (g.shape[-1], count)):
        return False
    row = g.shape[-1] * g.dtype.bytes
    return element_count(indices) in INDICES and row >= NARROWEST and count * row >= SMALLEST


class EmbeddingGradientExecutor(OperatorExecutor):
    """Takes gradients of embeddings on a GPU."""

    capturable = True

    def unavailable(self) -> str | None:
        return None if has_triton() else "it needs the package triton: install it"


embedding_gradient_ex = EmbeddingGradientExecutor("embedding_gradient", version=torch.__version__)
embedding_gradient = embedding_gradient_ex.register_operator(
    "embedding_gradient", meta=embedding_backward.meta, fn=_gradient
)
embedding_gradient_ex.register_implementation(embedding_backward, embedding_gradient, checker=_checker)
register_executor(embedding_gradient_ex)
add_default_executor_of_gpus(embedding_gradient_ex, here=torch.version.cuda is not None and has_triton())
