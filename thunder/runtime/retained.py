"""`retain_grad()` of a result inside of a compiled function: its `.grad` gets what other results add to its gradient.

Autograd knows the result as one of several of one node, and adds the cotangent that comes for the result itself.
"""

from __future__ import annotations

import weakref

import torch


class Cell:
    """A result of one call, for the backward of that call."""

    __slots__ = ("result", "__weakref__")

    def __init__(self):
        self.result = lambda: None


def retain(result: torch.Tensor, cell: Cell) -> None:
    """`result.retain_grad()`, with the shares of other results."""
    result.retain_grad()
    result._shares_are_known = True  # pyright: ignore[reportAttributeAccessIssue]
    cell.result = weakref.ref(result)


def add(gradient: torch.Tensor, cell: Cell) -> torch.Tensor:
    """Add the share of other results to the gradient of the one in the cell. Returns the share."""
    result = cell.result()
    if result is not None:
        result.grad = gradient.clone() if result.grad is None else result.grad + gradient
    return gradient


def is_observed(result: torch.Tensor) -> bool:
    """Whether somebody looks at the gradient of a result, which lacks the shares of others."""
    retains = result.retains_grad and not getattr(result, "_shares_are_known", False)
    return retains or bool(result._backward_hooks)
