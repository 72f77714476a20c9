"""Linear layers of tensors of any number of dimensions, where a fusion executor takes the lines between them."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels_in_use import EVERY_REGION
from thunder import DebugOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSERS = [["triton_fuser", "sdpa", "torch"], [EVERY_REGION]]


def compiled_with(executors, program):
    return thunder.jit(program, executors=executors, debug_options=DebugOptions(check_traces=True))


def of_columns(x, w, v):
    a, b, c = F.linear(x, w).split(4, dim=-1)
    heads = a.reshape(x.shape[0], -1, 2, 2).transpose(1, 2)
    return F.linear(torch.sigmoid(b) * c, v[:, :4]) + heads.sum((1, 3)).unsqueeze(-1)


def mixed_columns(x, w, v):
    a, b = F.linear(x, w).chunk(2, -1)
    return F.linear(
        a.reshape(x.shape[0], -1), torch.ones(3, x.shape[1] * 6, device=x.device, dtype=x.dtype)
    ) * b.flatten(1).exp().sum(1, keepdim=True)


def of_a_transposed(x, w, v):
    y = x.transpose(0, 1)
    return F.linear(torch.relu(F.linear(y, w)), v) + F.linear(y.contiguous(), w).mean()


def of_a_reshaped(x, w, v):
    y = (x * 2).transpose(1, 2).reshape(x.shape[0], -1, x.shape[2])
    return F.linear(y, w).sin() + F.linear(y * 3, w)


def of_four_dimensions(x, w, v):
    y = F.linear(x.unsqueeze(1), w, torch.arange(12.0, device=x.device, dtype=x.dtype))
    return F.linear(y.squeeze(1).cos(), v).flatten(0, 1)


def as_another_type(x, w, v):
    y = F.linear(x, w)
    return y.view(torch.int64).double().sign() * y.exp()


def broadcast(x, w, v):
    y = F.linear(x, w)
    return F.linear((y + y[:, :1]) * y.mean(-1, keepdim=True) + 1, v)


def of_a_vector(x, w, v):
    return F.linear(x, w[0]).sin() + F.linear(x[0, 0], w).sum() * F.linear(x[:, 0], w).sum()


def of_nothing(x, w, v):
    return F.linear(F.linear(x[:, :0], w).tanh(), v).sum() + F.linear(x, w).tanh().sum()


PROGRAMS = [
    of_columns,
    mixed_columns,
    of_a_transposed,
    of_a_reshaped,
    of_four_dimensions,
    as_another_type,
    broadcast,
    of_a_vector,
    of_nothing,
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("executors", FUSERS, ids=["triton", "c++"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_programs(program, executors):
    torch.manual_seed(0)
    values = [
        torch.randn(shape, device=DEVICE, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 5, 8), (12, 8), (3, 12))
    ]
    compiled = compiled_with(executors, program)
    for _ in range(2):
        out, expected = compiled(*values), program(*values)
        torch.testing.assert_close(out, expected)
        assert out.stride() == expected.stride()
        grads = [torch.autograd.grad(o.sum(), values, allow_unused=True) for o in (out, expected)]
        for g, e in zip(*grads, strict=True):
            assert (g is None) == (e is None)
            torch.testing.assert_close(g, e)


def first_without_grad(x, w):
    with torch.no_grad():
        a = F.linear(x, w)
    return a.sum() * F.linear(x, w).sum()


def shaped_without_grad(x, w):
    with torch.no_grad():
        h = x.unsqueeze(0)
    return F.linear(h, w).sin() + 0


def product_shaped_without_grad(x, w):
    y = F.linear(x, w)
    with torch.no_grad():
        z = y.unsqueeze(0)
    return F.linear(z, w.t()).sin().sum() + y.sum()


def part_without_grad(x, w):
    y = F.linear(x, w)
    with torch.no_grad():
        z = y.reshape(-1, 5).tanh()
        a, b = y.split([2, 3], -1)
    return (z * y.sin().reshape(-1, 5)).sum() + F.linear(a * 2, w[:, :2]).sum() * F.linear(b, w[:, :3]).sum()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("executors", FUSERS, ids=["triton", "c++"])
@pytest.mark.parametrize(
    "program",
    [first_without_grad, shaped_without_grad, product_shaped_without_grad, part_without_grad],
    ids=lambda f: f.__name__,
)
def test_where_gradients_end(program, executors):
    values = [
        torch.randn(shape, device=DEVICE, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4))
    ]
    gradients, expected = (
        torch.autograd.grad(f(*values).sum(), values, allow_unused=True)
        for f in (compiled_with(executors, program), program)
    )
    for g, e in zip(gradients, expected, strict=True):
        assert (g is None) == (e is None)
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("shape", [(5,), (1,), ()])
def test_a_bias_of_one_number(shape):
    """Its gradient has its shape, inside a program as well, where nobody but the program looks."""

    def program(x, w, b):
        y = F.linear(x, w, b.sin()).cos()
        return torch.autograd.grad(y.sum(), b)[0] * torch.ones_like(b)

    values = [
        torch.randn(s, device=DEVICE, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), shape)
    ]
    for executors in (["torch"], FUSERS[0]):
        actual, expected = compiled_with(executors, program)(*values), program(*values)
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected)


def test_a_view_that_is_none():
    x, w = torch.randn(2, 3, 4, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        thunder.jit(lambda x, w: F.linear(x.transpose(1, 2).view(2, 3, 4), w).tanh(), executors=FUSERS[0])(x, w)


def test_a_budget_counts_what_is_saved():
    """The argument as a matrix is no memory of its own."""
    x, w, v = (
        torch.randn(shape, device=DEVICE, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 40), (6, 40), (6, 40))
    )
    saved = []
    for budget in ({}, {"memory_budget": 0.5}):
        compiled, sizes = (
            thunder.jit(
                lambda x, w, v: F.linear(x, w).sin().sum() + F.linear(x, v).exp().sum(),
                executors=["triton_fuser"],
                **budget,
            ),
            [],
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
            out = compiled(x, w, v)
        saved.append(sum(n for n in sizes if n == 6 * 6 * 8))
        assert len(torch.autograd.grad(out, (x, w, v))) == 3
    assert saved == [576, 288]


@pytest.mark.parametrize("executors", FUSERS, ids=["triton", "c++"])
def test_what_is_returned_is_no_view_and_may_be_written_to(executors):
    w = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    compiled = compiled_with(
        executors, lambda x: (F.linear(x, w), F.linear(x.sin(), w).tanh(), F.linear(x.cos(), w).view(-1, 4))
    )
    x = torch.randn(2, 3, 4, device=DEVICE)
    for o in compiled(x):
        o.mul_(2)
    with torch.no_grad():
        first, second, _ = compiled(x)
    assert not first._is_view() and not second._is_view()


def test_what_was_written_to_is_not_read_again():
    def program(x, w):
        y = x.transpose(1, 2).reshape(2, 3, 4)  # a copy
        x.zero_()
        return F.linear(y, w).sin() * 2

    w, x = torch.randn(5, 4, device=DEVICE), torch.randn(2, 4, 3, device=DEVICE)
    expected = program(x.clone(), w)
    torch.testing.assert_close(compiled_with(FUSERS[0], program)(x, w), expected)
