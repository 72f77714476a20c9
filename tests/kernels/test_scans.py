"""Scans of the kernel IR on GPUs: cumulative sums and products along any dimension, and what is fused around them."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels.test_ir import region_of, text_of
from tests.kernels.test_triton import (
    check,
    check_offsets,
    compiles,
    interpreted,  # noqa: F401
    regions_of,
    requests,
    schedule_of,
)
from thunder.core.dtypes import float32
from thunder.executors.triton_fuser import TritonFuser
from thunder.kernels import combining, ir, lower, rules, tiled, tiles
from thunder.kernels.index import Index
from thunder.kernels.ir import Buffer, Graph, Program, Store, axis

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
# NumPy, which the interpreter computes with, warns of what makes infinities and nan
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# by program: how many kernels of whole rows it is
PROGRAMS = {
    "rows": (lambda x: (x * 2).cumsum(1), 1),
    "columns": (lambda x: (x * 2).cumsum(0) + 1, 1),
    "a softmax of sums": (lambda x: torch.softmax(x.cumsum(1), 1), 1),
    "a softmax of sums of columns": (lambda x: torch.softmax(x.cumsum(0), 0), 1),
    "sums of a softmax": (lambda x: torch.softmax(x, 1).cumsum(1) * x, 1),
    "backwards": (lambda x: (x.flip(1) * 2).cumsum(1).flip(1), 1),
    "columns backwards": (lambda x: (x.flip(0) * 2).cumsum(0).flip(0) * x, 1),
    "of elements in the other order": (lambda x: x.flip(1).cumsum(1) * x, 1),
    "both ways": (lambda x: (x.cumsum(1) + x.flip(1).cumsum(1).flip(1)) * x, 1),
    "of a scan": (lambda x: ((x * 2).cumsum(1) * x).cumsum(1), 1),
    "of a scan along the other dimension": (lambda x: ((x * 2).cumsum(1) * x).cumsum(0) * 3, 2),
    "products and their sum": (lambda x: (1 + x * 0.1).cumprod(1).sum(1), 1),
    "the last one": (lambda x: (x * 2).cumsum(1)[:, -1] * 2, 1),
    "every second one": (lambda x: (x * 2).cumsum(1)[:, ::2].exp(), 2),
    "differences": (lambda x: torch.diff(x.cumsum(1), dim=1) * 2, 2),
    "transposed": (lambda x: (x * 2).cumsum(1).t().contiguous() + 1, 1),
    "of one row": (lambda x: (x * 2).reshape(-1).cumsum(0) * 2, 1),
    "of booleans": (lambda x: (x > 0).cumsum(1) * 2, 1),
    "joined": (lambda x: torch.cat([x, x.cumsum(1)], 1) * 2, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(9, 21), (2, 33), (40, 2)], ids=str)
def test_scans(name, shape, interpreted):  # noqa: F811
    program, kernels = PROGRAMS[name]
    torch.manual_seed(0)
    (region,) = check(lambda x: (program(x),), [torch.randn(shape, dtype=torch.float64)], 1e-9)
    if min(shape) > 1 and shape[1] > 2:
        assert sum(len(launch.kernels) for launch in region.scheduled(region._shown)[0]) == kernels


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_that_are_no_whole_tile(name, interpreted, monkeypatch):  # noqa: F811
    """A loop over the sweep goes on with what the tiles before are combined to."""
    monkeypatch.setattr(tiles, "WIDEST", 2048)
    monkeypatch.setattr(tiled, "WHOLE", 2048)
    torch.manual_seed(0)
    shape = (2300, 2) if "columns" in name else (2, 2300)
    check(lambda x: (PROGRAMS[name][0](x),), [torch.randn(shape, dtype=torch.float64)], 1e-9)


def test_a_dimension_of_one_element(interpreted):  # noqa: F811
    check(lambda x: (x.cumsum(0) + 1, torch.softmax(x[:, :1].cumsum(1), 1)), [torch.randn(1, 33)], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int16, torch.uint8], ids=str)
def test_types(dtype, interpreted):  # noqa: F811
    torch.manual_seed(0)
    x = torch.randn(9, 21) if dtype.is_floating_point else torch.randint(-9, 9, (9, 21)).to(dtype)
    check(lambda x: ((x * 2).cumsum(1), (x + 1).cumprod(0), (x * 2).cumsum(0, dtype=x.dtype)), [x], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("d", [0, 1])
def test_extremes_so_far(dtype, d, interpreted):  # noqa: F811
    """With the number of the last element that is one; NaN is."""
    torch.manual_seed(0)
    x = torch.randint(0, 9, (7, 13)).to(dtype)
    tolerance = 1e-12 if dtype.is_floating_point else 0.0  # NaN is equal to none
    if dtype.is_floating_point:
        x[2, 3] = x[4, 3] = float("nan")
        x[5, 0] = float("-inf")
    check(lambda x: (*torch.cummax(x * 2, d), *torch.cummin(x.flip(d), d)), [x], tolerance)
    check(lambda x: (torch.cummax(x, d)[0].flip(d) * 2, torch.cummin(x.flip(d), d)[1].flip(d) + 1), [x], tolerance)


def test_the_gradient_of_extremes_so_far(interpreted):  # noqa: F811
    torch.manual_seed(0)
    x, results = torch.randn(5, 9, dtype=torch.float64), []
    compiled = thunder.jit(lambda x: torch.cummax(x * 2, 1)[0].sin(), executors=[TritonFuser("tiles", always=True)])
    for run in (lambda x: torch.cummax(x * 2, 1)[0].sin(), compiled):
        leaf = x.clone().requires_grad_()
        results.append(torch.autograd.grad((run(leaf) * torch.arange(9)).sum(), leaf)[0])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logarithms_of_sums_of_exponentials(dtype, interpreted):  # noqa: F811
    torch.manual_seed(0)
    x = torch.randn(4, 9).to(dtype) * 10
    x[0, 2], x[1, :3], x[2, 4], x[3, 2] = float("inf"), float("-inf"), float("nan"), float("-inf")
    check(lambda x: (torch.logcumsumexp(x + 1, 1), torch.logcumsumexp(x * 2, 0)), [x], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_summed_up_in_float32(dtype, interpreted):  # noqa: F811
    torch.manual_seed(0)
    x = torch.randn(9, 21).to(dtype)
    check(lambda x: ((x * 1).cumsum(1),), [x], 0.0)


def test_a_scan_is_a_node():
    assert text_of(lambda x: (x * 2).cumsum(1), torch.randn(2, 3)) == (
        "    v0: float32 = load input0[d0, r1_0]\n"
        "    v1: float32 = 2.0\n"
        "    v2: float32 = mul(v0, v1)\n"
        "    v3: float32 = sum over r1_0:3 up to d1 of v2\n"
        "store output0[d0:2, d1:3] = v3"
    )


def test_a_scan_that_is_read_in_the_other_order_is_one_from_the_end():
    text = text_of(lambda x: (x.flip(1).cumsum(1)).flip(1), torch.randn(2, 3))
    assert "load input0[d0, r1_0]" in text and "sum over r1_0:3 from d1 of v0" in text


def test_the_last_element_of_a_scan_is_a_reduction():
    assert "sum over r1_0:3 of v0" in text_of(lambda x: x.cumsum(1)[:, -1], torch.randn(2, 3))


def test_the_verifier():
    graph, d0, bound = Graph(rules.rewrite), axis("d", 0, 4), axis("r", (1, 0), 4)
    buffer, target = Buffer("input", 0, (4,), float32), Buffer("output", 0, (4,), float32)
    x = graph.make("load", (), float32, (buffer, (Index.of(bound),), ()))

    def program(combine, index: Index) -> Program:
        scan = graph.make("scan", (x,), float32, (combine, bound, index, False))
        return Program(graph, [buffer], [Store(target, (d0,), scan)])

    ir.verify(program("sum", Index.of(d0)))
    for text, wrong in {"no such": ("median", Index.of(d0)), "outside": ("sum", Index.of(d0) + 1)}.items():
        with pytest.raises(ir.Invalid, match=text):
            ir.verify(program(*wrong))


def test_scans_of_long_rows_that_go_both_ways_are_two_kernels():
    def f(x):
        return x.cumsum(1) + x.flip(1).cumsum(1).flip(1)

    for width, count in (4096, 1), (5000, 2):
        kernels = [k for launch in schedule_of(f, torch.randn(600, width)) for k, _ in launch.kernels]
        assert len(kernels) == count


def cat_before(x, y):
    """The weights of a NeRF as its authors write them."""
    alpha = 1 - torch.exp(-torch.relu(x) * y)
    before = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    return (alpha * before).sin()


def cat_after(x, y):
    """Those of a sum of densities."""
    density = torch.relu(x) * y
    before = torch.cumsum(density[..., :-1], dim=-1)
    before = torch.cat([torch.zeros_like(before[..., :1]), before], -1)
    return ((1 - torch.exp(-density)) * torch.exp(-before)).sin()


GRADIENTS = {
    "cat before": (cat_before, [2, 1]),
    "cat after": (cat_after, [2, 1]),
    "products of columns": (lambda x, y: torch.cumprod(x * y, 0).sin(), [1, 1]),
    "sums": (lambda x, y: torch.cumsum(x * y, 1).sin(), [1, 1]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, interpreted):  # noqa: F811
    """Also of products of which some factors are 0."""
    program, kernels = GRADIENTS[name]
    torch.manual_seed(0)
    x, y = torch.randn(12, 24, dtype=torch.float64), torch.rand(12, 24, dtype=torch.float64)
    x[3, 3] = x[5, 7] = x[9, 7] = x[9, 9] = 0
    compiled, results = thunder.jit(program, executors=[TritonFuser("tiles", always=True)]), []
    for run in (program, compiled):
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        out = run(*leaves)
        results.append([out, *torch.autograd.grad((out * torch.arange(24).cos()).sum(), leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)
    regions = regions_of(compiled)
    for region in regions:
        ir.verify(region.program)
        for launch in region.scheduled(region._shown)[0]:
            check_offsets(launch)
    assert [sum(len(launch.kernels) for launch in r.scheduled(r._shown)[0]) for r in regions] == kernels


def test_gradients_compile_without_a_gpu(interpreted):  # noqa: F811
    compiled = thunder.jit(cat_before, executors=[TritonFuser("tiles", always=True)])
    compiled(torch.randn(6, 24, requires_grad=True), torch.rand(6, 24)).sum().backward()
    launches = [launch for r in regions_of(compiled) for launch in r.scheduled(r._shown)[0]]
    assert any("_cumlinear" in request.text for request in requests(launches))
    compiles(launches, ("cuda", 90, 32))


def test_the_gradient_of_cumulative_products_is_autograds():
    for dtype, shape, dim in ((torch.float64, (5, 7), 0), (torch.float32, (6,), -1), (torch.complex128, (3, 4), 1)):
        torch.manual_seed(0)
        x = torch.randn(shape, dtype=dtype)
        x.view(-1)[2] = 0
        leaves = [x.clone().requires_grad_() for _ in "ab"]
        program = lambda x, dim=dim: torch.cumprod(x, dim)  # noqa: E731
        grads = [
            torch.autograd.grad(run(leaf).abs().square().sum(), leaf)[0]
            for run, leaf in zip((program, thunder.jit(program)), leaves, strict=True)
        ]
        torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("executors", [["torch"], [TritonFuser("tiles", always=True)]], ids=["torch", "tiles"])
def test_the_second_derivative_of_cumulative_products(executors, interpreted):  # noqa: F811
    def f(x):
        (g,) = torch.autograd.grad(torch.cumprod(x, 0).square().sum(), x, create_graph=True)
        return g.sin().sum()

    x = torch.rand(5, dtype=torch.float64) + 0.5
    leaves = [x.clone().requires_grad_() for _ in "ab"]
    for run, leaf in zip((f, thunder.jit(f, executors=executors)), leaves, strict=True):
        run(leaf).backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


@pytest.mark.parametrize(
    "f, expected",
    [
        (lambda x: torch.cat([x[:, :1] * 0, x.cumsum(1)[:, :-1]], 1), "over r1_at_-1:6 up to"),
        (lambda x: torch.cat([x[:, :1] * 0, x], 1).cumsum(1)[:, :-1], "over r1_at_0:6 up to"),
        (lambda x: F.pad(x.flip(1).cumsum(1).flip(1)[:, 1:], (0, 1)), "over r1_at_1:6 from"),
        (lambda x: F.pad(x.cumsum(1)[:, 1:], (0, 1)), "over r1_0:6 up to"),  # the first one combines two
        (lambda x: torch.cat([x[:, :1] * 0, x.cumsum(1)[:, :-1]], 1) + x.cumsum(1), "over r1_0:6 up to"),
    ],
)
def test_scans_are_aligned_with_those_that_read_them(f, expected):
    program = combining.aligned_scans(lower.lowered(region_of(f, torch.randn(3, 6))))
    ir.verify(program)
    assert expected in str(program)


def test_a_region_that_pytorch_runs_faster_stays_with_it(interpreted):  # noqa: F811
    """One long row is one program here, and many in PyTorch's kernel."""

    def f(x):
        return (x * 2).cumsum(-1) + 1

    for shape, is_fused in ((400, 30), True), ((30000,), False):
        compiled = thunder.jit(f, executors=[TritonFuser("tiles")])
        x = torch.randint(0, 5, shape).float()
        assert torch.equal(compiled(x), f(x))
        assert bool(regions_of(compiled)) == is_fused
