"""Mistakes of those who extend thunder: each error names the operation, the user's line and what to do."""

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.errors import DeclarationError, DerivativeError, MissingImplementationError, OptionError, TraceCheckError
from thunder.extend import OperatorExecutor

X = torch.linspace(-1, 1, 6).reshape(2, 3)
CHECKED = thunder.DebugOptions(check_traces=True)


@pytest.fixture
def myex():
    return OperatorExecutor("myex")


def raised(kind, match, compiled, *args):
    """The error, which names the line of the program that is marked."""
    with pytest.raises(kind, match=match) as caught:
        compiled(*args)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"{__file__}:" in text and "# the line" in text, text
    return text


def grad():
    return X.clone().requires_grad_()


def program(x):
    y = x * 2
    return y.sin()  # the line


def test_a_grad_transform_with_the_wrong_number_of_results(myex):
    def wrong(x):
        result = ltorch.sin(x)
        put_grads((x,), (get_grad(result),))
        return result, result

    myex.register_implementation(ltorch.sin, execution_transform=lambda x: ltorch.sin(x), grad_transform=wrong)
    raised(
        DerivativeError,
        "the grad transform of ltorch.sin returned 2 values where the operation has 1: return what the operation "
        "returns",
        thunder.jit(program, executors=[myex]),
        grad(),
    )


def test_a_gradient_put_to_what_is_no_argument(myex):
    def wrong(x):
        doubled = ltorch.mul(x, 2)
        result = ltorch.sin(x)
        put_grad(doubled, get_grad(result))
        return result

    myex.register_implementation(ltorch.sin, execution_transform=lambda x: ltorch.sin(x), grad_transform=wrong)
    raised(
        DerivativeError,
        "the derivative of ltorch.sin puts a gradient to .*, which is no argument of it: put gradients to the "
        "arguments",
        thunder.jit(program, executors=[myex]),
        grad(),
    )


def test_a_missing_derivative(myex):
    op = myex.register_operator("doubled", meta=lambda x: TensorProxy(like=x), fn=lambda x: x * 2)

    def program(x):
        return op(x)  # the line

    compiled = thunder.jit(program, executors=[myex])
    raised(
        MissingImplementationError,
        r"doubled has no derivative: give it one with register_implementation\(..., grad_transform=...\), define it "
        r"by like=, or call it under",
        compiled,
        grad(),
    )
    assert torch.equal(compiled(X), X * 2)
    with torch.no_grad():
        assert torch.equal(compiled(grad()), X * 2)


def test_an_execution_transform_with_the_wrong_number_of_results(myex):
    myex.register_implementation(ltorch.unbind, execution_transform=lambda a, dim=0: (a[0],))

    def program(x):
        return x.unbind(0)  # the line

    raised(
        MissingImplementationError,
        "the execution transform of myex for ltorch.unbind returned another number of values than the operation has: "
        "return 2",
        thunder.jit(program, executors=[myex]),
        X,
    )


def test_an_operation_that_nobody_executes(myex):
    op = myex.register_operator("doubled", meta=lambda x: TensorProxy(like=x), fn=lambda x: x * 2)

    def program(x):
        return op(x)  # the line

    raised(
        MissingImplementationError,
        "no executor takes doubled: asked (.*, )?torch, python. Register an implementation",
        thunder.jit(program),
        X,
    )


@pytest.mark.parametrize(
    "meta, said",
    [
        (
            lambda x: TensorProxy(like=x, shape=(3, 2)),
            r'doubled returned "cpu f32\[2, 3\]" where its meta rule says y: "cpu f32\[3, 2\]"',
        ),
        (
            lambda x: TensorProxy(like=x, dtype=thunder.float64),
            r'doubled returned "cpu f32\[2, 3\]" where its meta rule says y: "cpu f64\[2, 3\]"',
        ),
        (
            lambda x: TensorProxy(like=x, device="meta"),
            r'doubled returned "cpu f32\[2, 3\]" where its meta rule says y: "meta f32\[2, 3\]"',
        ),
        (
            lambda x: (TensorProxy(like=x), TensorProxy(like=x)),
            "doubled returned a Tensor where its meta rule says 2 values",
        ),
        (lambda x: [TensorProxy(like=x), 3][:1], "doubled returned a Tensor where its meta rule says 1 values"),
        (
            lambda x: TensorProxy(like=x, shape=(2,)),
            r'doubled returned "cpu f32\[2, 3\]" where its meta rule says y: "cpu f32\[2\]"',
        ),
    ],
)
def test_a_meta_rule_that_does_not_say_what_the_function_returns(myex, meta, said):
    op = myex.register_operator("doubled", meta=meta, fn=lambda x: x * 2)

    def program(x):
        y = op(x)  # the line
        return y

    text = raised(TraceCheckError, said, thunder.jit(program, executors=[myex], debug_options=CHECKED), X)
    assert "correct the meta= of the operation, or the function that executes it" in text


def test_results_are_checked_in_both_directions_and_right_ones_pass(myex):
    pair = myex.register_operator("pair", meta=lambda x: (TensorProxy(like=x), 7, "s"), fn=lambda x: (x + 1, 7, "s"))
    compiled = thunder.jit(lambda x: pair(x)[0] * 2, executors=[myex], debug_options=CHECKED)
    assert torch.equal(compiled(X), (X + 1) * 2) and torch.equal(compiled(X), (X + 1) * 2)
    wrong = myex.register_operator("seven", meta=lambda x: (TensorProxy(like=x), 7), fn=lambda x: (x + 1, 8))

    def program(x):
        return wrong(x)[0]  # the line

    raised(
        TraceCheckError,
        "seven returned 8 where its meta rule says 7",
        thunder.jit(program, executors=[myex], debug_options=CHECKED),
        X,
    )
    x = grad()
    trained = thunder.jit(lambda x: x.sin() * x.cos(), debug_options=CHECKED)
    trained(x).sum().backward()
    torch.testing.assert_close(x.grad, (2 * X).cos())

    def backward(x):
        result = ltorch.sin(x)
        put_grads((x,), (halved(get_grad(result)),))
        return result

    halved = myex.register_operator("halved", meta=lambda x: TensorProxy(like=x), fn=lambda x: x[:1] / 2)
    myex.register_implementation(ltorch.sin, execution_transform=lambda x: ltorch.sin(x), grad_transform=backward)
    broken = thunder.jit(lambda x: x.sin(), executors=[myex], debug_options=CHECKED)(grad())
    with pytest.raises(TraceCheckError, match=r'halved returned "cpu f32\[1, 3\]" where its meta rule says'):
        broken.sum().backward()


def test_an_error_at_run_time_names_the_line_under_check_traces_too(myex):
    def failing(x):
        raise FloatingPointError("not today")

    op = myex.register_operator("failing", meta=lambda x: TensorProxy(like=x), fn=failing)

    def program(x):
        return op(x)  # the line

    for debug in (None, CHECKED):
        raised(FloatingPointError, "not today", thunder.jit(program, executors=[myex], debug_options=debug), X)


def test_executors_of_the_wrong_type(myex):
    for wrong, said in (("torch", "'torch'"), (myex, "myex"), (3, "a int")):
        with pytest.raises(
            OptionError,
            match=rf"executors= is a list of executors or their names, not {said}: executors=\[...\]; registered: "
            r".*torch",
        ):
            thunder.jit(program, executors=wrong)
    assert torch.equal(thunder.jit(program, executors={"torch"})(X), program(X))


def test_registrations_of_the_wrong_type(myex):
    op = myex.register_operator("op", meta=lambda x: TensorProxy(like=x), fn=torch.sin)
    for arguments in (
        {"meta": 3, "fn": abs},
        {"like": "f", "fn": abs},
        {"meta": abs, "fn": 3},
        {"meta": abs, "fn": abs, "python_printer": "p"},
    ):
        with pytest.raises(TypeError, match=r"register_operator\('wrong'\): .*= is a function, not a (int|str)"):
            myex.register_operator("wrong", **arguments)
    with pytest.raises(
        TypeError,
        match="register_implementation: op is a builtin_function_or_method: give the operation that "
        "register_operator returned for it",
    ):
        myex.register_implementation(ltorch.sin, torch.sin)
    for name in ("checker", "grad_transform"):
        with pytest.raises(TypeError, match=f"register_implementation: {name}= is a function, not a bool"):
            myex.register_implementation(ltorch.sin, op, **{name: True})
    with pytest.raises(
        TypeError,
        match=r"program is no operation of thunder's: give an operation \(thunder.torch.program\), its id, or a "
        r"torch function",
    ):
        myex.register_implementation(program, op)
    myex.register_implementation(torch.sin, op)
    assert "ltorch.sin" in myex.implmap


def test_names_of_operations_exist(myex):
    op = myex.register_operator("mine", like=ltorch.tanh, fn=torch.tanh)
    for name, words in (
        ("ltorch.tanhh", "no operation has the id 'ltorch.tanhh': did you mean 'ltorch.tanh'"),
        ("torch.tanh", "did you mean 'ltorch.tanh'"),
        ("torch.ops.nowhere.mine", "no operation has the id 'torch.ops.nowhere.mine'"),
        ("zzzz", "ids are ltorch.<name>, prims.<name>"),
    ):
        with pytest.raises(OptionError) as caught:
            myex.register_implementation(name, op)
        assert words in str(caught.value)
    for name in ("ltorch.tanh", "prims.tanh", "myex.mine", "torch.ops.aten.tanh"):
        myex.register_implementation(name, op)


def test_an_implementation_of_a_primitive_runs(myex):
    calls = []
    op = myex.register_operator(
        "mine", meta=lambda x: TensorProxy(like=x), fn=lambda x: (calls.append(1), torch.tanh(x))[1]
    )
    myex.register_implementation("prims.tanh", op)
    compiled = thunder.jit(lambda x: torch.tanh(x) * 2, executors=[myex])
    assert torch.equal(compiled(X), X.tanh() * 2) and calls == [1]
    assert "= mine(x)" in thunder.last_traces(compiled)[-1].python()
    x = grad()
    thunder.jit(lambda x: torch.tanh(x).sum(), executors=[myex])(x).backward()
    torch.testing.assert_close(x.grad, 1 - X.tanh() ** 2)


def test_an_execution_transform_of_another_type(myex):
    myex.register_implementation(ltorch.sin, execution_transform=lambda x: ltorch.to(ltorch.sin(x), torch.float64))
    raised(
        DeclarationError,
        r"the execution transform of myex for ltorch.sin returned .*f64\[2, 3\].*, where the operation gives .*f32",
        thunder.jit(program, executors=[myex]),
        X,
    )
