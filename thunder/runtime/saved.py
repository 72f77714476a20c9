"""Saved tensors of a forward as one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch


class SavedTogether:
    """An iterable object of tensors that a transform of a forward saves in their place (`partition.saved_collections`).
    PyTorch keeps it with the node, not as saved tensors. Hooks for saved tensors
    (`torch.autograd.graph.saved_tensors_hooks`, checkpoints) get the tensors one by one."""

    __slots__ = ("__weakref__",)

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise NotImplementedError

    def joining(self) -> Callable[[Sequence[torch.Tensor]], SavedTogether]:
        """A function that joins the tensors that hooks return to an object like this one, and keeps no tensors."""
        raise NotImplementedError
