"""Process groups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder import compat


def distributed_is_used() -> bool:
    """Whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def default_store():
    """The store of the default process group."""
    return compat.store_of_default_group()


def timeout_of(group) -> float:
    """Seconds after which collectives of a process group give up.; where its backend does not say, torch's default"""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", torch.distributed.default_pg_timeout).total_seconds()


def local_tensor(tensor) -> torch.Tensor:
    """The local tensor of a DTensor, by itself: `to_local` gives a view of a parameter's."""
    return tensor._local_tensor


def set_local_tensor(tensor, local: torch.Tensor) -> None:
    """Gives a DTensor another local tensor, of the same shape."""
    tensor._local_tensor = local


def dtensor_like(whole, local: torch.Tensor):
    """A DTensor of another local tensor that lies on the ranks as `whole`, of its shape. `DTensor.from_local` takes 0.2
    ms of the host."""
    spec = whole._spec
    if local.dtype is not whole.dtype:
        return type(whole).from_local(
            local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return type(whole)(local, spec, requires_grad=False)


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` prepared a module itself."""
    return callable(getattr(module, "_get_fsdp_state", None))


@dataclass(frozen=True)
class FullyShard:
    """What `fully_shard` made of one parameter. parameter: the DTensor. dim: along which it is sharded. shards,
    replicas: the groups, None: not replicated. again: gathered again in the backward. Dtypes as in its policy. seen_on:
    the mesh and the placements of the DTensor that a layer sees, where other ranks split it. others: options that only
    its own hooks follow, by name."""

    parameter: torch.Tensor
    dim: int
    shards: Any
    replicas: Any
    again: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    seen_on: tuple[Any, tuple] | None
    others: tuple[str, ...]


def fully_sharded(module: torch.nn.Module) -> list[FullyShard]:
    """The parameters that `fully_shard` of a module, and not of its submodules, has sharded."""
    return [_sharded(p, group, module) for group in _groups(module) for p in group.fsdp_params]


def fully_shard_options(module: torch.nn.Module) -> tuple[tuple[bool, tuple[str, ...]], ...]:
    """What may be changed behind `fully_shard`, for each of its groups of parameters: whether they are gathered again
    in the backward, and the names of the options that only its own hooks follow."""
    return tuple((_gathers_again(group), _others(group, module)) for group in _groups(module))


def _groups(module) -> list:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    return groups


def _gathers_again(group) -> bool:
    return group.post_forward_mesh_info is not None


def _others(group, module) -> tuple[str, ...]:
    """Settings of an FSDP group that thunder does not follow, in words."""
    others = {
        "a CPU offload policy": any(parameter.offload_to_cpu for parameter in group.fsdp_params),
        "set_gradient_divide_factor": getattr(group, "gradient_divide_factor", None) is not None,
        "set_requires_gradient_sync(False)": not getattr(group, "reduce_grads", True),
        "set_requires_all_reduce(False)": not getattr(group, "all_reduce_grads", True),
        "set_reduce_scatter_unused_params": getattr(group, "reduce_scatter_unused_params", False),
        "an all-reduce hook": getattr(group, "_all_reduce_hook", None) is not None,
        "a mesh of all parallelisms": getattr(group.mesh_info, "is_spmd_mesh", False),
        "a mesh without shards": not hasattr(group.mesh_info, "shard_process_group"),
        "several modules in one group": len(module._get_fsdp_state()._modules) > 1,
    }
    return tuple(name for name, is_set in others.items() if is_set)


def _sharded(parameter, group, module) -> FullyShard:
    """The facts of a parameter under `fully_shard`."""
    mesh, policy = parameter.mesh_info, group.mp_policy
    name = "_unsharded_dtensor_spec" if hasattr(parameter, "_unsharded_dtensor_spec") else "_tp_spec"  # before 2.13
    spec = getattr(parameter, name, None)
    return FullyShard(
        parameter.sharded_param,
        parameter.fsdp_placement.dim,
        getattr(mesh, "shard_process_group", None),
        getattr(mesh, "replicate_process_group", None),
        _gathers_again(group),
        policy.param_dtype,
        policy.reduce_dtype,
        None if spec is None else (spec.mesh, spec.placements),
        _others(group, module),
    )


def mixed_precision_of(state) -> tuple[torch.dtype | None, torch.dtype | None]:
    """(dtype of floating inputs, dtype of outputs) that the hooks of `fully_shard` cast to."""
    policy = state._mp_policy
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def fully_shard_hooks() -> tuple[Callable, Callable] | None:
    """The functions that run before and behind the forward of a module under `fully_shard`; None where nobody has
    imported it."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return None if module is None else (module.FSDPState._pre_forward, module.FSDPState._post_forward)


@dataclass(frozen=True)
class DataParallel:
    """What DistributedDataParallel made of a module. group: whose ranks average gradients. bucket_bytes: of the
    gradients that are averaged together at most. others: options that only its own reducer follows, by name."""

    group: Any
    bucket_bytes: int
    others: tuple[str, ...]


def data_parallel_of(module) -> DataParallel:
    """The options of a DistributedDataParallel."""
    mesh = getattr(module, "device_mesh", None)
    others = {
        "parameters or buffers to ignore": bool(module.parameters_to_ignore),
        "delay_all_reduce_named_params": bool(module._delay_all_reduce_params),
        "a communication hook": bool(module._comm_hooks) or hasattr(module, "buffer_hook"),
        "mixed_precision": module.mixed_precision is not None,
        "a mesh that is a part of another": mesh is not None and mesh._get_root_mesh() != mesh,
    }
    return DataParallel(
        module.process_group, int(module.bucket_bytes_cap), tuple(name for name, is_set in others.items() if is_set)
    )


def broadcasts_buffers(module) -> bool:
    """Whether a DistributedDataParallel gives all ranks the buffers of rank 0 before calls."""
    return bool(getattr(module, "forward_sync_buffers", module.broadcast_buffers))  # the second before torch 2.13
