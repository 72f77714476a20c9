"""Products in float32 leave their biases to fused kernels that read the results."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder

from .test_triton_fuser import DEVICE

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

INPUT = 7, 6


def activated(x, w, b):
    return F.gelu(F.linear(x, w, b))


def residual(x, w, b):
    return torch.sin(x[:, :1]) + torch.addmm(b, x, w.t())


def in_batches(x, w, b):
    y = F.linear(x.view(1, 7, 6), w, bias=b)
    return torch.relu(y) + y


def through_a_view(x, w, b):
    return torch.sigmoid(F.linear(x, w, b).view(7, 5, 1).transpose(0, 1)) * 2


def view_for_a_product(x, w, b):
    y = F.linear(x, w, b).view(1, 7, 5).transpose(1, 2)
    return torch.bmm(y, x.view(1, 7, 6))


def returned(x, w, b):
    y = F.linear(x, w, b)
    return y, torch.exp(y)


def read_by_a_product(x, w, b):
    y = F.linear(x, w, b)
    return torch.mm(y, w) + torch.tanh(y)[:, :1]


def overwritten(x, w, b):
    return F.relu(F.linear(x, w, b), inplace=True) * 2


def scaled(x, w, b):
    return torch.tanh(torch.addmm(b, x, w.t(), beta=2))


def of_a_matrix(x, w, b):
    return torch.tanh(torch.addmm(b.expand(7, 5), x, w.t()))


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(*s, device=DEVICE, dtype=dtype).requires_grad_() for s in (INPUT, (5, 6), (5,))]


def results(run, dtype=torch.float32):
    arguments = operands(dtype)
    outputs = run(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(o.sin().sum() for o in outputs)
    return [o.detach() for o in outputs], torch.autograd.grad(total, arguments)


def biased(compiled):
    """The products of the forward that add a bias."""
    products = [b for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name in ("linear", "addmm")]
    return sum(len(b.args) == 3 and None not in b.args for b in products)


@pytest.mark.parametrize("function", [activated, residual, in_batches, through_a_view], ids=lambda f: f.__name__)
def test_kernels_add_the_bias(function):
    compiled = thunder.jit(function, executors=["triton_fuser"])
    torch.testing.assert_close(results(compiled), results(function))
    assert biased(compiled) == 0
    with torch.no_grad():
        torch.testing.assert_close(compiled(*operands()), function(*operands()))
    assert biased(compiled) == 0


@pytest.mark.parametrize(
    "function",
    [returned, read_by_a_product, view_for_a_product, overwritten, scaled, of_a_matrix],
    ids=lambda f: f.__name__,
)
def test_the_product_adds_it_where_a_kernel_would_write_the_sum(function):
    compiled = thunder.jit(function, executors=["triton_fuser"])
    torch.testing.assert_close(results(compiled), results(function))
    assert biased(compiled) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types_keep_their_biases(dtype):
    compiled = thunder.jit(activated, executors=["triton_fuser"])
    torch.testing.assert_close(results(compiled, dtype), results(activated, dtype))
    assert biased(compiled) == 1


def test_products_in_tensor_cores_keep_their_biases():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        compiled = thunder.jit(activated, executors=["triton_fuser"])
        compiled(*operands())
    finally:
        torch.set_float32_matmul_precision(before)
    assert biased(compiled) == 1


def test_as_much_is_saved():
    """A backward adds the bias again, or reads the sum in the place of the product."""

    def saved(passes):
        compiled = thunder.jit(activated, executors=["triton_fuser"], passes=passes)
        compiled(*operands())
        trace = thunder.last_traces(compiled)[-1]
        (tensors, _) = trace.output[1]
        return sum(math.prod(t.shape) for t in tensors if t.name not in {a.name for a in trace.args})

    assert saved(lambda p: p) == saved(lambda p: p.without("Separate Biases"))


def test_a_network_without_a_fuser_keeps_its_biases():
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU()).to(DEVICE)
    compiled = thunder.jit(model, executors=["torch"])
    x = operands()[0]
    assert torch.equal(compiled(x), model(x)) and biased(compiled) == 1


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: nn.Conv1d(3, 4, 3), (2, 3, 9)),
        (lambda: nn.Conv2d(3, 6, 3, padding=1), (2, 3, 8, 8)),
        (lambda: nn.ConvTranspose2d(3, 6, 3), (2, 3, 8, 8)),
        (lambda: nn.Conv3d(2, 4, 3), (2, 2, 5, 5, 5)),
    ],
    ids=["1-D", "2-D", "transposed", "3-D"],
)
def test_the_gradient_of_a_convolutions_bias_is_summed_where_the_cotangent_is_computed(make, shape):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.GELU()).to(DEVICE)
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    compiled = thunder.jit(model, executors=["triton_fuser"], tiers=0)
    got, want = compiled(x), model(x)
    wanted, g = [x, *model.parameters()], torch.randn_like(want)
    pairs = zip(torch.autograd.grad(got, wanted, g), torch.autograd.grad(want, wanted, g), strict=True)
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)
    fused = [b for b in thunder.last_backward_traces(compiled)[-1].bound_symbols if b.sym.is_fusion]
    assert any(s.sym.name == "sum" for b in fused for s in b.subsymbols)
    alone = thunder.jit(make().to(DEVICE), executors=["triton_fuser"], tiers=0)  # nothing computes the cotangent
    alone(x).sin().sum().backward()
    assert not any(b.sym.name == "sum" for b in thunder.last_backward_traces(alone)[-1].bound_symbols)
