"""Generators, coroutines, threads, torch.compile inside."""

import asyncio
import threading

import torch
from torch import nn

from tests.scenarios.compared import normal, program


@program
def generator_result(jit):
    def f(x):
        for i in range(3):
            yield x * i

    compiled = jit(f)
    return [list(compiled(normal(3, seed=s))) for s in range(3)]


@program
def generator_result_inner(jit):
    def f(x):
        def g():
            for i in range(3):
                yield x * i

        return g(), x + 1

    compiled = jit(f)
    results = []
    for s in range(3):
        g, y = compiled(normal(3, seed=s))
        results.append((y, list(g)))
    return results


@program
def generator_method(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.Linear(3, 3)

        def forward(s, x):
            h = x
            while True:
                h = s.l(h)
                yield h

    torch.manual_seed(1)
    module = M()
    compiled = jit(module)
    out = []
    for s in range(2):
        it = compiled(normal(2, 3, seed=s))
        out.append([next(it), next(it)])
    return out


@program
def coroutine_result(jit):
    async def f(x):
        return x * 2

    compiled = jit(f)
    return [asyncio.run(compiled(normal(3, seed=s))) for s in range(3)]


@program
def asyncio_inside(jit):
    async def g(x):
        await asyncio.sleep(0)
        return x * 2

    def f(x):
        async def main():
            return await asyncio.gather(g(x), g(x + 1))

        return asyncio.run(main())

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def async_gen(jit):
    async def f(x):
        for i in range(3):
            yield x + i

    async def collect(a):
        return [v async for v in a]

    compiled = jit(f)
    return [asyncio.run(collect(compiled(normal(3, seed=s)))) for s in range(3)]


@program
def thread_inside(jit):
    def f(x):
        out = [None] * 2

        def work(i):
            out[i] = x * (i + 1)

        ts = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for t in ts:
            t.start()
        for t in ts:
            t.join()
        return out[0] + out[1]

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def pool_inside(jit):
    from concurrent.futures import ThreadPoolExecutor

    def f(x):
        with ThreadPoolExecutor(2) as p:
            return sum(p.map(lambda i: x * i, range(4)))

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def compile_inside(jit):
    def f(x):
        g = torch.compile(lambda y: y.sin() + 1, backend="eager")
        return g(x) * 2

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def compiled_callee(jit):
    @torch.compile(backend="eager")
    def g(y):
        return y.sin() + 1

    def f(x):
        return g(x) * 2

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]


@program
def compile_module_inside(jit):
    torch.manual_seed(1)
    module = torch.compile(nn.Linear(3, 3), backend="eager")

    def f(x):
        return module(x) * 2

    compiled = jit(f)
    return [compiled(normal(3, seed=s)) for s in range(3)]
