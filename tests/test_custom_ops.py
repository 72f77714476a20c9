"""Operators registered with torch.library, in compiled programs."""

import numpy as np
import pytest
import torch

import thunder
import thunder.torch as ltorch

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@torch.library.custom_op("thunder_tests::mysin", mutates_args=())
def mysin(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.detach().numpy()))


@mysin.register_fake
def _(x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    (x,) = inputs
    ctx.save_for_backward(x)


def _backward(ctx, g):
    (x,) = ctx.saved_tensors
    return g * x.cos() * 3  # three times the derivative: whoever calls it is seen


mysin.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("thunder_tests::scaled", mutates_args=())
def scaled(xs: list[torch.Tensor], scale: float, shift: int = 0) -> list[torch.Tensor]:
    return [x * scale + shift for x in xs]


@scaled.register_fake
def _(xs, scale, shift=0):
    return [torch.empty_like(x) for x in xs]


def _keep(ctx, inputs, output):
    ctx.scale = inputs[1]


scaled.register_autograd(lambda ctx, gs: ([g * ctx.scale for g in gs], None, None), setup_context=_keep)


@torch.library.custom_op("thunder_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:1].clone(), x[1:].clone()


@halves.register_fake
def _(x):
    return torch.empty_like(x[:1]), torch.empty_like(x[1:])


@torch.library.custom_op("thunder_tests::increment", mutates_args=("x", "others"))
def increment(x: torch.Tensor, n: int, others: list[torch.Tensor]) -> torch.Tensor:
    x.add_(n)
    for other in others:
        other.mul_(2)
    return x.sum()


@increment.register_fake
def _(x, n, others):
    return x.new_empty(())


def lines(compiled):
    return [str(line) for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.name != "python_del"]


@pytest.mark.parametrize(
    "operator",
    [mysin, torch.ops.thunder_tests.mysin, torch.ops.thunder_tests.mysin.default],
    ids=["object", "packet", "overload"],
)
def test_however_it_is_called(operator):
    compiled = thunder.jit(lambda x: operator(x) * 2)
    assert torch.equal(compiled(X), operator(X) * 2)
    assert lines(compiled)[0].startswith("t0 = torch.ops.thunder_tests.mysin(x)  # t0:")
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    compiled(x).sum().backward()
    (operator(y) * 2).sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(x.grad, 6 * X.cos())


def test_lists_of_tensors():
    def program(x, y):
        a, b = scaled([x, y.exp()], 2.0, 1)
        (c,) = scaled([b], 3.0, shift=2)
        return a * c

    compiled = thunder.jit(program)
    x, y, a, b = (t.clone().requires_grad_() for t in (X, X + 1, X, X + 1))
    got, want = compiled(x, y), program(a, b)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    assert torch.equal(x.grad, a.grad) and torch.equal(y.grad, b.grad)


def test_several_results():
    compiled = thunder.jit(lambda x: halves(x))
    for got, want in zip(compiled(X), halves(X)):
        assert torch.equal(got, want)
    assert lines(compiled)[0].startswith("(t0, t1) = torch.ops.thunder_tests.halves(x)")


def test_without_a_derivative_the_error_is_pytorchs():
    compiled = thunder.jit(lambda x: halves(x)[0] * 2)
    assert torch.equal(compiled(X), X[:1] * 2)
    result = compiled(X.clone().requires_grad_())
    with pytest.raises(
        RuntimeError,
        match="Trying to backward through thunder_tests.halves.default but no autograd formula was registered. "
        "Please use register_autograd",
    ):
        result.sum().backward()


def test_an_operator_that_writes_to_its_arguments():
    def program(x):
        y, z = x * 2, x.exp()
        before = y + 0
        total = increment(y, 3, [z])
        return before, y * z, total

    compiled = thunder.jit(program)
    for _ in range(2):
        for got, want in zip(compiled(X), program(X)):
            assert torch.equal(got, want)
    assert any(line.startswith("(total, t4, t5) = increment(y, 3, [z])") for line in lines(compiled)), lines(compiled)


def test_an_operator_that_writes_to_an_input():
    def program(x, y):
        total = increment(x[1], 1, [y.t()])
        return total, x * 2, y.sum()

    compiled = thunder.jit(program)
    x, y, a, b = X.clone(), X + 1, X.clone(), X + 1
    for _ in range(2):
        for got, want in zip(compiled(x, y), program(a, b)):
            assert torch.equal(got, want)
        assert torch.equal(x, a) and torch.equal(y, b)


def test_the_compatibility_name():
    assert ltorch._register_custom_op(mysin).qualified_name == "torch.ops.thunder_tests.mysin"


def test_an_operator_of_a_library_that_is_no_effect_by_its_schema():
    """As torchvision's `nms`: what it gives may be decided by."""
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        library.define("thunder_tests_kept(Tensor x) -> Tensor")
        library.impl("thunder_tests_kept", lambda x: (x > 0).nonzero()[:, 0], "CPU")
        keep = torch.ops.torchvision.thunder_tests_kept

        def fake(x):
            return x.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

        torch.library.register_fake("torchvision::thunder_tests_kept", fake, lib=library)

        def program(x):
            rows = keep(x)
            return x * 2 if (rows == 0).any() else x[rows]

        compiled = thunder.jit(program, fallback="error")
        for x in (X[0], X[1], torch.ones(3)):
            assert torch.equal(compiled(x), program(x))


@torch.library.custom_op("thunder_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


@torch.library.custom_op("thunder_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


tripled.register_autograd(lambda ctx, g: g * 5)


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_an_operator_without_a_rule_for_fake_tensors_is_an_eager_call():
    def f(x):
        return tripled(x * 2) + 1, positive(x.detach() - 1)

    compiled = thunder.jit(f, fallback="eager")
    for length in (4, 4, 5):
        ours, theirs = (torch.linspace(0, 2, length).requires_grad_() for _ in range(2))
        actual, expected = compiled(ours), f(theirs)
        (actual[0].sum() + actual[1].sum()).backward()
        (expected[0].sum() + expected[1].sum()).backward()
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
        assert torch.equal(ours.grad, theirs.grad)
    names = [s.sym.name for s in thunder.last_traces(compiled)[0].bound_symbols]
    assert names.count("eager_call") == 2


def test_an_operator_without_a_rule_is_named_where_programs_have_no_eager_calls():
    with pytest.raises(thunder.errors.CaptureError, match="no fake impl registered"):
        thunder.jit(lambda x: tripled(x), fallback="error")(X)
