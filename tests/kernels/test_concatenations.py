"""Concatenations of many short pieces: a function that several of them are is computed once for each element."""

import pytest
import torch

import thunder
from thunder.executors.cpp_fuser import CppFuser
from thunder.executors.triton_fuser import TritonFuser

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FUSERS = {"cpp": CppFuser, "triton": TritonFuser}


def encoded(x):
    """The positions of a radiance field as sines and cosines."""
    return torch.cat([x, *(f(x * 2.0**i) for i in range(10) for f in (torch.sin, torch.cos))], -1)


def in_two_dimensions(x):
    return torch.cat([x.sin()[:, :1], x.exp(), x.t()[: x.shape[0], :3].tanh(), (x * 3).sin(), (x + 1).exp()], 1)


def under_a_sum(x):
    return (encoded(x) * 0.1).sum(-1)


def stacked(x):
    return torch.stack([x.exp(), x.sin(), x, (-x).exp(), x.cos()], 1).flatten(0, 1)


PROGRAMS = [encoded, in_two_dimensions, under_a_sum, stacked]


@pytest.mark.parametrize("fuser", FUSERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_gradients(program, fuser):
    torch.manual_seed(0)
    x = torch.randn(9, 9)[:, :3].detach().requires_grad_() if program is not in_two_dimensions else torch.randn(5, 5)
    compiled = thunder.jit(program, executors=[FUSERS[fuser]("every_region", always=True)], tiers=0)
    got, want = compiled(x), program(x)
    torch.testing.assert_close(got, want)
    if x.requires_grad:
        (ours,), (exact,) = (torch.autograd.grad(y.sin().sum(), x) for y in (got, want))
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fuser", FUSERS)
def test_a_function_is_computed_once(fuser):
    compiled = thunder.jit(encoded, executors=[FUSERS[fuser]("every_region", always=True)], tiers=0)
    compiled(torch.randn(64, 3))
    (shown,) = thunder.last_kernels(compiled).values()
    assert shown.count(" sin(") == shown.count(" cos(") == 1  # in the IR
    if fuser == "triton":  # a kernel for whole tiles, and one for the last
        assert shown.count("tl.sin(") == shown.count("tl.cos(") == shown.count("def kernel_")
    else:
        assert shown.count("sin") < 10
