"""Backwards of compiled functions that are differentiated themselves: create_graph=True."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import thunder
from thunder.executors.cpp_fuser import cpp_fuser
from thunder.kernels import cpp

D = torch.float64


def leaf(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


PROGRAMS = [
    lambda x, w: torch.tanh(x @ w).sum(1), lambda x, w: F.gelu(x @ w), lambda x, w: F.layer_norm(x, (3,), w[0], w[1]),
        lambda x, w: (x @ w).softmax(-1).log(),
    lambda x, w: x * 1.0 + w.sum(), lambda x, w: (x[1:] * 2, w.exp().mean(0)),
        lambda x, w: torch.where(x > 0, x, x * x) @ w, lambda x, w: F.silu(x) * w[:, [2, 0, 1]],
    lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], (x * w)[None, None], is_causal=True),
    lambda x, w: F.group_norm(x[None, :, :, None], 1, w[0], w[1]),
        lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
    lambda x, w: F.conv1d(x[None], w[None]), lambda x, w: torch.cat([x.cumsum(0), w.prod(1, keepdim=True) + x]),
        lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 2, 1])),
    lambda x, w: torch.linalg.solve(x @ x.T + 3 * torch.eye(3, dtype=D), w), lambda x, w: F.mish(x) + F.hardsigmoid(w),
        lambda x, w: x.norm(dim=1) * w.var(),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_first_and_second_derivatives_are_numerically_right(program):
    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    compiled = thunder.jit(program)
    assert gradcheck(compiled, (x, w))
    assert gradgradcheck(compiled, (x, w))


def nth(f, x, n):
    y = f(x).sum()
    for _ in range(n):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.sum()
    return y


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.sin(x) * x.exp(),
        lambda x: F.gelu(x) ** 3,
        lambda x: torch.softmax(x, 0) * x,
        lambda x: torch.sinc(x),
    ],
)
def test_derivatives_of_higher_order(program):
    x = leaf(4)
    compiled = thunder.jit(program)
    for n in range(5):
        torch.testing.assert_close(nth(compiled, x, n), nth(program, x, n), rtol=1e-9, atol=1e-9)


def test_higher_derivatives_of_norms_are_right():
    """PyTorch's own third derivative of F.layer_norm takes the saved deviation for a constant: the formula is the
    reference."""
    x = leaf(4)
    compiled = thunder.jit(lambda x: F.layer_norm(x, (4,)) ** 3)

    def formula(x):
        return ((x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-5)) ** 3

    for n in range(5):
        torch.testing.assert_close(nth(compiled, x, n), nth(formula, x, n), rtol=1e-7, atol=1e-7)


def penalized(model, critic, x):
    """A training step with a gradient penalty: the gradients of all parameters."""
    x = x.clone().requires_grad_()
    out = critic(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = ((g.norm(2, dim=1) - 1) ** 2).mean() + out.mean()
    model.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradient_penalty_equals_eager(p):
    """With dropout the forward is run again, and draws the same numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(p), nn.Linear(8, 1)).double()
    x, compiled = leaf(5, 4).detach(), thunder.jit(model)
    for seed in range(2):
        torch.manual_seed(seed)
        wanted = penalized(model, model, x)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        actual = penalized(model, compiled, x)
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)
        assert torch.equal(torch.get_rng_state(), state)


def test_step_through_a_step():
    """MAML: the loss after a gradient step, differentiated with respect to the parameters before it."""
    w, x = leaf(3, 3), leaf(5, 3, seed=1).detach()

    def loss(w):
        return (torch.tanh(x @ w) ** 2).mean()

    compiled = thunder.jit(loss)

    def after(f):
        inner = w
        for _ in range(2):
            (g,) = torch.autograd.grad(f(inner), inner, create_graph=True)
            inner = inner - 0.1 * g
        return torch.autograd.grad(f(inner), w)[0]

    torch.testing.assert_close(after(compiled), after(loss), rtol=1e-10, atol=1e-12)


def test_hessian_vector_product():
    x, v = leaf(4), leaf(4, seed=1).detach()

    def f(x):
        return (torch.sin(x) * x.flip(0)).sum()

    _, wanted = torch.autograd.functional.hvp(f, x, v)
    _, products = torch.autograd.functional.hvp(thunder.jit(f), x, v)
    torch.testing.assert_close(products, wanted)


def test_outputs_that_play_no_part():
    x = leaf(3)
    compiled = thunder.jit(lambda x: (x**3, torch.exp(x)))
    (g,) = torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 6 * x.detach())


def test_an_input_that_was_written_to_is_an_error():
    x = leaf(3)
    for program in (lambda x: x**3, lambda x: torch.sigmoid(x)):  # one saves its input, the other only its result
        y = thunder.jit(program)(x)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(
            RuntimeError,
            match="one of the variables needed for gradient computation has been modified by an inplace operation",
        ):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_without_create_graph_what_was_written_to_does_not_matter():
    x = leaf(3)
    y = thunder.jit(torch.sigmoid)(x)
    wanted = (torch.sigmoid(x) * (1 - torch.sigmoid(x))).detach()
    with torch.no_grad():
        x.add_(1)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_a_generator_of_the_users_is_an_error():
    x, generator = leaf(3), torch.Generator()
    y = thunder.jit(lambda x, g: x**3 * torch.rand(3, generator=g, dtype=D))(x, generator)
    with pytest.raises(RuntimeError, match="draws from a torch.Generator of yours"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x * x


class Once(Cube):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0] ** 2


class Saved(torch.autograd.Function):
    """Its backward reads its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@pytest.mark.parametrize("function", [Cube, Saved])
def test_functions_are_differentiated_by_their_own_backward(function):
    x = leaf(3)
    compiled = thunder.jit(lambda x: function.apply(x * 2) * x)
    for n in range(4):
        torch.testing.assert_close(
            nth(compiled, x, n), nth(lambda x: function.apply(x * 2) * x, x, n), rtol=1e-9, atol=1e-9
        )


def test_once_differentiable_is_an_error():
    x = leaf(3)
    (g,) = torch.autograd.grad(thunder.jit(lambda x: Once.apply(x))(x).sum(), x)
    torch.testing.assert_close(g, 3 * x.detach() ** 2)
    w = leaf(3)
    for run in (Once.apply, thunder.jit(lambda x: Once.apply(x))):
        first = nth(run, x, 1)  # of ones, which do not require grad: it has no graph
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(first, x)
        (g,) = torch.autograd.grad(run(x), x, w, create_graph=True)
        with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
            g.sum().backward()


def test_compiled_once_and_kept():
    """The program of the second derivative is made when it is first asked for, and runs again after."""
    x = leaf(3)
    compiled = thunder.jit(lambda x: torch.tanh(x) ** 2)
    compiled(x).sum().backward()
    program = thunder.compile_stats(compiled).last_entry.computation_fn
    apply_of = {c.cell_contents for c in program.__closure__ if type(c.cell_contents).__name__ == "_Program"}
    (shared,) = apply_of
    assert not shared.later_programs
    nth(compiled, x, 2)
    programs = dict(shared.later_programs)
    assert len(programs) == 1
    nth(compiled, x, 2)
    assert shared.later_programs == programs


def test_statistics_are_written_once_where_the_backward_is_differentiated():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    compiled = thunder.jit(copy.deepcopy(net))
    for model in (net, compiled):
        x = leaf(5, 3)
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()
    torch.testing.assert_close(compiled.state_dict(), net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in compiled.parameters()], [p.grad for p in net.parameters()])


def sine_then_write(x, w):
    y = (x * w).sin()
    x.add_(1)
    return y.sum()


def exponential_then_write(x, w):
    y = x.exp() * w
    x.add_(1)
    return (y * y).sum()


@pytest.mark.parametrize("program", [sine_then_write, exponential_then_write])
def test_what_was_written_to_after_it_was_used_is_an_error(program):
    """The gradients are computed from the arguments again: with what they hold then, they would be wrong."""
    w = leaf(4)
    result = thunder.jit(program)(torch.ones(4, dtype=D), w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result, w, create_graph=True)


def test_gradients_that_read_nothing_overwritten():
    """PyTorch's error is that of the gradient which would read an argument as it was, not of the program's others."""

    def program(b, m):
        product = m @ b / 4
        m[:2] = m[:, 1] + 0
        return b.sum(), product

    for f in (program, thunder.jit(program, fallback="error")):
        b, m = torch.randn(4, requires_grad=True), torch.randn(4, 4)
        total, product = f(b, m)
        assert torch.autograd.grad(total, b, retain_graph=True)[0].tolist() == [1.0] * 4
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            torch.autograd.grad(product.sum(), b)


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask


def gradient_inside(x):
    return torch.autograd.grad(Masked.apply(x.sin()).exp().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Masked.apply(x).exp() * torch.rand(4),
        lambda x: torch.utils.checkpoint.checkpoint(lambda y: Masked.apply(y.sin()).exp(), x, use_reentrant=False),
        gradient_inside,
    ],
    ids=["plain", "in a checkpoint", "inside"],
)
def test_functions_that_draw_random_numbers_are_differentiated_twice_with_the_same_ones(program):
    """Their derivative recomputes what the forward saved."""
    compiled = thunder.jit(program)
    for seed in range(4):
        results = []
        for f in (program, compiled):
            torch.manual_seed(seed)
            x = torch.randn(4, requires_grad=True)
            y = f(x)
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            between = torch.rand(())
            results.append((y, g, *torch.autograd.grad(g.sum(), x), between, torch.rand(())))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(cpp.unavailable() is not None, reason="there is no C++ compiler")
def test_a_forward_with_kernels_keeps_no_running_statistics(monkeypatch):
    monkeypatch.setattr(cpp_fuser, "always", True)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()).to(D)
    gradients = []
    for f in (copy.deepcopy(model), thunder.jit(copy.deepcopy(model), executors=["cpp"], tiers=0)):
        x = leaf(5, 3)
        (g,) = torch.autograd.grad((f(x) ** 2).sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(g.square().sum(), [x, *f.parameters()], materialize_grads=True))
    assert "Kernels" in str(thunder.last_traces(f)[-1])
    torch.testing.assert_close(*gradients)
