"""Programs that decide by data, beside eager: results, gradients, effects, what they print, and random state."""

from __future__ import annotations

import contextlib
import io
import random
import re
import types

import torch
from torch import nn

import thunder
from tests.kernels_in_use import assert_near, rounding

_NUMBERS = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
PLAIN = (int, float, str, bool, type(None))


def outcome(function, args: tuple, written: tuple = ()) -> tuple:
    """What a call gives: its result or exception, what it prints, gradients, what it has written to, and the next
    random numbers."""
    gradients, result, printed = [], None, io.StringIO()
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    with contextlib.redirect_stdout(printed):
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001
            result = type(error), str(error)
    outputs = [o for o in leaves(result) if o.requires_grad]
    parameters = [p for w in written if isinstance(w, nn.Module) for p in w.parameters() if p.requires_grad]
    if outputs and inputs + parameters:
        try:
            gradients = torch.autograd.grad(sum(o.sum() for o in outputs), inputs + parameters, allow_unused=True)
        except RuntimeError as error:  # the program has written to what its derivative reads
            gradients = type(error)
    drawn = torch.rand(()), random.random()
    return detached(result), gradients, printed.getvalue(), [state_of(x) for x in (*args, *written)], drawn


def state_of(x):
    """A copy of what a program may have written to."""
    if isinstance(x, torch.Tensor):
        grad = None if x.grad_fn is not None or x.grad is None else x.grad.clone()
        return x.detach().clone(), x.requires_grad, grad
    if isinstance(x, nn.Module):
        plain = {k: v for k, v in vars(x).items() if k[0] != "_" and isinstance(v, (*PLAIN, dict, list))}
        tensors = [*x.state_dict(keep_vars=True).items()]
        return state_of(plain), [(name, state_of(t)) for name, t in tensors], [state_of(c) for c in x.children()]
    if isinstance(x, torch.optim.Optimizer):
        return [state_of(x.state.get(p, {})) for group in x.param_groups for p in group["params"]]
    if isinstance(x, types.SimpleNamespace):
        return state_of(vars(x))
    if isinstance(x, dict):
        return {k: state_of(v) for k, v in x.items()}
    return [state_of(v) for v in x] if isinstance(x, (list, tuple)) else x


def detached(x):
    """A result without its graph: what it says of `requires_grad` stays."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if type(x) in (list, tuple):
        return type(x)(map(detached, x))
    return {k: detached(v) for k, v in x.items()} if isinstance(x, dict) else x


def leaves(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
    return [t for v in inner for t in leaves(v)]


def assert_same(got, want, rtol: float = 0) -> None:
    assert type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        assert (got.shape, got.dtype, got.requires_grad) == (want.shape, want.dtype, want.requires_grad)
        assert_near(got, want, rtol)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), (got, want)
        for a, b in zip(got, want):
            assert_same(a, b, rtol)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        assert_same(list(got.values()), list(want.values()), rtol)
    elif rtol and isinstance(want, float):
        assert abs(got - want) <= rtol * max(1.0, abs(want)) or got != got and want != want, (got, want)
    elif rtol and isinstance(want, str) and (numbers := _NUMBERS.findall(want)):
        assert _NUMBERS.sub("#", got) == _NUMBERS.sub("#", want), (got, want)
        assert_same([*map(float, _NUMBERS.findall(got))], [*map(float, numbers)], rtol)
    else:
        assert got == want or got != got and want != want, (got, want)


def beside_eager(make, calls, **options):
    """Compares each of `calls`, tuples of arguments, with eager's, and returns the compiled function.

    make: gives a program and what it writes to, see `tests/paths/corpus.py`.
    """
    programs = [make(), make()]
    compiled = thunder.jit(programs[1][0], **({"fallback": "error", "max_paths": 64} | options))
    for seed, args in enumerate(calls):
        outcomes = []
        for f, written in (programs[0], (compiled, programs[1][1])):
            torch.manual_seed(seed)
            random.seed(seed)
            outcomes.append(outcome(f, tuple(own(a) for a in args), written))
        assert_same(outcomes[1], outcomes[0], rounding(compiled))
    return compiled


def own(x):
    """A copy of a tensor, which a program may write to; anything else as it is."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def keeping_nothing(function):
    """What makes a program that is `function`."""
    return lambda: (function, ())
