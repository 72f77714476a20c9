"""flex_attention inside compiled programs: results are those of PyTorch's unfused definition."""

import pytest
import torch
import torch.nn.functional as F

import thunder

flex = pytest.importorskip("torch.nn.attention.flex_attention")

BIAS = torch.linspace(-1, 1, 4 * 31).reshape(4, 31)
LENGTHS = torch.tensor([5, 16])


def ragged(b, h, i, j):
    return (i >= j) & (j < LENGTHS[b]) & (j > 2)  # the first rows see nothing


MASK = flex.create_block_mask(ragged, 2, 4, 16, 16, device="cpu")
PROGRAMS = {
    "plain": lambda q, k, v: flex.flex_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)),
    "groups": lambda q, k, v: flex.flex_attention(q, k, v, enable_gqa=True, scale=0.3),
    "bias": lambda q, k, v: flex.flex_attention(
        q, k, v, lambda s, b, h, i, j: s + BIAS[h, i - j + 15], enable_gqa=True
    ),
    "soft cap": lambda q, k, v: flex.flex_attention(
        q, k, v, lambda s, b, h, i, j: 20 * torch.tanh(s / 20), enable_gqa=True
    ),
    "mask": lambda q, k, v: flex.flex_attention(q, k, v, block_mask=MASK, enable_gqa=True),
}


def inputs():
    return [torch.randn(2, heads, 16, 8) for heads in (4, 2, 2)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name):
    program, qkv = PROGRAMS[name], inputs()
    compiled = thunder.jit(program)
    torch.testing.assert_close(compiled(*qkv), program(*qkv))


def test_gradients():
    def causal(q, k, v):
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")))

    ours = [x.requires_grad_() for x in (torch.randn(2, 4, 16, 8, dtype=torch.float64) for _ in range(3))]
    theirs = [x.detach().requires_grad_() for x in ours]
    thunder.jit(causal)(*ours).sin().sum().backward()
    F.scaled_dot_product_attention(*theirs, is_causal=True).sin().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_torch_compile_inside_is_part_of_the_program():
    def program(x):
        inner = torch.compile(lambda y: y.sin() * 2, backend="eager")
        return inner(x) + torch.compile(fullgraph=True)(torch.cos)(x)

    compiled, x = thunder.jit(program), torch.ones(3)
    assert torch.equal(compiled(x), x.sin() * 2 + x.cos())
