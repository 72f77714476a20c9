"""Losses with gradients inside: physics-informed networks, gradient penalties, forces, operator learning, MAML."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import thunder
from thunder.ops.rules.derivatives import once_differentiable

D = torch.float64


def grad(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def network(*sizes, activation=nn.Tanh):
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


class Burgers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network(2, 8, 8, 1)

    def forward(self, x, t, u0):
        x, t = x.requires_grad_(), t.requires_grad_()
        u = self.net(torch.cat([x, t], 1))
        u_t, u_x = grad(u, t), grad(u, x)
        residual = u_t + u * u_x - 0.01 * grad(u_x, x)
        start = self.net(torch.cat([x, torch.zeros_like(x)], 1))
        return (residual**2).mean() + F.mse_loss(start, u0)

    def inputs(self):
        return torch.rand(6, 1), torch.rand(6, 1), torch.rand(6, 1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(16, 1))

    def forward(self, real, fake, share):
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        penalty = (grad(self.net(mixed), mixed).flatten(1).norm(2, dim=1) - 1) ** 2
        return self.net(fake).mean() - self.net(real).mean() + 10 * penalty.mean()

    def inputs(self):
        return torch.randn(5, 3, 4, 4), torch.randn(5, 3, 4, 4), torch.rand(5, 1, 1, 1)


class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.filter, self.out = (network(n, 6, m, activation=nn.Softplus) for n, m in ((4, 6), (6, 1)))
        self.register_buffer("centers", torch.linspace(0, 3, 4))

    def forward(self, kinds, positions, i, j, energy, forces):
        positions = positions.requires_grad_()
        distance = (positions[i] - positions[j]).norm(dim=1)
        weights = self.filter(torch.exp(-((distance[:, None] - self.centers) ** 2)))
        atoms = self.embedding(kinds)
        atoms = atoms + torch.zeros_like(atoms).index_add(0, i, atoms[j] * weights * (distance < 3)[:, None])
        total = self.out(atoms).sum()
        return (total - energy) ** 2 + F.mse_loss(-grad(total, positions), forces)

    def inputs(self):
        i, j = (torch.cartesian_prod(torch.arange(4), torch.arange(4)).T)[:, [1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14]]
        return torch.tensor([1, 0, 4, 1]), torch.randn(4, 3), i, j, torch.randn(()), torch.randn(4, 3)


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch, self.trunk = network(5, 8, 4, activation=nn.GELU), network(2, 8, 4, activation=nn.SiLU)

    def forward(self, u, x, t):
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        s = (self.branch(u) * self.trunk(torch.cat([x, t], 1))).sum(1, keepdim=True)
        s_t, s_x = (torch.autograd.grad(s.sum(), v, create_graph=True)[0] for v in (t, x))
        return ((s_t - 0.01 * grad(s_x, x) - s**2) ** 2).mean()

    def inputs(self):
        return torch.randn(6, 5), torch.rand(6, 1), torch.rand(6, 1)


class MetaLearner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network(1, 8, 1, activation=nn.ReLU)

    def forward(self, x, y):
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, weights, (x + 1,)), y)

    def inputs(self):
        return torch.randn(7, 1), torch.randn(7, 1)


PROGRAMS = [Burgers, Critic, Forces, Operator, MetaLearner]


def build(program):
    torch.manual_seed(0)
    module = program().to(D)
    return module, [x.to(D) if x.is_floating_point() else x for x in module.inputs()]


def step(f, module, inputs):
    module.zero_grad()
    loss = f(*(x.clone() for x in inputs))
    loss.backward()
    return loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)


def operations(compiled):
    return [b for t in (thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1])
            for b in t.bound_symbols]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"numerics": "eager"}], ids=["close", "eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_with_gradients_inside_are_eagers(program, options):
    module, inputs = build(program)
    compiled = thunder.jit(module, **options)
    for _ in range(2):
        ours = [x.clone() for x in step(compiled, module, inputs)]
        theirs = step(module, module, inputs)
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_inside_are_operations(program):
    module, inputs = build(program)
    compiled = thunder.jit(module, executors=[])
    step(compiled, module, inputs)
    assert not [b for b in operations(compiled) if once_differentiable.of(b.sym) or b.sym.name.startswith("vjp_of")]


@pytest.mark.parametrize("program", [Burgers, Operator])
def test_a_gradient_that_is_asked_for_twice_is_computed_once(program):
    """With respect to two inputs, one after the other: the second one adds the product with its weight's column."""

    def products(numerics):
        module, inputs = build(program)
        compiled = thunder.jit(module, numerics=numerics)
        step(compiled, module, inputs)
        return sum(b.sym.name in ("mm", "linear") for b in operations(compiled))

    assert products("close") < products("eager")


def test_a_shared_gradient_that_is_returned_twice_is_two_tensors():
    def f(x, y):
        z = (x * y).sin().sum()
        first, second = (torch.autograd.grad(z, x, create_graph=True)[0] for _ in range(2))
        return first, second, (first * second).sum()

    x, y = (torch.randn(4, dtype=D, requires_grad=True) for _ in range(2))
    first, second, loss = thunder.jit(f)(x, y)
    expected = f(x, y)
    assert first.data_ptr() != second.data_ptr()
    for ours, theirs in zip(torch.autograd.grad(loss, (x, y)), torch.autograd.grad(expected[2], (x, y)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close((first, second), expected[:2], rtol=0, atol=0)


def test_a_gradient_that_is_written_to_does_not_change_its_equal():
    def f(x):
        z = x.exp().sum()
        first = torch.autograd.grad(z, x, create_graph=True)[0]
        first *= 2
        second = torch.autograd.grad(z, x, create_graph=True)[0]
        second += 1
        return (first * second * x).sum()

    x = torch.randn(4, dtype=D, requires_grad=True)
    (ours,), (theirs,) = (torch.autograd.grad(g(x), x) for g in (thunder.jit(f), f))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_a_kink_has_a_gradient_of_zeros():
    """The second derivative of relu is zeros, not missing."""

    def f(x):
        first = torch.autograd.grad(x.relu().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), x)[0] + x.detach()

    x = torch.randn(4, dtype=D, requires_grad=True)
    assert torch.equal(thunder.jit(f)(x), f(x))
