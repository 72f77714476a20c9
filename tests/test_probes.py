"""Probes of PyTorch that thunder makes while it captures: the user's hooks, modes and random numbers do not see them."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import thunder
from thunder import compat

PROBED = {
    "clamp between tensors": lambda x: torch.clamp(x, x.detach() - 1),
    "clamp by a number": lambda x: x.clamp(0.1),
    "fmin": lambda x: torch.fmin(x, x * 2),
    "fmax": lambda x: torch.fmax(x, x.detach()),
    "atan2": lambda x: torch.atan2(x, x + 1),
    "no rule": lambda x: torch.special.bessel_j0(x.detach()) * torch.linalg.matrix_exp(x.expand(4, 4)).sum(0),
    "under autocast": lambda x: torch.nn.functional.linear(x, torch.ones(4, 4)).float(),
}


@pytest.fixture(autouse=True)
def anew():
    """Answers of earlier probes are forgotten."""
    from thunder.compat import autocast
    from thunder.ops import corners

    for function in (autocast.casts_keep_grad_mode, corners.kept_at_bounds, corners.kept_at_tie):
        function.cache_clear()
    corners.turns_at_origin.cache_clear()
    corners.drops_far_bounds.cache_clear()


def packed_by(f, context=contextlib.nullcontext) -> list:
    """The shapes and types of the tensors that hooks for saved tensors see in a call."""
    seen: list = []

    def pack(t):
        seen.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), context():
        f(torch.linspace(-1, 1, 4, requires_grad=True))
    return seen


@pytest.mark.parametrize("name", PROBED)
def test_hooks_for_saved_tensors_see_the_same_in_the_call_that_compiles(name):
    context = contextlib.nullcontext
    if name == "under autocast":
        context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    f = thunder.jit(PROBED[name], fallback="error")
    first, second = packed_by(f, context), packed_by(f, context)
    assert first == second


@pytest.mark.parametrize("name", PROBED)
def test_a_checkpoint_around_the_call_that_compiles(name):
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "under autocast"):
        checkpoint(thunder.jit(PROBED[name], fallback="error"), x, use_reentrant=False).sum().backward()
        (wanted,) = torch.autograd.grad(PROBED[name](x).sum(), x)
    torch.testing.assert_close(x.grad, wanted)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.name())
        return operation(*args, **(kwargs or {}))


def test_a_dispatch_mode_around_the_call_sees_the_program_alone():
    f = thunder.jit(lambda x: torch.fmin(x, x.cos()).sum(), executors=["torch"], fallback="error")
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    with Counting() as first:
        f(x)
    with Counting() as second:
        f(x)
    assert first.names == second.names


def test_a_probe_asks_in_the_default_dtype_of_its_own():
    """Autocast casts float32 alone, so that a probe in the user's default dtype would see none."""
    usual = compat.casts_keep_grad_mode()
    compat.casts_keep_grad_mode.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert compat.casts_keep_grad_mode() == usual
    finally:
        torch.set_default_dtype(torch.float32)


DRAWING = {
    "rand": lambda: torch.rand(3),
    "randperm": lambda: torch.randperm(5),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(8), 0.5),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "bernoulli_": lambda: torch.ones(3).bernoulli_(0.5),
    "multinomial": lambda: torch.ones(5).multinomial(3),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_probe_draws_from_a_generator_of_its_own(name):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with compat.probing(draws=True):
        first, second = DRAWING[name](), DRAWING[name]()
    assert torch.equal(before, torch.get_rng_state())
    assert name == "randperm" or first.shape == second.shape
    wanted = DRAWING[name]()
    torch.manual_seed(3)
    with compat.drawing_apart({torch.device("cpu"): torch.Generator().manual_seed(3)}):
        torch.testing.assert_close(DRAWING[name](), wanted)


def test_another_thread_does_not_repeat_its_numbers():
    """It draws while a probe runs; the probe does not set the default generator back."""
    torch.manual_seed(0)
    wanted = [torch.rand(2) for _ in range(2)]
    torch.manual_seed(0)
    drawn = []

    def draw():
        drawn.append(torch.rand(2))

    with compat.probing(draws=True):
        torch.rand(2)
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        torch.rand(2)
    draw()
    torch.testing.assert_close(drawn, wanted)


def decides_by_random_numbers(x):
    noise = torch.rand(4)
    return x * noise if torch.nn.functional.dropout(noise, 0.5).sum() > 1 else x + noise


def draws_until_it_fits(x):
    return x * torch.nn.init.trunc_normal_(torch.empty(4), a=-1.0, b=1.0)


@pytest.mark.parametrize("program", [decides_by_random_numbers, draws_until_it_fits])
def test_a_capture_does_not_set_the_default_generator(program):
    """Another thread would repeat the numbers that it draws in between."""
    states = []

    def look(frame, event, argument):
        if event == "c_call" and argument.__name__ in ("set_state", "manual_seed"):
            states.append(argument.__self__)

    for seed in range(4):
        x, compiled = torch.ones(4, requires_grad=True), thunder.jit(program, fallback="error")
        torch.manual_seed(seed)
        sys.setprofile(look)
        try:
            actual = compiled(x)
        finally:
            sys.setprofile(None)
        after = torch.rand(2)
        torch.manual_seed(seed)
        torch.testing.assert_close(actual, program(x))
        torch.testing.assert_close(after, torch.rand(2))
    assert states and all(generator is not torch.default_generator for generator in states)
