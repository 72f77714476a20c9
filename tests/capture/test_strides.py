"""Programs that ask for strides, contiguity and offsets."""

import pytest
import torch

import thunder
from tests.capture.agreement import assert_as_exact


def asking(x):
    y = x * 2
    z = y.t().contiguous() if not y.is_contiguous() else y
    return (
        z * y.stride(0) + z.stride(1),
        torch.empty(3, 4).stride(),
        x.is_contiguous(memory_format=torch.contiguous_format),
        y.t()[1:].stride(),
        x.stride(-1),
    )


def equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b and type(a) is type(b)


def test_answers_are_those_of_eager_for_every_layout():
    compiled = thunder.jit(asking)
    whole = torch.arange(24.0).reshape(8, 3)
    for x, misses, reason in (
        (whole[:4], 1, "first call"), (torch.arange(12.0).reshape(3, 4).t(), 2, "x.stride() was (3, 1), is (1, 4)"),
            (whole[::2], 3, "x.stride() was (1, 4), is (6, 1)"), (whole[4:], 3, None),
    ):  # fmt: skip
        for got, want in zip(compiled(x), asking(x), strict=True):
            assert equal(got, want)
        assert thunder.cache_misses(compiled) == misses and (
            reason is None or thunder.last_recompile_reasons(compiled)[0] == reason
        )


def test_offsets_are_checked_where_they_are_asked_for():
    compiled = thunder.jit(lambda x: (x[1:].storage_offset(), (x + 1).storage_offset()))
    whole = torch.arange(6.0)
    assert compiled(whole[:3]) == (1, 0) and compiled(whole[3:]) == (4, 0) and compiled(whole[:3]) == (1, 0)
    assert thunder.cache_misses(compiled) == 2


def test_in_place_and_inside_functions_with_a_backward():
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 if x.is_contiguous() else x * 3

        @staticmethod
        def backward(ctx, g):
            return g * g.stride(0)

    def program(x, w):
        y = x @ w
        y += 1
        y = y.t()
        return Doubling.apply(y) + y.stride(0)

    x, w = torch.ones(2, 3), torch.ones(3, 4)
    assert torch.equal(thunder.jit(program)(x, w), program(x, w))


@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
def test_symbolic_sizes_become_fixed(cache):
    compiled = thunder.jit(lambda x: x * x.stride(0), cache=cache)
    for n in (4, 5):
        x = torch.ones(3, n)
        assert torch.equal(compiled(x), x * n)


def through_transposed(y):
    y.transpose(0, 1).add_(1)
    return y, y.t().view(-1)


def through_permuted(y):
    y.permute(1, 0)[1].mul_(2)
    return y, y.t().view(-1)


def through_moved(y):
    y.movedim(0, 1).sin_()
    w = y.t().reshape(-1)
    w.add_(1)
    return y, w


def through_the_diagonal(y):
    y.diagonal().zero_()
    return y, y.t().view(-1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("write", [through_transposed, through_permuted, through_moved, through_the_diagonal])
def test_what_is_written_to_through_a_view_keeps_its_strides(write, grad):
    def program(x):
        return write(x * 2)

    for x in (
        torch.arange(12.0).reshape(3, 4).t().requires_grad_(grad),
        torch.arange(12.0).reshape(3, 4).requires_grad_(grad),
    ):
        try:
            want = program(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                thunder.jit(program)(x)
            continue
        got = thunder.jit(program)(x)
        for a, b in zip(got, want, strict=True):
            assert equal(a.detach(), b.detach()) and a.stride() == b.stride()
        assert (got[0].data_ptr() == got[1].data_ptr()) == (want[0].data_ptr() == want[1].data_ptr())


OVERWRITTEN = {
    "addmm": lambda a, x: a.addmm_(x, x),
    "baddbmm": lambda a, x: a.expand(3, 4, 4).clone().transpose(1, 2).clone().baddbmm_(x.expand(3, 4, 4),
    x.expand(3, 4, 4), alpha=2),
    "addbmm": lambda a, x: a.addbmm_(x.expand(3, 4, 4), x.expand(3, 4, 4)),
    "cumsum of what is saved": lambda a, x: (lambda y: (y.sigmoid() * x, y.cumsum_(0))[1])(a + 0),
    "cumprod": lambda a, x: a.cumprod_(0),
    "masked_scatter": lambda a, x: a.masked_scatter_(torch.eye(4) > 0, x),
    "renorm": lambda a, x: a.renorm_(2, 0, 1.0),
    "tril": lambda a, x: a.tril_(),
    "index_add": lambda a, x: a.index_add_(0, torch.tensor([1, 3]), x[:2]),
    "scatter": lambda a, x: a.scatter_(0, torch.tensor([[0, 1]]), 2.0),
    "mul": lambda a, x: a.mul_(x),
}  # fmt: skip


PRODUCTS = ("addmm", "baddbmm", "addbmm")  # add up in an order that depends on where they write


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_what_is_overwritten_keeps_its_strides(name, grad, dtype):
    """Where PyTorch's derivative is kept, or the old value is saved, the operation does not run in place; its own
    result would lie otherwise."""
    a = torch.arange(16.0).reshape(4, 4).t().to(dtype).mul_(0.1).requires_grad_(grad)
    x = torch.arange(16.0).reshape(4, 4).to(dtype).mul_(0.1).requires_grad_(grad)

    def program(a, x):
        return OVERWRITTEN[name](a.clone(), x)

    try:
        want = program(a, x)
    except RuntimeError as error:  # of complex numbers
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            thunder.jit(program)(a, x)
        return
    got = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))(a, x)
    assert got.stride() == want.stride()
    if name in PRODUCTS:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert_as_exact(got.detach(), want.detach(), program(a.detach().to(wide), x.detach().to(wide)), name)
    else:
        assert equal(got.detach(), want.detach())
    if grad:
        cotangent = torch.randn(want.shape, dtype=dtype)
        for g, w in zip(
            torch.autograd.grad(got, (a, x), cotangent, allow_unused=True),
            torch.autograd.grad(want, (a, x), cotangent, allow_unused=True),
            strict=True,
        ):
            assert (g is None) == (w is None) and (g is None or torch.allclose(g, w))


def turned_behind_a_number_by_data(a, m):
    t = m.diagonal()
    t.add_(a[1].item())
    t.mul_(int(a[0]))
    m.t_()
    t[1:].add_(m[:, 1].norm())
    return t


def test_numbers_by_data_before_a_question_about_memory():
    compiled = thunder.jit(turned_behind_a_number_by_data, fallback="error")
    for n in range(3):
        a, m = torch.tensor([n + 1.5, n - 0.5]), torch.randn(4, 4)
        ours = m.clone()
        torch.testing.assert_close(compiled(a, ours), turned_behind_a_number_by_data(a, m))
        torch.testing.assert_close(ours, m)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (x.t().contiguous().stride(), (x * 2).t().contiguous().stride()),
        lambda x: x.t().contiguous()[:, :5].is_contiguous(), lambda x: (x.t().contiguous())[1].storage_offset(),
        lambda x: (x.unsqueeze(0) * 1).stride(0), lambda x: (x.t() * 1).t().reshape(-1).stride(),
    ],
)  # fmt: skip
def test_answers_hold_for_the_sizes_of_a_call(ask):
    compiled = thunder.jit(ask, fallback="error")
    for n in (3, 4, 5, 6, 7, 5):
        assert compiled(torch.ones(n, 2)) == ask(torch.ones(n, 2))


def test_whether_an_input_is_contiguous_holds_for_all_sizes():
    compiled = thunder.jit(lambda x: x * 2 if x.is_contiguous() else x.contiguous() * 3, fallback="error")
    for n in range(3, 9):
        assert torch.equal(compiled(torch.ones(n, 2 * n)), torch.full((n, 2 * n), 2.0))
        assert torch.equal(compiled(torch.ones(2 * n, n).t()), torch.full((n, 2 * n), 3.0))
    assert thunder.cache_misses(compiled) <= 4
