"""Hooks that a program registers on tensors: they run when the backward does, as in eager PyTorch."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

import thunder
from thunder.errors import CaptureError, FallbackWarning

SEEN: list = []


class Config:
    limit, seen = 0.5, None


CONFIG = Config()


def scaled(g, by):
    return g * by


def closure(x, w):
    y = x * w
    y.register_hook(lambda g: g * w.detach())
    return (y * y).sum()


def used_before(x, w):
    y = x * w
    z = y * 3
    y.register_hook(lambda g: g.clamp(max=1.0))
    return (z + y).sum()


def several(x, w):
    y = (x * w).exp()
    y.register_hook(lambda g: g + 1)
    y.register_hook(lambda g: g * 2)
    return y.sum()


def keeps(x, w):
    y = x @ w
    y.register_hook(lambda g: SEEN.append(g.sum().item()))
    return y.tanh().sum()


def reads_later(x, w):
    y = x * w
    y.register_hook(lambda g: g * CONFIG.limit)
    return y.sum()


def branches(x, w):
    y = x * w
    y.register_hook(lambda g: g * 2 if g.norm() > 3 else None)
    return (y * y).sum()


def partial(x, w):
    y = x * w
    y.register_hook(functools.partial(scaled, by=0.25))
    return y.sum()


def method_of_a_list(x, w):
    y = x * w
    y.register_hook(SEEN.append)
    return y.sum()


def in_a_view(x, w):
    y = (x * w)[0]
    y.register_hook(lambda g: g * 3)
    return y.sum() + x.sum()


def returned(x, w):
    y = x * w
    y.register_hook(lambda g: g * 3)
    return y, (y * 2).sum()


def inside(x, w):
    y = x * w
    order = []
    y.register_hook(lambda g: order.append(g.sum().item()))
    z = y * y
    z.register_hook(lambda g: order.append(g.numel()))
    z.register_hook(lambda g: g * 2)
    z.sum().backward()
    return order


def retained(x, w):
    y = x * w
    y.retain_grad()
    y.register_hook(lambda g: g * 2)
    (y * y).sum().backward()
    return y.grad


def wanted(x, w):
    y = x * w
    y.register_hook(lambda g: g * 2)
    (g,) = torch.autograd.grad((y * y).sum(), y)
    return g


def removed(x, w):
    y = x * w
    handle = y.register_hook(lambda g: g * 10)
    handle.remove()
    handle.remove()
    with y.register_hook(lambda g: g + 3):
        return (y * y).sum()


def removed_of_several(x, w):
    y = x * w
    handles = [y.register_hook(lambda g, n=n: g * n + n) for n in range(1, 5)]
    for n in (1, 0, 3):
        handles[n].remove()
    y.register_hook(lambda g: g - 5)
    return (y * y).sum()


def removed_before_a_backward(x, w):
    y = x * w
    y.register_hook(lambda g: g * 10).remove()
    (y * y).sum().backward()
    return x.grad + 1


def leaves(result):
    return [result] if isinstance(result, torch.Tensor) else list(result) if isinstance(result, tuple) else []


def outcome(f, seed, change=None):
    torch.manual_seed(seed)
    SEEN.clear()
    CONFIG.limit = 0.5
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    result = f(x, w)
    if change is not None:
        change()
    if total := [r.sum() for r in leaves(result) if r.requires_grad]:
        sum(total).backward()
    values = [r.detach() for r in leaves(result)] or result
    return values, x.grad, w.grad, list(SEEN)


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


PROGRAMS = [
    closure,
    used_before,
    several,
    keeps,
    branches,
    partial,
    method_of_a_list,
    in_a_view,
    returned,
    inside,
    retained,
    wanted,
    removed,
    removed_of_several,
    removed_before_a_backward,
]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_hooks_run_in_the_backward(f):
    compiled = thunder.jit(f, fallback="error")
    for seed in range(3):
        same(outcome(compiled, seed), outcome(f, seed))
    assert thunder.cache_misses(compiled) == 1


def test_a_hook_sees_what_is_there_when_the_backward_runs():
    def change():
        CONFIG.limit = 4.0

    compiled = thunder.jit(reads_later, fallback="error")
    same(outcome(compiled, 0, change), outcome(reads_later, 0, change))


def test_the_hook_is_read_in_the_programs():
    compiled = thunder.jit(keeps)
    compiled(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)).backward()
    assert "call_hook" in str(thunder.last_backward_traces(compiled)[-1])


def test_a_layers_intermediate():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norms = nn.Linear(4, 4), nn.Linear(4, 2), []

        def forward(self, x):
            h = self.a(x).relu()
            if h.requires_grad:
                h.register_hook(lambda g: self.norms.append(g.norm().item()))
            return self.b(h).sum()

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(3, 4)
    model(x).backward()
    compiled = thunder.jit(model, fallback="error")
    compiled(x).backward()
    assert model.norms[0] == model.norms[1] and len(model.norms) == 2
    with torch.no_grad():
        compiled(x)
    assert len(model.norms) == 2


def remembers_inside(x, w):
    results = []
    y = x * w
    y.register_hook(results.append)
    return y.sum(), results


def assigns(x, w):
    last = None

    def hook(g):
        nonlocal last
        last = g

    y = x * w
    y.register_hook(hook)
    return y.sum()


@pytest.mark.parametrize("f", [remembers_inside, assigns], ids=lambda f: f.__name__)
def test_what_no_program_can_hold_is_refused(f):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CaptureError):
        thunder.jit(f, fallback="error")(x, x)


def test_errors_are_pytorchs():
    for name in ("register_hook", "retain_grad"):

        def f(x, name=name):
            getattr(x * 2, name)(*([abs] if name == "register_hook" else []))

        with pytest.raises(RuntimeError) as ours:
            thunder.jit(f)(torch.ones(2))
        with pytest.raises(RuntimeError) as pytorchs:
            f(torch.ones(2))
        assert str(ours.value).split(":")[0] == str(pytorchs.value).split(":")[0]

    def changes_shape(x):
        y = x * 2
        y.register_hook(lambda g: g[0])
        return y.sum()

    with pytest.raises(RuntimeError, match="has changed the size"):
        thunder.jit(changes_shape)(torch.ones(2, requires_grad=True)).backward()


class Appends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        SEEN.append("backward")
        return g * 3


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        CONFIG.seen = (CONFIG.seen or 0) + 1
        return g * 3


@pytest.mark.parametrize("function", [Appends, Counts], ids=lambda f: f.__name__)
def test_effects_of_a_functions_backward_happen_in_the_backward(function):
    def program(x):
        SEEN.append("forward")
        return function.apply(x).sum()

    def run(f):
        SEEN.clear()
        CONFIG.seen = None
        y = f(torch.ones(2, requires_grad=True))
        states = [(list(SEEN), CONFIG.seen)]
        y.backward()
        return [*states, (list(SEEN), CONFIG.seen)]

    compiled = thunder.jit(program, fallback="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert run(compiled) == run(program)
        assert run(compiled) == run(program)
    with pytest.raises(CaptureError, match="writes to the outside"):
        thunder.jit(program, fallback="error")(torch.ones(2, requires_grad=True))


class Scaled(torch.autograd.Function):
    """Its forward looks at the first number of a list, its backward at all."""

    @staticmethod
    def forward(ctx, x, numbers):
        ctx.numbers = numbers
        return x * numbers[0]

    @staticmethod
    def backward(ctx, g):
        return g * sum(ctx.numbers), None


def test_a_functions_backward_may_read_a_list_further_than_its_forward():
    x, numbers = torch.ones(2, requires_grad=True), [1, 2, 3]
    thunder.jit(lambda x, numbers: Scaled.apply(x, numbers).sum(), fallback="error")(x, numbers).backward()
    assert x.grad.tolist() == [6.0, 6.0]


def two_of_one_call(x, w):
    hidden = x * w
    return hidden, (hidden * hidden).sum(), (x * 3).sum()


@pytest.mark.parametrize("look", [torch.Tensor.retain_grad, lambda h: h.register_hook(lambda g: None)])
def test_a_gradient_between_results_is_refused_where_somebody_looks_at_it(look):
    """Results of one call have one node: what the loss adds to the gradient of a result is inside of it."""
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 2.0, requires_grad=True)
    compiled = thunder.jit(two_of_one_call)
    hidden, loss, other = compiled(x, w)
    look(hidden)
    with pytest.raises(RuntimeError, match=r"result 0 .*inside of the function"):
        loss.backward()

    hidden, loss, other = compiled(x, w)
    look(hidden)
    (other + hidden.sum()).backward()  # all of its gradient comes from outside
    assert x.grad.tolist() == [5.0, 5.0] and (not hidden.retains_grad or hidden.grad.tolist() == [1.0, 1.0])

    x.grad = None
    compiled(x, w)[1].backward()
    assert x.grad.tolist() == [8.0, 8.0]


def test_a_module_without_the_init_of_modules_raises_as_eager():
    class Bare(torch.nn.Module):
        def __init__(self):
            pass

    def f(x):
        try:
            return Bare()(x)
        except Exception as error:  # noqa: BLE001  which one is the question
            return type(error).__name__

    assert thunder.jit(f)(torch.ones(1)) == f(torch.ones(1)) == "AttributeError"
