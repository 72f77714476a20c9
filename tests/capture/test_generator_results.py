"""Generators and coroutines that leave a program are refused: the original gives them."""

import asyncio

import pytest
import torch
from torch import nn

from tests.capture.runs import refused


def x():
    return torch.randn(3, 4)


def parts(x, *others, scale=2.0, **named):
    for i, other in enumerate((x, *others, *named.values())):
        yield other * scale + i


def generators(jit):
    log, w = [], nn.Parameter(torch.randn(4))

    def f(x):
        y = x * w
        generators = []

        def inner():
            for i in range(3):
                log.append(i)
                generators.append(y * i)
                yield generators[-1]

        return inner(), parts(y, x, scale=3.0, last=y + 1), (y - i for i in range(2)), generators

    f, seen = jit(f), []
    for _ in range(3):
        first, second, third, unused = f(x())
        assert not log
        values = [*first, *second, *third]
        sum(y.sum() for y in values).backward()
        seen.append((values, len(unused), unused[2] is values[2], list(log), w.grad.clone()))
        log.clear()
    return seen


def two_ways(jit):
    def f(x):
        def inner():
            got = yield x
            got = yield x * got
            yield x + got

        return inner()

    f, seen = jit(f), []
    for _ in range(2):
        g = f(x())
        seen.append((next(g), g.send(2), g.send(3), next(g, None)))
    return seen


def in_an_object(jit):
    saved = {}

    def f(x):
        saved["parts"] = parts(x + 1)
        return x * 2

    f = jit(f)
    return [(f(x()), list(saved["parts"])) for _ in range(2)]


def coroutines(jit):
    def f(x):
        y = x.exp()

        async def half():
            await asyncio.sleep(0)
            return y / 2

        async def several():
            for i in range(2):
                yield y + i

        return half(), several()

    async def wait(half, several):
        return await half, [value async for value in several]

    f = jit(f)
    return [asyncio.run(wait(*f(x()))) for _ in range(2)]


@pytest.mark.parametrize("run", [generators, two_ways, in_an_object, coroutines], ids=lambda run: run.__name__)
def test_they_are_refused_and_go_on_outside(run):
    refused(run, "generator leaves the compiled function|code that is awaited")


def started(jit):
    def f(x):
        generator = parts(x, x + 1)
        first = next(generator)
        return first, generator

    first, generator = jit(f)(x())
    return [first, *generator]


def the_whole_program(jit):
    return [*jit(parts)(x())]


@pytest.mark.parametrize("run", [started, the_whole_program], ids=lambda run: run.__name__)
def test_others_are_refused(run):
    refused(run, "a generator leaves the compiled function")
