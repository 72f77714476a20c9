"""Whole steps of training, attacks and policies; state dicts and modes of modules."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.scenarios.compared import normal, program


@program
def pcgrad(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)

    def f(x):
        o = module(x)
        gs = [
            torch.autograd.grad(loss, module.parameters(), retain_graph=True)
            for loss in (o[:, 0].pow(2).mean(), o[:, 1].mean())
        ]
        v = [torch.cat([g.flatten() for g in gg]) for gg in gs]
        d = v[0] @ v[1]
        if d < 0:
            v[0] = v[0] - d / (v[1] @ v[1]) * v[1]
        i = 0
        for p in module.parameters():
            p.grad = (v[0] + v[1])[i : i + p.numel()].view_as(p)
            i += p.numel()
        return d

    compiled = jit(f)
    return [(compiled(normal(4, 3, seed=i)), module.weight.grad.clone()) for i in range(5)]


@program
def fgsm(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)

    def f(x, y, eps):
        x = x.clone().detach().requires_grad_(True)
        F.cross_entropy(module(x), y).backward()
        adv = (x + eps * x.grad.sign()).clamp(-1, 1).detach()
        module.zero_grad()
        return adv

    compiled = jit(f)
    return [compiled(normal(4, 3, seed=i), torch.arange(4) % 2, 0.1 * i) for i in range(3)], module.weight.grad


@program
def pgd_loop(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)

    def f(x, y):
        d = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            (g,) = torch.autograd.grad(F.cross_entropy(module(x + d), y), d)
            d.data = (d + 0.1 * g.sign()).clamp(-0.2, 0.2).data
        return x + d.detach()

    compiled = jit(f)
    return [compiled(normal(4, 3, seed=i), torch.arange(4) % 2) for i in range(2)]


@program
def sam_optimizer(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    o = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

    def step(x):
        module(x).pow(2).mean().backward()
        n = torch.stack([p.grad.norm() for p in module.parameters()]).norm()
        es = []
        with torch.no_grad():
            for p in module.parameters():
                e = 0.05 * p.grad / n
                p.add_(e)
                es.append(e)
        o.zero_grad()
        loss = module(x).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for p, e in zip(module.parameters(), es):
                p.sub_(e)
        o.step()
        o.zero_grad()
        return loss

    compiled = jit(step)
    return [compiled(normal(4, 3, seed=i)) for i in range(4)], module


@program
def gan_two_steps(jit):
    torch.manual_seed(1)
    G = nn.Linear(2, 3)
    D = nn.Linear(3, 1)
    og = torch.optim.Adam(G.parameters(), 1e-2)
    od = torch.optim.Adam(D.parameters(), 1e-2)

    def step(x):
        z = torch.randn(len(x), 2)
        f = G(z)
        od.zero_grad()
        ld = F.softplus(-D(x)).mean() + F.softplus(D(f.detach())).mean()
        ld.backward()
        od.step()
        D.requires_grad_(False)
        og.zero_grad()
        lg = F.softplus(-D(f)).mean()
        lg.backward()
        og.step()
        D.requires_grad_(True)
        return ld.item(), lg.item()

    compiled = jit(step)
    return [compiled(normal(4, 3, seed=i)) for i in range(4)], G, D


@program
def lr_by_loss(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 1)
    o = torch.optim.SGD(module.parameters(), 0.5)
    s = torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5)

    def step(x):
        o.zero_grad()
        loss = module(x).pow(2).mean()
        loss.backward()
        o.step()
        s.step(loss)
        return loss.item(), o.param_groups[0]["lr"]

    compiled = jit(step)
    return [compiled(normal(4, 3, seed=i)) for i in range(6)]


@program
def param_groups(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    o = torch.optim.AdamW(
        [
            {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    sch = torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1))

    def step(x):
        o.zero_grad()
        loss = module(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.1)
        o.step()
        sch.step()
        return loss

    compiled = jit(step)
    return [compiled(normal(4, 3, seed=i)) for i in range(4)], module, [g["lr"] for g in o.param_groups]


@program
def added_param_group(jit):
    torch.manual_seed(1)
    a = nn.Linear(2, 2)
    b = nn.Linear(2, 2)
    o = torch.optim.SGD(a.parameters(), 0.1, momentum=0.9)

    def step(x):
        o.zero_grad()
        loss = b(a(x)).pow(2).mean()
        loss.backward()
        o.step()
        return loss

    compiled = jit(step)
    results = [compiled(normal(2, 2)), compiled(normal(2, 2))]
    o.add_param_group({"params": b.parameters(), "lr": 0.2})
    results += [compiled(normal(2, 2)), compiled(normal(2, 2))]
    return results, a, b


@program
def state_dict_roundtrip(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    compiled = jit(module)
    results = [compiled(normal(4, 3))]
    sd = {k: v.clone() for k, v in module.state_dict().items()}
    results.append(compiled(normal(4, 3, seed=1)))
    module.load_state_dict(sd)
    results.append(compiled(normal(4, 3, seed=2)))
    module[0] = nn.Linear(3, 3, bias=False)
    results.append(compiled(normal(4, 3)))
    module.append(nn.ReLU())
    results.append(compiled(normal(4, 3)))
    module.add_module("x", nn.Tanh())
    results.append(compiled(normal(4, 3)))
    del module[1]
    results.append(compiled(normal(4, 3)))
    return results


@program
def train_eval_freeze(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    compiled = jit(module)
    results = []
    for t in (1, 0, 1, 0):
        module.train(bool(t))
        module[2].eval()
        results.append(compiled(normal(4, 3)))
    module[1].p = 0.9
    module.train()
    results.append(compiled(normal(4, 3)))
    module.double()
    results.append(compiled(normal(4, 3).double()))
    module.float()
    results.append(compiled(normal(4, 3)))
    return results
