"""Classes, properties, exceptions, text, containers with a state."""

import functools
import heapq
import itertools
import json
import operator
import re
import string
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque

import torch
from torch import nn

from tests.scenarios.compared import normal, program, trained, with_gradients


@program
def einops_like(jit):
    def rearrange(x, b, h):
        n, compiled, H, W = x.shape
        return (
            x.view(n, compiled, H // b, b, W // b, b)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(n, -1, compiled * b * b)
            .unflatten(-1, (h, -1))
            .transpose(1, 2)
        )

    compiled = jit(rearrange)
    return with_gradients(compiled, [(normal(2, 2, 4, s, seed=s, grad=True), 2, 2) for s in (4, 8, 4, 6)])


@program
def abstract_classes(jit):
    class Base(ABC, nn.Module):
        def __init__(s):
            super().__init__()
            s.w = nn.Parameter(torch.ones(3))

        @abstractmethod
        def act(s, x): ...
        @property
        def scale(s):
            return s.w.sum()

        @classmethod
        def make(cls):
            return cls()

        @staticmethod
        def pre(x):
            return x * 2

        def forward(s, x):
            return s.act(s.pre(x) * s.w) * s.scale

    class R(Base):
        def act(s, x):
            return x.relu()

    class S(R):
        def act(s, x):
            return super().act(x) + x.sigmoid()

    module = S.make()
    compiled = jit(module)
    return trained(
        compiled, module, [(normal(2, 3, seed=i),) for i in range(3)], torch.optim.SGD(module.parameters(), 0.1)
    ), isinstance(module, Base)


@program
def properties_and_setattr(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s._k = 1.0
            s.hist = []

        @property
        def k(s):
            return s._k

        @k.setter
        def k(s, v):
            s._k = max(0.1, v)
            s.hist.append(v)

        def __getattr__(s, n):
            if n.startswith("dyn_"):
                return len(n)
            return super().__getattr__(n)

        def forward(s, x):
            s.k = s.k * 0.5
            return x * s.k + s.dyn_abc

    module = M()
    compiled = jit(module)
    return [compiled(normal(2, seed=i)) for i in range(6)], module.hist, module.k


@program
def descriptors_slots(jit):
    class D:
        def __set_name__(s, o, n):
            s.n = "_" + n

        def __get__(s, o, t=None):
            return s if o is None else getattr(o, s.n, 0) + 1

        def __set__(s, o, v):
            setattr(o, s.n, v)

    class P:
        __slots__ = ("_a", "b")
        a = D()

        def __init__(s, a):
            s.a = a
            s.b = []

    def f(x, p):
        p.a = p.a + 1
        p.b.append(p.a)
        return x * p.a

    compiled = jit(f)
    p = P(1)
    return [(compiled(normal(2, seed=i), p), p.a, list(p.b)) for i in range(4)]


@program
def operators_on_config(jit):
    class Cfg(dict):
        __getattr__ = dict.__getitem__

        def __setattr__(s, k, v):
            s[k] = v

    def f(x, cfg):
        cfg.step = cfg.get("step", 0) + 1
        if "bias" in cfg:
            x = x + cfg.bias
        return x * cfg.scale ** cfg["p"], {**cfg}

    compiled = jit(f)
    cfg = Cfg(scale=2.0, p=2)
    results = []
    for i in range(4):
        if i == 2:
            cfg.bias = 1
        results.append(compiled(normal(2, seed=i), cfg))
    return results


@program
def kwargs_varargs(jit):
    def f(x, *ys, scale=1.0, **kw):
        for y in ys:
            x = x + y
        for k, v in sorted(kw.items()):
            x = x * v if k.startswith("m") else x - v
        return x * scale

    compiled = jit(f)
    return [
        compiled(normal(2)),
        compiled(normal(2), normal(2)),
        compiled(normal(2), 1, 2.0, scale=3),
        compiled(normal(2), m1=2, a=normal(2)),
        compiled(normal(2), a=normal(2), m1=3),
    ]


@program
def defaults_mutable(jit):
    def f(x, acc=[], d={}):
        acc.append(len(acc))
        d[len(acc)] = x.sum()
        return x + len(acc), len(d)

    compiled = jit(f)
    return [compiled(normal(2, seed=i)) for i in range(5)], f.__defaults__[0]


@program
def closures_nonlocal(jit):
    n = 0
    best = None

    def f(x):
        nonlocal n, best
        n += 1
        s = x.sum().item()
        if best is None or s > best:
            best = s
        return x * n, best

    compiled = jit(f)
    return [compiled(normal(3, seed=i)) for i in range(6)], n, best


@program
def globals_written(jit):
    global _G
    _G = {"n": 0}

    def f(x):
        global _G
        _G = {"n": _G["n"] + 1}
        return x + _G["n"]

    compiled = jit(f)
    return [compiled(normal(2)) for i in range(4)], _G


@program
def exceptions_flow(jit):
    class E(Exception):
        def __init__(s, module, code):
            super().__init__(module)
            s.code = code

    log = []

    def g(x, k):
        if k > 2:
            raise E("big", k)
        return x * k

    def f(x, k):
        try:
            y = g(x, k)
        except E as e:
            y = x - e.code
            log.append(str(e))
        except (ValueError, TypeError):
            y = x
        else:
            y = y + 1
        finally:
            log.append("f")
        try:
            raise KeyError("a") from ValueError("b")
        except KeyError as e:
            log.append(type(e.__cause__).__name__)
        return y

    compiled = jit(f)
    return [compiled(normal(2), k) for k in (1, 2, 3, 4)], log


@program
def raised_out(jit):
    def f(x, k):
        if x.shape[0] != k:
            raise ValueError(f"expected {k}, got {tuple(x.shape)}")
        assert x.ndim == 1, "one dim"
        return x * 2

    compiled = jit(f)
    results = []
    for a in ((normal(2), 2), (normal(3), 2), (normal(2, 2), 2), (normal(3), 3)):
        try:
            results.append(compiled(*a))
        except Exception as e:
            results.append((type(e).__name__, str(e)))
    return results


@program
def warnings_inside(jit):
    import warnings as W

    def f(x):
        with W.catch_warnings(record=True) as w:
            W.simplefilter("always")
            W.warn("careful", UserWarning)
        return x * 2, len(w), str(w[0].message)

    compiled = jit(f)
    return [compiled(normal(2)) for _ in range(2)]


@program
def comprehensions_zip(jit):
    def f(xs, ws):
        d = {k: v * 2 for k, v in zip("abc", xs)}
        s = {v.shape for v in xs}
        g = sum(x * w for x, w in zip(xs, ws, strict=False))
        e = [(i, x.sum()) for i, x in enumerate(xs) if i % 2 == 0]
        return (
            d,
            len(s),
            g,
            e,
            list(map(torch.exp, xs)),
            functools.reduce(operator.add, xs),
            list(itertools.accumulate(xs)),
            [*reversed(xs)],
            max(len(x) for x in xs),
            any(x.ndim > 1 for x in xs),
        )

    compiled = jit(f)
    return [compiled([normal(3, seed=i + j) for j in range(n)], [1, 2.0, 3]) for i, n in enumerate((3, 2, 3, 1))]


@program
def sorting_by_tensor_values(jit):
    def f(xs):
        o = sorted(xs, key=lambda t: t.sum().item())
        module = max(xs, key=lambda t: float(t.norm()))
        i = min(range(len(xs)), key=lambda j: xs[j].mean().item())
        return torch.stack(o), module, i

    compiled = jit(f)
    return [compiled([normal(3, seed=i * 3 + j) for j in range(3)]) for i in range(6)]


@program
def heap_beam(jit):
    def f(x, k):
        h = []
        for i, v in enumerate(x.tolist()):
            heapq.heappush(h, (v, i))
            if len(h) > k:
                heapq.heappop(h)
        return [i for _, i in sorted(h)], x[torch.tensor([i for _, i in sorted(h)])]

    compiled = jit(f)
    return [compiled(normal(6, seed=i), 2) for i in range(5)]


@program
def string_building(jit):
    def f(x, name):
        s = f"{name!r:>8}|{x.shape}|{x.dtype}|{x.ndim:03d}|{x.numel():,}"
        t = string.Template("$a-$b").substitute(a=name, b=x.size(0))
        return (
            s,
            t,
            "%s %d" % (name, x.shape[0]),
            name.format(3),
            re.sub(r"\d", "#", s),
            json.dumps({"n": x.shape[0], "d": str(x.dtype)}),
        )

    compiled = jit(f)
    return [compiled(normal(n, 2), "a{}b") for n in (2, 3, 2, 40)]


@program
def counters_deques(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.q = deque(maxlen=3)
            s.n = Counter()
            s.d = defaultdict(list)
            s.o = OrderedDict()

        def forward(s, x):
            s.q.append(x.detach())
            s.n["calls"] += 1
            s.d[x.shape[0]].append(float(x.sum()))
            s.o[len(s.o)] = 1
            s.o.move_to_end(0)
            return torch.stack([t.mean() for t in s.q]).sum() + s.n["calls"]

    module = M()
    compiled = jit(module)
    return (
        [compiled(normal(2 + i % 2, seed=i)) for i in range(6)],
        module.n,
        dict(module.d),
        list(module.o),
        list(module.q),
    )


@program
def replay_buffer(jit):
    class B:
        def __init__(s, n):
            s.x = torch.zeros(n, 2)
            s.i = 0
            s.full = False

        def add(s, v):
            s.x[s.i] = v
            s.i = (s.i + 1) % len(s.x)
            s.full = s.full or s.i == 0

        def sample(s, k):
            n = len(s.x) if s.full else s.i
            return s.x[torch.randint(n, (k,))]

    b = B(3)

    def f(v):
        b.add(v)
        return b.sample(2)

    compiled = jit(f)
    return [compiled(normal(2, seed=i)) for i in range(7)], b.x, b.i, b.full


@program
def online_stats(jit):
    class W(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("n", torch.tensor(0.0))
            s.register_buffer("mu", torch.zeros(2))
            s.register_buffer("m2", torch.zeros(2))

        def forward(s, x):
            for results in x:
                s.n += 1
                d = results - s.mu
                s.mu += d / s.n
                s.m2 += d * (results - s.mu)
            return (x - s.mu) / (s.m2 / s.n).sqrt().clamp(min=1e-3)

    module = W()
    compiled = jit(module)
    return [compiled(normal(3, 2, seed=i)) for i in range(4)], module
