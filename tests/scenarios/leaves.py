"""Leaves that are made inside, data that is assigned, writes under grad."""

import torch
from torch import nn

from tests.scenarios.compared import normal, program


@program
def requires_grad_temporary(jit):
    def f(x):
        y = (x * 2).detach().requires_grad_()
        loss = (y**3).sum()
        (g,) = torch.autograd.grad(loss, y)
        return g

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def requires_grad_temporary_returned(jit):
    def f(x):
        y = (x * 2).requires_grad_()
        return y, (y**3).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        y, loss = compiled(normal(3, seed=s))
        loss.backward()
        results.append((y, y.grad, loss))
    return results


@program
def requires_grad_argument(jit):
    def f(x):
        x.requires_grad_()
        return (x**3).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s)
        compiled(x).backward()
        results.append(x.grad)
    return results


@program
def data_to(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        for p in module.parameters():
            p.data = p.data.to(torch.float64)
        return module(x.double())

    compiled = jit(f)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], module


@program
def data_assigned(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        module.weight.data = module.weight.data * 0.5
        module.bias.data.add_(1)
        return module(x)

    compiled = jit(f)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], module


@program
def module_to_inside(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        module.to(torch.float64)
        return module(x.double())

    compiled = jit(f)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], module


@program
def module_half_inside(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        return module.bfloat16()(x.bfloat16()).float()

    compiled = jit(f)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], module


@program
def write_nonleaf_argument(jit):
    def f(y):
        y.mul_(2)
        return y.sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        y = x * 3
        loss = compiled(y)
        loss.backward()
        results.append((x.grad, loss, y))
    return results


@program
def write_nonleaf_argument_returned(jit):
    def f(y, w):
        y.mul_(w)
        return y

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        w = normal(3, seed=s + 9, grad=True)
        y = x * 3
        z = compiled(y, w)
        (z * y).sum().backward()
        results.append((x.grad, w.grad, z, y, z is y))
    return results


@program
def write_norequire_argument_by_grad(jit):
    def f(module, w):
        module.mul_(w)
        return module.sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        w = normal(3, seed=s + 9, grad=True)
        module = normal(3, seed=s)
        loss = compiled(module, w)
        loss.backward()
        results.append((w.grad, module))
    return results


@program
def write_view_of_nonleaf(jit):
    def f(y):
        y[0].zero_()
        return (y * y).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        y = x * 3
        loss = compiled(y)
        loss.backward()
        results.append((x.grad, loss, y))
    return results
