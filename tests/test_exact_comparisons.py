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
