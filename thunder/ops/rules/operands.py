"""What kernels take for granted of their operands, which `thunder/programs/foreign.py` checks in programs from files of
other users. Only kernels have a row that nothing but autograd calls: those of public functions check their operands."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from thunder.core.rule_table import Property, RuleTable

holds: RuleTable[Callable[..., bool] | None] = RuleTable(None)
"""(*operands): whether tensors have the shapes, and the indices among them the values, that the forward gives, where
these do not follow from running the forward on the operands' types."""

by_values = Property()
"""`holds` reads indices, so that it has to be asked in each run."""

unknown = Property()
"""Reads memory that a kernel has packed, which nothing can check: no program of another user may call it."""


def below(indices: torch.Tensor, count: int) -> bool:
    """Whether all indices are from 0 to `count`."""
    if indices.dtype.is_floating_point or indices.dtype.is_complex:
        return False
    return not indices.numel() or bool((indices.amin() >= 0) & (indices.amax() < count))


def of_sizes(rank: int) -> Callable[..., bool]:
    """The operands of a pooling to a given size: the results, the image, and indices of its positions."""

    def check(g: torch.Tensor, a: torch.Tensor, *others) -> bool:
        indices = [x for x in others if isinstance(x, torch.Tensor)]
        outer = a.dim() - rank
        same = a.dim() == g.dim() and outer in (1, 2) and a.shape[:outer] == g.shape[:outer]
        count = math.prod(a.shape[outer:])
        return same and count > 0 and all(i.shape == g.shape and below(i, count) for i in indices)

    return check


def of_windows(rank: int) -> Callable[..., bool]:
    """The operands of a maximum over windows: its last one are the indices of the image's positions."""
    return lambda g, a, *others: g.shape == others[-1].shape and below(others[-1], math.prod(a.shape[-rank:]))


def of_rows(g: torch.Tensor, indices: torch.Tensor, count: int, padding_index: int, *others) -> bool:
    """The operands of an embedding."""
    return g.shape[:-1] == indices.shape and g.dim() > 0 and below(indices, count)


def of_bags(g: torch.Tensor, indices, offsets, bags, sizes, maxima, count: int, scale, mode: int, *others) -> bool:
    """The operands of an embedding bag: `bags` says for each index which of the bags it is in."""
    weights = next((x for x in others if isinstance(x, torch.Tensor)), None)
    is_maximum = mode == 2
    return (
        g.dim() == 2 and indices.dim() == 1 and sizes.shape == g.shape[:1] and below(indices, count)
        and offsets.shape[0] in (g.shape[0], g.shape[0] + 1) and mode in (0, 1, 2)
        and (bags.shape == indices.shape and below(bags, g.shape[0]) or bags.shape == (0,))
        and below(offsets, len(indices) + 1)
        and (not is_maximum or maxima.shape == g.shape and below(maxima + 1, count + 1))
        and (weights is None or weights.shape == indices.shape)
    )  # fmt: skip


def of_batch_norm(g, a, weight, running_mean, running_var, mean, rstd, training: bool, *others) -> bool:
    """The operands of a batch norm: all but the image have an element for each channel. Statistics of the batch are
    there in training, running ones otherwise."""
    statistics = (mean, rstd) if training else (running_mean, running_var)
    channels = [x for x in (weight, *statistics) if isinstance(x, torch.Tensor)]
    return a.dim() > 1 and g.shape == a.shape and all(x.shape == a.shape[1:2] for x in channels)


def of_distances(g: torch.Tensor, a: torch.Tensor, p: float, distances: torch.Tensor) -> bool:
    """The operands of the distances between all rows of a matrix."""
    return a.dim() == 2 and g.shape == distances.shape == (len(a) * (len(a) - 1) // 2,)


def of_classes(g, scores: torch.Tensor, target: torch.Tensor, weight, reduction: int, ignored: int, *others) -> bool:
    """The operands of a negative log likelihood: each target is a class, or the index that is ignored."""
    classes = scores.shape[0 if scores.dim() == 1 else 1]
    return below(torch.where(target == ignored, 0, target), max(classes, 1)) and (classes > 0 or not target.numel())
