"""Casts of weights that are launched together, and products that write what is cast of them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.core import regions
from thunder.ops.families.linalg import _mm_in_float32, _transposed_in_float32
from thunder.transforms import wide_products

from .test_triton_fuser import DEVICE, fusions
from .test_triton_numbers import with_fuser

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the product in float32 is one of GPUs")


@pytest.fixture(autouse=True)
def launches_cost(monkeypatch):
    monkeypatch.setattr(wide_products, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(regions, "SMALL", 0)  # on a GPU, casts of few elements are one region otherwise


def names(trace) -> list[str]:
    return [b.sym.name for b in trace.bound_symbols]


def layers(count: int, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.Tanh())))


def under_autocast(module):
    def run(x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return module(x).float().pow(2).sum()

    return run


def check_gradients(compiled, run, module, x, exact):
    """Gradients of all parameters are no farther from float64's than eager's are, and of its types and layouts."""
    gradients, want = (torch.autograd.grad(f(x), list(module.parameters())) for f in (compiled, run))
    wide = copy.deepcopy(module).double()
    truth = torch.autograd.grad(exact(wide, x.double()), list(wide.parameters()))
    for a, b, e in zip(gradients, want, truth, strict=True):
        assert (a - e).norm() <= 1.5 * (b - e).norm() + 1e-3 * e.norm()
        assert a.dtype is b.dtype and a.stride() == b.stride()


@pytest.mark.parametrize("count", [1, 3, 12])
def test_weights_of_a_layer_are_cast_by_one_launch(count):
    module, x = layers(count).to(DEVICE), torch.randn(5, 8, device=DEVICE)
    run = under_autocast(module)
    compiled, _ = with_fuser(run)
    check_gradients(compiled, run, module, x, lambda module, x: module(x).pow(2).sum())
    regions = fusions(compiled)
    assert len(regions) == count + 1, "the weights of a layer are cast by the launch of what is before it"
    assert all(f.kernels == 1 and len(f.region.parts) == 3 for f in regions[:-1])
    assert "to" not in names(thunder.last_traces(compiled)[-1])
    assert names(thunder.last_backward_traces(compiled)[-1]).count("mm_in_float32") == count


def test_a_cast_is_not_moved_before_what_it_reads():
    def f(w, v):
        a = w.to(torch.bfloat16)
        b = v.to(torch.bfloat16)
        c = torch.mm(a.float(), w).to(torch.bfloat16)
        return a, b, c

    w, v = torch.randn(4, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    compiled, _ = with_fuser(f)
    for a, b in zip(compiled(w, v), f(w, v), strict=True):
        assert torch.equal(a, b)
    assert sum(len(f.region.parts) for f in fusions(compiled)) >= 2


def test_what_is_written_between_casts_is_cast_as_it_was():
    def f(w):
        a = w.to(torch.bfloat16)
        w.mul_(3)
        b = w.to(torch.bfloat16)
        w.add_(1)
        return a, b, w.to(torch.bfloat16)

    w, v = torch.randn(4), torch.empty(4)
    v.copy_(w)
    compiled, _ = with_fuser(f)
    for a, b in zip(compiled(w), f(v), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(w, v)


@pytest.mark.parametrize("reads", [lambda g, w: g.to(torch.float32) + g.sum(), lambda g, w: g.to(torch.float64)])
def test_products_that_are_read_otherwise_stay(reads):
    x, w = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, 4, dtype=torch.bfloat16)
    compiled = thunder.jit(lambda x, w: reads(torch.mm(x, w), w))
    assert torch.equal(compiled(x, w), reads(torch.mm(x, w), w))
    assert "mm" in names(thunder.last_traces(compiled)[-1])


def test_numerics_of_eager_round_products_as_eager_does():
    module, x = layers(2), torch.randn(5, 8)
    compiled = thunder.jit(under_autocast(module), numerics="eager")
    compiled(x).backward()
    assert "mm_in_float32" not in names(thunder.last_backward_traces(compiled)[-1])


@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_float32_are_nearer_to_the_truth(dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda", dtype=dtype) for _ in range(2))
    exact = a.double() @ b.double()
    for weight in (b, b.t().contiguous().t()):
        actual = _mm_in_float32(a, weight)
        assert actual.dtype is torch.float32
        assert (actual - exact).norm() < 0.1 * ((a @ b) - exact).norm()
        transposed = _transposed_in_float32(a, b, weight)
        assert transposed.dtype is torch.float32 and transposed.stride() == weight.stride()
        torch.testing.assert_close(transposed.double(), a.double().t() @ b.double(), rtol=1e-4, atol=1e-3)


@GPU
def test_a_step_under_autocast_on_a_gpu():
    module, x = layers(3, 64).cuda(), torch.randn(32, 64, device="cuda")

    def run(x):
        with torch.autocast("cuda", torch.bfloat16):
            return F.mse_loss(module(x).float(), x)

    compiled = thunder.jit(run)
    check_gradients(compiled, run, module, x, lambda module, x: F.mse_loss(module(x), x))
    assert len(fusions(compiled)[0].region.parts) == 3, "the input, and the first layer's weight and bias"
    assert "mm_in_float32" in names(thunder.last_backward_traces(compiled)[-1])
