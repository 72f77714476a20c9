"""Lines that no program does, in modules that ranks hold together: the result is that of one process, or every rank
raises in words. The original module would compute without communication."""

import json
import warnings

import pytest
import torch

import thunder
from tests.distributed.training import batches, close, compare
from thunder.distributed import FSDPType, column_parallel, ddp, fsdp, row_parallel
from thunder.errors import CaptureError, FallbackWarning


def refused(x):
    return x.untyped_storage().nbytes() // x.untyped_storage().nbytes()


class Gate(torch.nn.Module):
    """The refusal reads a parameter itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))

    def forward(self, x):
        self.weight.untyped_storage()
        return x * self.weight


class Refuses(torch.nn.Module):
    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(6, 8).double(), torch.nn.Linear(8, 6).double()
        self.gate, self.where = Gate(), where

    def forward(self, x):
        y = torch.tanh(self.up(x))
        if self.where == "helper":
            y = y * refused(y)
        if self.where == "module":
            y = self.gate(y)
        if self.where == "root":
            y = y * (y.untyped_storage().nbytes() > 0)
        return self.down(y)


LAYOUTS = {
    "ddp": ddp,
    "zero2": lambda m: fsdp(m, sharding_strategy=FSDPType.ZERO2),
    "zero3": lambda m: fsdp(m, sharding_strategy=FSDPType.ZERO3),
    "tp": lambda m: row_parallel(column_parallel(m, ["up"]), ["down"]),
}


def trains(rank, size, layout, where):
    data = batches(size, torch.float64, steps=3)
    of_rank = (lambda x: x) if layout == "tp" else None
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        compiled = compare(
            rank,
            size,
            Refuses(where),
            LAYOUTS[layout],
            data,
            options={"fallback": "eager", "executors": []},
            of_rank=of_rank,
        )
    assert len(compiled.programs) == 1
    return [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols].count("eager_call")


class Measures(Refuses):
    """Host code whose result capture needs gets a number of a weight that each rank holds a part of."""

    def forward(self, x):
        scale = json.loads(json.dumps(self.up.weight.norm().item()))
        return self.down(torch.tanh(self.up(x))) * scale


def measures(rank, size, layout):
    data = batches(size, torch.float64, steps=1)
    module = Measures("nowhere")
    if layout != "ddp":
        with pytest.raises(CaptureError, match="of which each rank holds a part"):
            thunder.jit(LAYOUTS[layout](module), fallback="eager", executors=[])(data[0])
        return True
    compare(rank, size, module, LAYOUTS[layout], data, options={"fallback": "eager", "executors": []})
    return True


def raises(rank, size, layout, where):
    module = thunder.jit(LAYOUTS[layout](Refuses(where)), fallback="eager", executors=[])
    with pytest.raises(CaptureError, match="untyped_storage|each rank holds a part"):
        module(torch.ones(4, 6, dtype=torch.float64))
    return True


def step_of(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(x):
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def whole_step(rank, size, layout):
    """The forward is an eager call, whose gradients the program adds up over the ranks, or the step raises."""
    module, whole = LAYOUTS[layout](Refuses("root")), Refuses("root")
    compiled, x = thunder.jit(step_of(module), fallback="eager", executors=[]), batches(size, torch.float64)[0]
    if layout != "ddp":
        with pytest.raises(CaptureError, match="untyped_storage"):
            compiled(x)
        return True
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        compiled(x.chunk(size)[rank])
    step_of(whole)(x)
    for p, q in zip(module.parameters(), whole.parameters(), strict=True):
        close(p.detach(), q.detach(), "a parameter")
    return True


RIGHT = [("ddp", "helper"), ("ddp", "module")]
RAISES = [
    ("ddp", "root"),
    ("zero2", "module"),
    ("zero3", "root"),
    ("tp", "root"),
    ("zero2", "helper"),
    ("zero3", "helper"),
]


SIZES = (2, 4, 2, 4, 2, 4)


def test_refusals_in_modules_that_ranks_hold_together(ranks):
    for size, (layout, where) in zip(SIZES, RIGHT, strict=False):
        assert ranks(size)(trains, layout, where, timeout=120.0) == [1] * size
    for size, (layout, where) in zip(SIZES, RAISES, strict=True):
        assert ranks(size)(raises, layout, where) == [True] * size


def test_refusals_in_whole_steps(ranks):
    for size, layout in zip(SIZES[3::-1], LAYOUTS, strict=True):
        assert ranks(size)(whole_step, layout) == [True] * size


def test_numbers_of_parts_for_host_code(ranks):
    for layout in LAYOUTS:
        assert ranks(2)(measures, layout) == [True, True]
