"""Gradients of some inputs first and of the others later, as pipeline schedules without bubbles ask for them: each
operation of the backward runs once."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import thunder


class Matmuls(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 5, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(5, 3),
    ).double()


def in_two(module, x, cotangent, other=None):
    """Gradients of the input, then of the parameters, and the products of the two backwards."""
    y = module(x)
    with Matmuls() as matmuls:
        (dx,) = torch.autograd.grad(y, x, cotangent, retain_graph=True)
        first = matmuls.count
        of_parameters = torch.autograd.grad(y, list(module.parameters()), cotangent if other is None else other)
    return [dx, *of_parameters], (first, matmuls.count - first)


def test_each_product_of_the_backward_runs_once():
    module, whole = layers(), layers()
    compiled = thunder.jit(module, executors=[])
    x, cotangent = torch.randn(7, 4, dtype=torch.float64, requires_grad=True), torch.randn(7, 3, dtype=torch.float64)
    for _ in range(2):
        gradients, counts = in_two(compiled, x, cotangent)
        wanted = torch.autograd.grad(whole(x), [x, *whole.parameters()], cotangent)
        assert all(map(torch.equal, gradients, wanted))
        assert counts == (3, 3)  # six products: one of each layer for its input, and one for its weight
    assert thunder.cache_misses(compiled) == 1


def test_other_cotangents_and_other_inputs_are_computed_anew():
    module = layers()
    compiled, x = thunder.jit(module, executors=[]), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    cotangent, other = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    gradients, _ = in_two(compiled, x, cotangent, other)
    wanted, _ = in_two(module, x, cotangent, other)
    assert all(map(torch.equal, gradients, wanted))
    y = compiled(x)
    wanted = torch.autograd.grad(module(x), [x, *module.parameters()], cotangent)
    first = torch.autograd.grad(y, x, cotangent, retain_graph=True)
    cotangent_now = cotangent.clone()
    cotangent.mul_(2)  # in place: another cotangent by the same tensor
    twice = torch.autograd.grad(y, list(module.parameters()), cotangent, retain_graph=True)
    again = torch.autograd.grad(y, [x, *module.parameters()], cotangent_now, retain_graph=True)
    assert torch.equal(first[0], wanted[0]) and all(map(torch.equal, again, wanted))
    assert all(torch.equal(g, 2 * w) for g, w in zip(twice, wanted[1:], strict=True))
    y.backward(cotangent_now)
    assert all(torch.equal(p.grad, w) for p, w in zip(module.parameters(), wanted[1:], strict=True))


@pytest.mark.parametrize("order", ["parameters first", "one by one"])
def test_any_order(order):
    module = layers()
    compiled, x = thunder.jit(module, executors=[]), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    cotangent, inputs = torch.randn(7, 3, dtype=torch.float64), [x, *module.parameters()]
    wanted = torch.autograd.grad(module(x), inputs, cotangent)
    y = compiled(x)
    if order == "parameters first":
        gradients = torch.autograd.grad(y, inputs[1:], cotangent, retain_graph=True)
        gradients = (*torch.autograd.grad(y, x, cotangent), *gradients)
    else:
        gradients = [torch.autograd.grad(y, i, cotangent, retain_graph=True)[0] for i in inputs]
    assert all(map(torch.equal, gradients, wanted))


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")  # a checkpoint that writes is an eager call
def test_a_backward_with_effects_runs_as_a_whole():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).double()
    whole = copy.deepcopy(module)

    def checkpointed(module, x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    x, cotangent = torch.randn(7, 4, dtype=torch.float64, requires_grad=True), torch.randn(7, 4, dtype=torch.float64)
    compiled = thunder.jit(lambda x: checkpointed(module, x), executors=[], fallback="eager")
    for run, m in ((compiled, module), (lambda x: checkpointed(whole, x), whole)):
        y = run(x)
        torch.autograd.grad(y, x, cotangent, retain_graph=True)
        torch.autograd.grad(y, list(m.parameters()), cotangent)
    assert torch.equal(module[1].running_mean, whole[1].running_mean)
