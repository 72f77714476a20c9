"""Scatters of the kernel IR: additions and writes at indices that tensors say, and the gradients of reads at indices."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels.scatters import ADDITIONS, READS, TOLERANCE, WRITES, arguments, gradient_of
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


def checked(program, arguments, tolerance: float = 0.0) -> list[TileRegion]:
    regions = check(lambda *args: (program(*args),), arguments, tolerance)
    stores = [s for region in regions for s in region.program.stores]
    assert any(s.scatter is not None for s in stores)
    return regions


@pytest.mark.sweep(2)
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
    assert "scatter (sum) to output0[8 * g0_to_0 + 4 * l1_vectors + l1_within]" in tiled.describe(launches)


def test_the_gradient_of_one_element_of_each_row_is_no_scatter(interpreted):  # noqa: F811
    """As of a loss with smoothed labels: -0.0 is added to 0."""
    x, at = torch.randn(5, 7, 3, requires_grad=True), torch.tensor([[3, 0, 6]] * 5)[:, None]
    compiled = thunder.jit(lambda x: torch.gather(x * 2, 1, at), executors=[TritonFuser("picks", always=True)])
    cotangent = torch.where(torch.randn(5, 1, 3) > 0, torch.randn(5, 1, 3), -0.0)
    (got,) = torch.autograd.grad(compiled(x), x, cotangent)
    (want,) = torch.autograd.grad(torch.gather(x * 2, 1, at), x, cotangent)
    assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
    writes = [w for r in regions_of(compiled) for l in r.scheduled(r._shown)[0] for k, _ in l.kernels for w in k.writes]
    assert all(w.scatter is None for w in writes)


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
