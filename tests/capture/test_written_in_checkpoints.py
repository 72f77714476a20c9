"""Writes in checkpoints, which eager PyTorch's backward does once more: batch norm, counters in buffers. Such a
checkpoint is an eager call."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import thunder
from tests.capture.runs import refused, state
from thunder.errors import FallbackWarning


class Block(nn.Module):
    def __init__(self, momentum=0.1, dropout=0.0):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.norm(self.linear(x)).relu())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        self.seen += 1
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest * 0.9, x.abs().amax(0)))
        return self.linear(x).sin()


def x(requires_grad=True):
    return torch.randn(3, 4, requires_grad=requires_grad)


def outside(module, reentrant, calls=3):
    def run(jit):
        m = module()
        f, seen = jit(lambda x: checkpoint(m, x, use_reentrant=reentrant)), []
        for _ in range(calls):
            inputs = x()
            y = f(inputs)
            seen.append((y, state(m)))
            y.sum().backward()
            seen.append((inputs.grad, state(m)))
        return seen

    return run


def inside(module, reentrant):
    def run(jit):
        m = module()
        optimizer = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = checkpoint(m, x, use_reentrant=reentrant).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = jit(step)
        return [(step(x()), state(m)) for _ in range(3)]

    return run


WRITES = "writes to tensors, numbers or containers"
MODULES = {
    "batch norm": Block,
    "batch norm with dropout": lambda: Block(dropout=0.5),
    "two blocks": lambda: nn.Sequential(Block(), Block()),
    "the same block twice": lambda: nn.Sequential(*[Block()] * 2),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()
    ),
    "buffers": Counting,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", [outside, inside])
@pytest.mark.parametrize("module", MODULES)
def test_the_backward_writes_again(module, where, reentrant):
    refused(where(MODULES[module], reentrant), WRITES)


def several_checkpoints(jit):
    m = nn.Sequential(*(Block() for _ in range(4)))
    f, seen = jit(lambda x: checkpoint_sequential(m, 2, x, use_reentrant=False)), []
    for _ in range(3):
        f(x()).sum().backward()
        seen.append(state(m))
    return seen


def two_forwards_first(jit):
    m = Block()
    f = jit(lambda x: checkpoint(m, x, use_reentrant=False))
    (f(x()).sum() + f(x()).sum()).backward()
    return [state(m)]


def two_backwards(jit):
    m = Block()
    f = jit(lambda x: checkpoint(m, x, use_reentrant=False).sum())
    y, seen = f(x()), []
    for retain_graph in (True, False):
        y.backward(retain_graph=retain_graph)
        seen.append(state(m))
    return seen


def no_backward(jit):
    m = Block()
    f = jit(lambda x: checkpoint(m, x, use_reentrant=False))
    return [(f(x()), state(m)) for _ in range(3)]


def a_part_of_the_results(jit):
    m = Block()

    def two(x):
        y = m(x)
        return y * y, y.exp()

    def f(x):
        a, b = checkpoint(two, x, use_reentrant=False)
        return a.sum() + 1, b

    f, seen = jit(f), []
    for i in range(3):
        inputs = x()
        f(inputs)[i % 2].sum().backward()
        seen.append((inputs.grad, state(m)))
    return seen


def used_behind_it(jit):
    """The same batch norm runs once more, outside of the checkpoint."""
    m = Block()

    def f(x):
        return m(checkpoint(m, x, use_reentrant=False))

    f, seen = jit(f), []
    for _ in range(3):
        f(x()).sum().backward()
        seen.append(state(m))
    return seen


def beside_assigned_data(jit):
    """The data of a parameter are set before the checkpoint, and clamped."""
    m, last = Block(), nn.Linear(4, 2)

    def step(x):
        last.weight.data = last.weight.data * 0.9
        last.bias.data.clamp_(-0.1, 0.1)
        return last(checkpoint(m, x, use_reentrant=False))

    f, seen = jit(step), []
    for _ in range(3):
        f(x()).sum().backward()
        seen.append((state(m), state(last), [p.grad.clone() for p in (*m.parameters(), *last.parameters())]))
    return seen


def gradients_of_some(jit):
    """The backward of the checkpoint does not run for what comes behind it."""
    m, w = Block(), nn.Parameter(torch.ones(4))
    f, seen = jit(lambda x: (checkpoint(m, x, use_reentrant=False) * w).sum()), []
    for wanted in ([w], [m.linear.weight], [w, m.norm.bias]):
        seen.append((torch.autograd.grad(f(x()), wanted), state(m)))
        f(x()).backward(inputs=wanted)
        seen.append(state(m))
    return seen


def gradients_of_some_inside(jit):
    m, w = Block(), nn.Parameter(torch.ones(4))

    def f(x, wanted):
        return torch.autograd.grad((checkpoint(m, x, use_reentrant=False) * w).sum(), wanted)

    f = jit(f)
    return [(f(x(), wanted), state(m)) for wanted in ([w], [m.linear.weight], [w, m.norm.bias])]


RUNS = [
    several_checkpoints, two_forwards_first, two_backwards, no_backward, a_part_of_the_results, used_behind_it,
    gradients_of_some, gradients_of_some_inside, beside_assigned_data,
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_runs(run):
    refused(run, WRITES)


class CountsInPython(Block):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class Appends(Block):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return super().forward(x)


class Scaled(nn.Module):
    """What it writes goes into its result, which is another one the second time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5)
        return (self.linear(x) * self.scale).sin()


class CountsLast(Block):
    """Eager PyTorch's second run stops before it."""

    def forward(self, x):
        y = super().forward(x)
        self.norm.num_batches_tracked.add_(10)
        return y


class Keeps(Block):
    def forward(self, x):
        self.hidden = self.linear(x)
        return self.norm(self.hidden).relu()


def nested(jit):
    m = Block()

    def inner(x):
        return checkpoint(m, x, use_reentrant=False)

    f, seen = jit(lambda x: checkpoint(inner, x, use_reentrant=False)), []
    f(x()).sum().backward()
    return [*seen, state(m)]


def a_value_inside(jit):
    m = Keeps()

    def f(x):
        return checkpoint(m, x, use_reentrant=False) + m.hidden

    f, seen = jit(f), []
    for _ in range(2):
        f(x()).sum().backward()
        seen.append(state(m))
    return seen


def used_before_it(jit):
    m = Block()

    def f(x):
        return checkpoint(m, m(x), use_reentrant=False)

    f(x()).sum().backward()
    f = jit(f)
    f(x()).sum().backward()
    return [state(m)]


@pytest.mark.parametrize(
    "run",
    [
        outside(CountsInPython, False),
        outside(Appends, False),
        outside(Scaled, False),
        outside(CountsLast, False),
        outside(CountsLast, True),
        nested,
        a_value_inside,
        used_before_it,
    ],
    ids=["counts", "list", "scale", "last", "last, reentrant", "nested", "kept", "before"],
)
def test_other_effects_happen_again(run):
    refused(run, WRITES)


def test_the_checkpoint_alone_is_called_as_it_is():
    m, head = Block(), nn.Linear(4, 2)
    compiled = thunder.jit(lambda x: head(checkpoint(m, x.sin(), use_reentrant=False)).exp(), fallback="eager")
    with pytest.warns(FallbackWarning, match=r"checkpoint\(\) runs as it is"):
        compiled(x())
    names = [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols]
    assert [n for n in names if n in ("sin", "linear", "eager_call", "exp")] == ["sin", "eager_call", "linear", "exp"]
