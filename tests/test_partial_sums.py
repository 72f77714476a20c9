"""Sums over rows of several layers, of which other regions and optimizers read some."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.executors.triton_fuser import TritonFuser

from .test_triton_fuser import DEVICE, check_close, fusions

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDTH, ROWS = 24, 140  # more rows than are reduced without partial sums


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def layers(count, dtype=torch.float32):
    torch.manual_seed(count)
    return nn.Sequential(*(Block() for _ in range(count))).to(DEVICE, dtype)


def positive(dtype=torch.float32, shape=(ROWS, WIDTH)):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)).to(
        dtype
    )


def gradients(function, module, *inputs):
    """The gradients of the parameters and of the inputs, for a cotangent of squares."""
    inputs = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [*module.parameters(), *(x for x in inputs if x.requires_grad)]
    return torch.autograd.grad(function(*inputs).square().sum(), wanted)


def jitted(module):
    return thunder.jit(module, executors=[TritonFuser("sums"), "torch"], fallback="error")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_several_layers(dtype):
    module, x = layers(3, dtype), positive(dtype)
    compiled = jitted(module)
    got, eager = (gradients(f, module, x) for f in (compiled, module))
    wide = copy.deepcopy(module).double()
    for g, e, exact in zip(got, eager, gradients(wide, wide, x.double()), strict=True):
        if dtype is torch.float64:
            torch.testing.assert_close(g, e)
        else:
            check_close(g, e, exact)
    assert len(fusions(compiled, backward=True)) == 4


@pytest.mark.parametrize("layout", ["transposed", "every second"])
def test_inputs_of_other_layouts(layout):
    """Kernels for them may have no partial sums, or others: the sum is one of the terms then."""

    def f(x, y, g):
        return (x * g).sum(0), (y.exp() * g).sum(0), x @ x.t()

    whole = [
        positive(shape=(WIDTH, ROWS) if layout == "transposed" else (ROWS, 2 * WIDTH)) * n for n in (1.0, 0.5, 2.0)
    ]
    inputs = [t.t() if layout == "transposed" else t[:, ::2] for t in whole]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    expected = f(*inputs)
    for args in (inputs, [t.contiguous() for t in inputs], inputs):
        for got, e in zip(compiled(*args), expected, strict=True):
            torch.testing.assert_close(got, e)


def test_views_of_sums_come_after_them():
    def f(x, y, w):
        a = (x * 2).tanh()
        first = a.sum(0)
        product = a @ w
        b = (product + y).sigmoid()
        return first.reshape(2, -1).t(), b.sum(0, keepdim=True), first, b

    x, y, w = positive(), positive(), torch.eye(WIDTH, device=DEVICE)
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    got, expected = compiled(x, y, w), f(x, y, w)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)
        assert g.stride() == e.stride()
    assert got[0].data_ptr() == got[2].data_ptr(), "a view, as in PyTorch"


def test_regions_that_are_not_fused_are_summed_up_by_pytorch():
    module, x = layers(2, torch.float64), positive(torch.float64)
    fuser = TritonFuser("sums")
    fuser.set_fuel(3)
    compiled = thunder.jit(module, executors=[fuser, "torch"], fallback="error")
    for g, e in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(g, e)


def test_maps_of_sums_run_with_them():
    """An update by what is summed up, in another shape."""

    def f(x, weights, biases):
        new = []
        for w, b in zip(weights, biases, strict=True):
            x = (x @ w).tanh()
            gradient = (x * x.cos()).sum(0, keepdim=True)
            new.append((b - 0.1 * gradient.reshape(b.shape).sign(), gradient))
        return new

    torch.manual_seed(0)
    x, weights = positive(torch.float64), [torch.randn(WIDTH, WIDTH, device=DEVICE).double() for _ in range(3)]
    biases = [torch.randn(4, WIDTH // 4, device=DEVICE).double() for _ in range(3)]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(x, weights, biases), f(x, weights, biases))


def test_sums_of_group_norms():
    """A group norm's weight: sums of each channel of an image, which its input's gradient needs, are added up."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed, self.norm = nn.Conv2d(6, 6, 1), nn.GroupNorm(2, 6)

        def forward(self, x):
            return x + torch.tanh(self.norm(self.mixed(x)))

    torch.manual_seed(0)
    module, x = (
        nn.Sequential(*(Normed() for _ in range(3))).to(DEVICE, torch.float64),
        positive(torch.float64, (5, 6, 4, 3)),
    )
    compiled = jitted(module)
    for g, e in zip(*(gradients(f, module, x) for f in (compiled, module)), strict=True):
        torch.testing.assert_close(g, e)


def test_sums_that_are_read_in_their_region():
    def f(x, weights):
        new = []
        for w in weights:
            x = (x @ w).tanh()
            total = x.exp().sum(0)
            new.append((x.cos().sum(0), (total * total).sum()))
        return new

    torch.manual_seed(0)
    x, weights = positive(torch.float64), [torch.randn(WIDTH, WIDTH, device=DEVICE).double() for _ in range(3)]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(x, weights), f(x, weights))


@pytest.mark.slow
def test_an_optimizers_step_reads_sums():
    module, x = layers(3, torch.float64), positive(torch.float64)
    ours = copy.deepcopy(module)

    def step(module, x):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
        loss = F.mse_loss(module(x), x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = thunder.jit(step, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(ours, x), step(module, x))
    for p, q in zip(ours.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p, q)
