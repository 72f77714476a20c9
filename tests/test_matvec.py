"""The matvec executor: what it takes, and that its kernels compute linear layers. Under Triton's interpreter, or on the
GPU."""

import math

import pytest
import torch
from torch.nn.functional import linear

import thunder
from thunder.errors import OptionError
from thunder.executors import handwritten, matvec

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(40, 256), (33, 300), (16, 2048)])
@pytest.mark.parametrize(
    "rows, dtype",
    [(1, torch.float32), *((rows, dtype) for rows in (1, 2, 7, 16) for dtype in (torch.float16, torch.bfloat16))],
)
def test_the_kernels(rows, shape, biased, dtype):
    from thunder.executors.matvec import few_rows

    if dtype is torch.bfloat16 and rows > 1 and DEVICE == "cpu":
        pytest.skip("tl.dot of Triton's interpreter takes the bits of bfloat16 for integers")
    torch.manual_seed(0)
    n, k = shape
    x, w, b = (
        torch.randn(rows, k, device=DEVICE).to(dtype),
        torch.randn(n, k, device=DEVICE).to(dtype),
        torch.randn(n, device=DEVICE).to(dtype) if biased else None,
    )
    exact = linear(x.double(), w.double(), None if b is None else b.double())
    for operand in (x, x.view(rows, 1, k), x.t().contiguous().t()):
        actual = few_rows(operand, w, b)
        assert actual.shape == (*operand.shape[:-1], n) and actual.dtype is dtype
        error = (actual.view(rows, n).double() - exact).abs()
        assert (error <= exact.abs() * torch.finfo(dtype).eps + 1e-4 * k**0.5).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the executor takes what is on a GPU")
def test_in_programs(monkeypatch):
    monkeypatch.setattr(matvec, "SMALLEST", 0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32, bias=False)).to(
        DEVICE, torch.bfloat16
    )
    compiled = thunder.jit(model, executors=["matvec"], matvec_rows=16)
    for rows, taken in ((1, 2), (16, 2), (17, 0)):
        x = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(3):  # compiled, launched again
            torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0.02)
        assert [line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols].count(
            "few_rows_linear"
        ) == taken
    misaligned = torch.randn(1, 65, device=DEVICE, dtype=torch.bfloat16)[:, 1:]
    torch.testing.assert_close(compiled(misaligned), model(misaligned), atol=0.02, rtol=0.02)
    x = torch.randn(2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    (got,), (want,) = (torch.autograd.grad(f(x).float().square().sum(), x) for f in (compiled, model))
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


@pytest.mark.skipif(DEVICE == "cpu", reason="the executor takes what is on a GPU")
def test_one_row_is_taken_by_default():
    layer = torch.nn.Linear(4096, 1024, bias=False, device=DEVICE, dtype=torch.bfloat16)
    for rows, options, taken in (
        (1, {}, 1),
        (2, {}, 0),
        (2, {"matvec_rows": 2}, 1),
        (1, {"matvec_rows": 0}, 0),
        (1, {"numerics": "eager"}, 0),
    ):
        compiled = thunder.jit(layer, **options)
        x = torch.randn(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), layer(x), atol=0.02, rtol=0.02)
        assert [line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols].count(
            "few_rows_linear"
        ) == taken


def test_how_many_rows_are_options():
    for wrong in (-1, 17, "all", True):
        with pytest.raises(OptionError, match="matvec_rows"):
            thunder.jit(linear, executors=["matvec"], matvec_rows=wrong)(torch.randn(1, 8), torch.randn(4, 8))


def test_what_is_not_taken(monkeypatch):
    monkeypatch.setattr(matvec, "SMALLEST", 0)
    compiled = thunder.jit(lambda x, w: linear(x, w), executors=["matvec"])
    x, w = torch.randn(1, 8), torch.randn(4, 8)
    assert torch.equal(compiled(x, w), linear(x, w))
    assert "few_rows_linear" not in str(thunder.last_traces(compiled)[-1])


@pytest.mark.parametrize("sizes", [(16,), (8, 24), (8, 40, 16), (8, 16, 24, 8, 40)])
def test_layers_that_read_one_row_are_one_launch(monkeypatch, sizes):
    """Three at most, each with what it would be alone; a layer whose weight is made later stays."""
    row = matvec.MatvecExecutor._checker
    monkeypatch.setattr(
        matvec.MatvecExecutor,
        "_checker",
        lambda self, x, *rest: math.prod(x.shape[:-1]) == 1 if DEVICE == "cpu" else row(self, x, *rest),
    )
    monkeypatch.setattr(matvec, "SMALLEST", 0)

    def layers(x, weights):
        results = [linear(x, w) for w in weights]
        return *results, linear(x, results[0].sum() * weights[0]), linear(results[0] * 2, weights[0].T.contiguous())

    torch.manual_seed(0)
    x, weights = torch.randn(1, 1, 72, device=DEVICE), [torch.randn(n, 72, device=DEVICE) for n in sizes]
    compiled = thunder.jit(layers, executors=["matvec"])
    with torch.no_grad():
        for _ in range(2):
            for a, b in zip(compiled(x, weights), layers(x, weights), strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    joined = [line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.name == "linears_of_a_row"]
    assert [len(line.args) - 1 for line in joined] == [n for n in (len(sizes[:3]), len(sizes[3:])) if n > 1]
    x.requires_grad_()
    compiled(x, weights)
    assert "linears_of_a_row" not in str(thunder.last_traces(compiled)[-1])


def test_what_is_compiled(monkeypatch):
    """Types, alignment and constants are those that Triton would find in a call."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernel = handwritten.Handwritten("matvec_kernel.py", "_some_rows")
    numbers = 1, 32, 1 << 33, True, False, 16, 64, 128, 5
    kinds, request = kernel.request([torch.bfloat16] * 4, [True] * 3 + [False], numbers, 4, torch.device("cuda"))
    assert kinds == ["", "i", *[""] * 7]
    assert request.arguments == (
        *[("*bf16", True)] * 3,
        ("*bf16", False),
        ("constexpr", False),
        ("i32", True),
        *[("constexpr", False)] * 7,
    )
    assert dict(request.constants) == {
        "M": 1, "K": 1 << 33, "biased": True, "even": False, "BM": 16, "BN": 64, "BK": 128, "stages": 5
    }  # fmt: skip
