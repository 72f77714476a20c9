"""Derivatives that users register for operations."""

from contextlib import contextmanager

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
from thunder.errors import DerivativeError, MissingImplementationError, OptionError
from thunder.extend import OperatorExecutor
from thunder.ops import PRIMS
from thunder.transforms.register_grad import REGISTERED

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture
def operation():
    """An operation of its own, so that no other test sees what is registered."""
    executor = OperatorExecutor("mine")
    tripled_product = executor.register_operator(
        "tripled_product", meta=lambda x, y, n=3: TensorProxy(like=x), fn=lambda x, y, n=3: x * y * n
    )
    return executor, tripled_product


@contextmanager
def restored(*symbols):
    """The operations, with what is registered for them forgotten afterwards: other tests run in this process."""
    before = [(s.grad_rule, dict(s.rules)) for s in symbols], dict(REGISTERED)
    yield symbols
    for s, (s.grad_rule, s.rules) in zip(symbols, before[0], strict=True):
        pass
    REGISTERED.clear()
    REGISTERED.update(before[1])


@pytest.fixture
def sine():
    with restored(ltorch.sin) as (operation,):
        yield operation


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

    computed_gradients = gradients(lambda x, y: product(x, y).exp(), [executor], X, X + 2)
    x, y = X.clone().requires_grad_(), (X + 2).requires_grad_()
    (x * y * 3).exp().sum().backward()
    torch.testing.assert_close(computed_gradients, [x.grad, y.grad])
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

    computed_gradients = gradients(lambda x, y: product(x, y, 2).sin(), [executor], X, X + 2)
    x, y = X.clone().requires_grad_(), (X + 2).requires_grad_()
    (x * y * 2).sin().sum().backward()
    torch.testing.assert_close(computed_gradients, [x.grad, y.grad])
    register_backward(product)(lambda x, y, n, g: g * y * n)
    with pytest.raises(
        DerivativeError,
        match=r"the backward of tripled_product returned an incorrect number of gradients \(expected 3, got 1\)",
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
    (computed_gradients,) = gradients(lambda x: both(x)[0] * 2 + both(x)[1], [executor], X)
    torch.testing.assert_close(computed_gradients, 2 * X.cos() - X.sin())


def test_what_is_no_operation():
    with pytest.raises(OptionError, match="no operation has the id 'ltorch.nothing'"):
        register_grad("ltorch.nothing", lambda x: x)
    for wrong, said in ((3, "3"), (gradients, "gradients")):
        with pytest.raises(TypeError, match=f"{said} is no operation of thunder's: give an operation"):
            register_grad(wrong, lambda x: x)
    with pytest.raises(TypeError, match=r"register_grad\(ltorch.sin\): the derivative is a function, not a int"):
        register_grad(ltorch.sin, 3)


@pytest.fixture
def tangent():
    """The operation and its primitive, with what is registered for them forgotten afterwards."""
    with restored(ltorch.tanh, PRIMS["tanh"]) as operations:
        yield operations


def times(n, symbol):
    def rule(x):
        result = symbol(x)
        put_grads((x,), (get_grad(result) * n,))
        return result

    return rule


def test_the_derivative_of_a_primitive(tangent):
    register_grad("prims.tanh", times(5.0, tangent[1]))
    assert torch.equal(gradients(lambda x: torch.tanh(x), [], X)[0], torch.full_like(X, 5.0))
    register_grad("ltorch.tanh", times(7.0, tangent[0]))  # which comes first
    assert torch.equal(gradients(lambda x: torch.tanh(x), [], X)[0], torch.full_like(X, 7.0))


@pytest.mark.parametrize("left_out", range(5))
def test_the_order_of_derivatives(tangent, left_out):
    """An executor's for the operation, or for the primitive that it is; those that are registered; its own."""
    ltorch_tanh, prims_tanh = tangent
    doubled = lambda executor, like: executor.register_operator("tangent", like=like, fn=torch.tanh)

    def executor(name, operation, factor):
        created = OperatorExecutor(name)
        symbol = doubled(created, operation)
        created.register_implementation(operation, symbol, grad_transform=times(factor, symbol))
        return created

    steps = [
        lambda: executor("of the operation", ltorch_tanh, 3.0),
        lambda: executor("of the primitive", prims_tanh, 4.0),
        lambda: register_grad(ltorch_tanh, times(5.0, ltorch_tanh)),
        lambda: register_grad(prims_tanh, times(6.0, prims_tanh)),
    ]
    results = [step() for step in steps[left_out:]]
    executors = [r for r in results if isinstance(r, OperatorExecutor)]
    expected = torch.full_like(X, left_out + 3.0) if left_out < 4 else 1 - torch.tanh(X) ** 2
    for program in (torch.tanh, lambda x: torch.tanh(x) * 1.0):
        torch.testing.assert_close(gradients(program, executors, X)[0], expected)
    if executors:  # the first executor that takes either has it
        first = gradients(torch.tanh, executors[::-1], X)[0]
        assert torch.equal(first, torch.full_like(X, 4.0))


def test_a_registered_derivative_is_the_first_where_a_second_may_follow():
    """`einsum` has a rule of its own for programs that are differentiated twice."""
    with restored(ltorch.einsum):

        @register_grad(ltorch.einsum)
        def doubled(equation, *operands):
            result = ltorch.einsum(equation, *operands)
            put_grads(operands, [2.0 * get_grad(result) * x * x for x in operands])
            return result

        x = X.clone().requires_grad_()
        y = thunder.jit(lambda x: torch.einsum("ij->", x), fallback="error")(x)
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x)
        torch.testing.assert_close((slope, second), (2 * X * X, 4 * X))


def test_operations_without_a_decomposition_beside_a_registered_primitive(tangent):
    """RReLU in training draws random numbers: its arguments have no decomposition to look for primitives in."""
    register_grad("prims.tanh", times(5.0, tangent[1]))
    x = torch.randn(4, requires_grad=True)
    thunder.jit(torch.nn.RReLU(), fallback="error")(x).sum().backward()
    assert x.grad.shape == x.shape


def test_a_registration_counts_at_once(tangent):
    compiled = thunder.jit(lambda x: torch.tanh(x))

    def slope():
        x = X.clone().requires_grad_()
        return torch.autograd.grad(compiled(x).sum(), x)[0]

    torch.testing.assert_close(slope(), 1 - torch.tanh(X) ** 2)
    for n in (3.0, 4.0):
        register_grad(tangent[0], times(n, tangent[0]))
        assert torch.equal(slope(), torch.full_like(X, n))
    programs = len(compiled.programs)
    slope()
    assert len(compiled.programs) == programs
    assert "derivatives and implementations that were registered" in compiled.recompilations[-1].reason


def test_an_implementation_that_is_registered_later_counts_at_once():
    executor = OperatorExecutor("late")
    compiled = thunder.jit(lambda x: torch.tanh(x), executors=[executor])
    compiled(X)
    doubled = executor.register_operator("doubled", meta=lambda x: TensorProxy(like=x), fn=lambda x: x * 2)
    executor.register_implementation(ltorch.tanh, doubled)
    assert torch.equal(compiled(X), X * 2)


@pytest.mark.parametrize("register", [register_grad, register_augmented_forward, register_backward])
def test_names_have_to_exist(register):
    with pytest.raises(thunder.errors.OptionError, match="no operation has the id 'ltorch.tahn': did you mean"):
        register("ltorch.tahn")(lambda x: x)


def test_a_program_is_written_unless_an_operation_of_thunders_has_another_derivative(operation, tangent, tmp_path):
    register_grad(operation[1], times(2.0, operation[1]))
    x = X.clone().requires_grad_()
    thunder.precompile(torch.sin, x, path=tmp_path / "p")
    register_grad(tangent[0], times(3.0, tangent[0]))
    with pytest.raises(thunder.errors.ProgramFileError, match="register_grad gave ltorch.tanh another derivative"):
        thunder.precompile(torch.sin, x, path=tmp_path / "q")


def test_a_derivative_of_the_users_counts_where_pytorchs_bits_are_wanted():
    """PyTorch differentiates `einsum` under `numerics="eager"`, unless a user has said how."""
    with restored(ltorch.einsum):

        @register_grad(ltorch.einsum)
        def doubled(equation, *operands):
            result = ltorch.einsum(equation, *operands)
            put_grads(operands, [2.0 * get_grad(result).sum() * ltorch.ones_like(x) for x in operands])
            return result

        x = X.clone().requires_grad_()
        thunder.jit(lambda x: torch.einsum("ij->", x), numerics="eager")(x).backward()
        assert torch.equal(x.grad, torch.full_like(X, 2.0))
