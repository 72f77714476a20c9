"""Sizes of arguments that change: a constant once, symbolic from the second value on."""

import re
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import thunder
from thunder.errors import OptionError
from thunder.executors.inductor import inductor_ex
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT


class Net(nn.Module):
    """Attention over a sequence of any length, with a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids, labels):
        x = self.norm(self.embed(ids))
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        return F.cross_entropy(self.out(y).flatten(0, 1), labels.flatten())


def gradients(module, call, ids):
    module.zero_grad()
    loss = call(ids, ids)
    loss.backward()
    return loss, [p.grad.clone() for p in module.parameters()]


def test_training_on_many_lengths():
    module = Net()
    compiled = thunder.jit(module)
    generator = torch.Generator().manual_seed(0)
    for n in torch.randint(2, 60, (30,), generator=generator).tolist():
        ids = torch.randint(11, (3, n), generator=generator)
        got, want = gradients(module, compiled, ids), gradients(module, module, ids)
        torch.testing.assert_close(got, want)
    assert thunder.cache_misses(compiled) == 2


def test_images_and_batches():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    compiled = thunder.jit(net)
    for size, batch in [(8, 2), (12, 2), (9, 2), (9, 5), (16, 7), (11, 3)]:
        x = torch.randn(batch, 3, size, size + 1)
        torch.testing.assert_close(compiled(x), net(x))
    assert thunder.cache_misses(compiled) <= 3


def test_from_the_first_call_and_never():
    sizes = [2, 3, 5, 7]
    for dynamic, misses in ((True, 1), (False, 4), (None, 2)):
        compiled = thunder.jit(lambda x: x.sum() * x.shape[0], dynamic=dynamic)
        for n in sizes:
            assert torch.equal(compiled(torch.ones(n)), torch.tensor(float(n * n)))
        assert thunder.cache_misses(compiled) == misses


def test_one_dimension_that_is_marked():
    compiled = thunder.jit(lambda x: x * x.shape[0], dynamic=False)
    for n in (2, 3, 4):
        x = torch.ones(n, 2)
        thunder.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), x * n)
    assert thunder.cache_misses(compiled) == 1
    with pytest.raises(IndexError, match="dim 2 of a tensor with 2 dimensions"):
        thunder.mark_dynamic(torch.ones(2, 2), 2)


def test_what_a_program_decides_by_a_size_is_checked():
    compiled = thunder.jit(lambda x: x.sum() if x.shape[0] > 4 else x.sin().sum())
    for n in (2, 3, 4, 5, 6, 3, 9):
        x = torch.arange(float(n))
        assert torch.equal(compiled(x), x.sum() if n > 4 else x.sin().sum())
    assert thunder.cache_misses(compiled) == 3


def test_sizes_of_several_arguments():
    compiled = thunder.jit(lambda xs, y: [x @ y for x in xs])
    for rows, columns in [(2, 3), (4, 3), (4, 5), (7, 8)]:
        xs, y = [torch.randn(rows, 4), torch.randn(rows + 1, 4)], torch.randn(4, columns)
        assert all(torch.equal(a, x @ y) for a, x in zip(compiled(xs, y), xs))
    assert thunder.cache_misses(compiled) <= 4


def test_other_values():
    with pytest.raises(OptionError, match="dynamic='auto' is not an option"):
        thunder.jit(torch.sin, dynamic="auto")


def test_differences_along_a_size():
    compiled = thunder.jit(lambda x: (torch.diff(x, prepend=x[:1] - 1), torch.diff(x, n=3)))
    for n in (4, 5, 6, 7, 2):
        x = torch.arange(float(n)) ** 3
        ours, theirs = compiled(x), (torch.diff(x, prepend=x[:1] - 1), torch.diff(x, n=3))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert thunder.cache_misses(compiled) == 3  # two elements have no third difference


def test_a_size_that_happens_to_be_another_dimensions():
    """(n, 4, 3) + (4, 3), (2 * n, 3) @ (3, 8) + (8,): nothing is decided by n being 4, or 2 * n being 8."""

    def f(x, y, w, b):
        z = torch.addmm(b, x.flatten(0, 1), w)
        return (x + y) * x.mean((1, 2), keepdim=True), z.view(x.shape[0], -1).softmax(-1)

    compiled = thunder.jit(f)
    y, w, b = torch.randn(4, 3), torch.randn(3, 8), torch.randn(8)
    for n in (7, 5, 2, 3, 4, 8, 1):
        x = torch.randn(n, 4, 3)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, y, w, b), f(x, y, w, b), strict=True))
    assert thunder.cache_misses(compiled) == 3
    assert compiled.recompilations[-1].reason.startswith("x.shape[0] > 1 was True")


@pytest.mark.slow
def test_batches_of_30_sizes_through_a_gpt():
    model = NanoGPT(GPTConfig(vocab_size=48, block_size=16, n_layer=2, n_head=4, n_embd=32))
    compiled = thunder.jit(model)
    for n in [28, 13, 16, 1, *torch.randint(1, 60, (26,)).tolist()]:
        ids = torch.randint(0, 48, (n, 16))
        losses = [m(ids, ids)[1] for m in (compiled, model)]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        assert torch.equal(*losses)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert thunder.cache_misses(compiled) == 3


@pytest.mark.slow
def test_regions_of_inductor():
    if (why := inductor_ex.unavailable()) is not None:
        pytest.skip(why)

    def program(x, w):
        y = torch.sin(x * w) + x.sum(-1, keepdim=True)
        return y.transpose(0, 1) * 2, torch.cat((x[:, 1:], x[:, :-1]), 1).exp() * x.shape[1]

    compiled = thunder.jit(program, executors=["inductor"], fallback="error")
    for n in (4, 7, 40, 5, 100):
        x, w = torch.randn(2, n, 24)[..., 8:16], torch.randn(8)
        got, want = compiled(x, w), program(x, w)
        torch.testing.assert_close(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    assert thunder.cache_misses(compiled) == 2
    (region,) = (b.sym.fn for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.is_fusion)
    assert region.compilations == 1
    for n in (2, 9):
        x = torch.randn(2, n, 8)
        torch.testing.assert_close(compiled(x, w), program(x, w))
    assert thunder.cache_misses(compiled) == 2 and region.compilations <= 3, "other strides, and a slice of one element"


def test_values_that_are_made_of_sizes_are_checked():
    """As transformers looks for the begin of a second text in the positions that it has made itself."""

    def program(x):
        positions = torch.arange(x.shape[0])
        if (torch.diff(positions) == 1).all():
            x = x.sin()
        return x * 2 if (positions * positions).sum() > 100 else x + int(positions[-1] > 3)

    compiled = thunder.jit(program, fallback="error")
    for n in (6, 7, 5, 6, 12, 9, 3, 2, 30, 4):
        x = torch.randn(n, 2)
        assert torch.equal(compiled(x), program(x))
    assert thunder.cache_misses(compiled) == 3, "6, other sizes of that way, and another way"


CACHES = {  # what holds it, and where
    "an attribute": (lambda t: types.SimpleNamespace(k=t), lambda o: o.k, lambda o, t: setattr(o, "k", t)),
    "a key": (lambda t: {"k": t}, lambda o: o["k"], lambda o, t: o.__setitem__("k", t)),
    "an item": (lambda t: [None, t], lambda o: o[1], lambda o, t: o.__setitem__(1, t)),
}


@pytest.mark.parametrize("where", CACHES)
def test_what_a_program_makes_longer_is_symbolic_at_once(where):
    """The next call finds the size that it leaves."""
    make, get, put = CACHES[where]

    def step(x, cache, n):
        put(cache, torch.cat([get(cache), x])[-n:])
        return get(cache).sum(), len(get(cache))

    compiled, caches = thunder.jit(step), (make(torch.ones(3)), make(torch.ones(3)))
    for i in range(6):
        result, expected = (
            f(torch.full((2,), float(i)), c, 100) for f, c in zip((compiled, step), caches, strict=True)
        )
        assert (result[0], result[1]) == (expected[0], expected[1])
    assert thunder.cache_misses(compiled) == 1
    full = make(torch.ones(4))
    compiled = thunder.jit(step)
    for _ in range(3):
        assert compiled(torch.ones(2), full, 4)[1] == 4
    statements = re.sub("#.*", "", str(thunder.last_prologue_traces(compiled)[-1]))
    assert "shape" not in statements, "one that stays is no input"


def test_a_size_that_never_changes_or_may_not_stays_constant():
    def step(x, cache):
        cache.k = torch.cat([cache.k, x])
        return cache.k.sum()

    compiled, cache = thunder.jit(step, dynamic=False), types.SimpleNamespace(k=torch.ones(3))
    for _ in range(3):
        compiled(torch.ones(2), cache)
    assert thunder.cache_misses(compiled) == 3
