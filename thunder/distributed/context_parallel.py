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
    """Shards sequences by position over the ranks of a group (context parallelism).

    Every rank computes layers, norms and losses for its positions, and attention for the queries of its positions, with
    the keys and values of all ranks. Each rank has one piece from the front of a sequence and one from its end, so that
    under a causal mask all ranks attend to equally many keys.

    Every rank has to hold the same parameters before, and calls the module with the same, whole sequences. If the
    length of a sequence is not a multiple of twice the number of ranks, every rank computes the whole sequence. Results
    are gathered on every rank, so return a loss rather than logits. `column_parallel`, `row_parallel`, `fsdp` and `ddp`
    may follow, over other groups.

    Args:
        model: A module, compiled or not. It is changed in place.
        process_group: A ProcessGroup, or a DeviceMesh with one dimension. None means the default group.
        sequence_dim: The dimension of positions in the inputs of layers.

    Returns:
        The module.

    Raises:
        TypeError: If `model` is not a module.
        RuntimeError: If `fsdp` or `ddp` has already distributed the parameters.
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
