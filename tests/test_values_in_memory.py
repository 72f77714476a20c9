"""What the backward reads again stays in memory, as far as that raises the peak by little."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import thunder
from thunder.analysis.aliases import Bases
from thunder.core.proxies import Proxy
from thunder.distributed.costs import Memory
from thunder.executors.triton_fuser import TritonFuser
from thunder.transforms import values_in_memory as module
from thunder.transforms.save_plan import save_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layers(nn.Module):
    """Gated products, one after another."""

    def __init__(self, depth: int, width: int, checkpointed: bool = False):
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3)) for _ in range(depth)
        )

    def one(self, x, gate, up, down):
        return x + down(F.silu(gate(x)) * up(x))

    def forward(self, x):
        for gate, up, down in self.layers:
            x = (
                checkpoint(self.one, x, gate, up, down, use_reentrant=False)
                if self.checkpointed
                else self.one(x, gate, up, down)
            )
        return x.square().mean()


def saved(model, rows: int, **options) -> int:
    """How many matrices of `rows` rows the program saves, its arguments left out, after its gradients were compared."""
    torch.manual_seed(0)
    x = torch.randn(rows, 32, device=DEVICE)
    compiled = thunder.jit(model, executors=[TritonFuser("keeping")], **options)
    sides = [torch.autograd.grad(run(x), list(model.parameters())) for run in (compiled, model)]
    torch.testing.assert_close(*sides)
    return sum(v.nbytes for v in thunder.examine.saved_for_backward(compiled) if v.operation is not None) // (
        rows * 32 * 4
    )


def model(**options) -> Layers:
    torch.manual_seed(0)
    return Layers(4, 32, **options).to(DEVICE)


def test_few_rows_keep_the_product():
    """Of each layer its result, both factors and their product: the gradients of the weights are larger than all of
    it."""
    assert saved(model(), 4) == 4 * 4


def test_many_rows_compute_it_again():
    """Most of the memory is what is saved: of each layer its result and both factors."""
    assert saved(model(), 512) == 4 * 3


def test_layers_are_alike():
    """Where the products of some layers alone would fit, none is kept, since all layers are to have the same
    kernels."""
    assert {saved(model(), rows) for rows in (4, 12, 16, 18, 20, 22, 24, 28)} == {4 * 4, 4 * 3}


def test_what_the_user_saves_memory_of_is_not_kept():
    assert saved(model(), 4, memory_budget=0.7) < 4 * 4
    assert saved(model(checkpointed=True), 4) <= 4


class Normed(nn.Module):
    """Each layer reads a norm of the sum so far: what the backward computes again it makes of that."""

    def __init__(self, depth: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            wide = x.double()
            x = x + layer((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype))
        return x.square().mean()


def keeping_nothing():
    """The passes with a save plan that does not keep values beyond the cut."""
    cut = thunder.Pass("Cut", lambda trace, lowering: save_plan(trace, 1.0, lowering.fuses), gives="plan")
    return thunder.passes().replacing("Save Plan", cut)


def peak(model, x, **options) -> int:
    """The most bytes that the values of a compiled step take at a time, arguments and what belongs to them left out."""
    compiled = thunder.jit(model, executors=[TritonFuser("peak")], **options)
    compiled(x).backward()
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    memory = Memory(DEVICE, [p.name for p in forward.args if isinstance(p, Proxy)])
    memory.run(forward)
    outputs, (saved, _) = forward.output
    memory.keep({p.name for p in outputs})
    memory.hand_over([(p.name, p.name) for p in saved])
    memory.run(backward)
    return memory.peak


@pytest.mark.parametrize("rows", [8, 32, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 24, 48, 64, 96))])
def test_the_peak_rises_by_little(rows):
    """Counted on the programs that run, for what is kept as estimated before they are made."""
    torch.manual_seed(0)
    layers, x = Normed(6, 32).to(DEVICE), torch.randn(rows, 32, device=DEVICE)
    without = peak(layers, x, passes=keeping_nothing())
    assert peak(layers, x) <= module.ROOM * without + 1024  # numbers of rows


def test_what_is_computed_again_needs_what_it_is_made_of():
    compiled = thunder.jit(lambda x, y: (x + y).double().exp() * y)
    compiled(torch.randn(3), torch.randn(3))
    lines = [line for line in thunder.last_traces(compiled)[0].bound_symbols if line.outputs]
    total, wide, exponential, _ = (line.output for line in lines[-4:])
    assert module._sources(lines, Bases(), frozenset((wide, exponential))) == {wide: {total}, exponential: {total}}


def test_the_peak_of_a_gpu_rises_by_little():
    if DEVICE == "cpu":
        pytest.skip("PyTorch counts the peak of the memory of GPUs alone")
    torch.manual_seed(0)
    layers = Layers(8, 1024).to(DEVICE)
    x = torch.randn(256, 1024, device=DEVICE)
    peaks = []
    for passes in (thunder.passes(), keeping_nothing()):
        compiled = thunder.jit(layers, executors=[TritonFuser("peak")], passes=passes)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(compiled(x), list(layers.parameters()))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.01 * module.ROOM * peaks[1]
