"""Traces are pickled: the text is the same in another process, and what PyTorch runs runs."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests import fresh


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)

    def forward(self, x, n=2):
        x.add_(1)
        return F.softmax(self.norm(self.linear(x)) @ torch.tril(torch.ones(4, 4)) * n, -1).sum()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", [{}, {"executors": ["cpp"]}, {"cache": "symbolic values"}], ids=str)
def test_all_traces_of_a_module(options):
    compiled = thunder.jit(Model(), **options)
    for _ in range(2):
        compiled(torch.randn(3, 4)).backward()
    kinds = (
        thunder.last_traces,
        thunder.last_backward_traces,
        thunder.last_prologue_traces,
        thunder.last_epilogue_traces,
    )
    traces = [trace for of in kinds for trace in of(compiled)]
    for trace in traces:  # before they were printed, which makes decompositions
        assert str(pickle.loads(pickle.dumps(trace))) == str(trace)
    assert len(traces) > 12
    for trace in traces:
        read = pickle.loads(pickle.dumps(trace))
        assert (str(read), read.python(), read.made_by) == (str(trace), trace.python(), trace.made_by)
        assert [b.sym.name for b in read.bound_symbols] == [b.sym.name for b in trace.bound_symbols]
        assert [type(a) for a in read.args] == [type(a) for a in trace.args]


def test_what_runs_and_what_does_not(tmp_path: Path):
    def program(x):
        return torch.tanh(x) * 2 + F.gelu(x)

    x = torch.linspace(-1, 1, 5)
    compiled = thunder.jit(program, executors=["torch"])
    assert torch.equal(compiled(x), program(x))
    file = tmp_path / "trace"
    file.write_bytes(pickle.dumps(thunder.last_traces(compiled)[-1]))
    code = (
        f"import pickle, torch; t = pickle.load(open({str(file)!r}, 'rb')); print(t.python_callable()(torch.ones(2)))"
    )
    assert str(program(torch.ones(2))) in fresh.run("-c", code).stdout
    fused = thunder.jit(program, executors=["cpp"])
    fused(x)
    read = pickle.loads(pickle.dumps(thunder.last_traces(fused)[-1]))
    with pytest.raises(TypeError, match="was not pickled with the trace: compile the program in this process"):
        read.python_callable()(x)
