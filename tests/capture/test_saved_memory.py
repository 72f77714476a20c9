"""Several calls before one backward: eager PyTorch saves memory, and autograd does not count writes through `.data`."""

import pytest
import torch
from torch import nn

import thunder
from tests.kernels_in_use import EVERY_REGION
from tests.paths.compared import assert_same


def drawn(x, w, noise):
    return x * w * noise.data.normal_()


def counted(x, w, noise):
    noise.data.add_(1)
    return (x * w * noise).sin() * noise.sin()


def of_a_part(x, w, noise):
    noise.data[1:3].mul_(2)
    return (x * w)[1:3] * noise[1:3]


def of_a_part_that_was_made_before(x, w, noise):
    part = noise.data[1:3]
    part.mul_(2)
    return (x * w)[1:3] * part * noise[1:3]


def of_a_view(x, w, noise):
    noise.data.add_(1)
    return (x * w).view(2, 2) @ noise.view(2, 2).t() * noise.reshape(2, 2)


def of_a_copy(x, w, noise):
    noise.data.add_(1)
    return (x * w).view(2, 2) * noise.view(2, 2).t().reshape(4).view(2, 2) * noise.clone().view(2, 2)


def of_a_parameter(x, w, noise):
    w.data.mul_(0.5)
    return x * w * w * noise


def assigned(x, w, noise):
    noise.data = noise * 2
    return x * w * noise * noise.view(2, 2).view(4)


def not_saved(x, w, noise):
    noise.data.add_(1)
    return (x * w + noise).exp()


def read_before(x, w, noise):
    y = x * w * noise * noise.sin()
    noise.data.add_(1)
    return y


PROGRAMS = [
    drawn, counted, of_a_part, of_a_part_that_was_made_before, of_a_view, of_a_copy, of_a_parameter, assigned,
    not_saved, read_before,
]  # fmt: skip


def gradients(jit, program, calls):
    torch.manual_seed(0)
    w, noise, seen = nn.Parameter(torch.randn(4)), torch.ones(4), []
    f = jit(lambda x: program(x, w, noise))
    for _ in range(3):
        w.grad, x = None, torch.randn(4, requires_grad=True)
        results = [f(x * i) for i in range(1, calls + 1)]
        sum(y.sum() for y in results).backward()
        seen.append(([y.detach() for y in results], x.grad, w.grad.clone(), noise.clone()))
    return seen


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_backward_reads_memory_as_the_last_call_left_it(program, calls):
    computed_gradients = gradients(lambda f: thunder.jit(f, fallback="error"), program, calls)
    assert_same(computed_gradients, gradients(lambda f: f, program, calls), 1e-6)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "options", [{"memory_budget": 0.01}, {"executors": [EVERY_REGION]}], ids=["little memory", "kernels"]
)
def test_in_programs_that_recompute(program, options):
    computed_gradients = gradients(lambda f: thunder.jit(f, fallback="error", **options), program, 2)
    assert_same(computed_gradients, gradients(lambda f: f, program, 2), 1e-6)


@pytest.mark.parametrize("program", [counted, assigned])
def test_gradients_of_gradients_are_refused_in_words(program):
    """They are computed from arguments, which are not as they were."""
    w, noise, x = nn.Parameter(torch.randn(4)), torch.ones(4), torch.randn(4, requires_grad=True)
    y = thunder.jit(lambda x: program(x, w, noise))(x)
    with pytest.raises(RuntimeError, match="which the compiled function writes to after it was used"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
