"""Products that a backward only adds up are added up in place."""

from __future__ import annotations

import pytest
import torch

import thunder
from thunder.core.symbol import OpTags

from .test_triton_fuser import DEVICE
from .test_triton_numbers import with_fuser


def looped(x, w):
    """Each step is a product of the same weight, whose gradient is their sum."""
    for _ in range(4):
        x = torch.cumsum(torch.nn.functional.linear(x, w), 0)
    return x


def read_by_a_kernel(x, w):
    """The gradient of sin(w) has the factor cos(w)."""
    return looped(x, torch.sin(w) * 2)


def operations(compiled, name):
    trace = thunder.last_backward_traces(compiled)[-1]
    return [b for b in trace.bound_symbols if b.sym.name == name]


def gradients(run, dtype, retain=False):
    torch.manual_seed(0)
    inputs = [torch.randn(n, 6, dtype=torch.float64, device=DEVICE).to(dtype).div(4).requires_grad_() for n in (5, 6)]
    y = run(*inputs)
    return [torch.autograd.grad(y.sum(), inputs, retain_graph=retain) for _ in range(1 + retain)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_weight_of_several_products(dtype):
    compiled, _ = with_fuser(looped)
    torch.testing.assert_close(gradients(compiled, dtype, retain=True), gradients(looped, dtype, retain=True))
    names = operations(compiled, "addmm_")
    assert len(names) == 3 and all(OpTags.IN_PLACE in b.sym.tags for b in names)


def test_what_a_kernel_reads_it_adds_up():
    compiled, _ = with_fuser(read_by_a_kernel)
    torch.testing.assert_close(gradients(compiled, torch.float64), gradients(read_by_a_kernel, torch.float64))
    assert operations(compiled, "addmm_") == operations(compiled, "addmm") == []


def test_without_a_fuser_nothing_changes():
    compiled = thunder.jit(looped, executors=["torch"])
    got, want = gradients(compiled, torch.float32), gradients(looped, torch.float32)
    assert all(map(torch.equal, got[0], want[0])) and operations(compiled, "addmm_") == []


def test_the_product_that_is_computed_last_is_added():
    """Whichever term of the sum it is: the operands of the first need not wait for it."""

    def f(x, w):
        y = torch.nn.functional.linear(x, w).cumsum(0)
        return torch.cat((torch.nn.functional.linear(y, w).cumsum(0), y))

    compiled, _ = with_fuser(f)
    torch.testing.assert_close(gradients(compiled, torch.float64), gradients(f, torch.float64))
    trace = thunder.last_backward_traces(compiled)[-1]
    names = [b.sym.name for b in trace.bound_symbols if b.sym.name in ("mm", "addmm_")]
    assert names[-1] == "addmm_" and names.count("addmm_") == 1
