"""Which kernels the Triton fuser makes of a region, where there is a choice: what is stored and what is computed again,
which pass comes first."""

import pytest
import torch

import thunder
from thunder.executors.triton_fuser import TritonFuser

pytest.importorskip("triton", reason="kernels need Triton")
# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def fused(program, *inputs):
    """The regions of a program, which computes what eager computes."""
    compiled = thunder.jit(program, executors=[TritonFuser("scheduled")])
    torch.testing.assert_close(compiled(*inputs), program(*inputs), rtol=1e-5, atol=1e-5)
    return [line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion]


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def test_what_is_one_number_is_computed_where_it_is_read():
    (region,) = fused(lambda x, y: x * torch.sin(y) / torch.tanh(y), tensor(5, 6), tensor(1))
    assert region.sym.fn.kernels == 1


def test_what_is_computed_once_counts_once():
    def program(x, y):
        for _ in range(40):
            y = y * y + y
        return x * y

    (region,) = fused(program, tensor(20, 6), tensor(6) * 0.001)
    assert region.sym.fn.kernels == 1, "80 operations for an element, not 2 ** 40"


def test_sines_are_read_from_the_region_that_makes_them():
    def layers(x, angles, w):
        tables = angles.cos(), angles.sin()
        return turned(turned(x, *tables) @ w, *tables)

    first, second = fused(layers, tensor(6, 8), tensor(6, 8), tensor(8, 8))
    assert len(first.outputs) == 3 and len(second.inputs) == 3, "cos and sin"
    assert "tl.cos" not in second.sym.fn.source


def test_a_pass_comes_after_the_small_sums_that_it_reads():
    (region,) = fused(lambda x, y: torch.softmax(x, -1) * 2 / (y * y).sum(), tensor(40, 50), tensor(90))
    kernels = [k for launch in region.sym.fn.scheduled(region.sym.fn.usual_strides())[0] for k, _ in launch.kernels]
    assert [sorted(b.number for b in {n.what[0] for n in k.loads}) for k in kernels][-1], "rows are read once"


def test_a_region_writes_what_all_of_its_results_show():
    def program(x, w):
        turned = torch.tanh(x).transpose(0, 1).reshape(8, 15) * 1.0
        rows = torch.tanh(turned).reshape(8, 3, 5).transpose(0, 1).reshape(3, 40)
        return rows @ w, rows.t() @ x.reshape(3, 40)

    x, w = tensor(3, 8, 5), tensor(40, 6)
    (region,) = fused(program, x, w)
    assert [tuple(o.shape) for o in region.outputs] == [(3, 40)], (
        "a copy would follow where the region wrote it before it is turned"
    )
