"""Random generators: those from outside advance as in eager, one made inside is made in each call."""

import pytest
import torch

import thunder
from thunder.errors import CaptureError


def test_a_generator_from_outside_advances_as_in_eager():
    compiled = thunder.jit(lambda x, g: x + torch.randn(3, generator=g))
    ours, theirs, x = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3), torch.ones(3)
    for _ in range(3):
        assert torch.equal(compiled(x, ours), x + torch.randn(3, generator=theirs))


def states(x):
    g = torch.Generator()
    before = g.get_state()
    drawn = torch.rand(4, generator=g)
    g.set_state(before)
    return x + drawn - torch.rand(4, generator=g)


def decides(x):
    g = torch.Generator(device="cpu")
    g.manual_seed(3)
    drawn = torch.rand(4, generator=g)
    if drawn.sum() > 2:
        drawn = drawn + torch.rand(4, generator=g)
    return x * drawn


class Holder:
    generator = None


def stored(x):
    Holder.generator = torch.Generator().manual_seed(5)
    return x + torch.rand(4, generator=Holder.generator)


def returned(x):
    g = torch.Generator().manual_seed(5)
    return x + torch.rand(4, generator=g), g


INSIDE = [
    lambda x: x + torch.randn(4, generator=torch.Generator().manual_seed(2)),
    lambda x: x * sum(torch.rand(4, generator=torch.Generator().manual_seed(i)) for i in range(3)),
    lambda x: torch.bernoulli(x.detach() / 2, generator=torch.Generator()) * x.exp(),
    states, decides, stored, returned,
]  # fmt: skip


@pytest.mark.parametrize("rng", ["torch", "fused"])
@pytest.mark.parametrize("program", INSIDE)
def test_a_generator_made_inside_is_another_one_in_each_call(program, rng):
    compiled = thunder.jit(program, fallback="error", rng=rng)

    def run(call):
        x = torch.ones(4, requires_grad=True)
        result = call(x)
        result, generator = result if isinstance(result, tuple) else (result, Holder.generator)
        result.sum().backward()
        return result.detach(), x.grad, *(() if generator is None else (generator.get_state(),))

    for _ in range(3):
        for got, want in zip(run(compiled), run(program), strict=True):
            assert torch.equal(got, want)
    assert len(compiled.programs) == 1


def test_a_generator_made_in_a_transform_is_refused():
    def drawn(v):
        return (v * torch.rand(4, generator=torch.Generator())).sum()

    compiled = thunder.jit(torch.func.grad(drawn), fallback="error")
    with pytest.raises(CaptureError, match="creates a torch.Generator in a transform"):
        compiled(torch.ones(4))
