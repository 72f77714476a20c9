"""torch.func: its transforms, and the tensors that they wrap."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder import compat
from thunder.compat.names import FUNCTORCH_LEVELS


def is_batch(value) -> bool:
    """Whether a tensor is a batch of vmap's, or of the older one that `is_grads_batched=True` and
    `jacobian(vectorize=True)` use."""
    return value is not None and (compat.is_batched(value) or compat.is_legacy_batched(value))


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is entered, of whose tangents kernels know nothing."""
    return torch.autograd.forward_ad._current_level >= 0


def in_functorch() -> bool:
    """Whether a torch.func transform runs now."""
    return compat.functorch_level() is not None


def unwrap_of(tensor: torch.Tensor) -> Callable | None:
    """A function to the tensor that a wrapper of torch.func's stands for; None where a tensor is no wrapper."""
    return compat.unwrap_if_dead if compat.is_wrapped(tensor) else None


def functorch_implementations() -> dict:
    """The functions behind torch.func's transforms, by the names of `FUNCTORCH_LEVELS`, where this PyTorch
    has them: calls of them are captured. Without, they are refused."""
    functions = {name: getattr(compat, f"functorch_{name}") for name in FUNCTORCH_LEVELS}
    return {name: function for name, function in functions.items() if function is not None}
