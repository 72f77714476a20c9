"""Attention, line search, layouts, checkpoints with effects, texts of tensors with a history."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.scenarios.compared import normal, program


@program
def flex_attention_(jit):
    from torch.nn.attention.flex_attention import flex_attention

    def f(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1)

    compiled = jit(f)
    return [compiled(*(normal(1, 2, 8, 4, seed=s + i) for i in range(3))) for s in range(3)]


@program
def flex_attention_block(jit):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def f(q, k, v):
        b = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
        return flex_attention(q, k, v, block_mask=b)

    compiled = jit(f)
    return [compiled(*(normal(1, 2, 16, 4, seed=s + i) for i in range(3))) for s in range(3)]


@program
def lbfgs(jit):
    def mk():
        p = torch.tensor([1.5, -1.0], requires_grad=True)
        o = torch.optim.LBFGS([p], lr=1, max_iter=4, line_search_fn="strong_wolfe")
        return p, o

    p, o = mk()

    def step():
        def closure():
            o.zero_grad()
            loss = 100 * (p[1] - p[0] ** 2) ** 2 + (1 - p[0]) ** 2
            loss.backward()
            return loss

        return o.step(closure)

    compiled = jit(step)
    return [(compiled(), p.detach().clone()) for _ in range(4)]


@program
def lbfgs_closure(jit):
    p = torch.tensor([1.5, -1.0], requires_grad=True)
    o = torch.optim.LBFGS([p], lr=1, max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        o.zero_grad()
        loss = 100 * (p[1] - p[0] ** 2) ** 2 + (1 - p[0]) ** 2
        loss.backward()
        return loss

    compiled = jit(closure)
    return [(o.step(compiled), p.detach().clone()) for _ in range(4)]


@program
def gradscaler(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 1)
    o = torch.optim.SGD(module.parameters(), lr=0.1)
    s = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(x, y):
        o.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(module(x).float(), y)
        s.scale(loss).backward()
        s.unscale_(o)
        n = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        s.step(o)
        s.update()
        return loss, n

    compiled = jit(step)
    results = []
    for i in range(5):
        x = normal(4, 3, seed=i)
        if i == 3:
            x[0, 0] = float("inf")
        results.append((compiled(x, normal(4, 1, seed=i)), s.get_scale(), module.weight.detach().clone()))
    return results


@program
def cyclic_result(jit):
    def f(x):
        d = {"x": x * 2}
        d["self"] = d
        return d

    compiled = jit(f)
    results = []
    for s in range(3):
        d = compiled(normal(3, seed=s))
        results.append((d["x"], d["self"] is d))
    return results


@program
def cyclic_objects(jit):
    class N:
        def __init__(s, v):
            s.v = v
            s.next = None

    def f(x):
        a, b = N(x), N(x * 2)
        a.next = b
        b.next = a
        return a

    compiled = jit(f)
    results = []
    for s in range(3):
        d = compiled(normal(3, seed=s))
        results.append((d.v, d.next.v, d.next.next is d))
    return results


@program
def contiguous_is(jit):
    def f(x):
        return (
            x.contiguous(),
            x.to(torch.float32),
            x.float(),
            x.reshape(3, 2),
            x.type(torch.float32),
            x.expand(3, 2),
            x.cpu(),
        )

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, 2, seed=s)
        o = compiled(x)
        results.append([v is x for v in o] + [v.data_ptr() == x.data_ptr() for v in o])
    x = normal(2, 3).t()
    o = compiled(x)
    results.append([v is x for v in o])
    return results


@program
def contiguous_is_grad(jit):
    def f(x):
        return x.contiguous(), x.to(torch.float32), x * 1

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, 2, seed=s, grad=True)
        o = compiled(x)
        results.append([v is x for v in o])
    return results


@program
def rms_norm_strides(jit):
    def f(x, w):
        return (
            F.rms_norm(x, (4,), w),
            F.layer_norm(x, (4,), w),
            F.instance_norm(x.transpose(1, 2)),
            F.group_norm(x.transpose(1, 2), 2),
        )

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(4, 3, 2, seed=s, grad=True).permute(2, 1, 0)
        w = normal(4, grad=True)
        results.append(compiled(x, w))
    return results


@program
def checkpoint_bn(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())

    def f(x):
        return checkpoint(module, x, use_reentrant=False).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(4, 3, seed=s, grad=True)
        compiled(x).backward()
        results.append((x.grad, {k: v.clone() for k, v in module.state_dict().items()}))
    return results


@program
def checkpoint_bn_reentrant(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())

    def f(x):
        return checkpoint(module, x, use_reentrant=True).sum()

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(4, 3, seed=s, grad=True)
        compiled(x).backward()
        results.append((x.grad, {k: v.clone() for k, v in module.state_dict().items()}))
    return results


@program
def text_of_grad(jit):
    def f(x):
        y = x * 2
        return str(y), repr(y.sum()), f"{y}", str(x)

    compiled = jit(f)
    return [compiled(normal(3, seed=s, grad=True)) for s in range(3)]


@program
def grad_fn_name(jit):
    def f(x):
        y = x * 2
        return y.grad_fn.name(), type(y.grad_fn).__name__, y.grad_fn.next_functions[0][0] is not None

    compiled = jit(f)
    return [compiled(normal(3, seed=s, grad=True)) for s in range(3)]


@program
def view_as_complex_argument(jit):
    def f(x, z):
        x.mul_(2)
        return z + 1, x

    compiled = jit(f)
    results = []
    for s in range(3):
        x = normal(3, 2, seed=s)
        z = torch.view_as_complex(x)
        results.append((compiled(x, z), x, z))
    return results


@program
def set_data_view(jit):
    def f(x):
        y = torch.empty(0)
        y.data = x * 2
        return y

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def swap_tensors(jit):
    def f(x):
        a = x * 2
        b = x * 3
        torch.utils.swap_tensors(a, b)
        return a, b

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def ck_counter(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(3, 3)
            s.n = 0
            s.log = []

        def forward(s, x):
            s.n += 1
            return s.l(x).relu()

    torch.manual_seed(1)
    module = M()

    def f(x):
        return checkpoint(module, x, use_reentrant=False).sum()

    compiled = jit(f)
    results = []
    for i in range(4):
        compiled(normal(2, 3, seed=i)).backward()
        results.append((module.n, module.l.weight.grad.clone()))
    return results


@program
def ck_list(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(3, 3)
            s.log = []

        def forward(s, x):
            s.log.append(1)
            return s.l(x).relu()

    torch.manual_seed(1)
    module = M()

    def f(x):
        return checkpoint(module, x, use_reentrant=False).sum()

    compiled = jit(f)
    results = []
    for i in range(4):
        compiled(normal(2, 3, seed=i)).backward()
        results.append(len(module.log))
    return results


@program
def ck_attr(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(3, 3)

        def forward(s, x):
            s.aux = s.l(x).mean()
            s.flag = True
            return s.l(x).relu()

    torch.manual_seed(1)
    module = M()

    def f(x):
        return checkpoint(module, x, use_reentrant=False).sum() + module.aux

    compiled = jit(f)
    results = []
    for i in range(4):
        compiled(normal(2, 3, seed=i)).backward()
        results.append(module.l.weight.grad.clone())
    return results


@program
def ck_print(jit):
    layer = nn.Linear(3, 3)

    def g(x):
        print("in", x.shape)
        return layer(x).relu()

    def f(x):
        return checkpoint(g, x, use_reentrant=False).sum()

    compiled = jit(f)
    results = []
    for i in range(2):
        compiled(normal(2, 3, seed=i)).backward()
    return results


@program
def ck_bn_inner_step(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())

    def f(x):
        loss = checkpoint(module, x, use_reentrant=False).sum()
        loss.backward()
        return loss

    compiled = jit(f)
    return [compiled(normal(4, 3, seed=i)) for i in range(3)], module


@program
def ck_bn_eval(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()

    def f(x):
        return checkpoint(module, x, use_reentrant=False).sum()

    compiled = jit(f)
    results = []
    for i in range(3):
        results.append(compiled(normal(4, 3, seed=i)))
        results[-1].backward()
    return results, module
