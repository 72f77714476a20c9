"""Expert parallelism: each rank of a group holds some of the experts of a mixture, and computes them for the rows of
all ranks.

`expert_parallel` prepares a module; what its programs do then is a transform (`thunder.distributed.experts`). Ranks
have data of their own; each rank's loss is the mean over these, and gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thunder.distributed.agreement import check_same_module
from thunder.distributed.boundary import Replacing, as_parameter, local_of, module_behind
from thunder.distributed.layouts import Axis, I, R, S
from thunder.distributed.placement import Held, Placement, placement_of
from thunder.errors import OptionError
from thunder.ops.families.collectives import group_of
from thunder.ops.families.lost_ranks import introduce


def expert_parallel(
    model,
    target_modules: Sequence[str],
    process_group=None,
    *,
    device: torch.device | str | None = None,
):
    """Shards the experts of a mixture of experts over the ranks of a group (expert parallelism).

    Where a program calls `torch.nn.functional.grouped_mm` with such parameters, rows are sent to the ranks of their
    experts, and the results are sent back. All other operations on such a parameter gather it.

    Every rank has to hold the same parameters before, and calls the module with its own data. `fsdp` or `ddp` may
    follow, over another group.

    Args:
        model: A module, compiled or not. It is changed in place: all its parameters become DTensors. Parameters outside
            of the target modules are replicated, and their gradients are averaged.
        target_modules: The paths of modules whose parameters have experts as their first dimension, as in transformers.
        process_group: A ProcessGroup, or a DeviceMesh with one dimension. None means the default group.
        device: The device of the experts. None means the device of the parameters.

    Returns:
        The module.

    Raises:
        TypeError: If `model` is not a module.
        OptionError: If the number of ranks does not divide the number of experts.
        RuntimeError: If parameters are already distributed.
    """
    module, group = module_behind(model, "expert_parallel"), group_of(process_group)
    introduce()
    overridden = getattr(model, "_overrides_parameters", {})
    named = {**dict(module.named_parameters()), **overridden}
    paths = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    own = {id(p): f"{path}.{name}" for path in paths for name, p in module.get_submodule(path).named_parameters()}
    for name, parameter in named.items():
        if placement_of(parameter) is not None or parameter.is_meta:
            what = "on the meta device" if parameter.is_meta else "distributed already"
            raise RuntimeError(
                f"thunder.distributed.expert_parallel: parameter {name} is {what}: share experts first, of a module "
                "with its values, and call fsdp or ddp afterwards"
            )
    for parameter in named.values():
        if id(parameter) in own and (not parameter.ndim or parameter.shape[0] % group.size()):
            rows = f"{parameter.shape[0]} rows" if parameter.ndim else "no rows"
            raise OptionError(
                f"{own[id(parameter)]} has {rows}, one for each expert; valid: a multiple of the {group.size()} ranks "
                "of the group"
            )
    check_same_module([group], f"expert_parallel({', '.join(paths)})", [*named.items(), *module.named_buffers()])
    axis, replacing = Axis(group, "ep", "avg"), Replacing(module, at_once=False)
    for name, parameter in named.items():
        held = Held(axis, S(0) if id(parameter) in own else I, R, experts=True)
        placement = Placement(name, tuple(parameter.shape), parameter.dtype, parameter.dtype, (held,))
        with torch.no_grad():
            local = placement.part_of(local_of(parameter)).clone().to(device or parameter.device)
        replacing.by(parameter, as_parameter(local, placement, parameter.requires_grad), placement)
    replacing.end(overridden)
    return model
