"""`thunder.functional`: the 2024 spelling of compiling functions only."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["jit"]


def jit(fn: Callable, /, **options):
    """`thunder.jit` for functions. Raises TypeError for a module."""
    import torch

    import thunder

    if isinstance(fn, torch.nn.Module):
        raise TypeError("thunder.functional.jit compiles functions; thunder.jit compiles modules too")
    return thunder.jit(fn, **options)
