"""What everyday code does with tensors: indexing, logic, writes, NumPy, results that are used in part."""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, vmap

from tests.scenarios.compared import normal, program, with_gradients


@program
def tensor_iteration_unpack(jit):
    def f(x):
        a, b, *results = x

    def g(x):
        a, b, *results = x
        s = sum(x)
        loss = list(x)
        d = dict(enumerate(x))
        y = [p * q for p, q in zip(x, x[1:])]
        return (
            a,
            len(results),
            s,
            loss[-1],
            d[0],
            y,
            x in [1] if False else len(x),
            [float(v) for v in x[:, 0]],
            tuple(x.shape),
            x.tolist(),
        )

    compiled = jit(g)
    return [compiled(normal(n, 2, seed=n)) for n in (3, 4, 3)]


@program
def tensor_as_index(jit):
    def f(x, i):
        return (
            x[i],
            x[i:],
            ["a", "b", "c"][i],
            list(range(10))[:i],
            x[..., i],
            torch.zeros(3, int(i) + 1),
            "z" * i if False else i * 2,
            {0: "p", 1: "q", 2: "r"}[int(i)],
        )

    compiled = jit(f)
    return [compiled(normal(3, 3), torch.tensor(i)) for i in (0, 1, 2, 1)]


@program
def bool_logic(jit):
    def f(a, b):
        return (
            (a > 0) & (b > 0),
            not a.any(),
            bool(a.sum() > 0) and 1 or 2,
            (a == b).all(),
            a.sum() > 0 or b,
            [v for v in (a, b) if v.sum() > 0][:1],
            1 if a.max() > b.max() else 0,
            a.sum().item() == b.sum().item(),
            torch.equal(a, b),
            a.allclose(b),
            torch.is_tensor(a),
            a is b,
            a in [a] if a.numel() == 1 else None,
        )

    compiled = jit(f)
    return [compiled(normal(2, seed=i), normal(2, seed=i + 1)) for i in range(4)] + [compiled(normal(2), normal(2))]


@program
def inplace_ops_all(jit):
    def f(x):
        y = x.clone()
        y += 1
        y *= 2
        y -= x
        y /= 3
        y **= 2
        y //= 0.5
        y %= 3
        y.clamp_(0, 2)
        y.relu_()
        y.sqrt_()
        y.exp_()
        y.fill_diagonal_(1)
        y.index_fill_(0, torch.tensor([0]), 5)
        y.masked_fill_(y > 4, 0)
        y.scatter_(0, torch.zeros(1, 3, dtype=torch.long), 9.0)
        y.copy_(x)
        y.zero_()
        y.fill_(2)
        y.addmm_(x, x)
        y.lerp_(x, 0.5)
        y.index_copy_(0, torch.tensor([1]), x[:1])
        y.put_(torch.tensor([0]), torch.tensor([7.0]))
        y.swapdims_(0, 1)
        y.squeeze_()
        y.unsqueeze_(0)
        y.round_(decimals=1)
        y.triu_()
        y.cumsum_(-1)
        y.resize_as_(y)
        y[0, ..., 1] += 3
        y[y < 0] = y[y < 0] * 2
        y.logical_not_() if False else None
        return y

    compiled = jit(f)
    return [compiled(normal(3, 3, seed=i)) for i in range(2)]


@program
def out_arguments(jit):
    def f(x, o):
        torch.mul(x, 2, out=o)
        a = torch.empty(3)
        torch.add(x, o, out=a)
        module, i = torch.empty(()), torch.empty((), dtype=torch.long)
        torch.max(x, 0, out=(module, i))
        return a, module, i

    compiled = jit(f)
    results = []
    for k in range(3):
        o = torch.empty(3)
        results.append((compiled(normal(3, seed=k), o), o))
    return results


@program
def foreach_ops(jit):
    ps = [normal(2), normal(3)]

    def f(g):
        torch._foreach_mul_(ps, 0.9)
        torch._foreach_add_(ps, g, alpha=2)
        n = torch._foreach_norm(ps)
        return n, torch._foreach_sqrt([p.abs() for p in ps])

    compiled = jit(f)
    return [compiled([normal(2, seed=i), normal(3, seed=i)]) for i in range(3)], ps


@program
def meshgrid_positional(jit):
    def f(h, w, d):
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        e = torch.exp(torch.arange(0, d, 2) * (-math.log(1e4) / d))
        p = torch.cat([(y[..., None] * e).sin(), (x[..., None] * e).cos()], -1)
        return p, torch.linspace(0, 1, w), torch.logspace(0, 1, h), torch.eye(h, w), torch.full((h,), math.pi)

    compiled = jit(f)
    return [compiled(*a) for a in ((2, 3, 4), (3, 3, 4), (2, 5, 4), (4, 2, 8))]


@program
def int_bool_inputs(jit):
    def f(i, b, u):
        return (
            i.float().mean(),
            i.sum(),
            b.sum(),
            b.float() @ b.float(),
            i // 2,
            i / 2,
            u + 1,
            u.sum(),
            i[b],
            ~b,
            i.max(),
            torch.where(b, i, 0),
            i.bool(),
            b.all(),
            i.argmax(),
            i.sort(),
            (i > 1).to(u.dtype),
            i.cumsum(0),
            i.prod(),
            i * 1.5,
            F.one_hot(i.abs(), 5),
            b ^ b,
            b | b,
            i.bitwise_and(1),
        )

    compiled = jit(f)
    return [
        compiled(
            torch.tensor([1, -2, 3 + k]),
            torch.tensor([True, False, k == 1]),
            torch.tensor([250, 5, 255], dtype=torch.uint8),
        )
        for k in range(2)
    ]


@program
def float16_paths(jit):
    def f(x):
        return (
            x.half() * 2,
            x.bfloat16().softmax(-1),
            x.half().sum(),
            x.half().float() - x,
            (x.bfloat16() @ x.bfloat16().T).float(),
            torch.finfo(x.half().dtype).max,
            x.half().mean(),
            x.half().norm(),
            x.half().exp(),
            x.bfloat16().cumsum(0),
            F.layer_norm(x.bfloat16(), (3,)),
            F.gelu(x.half()),
            x.half().var(0),
            x.to(torch.float8_e4m3fn).float(),
        )

    return with_gradients(jit(f), [(normal(2, 3, seed=i, grad=True),) for i in range(2)])


@program
def detach_clone_semantics(jit):
    def f(x):
        d = x.detach()
        d2 = x.detach().clone()
        y = x * 2
        z = y.detach()
        z.mul_(10)
        w = y.data
        return y, z, w, d.requires_grad, d2, y.is_leaf, d.is_leaf, x.is_leaf, y.retains_grad

    return with_gradients(jit(f), [(normal(2, seed=i, grad=True),) for i in range(2)])


@program
def grad_of_argument_read(jit):
    def f(x):
        g = x.grad
        s = 0 if g is None else g.sum()
        (x * x).sum().backward()
        return s, x.grad

    compiled = jit(f)
    x = normal(3, grad=True)
    results = [compiled(x) for _ in range(3)]
    x.grad = None
    results.append(compiled(x))
    return results


@program
def double_backward_outside(jit):
    compiled = jit(lambda x: (x.sin() * x).sum())
    results = []
    for i in range(2):
        x = normal(3, seed=i, grad=True)
        (g,) = torch.autograd.grad(compiled(x), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        results.append((g, h))
    return results


@program
def backward_twice_retain(jit):
    compiled = jit(lambda x: (x.exp() * x).sum())
    x = normal(3, grad=True)
    y = compiled(x)
    y.backward(retain_graph=True)
    y.backward()
    results = [x.grad.clone()]
    try:
        y.backward()
    except RuntimeError as e:
        results.append(str(e)[:45])
    return results


@program
def partial_outputs_used(jit):
    compiled = jit(lambda x, w: (x * w, (x + w).sin(), x.detach(), w.sum()))
    results = []
    for k in range(4):
        x, w = normal(3, grad=True), normal(3, seed=1, grad=True)
        o = compiled(x, w)
        o[[0, 1, 3, 1][k]].sum().backward()
        results.append((x.grad, w.grad))
    return results


@program
def threads_outside(jit):
    from concurrent.futures import ThreadPoolExecutor

    compiled = jit(lambda x: x * x.sum())
    with ThreadPoolExecutor(4) as p:
        return list(p.map(compiled, [normal(2 + i % 3, seed=i) for i in range(12)]))


@program
def vmap_over_compiled(jit):
    compiled = jit(lambda x: (x.sin() * 2).sum())
    return (
        vmap(compiled)(normal(3, 2)),
        grad(compiled)(normal(3)),
        jacrev(compiled)(normal(3)),
        torch.func.vjp(compiled, normal(3))[1](torch.tensor(1.0)),
    )


@program
def compiled_in_compiled(jit):
    g = jit(lambda x: x * 2)
    f = jit(lambda x: g(x) + g(x + 1))
    return [f(normal(2, seed=i)) for i in range(3)], g(normal(2))


@program
def recursion_tree(jit):
    torch.manual_seed(1)
    W = nn.Linear(4, 2)

    def f(t):
        return t if isinstance(t, torch.Tensor) else W(torch.cat([f(t[0]), f(t[1])])).tanh()

    compiled = jit(f)
    a, b = normal(2), normal(2, seed=1)
    return [compiled((a, b)), compiled(((a, b), a)), compiled((a, (b, (a, b)))), compiled((b, a))]


@program
def class_with_call_and_state(jit):
    class Norm:
        def __init__(s):
            s.n = 0
            s.mean = 0.0

        def __call__(s, x):
            s.n += 1
            s.mean += (x.mean().item() - s.mean) / s.n
            return x - s.mean

    n = Norm()
    compiled = jit(lambda x: n(x))
    return [compiled(normal(3, seed=i)) for i in range(5)], n.n, n.mean


@program
def bound_method_and_partial(jit):
    class A:
        def __init__(s):
            s.k = 2

        def f(s, x, y=1):
            return x * s.k + y

    a = A()
    compiled = jit(a.f)
    d = jit(functools.partial(a.f, y=normal(2)))
    results = [compiled(normal(2)), d(normal(2))]
    a.k = 3
    return results + [compiled(normal(2)), d(normal(2)), compiled(normal(2), y=5)]


@program
def iterator_argument(jit):
    def f(it):
        return sum(x * 2 for x in it)

    compiled = jit(f)
    return [
        compiled(iter([normal(2), normal(2, seed=1)])),
        compiled(x for x in [normal(2)]),
        compiled([normal(2)]),
        compiled({"a": normal(2)}.values()),
        compiled((normal(2),)),
        compiled(map(torch.exp, [normal(2)])),
    ]


@program
def numpy_mix(jit):
    def f(x):
        a = x.detach().numpy()
        module = np.percentile(a, 50)
        i = np.argsort(a)
        return (
            x - float(module),
            torch.from_numpy(np.cumsum(a)),
            x[torch.as_tensor(i)],
            np.float32(2) * x,
            torch.tensor(a.mean()),
            a.shape,
        )

    return with_gradients(jit(f), [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def tensor_hash_dict(jit):
    def f(ps):
        d = {p: i for i, p in enumerate(ps)}
        return [d[p] for p in reversed(ps)], len({*ps, *ps}), ps[0] in d

    compiled = jit(f)
    a = [normal(2), normal(2, seed=1)]
    return compiled(a), compiled(a)


@program
def inplace_on_buffer_view(jit):
    class KV(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("k", torch.zeros(1, 6, 2))
            s.pos = 0

        def forward(s, x):
            n = x.shape[1]
            s.k[:, s.pos : s.pos + n] = x
            s.pos += n
            return s.k[:, : s.pos].cumsum(1)

    module = KV()
    compiled = jit(module)
    return [compiled(normal(1, n, 2, seed=n)) for n in (2, 1, 1, 2)], module.k, module.pos


@program
def cat_cache_grow(jit):
    class KV(nn.Module):
        def __init__(s):
            super().__init__()
            s.k = None

        def forward(s, x):
            s.k = x if s.k is None else torch.cat([s.k, x], 1)
            return s.k.softmax(1).sum()

    module = KV()
    compiled = jit(module)
    return [compiled(normal(1, 1, 2, seed=i)) for i in range(6)], module.k


@program
def type_checks(jit):
    def f(x):
        return (
            isinstance(x, torch.Tensor),
            type(x).__name__,
            x.dtype == torch.float32,
            x.dtype.is_floating_point,
            x.device == torch.device("cpu"),
            x.device.type,
            x.is_floating_point(),
            torch.is_floating_point(x),
            x.layout,
            hasattr(x, "shape"),
            getattr(x, "nope", 3),
            callable(x.sum),
            x.itemsize,
            x.nbytes,
            x.dim(),
            x.is_cuda,
            isinstance(x, nn.Parameter),
            torch.result_type(x, 1.0),
            torch.can_cast(x.dtype, torch.int32),
            x.get_device(),
        )

    compiled = jit(f)
    return [
        compiled(normal(2)),
        compiled(nn.Parameter(normal(2))),
        compiled(normal(2).int()),
        compiled(normal(2).double()),
    ]
