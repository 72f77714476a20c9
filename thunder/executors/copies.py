"""Copies of many tensors in a few launches: those of a CUDA graph's arguments and results.

`torch._foreach_copy_` launches a kernel for about a hundred tensors as well, which moves a quarter of what an H200's
memory can (1.1 TB/s for the gradients of a CLIP).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thunder.executors.handwritten import Handwritten, Launching, Steps, launching
from thunder.executors.triton_kernels.launcher import POINTERS
from thunder.runtime.cudagraphs.memory import Copies, copies_by_type

PAIRS = 16  # of one launch
_BYTES = 8192  # of the block of a program
_PART = 256  # elements of the last block of a tensor that are copied at a time
_WARPS = 4
# float8 is a type of some GPUs
_TYPES = frozenset(d for d in POINTERS if d.itemsize > 1 or not d.is_floating_point)
_KERNEL = Handwritten("copies_kernel.py", "_copies")


def copies_together(like: Sequence[torch.Tensor]) -> Copies:
    """A function that copies sources to targets, both of which have the types, shapes and strides of `like`: tensors of
    a GPU whose elements fill their memory go through the kernel, others through PyTorch."""
    together: dict[torch.dtype, list[int]] = {}
    others = []
    for i, x in enumerate(like):
        is_dense = x.dtype in _TYPES and torch.ops.aten.is_non_overlapping_and_dense(x)
        (together.setdefault(x.dtype, []) if is_dense else others).append(i)
    launches: list[tuple[list[int], Launching]] = []
    for places in together.values():
        if len(places) == 1:  # PyTorch's copy of one tensor takes the host less time
            others += places
            continue
        launches += [(places[at : at + PAIRS], _copied.for_call()) for at in range(0, len(places), PAIRS)]
    if not launches:
        return copies_by_type(like)
    copy_others = copies_by_type([like[i] for i in others])

    def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for places, launch in launches:
            launch([targets[i] for i in places], [sources[i] for i in places])
        if others:
            copy_others([targets[i] for i in others], [sources[i] for i in others])

    return copy


@launching
def _copied(steps: Steps, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies up to PAIRS dense tensors of one type."""
    block = _BYTES // targets[0].element_size()
    sizes = [t.numel() for t in targets] + [0] * (PAIRS - len(targets))
    programs = sum(-(-n // block) for n in sizes)
    numbers = (*(2 * n + 3 for n in sizes), block, _PART)
    steps.launch(_KERNEL, (*_filled(sources), *_filled(targets)), ((programs, 1, 1), numbers, _WARPS))


def _filled(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As many tensors as the kernel takes: of the last ones no element is copied."""
    return [*tensors, *[tensors[-1]] * (PAIRS - len(tensors))]
