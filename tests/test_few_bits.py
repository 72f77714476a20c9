"""Kernels for layers on weights of few bits, and which layers programs give them. Under Triton's interpreter, or on the
GPU."""

import pytest
import torch

import thunder
from thunder.quantization import Int4Weights, Int8Weights, NF4Weights

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [
    Int8Weights(), Int4Weights(), Int4Weights(group=32), NF4Weights(), NF4Weights(block=128), NF4Weights(double=False),
]  # fmt: skip


@pytest.mark.sweep(8)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(40, 256), (33, 768), (24, 2048)])
@pytest.mark.parametrize(
    "rows, dtype", [(1, torch.float32), *((n, d) for n in (1, 2, 17, 32) for d in (torch.float16, torch.bfloat16))]
)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_the_kernels(format, rows, dtype, shape, biased):
    from thunder.executors.few_bits import few_bits_linear

    if dtype is torch.bfloat16 and rows > 1 and DEVICE == "cpu":
        pytest.skip("tl.dot of Triton's interpreter takes the bits of bfloat16 for integers")
    torch.manual_seed(0)
    n, k = shape
    x, bias = torch.randn(rows, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    parts = format.quantize(torch.randn(n, k, device=DEVICE))
    weight, bias = format.dequantize(*parts).double(), bias if biased else None
    exact = torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double())
    # what is rounded: with several rows the numbers of the weight, and the result
    sizes = torch.nn.functional.linear(x.double().abs(), weight.abs())
    for operand in (x, x.view(rows, 1, k), x.t().contiguous().t()):
        actual = few_bits_linear(operand, bias, parts, format)
        assert actual.shape == (*operand.shape[:-1], n) and actual.dtype is dtype
        error = (actual.view(rows, n).double() - exact).abs()
        eps = torch.finfo(dtype).eps
        assert (error <= exact.abs() * eps + sizes * (eps if rows > 1 else 1e-6)).all()


class Layers(torch.nn.Module):
    """One layer of two uses, one whose inputs fit no kernel, and one under autocast's cast."""

    def __init__(self):
        super().__init__()
        self.twice, self.narrow, self.last = (torch.nn.Linear(n, m) for n, m in ((64, 64), (8, 64), (64, 16)))

    def forward(self, x):
        y = self.twice(self.twice(x).relu()) + self.narrow(x[..., :8])
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.last(y)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", [Int8Weights(), Int4Weights(group=32), NF4Weights(block=32)], ids=repr)
def test_in_programs(format):
    model = Layers().to(DEVICE)
    compiled = thunder.jit(model, transforms=[format])
    plain = thunder.jit(model, transforms=[format], executors=["torch"])
    for rows, grad, taken in ((1, False, 3), (1, True, 0), (33, False, 0)):
        x = torch.randn(rows, 1, 64, device=DEVICE, requires_grad=grad)
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                torch.testing.assert_close(compiled(x), plain(x), atol=0.02, rtol=0.02)
        names = [o.sym.name for o in thunder.last_traces(compiled)[-1].bound_symbols]
        if DEVICE == "cpu" and not grad:  # where parts of a weight are made at a time, if no kernel takes the layer
            assert "dequantize" not in names
        if DEVICE == "cpu" and type(format) is Int8Weights:  # which takes any number of inputs, and fewer rows
            assert names.count("int8_linear_cpu") == (4 if rows == 1 and not grad else 0)
        else:
            assert names.count("few_bits_linear") == taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", [*FORMATS, Int8Weights()], ids=repr)
def test_parts_of_a_weight_on_a_cpu(format, dtype, monkeypatch):
    """Lengths that change as well, where sizes stay symbolic."""
    from thunder.executors import few_bits

    monkeypatch.setattr(few_bits, "DEQUANTIZED", 5 * 256)
    monkeypatch.setattr(few_bits, "_has_kernels", lambda x, rows: False)
    monkeypatch.setattr(few_bits, "CPU_ROWS_FLOAT32", 0)
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 33, dtype=dtype)
    weight = format.dequantize(*format.quantize(layer.weight.detach())).double()
    compiled = thunder.jit(layer, transforms=[format])
    for length in (20, 40, 60):
        x = torch.randn(length, 1, 256).to(dtype)
        with torch.no_grad():
            actual = compiled(x)
        exact = torch.nn.functional.linear(x.double(), weight, layer.bias.double())
        eps, sizes = torch.finfo(dtype).eps, torch.nn.functional.linear(x.double().abs(), weight.abs())
        assert (
            actual.dtype is dtype and ((actual.double() - exact).abs() <= 2 * eps * exact.abs() + 2 * eps * sizes).all()
        )
        assert "few_bits_linear_cpu" in str(thunder.last_traces(compiled)[-1])
    assert thunder.cache_misses(compiled) == 2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "rows, dtype", [(1, torch.float32), (4, torch.float32), (16, torch.bfloat16), (2, torch.float16)]
)
def test_int8_on_a_cpu(rows, dtype, biased):
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 40, bias=biased, dtype=dtype)
    compiled = thunder.jit(layer, transforms=[Int8Weights()])
    held, scale = Int8Weights().quantize(layer.weight.detach())
    x, weight = torch.randn(rows, 1, 96).to(dtype), held.double() * scale
    with torch.no_grad():
        actual = compiled(x)
    assert "int8_linear_cpu" in str(thunder.last_traces(compiled)[-1]) and actual.dtype is dtype
    exact = torch.nn.functional.linear(x.double(), weight, layer.bias.double() if biased else None)
    eps, sizes = torch.finfo(dtype).eps, torch.nn.functional.linear(x.double().abs(), weight.abs())
    # rounded are the scale, the product and the sum with the bias
    assert ((actual.double() - exact).abs() <= 2 * eps * exact.abs() + 2 * eps * sizes).all()
