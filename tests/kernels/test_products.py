"""Matrix products as kernels, with what is computed before and after: under Triton's interpreter, beside float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels.test_triton import compiles, interpreted, regions_of, schedule_of, triton  # noqa: F401  a fixture
from thunder.executors.triton_fuser import TileRegion, TritonFuser
from thunder.extend import OperatorExecutor
from thunder.kernels import ir, products
from thunder.kernels.machine import planned_gpu
from thunder.ops import ltorch

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def products_of(compiled) -> list[TileRegion]:
    return [r for r in regions_of(compiled) if products.has_products(r.program)]


def check(f, inputs, count: int = 1) -> list[TileRegion]:
    """Each result within the rounding of its type of what float64 gives: twice that of the largest element, and in
    float32 that of a sum of so many elements."""
    compiled = thunder.jit(f, executors=[TritonFuser("products", always=True)])
    results = compiled(*inputs)
    wanted = f(*[x.double() if x.is_floating_point() else x for x in inputs])
    eager = f(*inputs)
    regions = products_of(compiled)
    assert len(regions) == count
    for region in regions:
        ir.verify(region.program)
    for result, want, like in zip(*([x] if torch.is_tensor(x) else x for x in (results, wanted, eager)), strict=True):
        assert result.dtype is like.dtype and result.stride() == like.stride()
        rounding = torch.finfo(result.dtype).eps if result.dtype is not torch.float32 else 2**-20
        if any(x.dtype in (torch.bfloat16, torch.float16) for x in inputs):
            rounding = max(rounding, torch.finfo(next(x.dtype for x in inputs if x.dtype.itemsize == 2)).eps / 2)
        assert float((result.double() - want).abs().max()) <= 2 * rounding * float(want.abs().max())
    return regions


def gelu(x, w, b, r):
    return F.gelu(F.linear(x, w, b)) + r


def gated(x, w, v):
    return F.silu(x @ w) * (x @ v)


def halves(x, w):
    a, b = F.linear(x, w).chunk(2, -1)
    return torch.sigmoid(a) * b


def heads(x, w):
    return (x @ w).view(x.shape[0], x.shape[1], 5, -1).transpose(1, 2) * 2.0


def two_results(x, w):
    y = x @ w
    return y, y.relu()


def scores(q, k, m):
    return torch.where(m, q @ k.transpose(-1, -2) * 0.25, -1.0) + torch.arange(q.shape[-2])[:, None] * 0.5


def columns(x, w, s):
    return F.linear(x * s, w).relu()


LAYER = ((3, 33, 47), (40, 47), (40,), (3, 33, 40))
PROGRAMS = {
    "gelu": (gelu, LAYER),
    "gated": (gated, ((3, 33, 47), (47, 70), (47, 70))),
    "halves": (halves, ((65, 96), (144, 96))),
    "heads": (heads, ((2, 33, 64), (64, 40))),
    "two results": (two_results, ((17, 130), (130, 33))),
    "batches": (lambda a, b: (a @ b).tanh(), ((3, 1, 33, 20), (2, 20, 19))),
    "transposed": (lambda a, b: (a.mT @ b.mT) * 0.5, ((2, 20, 70), (2, 41, 20))),
    "one row": (lambda a, b: (a @ b).relu(), ((2, 1, 40), (2, 40, 30))),
    "one column": (lambda a, b: (a @ b).relu(), ((70, 40), (40, 1))),
    "a bias of rows": (lambda a, b, r: a @ b - r[:, None], ((64, 32), (32, 64), (64,))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name, dtype, interpreted):  # noqa: F811
    f, shapes = PROGRAMS[name]
    check(f, [torch.randn(shape).to(dtype) for shape in shapes])


def divided(x, w, s):
    """A number that the program reads in the middle stands behind the product, and one before it."""
    scale = s.abs().max().item()
    return F.linear(x, w) / scale + s.sum().item()


def test_numbers_that_the_program_reads(interpreted):  # noqa: F811
    check(divided, (torch.randn(9, 33), torch.randn(40, 33), torch.tensor([3.5, -1.25])))


def test_masks_and_indices(interpreted):  # noqa: F811
    q, k, m = torch.randn(2, 3, 37, 16), torch.randn(2, 3, 29, 16), torch.rand(37, 29) > 0.5
    check(scores, (q, k, m))


def test_strided_operands(interpreted):  # noqa: F811
    x, w = torch.randn(50, 99)[:, 3:67], torch.randn(128, 80)[::2, 1::2]
    check(lambda x, w: (x @ w).relu(), (x, w))


def test_an_operand_is_dequantized_in_the_kernel(interpreted):  # noqa: F811
    x, s = torch.randn(5, 70, dtype=torch.bfloat16), torch.rand(33, 1, dtype=torch.bfloat16) / 100
    w = torch.randint(-127, 128, (33, 70), dtype=torch.int8)
    (region,) = check(lambda x, w, s: F.linear(x, w.to(x.dtype) * s), (x, w, s))
    assert {b.dtype.name for b in region.program.inputs} == {"bfloat16", "int8"}


def test_a_consumer_that_depends_on_another_product(interpreted):  # noqa: F811
    def f(x, w, v):
        y = x @ w
        return y.relu() @ v + y

    check(f, [torch.randn(32, 32) for _ in range(3)], 2)


def test_a_layer_that_is_trained(interpreted):  # noqa: F811
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in LAYER]
    ours, theirs = ([x.to(d).requires_grad_() for x in inputs] for d in (torch.float32, torch.float64))
    compiled = thunder.jit(gelu, executors=[TritonFuser("products", always=True)])
    compiled(*ours).sin().sum().backward()
    gelu(*theirs).sin().sum().backward()
    assert products_of(compiled)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.grad - b.grad).abs().max()) <= 1e-5 * float(b.grad.abs().max())


def test_products_of_other_executors_stay_theirs(interpreted):  # noqa: F811
    executor = OperatorExecutor("of layers")
    layer = executor.register_operator("own_layer", like=lambda x, w: ltorch.linear(x, w), fn=F.linear)
    executor.register_implementation(ltorch.linear, layer)
    x, w = torch.randn(5, 70), torch.randn(33, 70)
    compiled = thunder.jit(
        lambda x, w: F.gelu(F.linear(x, w)), executors=[executor, TritonFuser("products", always=True)]
    )
    torch.testing.assert_close(compiled(x, w), F.gelu(F.linear(x, w)))
    assert "own_layer" in str(thunder.last_traces(compiled)[-1]) and not products_of(compiled)


@pytest.mark.parametrize("shapes", [((0, 8), (8, 4)), ((4, 0), (0, 8))], ids=str)
def test_nothing_is_multiplied_by_kernels(shapes, interpreted):  # noqa: F811
    a, b = map(torch.randn, shapes)
    compiled = thunder.jit(lambda a, b: (a @ b) + 1, executors=[TritonFuser("products", always=True)])
    assert torch.equal(compiled(a, b), a @ b + 1) and not products_of(compiled)


def test_float64_is_multiplied_by_pytorch(interpreted):  # noqa: F811
    a = torch.randn(8, 8, dtype=torch.float64)
    compiled = thunder.jit(lambda a: (a @ a) + 1, executors=[TritonFuser("products", always=True)])
    assert torch.equal(compiled(a), a @ a + 1) and not products_of(compiled)


def test_a_precision_that_changes_is_honoured(interpreted, monkeypatch):  # noqa: F811
    calls, a = [], torch.randn(40, 40)
    monkeypatch.setattr(TileRegion, "by_operations", lambda self, x: calls.append(self) or [(x @ x).relu()])
    compiled = thunder.jit(lambda a: (a @ a).relu(), executors=[TritonFuser("products", always=True)])
    compiled(a)
    (region,) = products_of(compiled)
    region(a)
    assert not calls
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        region(a)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(calls) == 1


def test_the_faster_one_is_chosen(interpreted):  # noqa: F811
    def adapter(x, w, r):
        return F.linear(x, w) * 2.0 + r

    def layer(x, w, r):
        return F.linear(x, w) + r

    def is_fused(f, *shapes) -> bool:
        meta = [torch.empty(s, dtype=torch.bfloat16) for s in shapes]
        compiled = thunder.jit(f, executors=["triton_fuser"])
        with pytest.MonkeyPatch.context() as changes:
            results = lambda self, *args: [torch.empty(p.shape) for p in self.region.outputs]  # noqa: E731
            changes.setattr(TileRegion, "__call__", results)
            compiled(*meta)
        return bool(products_of(compiled))

    assert is_fused(adapter, (8192, 16), (4096, 16), (8192, 4096))
    assert not is_fused(layer, (256, 8192), (8192, 8192), (256, 8192))


def test_a_kernel_reads_what_it_shares_once():
    inputs = [torch.randn(shape) for shape in ((256, 512), (512, 256), (512, 256))]
    ((kernel, tile),) = schedule_of(gated, *inputs)[0].kernels
    assert isinstance(kernel, products.ProductKernel) and len(kernel.dots) == 2 and len(kernel.loads) == 3
    assert math.prod(tile[:2]) <= 128 * 128


def test_tiles_are_chosen_by_the_model():
    shapes = (16, 4096, 4096), (8192, 4096, 4096)
    few, many = (
        schedule_of(lambda x, w: (x @ w).relu(), torch.empty(m, k), torch.empty(k, n))[0].kernels[0][1]
        for m, n, k in shapes
    )
    assert few.first == 16 and many.first >= 128
    assert products.multiplying((1, 8192, 4096, 4096), (128, 256), planned_gpu().dot["bfloat16"], 132) > 0


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_kernels_compile_without_a_gpu(target):
    half = torch.bfloat16
    launches = schedule_of(gelu, *(torch.randn(s).to(half) for s in ((3, 40, 64), (96, 64), (96,), (3, 40, 96))))
    launches += schedule_of(halves, torch.randn(65, 96), torch.randn(130, 96))
    compiles(launches, target)
