"""`thunder.opaque`: Python functions that compiled programs call as they are."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.core.proxies import TensorProxy
from thunder.errors import MissingImplementationError, OptionError, TraceCheckError
from thunder.ops import opaque

X = torch.tensor([[3.0, 1.0, 2.0], [0.5, -1.0, 4.0]])
CALLS = []


@thunder.opaque(meta=lambda x, descending=False: torch.empty_like(x))
def sorted_rows(x, descending=False):
    """Rows in order, by numpy."""
    CALLS.append((type(x), descending))
    result = np.sort(x.numpy(), axis=-1)
    return torch.from_numpy(result[:, ::-1].copy() if descending else result)


def test_it_is_called_with_real_tensors_at_every_call():
    CALLS.clear()
    compiled = thunder.jit(lambda x: sorted_rows(x + 1) * 2)
    for _ in range(2):
        assert torch.equal(compiled(X), torch.sort(X + 1)[0] * 2)
    assert CALLS == [(torch.Tensor, False)] * 2 and thunder.cache_misses(compiled) == 1
    assert "t1 = sorted_rows(t0)" in str(thunder.last_traces(compiled)[-1])
    assert thunder.get_auto_registered_torch_op_names(compiled) == set()
    assert torch.equal(thunder.jit(lambda x: sorted_rows(x, descending=True))(X), torch.sort(X, descending=True)[0])
    assert torch.equal(sorted_rows(X), torch.sort(X)[0]), "outside of a compiled program it is the function"


def test_its_code_and_what_it_reads_are_not_guarded():
    state = {"scale": 2}
    scaled = thunder.opaque(lambda x: x * state["scale"], meta=lambda x: TensorProxy(like=x))
    compiled = thunder.jit(lambda x: scaled(x))
    assert torch.equal(compiled(X), X * 2)
    state["scale"] = 3
    assert torch.equal(compiled(X), X * 3) and thunder.cache_misses(compiled) == 1


def test_effects_alone_and_structures():
    log = []
    note = thunder.opaque(lambda x, label: log.append((label, x.sum().item())), meta=lambda x, label: None, name="note")
    split = thunder.opaque(
        lambda d: ({"low": d["a"].floor(), "n": 2}, [d["a"] - d["a"].floor()]),
        meta=lambda d: ({"low": d["a"].floor(), "n": 2}, [TensorProxy(like=d["a"])]),
        name="split",
    )

    def program(x):
        note(x, "before")
        parts, (rest,) = split({"a": x})
        return parts["low"] + rest * parts["n"]

    compiled = thunder.jit(program)
    for _ in range(2):
        assert torch.equal(compiled(X), X.floor() + (X - X.floor()) * 2)
    assert log == [("before", 9.5)] * 2
    assert "note(x, 'before')" in str(thunder.last_traces(compiled)[-1])


def test_a_missing_derivative():
    def program(x):
        return sorted_rows(x * 2)  # the line

    compiled = thunder.jit(program)
    x = X.clone().requires_grad_()
    with pytest.raises(
        MissingImplementationError,
        match="sorted_rows has no derivative: give thunder.opaque a backward=, call it under torch.no_grad",
    ) as raised:
        compiled(x)
    assert "# the line" in "".join(raised.value.__notes__)
    with torch.no_grad():
        assert torch.equal(compiled(x), torch.sort(X * 2)[0])
    assert torch.equal(thunder.jit(lambda x: sorted_rows(x.detach()) + x)(x), torch.sort(X)[0] + X)


def test_a_backward_of_its_own():
    order = thunder.opaque(
        lambda x, y, n: (torch.from_numpy(np.multiply(x.numpy(), y.numpy())) * n, n), meta=lambda x, y, n: (x * y, n),
            name="order",
        backward=lambda args, result, cotangent: (cotangent[0] * args[1] * args[2], cotangent[0] * args[0] * args[2],
            None),
    )  # fmt: skip
    compiled = thunder.jit(lambda x, y: order(x.sin(), y, 3)[0].exp())
    x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
    got = compiled(x, y)
    a, b = X.clone().requires_grad_(), (X + 1).requires_grad_()
    want = (a.sin() * b * 3).exp()
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(x.grad, a.grad)
    torch.testing.assert_close(y.grad, b.grad)
    assert "order_backward" in str(thunder.last_backward_traces(compiled)[-1])
    only = X.clone().requires_grad_()
    compiled(only, X).sum().backward()
    assert only.grad is not None


def test_backwards_that_are_wrong():
    def with_backward(backward):
        op = thunder.opaque(
            lambda x, y: x * y, meta=lambda x, y: TensorProxy(like=x), backward=backward, name="product"
        )
        x = X.clone().requires_grad_()
        thunder.jit(lambda x: op(x, X))(x).sum().backward()
        return x.grad

    with pytest.raises(
        RuntimeError,
        match=r"the backward of product returned an incorrect number of gradients \(expected 2, got 1\)",
    ):
        with_backward(lambda args, result, cotangent: cotangent)
    with pytest.raises(
        RuntimeError,
        match=r"the backward of product returned an invalid gradient at index 0 - got \[3\] but expected",
    ):
        with_backward(lambda args, result, cotangent: (cotangent[0], None))
    with pytest.raises(RuntimeError, match=r"the backward of product: expected Variable or None \(got float\)"):
        with_backward(lambda args, result, cotangent: (1.0, None))
    assert torch.equal(with_backward(lambda args, result, cotangent: (None, None)), torch.zeros_like(X))
    assert torch.equal(with_backward(lambda args, result, cotangent: ((cotangent * args[1]).double(), None)), X)


def test_wrong_arguments():
    with pytest.raises(
        OptionError,
        match="thunder.opaque: meta= is a function, not None: thunder does not look into abs, so that meta= has to "
        "say what it returns",
    ):
        thunder.opaque(abs)
    with pytest.raises(OptionError, match="backward= is a function, not 3"):
        thunder.opaque(abs, meta=abs, backward=3)
    op = thunder.opaque(lambda x: x.sum(), meta=lambda x: TensorProxy(like=x), name="summed")
    with pytest.raises(
        TraceCheckError, match=r'summed returned "cpu f32\[\]" where its meta rule says t0: "cpu f32\[2, 3\]"'
    ):
        thunder.jit(lambda x: op(x), debug_options=thunder.DebugOptions(check_traces=True))(X)


def test_a_decision_on_a_function_without_effects():
    """PyTorch's schemas say which functions have none: also under autocast, a decision and dead code take them so."""
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            module(x.relu())
            y = module(x)
            return y * 2 if y.sum() > 0 else y - 1

    compiled = thunder.jit(f, fallback="error")
    torch.manual_seed(0)
    for _ in range(8):
        x = torch.randn(3, 4)
        assert torch.equal(compiled(x), f(x))
    names = [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols]
    assert sum(name.startswith("autocast__weight_norm") for name in names) == 1


@pytest.mark.parametrize("function, pure", [
    (torch._weight_norm, True), (torch.bernoulli, False), (torch.Tensor.add_, False), (torch._assert_async, False),
    (F.softplus, True), (torch.save, False),
])  # fmt: skip
def test_which_functions_have_no_effects(function, pure):
    assert opaque._is_pure(function) is pure


def test_a_tensor_that_is_given_by_keyword_has_a_gradient():
    @thunder.opaque(meta=lambda x, by, *, scale=1.0: x * by, backward=lambda args, y, g: (g * args[1], g * args[0]))
    def product(x, by, *, scale=1.0):
        return x * by

    x, y = (torch.full((3,), n, requires_grad=True) for n in (2.0, 3.0))
    thunder.jit(lambda x, y: product(by=y, x=x, scale=2.0), fallback="error")(x, y).sum().backward()
    assert torch.equal(x.grad, y.detach()) and torch.equal(y.grad, x.detach())


def test_a_tensor_that_is_given_by_keyword_alone_has_none():
    @thunder.opaque(meta=lambda x, *, by: x * by, backward=lambda args, y, g: (g,))
    def product(x, *, by):
        return x * by

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(thunder.errors.DerivativeError, match="is given a tensor that requires grad by keyword alone"):
        thunder.jit(lambda x: product(x, by=x))(x)
