"""Programs of new users beside eager: each is run with functions as they are and with `thunder.jit`, and all that can be
seen of it is compared: results, classes, strides, what requires grad, what is printed, and random state."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import io
import random
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import thunder
from tests.kernels_in_use import assert_near, rounding

PROGRAMS: dict[str, Callable] = {}
_PLAIN = (int, str, bool, type(None), bytes, complex, torch.dtype, torch.device)


def program(function: Callable) -> Callable:
    """Registers a program: it takes `jit`, which compiles a function or leaves it as it is, and returns what it saw."""
    assert function.__name__ not in PROGRAMS
    PROGRAMS[function.__name__] = function
    return function


def normal(*shape: int, seed: int = 0, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that the shape and the seed decide."""
    generator = torch.Generator().manual_seed(seed * 7 + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def trained(compiled, module: nn.Module, calls, optimizer=None) -> list:
    """Results and gradients of the module's parameters, with a step of the optimizer behind each call."""
    seen = []
    for args in calls:
        module.zero_grad()
        out = compiled(*args)
        out.float().pow(2).sum().backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        seen.append((out, gradients))
        if optimizer is not None:
            optimizer.step()
    return seen


def with_gradients(compiled, calls) -> list:
    """Results or errors, the gradients of the arguments, and the arguments behind the call."""
    seen: list = []
    for args in calls:
        try:
            out = compiled(*args)
            results = out if isinstance(out, (tuple, list)) else [out]
            losses = [r.abs().pow(2).sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
            if losses:
                sum(losses).backward()
            seen.append((out, [a.grad for a in args if isinstance(a, torch.Tensor)], list(args)))
        except Exception as error:  # noqa: BLE001 - eager's is the same
            seen.append((type(error).__name__, str(error)[:60]))
    return seen


def snapshot(x):
    """What can be seen of a value, to compare."""
    if isinstance(x, torch.Tensor):
        return _of_tensor(x)
    if isinstance(x, (BaseException, enum.Enum)):
        return type(x).__name__, str(x)
    if isinstance(x, float):
        return "nan" if x != x else x
    if isinstance(x, _PLAIN):
        return type(x).__name__, x
    if isinstance(x, dict):
        return type(x).__name__, [(snapshot(k), snapshot(v)) for k, v in x.items()]
    if isinstance(x, (list, tuple, collections.deque)):
        return type(x).__name__, [snapshot(v) for v in x]
    if isinstance(x, (set, frozenset)):
        return type(x).__name__, sorted(map(repr, x))
    if isinstance(x, nn.Module):
        return type(x).__name__, snapshot(x.state_dict(keep_vars=True))
    if dataclasses.is_dataclass(x):
        return type(x).__name__, [snapshot(getattr(x, field.name)) for field in dataclasses.fields(x)]
    return type(x).__name__


def _of_tensor(x: torch.Tensor):
    said = type(x).__name__, str(x.dtype), str(x.layout), x.requires_grad, x.is_leaf
    with torch.no_grad():
        values = x.detach().as_subclass(torch.Tensor)
        if x.is_nested or x.layout is not torch.strided:
            return said, values.to_dense().clone() if not x.is_nested else [v.clone() for v in values.unbind()]
        return said, tuple(x.shape), x.stride() if x.numel() else None, values.clone()


def agree(ours, eager, bound: float = 0, path: str = "") -> None:
    """Raises AssertionError where two snapshots differ by more than the bound, with the place."""
    if isinstance(eager, torch.Tensor):
        assert_near(ours, eager, bound, lambda text: f"{path}: {text}")
    elif bound and isinstance(eager, float) and isinstance(ours, float):
        assert abs(ours - eager) <= bound * max(1.0, abs(eager)), (path, ours, eager)
    elif isinstance(eager, (tuple, list)):
        assert type(ours) is type(eager) and len(ours) == len(eager), (path, ours, eager)
        for i, (a, b) in enumerate(zip(ours, eager)):
            agree(a, b, bound, f"{path}[{i}]")
    else:
        assert ours == eager, (path, ours, eager)


def outcome(program: Callable, jit: Callable) -> list:
    """All that can be seen of a program."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = snapshot(program(jit))
    return [seen, printed.getvalue(), torch.rand(2), random.random(), np.random.rand()]


def beside_eager(program: Callable, fallback: str) -> None:
    """Raises AssertionError where a program is not what it is in eager, or where it is refused under "error"."""
    compiled = []

    def jit(function):
        compiled.append(thunder.jit(function, fallback=fallback))
        return compiled[-1]

    ours, eager = outcome(program, jit), outcome(program, lambda function: function)
    agree(ours, eager, max(map(rounding, compiled), default=0))
