"""What a forward saves for its backward as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["SavedTogether"]


class SavedTogether:
    """Tensors in one object, which is iterated over for them: a transform of a forward saves it in their place
    (`partition.as_saved_by`). PyTorch saves it with the node, and not as tensors; where hooks
    (`torch.autograd.graph.saved_tensors_hooks`, checkpoints) look at what is saved, they are given the tensors one by
    one."""

    __slots__ = ("__weakref__",)

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise NotImplementedError

    def joining(self) -> Callable[[Sequence[torch.Tensor]], SavedTogether]:
        """A function that makes one like it again, of what the hooks gave back, and that keeps none of the tensors."""
        raise NotImplementedError
