"""Decisions in functions that are recorded apart: `autograd.Function`s and functions under `torch.func`; and numbers of
NumPy's by which programs index."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import thunder
from tests.paths.compared import assert_same, outcome
from thunder.errors import CaptureError, FallbackWarning

SEEN: list = []


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        norm = x.norm()
        ctx.factor = 2.0 if norm > 1 else 1.0
        return x / norm if norm > 1 else x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor


class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n.item()
        return x[: ctx.n] * ctx.n

    @staticmethod
    def backward(ctx, g):
        return F.pad(g * ctx.n, (0, 4 - ctx.n)), None


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.times = 0
        while x.abs().max() > 1:
            x, ctx.times = x / 2, ctx.times + 1
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g / 2**ctx.times


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = 2.0 if torch.rand(()) < 0.5 else 1.0
        return x * ctx.factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        SEEN.append("positive" if x.sum() > 0 else "negative")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g


def clipped_twice(x):
    y = Clip.apply(x)
    return Clip.apply(y * 3) if y.sum() > 0 else y


def dropped_thrice(x):
    for _ in range(3):
        x = Dropped.apply(x)
        if x.sum() > 2:
            x = x - 1
    return x + torch.rand(4)


def result_not_used(x):
    Noted.apply(x)
    return x + 1


def clipped_step(x):
    w = x.detach().clone().requires_grad_()
    Clip.apply(w * w).sum().backward()
    return w.grad + x


def loss(w, x):
    y = (w * x).sum()
    return y.square() if y > 0 else y.sin()


def drawn(w, x):
    r = torch.rand(4)
    return (w * x * r).sum() if r[0] > 0.5 else (w * r).square().sum()


def inner_steps(w, x):
    for _ in range(3):
        g = grad(loss)(w, x)
        if g.norm() > 1:
            g = g / g.norm()
        w = w - 0.1 * g
    return w


def pulled_back(w, x):
    y, pull = vjp(lambda a: loss(a, x), w)
    return pull(torch.ones_like(y))[0] * y


def size_of_data(w, x):
    n = (x > 0).sum().item()
    return (w[:n] * x[:n]).sum() + n * w.square().sum()


def twice(w, x):
    return grad(lambda a: grad(lambda b: loss(b, x))(a).square().sum())(w)


def decides_after(w, x):
    g = grad(drawn)(w, x)
    if g.sum() > 0:
        g = grad(drawn)(g, x) * 2
    return g + torch.rand(4)


def noted(w, x):
    seen = []

    def f(a):
        y = (a * x).sum()
        seen.append(1 if y > 0 else 2)
        return y

    return grad(f)(w) * seen[0]


FUNCTIONS = [
    lambda x: Clip.apply(x * 1.0),
    lambda x: Head.apply(x, (x[:1].abs() * 3).long().clamp(1, 3)[0]),
    lambda x: Halved.apply(x * 3),
    lambda x: torch.autograd.grad(Clip.apply(x).square().sum(), x, create_graph=True)[0],
    lambda x: checkpoint(lambda y: Clip.apply(y * 2).sin(), x, use_reentrant=False),
    clipped_twice, dropped_thrice, result_not_used, clipped_step,
]  # fmt: skip
UNDER_FUNC = [
    grad(loss), inner_steps, pulled_back, grad(size_of_data), twice, decides_after, noted,
    lambda w, x: (lambda g, v: g * v)(*grad_and_value(loss)(w, x)),
    lambda w, x: jvp(lambda a: loss(a, x), (w,), (x,))[1] * w,
    lambda w, x: jacrev(lambda a: a * x if x.sum() > 0 else a + x)(w).sum(0),
    lambda w, x: vmap(lambda a: a * 2 if x.sum() > 0 else a * 3)(w),
]  # fmt: skip


def test_functions_that_are_recorded_apart_decide():
    for program, n in [*((f, 1) for f in FUNCTIONS), *((f, 2) for f in UNDER_FUNC)]:
        compiled = thunder.jit(program, max_paths=64)
        for i in range(10):
            gradients = []
            for f in (program, compiled):
                torch.manual_seed(i)
                random.seed(i)
                SEEN.clear()
                first, *others = (torch.randn(4) * (0.2 if i % 2 else 2) for _ in range(n))
                gradients.append((outcome(f, (first.requires_grad_(), *others)), list(SEEN)))
            assert_same(gradients[1], gradients[0], rtol=1e-5)
        assert len(compiled.programs) <= 20


class BackwardDecides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g / g.norm() if g.norm() > 1 else g


def test_a_backward_that_decides_is_refused():
    """No other path can be taken any more when it runs."""
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError, match="a branch depends on") as raised:
        thunder.jit(BackwardDecides.apply)(x)
    assert raised.value.location[0] == __file__
    compiled = thunder.jit(BackwardDecides.apply, fallback="eager")
    with pytest.warns(FallbackWarning):
        results = [f(x) for f in (compiled, BackwardDecides.apply)]
    assert_same(*(torch.autograd.grad(y.sum(), x) for y in results))


def test_of_mapped_values_nothing_is_decided():
    """PyTorch's own vmap raises."""
    with pytest.raises(CaptureError, match="which is not known at capture"):
        thunder.jit(vmap(lambda v: v * 2 if v.sum() > 0 else v))(torch.ones(3, 2))


def add_to_head(x, n):
    y, i = x * 1, np.argmax(n.numpy())
    y[i] = 0
    y[:i] += 1
    return y


def ragged(x, n):
    ends = np.cumsum(n.numpy())
    return [x[a:b].sum(0) for a, b in itertools.pairwise(ends)], x[: ends[-1]].sum(), x[[ends[0], 0]]


def of_a_list(x, n):
    i, parts = np.argmax(n.numpy()), [x[0], x[1], x[2], x[3]]
    return parts[i], sum(parts[: i + 1])


def a_range(x, n):
    return sum(x[i] * i for i in range(np.max(n.numpy()) + 1))


def in_a_checkpoint(x, n):
    return checkpoint(lambda y: y[np.argsort(y.detach().numpy()[:, 0])] * 2, x * 1.5, use_reentrant=False)


@pytest.mark.parametrize(
    "program", [add_to_head, ragged, of_a_list, a_range, in_a_checkpoint], ids=lambda f: f.__name__
)
def test_numbers_of_numpys_index(program):
    compiled = thunder.jit(program)
    for i in range(8):
        g = torch.Generator().manual_seed(i)
        x, n = torch.randn(9, 4, generator=g), torch.randint(0, 3, (4,), generator=g)
        gradients = []
        for f in (program, compiled):
            torch.manual_seed(i)
            random.seed(i)
            gradients.append(outcome(f, (x.clone().requires_grad_(), n)))
        assert_same(gradients[1], gradients[0], rtol=1e-5)
    assert len(compiled.programs) <= 4
