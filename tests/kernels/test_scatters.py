"""Scatters of the kernel IR: additions and writes at indices that tensors say, and the gradients of reads at indices."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels.test_triton import check, interpreted, regions_of, schedule_of  # noqa: F401
from thunder.core.dtypes import float32, int64
from thunder.executors.triton_fuser import TileRegion, TritonFuser
from thunder.kernels import ir, tiled
from thunder.kernels.index import Index
from thunder.kernels.ir import Buffer, Combine, Graph, Program, Scatter, Store, axis

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
# NumPy, which the interpreter computes with, warns of what makes infinities and nan
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
ROWS, COLUMNS, COUNT = 11, 6, 301
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

# functions of a matrix, values, an index for each of these, an index of columns, and a permutation of rows
ADDITIONS = {
    "index_add": lambda a, s, i, j, p: a.index_add(0, i, s + s),
    "into zeros": lambda a, s, i, j, p: torch.zeros_like(a).index_add(0, i, s + s),
    "into columns": lambda a, s, i, j, p: a.t().index_add(1, i, s.t() + 1),
    "with a factor": lambda a, s, i, j, p: a.index_add(-1, j[:4], s[:ROWS, :4] * 2, alpha=3),
    "scatter_add": lambda a, s, i, j, p: a.scatter_add(0, i[:, None].expand(COUNT, COLUMNS), s + 1),
    "a part of the values": lambda a, s, i, j, p: a.scatter_add(1, j[: ROWS * 2].reshape(ROWS, 2), s[:, :4] + 1),
    "twice": lambda a, s, i, j, p: (a + 1).index_add(0, i, s).index_add(0, i, s * 2),
    "a constant": lambda a, s, i, j, p: a[:, 0].index_add(0, i, torch.ones_like(i, dtype=a.dtype)) + 1,
    "one index for a row": lambda a, s, i, j, p: a.scatter_add(1, j[:ROWS, None].expand(ROWS, COLUMNS), s[:ROWS] + 1),
    "two indices": lambda a, s, i, j, p: a.index_put((i - ROWS, j), s[:, 0] + 1, accumulate=True) * 2,
    "one value": lambda a, s, i, j, p: a.index_put((i, j), s[0, 0] + 1, accumulate=True) * 2,
    "a reduction": lambda a, s, i, j, p: a[:, 0].index_add(0, i, (s * 2).sum(1, dtype=s.dtype)),
}
WRITES = {
    "index_put": lambda a, s, i, j, p: (a + 1).index_put((p,), s[:ROWS] * 2),
    "scatter": lambda a, s, i, j, p: (a + 1).scatter(0, p[:, None].expand(ROWS, COLUMNS), s[:ROWS] * 2),
    "a number": lambda a, s, i, j, p: (a + 1).scatter(1, j[:ROWS, None], 3) * 2,
    "index_copy": lambda a, s, i, j, p: (torch.zeros_like(a) + 1).index_copy(0, p, s[:ROWS] + 2),
}


def arguments(dtype: torch.dtype) -> list[torch.Tensor]:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-50, 50, shape).to(dtype)

    torch.manual_seed(0)
    indices = [torch.randint(0, ROWS, (COUNT,)), torch.randint(0, COLUMNS, (COUNT,)), torch.randperm(ROWS)]
    return [some(ROWS, COLUMNS), some(COUNT, COLUMNS), *indices]


def checked(program, arguments, tolerance: float = 0.0) -> list[TileRegion]:
    regions = check(lambda *args: (program(*args),), arguments, tolerance)
    stores = [s for region in regions for s in region.program.stores]
    assert any(s.scatter is not None for s in stores)
    return regions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("name", ADDITIONS)
def test_additions(name, dtype, interpreted):  # noqa: F811
    checked(ADDITIONS[name], arguments(dtype), TOLERANCE.get(dtype, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes(name, dtype, interpreted):  # noqa: F811
    checked(WRITES[name], arguments(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bits_are_added_up_in_float32(dtype, interpreted):  # noqa: F811
    a, s, i, *others = arguments(dtype)
    program = ADDITIONS["index_add"]
    got = thunder.jit(program, executors=[TritonFuser("tiles", always=True)])(a, s, i, *others)
    exact = a.double().index_add(0, i, s.double() + s.double())
    assert got.dtype is dtype and torch.equal(got, exact.float().to(dtype))


def gradient_of(run, inputs: list[torch.Tensor], *indices: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = run(*leaves, *indices)
    weight = torch.arange(y.numel()).cos().view(y.shape)
    return [*torch.autograd.grad((y.double() * weight).sum(), leaves)]


READS = {
    "rows": lambda x, i, j: x[i].sin(),
    "columns": lambda x, i, j: x[:, j].sin(),
    "elements": lambda x, i, j: x[i, j].sin(),
    "of two dimensions": lambda x, i, j: x[i[:300].view(20, 15)] * 2,
    "gather": lambda x, i, j: x.gather(0, i[:, None].expand(COUNT, COLUMNS)) * 2,
    "index_select": lambda x, i, j: x.index_select(1, j) * 2,
    "embedding": lambda x, i, j: F.embedding(i, x, padding_idx=3).sin(),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_reads(name, dtype, interpreted):  # noqa: F811
    x, _, i, j, _ = arguments(dtype)
    compiled = thunder.jit(READS[name], executors=[TritonFuser("tiles", always=True)])
    (got,), (want,) = (gradient_of(run, [x], i, j) for run in (compiled, READS[name]))
    (exact,) = gradient_of(READS[name], [x.double()], i, j)
    backward = thunder.last_backward_traces(compiled)[-1]
    regions = [b.sym.fn for b in backward.bound_symbols if isinstance(b.sym.fn, TileRegion)]
    assert any(s.scatter is not None for region in regions for s in region.program.stores)
    bound = max((want.double() - exact).abs().max(), 4 * torch.finfo(dtype).eps * exact.abs().max())
    assert (got.double() - exact).abs().max() <= bound


def test_deterministic_algorithms_are_pytorchs(interpreted, monkeypatch):  # noqa: F811
    """The setting is asked when the program runs."""
    inputs, program = arguments(torch.float32), ADDITIONS["index_add"]
    by_operations, calls = TileRegion.by_operations, []
    monkeypatch.setattr(TileRegion, "by_operations", lambda *a: calls.append(a) or by_operations(*a))
    compiled = thunder.jit(program, executors=[TritonFuser("tiles", always=True)])
    for enabled in (False, True, False, True):
        torch.use_deterministic_algorithms(enabled)
        try:
            torch.testing.assert_close(compiled(*inputs), program(*inputs))
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(calls) == 2 and thunder.cache_misses(compiled) == 1


def test_an_index_out_of_bounds_raises(interpreted):  # noqa: F811
    x, s = torch.randn(5, 3), torch.randn(2, 3)
    compiled = thunder.jit(lambda x, s, i: x.index_add(0, i, s * 2), executors=[TritonFuser("tiles", always=True)])
    torch.testing.assert_close(compiled(x, s, torch.tensor([1, 4])), x.index_add(0, torch.tensor([1, 4]), s * 2))
    for wrong in (-1, 5):
        with pytest.raises(Exception, match="index out of range"):
            compiled(x, s, torch.tensor([1, wrong]))


class MessagePassing(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.message, self.update = torch.nn.Linear(2 * width, width), torch.nn.Linear(2 * width, width)

    def forward(self, nodes, sources, targets):
        sent = F.relu(self.message(torch.cat((nodes[sources], nodes[targets]), -1)))
        received = torch.zeros_like(nodes).index_add(0, targets, sent)
        return F.relu(self.update(torch.cat((nodes, received), -1)))


def test_a_layer_that_passes_messages(interpreted):  # noqa: F811
    """Only the products, and what of them is transposed and cut, are no kernels of ours."""
    torch.manual_seed(0)
    module, nodes = MessagePassing(8), torch.randn(16, 8)
    indices = torch.randint(0, 16, (64,)), torch.randint(0, 16, (64,))
    compiled = thunder.jit(module, executors=[TritonFuser("tiles", always=True)])
    results = []
    for run in (module, compiled):
        x = nodes.clone().requires_grad_()
        y = run(x, *indices)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    names = {b.sym.name for b in thunder.last_backward_traces(compiled)[-1].bound_symbols}
    assert not {"index_backward", "index_put", "index_add", "index_select"} & names


def test_what_a_scatter_starts_from_is_not_read_in_place_of_a_value():
    """The memory of a sum begins as a value that others read, and is changed."""

    def f(x, s, i):
        y = torch.sin(torch.sin(torch.sin(x)))
        return y.index_add(0, i, s * 2), (y - y.mean(0)).sum(1)

    launches = schedule_of(f, torch.randn(1000, 700), torch.randn(50, 700), torch.arange(50))
    kernels = [k for launch in launches for k, _ in launch.kernels]
    changed = {w.buffer for k in kernels for w in k.writes if w.scatter is not None}
    assert len(changed) == 1 and changed.isdisjoint(n.what[0] for k in kernels for n in k.loads)


def test_a_scatter_runs_behind_what_it_starts_from():
    launches = schedule_of(
        lambda x, s, i: x.index_add(0, i, s * 2), torch.randn(50, 8), torch.randn(9, 8), torch.arange(9)
    )
    writes = [[w for k, _ in launch.kernels for w in k.writes] for launch in launches]
    assert [[w.scatter is not None for w in those] for those in writes] == [[False], [True]]
    assert "scatter (sum) to output0[8 * g0_to_0 + l1]" in tiled.describe(launches)


def test_the_verifier():
    graph, d0 = Graph(), axis("d", 0, 4)
    values, places, out = Buffer("input", 0, (4,), float32), Buffer("input", 1, (4,), int64), axis("d", 0, 7)
    x, at = (graph.make("load", (), b.dtype, (b, (Index.of(d0),), ())) for b in (values, places))
    target, g = Buffer("output", 0, (7,), float32), axis("g", "place", 7)
    zeros = Store(target, (out,), graph.make("constant", (), float32, 0.0))
    both = graph.make("tuple", (x, at), float32)

    def program(stores: list[Store]) -> Program:
        return Program(graph, [values, places], stores)

    right = Store(target, (d0,), both, None, Scatter(Combine.SUM, (Index.of(g),), (g,)))
    ir.verify(program([zeros, right]))
    assert str(program([zeros, right])).endswith("scatter over d0:4 to output0[gplace], gplace = v2: sum with v1")
    wrong = {
        "nothing has written": [right],
        "one operand": [zeros, right.of(graph.make("tuple", (x,), float32))],
        "outside": [zeros, Store(target, (d0,), both, None, Scatter(Combine.SUM, (Index.of(g) + 1,), (g,)))],
        "no such": [zeros, Store(target, (d0,), both, None, Scatter("median", (Index.of(g),), (g,)))],  # type: ignore
    }
    for text, stores in wrong.items():
        with pytest.raises(ir.Invalid, match=text):
            ir.verify(program(stores))


@pytest.mark.parametrize("executor", ["triton_fuser", "cpp"])
@pytest.mark.parametrize("f", [
    lambda i, x: F.embedding(i, x) * 2 + 1,
    lambda i, x: (x * 2).gather(0, i[:, None].expand(-1, 3)) + 1,
    lambda i, x: x.exp().index_select(0, i) + 1,
    lambda i, x: torch.zeros(1, 3).index_add(0, i, x.expand(1, 3) * 2) + 1,
], ids=["embedding", "gather", "index_select", "index_add"])  # fmt: skip
def test_an_index_of_a_dimension_of_1_is_checked(f, executor, interpreted):  # noqa: F811
    x = torch.randn(1, 3)
    compiled = thunder.jit(f, executors=[executor], tiers=0)
    torch.testing.assert_close(compiled(torch.tensor([0]), x), f(torch.tensor([0]), x))
    with pytest.raises(Exception, match=r"(?i)range|bound"):
        compiled(torch.tensor([5]), x)
