"""Training on every rank, held against training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

import thunder
from thunder.distributed.placement import placement_of

STEPS = 5
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}


def batches(size: int, dtype: torch.dtype, make: Callable | None = None, steps: int = STEPS) -> list[torch.Tensor]:
    """For each step the data of all ranks: what rank r gets is part r of `size` along the first dimension."""
    generator = torch.Generator().manual_seed(1)
    make = make or (lambda g: torch.randn(4 * size, 6, dtype=dtype, generator=g))
    return [make(generator) for _ in range(steps)]


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05)


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Norm-relative agreement, to the bound of the dtype."""
    bound = BOUND[wanted.dtype]
    error = (found - wanted).norm() / wanted.norm().clamp(min=torch.finfo(wanted.dtype).tiny)
    assert found.shape == wanted.shape and error <= bound, (
        f"{what}: {tuple(found.shape)} and {tuple(wanted.shape)}, relative error {error:.2e} above {bound:.0e}"
    )


def held(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds of a parameter."""
    placement = placement_of(parameter)
    return whole if placement is None else placement.part_of(whole)


def compare(
    rank: int, size: int, module: torch.nn.Module, prepare: Callable, data: list[torch.Tensor], *,
        loss: Callable = lambda y: y.square().mean(), options: dict | None = None,
    of_rank: Callable | None = None, accumulated: int = 0, optimize: Callable = optimizer_of,
):  # fmt: skip
    """Trains `prepare(a copy)` on this rank's data, and the module itself on all: losses, gradients and parameters
    agree in each step. Returns the compiled module.

    of_rank: this rank's part of the data of all. accumulated: before the last backward of each step come so many under
    no_sync, each with data of its own.
    """
    of_rank = of_rank or (lambda x: x.chunk(size)[rank])
    whole = copy.deepcopy(module)
    mine = prepare(copy.deepcopy(module))
    compiled = mine if isinstance(mine, thunder.ThunderModule) else thunder.jit(mine, **(options or {}))
    optimizers = optimize(whole), optimize(compiled)

    def backward(x: torch.Tensor, what: str) -> None:
        expected, found = loss(whole(x)), loss(compiled(of_rank(x)))
        expected.backward()
        found.backward()
        together = found.detach().clone()
        torch.distributed.all_reduce(together)
        close(together / size, expected.detach(), what)

    assert len(data) % (accumulated + 1) == 0, "all steps have as many batches"
    for step, at in enumerate(range(0, len(data), accumulated + 1)):
        if accumulated:
            with compiled.no_sync():
                for x in data[at : at + accumulated]:
                    backward(x, f"loss of step {step} under no_sync")
            agree(compiled, whole, step, gradients=True)
        backward(data[at + accumulated], f"loss of step {step}")
        agree(compiled, whole, step, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        agree(compiled, whole, step)
    return compiled


def agree(mine: torch.nn.Module, whole: torch.nn.Module, step: int, gradients: bool = False) -> None:
    """Parameters, or their gradients, are this rank's parts of the whole ones."""
    names = [n for n, _ in whole.named_parameters()]
    assert [n for n, _ in mine.named_parameters()] == names
    for name, p, q in zip(names, mine.parameters(), whole.parameters(), strict=True):
        if not gradients:
            close(p.detach(), held(p, q.detach()), f"{name} after step {step}")
        elif q.grad is None:
            assert p.grad is None, f"{name} has a gradient in step {step}"
        else:
            assert p.grad is not None, f"{name} has no gradient in step {step}"
            close(p.grad, held(p, q.grad), f"gradient of {name} in step {step}")
