"""Which functions PyTorch differentiates, and what functions and their derivatives are at corners: this differs from
version to version, so PyTorch is asked, about single numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from thunder import compat


def _slope(function: Callable, *values: float) -> float:
    """The derivative of a function of numbers by its first one."""
    with compat.probing(grad=True):
        first, *others = (torch.tensor(v, dtype=torch.float64, device="cpu") for v in values)
        (slope,) = torch.autograd.grad(function(first.requires_grad_(), *others), first)
        return slope.item()


def is_differentiated(function: Callable) -> bool:
    """Whether the result of a function of one tensor requires grad where its argument does."""
    with compat.probing(grad=True):
        return function(torch.full((), 0.5, device="cpu", requires_grad=True)).requires_grad


@functools.cache
def kept_at_bounds(tensors: bool) -> float:
    """What of its cotangent `clamp` leaves to a value at a bound; a bound that is a tensor gets the rest.

    1.0 up to torch 2.13; from 2.15 on 0.0, and a half beside tensors, where NaN is outside of no bound. tensors:
    whether the bounds are tensors.
    """
    return _slope(torch.clamp if tensors else lambda x, low: torch.clamp(x, low.item()), 1.0, 1.0)


@functools.cache
def kept_at_tie(extreme: Callable) -> float:
    """What of the cotangent of fmax or fmin goes to the first of two equal numbers."""
    return _slope(extreme, 1.0, 1.0)


@functools.cache
def turns_at_origin() -> bool:
    """Whether the derivative of atan2 at the origin is a number. It is NaN before torch 2.10."""
    return not math.isnan(_slope(torch.atan2, 0.0, 0.0))


@functools.cache
def drops_far_bounds() -> bool:
    """Whether clamp leaves out a bound that is beyond all integers of the tensor's type, as from torch 2.15 on; before,
    it wraps around or is refused."""
    with compat.probing():
        return torch.zeros((), dtype=torch.uint8, device="cpu").clamp(-1).item() == 0
