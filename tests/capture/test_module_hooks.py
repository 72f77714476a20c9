"""Full backward hooks of modules and backward pre-hooks, beside eager."""

import pytest
import torch
from torch import nn

import thunder
from tests.capture.runs import refused, same_as_eager, state
from thunder.errors import FallbackWarning


def x(requires_grad=True):
    return torch.randn(3, 4, requires_grad=requires_grad)


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def noted(m, seen):
    """Hooks on all modules, in the order that they run."""
    for name, module in m.named_modules():
        module.register_full_backward_hook(
            lambda module, inputs, outputs, name=name: seen.append((name, inputs[0].clone(), outputs[0].clone()))
        )


def seen_outside(jit):
    m, seen = network(), []
    noted(m, seen)
    f = jit(m)
    for _ in range(3):
        inputs = x()
        f(inputs).pow(2).sum().backward()
        seen.append((inputs.grad, state(m)))
    return seen


def seen_inside(jit):
    m, seen = network(), []
    noted(m, seen)

    def step(x):
        m(x).pow(2).sum().backward()

    step = jit(step)
    for _ in range(3):
        inputs = x()
        step(inputs)
        seen.append((inputs.grad, state(m)))
    return seen


def changed(where):
    def run(jit):
        m = network()
        m[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2 + outputs[0].mean(),))
        m[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-0.1, 0.1),))
        m[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] + 1,))
        m[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
        m[1].register_full_backward_pre_hook(lambda module, outputs: None)

        def loss(x):
            actual = m(x).pow(2).sum()
            if where == "inside":
                actual.backward()
            return actual.detach() if where == "inside" else actual

        loss, seen = jit(loss), []
        for _ in range(3):
            arguments = x()
            actual = loss(arguments)
            if where == "outside":
                actual.backward()
            seen.append((actual, arguments.grad, state(m)))
        return seen

    return run


def registered_inside(jit):
    m, seen = network(), []

    def f(x, by):
        handle = m[2].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0] * by))
        total = m(x).sum()
        handle.remove()
        return total

    f = jit(f)
    for i in range(3):
        f(x(), torch.tensor(float(i))).backward()
        seen.append(state(m))
    return seen


def two_forwards_first(jit):
    m, seen = network(), []
    noted(m[0], seen)
    f = jit(m)
    a, b = x(), x()
    (f(a).sum() + 2 * f(b).sum()).backward()
    return [*sorted(seen, key=lambda results: float(results[2].sum())), a.grad, b.grad]


def without_grad(jit):
    m, seen = network(), []
    noted(m, seen)
    f = jit(m)
    with torch.no_grad():
        return [f(x()), f(x()), len(seen)]


def attributions(jit):
    """The gradient at a layer, weighted (Grad-CAM)."""
    m = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    saved = {}
    m[1].register_forward_hook(lambda module, inputs, output: saved.update(output=output.detach()))
    m[1].register_full_backward_hook(lambda module, inputs, outputs: saved.update(gradient=outputs[0]))

    def explain(x):
        m(x)[:, 0].sum().backward()
        return (saved["gradient"].mean((2, 3), keepdim=True) * saved["output"]).sum(1).relu()

    explain = jit(explain)
    return [explain(torch.randn(2, 1, 4, 4, requires_grad=True)) for _ in range(3)]


def no_input_requires_grad(jit):
    m, seen = network(), []
    m.register_full_backward_hook(lambda module, inputs, outputs: seen.append((len(inputs), outputs[0].clone())))
    f = jit(m)
    for _ in range(3):
        f(x(False)).pow(2).sum().backward()
    return [*seen, state(m)]


def several_tensors(jit):
    m, seen = nn.Bilinear(4, 4, 2), []
    m.register_full_backward_hook(lambda module, inputs, outputs: seen.append([g.clone() for g in inputs]))
    f = jit(m)
    f(x(), x()).sum().backward()
    return seen


RUNS = [
    seen_outside, seen_inside, changed("outside"), changed("inside"), registered_inside, two_forwards_first,
    attributions, no_input_requires_grad, several_tensors,
]  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_are_refused(run):
    refused(run, "a module has full backward hooks")


def test_without_grad_they_do_not_run():
    same_as_eager(without_grad)


def test_the_module_runs_as_it_is_in_a_program():
    m, seen = network(), []
    m[1].register_full_backward_hook(lambda module, inputs, outputs: seen.append((inputs[0], outputs[0])))
    compiled, arguments = thunder.jit(m, fallback="eager"), x()
    with pytest.warns(FallbackWarning, match="full backward hooks"):
        compiled(arguments).pow(2).sum().backward()
    ours, gradient, seen[:], arguments.grad = list(seen), arguments.grad, [], None
    m(arguments).pow(2).sum().backward()
    torch.testing.assert_close((ours, gradient), (seen, arguments.grad))
    names = [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols]
    assert names.count("eager_call") == 1 and names.count("linear") == 2


def test_a_backward_inside_does_not_run_hooks_unseen():
    """What a hook changes is no part of a program that ends with it."""
    m, log = nn.Linear(4, 4), []
    m.register_full_backward_hook(lambda module, inputs, outputs: log.append(len(log)))
    runs = thunder.disable(m.__call__)

    def step(x):
        runs(x * 2).sum().backward()
        return x.detach() * len(log)

    compiled = thunder.jit(step, fallback="eager")
    with pytest.warns(FallbackWarning, match="a backward inside of it runs Python code"):
        for count in range(1, 4):
            assert torch.equal(compiled(arguments := x()), arguments * count)


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_hooks_made_anew_are_one_program():
    m = network()
    compiled, seen = thunder.jit(m, fallback="eager"), []
    for i in range(12):
        handle = m[0].register_full_backward_hook(lambda module, inputs, outputs, i=i: seen.append(i))
        compiled(x()).sum().backward()
        handle.remove()
    assert seen == list(range(12)) and len(compiled.programs) == 1
    assert torch.equal(compiled(y := x()), m(y))  # without hooks the module is captured again
    assert len(compiled.programs) == 2 and not compiled.programs[-1].captured.has_eager_calls
