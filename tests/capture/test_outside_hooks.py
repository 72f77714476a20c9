"""Hooks of leaves and arguments: those that a backward inside of a program finds, and those that a program registers,
for which the original runs."""

import pytest
import torch
from torch import nn

from tests.capture.runs import refused, same_as_eager, state


def x():
    return torch.randn(3, 4)


def parameter():
    return nn.Parameter(torch.randn(4))


def inside(jit):
    w = parameter()

    def step(x):
        handle = w.register_hook(lambda g: g * 2)
        w.register_hook(lambda g: None)
        with w.register_hook(lambda g: g + 1):
            (x * w).sum().backward()
        handle.remove()
        (x * w).sum().backward()
        return w.grad.clone()

    step = jit(step)
    return [step(x()) for _ in range(3)]


def outside(jit):
    """They stay, one more with each call."""
    w = parameter()

    def f(x, by):
        w.register_hook(lambda g: g * by + x.mean())
        return (x * w).sum()

    f, seen = jit(f), []
    for i in range(3):
        f(x(), i + 1).backward()
        seen.append(w.grad.clone())
        w.grad = None
    return seen


def handles(jit):
    w, saved = parameter(), {}

    def f(x):
        saved["first"] = w.register_hook(lambda g: g + 1)
        gone = w.register_hook(lambda g: g * 100)
        second = w.register_hook(lambda g: g * 3)
        gone.remove()
        return (x * w).sum(), second

    f, seen = jit(f), []
    for i in range(3):
        y, second = f(x())
        if i == 1:
            second.remove()
        y.backward()
        seen.append(w.grad.clone())
        w.grad = None
        saved["first"].remove()
        second.remove()
    return seen


def a_list_of_the_program(jit):
    w = parameter()

    def f(x):
        seen = []
        w.register_hook(seen.append)
        w.register_hook(lambda g: seen.append(len(seen)))
        return (x * w).sum(), seen

    f, gradients = jit(f), []
    for _ in range(2):
        y, seen = f(x())
        y.backward()
        gradients.append((len(seen), seen[0], seen[1], w.grad.clone()))
        w._backward_hooks.clear()
    return gradients


def arguments(jit):
    """Tensors of the graph outside."""

    def f(x):
        x.retain_grad()
        x.register_hook(lambda g: g * 2)
        return (x * x).sum()

    f, seen = jit(f), []
    for _ in range(3):
        w = torch.randn(4, requires_grad=True)
        h = w * 2
        (f(h) + h.sum()).backward()
        seen.append((w.grad, h.grad))
    return seen


def registered_before(jit):
    w, factor = parameter(), [2.0]
    w.register_hook(lambda g: g * factor[0])

    def step(x):
        (x * w).sum().backward()
        return torch.autograd.grad((w * w).sum(), [w])

    step, seen = jit(step), []
    for i in range(4):
        factor[0] = 2.0 + i // 2
        seen.append((step(x()), w.grad.clone()))
    w.register_hook(lambda g: g + 1)
    return [*seen, step(x()), w.grad]


def after_accumulation(jit):
    w, seen = parameter(), []

    def step(x):
        handle = w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
        (x * w).sum().backward()
        handle.remove()

    step = jit(step)
    for _ in range(3):
        step(x())
    return [torch.stack(seen), w.grad]


def optimizers_in_backward(jit):
    """An optimizer for each parameter, which frees the gradient."""
    m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in m.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x):
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    step = jit(step)
    return [(step(x()), state(m)) for _ in range(3)]


def registered_by_the_first_call(jit):
    m = nn.Linear(4, 4)
    m.ready = False

    def update(p):
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    def step(x):
        if not m.ready:
            for p in m.parameters():
                p.register_post_accumulate_grad_hook(update)
            m.ready = True
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    step = jit(step)
    return [(step(x()), state(m)) for _ in range(3)]


def leaves_of_the_program(jit):
    def f(x):
        w = torch.ones(4, requires_grad=True)
        w.register_hook(lambda g: g * 3)
        (x * w).sum().backward()
        other = torch.ones(4, requires_grad=True)
        other.register_hook(lambda g: g * 5)
        return w.grad, other

    f, seen = jit(f), []
    for _ in range(2):
        g, other = f(x())
        (other * 2).sum().backward()
        seen.append((g, other.grad))
    return seen


def clipped(jit):
    m = nn.Linear(4, 4)

    def step(x):
        handles = [p.register_hook(lambda g: g.clamp(-0.1, 0.1)) for p in m.parameters()]
        m(x).pow(2).sum().backward()
        for handle in handles:
            handle.remove()

    step = jit(step)
    return [(step(x()), state(m)) for _ in range(3)]


def retained_results(jit):
    """What comes through other results counts, too."""
    m, saved = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), {}

    def f(x):
        saved["hidden"] = hidden = m[1](m[0](x))
        hidden.retain_grad()
        scores = m[2](hidden)
        scores.retain_grad()
        return hidden, scores, (hidden * hidden).sum()

    f, seen = jit(f), []
    for wanted in (lambda h, s, y: s.sum(), lambda h, s, y: h.sum() + y, lambda h, s, y: h.exp().sum() + s.mean() + y):
        hidden, scores, y = f(x())
        loss = wanted(hidden, scores, y)
        loss.backward(retain_graph=True)
        seen.append((hidden.grad.clone(), None if scores.grad is None else scores.grad.clone(), state(m)))
        loss.backward()
        seen.append((hidden.grad, saved["hidden"] is hidden, hidden.retains_grad, state(m)))
    return seen


def retained_and_forgotten(jit):
    w = parameter()

    def f(x):
        hidden = x * w
        hidden.retain_grad()
        return (hidden * hidden).sum(), hidden.exp()

    f, seen = jit(f), []
    for _ in range(2):
        y, _ = f(x())
        y.backward()
        seen.append(w.grad.clone())
    return seen


def errors(jit):
    w, v = torch.ones(2), parameter()

    def f(x):
        said = []
        for register in (
            lambda: w.register_hook(print),
            lambda: w.register_post_accumulate_grad_hook(print),
            lambda: (x * v).register_post_accumulate_grad_hook(print),
            (x * 2).retain_grad,
        ):
            try:
                register()
            except RuntimeError as error:
                said.append(str(error)[:40])
        return said

    return [jit(f)(x())]


@pytest.mark.parametrize(
    "run",
    [registered_before, optimizers_in_backward, retained_and_forgotten],
    ids=lambda run: run.__name__,
)
def test_hooks(run):
    same_as_eager(run)


REFUSED = [
    inside, outside, handles, a_list_of_the_program, arguments, after_accumulation, registered_by_the_first_call,
    leaves_of_the_program, clipped, errors,
]  # fmt: skip


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_a_program_that_registers_them_is_refused(run):
    refused(run, "is registered on a tensor from outside")


def test_a_result_that_retains_its_gradient_is_refused():
    refused(retained_results, "retain_grad of a tensor that it returns or stores")


def registered_in_a_function(jit):
    """Called by itself, it would be given what stands for the tensor."""

    def register(y):
        y.register_hook(lambda g: g * 10)
        return y * 2

    def f(x):
        return (register(x) + x * 3).sum()

    f = jit(f)
    h = (w := torch.ones(3, requires_grad=True)) * 1
    f(h).backward()
    return [w.grad]


def test_the_hook_gets_the_whole_gradient():
    refused(registered_in_a_function, "is registered on a tensor from outside")


def one_object_for_all(jit):
    """The list shows in which order PyTorch's engine reaches leaves."""
    m, seen = nn.Linear(4, 4), []
    for i, p in enumerate(m.parameters()):
        p.register_hook(lambda g, i=i: seen.append(i))

    def step(x):
        m(x).sum().backward()

    jit(step)(x())
    return seen


def test_an_order_that_shows_is_refused():
    refused(one_object_for_all, "their order is not known")
