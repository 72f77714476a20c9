"""Gradient accumulation without synchronisation, and clipping by the norm over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from thunder.distributed.boundary import like, local_of
from thunder.distributed.placement import (
    gathering_once,
    is_dtensor,
    placed_parameters,
    skip_data_parallel_grad_sync,
)
from thunder.distributed.redistribute import with_padding
from thunder.ops.families.collectives import all_reduce_together, reduce_scatter, reduce_scatter_together


@contextlib.contextmanager
def no_sync(module: torch.nn.Module, *, gather_once: bool = False) -> Iterator[None]:
    """A context manager for gradient accumulation. Inside the block, backwards accumulate gradients on each rank. The
    gradients are synchronized at the end of the block.

        with no_sync(model):
            for x in batches[:-1]:
                loss(model(x)).backward()
        loss(model(batches[-1])).backward()
        optimizer.step()

    A call and its backward have to be in the same block; otherwise the backward raises RuntimeError. If the block
    raises an exception, its gradients stay unsynchronized, and those of shards are discarded. The block has no effect
    on a module that is not distributed.

    Args:
        module: The module.
        gather_once: If True, the first call inside the block gathers the sharded parameters, which stay gathered until
            the end of the block. `thunder.distributed.PipelineStage` uses it for the microbatches of a step.
    """
    if not any(q.synchronizes for _, q in placed_parameters(module)):
        yield
        return
    try:
        with skip_data_parallel_grad_sync(module), gathering_once(module) if gather_once else contextlib.nullcontext():
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
        local = left.gradient
        if not placement.is_sharded and parameter.grad is not None:
            local = local_of(parameter.grad)
        if left.pending and local is not None and placement.synchronizes:
            local = local.to(placement.reduce_dtype or local.dtype)
            alike.setdefault((*placement.averaging, local.dtype), []).append((parameter, placement, local))
        left.pending, left.gradient = False, None
    for (*steps, _), members in alike.items():
        gradients = [g for *_, g in members]
        for axis, held, _ in reversed(steps):
            if held.kind == "S":
                padded = [with_padding(g, axis, held) for g in gradients]
                if held.dim:
                    futures = [reduce_scatter.fn(g, axis.reduction, axis.group, True, held.dim) for g in padded]
                else:
                    futures = reduce_scatter_together.fn(padded, axis.reduction, axis.group)
            else:
                futures = all_reduce_together.fn(gradients, axis.reduction, [True] * len(gradients), axis.group)
            gradients = [f.wait() for f in futures]
        for (parameter, placement, _), gradient in zip(members, gradients, strict=True):
            gradient = like(parameter, gradient.to(placement.held_dtype))
            if placement.is_sharded and parameter.grad is not None:
                local_of(parameter.grad).add_(local_of(gradient))
            else:
                parameter.grad = gradient


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters on several meshes, and for plain tensors. Every rank of the group
    calls it.

    Returns:
        The norm of the whole gradients over all parameters, a plain tensor.

    Raises:
        RuntimeError: If the norm is not finite and `error_if_nonfinite` is True, as in PyTorch.
    """
    parameters = list(
        parameters.parameters()
        if isinstance(parameters, torch.nn.Module)
        else [parameters]
        if isinstance(parameters, torch.Tensor)
        else parameters
    )
    by_mesh: dict = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh if is_dtensor(p.grad) else None, []).append(p.grad)
    norms = [torch.nn.utils.get_total_norm(gradients, norm_type) for gradients in by_mesh.values()]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    total = torch.nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
