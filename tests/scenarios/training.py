"""Optimizers, schedulers, averages, checkpoints."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.scenarios.compared import normal, program, trained, with_gradients


def optimizer_program(name, mk):
    def p(jit):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        o = mk(module.parameters())

        def step(x, y):
            o.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()
            o.step()
            return loss

        compiled = jit(step)
        return (
            [compiled(normal(4, 3, seed=i), normal(4, 1, seed=i)) for i in range(4)],
            module,
            [o.state[p] for p in module.parameters()],
        )

    p.__name__ = name
    program(p)


for nm, mk in dict(
    adamw=lambda p: torch.optim.AdamW(p, 1e-2),
    adam_ams=lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    sgd_nest=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    rms=lambda p: torch.optim.RMSprop(p, 1e-2, centered=True, momentum=0.1),
    adagrad=lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    adadelta=torch.optim.Adadelta,
    adamax=torch.optim.Adamax,
    nadam=torch.optim.NAdam,
    radam=torch.optim.RAdam,
    asgd=torch.optim.ASGD,
    rprop=torch.optim.Rprop,
    adamw_foreach=lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    adamw_tensor_lr=lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), foreach=False),
    adafactor=lambda p: torch.optim.Adafactor(p),
    muon=lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]),
).items():
    optimizer_program("opt_" + nm, mk)


@program
def custom_optimizer(jit):
    class Lion(torch.optim.Optimizer):
        def __init__(s, p, lr=1e-2, b=0.9):
            super().__init__(p, dict(lr=lr, b=b))

        @torch.no_grad()
        def step(s, closure=None):
            for g in s.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    st = s.state[p]
                    if not st:
                        st["m"] = torch.zeros_like(p)
                        st["step"] = 0
                    st["step"] += 1
                    u = st["m"].lerp(p.grad, 1 - g["b"]).sign_()
                    p.add_(u, alpha=-g["lr"] / st["step"])
                    st["m"].mul_(g["b"]).add_(p.grad, alpha=1 - g["b"])

    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    o = Lion(module.parameters())
    sch = torch.optim.lr_scheduler.StepLR(o, 2, 0.5)

    def step(x):
        o.zero_grad(set_to_none=True)
        loss = module(x).pow(2).mean()
        loss.backward()
        o.step()
        return loss.detach()

    compiled = jit(step)
    results = []
    for i in range(6):
        results.append((compiled(normal(4, 3, seed=i)), module.weight.detach().clone()))
        sch.step()
    return results, [o.state[p] for p in module.parameters()]


@program
def scheduler_inside(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    o = torch.optim.SGD(module.parameters(), 0.1)
    sch = torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)

    def step(x):
        o.zero_grad()
        loss = module(x).pow(2).mean()
        loss.backward()
        o.step()
        sch.step()
        return loss.detach(), sch.get_last_lr()

    compiled = jit(step)
    return [compiled(normal(4, 3, seed=i)) for i in range(6)], module


@program
def ema_update(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    e = nn.Linear(3, 2)

    @torch.no_grad()
    def upd(d):
        for a, b in zip(e.parameters(), module.parameters()):
            a.mul_(d).add_(b, alpha=1 - d)

    compiled = jit(upd)
    for i in range(4):
        compiled(0.9 + 0.01 * i)
        module.weight.data.add_(1)
    return e


@program
def swa(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    a = torch.optim.swa_utils.AveragedModel(module)

    def f(x):
        a.update_parameters(module)
        return a(x)

    compiled = jit(f)
    results = []
    for i in range(4):
        results.append(compiled(normal(2, 3, seed=i)))
        module.weight.data.add_(1)
    return results, a.n_averaged


@program
def grad_accum(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)
    o = torch.optim.SGD(module.parameters(), 0.1)

    def step(xs):
        for x in xs:
            (module(x).pow(2).mean() / len(xs)).backward()
        n = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        o.step()
        o.zero_grad()
        return n

    compiled = jit(step)
    return [compiled([normal(2, 3, seed=i + j) for j in range(n)]) for i, n in enumerate((2, 3, 2, 1))], module


@program
def grad_attribute_edited(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 2)

    def step(x):
        module(x).sum().backward()
        for p in module.parameters():
            p.grad.nan_to_num_().clamp_(-1, 1)
            p.grad += 0.01 * torch.ones_like(p)
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return module.weight.grad is None

    compiled = jit(step)
    return [compiled(normal(2, 3, seed=i)) for i in range(3)], module


@program
def frozen_toggle(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    compiled = jit(module)
    results = []
    for i in range(4):
        module[0].requires_grad_(i % 2 == 0)
        module.zero_grad()
        compiled(normal(2, 3, seed=i)).sum().backward()
        results.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return results


@program
def tied_weights(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(5, 3)
            s.o = nn.Linear(3, 5, bias=False)
            s.o.weight = s.e.weight

        def forward(s, i):
            return s.o(s.e(i))

    torch.manual_seed(1)
    module = M()
    compiled = jit(module)
    results = trained(
        compiled, module, [(torch.tensor([i, 2]),) for i in range(3)], torch.optim.SGD(module.parameters(), 0.1)
    )
    module.o.weight = nn.Parameter(torch.ones(5, 3))
    return results + trained(compiled, module, [(torch.tensor([1, 2]),)])


@program
def checkpointed(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh())

    def f(x):
        return checkpoint(module, checkpoint(lambda y: y.sin() * y, x, use_reentrant=False), use_reentrant=False)

    results = []
    compiled = jit(f)
    for i in range(3):
        x = normal(4, 3, seed=i, grad=True)
        torch.manual_seed(i)
        o = compiled(x)
        o.sum().backward()
        results.append((o, x.grad, torch.rand(1)))
    return results


@program
def checkpoint_sequential_(jit):
    from torch.utils.checkpoint import checkpoint_sequential

    torch.manual_seed(1)
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    compiled = jit(lambda x: checkpoint_sequential(module, 2, x, use_reentrant=False))
    return trained(compiled, module, [(normal(2, 3, seed=i),) for i in range(3)])


@program
def saved_tensor_hooks(jit):
    log = []

    def f(x):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (log.append("p"), t * 1)[1], lambda t: (log.append("u"), t)[1]
        ):
            y = x.sin() * x
        return y.sum()

    return with_gradients(jit(f), [(normal(3, seed=i, grad=True),) for i in range(2)]), sorted(log)


@program
def save_on_cpu(jit):
    def f(x):
        with torch.autograd.graph.save_on_cpu():
            return (x.sin() * x).sum()

    return with_gradients(jit(f), [(normal(3, seed=i, grad=True),) for i in range(2)])


@program
def no_grad_pieces(jit):
    def f(x):
        with torch.no_grad():
            a = x * 2
        with torch.enable_grad():
            b = x * 3
        with torch.inference_mode():
            d = (x + 1).tolist()

        @torch.no_grad()
        def g(y):
            return y * y

        return a, b, d, g(x), x.detach() * b

    return with_gradients(jit(f), [(normal(3, seed=i, grad=True),) for i in range(2)])


@program
def inference_mode_call(jit):
    compiled = jit(lambda x: x * 2)
    results = []
    with torch.inference_mode():
        y = compiled(normal(3))
        results.append(y.is_inference())
    z = compiled(normal(3))
    results.append(z.is_inference())
    results.append(y.clone())
    with torch.no_grad():
        results.append(compiled(normal(3, grad=True)))
    results.append(compiled(normal(3, grad=True)))
    return results


@program
def autocast_pieces(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
            with torch.autocast("cpu", enabled=False):
                z = module(y.float())
            s = torch.softmax(y, -1)
        return y, z, s

    compiled = jit(f)
    results = [compiled(normal(2, 3, seed=i)) for i in range(2)]
    with torch.autocast("cpu", torch.float16):
        results.append(compiled(normal(2, 3)))
    return results
