"""Tensor parallelism: every rank holds a part of a layer's weight and computes a part of its result, for the same data.

`column_parallel` and `row_parallel` prepare a module; what its programs do then is a transform
(`thunder.distributed.layers`). The operations here are what such programs move: each is the derivative of another one,
and all ranks have the same loss (M. Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import Symbol
from thunder.distributed.agreement import check_same_module
from thunder.distributed.boundary import Replacing, as_parameter, local_of
from thunder.distributed.placement import Axis, Placement, Slice, placement_of
from thunder.errors import OptionError
from thunder.ops import LTORCH
from thunder.ops.families.collectives import all_gather, all_reduce, group_of, reduce_scatter, wait


def column_parallel(
    model,
    target_modules: Sequence[str],
    process_group=None,
    *,
    device: torch.device | str | None = None,
    sequence_dim: int | None = None,
):
    """Every rank of a group computes some of the features of `target_modules`, Linear or Embedding modules by their
    paths.

    model: a module, compiled or not; it is changed in place and returned. All its parameters are DTensors from then on,
    those of the target modules sharded: by rows of a Linear's, by columns of an Embedding's. process_group: a
    ProcessGroup or DeviceMesh of one dimension, the default group where it is None. device: where the parts go; None:
    where the parameters are.
    sequence_dim: between such layers every rank computes some of the elements along this dimension of activations, of
    norms and residual sums too (V. Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4.2.2); None: all of them. Every rank has to hold the same parameters before, and to call the
    module with the same data. `fsdp` may follow, over a group of its own.

    Raises TypeError for modules that are neither, OptionError for sizes that the group does not divide, RuntimeError
    for parameters that are distributed already.
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
    """Every rank of a group multiplies some of the features that come in to `target_modules`, or looks up some of the
    rows, and the results are summed.

    Arguments and errors are those of `column_parallel`; a Linear's weight is split by columns, its bias is held by
    every rank, an Embedding's weight is split by rows.
    """
    dimensions = {torch.nn.Linear: {"weight": 1}, torch.nn.Embedding: {"weight": 0}}
    return _parallel(model, target_modules, process_group, device, dimensions, sequence_dim, "row_parallel")


def _parallel(model, target_modules, process_group, device, dimensions: dict, sequence_dim: int | None, what: str):
    module, group = getattr(model, "_lc_original", model), group_of(process_group)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"thunder.distributed.{what} takes an nn.Module, or what thunder.jit made of one, not "
            f"{type(model).__name__}"
        )
    check_same_module([group], module.named_parameters())
    replacing = Replacing(module, at_once=False)
    for path in [target_modules] if isinstance(target_modules, str) else target_modules:
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
                part = Slice(group, dim, tuple(parameter.shape), sequence_dim)
                _split(replacing, parameter, f"{path}.{name}", part, device)
    overridden = getattr(model, "_overrides_parameters", {})
    for name, parameter in (*module.named_parameters(), *overridden.items()):
        if not replacing.knows(parameter):
            _share(replacing, parameter, name, group)
    replacing.end(overridden)
    return model


def _share(replacing: Replacing, parameter: torch.nn.Parameter, name: str, group) -> None:
    """All ranks hold a parameter of no split layer: a DTensor as those of split ones, so that optimizers and norms take
    them together."""
    known = placement_of(parameter)
    if parameter.is_meta or known is not None and (known.synchronizes or any(a.group is group for a in known.axes)):
        return
    axes = (*(() if known is None else known.axes), Axis(group, None, "ranks"))
    placement = Placement(name, tuple(parameter.shape), parameter.dtype, parameter.dtype, axes=axes)
    if known is not None:
        placement = replace(known, axes=axes)
    local = local_of(parameter)
    replacing.by(parameter, as_parameter(local.clone(), placement, parameter.requires_grad), placement)


def _split(replacing: Replacing, parameter: torch.nn.Parameter, name: str, part: Slice, device) -> None:
    known = split = placement_of(parameter)
    if split is not None and not split.synchronizes and split.slice is None:
        split = None  # all ranks hold it, for another layer's sake
    if (
        split is not None
        and split.name != name
        and not split.synchronizes
        and split.slice == replace(part, shape=split.seen_shape)
    ):
        return  # shared by two layers, which split it alike: an embedding by rows, and a head by columns
    if split is not None:
        raise RuntimeError(
            f"parameter {name} is distributed already: split it first, and call fsdp or ddp afterwards; layers that "
            "share a parameter split it alike"
        )
    if parameter.is_meta:
        raise RuntimeError(
            f"parameter {name} is on the meta device: a part of a layer cannot be filled by its reset_parameters(): "
            "make the module on the CPU"
        )
    size = part.shape[part.dim]
    if size % part.group.size():
        raise OptionError(
            f"dimension {part.dim} of {name} has {size} elements; valid: a multiple of the {part.group.size()} ranks "
            "of the group"
        )
    with torch.no_grad():
        own = part.part_of(local_of(parameter)).clone(memory_format=torch.contiguous_format)
        own = own.to(device or parameter.device)
    others = [] if known is None else [axis for axis in known.axes if axis.group is not part.group]
    axes = (*others, Axis(part.group, part.dim, "ranks"))
    placement = Placement(name, tuple(own.shape), parameter.dtype, parameter.dtype, slice=part, axes=axes)
    replacing.by(parameter, as_parameter(own, placement, parameter.requires_grad), placement)


# ----------------------------------------------------------------------------------------------------------------
# operations


def _part_meta(a: TensorProxy, group, dim: int) -> TensorProxy:
    return like(a, (*a.shape[:dim], a.shape[dim] // group.size(), *a.shape[dim + 1 :]))


def _part(a: TensorProxy, group, dim: int) -> TensorProxy:
    size = a.shape[dim] // group.size()
    return LTORCH["narrow"](a, dim, group.rank() * size, size)


def _joined_meta(a: TensorProxy, group, dim: int) -> TensorProxy:
    return like(a, (*a.shape[:dim], a.shape[dim] * group.size(), *a.shape[dim + 1 :]))


copy_to_ranks = Symbol("copy_to_ranks", lambda a, group: like(a), module="ltorch", decomposition=lambda a, group: a)
sum_over_ranks = Symbol(
    "sum_over_ranks",
    lambda a, group: like(a),
    module="ltorch",
    decomposition=lambda a, group: wait(all_reduce(a, "sum", group, True)),
)
join_ranks = Symbol(
    "join_ranks",
    _joined_meta,
    module="ltorch",
    decomposition=lambda a, group, dim: wait(all_gather(a, group, True, dim)),
)
part_of_rank = Symbol("part_of_rank", _part_meta, module="ltorch", decomposition=_part)
# what every rank computes with a joined value differs: the gradients of it are summed
gather_parts = Symbol(
    "gather_parts",
    _joined_meta,
    module="ltorch",
    decomposition=lambda a, group, dim: wait(all_gather(a, group, True, dim)),
)
sum_of_parts = Symbol(
    "sum_of_parts",
    _part_meta,
    module="ltorch",
    decomposition=lambda a, group, dim: wait(reduce_scatter(a, "sum", group, True, dim)),
)


def _differentiated_by(symbol: Symbol, adjoint: Symbol) -> None:
    def rule(a, group, *dim):
        g = yield symbol(a, group, *dim)
        return (adjoint(g, group, *dim),)

    symbol.vjp(rule)


for _one, _other in ((copy_to_ranks, sum_over_ranks), (join_ranks, part_of_rank), (gather_parts, sum_of_parts)):
    _differentiated_by(_one, _other)
    _differentiated_by(_other, _one)
