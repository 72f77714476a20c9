"""Context parallelism: the ranks of a group share the positions of sequences, in all layers.

`context_parallel` prepares a module; what its programs do then is a transform (`thunder.distributed.positions`). All
ranks are called with the same whole sequences and have the same loss.
"""

from __future__ import annotations

from dataclasses import replace

from thunder.distributed.agreement import check_same_module
from thunder.distributed.boundary import module_behind
from thunder.distributed.layouts import Axis, I
from thunder.distributed.placement import Held, Placement, place, placement_of
from thunder.ops.families.collectives import group_of
from thunder.ops.families.lost_ranks import introduce


def context_parallel(model, process_group=None, *, sequence_dim: int = 1):
    """Every rank of a group computes some of the positions of each sequence: of layers, norms and losses its own, of
    attention the rows of its own queries, for which the keys and values of all ranks are gathered.

    model: a module, compiled or not; it is changed in place and returned. process_group: a ProcessGroup or DeviceMesh
    of one dimension, the default group where it is None. sequence_dim: the dimension of positions in what layers read.
    Every rank has to hold the same parameters before, and to call the module with the same data: whole sequences, whose
    lengths twice the number of ranks divides; others are computed by every rank. `column_parallel`, `row_parallel`,
    `fsdp` and `ddp` may follow, over groups of their own.

    A rank has one piece from the front of a sequence and one from its end, so that under a causal mask all attend to as
    many keys. Results are whole on every rank: return a loss rather than logits.

    Raises TypeError where model is no module, RuntimeError for parameters that `fsdp` or `ddp` have distributed
    already.
    """
    module, group = module_behind(model, "context_parallel"), group_of(process_group)
    introduce()
    parameters = {**dict(module.named_parameters()), **getattr(model, "_overrides_parameters", {})}
    for name, parameter in parameters.items():
        if (known := placement_of(parameter)) is not None and known.synchronizes:
            raise RuntimeError(
                f"thunder.distributed.context_parallel: parameter {name} is distributed already: share positions "
                "first, and call fsdp or ddp afterwards"
            )
    check_same_module(
        [group], f"context_parallel(sequence_dim={sequence_dim})", [*parameters.items(), *module.named_buffers()]
    )
    held = Held(Axis(group, "cp", "sum", folded=True), I, I, on_mesh=False, positions=sequence_dim)
    for name, parameter in parameters.items():
        known = placement_of(parameter)
        placement = (
            Placement(name, tuple(parameter.shape), parameter.dtype, parameter.dtype, (held,))
            if known is None
            else replace(known, axes=(*known.axes, held))
        )
        place(parameter, placement)
    return model
