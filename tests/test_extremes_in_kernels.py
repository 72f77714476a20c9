"""Kernels find the places of extremes: argmax, max along a dimension, and the few largest of a short row."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thunder

from .test_triton_fuser import DEVICE, fusions, others

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
# what numpy says of rows of NaNs alone, by which Triton's interpreter computes; the results are compared all the same
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

EXTREMES = {
    "argmax": lambda x, d, keep: (x.argmax(d, keepdim=keep),), "argmin": lambda x, d, keep: (x.argmin(d, keepdim=keep),),
    "max": lambda x, d, keep: x.max(d, keepdim=keep), "min": lambda x, d, keep: x.min(d, keepdim=keep),
}  # fmt: skip
ENDS = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0]


def rows(shape, dtype, seed, ends):
    """Some numbers are there several times, and some are not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-20, 20, shape, generator=generator).to(dtype) / 4
    if ends:
        chosen = torch.randint(0, 3 * len(ENDS), shape, generator=generator)
        for i, end in enumerate(ENDS):
            x[chosen == i] = end
    return x.to(DEVICE)


def run(function, x):
    compiled = thunder.jit(lambda x: function(x * 2), executors=["triton_fuser"])
    actual = compiled(x)
    assert len(fusions(compiled)) == 1 and not others(compiled)
    return tuple(actual), tuple(function(x * 2))


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@given(st.sampled_from([*EXTREMES]), SHAPES, DTYPES, st.booleans(), st.booleans(), st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_the_first_of_several(name, shape, dtype, keep, ends, seed):
    """PyTorch says that it gives the first one; a NaN is the largest and the smallest number."""
    dim = seed % len(shape)
    x = rows(shape, dtype, seed, ends).transpose(0, -1)
    for actual, wanted in zip(*run(lambda x: EXTREMES[name](x, dim, keep), x), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
        assert actual.stride() == wanted.stride()


@pytest.mark.slow
@given(SHAPES, DTYPES, st.booleans(), st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_the_few_largest(shape, dtype, ends, seed):
    """Which ones of several equal numbers, nobody says; never one of them twice."""
    dim = seed % len(shape)
    x = rows(shape, dtype, seed, ends).transpose(0, -1)
    count = min(8, 1 + seed % x.shape[dim])
    (values, places), (wanted, _) = run(lambda x: torch.topk(x, count, dim), x)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close((x * 2).gather(dim, places), values, rtol=0, atol=0, equal_nan=True)
    ordered = places.sort(dim)[0]
    assert (ordered.diff(dim=dim) > 0).all() and values.stride() == wanted.stride()


@pytest.mark.parametrize("name", [*EXTREMES])
def test_rows_of_nans_alone(name):
    x = torch.full((2, 5), float("nan"), device=DEVICE)
    for actual, wanted in zip(*run(lambda x: EXTREMES[name](x, 1, False), x), strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True)
    (values, places), _ = run(lambda x: torch.topk(x, 3, 1), x)
    assert values.isnan().all() and places.tolist() == [[0, 1, 2]] * 2


def test_a_router_is_one_region():
    """Probabilities of experts, the largest two, their weights, and the gradient through all of it."""

    def route(logits):
        values, places = torch.topk(logits.float().softmax(-1), 2, -1)
        return values / values.sum(-1, keepdim=True), places.view(-1)

    compiled = thunder.jit(route, executors=["triton_fuser"])
    logits = torch.linspace(-3, 3, 64, device=DEVICE).sin().view(8, 8).to(torch.bfloat16).requires_grad_()
    sides = []
    for f in (compiled, route):
        weights, places = f(logits)
        sides.append((weights, places, *torch.autograd.grad(weights.square().sum(), logits)))
    torch.testing.assert_close(*sides)
    assert len(fusions(compiled)) == 1 and not others(compiled) and not others(compiled, backward=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.topk(x * 2, 9, -1), lambda x: torch.topk(x * 2, 2, largest=False),
        lambda x: torch.topk((x * 2).long(), 2), lambda x: torch.topk((x * 2).repeat(1, 100), 2),
        lambda x: (x * 2).argmax(), lambda x: torch.topk(x[0, 0] * 2, 1, 0),
    ],
    ids=["many", "smallest", "integers", "long rows", "of all", "of a number"],
)  # fmt: skip
def test_what_pytorch_finds(function):
    x = torch.arange(44.0, device=DEVICE).view(4, 11).cos()
    compiled = thunder.jit(function, executors=["triton_fuser"])
    actual, wanted = compiled(x), function(x)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, wanted)), strict=True):
        assert torch.equal(a, b)
    assert {"topk", "argmax"} & set(others(compiled))
