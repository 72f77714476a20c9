"""Gradient accumulation without synchronisation, and clipping by the norm over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from thunder.distributed.placement import placed_parameters, placement_of, skip_data_parallel_grad_sync
from thunder.distributed.synchronize import prepared_gradient
from thunder.ops.families.collectives import all_reduce_together, reduce_scatter_together


@contextlib.contextmanager
def no_sync(module: torch.nn.Module) -> Iterator[None]:
    """Inside the block backwards accumulate gradients on each rank; at its end they are synchronised, so that the block
    is used anew for each group of iterations.

    with no_sync(model):
        for x in batches[:-1]:
            loss(model(x)).backward()
    loss(model(batches[-1])).backward()
    optimizer.step()

    Calls and their backwards stand inside together: a backward that comes later raises RuntimeError. A block that
    raises leaves its gradients unsynchronised, and gives those of shards up. Nothing to do for a module that is not
    distributed.
    """
    if not any(q.synchronizes for _, q in placed_parameters(module)):
        yield
        return
    try:
        with skip_data_parallel_grad_sync(module):
            yield
    except BaseException:
        for _, placement in placed_parameters(module):
            placement.accumulated.gradient = None
        raise
    synchronize_gradients(module)


@torch.no_grad()
def synchronize_gradients(module: torch.nn.Module) -> None:
    """Averages over the ranks what backwards without synchronisation left in a module, and adds it to `.grad`: one
    collective for all gradients of a dtype."""
    alike: dict[tuple, list] = {}
    for parameter, placement in placed_parameters(module):
        left = placement.accumulated
        local = parameter.grad if placement.shards is None else left.gradient
        if left.pending and local is not None:
            local = prepared_gradient(local, placement)
            alike.setdefault((placement.shards, placement.replicas, local.dtype), []).append(
                (parameter, placement, local)
            )
        left.pending, left.gradient = False, None
    for (shards, replicas, _), members in alike.items():
        gradients = [g for *_, g in members]
        if shards is not None:
            gradients = [f.wait() for f in reduce_scatter_together.fn(gradients, "avg", shards)]
        for group in replicas:
            gradients = [f.wait() for f in all_reduce_together.fn(gradients, "avg", [True] * len(gradients), group)]
        for (parameter, placement, _), gradient in zip(members, gradients, strict=True):
            gradient = gradient.to(placement.held_dtype)
            if placement.shards is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            else:
                parameter.grad = gradient


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` of the whole gradients, of which each rank may hold a part. Every rank of the
    group calls it. Returns the norm over all parameters.

    Raises RuntimeError as PyTorch's does where the norm is not finite and `error_if_nonfinite`.
    """
    parameters = list(
        parameters.parameters()
        if isinstance(parameters, torch.nn.Module)
        else [parameters]
        if isinstance(parameters, torch.Tensor)
        else parameters
    )
    by_groups: dict = {}
    for p in parameters:
        placement = placement_of(p)
        if p.grad is not None:
            groups = () if placement is None else (placement.shards, placement.slice and placement.slice.group)
            by_groups.setdefault(tuple(g for g in groups if g is not None), []).append(p.grad)
    norms = []
    for groups, gradients in by_groups.items():
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        if groups:
            power = norm if norm_type == float("inf") else norm**norm_type
            for group in groups:
                dist.all_reduce(
                    power, op=dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM, group=group
                )
            norm = power if norm_type == float("inf") else power ** (1.0 / norm_type)
        norms.append(norm)
    total = torch.nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
