"""`ddp` and `fsdp`: they prepare a module, compiled or not, so that its programs train it together with those of other
ranks.

Each rank's loss is the mean over its own data, and gradients are averaged over the ranks: training with N ranks is
training with N times the data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from thunder.distributed.agreement import check_same_module
from thunder.distributed.boundary import Replacing, as_parameter, local_of, module_behind, remember
from thunder.distributed.layouts import Axis, I, R, S
from thunder.distributed.placement import (
    FSDPBucketingStrategy,
    FSDPType,
    Held,
    Placement,
    place,
    placement_of,
)
from thunder.errors import OptionError
from thunder.ops.families.collectives import group_of
from thunder.ops.families.lost_ranks import introduce
from thunder.options import LOCAL_RANK


def ddp(model, *, broadcast_from: int | None = 0, bucket_size_in_mb: float = 25.0, process_group=None):
    """Replicates a module on every rank and averages gradients (data parallelism).

    Args:
        model: A module, compiled or not. It is changed in place.
        broadcast_from: The rank of the group whose parameters and buffers are copied to all ranks. None if they are
            equal already.
        bucket_size_in_mb: Gradients are averaged together up to this size. 0 averages each gradient separately.
        process_group: A ProcessGroup, or a DeviceMesh with one dimension. None means the default group.

    Returns:
        The module.

    Raises:
        TypeError: If `model` is not a module.
        RuntimeError: If there is no process group, or the module is already distributed.
    """
    module, group = module_of(model, "ddp"), group_of(process_group)
    introduce()
    check_bucket_size(bucket_size_in_mb)
    replaced, buffers = _replaced(model)
    parameters = {**dict(module.named_parameters()), **replaced}
    for name, tensor in (*parameters.items(), *module.named_buffers()):
        if tensor.is_meta:
            raise RuntimeError(
                f"thunder.distributed.ddp: {name} is on the meta device: every rank holds all parameters, make the "
                "module where they are to be"
            )
    how = f"ddp(bucket_size_in_mb={bucket_size_in_mb}, broadcast_from={broadcast_from})"
    check_same_module([group], how, [*parameters.items(), *module.named_buffers()])
    for tensor in (*parameters.values(), *module.buffers(), *buffers.values()):
        if broadcast_from is not None:
            local = local_of(tensor)
            local.copy_(_moved(local, None, [(group, broadcast_from)]))
    for name, parameter in parameters.items():
        place(parameter, replicated(name, parameter, group, bucket_size_in_mb))
    return model


def replicated(name: str, parameter: torch.Tensor, group, bucket_size_in_mb: float) -> Placement:
    """The placement that `ddp` gives a parameter."""
    axis = Held(Axis(group, "dp", "avg"), I, R, on_mesh=False)
    return _placement(name, parameter, [], [axis], bucket_bytes=int(bucket_size_in_mb * 2**20))


def fsdp(
    model,
    *,
    device: torch.device | str | None = None,
    broadcast_from: int | None = None,
    sharding_strategy: FSDPType = FSDPType.ZERO2,
    bucketing_strategy: FSDPBucketingStrategy = FSDPBucketingStrategy.NONE,
    move_state_dict_to_cpu: bool | None = None,
    process_group=None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
):
    """Shards the parameters, gradients and optimizer states of a module over all ranks (fully sharded data
    parallelism).

    Create the optimizer afterwards: the tensors that were parameters before are empty, and programs that read them
    raise an error. A module on the meta device is initialized submodule by submodule with `reset_parameters()`, and
    only the shards are stored.

    Args:
        model: A module, compiled or not, on any device or on the meta device. It is changed in place: its parameters,
            including those of transforms, become DTensors that are sharded by rows. Parameters without dimensions are
            replicated.
        device: The device of the shards. By default the GPU of the rank with NCCL, and otherwise the device of the
            parameters.
        broadcast_from: The rank whose parameters and buffers are sharded. None if they are equal on all ranks.
        sharding_strategy: `FSDPType.ZERO2` keeps gathered parameters for the backward, `FSDPType.ZERO3` gathers them
            again.
        bucketing_strategy: Which parameters are gathered, and whose gradients are reduced, by one collective.
        move_state_dict_to_cpu: Has no effect, since only shards are stored.
        process_group: A ProcessGroup or DeviceMesh. A mesh with two dimensions shards over the second and replicates
            over the first. None means the default group.
        dtype: The dtype in which programs gather parameters and compute. Shards keep their dtype.
        reduce_dtype: The dtype in which gradients are reduced. None means the dtype of the computation.

    Returns:
        The module.

    Raises:
        TypeError: If `model` is not a module.
        RuntimeError: If there is no process group, the module is already distributed, or no `reset_parameters`
            initializes a parameter on the meta device.
    """
    module = module_of(model, "fsdp")
    strategy, buckets = (
        check_member(FSDPType, sharding_strategy, "sharding_strategy"),
        check_member(FSDPBucketingStrategy, bucketing_strategy, "bucketing_strategy"),
    )
    groups = _groups(process_group)
    if isinstance(process_group, dist.device_mesh.DeviceMesh):
        remember(process_group)
    introduce()
    options = sharding_strategy, bucketing_strategy, dtype, reduce_dtype, broadcast_from
    how = f"fsdp({', '.join(map(str, options))})"
    check_same_module(groups, how, [*module.named_parameters(), *module.named_buffers()])
    wanted = _device(device, groups[-1])
    sources = _sources(broadcast_from, process_group, groups)

    replacing = Replacing(module, at_once=True)

    def shard(name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        placement = sharded(name, parameter, groups, strategy, buckets, dtype, reduce_dtype)
        whole = _moved(local_of(parameter), wanted if sources else None, sources)
        local = placement.part_of(whole, placement_of(parameter)).to(wanted or whole.device)
        return replacing.by(parameter, as_parameter(local, placement, parameter.requires_grad), placement)

    # by the id of the parameter on the meta device that it takes the place of
    filled: dict[int, torch.nn.Parameter] = {}
    for path, owner in _owners(module):
        _fill(owner, path, wanted or torch.device("cpu"), filled, replacing)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = _moved(buffer, wanted, sources)
        for name, parameter in owner._parameters.items():
            if parameter is not None and not replacing.knows(parameter):
                shard(f"{path}.{name}" if path else name, parameter)
    replacements, replaced_buffers = _replaced(model)
    for name, parameter in replacements.items():
        if parameter.is_meta:
            raise RuntimeError(
                f"thunder.distributed.fsdp: {name}, which a transform gave the module, is on the meta device: make "
                "the module on the CPU"
            )
        if not replacing.knows(parameter):
            shard(name, parameter)
    for name, buffer in replaced_buffers.items():
        replaced_buffers[name] = _moved(buffer, wanted, sources)
    replacing.end(replacements)
    return model


def sharded(
    name: str,
    parameter: torch.Tensor,
    groups: tuple,
    strategy: FSDPType,
    buckets: FSDPBucketingStrategy,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> Placement:
    """The placement that `fsdp` gives a parameter. groups: those it is replicated over, and last the one it is sharded
    over."""
    *replicated_over, over = groups
    shape = tuple(parameter.shape) if (split := placement_of(parameter)) is None else split.held_shape
    layout = I if not shape else S(0, shape[0] if shape[0] % over.size() else None)
    return _placement(
        name,
        parameter,
        [Held(Axis(group, "replicas", "avg"), I, R) for group in replicated_over],
        [Held(Axis(over, "dp", "avg"), layout, R)],
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        again=strategy is FSDPType.ZERO3,
        bucket=_bucket(name, buckets),
    )


def copy_default_process_group():
    """Returns a new group of all ranks with the backend of the default group. Every rank calls it. Raises
    RuntimeError if there is no default group."""
    return dist.new_group(range(group_of(None).size()), backend=dist.get_backend())


# ----------------------------------------------------------------------------------------------------------------
# arguments


def module_of(model, what: str) -> torch.nn.Module:
    """The module behind what was given: that of a compiled one."""
    module = module_behind(model, what)
    placed = next((q for p in module.parameters() if (q := placement_of(p)) is not None and not q.shares_data), None)
    if placed is not None:
        raise RuntimeError(
            f"thunder.distributed.{what}: parameter {placed.name} is distributed already: call ddp or fsdp once, a "
            "DeviceMesh of two dimensions combines them"
        )
    return module


def _replaced(model) -> tuple[dict[str, torch.nn.Parameter], dict[str, torch.Tensor]]:
    """The parameters and buffers that transforms put in the place of a compiled module's, or beside them, by their
    paths."""
    return getattr(model, "_overrides_parameters", {}), getattr(model, "_overrides_buffers", {})


def check_member(kind: type, value, option: str):
    if not isinstance(value, kind):
        raise OptionError(f"{option}={value!r} is not an option; valid: {', '.join(map(str, kind))}")
    return value


def check_bucket_size(size: float) -> None:
    if size < 0:
        raise OptionError(f"bucket_size_in_mb={size!r} is not an option; valid: 0 or more")


def _groups(group) -> tuple:
    """The process groups that parameters are replicated over, and last the one that they are sharded over."""
    if isinstance(group, dist.device_mesh.DeviceMesh) and group.ndim > 1:
        if group.ndim != 2:
            raise OptionError(
                f"process_group is a DeviceMesh of {group.ndim} dimensions; valid: one (shards), or two (replicas, "
                "shards)"
            )
        return group.get_group(0), group.get_group(1)
    return (group_of(group),)


def _sources(root: int | None, mesh, groups: tuple) -> list[tuple]:
    """(group, rank in it that broadcasts), innermost group first, so that what rank `root` has reaches all."""
    if root is None:
        return []
    if len(groups) == 1:
        return [(groups[0], root)]
    places = (mesh.mesh == root).nonzero()
    if not len(places):
        raise OptionError(f"broadcast_from={root!r} is no rank of the DeviceMesh {mesh}")
    return list(zip(reversed(groups), reversed(places[0].tolist()), strict=True))


def _device(device, group) -> torch.device | None:
    """Where shards go; None: where the parameters are."""
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available() or "nccl" not in str(dist.get_backend_config(group)):
        return None
    local = LOCAL_RANK.value
    return torch.device("cuda", int(local) if local is not None else dist.get_rank() % torch.cuda.device_count())


def _bucket(name: str, strategy: FSDPBucketingStrategy) -> str | None:
    """What parameters of one bucket have in common: the path of their module, or of the element of a list of modules
    that they are in."""
    layer = name.rpartition(".")[0]
    if strategy is FSDPBucketingStrategy.NONE:
        return None
    if strategy is FSDPBucketingStrategy.LAYER:
        return layer
    parts = layer.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return layer if index is None else ".".join(parts[: index + 1])


# ----------------------------------------------------------------------------------------------------------------
# tensors


def _placement(
    name: str,
    parameter: torch.Tensor,
    before: list[Held],
    behind: list[Held],
    *,
    dtype: torch.dtype | None = None,
    **options,
) -> Placement:
    """The placement of a parameter, which may be a part of a layer's already. before, behind: the axes around those of
    the layer."""
    computed = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    split = placement_of(parameter)
    if split is None:
        axes, shape = (*before, *behind), tuple(parameter.shape)
    else:
        axes, shape = (*before, *split.axes, *behind), split.shape
        options["sequence_dim"] = split.sequence_dim
    return Placement(name, shape, computed, parameter.dtype, axes, **options)


@torch.no_grad()
def _moved(tensor: torch.Tensor, device: torch.device | None, sources: list[tuple]) -> torch.Tensor:
    """A tensor on its device, with the values of the rank that broadcasts."""
    tensor = tensor.to(device or tensor.device)
    for group, root in sources:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group_src=root, group=group)
    return tensor


def _owners(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(path, submodule) of those that have parameters or buffers of their own."""
    return ((path, owner) for path, owner in module.named_modules() if owner._parameters or owner._buffers)


def _fill(
    owner: torch.nn.Module,
    path: str,
    device: torch.device,
    filled: dict[int, torch.nn.Parameter],
    replacing: Replacing,
) -> None:
    """Gives a submodule on the meta device memory, and its `reset_parameters` the say about what is in it. Tensors it
    shares with a submodule that was filled stay as they are."""
    known = {name: filled[id(p)] for name, p in owner._parameters.items() if id(p) in filled}
    owner._parameters.update(known)
    missing = {
        name: t
        for table in (owner._parameters, owner._buffers)
        for name, t in table.items()
        if t is not None and t.is_meta
    }
    if not missing:
        return
    reset = getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
    if reset is None:
        raise RuntimeError(
            f"thunder.distributed.fsdp: {path or 'the module'} ({type(owner).__name__}) has {', '.join(missing)} on "
            "the meta device and no reset_parameters() that fills it: "
            "give it one, or make the module on the CPU"
        )
    for name, tensor in missing.items():
        empty = torch.empty_like(tensor, device=device)
        if name in owner._parameters:
            owner._parameters[name] = filled[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad)
        else:
            owner._buffers[name] = empty
    for name, parameter in known.items():  # sharded already: what reset_parameters writes is not for it
        shape = replacing.of(parameter).shape
        owner._parameters[name] = torch.nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
    reset()
    owner._parameters.update(known)
