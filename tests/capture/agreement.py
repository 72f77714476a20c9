"""How the tables of this folder compare what a compiled program did with what eager PyTorch does: exactly."""

from __future__ import annotations

import collections
import dataclasses

import torch


def assert_as_exact(got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, path: str = "result") -> None:
    """As near to the result in float64 as eager's, within twice its distance: for kernels that read other layouts, or
    add up in another order."""
    assert got.dtype is want.dtype and got.shape == want.shape and got.requires_grad == want.requires_grad, path
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    bound = 2 * float((want - exact).abs().max()) + 4 * torch.finfo(want.dtype).eps * largest if exact.numel() else 0.0
    assert bool(((got - exact).abs() <= bound).all()), f"{path}: {got} is not {want}"


def assert_same(got, want, path: str = "result") -> None:
    """Same types, values, dtypes, requires_grad, down through containers, dataclasses and plain objects."""
    assert type(got) is type(want), f"{path}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape and got.device == want.device, (
            f"{path}: {got.dtype} {got.shape}, {want.dtype} {want.shape}"
        )
        assert got.requires_grad == want.requires_grad, (
            f"{path}: requires_grad is {got.requires_grad}, in eager {want.requires_grad}"
        )
        assert torch.equal(got, want) or torch.equal(got.nan_to_num(), want.nan_to_num()), (
            f"{path}: {got} is not {want}"
        )
        assert_same(vars(got), vars(want), f"{path}.__dict__")
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(got) == len(want), f"{path}: {len(got)} items, in eager {len(want)}"
        for i, (a, b) in enumerate(zip(got, want)):
            assert_same(a, b, f"{path}[{i}]")
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{path}: keys {list(got)}, in eager {list(want)}"
        for k in want:
            assert_same(dict.__getitem__(got, k), dict.__getitem__(want, k), f"{path}[{k!r}]")
        assert getattr(got, "default_factory", None) == getattr(want, "default_factory", None)
    elif isinstance(want, (set, frozenset)):
        assert len(got) == len(want)
        if not any(isinstance(v, torch.Tensor) for v in want):
            assert got == want, f"{path}: {got}, in eager {want}"
    elif isinstance(want, float):
        assert repr(got) == repr(want), f"{path}: {got}, in eager {want}"  # repr tells 0.0 from -0.0, and nan is itself
    elif isinstance(want, torch.nn.Module) or callable(want):
        return
    elif dataclasses.is_dataclass(want) or (hasattr(want, "__dict__") and type(want).__eq__ is object.__eq__):
        assert_same(vars(got), vars(want), f"{path}.__dict__")
    else:
        assert got == want, f"{path}: {got!r}, in eager {want!r}"
