"""Pools as kernels: averages, maxima and their gradients, beside PyTorch's, for both targets."""

from __future__ import annotations

import sys

import pytest
import torch

import thunder
from tests.kernels.pools import AVERAGES, ENLARGED, INDEXED, MAXIMA, image, layouts, with_nan_and_infinity
from tests.kernels.test_triton import check, interpreted, regions_of  # noqa: F401
from thunder.executors.cpp_fuser import CppFuser, KernelRegion
from thunder.executors.triton_fuser import TritonFuser
from thunder.kernels import cpp, ir
from thunder.kernels.machine import planned_gpu

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
# NumPy, which the interpreter computes with, warns of what makes infinities and nan
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.skipif(cpp.unavailable() is not None, reason="it compiles C++"),
]
BOTH = {
    **{f"average, {name}": row for name, row in AVERAGES.items()},
    **{f"maximum, {n}": r for n, r in MAXIMA.items()},
}

OTHERWISE_ROUNDED = {f"average, {n}" for n in (
    "poolformer", "ceil", "ceil without the padding", "large and apart", "to a large window"
)}  # fmt: skip


def regions_on(compiled) -> list:
    traces = [*thunder.last_traces(compiled)[-1:], *thunder.last_backward_traces(compiled)[-1:]]
    return [b.sym.fn for t in traces for b in t.bound_symbols if isinstance(b.sym.fn, KernelRegion)]


def pooled(compiled) -> list[str]:
    """The pools and their gradients that PyTorch runs."""
    traces = [*thunder.last_traces(compiled)[-1:], *thunder.last_backward_traces(compiled)[-1:]]
    return [
        b.sym.id
        for t in traces
        for b in t.bound_symbols
        if ("pool" in str(b.sym.id) or "nearest" in str(b.sym.id)) and not b.sym.is_fusion
    ]


def executors(target: str) -> list:
    return [TritonFuser("tiles", always=True) if target == "triton" else CppFuser("compiled", always=True)]


def checked(target: str, f, x: torch.Tensor, tolerance: float = 0.0) -> None:
    """Results, gradients and their strides, beside eager's."""
    compiled = thunder.jit(f, executors=executors(target))
    numbers = []
    for run in (compiled, f):
        own = x.clone().requires_grad_()
        results = run(own)
        first = results[0]
        cotangent = torch.linspace(-1, 2, first.numel()).to(x.dtype).reshape(first.shape)
        (gradient,) = torch.autograd.grad(first, own, cotangent)
        numbers.append([*(r.detach() for r in results), gradient])
    for got, want in zip(*numbers, strict=True):
        assert got.dtype is want.dtype and got.stride() == want.stride()
        if tolerance and want.is_floating_point():
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))
    regions = [*regions_of(compiled), *regions_on(compiled)]
    assert len(regions) >= 2 and not pooled(compiled)
    for region in regions:
        ir.verify(region.program)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_pools_and_gradients(name, target, interpreted):  # noqa: F811
    """Sums are added up in PyTorch's order, so that they are equal bit for bit, but where a window is a reduction, and
    in gradients of windows that are divided by different numbers."""
    pool, size, options = BOTH[name]
    for x in layouts(image(size)):
        checked(target, lambda x: (pool(x * 2, **options) - 1,), x, 1e-6 if name in OTHERWISE_ROUNDED else 0.0)


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_indices_of_maxima(name, target, interpreted):  # noqa: F811
    pool, size, options = INDEXED[name]
    for x in layouts(image(size)):
        checked(target, lambda x: pool(x * 2, **options, return_indices=True), x)


@pytest.mark.parametrize("name", MAXIMA)
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_nan_and_infinity_in_maxima(name, target, interpreted):  # noqa: F811
    pool, size, options = MAXIMA[name]
    checked(target, lambda x: (pool(x * 2, **options) * 2,), with_nan_and_infinity(image(size)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_types(dtype, target, interpreted):  # noqa: F811
    """16-bit floats are added up in float32 and rounded once."""
    for name in ("average, poolformer", "maximum, a stem"):
        pool, size, options = BOTH[name]
        x = image(size, dtype)
        compiled = thunder.jit(lambda x: pool(x, **options) - x.sum(), executors=executors(target))
        own, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        results, want = pool(own, **options), pool(exact, **options)
        got = thunder.jit(lambda x: pool(x, **options) * 1.0, executors=executors(target))(own)
        assert got.dtype is dtype and compiled(own).dtype is dtype
        assert torch.equal(got, want.to(dtype)) or torch.equal(got, results)
        (gradient,) = torch.autograd.grad(got.sum(), own)
        (other,) = torch.autograd.grad(want.sum(), exact)
        bound = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(gradient.double(), other, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ENLARGED)
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_nearest_elements(name, target, interpreted):  # noqa: F811
    enlarge, size, options = ENLARGED[name]
    for x in layouts(image(size)):
        checked(target, lambda x: (enlarge(x * 2, **options) - 1,), x, 1e-6 if name == "eight times" else 0.0)


@pytest.mark.parametrize("size", [(7, 9), (3, 2), (8, 11)])
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_nearest_elements_of_other_sizes(size, target, interpreted):  # noqa: F811
    """Kernels compute the elements where they are those of PyTorch's rounded indices."""
    x = image((1, 2, 4, 5))
    compiled = thunder.jit(lambda x: torch.nn.functional.interpolate(x * 2, size) + 1, executors=executors(target))
    assert torch.equal(compiled(x), torch.nn.functional.interpolate(x * 2, size) + 1)
    assert len([*regions_of(compiled), *regions_on(compiled)]) == 1


def test_a_pool_and_what_is_beside_it_are_one_kernel(interpreted):  # noqa: F811
    """poolformer's token mixer reads its image once."""
    pool, size, options = AVERAGES["poolformer"]
    (region,) = check(lambda x: (pool(x, **options) - x,), [image(size)], 0.0)
    ((kernel,),) = [[k for k, _ in launch.kernels] for launch in region.scheduled(region._shown)[0]]
    x = image(size)
    assert kernel.bytes == 2 * x.nbytes and not kernel.rows
    # PyTorch's pool has to find nine elements for each of its results
    assert region.eager_seconds > planned_gpu().operand * 9 * x.numel() + 2 * planned_gpu().launch


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: torch.nn.functional.avg_pool2d(x, 7, 1, 3) * 2,  # whose windows are large and overlap
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 5) * 2,  # whose windows differ
    ],
    ids=["large windows", "sizes that do not divide"],
)
@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_other_pools_are_pytorchs(pool, target, interpreted):  # noqa: F811
    x = image((1, 2, 12, 13))
    compiled = thunder.jit(lambda x: pool(x + 1), executors=executors(target))
    assert torch.equal(compiled(x), pool(x + 1)) and len(pooled(compiled)) == 1


@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_a_batch_of_symbolic_size(target, interpreted):  # noqa: F811
    pool, size, options = AVERAGES["poolformer"]
    compiled = thunder.jit(lambda x: pool(x, **options) - x, executors=executors(target), dynamic=True)
    for batch in (2, 3, 5):
        x = image((batch, *size[1:]))
        assert torch.equal(compiled(x), pool(x, **options) - x)
