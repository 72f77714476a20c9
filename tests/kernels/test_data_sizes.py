"""Kernels of regions whose sizes depend on data: right for every size, also where nothing or one element is selected."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.test_unbacked import DATA, PROGRAMS, outcome
from thunder.executors.cpp_fuser import CppFuser
from thunder.executors.triton_fuser import TritonFuser

# of Triton's interpreter, which computes with NumPy what a mask hides
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FUSERS = {"cpp": CppFuser, "triton": TritonFuser}


def close(got, want) -> None:
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    elif isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            close(a, b)
    else:
        assert got == want or got != got and want != want


def regions(compiled) -> int:
    return sum(b.sym.is_fusion for b in thunder.last_traces(compiled)[-1].bound_symbols)


@pytest.mark.parametrize("fuser", FUSERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, fuser):
    f = PROGRAMS[name]
    compiled = thunder.jit(f, executors=[FUSERS[fuser]("every_region", always=True)], tiers=0)
    for x in DATA:
        close(outcome(compiled, x), outcome(f, x))


def messages(x, edges, weight):
    """A layer of a graph network over the edges that are no loops, as torch_geometric writes it."""
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, torch.arange(len(x)).repeat(2, 1)], 1)
    source, target = edges
    scores = F.leaky_relu(x[source].sum(-1) + x[target].sum(-1), 0.2)
    weights = (scores - scores.detach().max()).exp()
    total = torch.zeros(len(x)).scatter_add(0, target, weights)
    weights = weights / (total[target] + 1e-16)
    return torch.zeros_like(x).index_add(0, target, weights[:, None] * x[source]) @ weight


@pytest.mark.parametrize("fuser", FUSERS)
def test_a_graph_network_is_fused_around_its_selection(fuser):
    torch.manual_seed(0)
    compiled = thunder.jit(messages, executors=[FUSERS[fuser]("every_region", always=True)], tiers=0)
    for count in (11, 0, 1, 40):
        x, weight = torch.randn(7, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        edges = torch.randint(7, (2, count)) if count != 1 else torch.tensor([[2], [2]])
        got, want = compiled(x, edges, weight), messages(x, edges, weight)
        close(got, want)
        close(torch.autograd.grad(got.sin().sum(), (x, weight)), torch.autograd.grad(want.sin().sum(), (x, weight)))
    names = [
        [s.sym.name for s in b.subsymbols] for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.is_fusion
    ]
    assert any("leaky_relu" in n for n in names), names
