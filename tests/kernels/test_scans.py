"""Scans of the kernel IR on GPUs: cumulative sums and products along any dimension, and what is fused around them."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kernels.test_triton import check, interpreted, schedule_of  # noqa: F401
from thunder.core.dtypes import float32
from thunder.kernels import ir, rules, tiled
from thunder.kernels.index import Index
from thunder.kernels.ir import Buffer, Graph, Program, Store, axis

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

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
    "joined": (lambda x: torch.cat([x, x.cumsum(1)], 1) * 2, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(9, 21), (2, 33), (40, 2)], ids=str)
def test_scans(name, shape, interpreted):  # noqa: F811
    program, kernels = PROGRAMS[name]
    torch.manual_seed(0)
    (region,) = check(lambda x: (program(x),), [torch.randn(shape, dtype=torch.float64)], 1e-9)
    if min(shape) > 1 and shape[1] > 2:
        assert sum(len(launch.kernels) for launch in region.scheduled(region._shown)[0]) == kernels


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_that_are_no_whole_tile(name, interpreted, monkeypatch):  # noqa: F811
    """A loop over the sweep goes on with what the tiles before are combined to."""
    monkeypatch.setattr(tiled, "WIDEST", 2048)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_summed_up_in_float32(dtype, interpreted):  # noqa: F811
    torch.manual_seed(0)
    x = torch.randn(9, 21).to(dtype)
    check(lambda x: ((x * 1).cumsum(1),), [x], 0.0)


def text_of(f, *inputs) -> str:
    from tests.kernels.test_ir import text_of as text

    return text(f, *inputs)


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
