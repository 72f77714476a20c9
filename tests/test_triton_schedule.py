"""Which kernels the Triton fuser makes of a region, where there is a choice: what is stored and what is computed again,
which pass comes first."""

import pytest
import torch

import thunder
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import schedule

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


@pytest.mark.parametrize("work, kernels", [(1 << 27, 1), (1, 2)])
def test_a_table_that_many_read_is_computed_once(work, kernels, monkeypatch):
    monkeypatch.setattr(schedule, "WORK", work)
    (region,) = fused(lambda x, angles: turned(x, angles.cos(), angles.sin()), tensor(5, 6, 8), tensor(6, 8))
    spaces = [k.numel for k in region.sym.fn.schedule.kernels]
    assert spaces == [48, 240][-kernels:]
    assert region.sym.fn.source.count("tl.cos") == 1


def test_what_is_one_number_is_computed_where_it_is_read(monkeypatch):
    monkeypatch.setattr(schedule, "WORK", 1)
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
    assert [(k.rows, k.columns) for k in region.sym.fn.schedule.kernels] == [(1, 90), (40, 50)], (
        "in the order of the program the rows would be read twice"
    )


def test_a_joined_place_is_known_to_be_inside():
    (region,) = fused(
        lambda x, cos, sin: turned(x.reshape(1, 6, 2, 8).transpose(1, 2), cos, sin),
        tensor(1, 6, 16),
        tensor(6, 8),
        tensor(6, 8),
    )
    assert region.sym.fn.source.count("//") == 1, (
        "the row of an element in the tables: what is joined lies beside it in memory, in the order of which the "
        "kernel runs"
    )


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


def partial_rows(function, *shape):
    """How many partial sums a program over columns leaves."""
    kernels = [kernel for line in fused(function, tensor(*shape)) for kernel in line.sym.fn.schedule.kernels]
    stored = [v for kernel in kernels for v in kernel.stores]
    return [v.shape[0] for v in stored if v.kind == "partial"]


def test_sums_of_columns_of_a_square_are_shared_as_those_of_other_matrices():
    """Rows and columns of a square are as many: its own space is none of rows that are reduced."""
    size = 320

    def columns(x):
        return torch.tanh(x).sum(0)

    def both(x):
        return torch.softmax(torch.tanh(x), 1).sum(0)

    assert partial_rows(columns, size, size) == partial_rows(columns, size, size - 8)
    assert partial_rows(both, size, size) != partial_rows(columns, size, size)
