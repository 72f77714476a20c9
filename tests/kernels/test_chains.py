"""Chains of matrix products, as attention by hand and its gradients: under Triton's interpreter, beside float64."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import thunder
from tests.kernels.test_triton import compiles, interpreted, regions_of, schedule_of, triton  # noqa: F401  a fixture
from thunder.executors.triton_fuser import TileRegion, TritonFuser
from thunder.kernels import chains, ir

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
SLOPES = torch.linspace(0.1, 1, 2)


def places(scores):
    return torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])


def attention(change):
    """softmax(change(q @ k.T)) @ v, in float32 at least."""

    def f(q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if q.dtype is torch.float64 else scores.float()
        return torch.softmax(change(scores), -1).to(q.dtype) @ v

    return f


def causal(s):
    i, j = places(s)
    return s.masked_fill(i < j, -math.inf)


def sliding(s):
    i, j = places(s)
    return torch.where((i >= j) & (i - j < 40), s, -math.inf)


def prefix(s):
    i, j = places(s)
    return torch.where((i >= j) | (j < 20), s, -math.inf)


def alibi(s):
    i, j = places(s)
    return causal(s + SLOPES[:, None, None] * (j - i))


def capped(s):
    return causal(2 * torch.tanh(s / 2))


def documents(s):
    i, j = places(s)
    return torch.where((i // 30 == j // 30) & (i >= j), s, -math.inf)


CHANGES = {f.__name__: f for f in (causal, sliding, prefix, alibi, capped, documents)} | {"plain": lambda s: s * 2}


def attentions(compiled) -> list[TileRegion]:
    return [r for r in regions_of(compiled) if chains.has_chains(r.program)]


def check(f, shapes, dtype, rounding: float, count: int = 2) -> list[TileRegion]:
    """Results and gradients within a multiple of the type's rounding, of the largest element, of float64's."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    ours, theirs = ([x.to(d, copy=True).requires_grad_() for x in inputs] for d in (dtype, torch.float64))
    compiled = thunder.jit(f, executors=[TritonFuser("chains", always=True)])
    result, want = compiled(*ours), f(*theirs)
    cotangent = torch.randn(want.shape, generator=generator, dtype=torch.float64).to(dtype)
    result.backward(cotangent)
    want.backward(cotangent.double())
    regions = attentions(compiled)
    assert len(regions) == count
    for region in regions:
        ir.verify(region.program)
    pairs = [(result, want), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for a, b in pairs:
        assert a.dtype is dtype
        assert float((a.detach().double() - b.detach()).abs().max()) <= rounding * float(b.detach().abs().max())
    return regions


QKV = ((1, 2, 70, 16),) * 3


@pytest.mark.parametrize("name", CHANGES)
def test_attention(name, interpreted):  # noqa: F811
    check(attention(CHANGES[name]), QKV, torch.float32, 2**-18)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["alibi", "capped"])
def test_half_precision(name, dtype, interpreted):  # noqa: F811
    check(attention(CHANGES[name]), QKV, dtype, 4 * torch.finfo(dtype).eps)


def test_tiles_that_a_mask_hides_are_not_computed(interpreted):  # noqa: F811
    regions = check(attention(sliding), ((1, 1, 300, 16),) * 3, torch.bfloat16, 4 * 2**-7)
    for region in regions:
        for line in region.source.splitlines():
            assert "for start in range(0, 300" not in line
        assert region.source.count("for start in range") >= 3  # before, behind and where no element is hidden


@pytest.mark.parametrize("shapes", [((2, 33, 20), (2, 130, 20), (2, 130, 20)), ((3, 2, 64), (3, 45, 64), (3, 45, 8))])
def test_other_sizes(shapes, interpreted):  # noqa: F811
    check(attention(lambda s: s * 0.5), shapes, torch.float32, 2**-18)


def test_heads_that_share_keys(interpreted):  # noqa: F811
    def f(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return attention(causal)(q, k, v)

    check(f, ((2, 4, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16)), torch.float32, 2**-18)


def test_a_mask_that_is_read(interpreted):  # noqa: F811
    mask = torch.rand(70, 70) > 0.3
    check(attention(lambda s: torch.where(mask, s, -math.inf)), QKV, torch.float32, 2**-18)


OF_BATCH = torch.stack([torch.arange(200) // 70, torch.arange(200) // 130])
HOLES = torch.rand(200, generator=torch.Generator().manual_seed(0)) > 0.5


def of_documents(b, i, j):
    return (i >= j) & (OF_BATCH[0][i] == OF_BATCH[0][j])


def of_documents_of_a_batch(b, i, j):
    return OF_BATCH[b, i] == OF_BATCH[b, j]


def of_parts(b, i, j):
    return ((i // 64 + j // 64) % 2 == 0) | (HOLES[i] & (j < 30))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("visible", [of_documents, of_documents_of_a_batch, of_parts], ids=lambda f: f.__name__)
def test_tiles_in_which_a_condition_holds_are_listed(visible, interpreted, monkeypatch):  # noqa: F811
    """Of one that reads memory, or that is of quotients of indices: three lists, for the forward and two gradients."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(chains, "LISTING", math.inf)
    mask = flex.create_block_mask(lambda b, h, i, j: visible(b, i, j), 2, None, 200, 200, device="cpu")
    places = torch.arange(2)[:, None, None, None], torch.arange(200)[:, None], torch.arange(200)
    is_visible = visible(*places).expand(2, 1, 200, 200)
    q, k, v = (torch.randn(2, 2, 200, 16, requires_grad=True) for _ in range(3))
    compiled = thunder.jit(
        lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask), executors=[TritonFuser("chains", always=True)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compiled(q, k, v)
    gradients = torch.autograd.grad(result.sin().sum(), (q, k, v))
    want = torch.softmax((q @ k.mT * 0.25).masked_fill(~is_visible, -math.inf), -1) @ v
    torch.testing.assert_close(result, want)
    for a, b in zip(gradients, torch.autograd.grad(want.sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)
    kernels = [k for r in attentions(compiled) for k in kernels_of(r)]
    listed = [k for k in kernels if isinstance(k, chains.ListedTiles)]
    assert len(listed) == 3 and [k.listed for k in kernels if k.listed] == listed
    assert all(k.visible.per == (2 if visible is of_documents_of_a_batch else 4) for k in listed)


def test_lists_are_of_the_tiles_of_the_chain(interpreted, monkeypatch):  # noqa: F811
    """One loop over those in which all elements are visible, and one over others."""
    monkeypatch.setattr(chains, "LISTING", math.inf)
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))

    def f(q, k, v):
        i, j = torch.arange(256)[:, None], torch.arange(256)
        s = torch.where(HOLES.new_ones(256)[i] & (i // 128 == j // 128) & (j > 3), q @ k.mT, -math.inf)
        return torch.softmax(s, -1) @ v

    compiled = thunder.jit(f, executors=[TritonFuser("chains", always=True)])
    torch.testing.assert_close(compiled(q, k, v), f(q, k, v))
    (region,) = attentions(compiled)
    (kernel,) = (k for k in kernels_of(region) if isinstance(k, chains.ListedTiles))
    assert kernel.numbers.shape == (4, 8) and kernel.counts.shape == (4, 2)  # of float32: tiles of 32 elements
    assert region.source.count("for number in range(") == 2


def test_a_condition_of_rows_hides_their_tiles(interpreted):  # noqa: F811
    """The gradients of keys of a prefix are sums over all rows, those of others over rows from them on."""
    regions = check(attention(prefix), ((1, 1, 300, 16),) * 3, torch.bfloat16, 4 * 2**-7)
    assert all(f"for start in range({low}" not in r.source for r in regions for low in ("0, 300", "0, high"))
    assert not any(isinstance(k, chains.VisibleTiles) for r in regions for k in kernels_of(r))


def kernels_of(region: TileRegion) -> list:
    return [k for launch in region.scheduled(region._shown)[0] for k, _ in launch.kernels]


def test_rows_that_see_nothing_are_0_in_flex_attention(interpreted):  # noqa: F811
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (j > 3), None, None, 40, 40, device="cpu")

    def f(q, k, v):
        return flex.flex_attention(q, k, v, block_mask=mask)

    def by_hand(q, k, v):
        i, j = torch.arange(40)[:, None], torch.arange(40)
        weights = torch.softmax((q @ k.mT * 0.25).masked_fill((i < j) | (j <= 3), -math.inf), -1)
        return torch.where(i <= 3, 0.0, weights) @ v

    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    compiled = thunder.jit(f, executors=[TritonFuser("chains", always=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compiled(q, k, v)
    gradients = torch.autograd.grad(result.sin().sum(), (q, k, v))
    want = by_hand(q, k, v)
    assert len(attentions(compiled)) == 2 and not result[:, :, :4].any()
    torch.testing.assert_close(result, want)
    for a, b in zip(gradients, torch.autograd.grad(want.sin().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [70, 1])
def test_inference_has_one_kernel(rows, interpreted):  # noqa: F811
    q, k, v = map(torch.randn, ((1, 2, rows, 16), *QKV[1:]))
    compiled = thunder.jit(attention(alibi), executors=[TritonFuser("chains", always=True)])
    torch.testing.assert_close(compiled(q, k, v), attention(alibi)(q, k, v))
    assert len(attentions(compiled)) == 1


def returned(q, k, v):
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v + weights.sum()


def of_rows(q, k, v):
    return torch.softmax(q @ k.mT, -2) @ v


def two_values(q, k, v):
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v + weights @ v.sin()


@pytest.mark.parametrize("f", [returned, of_rows, two_values], ids=lambda f: f.__name__)
def test_what_is_no_attention(f, interpreted):  # noqa: F811
    ours, theirs = ([x.clone().requires_grad_() for x in map(torch.ones_like, map(torch.empty, QKV))] for _ in range(2))
    compiled = thunder.jit(f, executors=[TritonFuser("chains", always=True)])
    compiled(*ours).sin().sum().backward()
    f(*theirs).sin().sum().backward()
    assert not attentions(compiled)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def forward(q, k, v):
    scores = sliding((q @ k.transpose(-1, -2)).float() * 0.25)
    largest = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - torch.where(largest == -math.inf, 0.0, largest))
    total = e.sum(-1, keepdim=True)
    return (e / total).to(q.dtype) @ v, torch.log(total) + largest


def backward(q, k, v, g, differences, sums):
    weights = torch.exp(sliding((q @ k.transpose(-1, -2)).float() * 0.25) - sums)
    of_scores = (weights * ((g @ v.transpose(-1, -2)).float() - differences)).to(q.dtype)
    return of_scores @ k, q.transpose(-1, -2) @ of_scores, weights.to(q.dtype).transpose(-1, -2) @ g


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_kernels_compile_without_a_gpu(target):
    q, k, v, g = (torch.randn(2, 100, 64, dtype=torch.bfloat16) for _ in range(4))
    launches = schedule_of(forward, q, k, v)
    launches += schedule_of(backward, q, k, v, g, torch.randn(2, 100, 1), torch.randn(2, 100, 1))
    assert len(launches) == 3
    compiles(launches, target)


def test_lists_compile_without_a_gpu(monkeypatch):
    monkeypatch.setattr(chains, "LISTING", math.inf)
    documents = torch.arange(200) // 70

    def f(documents, q, k, v):
        scores = torch.where(documents[:, None] == documents, (q @ k.transpose(-1, -2)).float(), -math.inf)
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (e / e.sum(-1, keepdim=True)).to(q.dtype) @ v

    q, k, v = (torch.randn(2, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    launches = schedule_of(f, documents, q, k, v)
    kinds = [type(launch.kernels[0][0]) for launch in launches]
    assert kinds == [chains.VisibleTiles, chains.ListedTiles, chains.ChainKernel]
    compiles(launches, ("cuda", 90, 32))
