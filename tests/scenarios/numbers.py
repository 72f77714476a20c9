"""Sizes of zero, promotion, integers, random generators."""

import torch
import torch.nn.functional as F

from tests.scenarios.compared import normal, program, with_gradients


@program
def zero_size(jit):
    def f(x):
        return (
            x.sum(),
            x.mean(),
            x.sum(0),
            x @ x.t(),
            torch.cat([x, x]),
            F.softmax(x, -1),
            x.var(0),
            x.reshape(-1, 3),
            x.norm(),
            F.linear(x, torch.ones(2, 3)),
            x.flatten(),
            x.cumsum(0),
            F.layer_norm(x, (3,)),
        )

    return with_gradients(
        jit(f),
        [
            (torch.zeros(0, 3, requires_grad=True),),
            (normal(2, 3, grad=True),),
            (torch.zeros(0, 3, requires_grad=True),),
        ],
    )


@program
def zero_size_errors(jit):
    def f(x):
        out = []
        for g in (
            lambda: x.max(),
            lambda: x.argmax(),
            lambda: x.min(0),
            lambda: torch.stack([]),
            lambda: x.median(),
            lambda: x[0],
        ):
            try:
                out.append(g())
            except Exception as e:
                out.append((type(e).__name__, str(e)[:80]))
        return out

    compiled = jit(f)
    return [compiled(torch.zeros(0, 3)), compiled(torch.ones(2, 3))]


@program
def zero_dim(jit):
    def f(x, i):
        return (
            x + 1,
            x[None],
            x * torch.ones(2, dtype=torch.float16),
            i + 1.5,
            i / 2,
            x.expand(3),
            x.sum(0),
            x.squeeze(),
            x.view(1),
            x.item(),
            x.t(),
            x.cumsum(0),
            F.softmax(x, 0),
            x.max(0),
        )

    compiled = jit(f)
    return [compiled(torch.tensor(1.5 + i), torch.tensor(i)) for i in range(3)]


@program
def promotion(jit):
    def f(x, k):
        out = []
        for y in (x, x.half(), x.int(), x.to(torch.uint8), x > 0, x.bfloat16(), x.double(), x[0], x.int()[0]):
            for op in (
                lambda a: a + k,
                lambda a: a * k,
                lambda a: a / 2,
                lambda a: a // 2,
                lambda a: k - a,
                lambda a: a**2,
                lambda a: 2**a,
                lambda a: a % 2,
                lambda a: torch.where(a > 0, a, k),
                lambda a: a.add(1, alpha=2),
                lambda a: a.clamp(0, k),
                lambda a: a == k,
                lambda a: torch.full_like(a, k),
                lambda a: a.masked_fill(a > 0, k),
                lambda a: torch.maximum(a, torch.tensor(k)),
            ):
                try:
                    out.append(op(y))
                except Exception as e:
                    out.append((type(e).__name__, str(e)[:80]))
        return out

    compiled = jit(f)
    return [compiled(normal(3).abs() * 3, k) for k in (1, 2.5, True, 3)]


@program
def int_overflow(jit):
    def f(x, k):
        return (
            x * k,
            x + k,
            x << 2,
            x >> 1,
            ~x,
            x // k,
            x % k,
            -x,
            x.abs(),
            x.sum(),
            x.prod(),
            x & k,
            x.bitwise_xor(k),
            torch.div(x, k, rounding_mode="floor"),
            torch.div(x, k, rounding_mode="trunc"),
            x.float().int(),
        )

    compiled = jit(f)
    return [
        compiled(torch.tensor([-128, 127, -1, 7], dtype=dt), k)
        for dt in (torch.int8, torch.int32, torch.int64)
        for k in (3, -3, 2)
    ]


@program
def default_dtype(jit):
    def f(x):
        old = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return torch.ones(2) * x, torch.tensor(1.5), torch.arange(3) / 2, torch.rand(2).dtype
        finally:
            torch.set_default_dtype(old)

    compiled = jit(f)
    return [compiled(normal(2, seed=i)) for i in range(2)]


@program
def explicit_generator(jit):
    g = torch.Generator().manual_seed(3)

    def f(x):
        return (
            x + torch.randn(3, generator=g),
            torch.randperm(4, generator=g),
            torch.bernoulli(torch.full((3,), 0.5), generator=g),
            torch.multinomial(torch.ones(4), 2, generator=g),
            torch.empty(3).uniform_(generator=g),
        )

    compiled = jit(f)
    results = [compiled(normal(3)) for _ in range(3)]
    return results, torch.randn(2, generator=g)


@program
def generator_argument(jit):
    def f(x, g):
        h = torch.Generator().manual_seed(5)
        return torch.rand(3, generator=g) + x, torch.rand(3, generator=h), torch.rand(3)

    compiled = jit(f)
    g = torch.Generator().manual_seed(1)
    return [compiled(normal(3), g) for _ in range(2)] + [compiled(normal(3), torch.Generator().manual_seed(2))]


@program
def fork_rng(jit):
    def f(x):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            a = torch.rand(2)
        s = torch.get_rng_state()
        b = torch.rand(2)
        torch.set_rng_state(s)
        d = torch.rand(2)
        return x + a, b, d

    compiled = jit(f)
    return [compiled(normal(2)) for _ in range(3)]


@program
def manual_seed_inside(jit):
    def f(x, s):
        torch.manual_seed(s)
        return x + torch.rand(3), torch.initial_seed(), F.dropout(x)

    compiled = jit(f)
    return [compiled(normal(3), s) for s in (1, 2, 1)]
