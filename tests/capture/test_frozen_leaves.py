"""Leaves from outside that a program freezes and thaws: `requires_grad_(False)` and `requires_grad_(True)`."""

import copy

import pytest
import torch
from torch import nn

import thunder
from thunder.errors import CaptureError

PROGRAMS = []


def program(f):
    PROGRAMS.append(f)
    return f


@program
def gradients_accumulate(m, o, x):
    m(x).sum().backward()
    m.requires_grad_(False)
    y = m(x)
    m.requires_grad_(True)
    loss = m(x * 2).square().sum()
    loss.backward()
    return y, loss


@program
def frozen_ones_are_written(m, o, x):
    m.requires_grad_(False)
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(0.5)
    y = m(x.detach())
    m.requires_grad_(True)
    loss = m(x * 2).square().sum()
    loss.backward()
    return y, loss


@program
def a_step_of_frozen_ones(m, o, x):
    m(x).sum().backward()
    m.requires_grad_(False)
    o.step()
    y = m(x.detach())
    m.requires_grad_(True)
    m(x).square().sum().backward()
    o.step()
    return y


@program
def attributes(m, o, x):
    for p in m.parameters():
        p.requires_grad = False
    flags = [p.requires_grad for p in m.parameters()]
    loss = (m(x) * x.sum()).sum()
    for p in m.parameters():
        p.requires_grad = True
    return loss, str(flags + [p.requires_grad for p in m.parameters()] + [p.is_leaf for p in m.parameters()])


@program
def casts_of_autocast(m, o, x):
    with torch.autocast("cpu", torch.bfloat16):
        a = m(x)
        m.requires_grad_(False)
        b = m(x)
        m.requires_grad_(True)
        c = m(x)
    (a.sum() + c.sum()).backward()
    return b, a.detach()


@program
def gradients_of_frozen_ones(m, o, x):
    m.requires_grad_(False)
    try:
        gradients = torch.autograd.grad(m(x).sum() + x.sum(), list(m.parameters()))
    except RuntimeError as error:
        gradients = str(error)
    m.requires_grad_(True)
    return gradients


@program
def views(m, o, x):
    w = m[0].weight
    before = w.t()
    w.requires_grad_(False)
    after = w.t()
    flags = before.requires_grad, after.requires_grad
    w.requires_grad_(True)
    loss = (x @ before).sum() + (x @ after).square().sum()
    loss.backward()
    return loss, str(flags), w.grad.clone()


@program
def copies(m, o, x):
    m.requires_grad_(False)
    n = copy.deepcopy(m)
    flags = [p.requires_grad for p in n.parameters()]
    m.requires_grad_(True)
    return str(flags), n(x)


@program
def arguments(m, o, x):
    x.requires_grad_(False)
    y = m(x).sum()
    x.requires_grad_(True)
    z = m(x).sum()
    (y + z).backward()
    return y, z


@program
def in_turns(m, o, x):
    total = 0
    for _ in range(3):
        m.requires_grad_(False)
        loss = m(x).sum() * x.mean()
        m.requires_grad_(True)
        (m(x) * loss.detach()).sum().backward()
        o.step()
        o.zero_grad()
        total = total + loss.detach()
    return total


def steps(f, wrap):
    """What three steps give and leave, and the gradients of their results then."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    o, collected = torch.optim.Adam(m.parameters(), 1e-2), []
    step = wrap(lambda x: f(m, o, x))
    for i in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(i)).requires_grad_()
        results = step(x)
        results = list(results) if isinstance(results, tuple) else [results]
        grads = [None if p.grad is None else p.grad.clone() for p in (x, *m.parameters())]
        collected += [*results, *grads, *(p.requires_grad for p in m.parameters())]
        collected += [p.detach().clone() for p in m.parameters()]
        m.zero_grad()
    return collected


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_frozen_leaves(f):
    for ours, eagers in zip(steps(f, thunder.jit), steps(f, lambda f: f), strict=True):
        if isinstance(eagers, torch.Tensor):
            assert ours.requires_grad == eagers.requires_grad
            torch.testing.assert_close(ours, eagers, rtol=1e-6, atol=1e-7)
        else:
            assert ours == eagers


def written_as_data(w):
    w.requires_grad_(False)
    w.data.mul_(2)
    w.requires_grad_(True)
    return w * 2


def written_under_grad(w):
    w.requires_grad_(False)
    w.mul_(2)
    w.requires_grad_(True)
    return w * 2


def written_behind_a_view(w):
    view = w[:2]
    w.requires_grad_(False)
    with torch.no_grad():
        w.mul_(3)
    w.requires_grad_(True)
    return view.sum()


@pytest.mark.parametrize("f", [written_as_data, written_under_grad, written_behind_a_view])
def test_what_is_refused_runs_as_the_original(f):
    with pytest.raises(CaptureError, match="requires_grad_\\(False\\) holds"):
        thunder.jit(f)(torch.ones(3).requires_grad_())
    ours, eagers = (torch.ones(3).requires_grad_() for _ in range(2))
    with pytest.warns(thunder.errors.FallbackWarning):
        result = thunder.jit(f, fallback="eager")(ours)
    assert torch.equal(result, f(eagers)) and torch.equal(ours, eagers) and ours.requires_grad == eagers.requires_grad


def test_a_result_beside_a_backward_has_the_gradients_of_what_was_overwritten():
    """A parameter that was written to stays the leaf, for a backward inside and for one outside."""

    def f(w, x):
        with torch.no_grad():
            w.mul_(0.5)
        y = w * x
        (w * x * 2).square().sum().backward()
        return y

    for g in (f, thunder.jit(f)):
        w, x = torch.tensor([1.0, 2.0, 3.0]).requires_grad_(), torch.ones(3).requires_grad_()
        y = g(w, x)
        w.grad = x.grad = None
        y.sum().backward()
        assert torch.equal(w.grad, torch.ones(3)) and torch.equal(x.grad, torch.tensor([0.5, 1.0, 1.5]))


def left_frozen(w, x):
    w.requires_grad_(False)
    return w, w * x, w.view(-1)[1:]


def used_before(w, x):
    y = w * x
    w.requires_grad_(False)
    return y, w * x


def written_and_left(w, x):
    w.requires_grad_(False)
    with torch.no_grad():
        w.mul_(0.5)
    return w * x, w


def trained_and_left(w, x):
    (w * x).square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
    w.requires_grad = False
    return (w * x).sum()


def copied_and_left(w, x):
    other = copy.deepcopy(w).requires_grad_(False)
    dropped = copy.deepcopy(w).requires_grad_(False)
    return other, other * x + dropped


def in_turns_and_left(w, x):
    for _ in range(2):
        w.requires_grad_(False)
        y = w * x
        w.requires_grad_(True)
        z = w * x
        w.requires_grad_(False)
    return y, z


@pytest.mark.parametrize(
    "f", [left_frozen, used_before, written_and_left, trained_and_left, copied_and_left, in_turns_and_left]
)
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_leaves_stay_frozen_behind_the_call(f, kind):
    def seen(step):
        collected = []
        w, x = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.5, 1.0]).requires_grad_()
        w = nn.Parameter(w) if kind is nn.Parameter else w.requires_grad_()
        for i in range(4):
            results = step(w, x)
            results = results if isinstance(results, tuple) else (results,)
            collected += [r is w for r in results] + [r.requires_grad for r in results] + [w.requires_grad, w.is_leaf]
            for r in results:
                if r.requires_grad:
                    r.sum().backward(retain_graph=True)
            collected += [w.detach().clone(), w.grad, x.grad, *results]
            w.grad = x.grad = None
            w.requires_grad_(i > 0 or f not in (left_frozen, written_and_left))
        return collected

    compiled = thunder.jit(f)
    for ours, eagers in zip(seen(compiled), seen(f), strict=True):
        if isinstance(eagers, torch.Tensor):
            torch.testing.assert_close(ours, eagers, rtol=1e-6, atol=1e-7)
        else:
            assert ours == eagers
    assert len(compiled.programs) == 1 + (f in (left_frozen, written_and_left))  # a leaf with grad, one without
