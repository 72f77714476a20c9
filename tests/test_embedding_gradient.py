"""The embedding_gradient executor: what it takes, and that its kernels sum up what has the same index. Under Triton's
interpreter, or on the GPU."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.core.dtypes import bfloat16, int64
from thunder.core.proxies import TensorProxy
from thunder.executors import embedding_gradient as module

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sweep(2)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["some", "few rows", "one row", "all rows", "int32"])
@pytest.mark.parametrize("width", [40, 200])
def test_the_kernels(kind, width, dtype, padding):
    """Rows without an index, with a few, and with more than one program sums up, at its beginning and not."""
    from thunder.executors.embedding_gradient import summed_by_index

    torch.manual_seed(0)
    count = 50
    indices = {
        "some": torch.randint(count, (7, 30)), "few rows": torch.randint(3, 6, (260,)),
        "one row": torch.full((2, 300), 7), "all rows": torch.arange(count), "int32": torch.randint(9, (400,)).int(),
    }[kind].to(DEVICE)  # fmt: skip
    g = torch.randn(*indices.shape, width, device=DEVICE).to(dtype)
    exact = torch.ops.aten.embedding_dense_backward.default(g.double(), indices, count, padding, False)
    for cotangent in (g, g.transpose(0, -1).contiguous().transpose(0, -1)):
        actual = summed_by_index(cotangent, indices, count, padding)
        assert actual.dtype is dtype and actual.shape == (count, width)
        torch.testing.assert_close(actual.double(), exact, atol=1e-4, rtol=torch.finfo(dtype).eps)


def taken(trace) -> int:
    return [line.sym.name for line in trace.bound_symbols].count("embedding_gradient")


@pytest.mark.skipif(DEVICE == "cpu", reason="the executor takes what is on a GPU")
@pytest.mark.parametrize("options, expected", [({}, 1), ({"padding_idx": 5}, 1), ({"scale_grad_by_freq": True}, 0)])
def test_in_programs(options, expected, monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(module, "NARROWEST", 0)
    torch.manual_seed(0)
    weight, indices = (
        torch.randn(300, 64, device=DEVICE, requires_grad=True),
        torch.randint(40, (2, 1024), device=DEVICE),
    )
    compiled = thunder.jit(lambda i, w: F.embedding(i, w, **options).sin())
    for _ in range(2):
        (got,), (want,) = (
            torch.autograd.grad(f(indices, weight).square().sum(), weight)
            for f in (compiled, lambda i, w: F.embedding(i, w, **options).sin())
        )
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    assert taken(thunder.last_backward_traces(compiled)[-1]) == expected


@pytest.mark.parametrize(
    "count, width, rows, expected",
    [
        (32000, 4096, 2048, True),
        (32000, 4096, 512, False),
        (2000, 4096, 2048, False),
        (10**6, 64, 2048, False),
        (32000, 4096, 1 << 15, False),
    ],
)
def test_large_tables_and_many_indices_are_taken_on_gpus(count, width, rows, expected):
    g = TensorProxy("g", shape=(1, rows, width), device="cuda", dtype=bfloat16)
    indices = TensorProxy("i", shape=(1, rows), device="cuda", dtype=int64)
    assert module._checker(g, indices, count, -1, False) is expected
    assert not module.embedding_gradient_ex.exact  # sums are in another order than PyTorch's


def test_sparse_gradients_are_pytorchs():
    """No fuser takes their embedding apart, of whose parts the gradient is dense."""
    index, table = torch.tensor([1, 1, 2], device=DEVICE), torch.randn(7, 3, device=DEVICE, requires_grad=True)

    def program(index, table):
        return F.embedding(index, table, 2, sparse=True) * 2 + 1

    ours, expected = (
        torch.autograd.grad(f(index, table).sum(), table)[0]
        for f in (thunder.jit(program, executors=["triton_fuser"]), program)
    )
    assert (
        ours.is_sparse
        and torch.equal(ours._indices(), expected._indices())
        and torch.equal(ours._values(), expected._values())
    )
