"""Products with a dimension of 1 are elementwise operations and sums of kernels, fused with what is around them."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thunder

from .test_triton_fuser import DEVICE, fusions, others

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

SIZES = st.one_of(st.just(1), st.integers(2, 70))
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def distance(actual, exact):
    return (actual.double() - exact).norm() / exact.norm().clamp_min(1e-30)


@given(SIZES, SIZES, SIZES, DTYPES, st.booleans(), st.integers(0, 1 << 20))
@settings(max_examples=25, deadline=None)
def test_products_are_within_the_bound_of_sums_in_float32(m, k, n, dtype, turned, seed):
    """N. Higham 2002, "Accuracy and Stability of Numerical Algorithms", (3.13), and one rounding of the result."""
    torch.manual_seed(seed)
    a = torch.randn(*((k, m) if turned else (m, k)), dtype=dtype, device=DEVICE)
    b = torch.randn(k, n, dtype=dtype, device=DEVICE)

    def product(a, b):
        return torch.mm(torch.relu(a).t() if turned else torch.relu(a), b) * 2

    compiled = thunder.jit(product, executors=["triton_fuser"])
    actual, exact = compiled(a, b), product(a.double(), b.double())
    assert actual.dtype is dtype and actual.shape == (m, n)
    assert 1 not in (m, k, n) or not any(name.startswith("mm") for name in others(compiled))
    own, inside = (torch.finfo(t).eps / 2 for t in (dtype, torch.promote_types(dtype, torch.float32)))
    bound = own * exact.abs() + (k + 2) * inside * product(a.double(), b.double().abs())
    bound += torch.finfo(dtype).smallest_normal * own * 2
    assert ((actual.double() - exact).abs() <= (1 + own) * bound).all()


@given(SIZES, st.sampled_from([(1, 24), (24, 1), (1, 1)]), DTYPES, st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_layers_with_one_output_or_input_and_their_gradients(rows, sizes, dtype, batched, biased):
    torch.manual_seed(rows)
    model = nn.Linear(*sizes[::-1], bias=biased).to(DEVICE, dtype)
    for p in model.parameters():  # nothing cancels out
        p.data.abs_()
    exact = nn.Linear(*sizes[::-1], bias=biased).to(DEVICE, torch.float64)
    exact.load_state_dict(model.state_dict())
    x = torch.rand(*((2, rows) if batched else (rows,)), sizes[1], dtype=dtype, device=DEVICE)
    compiled = thunder.jit(model, executors=["triton_fuser"])

    def step(f, x):
        x = x.clone().requires_grad_()
        y = f(torch.tanh(x))
        y.square().sum().backward()
        return [y.detach(), x.grad]

    for actual, wanted, eager in zip(step(compiled, x), step(exact, x.double()), step(model, x), strict=True):
        assert distance(actual, wanted) <= max(2 * distance(eager, wanted), 4 * torch.finfo(dtype).eps)


def test_what_reads_and_makes_the_operands_is_one_kernel_with_the_product():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1)).to(DEVICE)
    compiled, x = thunder.jit(model, executors=["triton_fuser"]), torch.randn(64, 24, device=DEVICE)
    compiled(x).sum().backward()
    assert len(fusions(compiled)) == len(fusions(compiled, True)) == 1
    assert others(compiled).count("linear") == others(compiled, True).count("mm") == 1
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for mine, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad)


def test_sizes_that_change_keep_the_product_of_matrices():
    compiled = thunder.jit(lambda a, w: F.relu(a) @ w, executors=["triton_fuser"], cache="symbolic values")
    w = torch.randn(16, 1, device=DEVICE)
    for rows in (5, 9):
        a = torch.randn(rows, 16, device=DEVICE)
        torch.testing.assert_close(compiled(a, w), F.relu(a) @ w)
