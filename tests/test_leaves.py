"""Leaves that a program makes itself: every factory of PyTorch's that takes `requires_grad=True`."""

import pytest
import torch

import thunder

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
        made = make
        make = lambda **o: fill(made(**o))  # noqa: E731 - what stands in the place of `made`
    found = []
    for program in (outside, thunder.jit(outside)):
        torch.manual_seed(0)
        for _ in range(2):
            w = torch.tensor(2.0, requires_grad=True)
            x, loss, *told = program(make, w)
            assert x.is_leaf and x.requires_grad and x.grad_fn is None
            loss.backward()
        found.append((x.detach(), x.stride(), x.grad, w.grad, loss.detach(), told))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def fill(x):
    with torch.no_grad():
        return x.fill_(3.0)


@pytest.mark.parametrize("name", ["zeros", "tensor", "randn", "new_full"])
def test_its_gradient_is_known_inside(name):
    found = []
    for program in (inside, thunder.jit(inside)):
        torch.manual_seed(0)
        w = torch.tensor(2.0, requires_grad=True)
        x, *gradients = program(FACTORIES[name], w)
        found.append((x.detach(), x.grad, *gradients))
    torch.testing.assert_close(*found, rtol=0, atol=0)


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
