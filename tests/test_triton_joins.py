"""Results that join parts, which kernels store part by part."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import thunder
from benchmarks.random_regions import SMALL, judge, random_region
from thunder.executors.triton_fuser import TritonFuser
from thunder.kernels.ir import Node, Program

from .test_triton_fuser import split_all

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("triton_interpreter"),
]  # fmt: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def data(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def regions(compiled, backward=False):
    trace = (thunder.last_backward_traces if backward else thunder.last_traces)(compiled)[-1]
    return [line.sym.fn for line in trace.bound_symbols if line.sym.is_fusion]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (4, 1, 1)], ids=str)
def test_rotated_heads_and_their_gradients(heads):
    """A projection is split into heads, which are rotated: no element chooses what it reads, in the forward and where
    gradients are joined in the backward."""
    size, time = 64, 8
    cos, sin = data(time, size), data(time, size, seed=1)

    def program(x):
        q, k, v = (p.view(2, time, -1, size).transpose(1, 2) for p in x.split([n * size for n in heads], -1))
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    x = data(2, time, sum(heads) * size).requires_grad_()
    compiled = thunder.jit(program, executors=[TritonFuser("rotated")])
    got, want = compiled(x), program(x)
    cotangents = [torch.ones_like(w) * data(*w.shape, seed=i) for i, w in enumerate(want)]
    torch.testing.assert_close(got, want)
    assert all(
        judged.wrong == "" for judged in judge(*([x.detach().cpu() for x in side] for side in (got, want, want)))
    ), "strides"
    torch.testing.assert_close(torch.autograd.grad(got, x, cotangents), torch.autograd.grad(want, x, cotangents))
    (forward,), (backward,) = regions(compiled), regions(compiled, backward=True)
    if heads != (4, 1, 1):  # of which slices as large as the smallest part would be narrow
        assert forward.kernels == 1 and backward.kernels == 1


def test_narrow_and_uneven_pieces():
    """Narrow slices, uneven ones, and what chooses by data."""
    for program in (
        lambda x: rotated(x[..., :8], x[..., 8:16], x[..., 16:24]) + 1,
        lambda x: F.pad(x * 2, (3, 0)) + 1,
        lambda x: torch.where(x > 0, x * 2, x - 1),
    ):
        compiled = thunder.jit(program, executors=[TritonFuser("whole")])
        x = data(4, 32)
        torch.testing.assert_close(compiled(x), program(x))
        assert [f.kernels for f in regions(compiled)] == [1]


def nodes_of(program: Program) -> set[Node]:
    """The nodes of a program."""
    nodes, stack = set(), [store.value for store in program.stores]
    while stack:
        n = stack.pop()
        if n not in nodes:
            nodes.add(n)
            stack += n.args
    return nodes


@pytest.mark.sweep(4)
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_random_regions_in_parts(first, monkeypatch):
    """As if launches cost nothing, so that all is several kernels that can be."""
    split_all(monkeypatch)
    pieces = 0
    for seed in range(first, first + 100):
        region = random_region(seed, SMALL)
        inputs = region.placed(DEVICE)
        if not any(word in region.text for word in ("cat", "pad", "roll", "stack")):
            continue
        compiled = thunder.jit(region.function, executors=[TritonFuser("random")])
        results = judge(
            *([x.cpu() for x in side] for side in (compiled(*inputs), region(inputs), region.exact(region.inputs)))
        )
        for d in results:
            assert not d.wrong and d.got <= 2 * d.eager + 2 * region.unit, f"{d} for seed {seed}:\n{region.text}"
        pieces += sum(n.op == "concat" for f in regions(compiled) for n in nodes_of(f.program))
    assert pieces
