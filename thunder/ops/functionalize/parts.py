"""Parts: which elements of a tensor in memory another one shows."""

from __future__ import annotations

import torch

from thunder.core.proxies import like
from thunder.core.symbol import OpTags, primitive


@primitive(lambda a, size, stride, offset: like(a, tuple(size)), tags=(OpTags.VIEW,), module="ltorch")
def part_of(a: torch.Tensor, size: tuple, stride: tuple, offset: int) -> torch.Tensor:
    a = a.contiguous()
    return a.as_strided(size, stride, a.storage_offset() + offset)


def part_shown(part: torch.Tensor, whole: torch.Tensor) -> tuple | None:
    """(size, stride, offset) of a tensor in another one with the same storage; None where that is not contiguous, or
    does not hold it."""
    offset = part.storage_offset() - whole.storage_offset()
    inside = whole.is_contiguous() and 0 <= offset and offset + _extent(part) <= whole.numel()
    return (tuple(part.shape), tuple(part.stride()), offset) if inside else None


def _extent(x: torch.Tensor) -> int:
    """How many places in memory a tensor reaches over, counted in its elements."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def are_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with one storage have no element in common; for those that interleave, where they are small
    enough to look."""
    first = min(a.storage_offset() * a.itemsize, b.storage_offset() * b.itemsize)
    a0, b0 = (x.storage_offset() * x.itemsize - first for x in (a, b))
    a1, b1 = a0 + _extent(a) * a.itemsize, b0 + _extent(b) * b.itemsize
    if a1 <= b0 or b1 <= a0:
        return True
    if max(a1, b1) > _COMPARED_BYTES or a.dtype is not b.dtype:
        return False
    seen = torch.zeros(max(a1, b1) // a.itemsize, dtype=torch.bool)
    seen.as_strided(a.shape, a.stride(), a0 // a.itemsize).fill_(True)
    return not seen.as_strided(b.shape, b.stride(), b0 // b.itemsize).any()


_COMPARED_BYTES = 1 << 26
