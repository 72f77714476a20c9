"""Derivatives that users register for operations."""

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import (
    VJPDual,
    get_grad,
    grad,
    put_grads,
    register_augmented_forward,
    register_backward,
    register_grad,
)
from thunder.errors import MissingImplementationError
from thunder.extend import OperatorExecutor

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture
def operation():
    """An operation of its own, so that no other test sees what is registered."""
    executor = OperatorExecutor("mine")
    made = executor.register_operator(
        "tripled_product", meta=lambda x, y, n=3: TensorProxy(like=x), fn=lambda x, y, n=3: x * y * n
    )
    return executor, made


@pytest.fixture
def sine():
    before = ltorch.sin.grad_rule, ltorch.sin.vjp_halves
    yield ltorch.sin
    ltorch.sin.grad_rule, ltorch.sin.vjp_halves = before


def gradients(program, executors, *tensors):
    inputs = [t.clone().requires_grad_() for t in tensors]
    compiled = thunder.jit(program, executors=executors)
    compiled(*inputs).sum().backward()
    return [t.grad for t in inputs]


def test_one_function(operation):
    executor, product = operation

    @register_grad(product)
    def rule(x, y, n=3):
        result = product(x, y, n)
        g = get_grad(result)
        put_grads((x, y), (g * y * n, g * x * n))
        return result

    found = gradients(lambda x, y: product(x, y).exp(), [executor], X, X + 2)
    x, y = X.clone().requires_grad_(), (X + 2).requires_grad_()
    (x * y * 3).exp().sum().backward()
    torch.testing.assert_close(found, [x.grad, y.grad])
    for got, want in zip(
        grad(thunder.jit(lambda x, y: product(x, y), executors=[executor]))(X, X + 2), ((X + 2) * 3, X * 3), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "spelling", [ltorch.sin, "ltorch.sin", torch.sin, torch.Tensor.sin], ids=["symbol", "id", "function", "method"]
)
def test_an_operation_by_any_of_its_names(sine, spelling):
    def rule(x):
        result = ltorch.sin(x)
        put_grads((x,), (get_grad(result) * 7,))
        return result

    assert register_grad(spelling, rule) is rule
    assert torch.equal(gradients(lambda x: x.sin(), [], X)[0], torch.full_like(X, 7.0))


def test_an_executors_derivative_comes_first(sine):
    def seven(x):
        result = ltorch.sin(x)
        put_grads((x,), (get_grad(result) * 7,))
        return result

    def nine(x):
        result = ltorch.sin(x)
        put_grads((x,), (get_grad(result) * 9,))
        return result

    register_grad(sine, seven)
    executor = OperatorExecutor("nine")
    executor.register_implementation(sine, execution_transform=lambda x: ltorch.sin(x), grad_transform=nine)
    assert torch.equal(gradients(lambda x: x.sin(), [executor], X)[0], torch.full_like(X, 9.0))
    executor.register_implementation(sine, execution_transform=lambda x: ltorch.sin(x))
    assert executor.get_grad_transform(thunder.trace()(lambda x: x.sin(), X).bound_symbols[0]) is None, (
        "registering again drops what was there"
    )
    assert torch.equal(gradients(lambda x: x.sin(), [executor], X)[0], torch.full_like(X, 7.0))


def test_two_halves(operation):
    executor, product = operation

    @register_augmented_forward(product)
    def forward(x, y, n=3):
        return VJPDual(product(x, y, n), (x, y, n))

    program = thunder.jit(lambda x, y: product(x, y, 2).sin(), executors=[executor])
    with pytest.raises(
        MissingImplementationError,
        match="tripled_product was given one half of a derivative: register_backward gives the other",
    ):
        program(X.clone().requires_grad_(), X)

    @register_backward(product)
    def backward(x, y, n, g):
        return g * y * n, g * x * n

    found = gradients(lambda x, y: product(x, y, 2).sin(), [executor], X, X + 2)
    x, y = X.clone().requires_grad_(), (X + 2).requires_grad_()
    (x * y * 2).sin().sum().backward()
    torch.testing.assert_close(found, [x.grad, y.grad])
    register_backward(product)(lambda x, y, n, g: g * y * n)
    with pytest.raises(
        MissingImplementationError,
        match="the backward of tripled_product returned 1 gradients for 3 arguments: return one, or None, for each",
    ):
        program(X.clone().requires_grad_(), X)
    register_augmented_forward(product)(lambda x, y, n: product(x, y, n))
    with pytest.raises(
        MissingImplementationError,
        match=r"the augmented forward of tripled_product returned TensorProxy: return VJPDual\(result, residuals\)",
    ):
        program(X.clone().requires_grad_(), X)


def test_several_results_and_one_residual():
    executor = OperatorExecutor("mine")
    both = executor.register_operator(
        "both", meta=lambda x: (TensorProxy(like=x), TensorProxy(like=x)), fn=lambda x: (x.sin(), x.cos())
    )
    register_augmented_forward(both)(lambda x: (both(x), x))
    register_backward(both)(lambda x, g, h: g * x.cos() - h * x.sin())
    (found,) = gradients(lambda x: both(x)[0] * 2 + both(x)[1], [executor], X)
    torch.testing.assert_close(found, 2 * X.cos() - X.sin())


def test_what_is_no_operation():
    for wrong, said in ((3, "3"), ("ltorch.nothing", "'ltorch.nothing'"), (gradients, "gradients")):
        with pytest.raises(TypeError, match=f"{said} is no operation of thunder's: give an operation"):
            register_grad(wrong, lambda x: x)
    with pytest.raises(TypeError, match=r"register_grad\(ltorch.sin\): the derivative is a function, not a int"):
        register_grad(ltorch.sin, 3)
