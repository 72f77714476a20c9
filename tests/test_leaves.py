"""Leaves that a program makes itself: every factory of PyTorch's that takes `requires_grad=True`."""

import copy

import pytest
import torch

import thunder
from thunder.errors import FallbackWarning

LIKE = torch.linspace(-1, 1, 6).reshape(2, 3)
SHAPE = (2, 3)
FACTORIES = {
    **{name: lambda name=name, **o: getattr(torch, name)(SHAPE, **o) for name in "zeros ones empty rand randn".split()},
    **{
        name: lambda name=name, **o: getattr(torch, name)(LIKE, **o)
        for name in "zeros_like ones_like rand_like randn_like".split()
    },
    **{name: lambda name=name, **o: getattr(LIKE, name)(SHAPE, **o) for name in "new_zeros new_ones new_empty".split()},
    **{
        name: lambda name=name, **o: getattr(torch, name)(6, **o)
        for name in "hann_window hamming_window bartlett_window".split()
    },
    "full": lambda **o: torch.full(SHAPE, 3.0, **o),
    "full_like": lambda **o: torch.full_like(LIKE, 3.0, **o),
    "new_full": lambda **o: LIKE.new_full(SHAPE, 3.0, **o),
    "new_tensor": lambda **o: LIKE.new_tensor([1.0, 2.0], **o),
    "tensor": lambda **o: torch.tensor([[1.0, 2.0]], **o),
    "tensor of a number": lambda **o: torch.tensor(2.0, **o),
    "scalar_tensor": lambda **o: torch.scalar_tensor(2.0, **o),
    "randint": lambda **o: torch.randint(5, SHAPE, dtype=torch.float32, **o),
    "randperm": lambda **o: torch.randperm(5, dtype=torch.float32, **o),
    "arange": lambda **o: torch.arange(3.0, **o),
    "linspace": lambda **o: torch.linspace(0, 1, 4, **o),
    "logspace": lambda **o: torch.logspace(0, 1, 4, **o),
    "eye": lambda **o: torch.eye(3, **o),
    "empty_strided": lambda **o: torch.empty_strided(SHAPE, (1, 2), **o),
    "empty_like": lambda **o: torch.empty_like(LIKE.t(), **o),
    "complex numbers": lambda **o: torch.ones(2, dtype=torch.complex64, **o),
    "normal": lambda **o: torch.normal(0.0, 1.0, SHAPE, **o),
}


def outside(make, w):
    x = make(requires_grad=True)
    y = x.detach() if torch.is_complex(x) else x
    return x, (torch.view_as_real(x) if y is not x else x).mul(w).sum(), x.requires_grad, x.is_leaf


def inside(make, w):
    x = make(requires_grad=True)
    (torch.view_as_real(x) if torch.is_complex(x) else x).mul(w).sum().backward()
    return x, x.grad, w.grad


@pytest.mark.parametrize("name", FACTORIES)
def test_what_a_program_makes_is_a_leaf(name):
    make = FACTORIES[name]
    if "empty" in name:  # its values are whatever was in memory
        leaves = make
        make = lambda **o: fill(leaves(**o))  # noqa: E731 - what stands in the place of `made`
    gradients = []
    for program in (outside, thunder.jit(outside)):
        torch.manual_seed(0)
        for _ in range(2):
            w = torch.tensor(2.0, requires_grad=True)
            x, loss, *told = program(make, w)
            assert x.is_leaf and x.requires_grad and x.grad_fn is None
            loss.backward()
        gradients.append((x.detach(), x.stride(), x.grad, w.grad, loss.detach(), told))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def fill(x):
    with torch.no_grad():
        return x.fill_(3.0)


@pytest.mark.parametrize("name", ["zeros", "tensor", "randn", "new_full"])
def test_its_gradient_is_known_inside(name):
    results = []
    for program in (inside, thunder.jit(inside)):
        torch.manual_seed(0)
        w = torch.tensor(2.0, requires_grad=True)
        x, *gradients = program(FACTORIES[name], w)
        results.append((x.detach(), x.grad, *gradients))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_leaf_requires_grad_under_no_grad():
    @thunder.jit
    def program():
        with torch.no_grad():
            x = torch.ones(2, requires_grad=True)
            return x, x * 2

    x, y = program()
    assert x.requires_grad and not y.requires_grad


def test_each_call_makes_its_own():
    compiled = thunder.jit(lambda: torch.zeros(2, requires_grad=True))
    first, second = compiled(), compiled()
    first.sum().backward()
    assert second.grad is None and first.data_ptr() != second.data_ptr() and thunder.cache_misses(compiled) == 1


def test_integers_do_not_require_grad():
    for run in (torch.tensor, thunder.jit(torch.tensor)):
        with pytest.raises(RuntimeError, match="[Oo]nly Tensors of floating point"):
            run([1, 2], requires_grad=True)


# ------------------------------------------------------------------------------- of tensors and modules that are there


def attack(x, w):
    """A perturbation along the gradient, as adversarial training makes it."""
    x_adv = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((x_adv * w).pow(3).sum(), x_adv)
    return (x + 0.1 * gradient.sign()).detach()


def descent(x, w):
    y = torch.zeros(3)
    for _ in range(3):
        y = y.detach().clone().requires_grad_(True)
        (g,) = torch.autograd.grad(((x @ y - 1) ** 2).sum(), y)
        with torch.no_grad():
            y.sub_(0.1 * g)
    return y, y.is_leaf, y.requires_grad, w + 1


def penalty(x, w):
    """A gradient penalty: backward through a gradient."""
    y = (x * 2).requires_grad_()
    (g,) = torch.autograd.grad((y * w).sin().sum(), y, create_graph=True)
    (g.norm() - 1).pow(2).backward()
    grad, w.grad = w.grad, None
    return grad, y.grad


def probes(x, w):
    """A module that is made for one call, and trained there."""
    torch.manual_seed(0)
    probe = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = probe(x).pow(2).mean()
        loss.backward()
        optimizer.step()
    return loss.detach(), [p.detach() for p in probe.parameters()], probe[1].running_mean, isinstance(
        probe[0].weight, torch.nn.Parameter
    )  # fmt: skip


MODULE = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
torch.optim.SGD(MODULE.parameters())  # PyTorch wraps the step of a class that is used for the first time


def copies(x, w):
    """Model-agnostic meta-learning of the first order, on a copy of a module from outside."""
    fast = copy.deepcopy(MODULE)
    fast(x).pow(2).mean().backward()
    with torch.no_grad():
        for p in fast.parameters():
            p -= 0.1 * p.grad
    return fast(x).detach(), fast[1].running_mean, [p.grad for p in MODULE.parameters()]


@pytest.mark.parametrize("program", [attack, descent, penalty, probes, copies])
def test_leaves_made_of_what_is_there(program):
    compiled = thunder.jit(program)
    for call in range(3):
        x, w = torch.linspace(-1, 1 + call, 6).reshape(2, 3), torch.ones(3, requires_grad=True)
        torch.testing.assert_close(compiled(x, w), program(x, w), rtol=0, atol=0)
    assert thunder.cache_misses(compiled) == 1


def test_a_module_that_is_returned_is_made_by_each_call():
    def program(x):
        module = torch.nn.Linear(3, 2)
        with torch.no_grad():
            module.weight.copy_(x)
        return module

    compiled = thunder.jit(program)
    first, second = compiled(torch.ones(2, 3)), compiled(torch.zeros(2, 3))
    assert type(first) is torch.nn.Linear and [n for n, _ in first.named_parameters()] == ["weight", "bias"]
    assert type(first.weight) is torch.nn.Parameter and first.weight.sum() == 6 and second.weight.sum() == 0
    first(torch.ones(3)).sum().backward()
    assert second.weight.grad is None and thunder.cache_misses(compiled) == 1


def writes_to_the_leaf(x):
    y = x.detach().requires_grad_()
    with torch.no_grad():
        y.add_(1)
    return x * 1


def writes_to_what_it_shows(x):
    y = x * 2
    flat = y.view(-1)
    y.requires_grad_()
    with torch.no_grad():
        flat.add_(1)
    return y.detach() * 1


def returns_it(x):
    return x.detach().requires_grad_()


@pytest.mark.parametrize("program", [writes_to_the_leaf, writes_to_what_it_shows, returns_it])
def test_leaves_that_share_memory_are_refused_where_that_shows(program):
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.warns(FallbackWarning, match="memory"):
        ours = thunder.jit(program, fallback="eager")(x)
    assert torch.equal(ours, program(y)) and torch.equal(x, y)


def test_a_leaf_and_what_it_shows_leave_together():
    def program(x):
        y = x * 2
        return y, y.detach().requires_grad_()

    with pytest.warns(FallbackWarning, match="memory"):
        y, leaf = thunder.jit(program, fallback="eager")(torch.ones(3))
    assert y.data_ptr() == leaf.data_ptr()
