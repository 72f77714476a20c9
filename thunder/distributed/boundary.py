"""DTensors at the boundary: what ranks hold of a parameter is a DTensor, and programs compute with its local tensor.

The parameters, gradients and optimizer states of a module that `fsdp`, `column_parallel` or `row_parallel` prepared say
how the ranks hold them (`torch.distributed.tensor`), so that PyTorch's tools see the whole tensors: clipping, foreach
and fused optimizers, `torch.distributed.checkpoint`, `full_tensor()`. A prologue hands the local tensors of such
parameters to the computation (`locals_of`), connected to autograd: gradients are DTensors again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from thunder import compat
from thunder.distributed.layouts import Axis, dividing
from thunder.distributed.placement import Placement, is_dtensor, own, place, replaced

_meshes: dict[tuple, Any] = {}  # by groups and the type of device


def module_behind(model: Any, what: str) -> torch.nn.Module:
    """The module that was given to the function `what`: that of a compiled one. Raises TypeError where it is none."""
    module = getattr(model, "_lc_original", model)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"thunder.distributed.{what} takes an nn.Module, or what thunder.jit made of one, not "
            f"{type(model).__name__}"
        )
    return module


def mesh_of(axes: Sequence[Axis], device_type: str):
    """The DeviceMesh of the ranks of groups that cross. All ranks of it ask for the same ones in the same order."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = [axis.group for axis in axes]
    key = (*groups, device_type)
    if key not in _meshes:
        if len(groups) == 1:
            _meshes[key] = DeviceMesh.from_group(groups[0], device_type)
        else:
            names = tuple(f"{axis.name}_{i}" for i, axis in enumerate(axes))
            _meshes[key] = DeviceMesh.from_group(groups, device_type, mesh=_ranks_of(groups), mesh_dim_names=names)
    return _meshes[key]


def remember(mesh) -> None:
    """Parameters are DTensors on this DeviceMesh of a user's, where they are held by its groups."""
    _meshes[(*(mesh.get_group(i) for i in range(mesh.ndim)), mesh.device_type)] = mesh


def _ranks_of(groups: Sequence) -> torch.Tensor:
    """The ranks of groups that cross: along each dimension those of one group."""
    ranks = torch.tensor(dist.get_process_group_ranks(groups[-1]))
    for group in reversed(groups[:-1]):
        rows: list = [None] * group.size()
        dist.all_gather_object(rows, ranks, group=group)
        ranks = torch.stack(rows)
    return ranks


def as_dtensor(local: torch.Tensor, placement: Placement):
    """What a rank holds of a parameter as a DTensor on the same memory."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    axes = [q for q in placement.axes if q.on_mesh]
    shape, mesh = placement.shape, mesh_of([q.axis for q in axes], local.device.type)
    layout = [Shard(q.layout.dim) if q.layout.kind == "S" else Replicate() for q in axes]
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=torch.Size(shape), stride=stride)


def as_parameter(local: torch.Tensor, placement: Placement, requires_grad: bool) -> torch.nn.Parameter:
    """The parameter that stands in a module for what a rank holds."""
    return torch.nn.Parameter(as_dtensor(local.detach(), placement), requires_grad)


class Replacing:
    """DTensors take the place of parameters of a module, wherever in it these are. at_once: the memory of those is
    freed one by one; otherwise at the end, so that an error leaves the module as it was."""

    def __init__(self, module: torch.nn.Module, at_once: bool):
        self.module, self.at_once = module, at_once
        # by the id of what it takes the place of: that, the DTensor and its placement
        self.replacements: dict[int, tuple[torch.Tensor, torch.nn.Parameter, Placement]] = {}

    def by(self, old: torch.Tensor, new: torch.nn.Parameter, placement: Placement) -> torch.nn.Parameter:
        """`new` stands for `old` from the end on."""
        self.replacements[id(old)] = old, new, placement
        place(new, placement)
        if self.at_once:
            replaced(old, placement.name)
        return new

    def now(self, old: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter, or the parameter itself."""
        return self.replacements[id(old)][1] if id(old) in self.replacements else old

    def knows(self, old: torch.Tensor) -> bool:
        return id(old) in self.replacements

    def of(self, old: torch.Tensor) -> torch.nn.Parameter:
        return self.replacements[id(old)][1]

    def end(self, *tables: dict[str, torch.nn.Parameter]) -> None:
        """Put them where the parameters were: in the module, and in tables beside it."""
        owners = [(m, m._parameters) for m in self.module.modules()]
        for module, table in [*owners, *((None, table) for table in tables)]:
            for name, parameter in table.items():
                while parameter is not None and id(parameter) in self.replacements:
                    _, parameter, placement = self.replacements[id(parameter)]
                    table[name] = parameter
                    if module is not None:
                        own(module, name, placement)
                    if type(module).__setattr__ not in (torch.nn.Module.__setattr__, object.__setattr__):
                        setattr(module, name, parameter)  # recurrent layers hold their parameters in a list as well
        for old, _, placement in self.replacements.values():
            if not self.at_once:
                replaced(old, placement.name)


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the local tensor of a DTensor, and another tensor itself."""
    return compat.local_tensor(tensor) if is_dtensor(tensor) else tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without autograd."""
    return held(tensor).detach()


def like(whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """What a rank computed for a tensor, as the ranks hold that: a gradient, for example."""
    if not is_dtensor(whole) or is_dtensor(local):
        return local
    return compat.dtensor_like(whole, _without_padding(whole, local))


def _without_padding(whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The rows that a rank holds, of those that its programs see."""
    rows = held(whole).shape[:1]
    return local if local.shape[:1] == rows else local[: rows[0]]


def result_of(local: torch.Tensor, mesh, placements: Sequence, shape: Sequence[int]) -> torch.Tensor:
    """What a rank computed of a program's result, with padding behind its own rows, as the DTensor that it is,
    connected to autograd."""
    from torch.distributed.tensor import DTensor

    sizes, own = list(shape), list(shape)
    for i in dividing(placements):
        dim = placements[i].dim
        sizes[dim] = -(-sizes[dim] // mesh.size(i))
        own[dim] = min(sizes[dim], max(0, own[dim] - mesh.get_local_rank(i) * sizes[dim]))
    for dim, size in enumerate(own):
        local = local.narrow(dim, 0, size)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def locals_of(tensors: tuple, rows: Sequence[int | None]) -> list[torch.Tensor]:
    """The local tensors of DTensors, with so many rows of each, where that is not None. Where grad is enabled,
    gradients go to the DTensors that require grad."""
    local_tensors = [padded(x, n) for x, n in zip(tensors, rows, strict=True)]
    trained = [i for i, x in enumerate(tensors) if x.requires_grad] if torch.is_grad_enabled() else []
    if trained:
        connected = _Locals.apply(tuple(local_tensors[i] for i in trained), *(tensors[i] for i in trained))
        for i, local in zip(trained, connected, strict=True):
            local_tensors[i] = local
            local.local_of = tensors[i]
    return local_tensors


def padded(tensor: Any, rows: int | None) -> torch.Tensor:
    """The local tensor of a DTensor with so many rows, the same on each rank: what lies behind the last row in memory,
    or a copy with zeros there. Nobody reads these rows."""
    local = compat.local_tensor(tensor)
    if rows is None or local.shape[0] == rows:
        return local
    shape = (rows, *local.shape[1:])
    end = (local.storage_offset() + math.prod(shape)) * local.element_size()
    if local.is_contiguous() and end <= local.untyped_storage().nbytes():
        return local.as_strided(shape, local.stride())
    return torch.cat([local, local.new_zeros((rows - local.shape[0], *local.shape[1:]))])


def make_room(gradient: Any, rows: int | None) -> None:
    """A program writes to the local tensor of a DTensor, which has memory for so many rows from then on; autograd
    counts the write."""
    torch.autograd.graph.increment_version(gradient)
    if rows is not None and padded(gradient, rows).data_ptr() != compat.local_tensor(gradient).data_ptr():
        own = compat.local_tensor(gradient)
        compat.set_local_tensor(gradient, padded(gradient, rows)[: own.shape[0]])


class _Locals(torch.autograd.Function):
    """The local tensors of DTensors, all by one node: a DTensor's own `to_local` takes 0.4 ms of the host for each
    gradient."""

    @staticmethod
    def forward(ctx, local_tensors, *tensors):
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors
        return tuple(x.view_as(x) for x in local_tensors)  # whose own autograd state stays as it is

    @staticmethod
    def backward(ctx, *gradients):
        of_tensors = (None if g is None else _gradient(x, g) for x, g in zip(ctx.tensors, gradients, strict=True))
        return None, *of_tensors


def _gradient(whole, local: torch.Tensor):
    if not torch.is_grad_enabled():
        return like(whole, local)
    local = _without_padding(whole, local)
    from torch.distributed.tensor import DTensor  # differentiable

    mesh, layout = whole.device_mesh, whole.placements
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=whole.shape, stride=whole.stride())
