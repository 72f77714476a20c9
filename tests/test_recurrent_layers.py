"""LSTMs on the CPU: oneDNN's kernels as operations, with the gradients of eager bit for bit, and no graph kept."""

import itertools

import pytest
import torch
from torch import nn

import thunder

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
FORMS = list(itertools.product((1, 2), (True, False), (False, True), (True, False), (False, True)))


def step(run, net, x, states, taken: str):
    out, (hidden, cell) = run(x, states)
    results = {"output": (out,), "all": (out, hidden, cell), "hidden": (hidden,), "cell": (cell,)}[taken]
    leaves = [x, *net.parameters(), *(states or ())]
    torch.manual_seed(1)
    cotangents = [torch.randn_like(y) for y in results]
    return results, torch.autograd.grad(results, leaves, cotangents, materialize_grads=True, allow_unused=True)


def keeps_graph(compiled) -> bool:
    return any("with_graph" in b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("taken", ["output", "all", "hidden", "cell"])
def test_gradients_are_eagers_bit_for_bit(taken):
    for layers, bias, both, batch_first, form in FORMS:
        net = torch.nn.LSTM(5, 7, layers, bias, batch_first, bidirectional=both)
        shape = (layers * (2 if both else 1), 3 if batch_first else 4, 7)
        states = tuple(torch.randn(shape, requires_grad=True) for _ in range(2)) if form else None
        x, compiled = torch.randn(3, 4, 5, requires_grad=True), thunder.jit(lambda x, states, net=net: net(x, states))
        ours, eagers = (step(run, net, x, states, taken) for run in (compiled, net))
        for got, want in zip(ours, eagers, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert not keeps_graph(compiled)


def test_the_second_derivative_is_eagers():
    net, x = torch.nn.LSTM(5, 7), torch.randn(3, 4, 5, requires_grad=True)
    gradients = []
    for run in (thunder.jit(lambda x: net(x)[0]), lambda x: net(x)[0]):
        (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # eager too
@pytest.mark.parametrize("kind", ["double", "projected", "evaluated", "empty"])
def test_others_keep_pytorchs_graph(kind):
    net = torch.nn.LSTM(5, 7, proj_size=3 if kind == "projected" else 0)
    x = torch.randn(3, 0 if kind == "empty" else 4, 5, requires_grad=True)
    if kind == "double":
        net, x = net.double(), x.detach().double().requires_grad_()
    compiled = thunder.jit(lambda x: net.train(kind != "evaluated")(x)[0])
    if kind == "evaluated":  # whose backward oneDNN refuses
        net.eval()
        compiled = thunder.jit(lambda x: net(x)[0])
        torch.testing.assert_close(compiled(x), net(x)[0])
        return
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(net(x)[0].sum(), x), rtol=0, atol=0
    )
    assert keeps_graph(compiled)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2, "batch_first": True}])
def test_gradients_have_the_bits_and_strides_of_eagers_also_where_some_results_have_none(kind, options):
    torch.manual_seed(0)
    module, x = kind(7, 5, **options), torch.randn(6, 4, 7, requires_grad=True)
    compiled, inputs = thunder.jit(module), [x, *module.parameters()]

    def gradients(run):
        out, state = run(x)
        state = state if isinstance(state, torch.Tensor) else state[0]
        for results in ([out, state], [state], [out]):  # a graph that is kept is run again
            losses = [r.sin().sum() for r in results]
            yield from torch.autograd.grad(losses, inputs, retain_graph=True, allow_unused=True)

    for actual, wanted in zip(gradients(compiled), gradients(module), strict=True):
        assert (actual is None) is (wanted is None)
        if actual is not None:
            assert torch.equal(actual, wanted) and actual.stride() == wanted.stride()


def test_hooks_of_parameters_run_once():
    """The backward inside of the layer does not reach the parameters' own graph."""
    torch.manual_seed(0)
    module, calls = nn.GRU(5, 4), []
    for name, p in module.named_parameters():
        p.register_hook(lambda g, name=name: calls.append((name, g.shape)))
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad.shape)))
    thunder.jit(module)(torch.randn(3, 2, 5))[0].sum().backward()
    assert sorted(calls) == sorted(2 * [(name, p.shape) for name, p in module.named_parameters()])
