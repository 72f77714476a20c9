"""memory_budget: what is saved for the backward is a minimum cut, bytes follow the budget, gradients stay what they
are."""

import copy
import itertools

import pytest
import torch

import thunder
from tests.test_recompute import saved_bytes
from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.core.proxies import TensorProxy
from thunder.pipeline import joint_trace
from thunder.transforms.dce import dce
from thunder.transforms.save_plan import _Flow, curve, plan


def joint_of(f, *args):
    compiled = thunder.jit(f)
    compiled(*args)
    return joint_trace(dce(thunder.last_traces(compiled)[0]), thunder.resolve_executors(None))


def T(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def chain(x, w):
    a = torch.sin(x)
    b = torch.tanh(a @ w)
    c = torch.exp(b[:, :2])
    return (c * torch.cos(c)).sum() * b.sum()


def widening(x, w):
    y = x.sum(1, keepdim=True).sigmoid()
    z = torch.cat([y, y, y, y], 1)
    return (torch.sin(z) * torch.tanh(z @ w)).sum()


@pytest.mark.parametrize("f", [chain, widening], ids=lambda f: f.__name__)
@pytest.mark.parametrize("price", [0.0, 0.01, 0.1, 0.3, 1.0])
def test_a_plan_costs_the_least_of_all_plans(f, price):
    flow = _Flow(joint_of(f, T(4, 4), T(4, 4, seed=1)), None)
    values = [v for v in flow.producer if isinstance(v, TensorProxy) and v not in flow.bases and flow.reaches[v]]
    assert 3 <= len(values) <= 14

    def cost(plan):
        return plan.nbytes + price * plan.time

    every = [flow.evaluate(frozenset(c)) for n in range(len(values) + 1) for c in itertools.combinations(values, n)]
    assert cost(flow.cut(price)) == pytest.approx(min(map(cost, every)))


def model():
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16), torch.nn.Tanh())
        for _ in range(4)
    ]
    return torch.nn.Sequential(*layers)


def kept_inside(compiled) -> int:
    """Bytes of what a backward inside of a program reads of its forward, without arguments."""
    traces = thunder.last_traces(compiled)
    trace = traces[
        [t.provenance.partition(" (")[0] for t in traces].index("Constructed by Transform for execution") - 1
    ]
    inside = [line for line in trace.bound_symbols if line.context.backward]
    produced = {o for line in inside for o in line.outputs} | {a for a in trace.args if isinstance(a, TensorProxy)}
    bases = alias_bases(trace.bound_symbols, maybe=True)
    return sum(nbytes(v) for v in {bases[i] for line in inside for i in line.inputs} - produced)


def test_a_budget_bounds_what_a_whole_step_keeps():
    net, x = model(), torch.randn(32, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        (net(x * 2).sin().sum() * 1e-3).backward()  # one more, into the same gradients
        optimizer.step()
        return loss

    start = copy.deepcopy(net.state_dict())

    def trained(run) -> list[torch.Tensor]:
        net.load_state_dict(start)
        optimizer.state.clear()
        return [*(run(x).detach() for _ in range(3)), *(p.detach().clone() for p in net.parameters())]

    want, budgets = trained(step), []
    for budget in (1.0, 0.6, 0.3, 0.01):
        compiled = thunder.jit(step, memory_budget=budget)
        for got, expected in zip(trained(compiled), want, strict=True):
            assert torch.equal(got, expected)
        budgets.append(kept_inside(compiled))
    assert budgets[1] <= 0.6 * budgets[0] and budgets[2] <= 0.3 * budgets[0] and budgets[3] < budgets[2]


def test_a_budget_bounds_the_saved_bytes_and_leaves_the_gradients():
    net, x = model(), torch.randn(32, 16)
    own = list(net.parameters())
    gradients, sizes = [], []
    for budget in (1.0, 0.8, 0.6, 0.4, 0.25):
        compiled = thunder.jit(net, memory_budget=budget)
        net.zero_grad()
        compiled(x).sum().backward()
        gradients.append([p.grad.clone() for p in own])
        sizes.append(
            sum(
                nbytes(t)
                for t in thunder.last_traces(compiled)[-1].output[1][0]
                if t not in set(thunder.last_traces(compiled)[-1].args)
            )
        )
        assert saved_bytes(lambda x, *_: compiled(x), x, *own) == sizes[-1]  # noqa: B023
        assert sizes[-1] <= budget * sizes[0]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    for gradients_of_budget in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients_of_budget, gradients[0], strict=True))


def test_the_curve_trades_bytes_for_time():
    net = model()
    joint = joint_of(lambda x: net(x).sum(), T(32, 16))
    plans = [p for _, p in curve(joint, (1.0, 0.75, 0.5, 0.25))]
    assert [p.nbytes for p in plans] == sorted((p.nbytes for p in plans), reverse=True)
    assert [p.time for p in plans] == sorted(p.time for p in plans)
    assert plans[0].time == 0 and plan(joint, 0.0001).nbytes < plans[-1].nbytes


def test_what_can_not_be_computed_again_stays_saved():
    def f(x):
        noise = torch.rand_like(x)
        return (torch.sin(x * noise) * noise).sum()

    x = T(8, 8)
    compiled = thunder.jit(f, memory_budget=0.01)
    torch.manual_seed(0)
    compiled(x).backward()
    ours, x.grad = x.grad, None
    torch.manual_seed(0)
    f(x).backward()
    torch.testing.assert_close(ours, x.grad, rtol=0, atol=0)
    noise = next(b.output for b in thunder.last_traces(compiled)[0].bound_symbols if b.sym.name == "rand_like")
    assert noise in set(thunder.last_traces(compiled)[-1].output[1][0])


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "half", True])
def test_a_wrong_budget_is_an_option_error(wrong):
    with pytest.raises(thunder.errors.OptionError, match="memory_budget"):
        thunder.jit(torch.sin, memory_budget=wrong)
