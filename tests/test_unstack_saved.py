"""What a saved tensor was joined from is read out of it: saved once, with the same gradients."""

import pytest
import torch

import thunder
from thunder.examine import saved_for_backward


def stacked_states(a, b):
    state = b[0] * 1
    states = [state]
    for i in range(1, 4):
        state = a[i] * state
        states.append(state)
    return torch.stack(states).transpose(0, 1) ** 2


def concatenated(a, b):
    x, y = a * b, a - b
    return torch.cat([x, y]) ** 2 + torch.cat([y, x * y])


def stacked_types(a, b):
    x, y = a * b, (a - b).float()
    return torch.stack([x, y]) ** 2 * (x * y)


def joined_arguments(a, b):
    return torch.stack([a, b]) ** 2 * (a * b)


def part_of_what_lives(a, b):
    whole = (a * b).exp()
    return torch.stack([whole[0], whole[1]]) ** 2, whole * whole[0] * whole[1]


def saved(compiled) -> list[str]:
    """The operations whose results are saved."""
    return sorted(v.operation.rpartition(".")[2] for v in saved_for_backward(compiled) if v.operation != "argument")


PROGRAMS = {
    # a[1], a[2], a[3], which are arguments' memory; the states are in the stack
    stacked_states: ["__getitem__", "__getitem__", "__getitem__", "stack"],
    concatenated: ["cat", "mul", "sub"],
    stacked_types: ["mul", "pow", "stack", "to"],  # x is in the stack, y only as another type
    joined_arguments: ["mul", "pow", "stack"],
    part_of_what_lives: ["__getitem__", "__getitem__", "exp", "mul", "stack"],  # the items are exp's memory
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients_and_saved_tensors(program):
    arguments = [torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    leaves = [[x.clone().requires_grad_() for x in arguments] for _ in range(2)]
    compiled = thunder.jit(program)
    results = [program(*leaves[0]), compiled(*leaves[1])]
    for result, inputs in zip(results, leaves):
        for r in result if isinstance(result, tuple) else (result,):
            r.backward(torch.ones_like(r).cumsum(0), retain_graph=True)
    for want, got in zip(*leaves):
        assert torch.equal(want.grad, got.grad)
    assert saved(compiled) == PROGRAMS[program]


def test_a_small_part_that_is_read_late_is_saved_beside_the_stack():
    """The stack dies with the first operation of the backward, as features of a recommender do."""

    def program(a, others):
        first = a.exp()
        x = first
        for _ in range(8):
            x = x.sin()  # whose derivatives come between the stack's and the one of the first part
        return torch.stack([first, x, *others]).pow(2).sum()

    a, others = torch.randn(4, 3, requires_grad=True), [torch.randn(4, 3) for _ in range(30)]
    compiled = thunder.jit(program)
    sides = [torch.autograd.grad(run(a, others), a)[0] for run in (compiled, program)]
    assert torch.equal(*sides) and "exp" in saved(compiled) and "stack" in saved(compiled)
