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
    """Every rank of a group holds some of the experts of `target_modules`, modules by their paths whose parameters have
    one row for each expert (`[experts, ...]`, as transformers' experts have). Where a program computes
    `torch.nn.functional.grouped_mm` with them, rows go to the ranks that have their experts and come back; whatever
    else it does with such a parameter it does with the whole one, which is gathered.

    model: a module, compiled or not; it is changed in place and returned. All its parameters are DTensors from then on;
    those of no target module are held by every rank of the group, which averages their gradients. process_group: a
    ProcessGroup or DeviceMesh of one dimension, the default group where it is None. device: where the experts go; None:
    where the parameters are. Every rank has to hold the same parameters before, and calls the module with data of its
    own. `fsdp` or `ddp` may follow, over a group of its own.

    Raises TypeError where model is no module, OptionError where the ranks do not divide the experts, RuntimeError for
    parameters that are distributed already.
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
