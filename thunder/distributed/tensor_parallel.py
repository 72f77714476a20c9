"""Tensor parallelism: every rank holds a part of a layer's weight and computes a part of its result, for the same data.

`column_parallel` and `row_parallel` prepare a module; what its programs do then is a transform
(`thunder.distributed.layers`). All ranks have the same loss (M. Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from thunder.distributed.agreement import check_same_module
from thunder.distributed.boundary import Replacing, as_parameter, local_of, module_behind
from thunder.distributed.layouts import Axis, I, S
from thunder.distributed.placement import Held, Placement, placement_of
from thunder.errors import OptionError
from thunder.ops.families.collectives import group_of


def column_parallel(
    model,
    target_modules: Sequence[str],
    process_group=None,
    *,
    device: torch.device | str | None = None,
    sequence_dim: int | None = None,
):
    """Shards the output features of Linear or Embedding modules over the ranks of a group (tensor parallelism).

    Every rank has to hold the same parameters before, and calls the module with the same data. `fsdp` may follow, over
    another group.

    Args:
        model: A module, compiled or not. It is changed in place: all its parameters become DTensors. The weights of
            the target modules are sharded, by rows for a Linear and by columns for an Embedding.
        target_modules: The paths of the modules.
        process_group: A ProcessGroup, or a DeviceMesh with one dimension. None means the default group.
        device: The device of the shards. None means the device of the parameters.
        sequence_dim: The dimension of activations that is sharded between such layers, including norms and residual
            sums (V. Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
            4.2.2). None shards no dimension.

    Returns:
        The module.

    Raises:
        TypeError: If a target module is neither a Linear nor an Embedding.
        OptionError: If the number of ranks does not divide a size.
        RuntimeError: If parameters are already distributed.
    """
    dimensions = {torch.nn.Linear: {"weight": 0, "bias": 0}, torch.nn.Embedding: {"weight": 1}}
    return _parallel(model, target_modules, process_group, device, dimensions, sequence_dim, "column_parallel")


def row_parallel(
    model,
    target_modules: Sequence[str],
    process_group=None,
    *,
    device: torch.device | str | None = None,
    sequence_dim: int | None = None,
):
    """Shards the input features of Linear modules, or the rows of Embedding modules, over the ranks of a group, and
    sums the results (tensor parallelism).

    Arguments and errors are those of `column_parallel`. The weight of a Linear is sharded by columns, and every rank
    holds its bias. The weight of an Embedding is sharded by rows.
    """
    dimensions = {torch.nn.Linear: {"weight": 1}, torch.nn.Embedding: {"weight": 0}}
    return _parallel(model, target_modules, process_group, device, dimensions, sequence_dim, "row_parallel")


def _parallel(model, target_modules, process_group, device, dimensions: dict, sequence_dim: int | None, what: str):
    """Splits the parameters of modules over a group. dimensions: by class of module, the dimension of each parameter.
    what: the public function, for errors."""
    module, group = module_behind(model, what), group_of(process_group)
    paths = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    how = f"{what}({', '.join(paths)}{f', sequence_dim={sequence_dim}' if sequence_dim is not None else ''})"
    check_same_module([group], how, module.named_parameters())
    axis = Axis(group, "tp", "sum")
    replacing = Replacing(module, at_once=False)
    for path in paths:
        target = module.get_submodule(path)
        split = dimensions.get(type(target))
        if split is None:
            raise TypeError(
                f"thunder.distributed.{what} splits Linear and Embedding modules; {path} is a {type(target).__name__}"
            )
        for name, dim in split.items():
            parameter = replacing.now(getattr(target, name))
            if f"{path}.{name}" in getattr(model, "_overrides_parameters", ()):
                raise RuntimeError(
                    f"thunder.distributed.{what}: a transform replaced {path}.{name}: split the module first, then "
                    "thunder.jit(module, transforms=[...])"
                )
            if parameter is not None:
                _split(replacing, parameter, f"{path}.{name}", axis, dim, sequence_dim, device)
    overridden = getattr(model, "_overrides_parameters", {})
    for name, parameter in (*module.named_parameters(), *overridden.items()):
        if not replacing.knows(parameter):
            _share(replacing, parameter, name, axis)
    replacing.end(overridden)
    return model


def _share(replacing: Replacing, parameter: torch.nn.Parameter, name: str, axis: Axis) -> None:
    """All ranks hold a parameter of no split layer: a DTensor as those of split ones, so that optimizers and norms take
    them together."""
    known = placement_of(parameter)
    if parameter.is_meta or known is not None and (known.synchronizes or any(q.axis == axis for q in known.axes)):
        return
    placement = _placed(parameter, name, Held(axis, I, I), known)
    local = local_of(parameter)
    replacing.by(parameter, as_parameter(local.clone(), placement, parameter.requires_grad), placement)


def _placed(parameter: torch.nn.Parameter, name: str, held: Held, known: Placement | None) -> Placement:
    """How the ranks of one more axis hold a parameter, or of an axis that has all of it."""
    if known is None:
        return Placement(name, tuple(parameter.shape), parameter.dtype, parameter.dtype, (held,))
    return replace(known, name=name, axes=(*(q for q in known.axes if q.axis != held.axis), held))


def _split(
    replacing: Replacing,
    parameter: torch.nn.Parameter,
    name: str,
    axis: Axis,
    dim: int,
    sequence_dim: int | None,
    device,
) -> None:
    """Splits one parameter along a dimension over the ranks of an axis. Raises where it is split otherwise already."""
    known, held = placement_of(parameter), Held(axis, S(dim), I)
    if known is not None and (known.synchronizes or known.is_split):
        alike = held in known.axes and known.sequence_dim == sequence_dim
        if known.name != name and not known.synchronizes and alike:
            return  # shared by two layers, which split it alike: an embedding by rows, and a head by columns
        raise RuntimeError(
            f"parameter {name} is distributed already: split it first, and call fsdp or ddp afterwards; layers that "
            "share a parameter split it alike"
        )
    if parameter.is_meta:
        raise RuntimeError(
            f"parameter {name} is on the meta device: a part of a layer cannot be filled by its reset_parameters(): "
            "make the module on the CPU"
        )
    size = parameter.shape[dim]
    if size % axis.size:
        raise OptionError(
            f"dimension {dim} of {name} has {size} elements; valid: a multiple of the {axis.size} ranks of the group"
        )
    placement = replace(_placed(parameter, name, held, known), sequence_dim=sequence_dim)
    with torch.no_grad():
        own = placement.part_of(local_of(parameter)).clone(memory_format=torch.contiguous_format)
        own = own.to(device or parameter.device)
    replacing.by(parameter, as_parameter(own, placement, parameter.requires_grad), placement)
