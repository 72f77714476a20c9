"""Hooks behind the accumulation of gradients see eager PyTorch's order, though all gradients of a program come at
once."""

import pytest
import torch
from torch import nn

import thunder
from thunder.errors import FallbackWarning


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.q, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.norm(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        return nn.functional.scaled_dot_product_attention(q, k, v) * self.scale + x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.first(self.second(self.first(x)).relu()) @ self.second.weight


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1), nn.Flatten()
    )


def several():
    return nn.Sequential(Attention(), nn.Dropout(0.5), Tied())


MODULES = [layers, convolutions, Attention, Tied, several]


def watch(m):
    seen = []
    for name, p in m.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.append((name, sum(q.grad is not None for q in m.parameters())))
        )
    return seen


def order(jit, make, calls=1):
    torch.manual_seed(0)
    m, x = make(), torch.ones(2, 4, requires_grad=True)
    seen, f = watch(m), jit(m)
    for _ in range(2):
        m.zero_grad()
        sum(f(x).sum() for _ in range(calls)).backward()
    return seen


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("make", MODULES)
def test_hooks_behind_the_accumulation_are_called_in_eager_order(make, calls):
    assert order(thunder.jit, make, calls) == order(lambda m: m, make, calls)


def test_hooks_that_are_registered_later_are_called_in_another_order_with_a_warning():
    m, x = layers(), torch.ones(2, 4)
    compiled = thunder.jit(m)
    compiled(x).sum().backward()
    seen = watch(m)
    with pytest.warns(FallbackWarning, match="register_post_accumulate_grad_hook.* in another order"):
        compiled(x).sum().backward()
    assert len(seen) == 4


def test_gradients_of_some_leaves():
    m, x = layers(), torch.ones(2, 4)
    seen, compiled = watch(m), thunder.jit(m)
    gradients = torch.autograd.grad(compiled(x).sum(), [m[0].weight, m[2].bias])
    assert not seen
    compiled(x).sum().backward(inputs=[m[0].weight, m[2].bias])
    assert seen == [("2.bias", 1), ("0.weight", 2)]
    torch.testing.assert_close([m[0].weight.grad, m[2].bias.grad], [*gradients])
