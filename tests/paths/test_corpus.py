"""The corpus of programs that decide by data, beside eager: results, gradients, effects and random state."""

import copy

import pytest
import torch

import thunder
from tests.paths.corpus import PROGRAMS

CALLS = 20


def outcome(function, args) -> tuple:
    """What a call gives: its result or exception, gradients, its arguments afterwards, and the next random number."""
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error), [a.detach() for a in args], torch.rand(())
    gradients = []
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    outputs = [o for o in leaves(result) if o.requires_grad]
    if outputs and inputs:
        gradients = torch.autograd.grad(sum(o.sum() for o in outputs), inputs, allow_unused=True)
    return result, gradients, [a.detach() for a in args], torch.rand(())


def leaves(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return (
        [t for v in (x.values() if isinstance(x, dict) else x) for t in leaves(v)]
        if isinstance(x, (tuple, list, dict))
        else []
    )


def assert_same(got, want) -> None:
    assert type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        assert (got.shape, got.dtype, got.requires_grad) == (want.shape, want.dtype, want.requires_grad)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), (got, want)
        for a, b in zip(got, want):
            assert_same(a, b)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        assert_same(list(got.values()), list(want.values()))
    else:
        assert got == want or got != got and want != want, (got, want)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    function, make = PROGRAMS[name]
    compiled = thunder.jit(function, fallback="error", max_paths=64)
    g = torch.Generator().manual_seed(0)
    for call in range(CALLS):
        args = make(g)
        outcomes = []
        for f in (function, compiled):
            torch.manual_seed(call)
            outcomes.append(outcome(f, [a.detach().clone().requires_grad_(a.requires_grad) for a in copy.copy(args)]))
        assert_same(outcomes[1], outcomes[0])
