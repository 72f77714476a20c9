"""PyTorch's pipeline schedules over compiled stages: gradients are those of one process, and no product of a backward
runs twice."""

import copy

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

import thunder
from tests.distributed.training import close
from tests.test_two_backwards import Matmuls


class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def loss_of(y, target):
    return (y - target).square().mean()


def runs(rank, size, schedule, wraps):
    """Stages in turn on the ranks: the products that this rank ran."""
    of_rank = 1 if schedule is Schedule1F1B else 2
    torch.manual_seed(0)
    modules = [Stage().double() for _ in range(size * of_rank)]
    whole = copy.deepcopy(torch.nn.Sequential(*modules))
    microbatches, device = 2 * size, torch.device("cpu")
    x, target = torch.randn(2, 4 * size, 6, dtype=torch.float64)
    mine = {i: modules[i] for i in range(rank, len(modules), size)}
    stages = [
        PipelineStage(wraps(module), i, len(modules), device, input_args=x.chunk(microbatches)[0])
        for i, module in mine.items()
    ]
    runner = schedule(stages if of_rank > 1 else stages[0], microbatches, loss_fn=loss_of)
    for _ in range(2):  # in the first step stages are run for the shapes of what they give as well
        for module in mine.values():
            module.zero_grad()
        with Matmuls() as matmuls:
            runner.step(*([x] if rank == 0 else []), target=target)
    loss_of(whole(x), target).backward()
    for i, module in mine.items():
        for (name, p), q in zip(module.named_parameters(), whole[i].parameters(), strict=True):
            close(p.grad, q.grad, f"{name} of stage {i}")
    return matmuls.count


def compiled(module):
    return thunder.jit(module, executors=[])


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_schedules_of_pytorch_run_each_product_once(ranks, schedule):
    found, eager = (ranks(2)(runs, schedule, wraps) for wraps in (compiled, torch.nn.Sequential))
    assert found == eager
