"""Looking into programs while they run."""

import inspect
import sys

import torch
from torch import nn

import thunder
from thunder.transforms.debug import DebugTransform

X = torch.linspace(-1, 1, 4)


def test_debug_print_prints_at_every_run(capsys):
    def program(x, n):
        y = thunder.debug_print(x * 2) + 1
        thunder.debug_print({"y": [y], "n": n})
        return y.sum()

    compiled = thunder.jit(program)
    first = inspect.getsourcelines(program)[1]
    for x in (X, X + 1):
        assert torch.equal(compiled(x, 3), (x * 2 + 1).sum())
        assert (
            capsys.readouterr().out
            == f"{__file__}:{first + 1}: t0 = {x * 2}\n{__file__}:{first + 2}: {{'y': [y], 'n': 3}} = {{'y': "
            f"[{x * 2 + 1!r}], 'n': 3}}\n"
        )
    assert thunder.cache_misses(compiled) == 1 and thunder.last_sharp_edges(compiled) == []
    assert f"\n  debug_print(t0, 't0', '{__file__}:{first + 1}')\n" in str(thunder.last_traces(compiled)[-1])


def test_debug_print_passes_the_value_and_its_gradient_through(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return thunder.debug_print(self.linear(x)).exp().sum()

    model = Model()
    compiled = thunder.jit(model)
    compiled(X).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    printed = capsys.readouterr().out
    model(X).backward()
    assert all(torch.equal(gradients[n], p.grad) for n, p in model.named_parameters())
    eager = capsys.readouterr().out
    assert printed.count("\n") == eager.count("\n") == 1 and "= tensor([" in printed and "grad_fn" in eager
    assert printed.split(":")[:2] == eager.split(":")[:2]


def test_debug_print_prints_gradients_at_every_backward(capsys):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return thunder.debug_print(gradient) * 2

    def program(x):
        y = Twice.apply(x)
        y.register_hook(thunder.debug_print)
        return y.exp().sum()

    x, compiled = torch.zeros(2, requires_grad=True), thunder.jit(program)
    for _ in range(2):
        compiled(x).backward()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.endswith("= tensor([1., 1.])") for line in lines)
    assert thunder.cache_misses(compiled) == 1 and torch.equal(x.grad, torch.full((2,), 4.0))


def test_debug_print_sees_what_was_written_so_far(capsys):
    def program(x):
        thunder.debug_print(x)
        x.add_(1)
        thunder.debug_print(x)

    thunder.jit(program)(torch.zeros(2))
    assert [line.rpartition("= ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "tensor([0., 0.])",
        "tensor([1., 1.])",
    ]


def test_a_breakpoint_is_a_line_of_the_program(monkeypatch):
    seen = []

    def stop(*args, **kwargs):
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, {n: v for n, v in frame.f_locals.items() if isinstance(v, torch.Tensor)}))

    def program(x):
        y = x * 2
        breakpoint()
        return y + 1

    monkeypatch.setattr(sys, "breakpointhook", stop)
    compiled = thunder.jit(program)
    assert seen == []
    for i in (1, 2):
        assert torch.equal(compiled(X), X * 2 + 1)
        assert len(seen) == i and seen[-1][0] == "computation" and torch.equal(seen[-1][1]["y"], X * 2)
    assert "\n  breakpoint()\n" in str(thunder.last_traces(compiled)[-1])


def test_debug_transform():
    calls = []

    def before(line, *args, **kwargs):
        calls.append((line.sym.name, len(args)))
        return f"{line.sym.name} of {[tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]}"

    def after(line, output, *args, **kwargs):
        return f"gave {tuple(output.shape)}"

    compiled = thunder.jit(lambda x: (x * 2).sum(), transforms=[DebugTransform(before, after)])
    assert torch.equal(compiled(X), (X * 2).sum())
    printed = str(thunder.last_traces(compiled)[-1])
    assert (
        "  # mul of [(4,), ()]\n  debug_pre_mul(x, float32_2)\n  t0 = torch.mul(x, float32_2)" in printed
        and "  # gave (4,)\n  debug_post_mul(t0, x, float32_2)\n" in printed
    )
    assert [name for name, _ in calls] == ["mul", "sum"]
    trained = thunder.add_transform(
        thunder.jit(lambda x: x.sin().sum()),
        transform=DebugTransform(lambda line, *a, **k: calls.append(line.sym.name)),
    )
    x = X.clone().requires_grad_()
    calls.clear()
    trained(x).backward()
    assert torch.equal(x.grad, X.cos()) and "sin" in calls and "cos" in calls
