"""How tensors lie in memory: rows that begin where products are fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ROW_BYTES = 16  # products of matrices have fast kernels where rows begin at multiples of it
LEAST_ROW = 256  # bytes: a shorter row would be mostly padding


def padded_row(columns: int, itemsize: int) -> int:
    """From a row of a matrix to the next, in elements, so that each begins where products are fast."""
    size = columns * itemsize
    return columns if size < LEAST_ROW else -(-size // ROW_BYTES) * ROW_BYTES // itemsize


def padded_strides(shape: Sequence[Any], itemsize: int) -> tuple:
    """Row-major strides, but for rows that begin where products are fast. The last size is an int."""
    strides = [1]
    step = padded_row(shape[-1], itemsize)
    for n in shape[-2::-1]:
        strides.append(step)
        step = step * n
    return tuple(strides[::-1])


def empty_rows(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor whose rows begin where products are fast. All of its padding is memory of its own, also behind the
    last row: kernels read and write it."""
    step = padded_row(shape[-1], like.element_size())
    rows = like.new_empty((*shape[:-1], step))
    return rows if step == shape[-1] else rows[..., : shape[-1]]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in any order of dimensions: they neither overlap nor have gaps."""
    expected = 1
    for stride, n in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= n
    return True
