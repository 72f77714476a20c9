"""Eager calls: the gradients of what a function stores where its result does not lead."""

import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder
from tests.capture.test_eager_calls import step
from tests.paths.compared import assert_same
from thunder.errors import FallbackWarning


class Stores(nn.Module):
    """Calls a function that stores what it computes where its result does not lead."""

    def __init__(self, store):
        super().__init__()
        self.linear, self.store = nn.Linear(4, 4), store

    def forward(self, x):
        y = self.linear(x)
        stored = self.store(self, y)
        return y.sum() + stored() * 0 + self.stored[0].square().sum()


@thunder.disable
def in_an_attribute(module, y):
    module.stored = [y * 2 + torch.rand(())]
    return int


@thunder.disable
def itself(module, y):
    module.stored = (y,)
    return int


@thunder.disable
def behind_a_view(module, y):
    module.stored = torch.stack([y, y]).exp().unbind(0)
    return int


@pytest.mark.parametrize("store", [in_an_attribute, itself, behind_a_view])
def test_gradients_of_what_a_function_stores_elsewhere_reach_its_arguments(store):
    module = Stores(store)
    compiled = thunder.jit(module, fallback="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            x = torch.randn(2, 4)
            torch.manual_seed(seed)
            want = step(module, module, x)
            torch.manual_seed(seed)
            assert_same(step(compiled, module, x), want, 1e-6)
    assert any("stores tensors with a gradient" in str(w.message) for w in caught)


class Recorder:
    """Gives an object that holds tensors."""

    def record(self, y):
        return types.SimpleNamespace(value=y * torch.rand(()))


@thunder.disable
def a_recorder():
    return Recorder()


def test_a_method_of_an_object_from_an_eager_call_loses_no_gradients():
    def program(w):
        recorder = a_recorder()
        return recorder.record(w * 2).value.square().sum()

    compiled = thunder.jit(program, fallback="eager")
    for seed in range(3):
        w = torch.randn(4, requires_grad=True)
        torch.manual_seed(seed)
        (want,) = torch.autograd.grad(program(w), w)
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            (got,) = torch.autograd.grad(compiled(w), w)
        assert torch.equal(got, want)


class StoresHidden(nn.Module):
    """Its backward and that of the tensor that it stores run through one graph, once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.linear.weight.untyped_storage().nbytes()  # what no program asks
        self.hidden = self.linear(x)
        return self.hidden.relu()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.hidden = nn.Linear(4, 4), 0.0

    def forward(self, x):
        self.linear.weight.untyped_storage().nbytes()
        return checkpoint(self.linear, x, use_reentrant=True).relu()


@pytest.mark.parametrize("kind", [StoresHidden, Checkpointed])
@pytest.mark.parametrize("before", [torch.sin, lambda x: x], ids=["computed", "an argument"])
def test_a_graph_that_runs_in_one_piece_is_no_part_of_a_program(kind, before):
    module = kind()

    def program(x):
        return module(before(x)) * 2 + module.hidden

    compiled = thunder.jit(program, fallback="eager")
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        program(x).sum().backward()
        want, x.grad = x.grad, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            compiled(x).sum().backward()
        assert_same(x.grad, want, 1e-6)
