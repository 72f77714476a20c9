"""Small modules under several layouts, trained beside the same module in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from tests.distributed.test_communication import BLOCK, ZERO3
from thunder.distributed import column_parallel, ddp, fsdp, row_parallel


def split(module: nn.Module) -> nn.Module:
    """A module of `Blocks` under tensor parallelism."""
    column_parallel(module, [f"blocks.{i}.0" for i in range(3)])
    return row_parallel(module, [f"blocks.{i}.2" for i in range(3)])


WAYS = {
    "ddp": ddp, "zero2": fsdp, "zero3": lambda m: fsdp(m, sharding_strategy=ZERO3, bucketing_strategy=BLOCK),
    "tp": split,
}  # fmt: skip


def train(
    rank: int, size: int, way: str, module: nn.Module, jit: Callable, steps: int, loss_of: Callable = lambda y: y
) -> tuple[Callable, float]:
    """Trains a module of float64 under a layout and in one process: what `jit` has compiled, and the largest distance
    of the losses. loss_of: of the module's result."""
    one = copy.deepcopy(module)
    compiled = jit(WAYS[way](module))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, one)]
    worst = 0.0
    for step in range(steps):
        x = torch.randn(size, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(compiled(x if way == "tp" else x[rank]))
        loss.backward()
        wanted = loss_of(one(x))
        wanted.backward()
        for optimizer in optimizers:
            optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        worst = max(worst, abs(float(total / size - wanted.detach())))
    return compiled, worst
