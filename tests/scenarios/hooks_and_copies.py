"""Hooks that are registered inside, copies and modules made inside."""

import copy
import io
import pickle

import torch
import torch.nn.functional as F
from torch import nn

from tests.scenarios.compared import normal, program


@program
def hook_on_tensor_inside(jit):
    def f(x):
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y.sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        compiled(x).backward()
        results.append(x.grad)
    return results


@program
def hook_on_leaf_inside(jit):
    def f(x):
        x.register_hook(lambda g: g * 10)
        return (x * x).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        compiled(x).backward()
        results.append(x.grad)
    return results


@program
def hook_stores_grad(jit):
    saved = {}

    def f(x):
        y = x.tanh()
        y.register_hook(lambda g: saved.__setitem__("g", g))
        return (y * y).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        compiled(x).backward()
        results.append((x.grad, saved["g"]))
    return results


@program
def hook_removed_inside(jit):
    def f(x):
        y = x * 2
        h = y.register_hook(lambda g: g * 10)
        h.remove()
        return y.sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        compiled(x).backward()
        results.append(x.grad)
    return results


@program
def retain_grad_inside(jit):
    def f(x):
        y = x * 2
        y.retain_grad()
        return y, (y * y).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, seed=s, grad=True)
        y, loss = compiled(x)
        loss.backward()
        results.append((x.grad, y.grad))
    return results


@program
def retain_grad_stored(jit):
    torch.manual_seed(1)

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(3, 3)

        def forward(s, x):
            s.h = s.l(x)
            s.h.retain_grad()
            return s.h.tanh().sum()

    module = M()
    compiled = jit(module)
    results = []
    for s in range(3):
        x = normal(2, 3, seed=s)
        compiled(x).backward()
        results.append((module.h.grad, module.l.weight.grad.clone()))
    return results


@program
def module_hooks_inside(jit):
    torch.manual_seed(1)
    layer = nn.Linear(3, 3)

    def f(x):
        acts = []
        h = layer.register_forward_hook(lambda module, i, o: acts.append(o))
        y = layer(x).relu()
        h.remove()
        return y, acts

    compiled = jit(f)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], len(layer._forward_hooks)


@program
def module_backward_hook_inside(jit):
    torch.manual_seed(1)
    layer = nn.Linear(3, 3)

    def f(x):
        h = layer.register_full_backward_hook(lambda module, gi, go: tuple(None if g is None else g * 2 for g in gi))
        y = layer(x).relu().sum()
        h.remove()
        return y

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(2, 3, seed=s, grad=True)
        compiled(x).backward()
        results.append((x.grad, layer.weight.grad.clone()))
    return results


@program
def module_backward_hook_outside(jit):
    torch.manual_seed(1)
    layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    seen = []
    layer[0].register_full_backward_hook(lambda module, gi, go: seen.append((gi, go)))
    layer[2].register_full_backward_pre_hook(lambda module, go: (go[0] * 2,))
    compiled = jit(layer)
    results = []
    for s in range(3):
        x = normal(2, 3, seed=s, grad=True)
        compiled(x).sum().backward()
        results.append((x.grad, layer[0].weight.grad.clone(), list(seen)))
    return results


@program
def deepcopy_tensor_inside(jit):
    def f(x, d):
        y = copy.deepcopy(x)
        y.mul_(2)
        e = copy.deepcopy(d)
        e["a"].append(1)
        return x + y, e, d

    compiled = jit(f)
    return [compiled(normal(3, seed=s), {"a": [normal(2, seed=s)]}) for s in range(3)]


@program
def deepcopy_module_inside(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def f(x):
        k = copy.deepcopy(module)
        return k(x), module(x).sum()

    compiled = jit(f)
    return [compiled(normal(4, 3, seed=s)) for s in range(3)], module


@program
def deepcopy_module_ema(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    class S:
        ema = None

    st = S()

    def f(x):
        if st.ema is None:
            st.ema = copy.deepcopy(module).requires_grad_(False)
        with torch.no_grad():
            for a, b in zip(st.ema.parameters(), module.parameters()):
                a.lerp_(b, 0.1)
        return st.ema(x) + module(x)

    compiled = jit(f)
    results = []
    for s in range(4):
        results.append(compiled(normal(4, 3, seed=s)))
        with torch.no_grad():
            for p in module.parameters():
                p.add_(1)
    return results, st.ema


@program
def pickle_tensor_inside(jit):
    def f(x):
        return pickle.loads(pickle.dumps(x)) * 2

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def pickle_module_inside(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        return pickle.loads(pickle.dumps(module))(x)

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def torch_save_inside(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        b = io.BytesIO()
        torch.save(module.state_dict(), b)
        b.seek(0)
        sd = torch.load(b)
        return F.linear(x, sd["weight"], sd["bias"]), b.getbuffer().nbytes > 0

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def module_built_inside(jit):
    def f(x):
        module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        return module(x)

    compiled = jit(f)
    results = []
    for s in range(3):
        torch.manual_seed(s)
        results.append(compiled(normal(2, 3, seed=s)))
    return results


@program
def module_built_and_trained_inside(jit):
    def f(x, y):
        module = nn.Linear(3, 1)
        o = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            o.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()
            o.step()
        return loss, module.weight

    compiled = jit(f)
    results = []
    for s in range(3):
        torch.manual_seed(s)
        results.append(compiled(normal(5, 3, seed=s), normal(5, 1, seed=s)))
    return results


@program
def module_built_returned(jit):
    def f(n):
        return nn.Linear(n, 2)

    compiled = jit(f)
    results = []
    for s in (3, 4, 3):
        torch.manual_seed(s)
        module = compiled(s)
        results.append((module, module(normal(2, s))))
    return results


@program
def lazily_built_layer(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = None

        def forward(s, x):
            if s.l is None:
                s.l = nn.Linear(x.shape[-1], 2)
            return s.l(x)

    module = M()
    compiled = jit(module)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], module


@program
def lazy_linear(jit):
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    compiled = jit(module)
    return [compiled(normal(2, 3, seed=s)) for s in range(3)], module
