"""`lower(...).memory_analysis()` and `.cost_analysis()`: bytes and arithmetic of a program that does not run."""

import dataclasses

import pytest
import torch
from torch import nn

import thunder
from thunder.distributed import H200

ROWS, WIDTH, INNER = 128, 64, 256
BYTES = 4  # of a number


def lowered(grad: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))
    with torch.set_grad_enabled(grad):
        return model, thunder.jit(model).lower(torch.randn(ROWS, WIDTH))


def test_memory_of_an_inference():
    model, program = lowered(grad=False)
    memory = program.memory_analysis()
    parameters = sum(p.numel() for p in model.parameters())
    assert memory.arguments == BYTES * (parameters + ROWS * WIDTH) and memory.results == BYTES * ROWS * WIDTH
    # the result of the first layer beside that of tanh, which is the last time that so much is there
    assert memory.forward == memory.peak == memory.arguments + BYTES * 2 * ROWS * INNER
    assert memory.saved == memory.gradients == memory.backward == 0


def test_memory_of_a_backward():
    model, program = lowered(grad=True)
    memory = program.memory_analysis()
    parameters = sum(p.numel() for p in model.parameters())
    assert memory.saved == BYTES * ROWS * INNER  # the result of tanh
    assert memory.gradients == BYTES * parameters
    assert memory.peak == memory.backward > memory.forward >= memory.arguments + memory.saved + memory.results


def test_the_peak_is_that_of_a_run():
    """The bytes that PyTorch's allocator has in use, beside the arguments."""
    model, program = lowered(grad=False)
    x = torch.randn(ROWS, WIDTH)
    compiled = thunder.jit(model)
    with torch.no_grad():
        compiled(x)
        measured = thunder.profile(compiled, x).peak
    memory = program.memory_analysis()
    assert memory.peak - memory.arguments == measured


@pytest.mark.parametrize("grad", [False, True])
def test_arithmetic(grad):
    _, program = lowered(grad)
    cost = program.cost_analysis()
    product = 2 * ROWS * WIDTH * INNER
    assert cost.flops == (2 + 3 * grad) * product  # the input has no gradient
    parts = {o.part for o in cost.operations}
    assert parts == ({"forward", "backward"} if grad else {"forward"})
    assert "GFLOP" in str(cost)


def test_a_machine_is_described_by_figures():
    _, program = lowered(grad=False)
    slow = dataclasses.replace(H200, name="slow", single=1e9, memory=1e12, launch=0.0, start=0.0)
    cost = program.cost_analysis(slow)
    products = [o for o in cost.operations if o.flops]
    assert len(products) == 2 and all(o.seconds == o.flops / 1e9 for o in products)
    others = [o for o in cost.operations if not o.flops]
    assert all(o.seconds == o.moved / 1e12 for o in others) and others
    assert "projected for slow" in str(cost)
