"""A run of a program, several calls with what happens between them, eager and compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import thunder
from tests.paths.compared import assert_same, detached
from thunder.errors import CaptureError, FallbackWarning


def same_as_eager(run: Callable, tolerance: float = 1e-6) -> None:
    """`run(jit)` compiles functions by `jit` and gives what it has seen. Nothing falls back."""
    assert_same(_seen(run, lambda f: thunder.jit(f, fallback="error")), _seen(run, lambda f: f), tolerance)


def refused(run: Callable, reason: str) -> None:
    """The run raises in words with fallback="error", and by itself is eager's with one warning."""
    with pytest.raises(CaptureError, match=reason):
        _seen(run, lambda f: thunder.jit(f, fallback="error"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = _seen(run, lambda f: thunder.jit(f, fallback="eager"))
    assert any(w.category is FallbackWarning for w in caught)
    assert_same(actual, _seen(run, lambda f: f), 1e-6)


def _seen(run: Callable, jit: Callable) -> list:
    torch.manual_seed(0)
    return [detached(x) for x in run(jit)]


def state(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """Copies of what a module holds, and of the gradients."""
    held = [x.clone() for x in module.state_dict().values()]
    return held + [None if p.grad is None else p.grad.clone() for p in module.parameters()]
