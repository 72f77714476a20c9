"""Training on every rank, held against training in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

import thunder
from thunder.distributed.boundary import local_of
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


def distance(actual: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
    """Relative to the norm of what is wanted, or of the whole that it is a part of."""
    norm = (wanted if whole is None else whole).norm()
    return (actual - wanted).norm() / norm.clamp(min=torch.finfo(wanted.dtype).tiny)


def close(
    actual: torch.Tensor,
    wanted: torch.Tensor,
    what: str,
    bound: float | None = None,
    whole: torch.Tensor | None = None,
) -> None:
    """Agreement to a bound, the one of the dtype if none is given."""
    bound = BOUND[wanted.dtype] if bound is None else bound
    error = distance(actual, wanted, whole)
    assert actual.shape == wanted.shape and error <= bound, (
        f"{what}: {tuple(actual.shape)} and {tuple(wanted.shape)}, relative error {error:.2e} above {bound:.0e}"
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

    In float32, where steps of AdamW magnify roundings, gradients and parameters are held against training in float64:
    none is twice as far from it as the farthest of one process.

    of_rank: this rank's part of the data of all. accumulated: before the last backward of each step come so many under
    no_sync, each with data of its own.
    """
    of_rank = of_rank or (lambda x: x.chunk(size)[rank])
    whole = copy.deepcopy(module)
    mine = prepare(copy.deepcopy(module))
    compiled = mine if isinstance(mine, thunder.ThunderModule) else thunder.jit(mine, **(options or {}))
    exact = copy.deepcopy(module).double() if data[0].dtype is torch.float32 else None
    optimizers = [optimize(m) for m in (whole, compiled, exact) if m is not None]

    def backward(x: torch.Tensor, what: str) -> None:
        expected, actual = loss(whole(x)), loss(compiled(of_rank(x)))
        expected.backward()
        actual.backward()
        if exact is not None:
            return loss(exact(x.double())).backward()
        together = actual.detach().clone()
        torch.distributed.all_reduce(together)
        close(together / size, expected.detach(), what)

    assert len(data) % (accumulated + 1) == 0, "all steps have as many batches"
    for step, at in enumerate(range(0, len(data), accumulated + 1)):
        if accumulated:
            with compiled.no_sync():
                for x in data[at : at + accumulated]:
                    backward(x, f"loss of step {step} under no_sync")
            agree(compiled, whole, step, gradients=True, exact=exact)
        backward(data[at + accumulated], f"loss of step {step}")
        agree(compiled, whole, step, gradients=True, exact=exact)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        agree(compiled, whole, step, exact=exact)
    return compiled


def agree(
    mine: torch.nn.Module,
    whole: torch.nn.Module,
    step: int,
    gradients: bool = False,
    exact: torch.nn.Module | None = None,
) -> None:
    """Parameters, or their gradients, are this rank's parts of the whole ones, or, in float32, as near to the exact
    ones."""
    names = [n for n, _ in whole.named_parameters()]
    assert [n for n, _ in mine.named_parameters()] == names
    parameters, bound = [mine.parameters(), whole.parameters()], None

    def seen(p: torch.Tensor) -> torch.Tensor | None:
        tensor = p.grad if gradients else p
        return None if tensor is None else local_of(tensor)

    if exact is not None:
        parameters[1], unit = exact.parameters(), torch.finfo(torch.float32).eps
        apart = [distance(seen(q), seen(e)) for q, e in zip(whole.parameters(), exact.parameters(), strict=True)]
        bound = 2 * (float(max(apart)) + unit)
    for name, p, q in zip(names, *parameters, strict=True):
        if gradients and q.grad is None:
            assert p.grad is None, f"{name} has a gradient in step {step}"
            continue
        assert seen(p) is not None, f"{name} has no gradient in step {step}"
        what = f"gradient of {name} in step {step}" if gradients else f"{name} after step {step}"
        close(seen(p), held(p, seen(q)), what, bound, None if exact is None else seen(q))
