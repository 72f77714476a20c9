"""PyTorch's autograd engine: saved values, kept graphs, how a function is applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thunder import compat


def saved_tensors_hooks() -> tuple | None:
    """The hooks that see values which are saved for a backward; None where PyTorch does not say."""
    return compat.saved_hooks(False)


def keeps_graph() -> bool:
    """Whether the backward that runs now was asked to keep its graph; True where PyTorch does not say."""
    return compat.graph_is_kept()


def gradients(outputs: Sequence, cotangents: Sequence, inputs: Sequence, keep_graph: bool, create_graph: bool) -> tuple:
    """`torch.autograd.grad(..., allow_unused=True)` without its checks, which cost more than most nodes."""
    return compat.run_engine(
        tuple(outputs), tuple(cotangents), keep_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )


def applying(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` of a first argument and others, none of which torch.func has left behind: that it would look for
    in each."""
    apply, transforming = super(torch.autograd.Function, function).apply, compat.transforms_are_active

    def run(first, others):
        return function.apply(first, *others) if transforming() else apply(first, *others)

    return run
