"""The steps of differentiation by name: joint trace, split, and what each promises."""

import pytest
import torch

import thunder
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.extend import OperatorExecutor
from thunder.transforms.autodiff import (
    forward_and_backward_from_trace,
    grad_transform_on_trace,
    split_into_forward_and_backward,
)


def T(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).requires_grad_()


def acquired(f, *args, **options):
    compiled = thunder.jit(f, **options)
    compiled(*args)
    return thunder.last_traces(compiled)[0]


def names(trace):
    return [b.sym.name for b in trace.bound_symbols]


def test_grad_transform_on_trace_is_forward_then_get_grad_then_backward():
    joint = grad_transform_on_trace(acquired(lambda x, y: torch.sin(x) * y, T(3), T(3, seed=1)))
    order = names(joint)
    assert order[:3] == ["sin", "mul", "get_grad"] and "cos" in order[3:]
    assert "Grad transform pass" in joint.provenance
    assert set(joint.output) == {"output", "flat_args", "fw_flat_out"}
    assert len(joint.output["output"]) == len(joint.output["flat_args"]) == 2
    assert joint.output["fw_flat_out"] is joint.bound_symbols[1].output
    assert "get_grad(" in str(joint)


def test_rules_write_no_marks(monkeypatch):
    trace, recorded, record = acquired(lambda x, y: torch.sin(x) * y, T(3), T(3, seed=1)), [], Symbol.record
    monkeypatch.setattr(
        Symbol, "record", lambda self, *arguments: recorded.append(self.name) or record(self, *arguments)
    )
    grad_transform_on_trace(trace)
    assert recorded.count("get_grad") == 1 and "put_grad" not in recorded  # that of the result


def test_split_gives_programs_that_run():
    x, y = T(3), T(3, seed=1)
    forward, backward = split_into_forward_and_backward(
        grad_transform_on_trace(acquired(lambda x, y: torch.sin(x) * y, x, y))
    )
    assert forward.tags == {thunder.core.trace.TraceTag.AUGMENTED_FORWARD} and backward.name == "backward_fn"
    with torch.no_grad():
        (out,), (tensors, others) = forward.python_callable()(x, y)
        dx, dy = backward.python_callable()([list(tensors), list(others)], [torch.ones_like(out)])
    torch.testing.assert_close(dx, torch.cos(x) * y)
    torch.testing.assert_close(dy, torch.sin(x))


def test_split_of_a_program_without_gradients_has_no_backward():
    x = T(3)
    forward, backward = split_into_forward_and_backward(
        grad_transform_on_trace(acquired(lambda x: torch.sin(x), x.detach()))
    )
    assert backward is None and names(forward) == ["sin"]


def test_forward_and_backward_from_trace_returns_both_by_name():
    forward_and_backward = forward_and_backward_from_trace(acquired(lambda x: torch.exp(x), T(3)), torch_autograd=True)
    assert forward_and_backward.forward_trace.bound_symbols[0].sym.name == "exp"
    assert forward_and_backward.backward_trace.name == "backward_fn"


def test_the_forward_holds_nothing_that_only_the_backward_needs():
    """A rule may write its cosine before it asks for the cotangent: what the result does not need is backward."""
    executor = OperatorExecutor("cosine_first")
    double = executor.register_operator(
        "sine", meta=lambda x: thunder.TensorProxy(like=x), fn=torch.sin, replaces=torch.sin
    )

    def rule(x):
        c = thunder.torch.cos(x)
        y = double(x)
        put_grad(x, get_grad(y) * c)
        return y

    executor.register_implementation(double, double, grad_transform=rule)
    thunder.extend.register_executor(executor)
    try:
        x = T(4)
        compiled = thunder.jit(lambda x: torch.sin(x), executors=[executor])
        (g,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(g, torch.cos(x))
        assert "cos" not in names(thunder.last_traces(compiled)[-1]) and "cos" in names(
            thunder.last_backward_traces(compiled)[-1]
        )
    finally:
        thunder.extend.deregister_executor(executor)


def with_rule(rule, **options):
    executor = OperatorExecutor("under_test")
    pair = executor.register_operator(
        "pair",
        meta=lambda x, y: (thunder.TensorProxy(like=x), thunder.TensorProxy(like=y)),
        fn=lambda x, y: (x * 2, y * 3),
    )
    executor.register_implementation(pair, pair, grad_transform=lambda x, y: rule(pair, x, y))
    return pair, [executor]


def test_wrong_number_of_results_of_a_rule_names_the_operation():
    pair, executors = with_rule(lambda pair, x, y: pair(x, y)[0])
    with pytest.raises(thunder.errors.DerivativeError, match="pair.*returned 1 values where the operation has 2"):
        thunder.jit(lambda x, y: pair(x, y)[0].sum(), executors=executors)(T(3), T(3))


@pytest.mark.parametrize(
    ("target", "why"), [("result", "whose gradient was read before"), ("inner", "which is no argument of it")]
)
def test_gradients_put_to_anything_but_an_argument_are_errors(target, why):
    def rule(pair, x, y):
        a, b = pair(x, y)
        values = {"result": a, "inner": thunder.torch.sin(x)}
        put_grads((x, y), (get_grad(a) * 2, get_grad(b) * 3))
        put_grad(values[target], get_grad(a))
        return a, b

    pair, executors = with_rule(rule)
    with pytest.raises(thunder.errors.DerivativeError, match=f"pair puts a gradient to .*, {why}"):
        thunder.jit(lambda x, y: pair(x, y)[0].sum(), executors=executors)(T(3), T(3))


def test_get_grad_twice_is_one_value_and_put_grads_to_one_argument_add_up():
    def rule(pair, x, y):
        a, b = pair(x, y)
        assert get_grad(a) is get_grad(a)
        put_grad(x, get_grad(a))
        put_grad(x, get_grad(a))
        put_grads((y,), (get_grad(b) * 3,))
        return a, b

    pair, executors = with_rule(rule)
    x, y = T(3), T(3, seed=1)
    a, b = thunder.jit(lambda x, y: pair(x, y), executors=executors)(x, y)
    gx, gy = torch.autograd.grad((a * b).sum(), (x, y))
    torch.testing.assert_close(gx, 2 * (y * 3))
    torch.testing.assert_close(gy, 3 * (x * 2))


def test_a_cotangent_that_is_missing_is_zeros_made_only_where_used():
    pair, executors = with_rule(
        lambda pair, x, y: [
            r := pair(x, y),
            put_grads((x, y), (get_grad(r[0]) * 2 + get_grad(r[1]), get_grad(r[1]) * 3)),
        ][0]
    )
    x, y = T(3), T(3, seed=1)
    compiled = thunder.jit(lambda x, y: pair(x, y)[0].sum(), executors=executors)
    gx, gy = torch.autograd.grad(compiled(x, y), (x, y))
    torch.testing.assert_close(gx, torch.full_like(x, 2))
    torch.testing.assert_close(gy, torch.zeros_like(y))
    assert names(thunder.last_backward_traces(compiled)[-1]).count("zeros_like") == 1


def test_groups_without_a_gradient_are_skipped():
    """Only the condition of the where depends on sin: nothing of it is in the backward."""

    def f(x, y):
        return torch.where(torch.sin(x) > 0, y, 2 * y).sum()

    compiled = thunder.jit(f)
    x, y = T(5), T(5, seed=1)
    compiled(x, y).backward()
    assert "cos" not in names(thunder.last_backward_traces(compiled)[-1])
    assert x.grad is None and y.grad is not None


def test_outputs_of_a_rule_that_are_inputs_are_edges_of_their_own():
    executor = OperatorExecutor("passes_on")
    same = executor.register_operator(
        "same",
        meta=lambda x, y: (thunder.TensorProxy(like=x), thunder.TensorProxy(like=y)),
        fn=lambda x, y: (x.clone(), y * 3),
    )

    def rule(x, y):
        _, b = same(x, y)
        put_grads((x, y), (get_grad(x) * 10, get_grad(b) * 3))
        return x, b

    executor.register_implementation(same, same, grad_transform=rule)
    x, y = T(3), T(3, seed=1)
    a, b = thunder.jit(lambda x, y: same(torch.sin(x), y), executors=[executor])(x, y)
    assert a is not x
    gx, gy = torch.autograd.grad(a.sum() + b.sum(), (x, y))
    torch.testing.assert_close(gx, 10 * torch.cos(x))
    torch.testing.assert_close(gy, torch.full_like(y, 3))


def test_what_a_rule_passes_on_without_asking_gets_its_gradient():
    executor = OperatorExecutor("passes_on")
    same = executor.register_operator("same", meta=lambda x: thunder.TensorProxy(like=x), fn=torch.clone)
    executor.register_implementation(same, same, grad_transform=lambda x: x)
    x = T(3)
    (g,) = torch.autograd.grad((thunder.jit(lambda x: same(torch.sin(x)), executors=[executor])(x) * 2).sum(), x)
    torch.testing.assert_close(g, 2 * torch.cos(x))


def test_results_that_are_arguments_are_the_same_objects_and_get_their_gradient_outside():
    x = T(3)
    same, twice = thunder.jit(lambda x: (x, x * 2))(x)
    assert same is x
    (g,) = torch.autograd.grad((same * 3).sum() + twice.sum(), x)
    torch.testing.assert_close(g, torch.full_like(x, 5))
