"""Gradients of extremes compare values for equality: a backward never compares a saved extreme with values that it adds
up again, which other kernels do in another order."""

from __future__ import annotations

import pytest
import torch

import thunder

# NumPy, which Triton's interpreter computes with, warns of what makes infinities and nan
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.mark.parametrize("executor", ["triton_fuser", "cpp", "torch"])
@pytest.mark.parametrize("combine", [
    lambda x: x.cumsum(1), lambda x: x - x.sum(0), lambda x: torch.softmax(x, 0), lambda x: x @ x.t(),
], ids=["scan", "sum", "softmax", "product"])  # fmt: skip
def test_what_is_compared_is_not_added_up_again(executor, combine, monkeypatch, triton_interpreter):
    if executor == "triton_fuser":
        pytest.importorskip("triton", reason="kernels need Triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    def f(x):
        y = combine(x * 2) * 0.5
        return y.amax(-1), y.square()

    compiled = thunder.jit(f, executors=[executor])
    x = torch.randn(6, 12, requires_grad=True)
    outputs = compiled(x)
    torch.autograd.grad(outputs, [x], [torch.ones_like(o) for o in outputs])
    again = {b.sym.name for b in _recomputed(compiled)}
    assert not again & {"cumsum", "sum", "softmax", "matmul", "mm"}


def _recomputed(compiled):
    """The operations of the forward that the backward runs again: their results are named so."""
    stack = [*thunder.last_backward_traces(compiled)[-1].bound_symbols]
    while stack:
        b = stack.pop()
        if any(getattr(o, "name", "").startswith("bw_") for o in b.outputs):
            yield b
        stack += b.subsymbols


EXTREMES = {
    "amax": lambda x, i: torch.tanh(x * 1.7).amax(-1),
    "norm": lambda x, i: torch.linalg.vector_norm(x.sin(), float("inf"), 0),
    "scatter_reduce": lambda x, i: torch.zeros_like(x).scatter_reduce(0, i, x.exp(), "amax"),
    "chosen": lambda x, i: torch.where(i > 2, -x.exp(), x.sin()).amin(0),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_functions_that_are_compared_are_not_computed_again(name):
    """PyTorch's kernels and fused ones round an exponential, a sine or a tangent to different last bits."""
    f = EXTREMES[name]
    compiled = thunder.jit(f, executors=["cpp"], tiers=0)
    x, i = torch.randn(200, 300, requires_grad=True), torch.randint(5, (200, 300))
    (ours,), (exact,) = (torch.autograd.grad(g(x, i).sum(), x) for g in (compiled, f))
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-4)
    assert not {b.sym.name for b in _recomputed(compiled)} & {"tanh", "sin", "exp"}
