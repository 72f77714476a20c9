"""Gradients of several backwards: the second adds to those that are there where it computes them."""

import copy

import pytest
import torch

import thunder
from tests.test_two_backwards import Matmuls, layers
from thunder.cache import entry
from thunder.runtime import autograd
from thunder.transforms import accumulate


@pytest.fixture(scope="module")
def calls():
    """What gradients were added to; executors keep the function of a symbol."""
    calls, add = [], accumulate.add_to_gradient.fn

    def counted(held, gradient):
        calls.append(held)
        add(held, gradient)

    accumulate.add_to_gradient.fn = counted
    yield calls
    accumulate.add_to_gradient.fn = add


@pytest.fixture(autouse=True)
def added(monkeypatch, calls):
    """Gradients of any size are added in programs; to what."""
    monkeypatch.setattr(autograd, "ACCUMULATED", 0)
    calls.clear()
    return calls


def backwards(module, run, prepare=None, count=3):
    torch.manual_seed(1)
    for i in range(count):
        x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        if prepare is not None:
            prepare(i, module)
        run(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


def compare(prepare=None, options=None):
    module = layers()
    whole = copy.deepcopy(module)
    compiled = thunder.jit(module, executors=[], **(options or {}))
    ours, wanted = backwards(module, compiled, prepare), backwards(whole, whole, prepare)
    for a, b in zip(ours, wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    return compiled


def test_the_second_backward_adds_in_the_memory_of_the_first(added):
    compiled = compare()
    assert len(added) == 2 * 5  # two backwards, five parameters
    assert {id(x) for x in added} == {id(p.grad) for p in compiled.parameters()}
    assert thunder.cache_misses(compiled) == 1


def test_a_sum_follows_its_gradient(monkeypatch):
    """The next gradient is computed when the one before it is freed."""
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    programs, lower = [], entry.lower_accumulating

    def noted(*args):
        programs.append(lower(*args))
        return programs[-1]

    monkeypatch.setattr(entry, "lower_accumulating", noted)
    compiled = thunder.jit(module, executors=[])
    for _ in range(2):
        compiled(torch.randn(8, 8)).sum().backward()
    ((trace, places),) = programs
    assert len(places) == 4
    lines = [line.strip() for line in trace.python(print_depth=1, memory=True).splitlines()]
    of_weights = [n for n, line in enumerate(lines) if line.startswith("add_to_gradient")]
    assert len(of_weights) == 4
    for n in of_weights:
        gradient = lines[n].split(")")[0].split(", ")[1]
        assert lines[n - 1 - lines[n - 1].startswith("del")].startswith(f"{gradient} = torch.mm(")
        assert not any(gradient in line for line in lines[n + 1 :] if not line.startswith("del"))


def doubled(p):
    p.grad.mul_(2)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda i, m: [p.register_hook(lambda g: 2 * g) for p in m.parameters()] if i == 1 else None,
        lambda i, m: [p.register_post_accumulate_grad_hook(doubled) for p in m.parameters()] if i == 1 else None,
        lambda i, m: setattr(m[0].weight, "grad", None),
        lambda i, m: m[0].weight.requires_grad_(i < 1),
        lambda i, m: m.zero_grad(set_to_none=False),
    ],
    ids=["hooks", "hooks behind", "one is None", "frozen later", "zeroed"],
)
@pytest.mark.filterwarnings("ignore:hooks behind the accumulation")
def test_what_autograd_does_besides_is_done(prepare):
    compare(prepare)


def test_gradients_that_are_asked_for_are_added_to_nothing(added):
    module = layers()
    compiled, x = thunder.jit(module, executors=[]), torch.randn(7, 4, dtype=torch.float64)
    compiled(x).sum().backward()
    before = [p.grad.clone() for p in module.parameters()]
    gradients = torch.autograd.grad(compiled(x).sum(), list(module.parameters()))
    assert not added
    assert all(map(torch.equal, gradients, before))
    assert all(torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True))
    compiled(x).sum().backward(inputs=[module[0].weight])
    assert [x.shape for x in added] == [(6, 4)]
    assert torch.equal(module[0].weight.grad, 2 * before[0]) and torch.equal(module[4].bias.grad, before[-1])


def test_a_backward_in_two_frees_what_its_first_half_reads_alone(added):
    """The second half adds to gradients, and nothing is computed twice."""
    module = layers()
    whole, compiled = copy.deepcopy(module), thunder.jit(module, executors=[])
    for _ in range(2):
        x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
        cotangent = torch.randn(7, 3, dtype=torch.float64)
        y = compiled(x)
        edge = torch.autograd.graph.get_gradient_edge(y)
        assert autograd.backward_in_two(edge.node)
        with Matmuls() as matmuls:
            torch.autograd.backward([edge], [cotangent], inputs=[x])
            assert matmuls.count == 3
            saved = edge.node.left.saved
            assert any(s is None for s in saved) and any(s is not None for s in saved)
            torch.autograd.backward([edge], [cotangent], inputs=list(module.parameters()))
        assert matmuls.count == 6
        z = x.detach().requires_grad_()
        whole(z).backward(cotangent)
        assert torch.equal(x.grad, z.grad)
    assert len(added) == 5
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("other", ["a cotangent", "an input"])
def test_the_second_half_is_of_the_first(other):
    compiled, x = thunder.jit(layers(), executors=[]), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    y, cotangent = compiled(x), torch.randn(7, 3, dtype=torch.float64)
    edge = torch.autograd.graph.get_gradient_edge(y)
    assert autograd.backward_in_two(edge.node)
    torch.autograd.backward([edge], [cotangent], inputs=[x])
    wanted = [x] if other == "an input" else list(compiled.parameters())
    with pytest.raises(RuntimeError, match="has freed what was saved"):
        torch.autograd.backward([edge], [2 * cotangent], inputs=wanted)
