"""Products of odd sizes: their parts; where rows are padded, that kernels and other products take them, and that nobody
outside sees it."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import thunder
from thunder.compat.torch_settings import tensor_cores_multiply_float32
from thunder.executors.triton_fuser import TritonFuser
from thunder.ops.families import aligned
from thunder.ops.layout import LEAST_ROW, ROW_BYTES
from thunder.transforms import aligned_products

# of NumPy, in what masks leave out; of Triton's interpreter
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("triton_interpreter", "_tensor_cores"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = 67  # of float32 268 bytes, of which a multiple of 16 is 272
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@pytest.fixture
def _tensor_cores(monkeypatch):
    """Float32 is planned as with TensorFloat-32, whose rounding is no matter of these tests."""
    monkeypatch.setattr(aligned_products, "tensor_cores_multiply_float32", lambda: True)


class Products(TorchDispatchMode):
    """The matrices that products read and make, as PyTorch is given them: (shape, strides)."""

    def __init__(self):
        super().__init__()
        self.operands: list[tuple[tuple, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function._schema.name in PRODUCTS:
            self.operands += [(tuple(t.shape), t.stride()) for t in (*args, out) if isinstance(t, torch.Tensor)]
        return out

    def odd(self, columns: int) -> list[tuple]:
        """The strides of the matrices that have so many columns."""
        return [strides for shape, strides in self.operands if len(shape) > 1 and shape[-1] == columns]


def are_aligned(strides: list[tuple]) -> bool:
    return bool(strides) and all(n == 1 or n * 4 % ROW_BYTES == 0 for s in strides for n in s)


def parameters(*shapes: tuple) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]


def run(function, tensors, cotangents=None) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list]:
    """Results and gradients for fresh leaves, and the cotangents."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    results = function(*leaves)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    torch.manual_seed(1)
    cotangents = cotangents or [torch.randn_like(r) for r in results]
    wanted = [t for t in leaves if t.requires_grad]
    return results, list(torch.autograd.grad(results, wanted, cotangents, allow_unused=True)), cotangents


def check(function, *tensors, executors=None) -> tuple:
    """Compares with eager, values and strides, and gives the compiled function and the products of a second call."""
    compiled = thunder.jit(function, executors=executors or [TritonFuser("padding")])
    want, gradients, cotangents = run(function, tensors)
    with Products() as seen:
        for _ in range(2):
            seen.operands.clear()
            got, ours, _ = run(compiled, tensors, cotangents)
            for a, b in zip((*got, *ours), (*want, *gradients), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    bound = 2e-5 if a.dtype is torch.float32 else 1e-10
                    torch.testing.assert_close(a, b, rtol=bound, atol=bound)
                    assert a.stride() == b.stride()
    return compiled, seen


def of_last(compiled, backward: bool = False) -> list[str]:
    trace = (thunder.last_backward_traces if backward else thunder.last_traces)(compiled)[-1]
    return [b.sym.name for b in trace.bound_symbols]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)])
def test_a_loss_over_odd_classes(bias, shape):
    """The products of forward and backward read and write rows that begin where they are fast."""
    x, w, b = parameters(shape, (ODD, 16), (ODD,))
    labels = torch.randint(0, ODD, shape[:-1], device=DEVICE)

    def f(x, w, b):
        logits = F.linear(torch.tanh(x), w, b if bias else None)
        return F.cross_entropy(logits.view(-1, ODD), labels.view(-1))

    compiled, seen = check(f, x, w, b)
    assert "linear_aligned" in of_last(compiled)
    assert are_aligned(seen.odd(ODD)) and len(seen.odd(ODD)) >= 2


def test_padding_is_read_and_written_and_nobody_sees_it():
    """Kernels read vectors of columns whole, with the padding behind them, which here is NaN."""
    x, w, b = parameters((5, 16), (ODD, 16), (ODD,))
    labels = torch.randint(0, ODD, (5,), device=DEVICE)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        compiled, _ = check(lambda x, w, b: F.cross_entropy(F.linear(torch.tanh(x), w, b), labels), x, w, b)
    finally:
        torch.use_deterministic_algorithms(False)
    regions = [b.sym.fn for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.is_fusion]
    assert any("r_inside_68" in fn.source for fn in regions)


def test_products_of_batches():
    x, y, z = parameters((2, 3, 5, 16), (2, 3, 16, ODD), (2, 3, ODD, 8))
    compiled, seen = check(lambda x, y, z: torch.softmax(x @ y * 0.5, -1) @ z, x, y, z)
    assert "bmm_aligned" in of_last(compiled)
    scores = [strides for shape, strides in seen.operands if shape == (6, 5, ODD)]
    assert len(scores) == 5 and set(scores) == {(5 * 68, 68, 1)}  # scores, probabilities, gradients of both, read twice


def test_a_matrix_that_a_kernel_writes():
    """What a fused kernel gives to a product is padded, too."""
    x, y, w = parameters((5, ODD), (5, ODD), (ODD, 16))
    x, y = x.detach(), y.detach()
    compiled, seen = check(lambda x, y, w: (torch.tanh(x) * y).relu() @ w, x, y, w)
    fused = thunder.last_traces(compiled)[-1]
    assert fused.info.padded and all(s[0] == 68 for s in seen.odd(ODD))


@pytest.mark.parametrize("least, expected", [((1, 1), True), ((1, 17), False), ((6, 1), False)])
def test_a_large_product_that_is_returned_is_copied(monkeypatch, least, expected):
    """From rows that begin where products are fast to rows as PyTorch lays them out; not in float32, nor a small one."""
    from thunder.transforms import aligned_products

    monkeypatch.setattr(aligned_products, "LEAST_ROWS", least[0])
    monkeypatch.setattr(aligned_products, "LEAST_DEPTH", least[1])
    x, w = (t.detach().to(torch.bfloat16) for t in parameters((5, 16), (131, 16)))

    def f(x, w):
        return F.linear(x * 2, w)

    compiled = thunder.jit(f, executors=[TritonFuser("serving")], debug_options=thunder.DebugOptions(check_traces=True))
    actual = compiled(x, w)
    torch.testing.assert_close(actual, f(x, w))
    assert actual.is_contiguous() and ("contiguous" in of_last(compiled)) is expected
    compiled(x.float(), w.float())
    assert "contiguous" not in of_last(compiled)


def returned(x, w):
    return F.linear(x, w)


def returned_as_a_view(x, w):
    y = F.linear(x, w)
    return y.t(), (y.exp() @ y.t()).sum()


def a_lone_operation(x, w):
    return torch.tanh(F.linear(x, w))


def written_to(x, w):
    y = F.linear(x, w)
    y.mul_(2)
    return y


def a_view_written_to(x, w):
    y = F.linear(x, w)
    y[1:].mul_(2)
    return y @ w


def flat(x, w):
    return F.linear(x, w).view(-1) * 2


def contiguous(x, w):
    return F.linear(x, w).contiguous().view(-1) * 2


def sorted_rows(x, w):
    return F.linear(x, w).sort(-1).values @ w


@pytest.mark.parametrize(
    "f",
    [returned, returned_as_a_view, a_lone_operation, written_to, a_view_written_to, flat, contiguous, sorted_rows],
)
def test_results_are_laid_out_as_eager_lays_them_out(f):
    check(f, *parameters((5, 16), (ODD, 16)))


@pytest.mark.parametrize("columns", [ODD + 1, LEAST_ROW // 4 - 1])
def test_where_padding_brings_nothing(columns):
    x, w = parameters((5, 16), (columns, 16))
    compiled, _ = check(lambda x, w: F.linear(x, w).exp().sum(-1), x, w)
    assert "linear" in of_last(compiled)


def test_a_gradient_is_written_over_padded_logits():
    """A whole step: the logits die in it, and their gradient takes their place."""
    x, w = parameters((5, 16), (ODD, 16))
    labels = torch.randint(0, ODD, (5,), device=DEVICE)

    def step(x, w):
        w.grad = None
        F.cross_entropy(F.linear(x, w), labels).backward()
        return w.grad

    mine, theirs = (w.detach().clone().requires_grad_() for _ in range(2))
    compiled = thunder.jit(step, executors=[TritonFuser("stepping")])
    for _ in range(2):
        torch.testing.assert_close(compiled(x.detach(), mine), step(x.detach(), theirs))
    trace = thunder.last_traces(compiled)[-1]
    headers = [b.header for b in trace.bound_symbols if b.header]
    assert "linear_aligned" in of_last(compiled) and any("written over" in h for h in headers)


def test_sizes_that_change():
    """The first size is a constant, the others are one program."""
    torch.manual_seed(0)
    head = nn.Linear(16, ODD).to(DEVICE)
    labels = torch.randint(0, ODD, (64,), device=DEVICE)
    f = lambda x, y: F.cross_entropy(head(x), y)  # noqa: E731
    compiled = thunder.jit(f, executors=["triton_fuser"])
    for rows in (5, 9, 33):
        x = torch.randn(rows, 16, device=DEVICE)
        got, want = (torch.autograd.grad(g(x, labels[:rows]), list(head.parameters())) for g in (compiled, f))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        assert "linear_aligned" in of_last(compiled)
    assert thunder.cache_misses(compiled) == 2


class Blocks(nn.Module):
    """Layers of odd widths under checkpoints, with a head of odd classes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, ODD) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(ODD, 16) for _ in range(2))
        self.norm = nn.LayerNorm(ODD)

    def forward(self, x):
        for there, back in zip(self.layers, self.back, strict=True):
            x = x + torch.utils.checkpoint.checkpoint(
                lambda x, there=there, back=back: back(F.gelu(self.norm(there(x)))), x, use_reentrant=False
            )
        return x


def test_checkpoints_recompute_padded_rows():
    torch.manual_seed(0)
    module = Blocks().to(DEVICE)
    x = torch.randn(7, 16, device=DEVICE)
    compiled = thunder.jit(module, executors=[TritonFuser("checkpointing")])
    want = torch.autograd.grad(module(x).pow(2).sum(), list(module.parameters()))
    got = torch.autograd.grad(compiled(x).pow(2).sum(), list(module.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    assert "linear_aligned" in of_last(compiled, backward=True)


SIZES = 64, 67, 130, 3  # of float32, of which 4 are 16 bytes


@pytest.mark.parametrize("sizes", list(itertools.product(SIZES, repeat=3)))
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_in_parts(batch, sizes, monkeypatch):
    """Every layout of the operands, written and added; each number of the result is written once."""
    monkeypatch.setattr(aligned, "LEAST_PRODUCT", 1)
    m, k, n = sizes
    multiply = aligned._multiply
    torch.manual_seed(0)
    for by_columns in itertools.product([False, True], repeat=2):
        a, b = (
            aligned.empty_rows(torch.empty(0, device=DEVICE), (*batch, *(s[::-1] if flipped else s))).normal_()
            for s, flipped in zip(((m, k), (k, n)), by_columns, strict=True)
        )
        a, b = (t.mT if flipped else t for t, flipped in zip((a, b), by_columns, strict=True))
        out = aligned.empty_rows(a, (*batch, m, n)).fill_(torch.nan)
        want = a.double() @ b.double()
        strides = []
        monkeypatch.setattr(aligned, "_multiply", lambda *args: strides.append(args[:3]) or multiply(*args))
        aligned.multiply_into(out, a, b)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)
        (x, y) = max((args[1:] for args in strides), key=lambda pair: pair[0].numel() * pair[1].shape[-1])
        aligned.multiply_into(out, a, b, add=True)
        torch.testing.assert_close(out.double(), 2 * want, rtol=1e-5, atol=2e-4)
        # the largest product has sizes of the fast kernels where memory is contiguous along them
        if all(aligned._is_aligned(t, 4) for t in (a, b)):
            assert y.shape[-1] in (n // 4 * 4, 3)
            assert x.shape[-1] in (k // 4 * 4, 3) or by_columns == (True, False)
            assert x.shape[-2] in (m // 4 * 4, 3) or not by_columns[0]


@pytest.mark.parametrize("columns, depth", [(ODD, 16), (16, ODD), (ODD, ODD)])
def test_a_layer_with_a_bias(monkeypatch, columns, depth):
    monkeypatch.setattr(aligned, "LEAST_PRODUCT", 1)
    x, w, b = parameters((2, 5, depth), (columns, depth), (columns,))
    x, w = (aligned.empty_rows(t, t.shape).copy_(t.detach()) for t in (x, w))
    torch.testing.assert_close(aligned.linear(x, w, b.detach()), F.linear(x, w, b.detach()))


# what a random program does with a matrix (rows, ODD), and what that gives a matrix for, or None
STEPS = {
    "tanh": torch.tanh,
    "square": lambda y: y * y * 0.1,
    "view": lambda y: torch.tanh(y.view(2, -1, ODD)).reshape(-1, ODD) if y.shape[0] % 2 == 0 else y,
    "normalize": lambda y: F.layer_norm(y, (ODD,)),
    "slice": lambda y: y[1:] if y.shape[0] > 2 else y,
    "columns": lambda y: torch.cat([y[:, 1:], y[:, :1]], 1),
    "flip": lambda y: y.flip(0),
    "contiguous": lambda y: y.contiguous(),
    "clone": lambda y: y.clone(),
    "transpose": lambda y: y.t().contiguous().t(),
    "unflatten": lambda y: y.unsqueeze(0).squeeze(0),
    "in place": lambda y: (y + 0.5).mul_(0.5),
    "flat": lambda y: y.reshape(-1).sin().reshape(-1, ODD),
    "gram": lambda y: (y @ y.t() * 0.01) @ y,
    "softmax": lambda y: y.softmax(-1),
}


def program_of(seed: int):
    """A random program of products and what reads them. Some values leave it."""
    choose = random.Random(seed)
    plan = [(choose.choice(list(STEPS)), choose.random() < 0.3) for _ in range(choose.randint(2, 6))]
    ends = choose.choice(["product", "matrix", "sum"])

    def program(x, w, back):
        y = F.linear(x, w)
        results = []
        for name, leaves in plan:
            y = STEPS[name](y)
            if leaves:
                results.append(choose_view(y))
        results.append(y @ back if ends == "product" else y if ends == "matrix" else y.sum())
        return results

    choose_view = choose.choice([lambda y: y, lambda y: y[:, :5], lambda y: y.t(), lambda y: y * 2])
    return program


@pytest.mark.sweep(5)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed, in_parts, monkeypatch):
    if in_parts:
        monkeypatch.setattr(aligned, "LEAST_PRODUCT", 1)
    tensors = (t.detach().double().requires_grad_() for t in parameters((8, 16), (ODD, 16), (ODD, 4)))  # sums cancel
    check(program_of(seed), *tensors)


@pytest.mark.parametrize(("precision", "aligns"), [("highest", False), ("high", True)])
def test_products_without_tensor_cores_stay_as_they_are(monkeypatch, precision, aligns):
    monkeypatch.setattr(aligned_products, "tensor_cores_multiply_float32", tensor_cores_multiply_float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        compiled = thunder.jit(lambda x, w: (x @ w).relu() @ w.t(), executors=[TritonFuser("products")])
        compiled(*(t.detach() for t in parameters((5, 16), (16, ODD))))
    finally:
        torch.set_float32_matmul_precision(before)
    assert aligns == any("aligned" in b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols)
