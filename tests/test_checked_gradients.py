"""Gradients of every way to give an operation a derivative are checked where they are made."""

from __future__ import annotations

import pytest
import torch

import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import (
    VJPDual,
    get_grad,
    put_grads,
    register_augmented_forward,
    register_backward,
    register_grad,
)
from thunder.errors import DerivativeError
from thunder.extend import OperatorExecutor


def like_first(x, y):
    return TensorProxy(like=x)


def operation(executor, **options):
    return executor.register_operator("product", meta=like_first, fn=lambda x, y: x * y, **options)


# each takes an executor and (gradient, x, y) -> gradients, and returns the operation


def by_generator(executor, gradients):
    symbol = operation(executor)

    @symbol.vjp
    def _(x, y):
        g = yield symbol(x, y)
        return gradients(g, x, y)

    return symbol


def by_register_grad(executor, gradients):
    symbol = operation(executor)

    @register_grad(symbol)
    def _(x, y):
        result = symbol(x, y)
        computed_gradients = gradients(get_grad(result), x, y)
        put_grads((x, y), computed_gradients if isinstance(computed_gradients, tuple) else (computed_gradients,))
        return result

    return symbol


def by_halves(executor, gradients):
    symbol = operation(executor)
    register_augmented_forward(symbol)(lambda x, y: VJPDual(symbol(x, y), (x, y)))
    register_backward(symbol)(lambda x, y, g: gradients(g, x, y))
    return symbol


def by_grad_transform(executor, gradients):
    symbol = operation(executor)

    def rule(x, y):
        result = symbol(x, y)
        computed_gradients = gradients(get_grad(result), x, y)
        put_grads((x, y), computed_gradients if isinstance(computed_gradients, tuple) else (computed_gradients,))
        return result

    executor.register_implementation(symbol, symbol, grad_transform=rule)
    return symbol


def by_opaque(executor, gradients):
    return thunder.opaque(
        lambda x, y: x * y,
        meta=lambda x, y: torch.empty_like(x),
        backward=lambda args, result, g: gradients(g, *args),
    )


WAYS = [by_generator, by_register_grad, by_halves, by_grad_transform, by_opaque]

WRONG = {
    "too few": (lambda g, x, y: (g * y,), "incorrect number of gradients"),
    "too many": (lambda g, x, y: (g * y, g * x, g), "incorrect number of gradients"),
    "another shape": (lambda g, x, y: (g * y, (g * x)[:2]), r"invalid gradient at index 1 - got \[2\]"),
    "no dimensions": (lambda g, x, y: ((g * y).sum(), g * x), r"invalid gradient at index 0 - got \[\]"),
    "a number": (lambda g, x, y: (g * y, 3.0), r"expected Variable or None \(got float\)"),
    "complex": (lambda g, x, y: (g * y * 1j, g * x), "expected a real gradient but got a complex one"),
}
RIGHT = {
    "both": lambda g, x, y: (g * y, g * x),
    "summed": lambda g, x, y: (g * y, (g * x).expand(2, 3) * 0.5),
    "none": lambda g, x, y: (g * y, None),
    "converted": lambda g, x, y: (g * y, (g * x).double()),
}


def run(way, gradients):
    executor = OperatorExecutor("given")
    symbol = way(executor, gradients)
    x, y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0], requires_grad=True)
    thunder.jit(lambda x, y: symbol(x, y), executors=[executor])(x, y).sum().backward()
    return x.grad, y.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_gradient_is_an_error(way, case):
    gradients, words = WRONG[case]
    with pytest.raises(DerivativeError, match=words):
        run(way, gradients)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_gradient_is_none(way, case):
    of_x, of_y = run(way, RIGHT[case])
    torch.testing.assert_close(of_x, torch.tensor([4.0, 5.0, 6.0]))
    if case != "none":
        torch.testing.assert_close(of_y, torch.tensor([1.0, 2.0, 3.0]))
    else:
        assert of_y is None or not of_y.any()


def test_a_complex_operation_may_have_a_complex_gradient():
    """That of a real operand is its real part, as in PyTorch."""
    x, z = torch.ones(2, requires_grad=True), torch.tensor([1 + 2j, 3 - 1j])
    thunder.jit(lambda x, z: (x * z).abs().sum(), fallback="error")(x, z).backward()
    torch.testing.assert_close(x.grad, z.abs())


def test_a_custom_operator_of_pytorch():
    """PyTorch's engine runs its derivative, and checks it."""

    @torch.library.custom_op("checked_gradients::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, g: g[:1])
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"returned an invalid gradient at index 0 - got \[1\]"):
        thunder.jit(lambda x: twice(x))(x).sum().backward()
