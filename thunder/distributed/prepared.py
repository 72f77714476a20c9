"""Modules that PyTorch has prepared: `fully_shard`, `parallelize_module`, `distribute_module`, DistributedDataParallel.

Their parameters are DTensors already, whose placements say how the ranks hold them, or equal on all ranks. `adopt`
gives these parameters a `Placement`; programs compute with their local tensors, and what the module's hooks or its
reducer communicate is the programs' affair.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from thunder import compat
from thunder.distributed.layouts import Axis, I, R, S, dividing, mesh_axis
from thunder.distributed.placement import Held, Placement, is_dtensor, own, place, placement_of, placing_copies

REMEDY = "compile the module first, then prepare the result, or use thunder.distributed"


def adopt(module: torch.nn.Module) -> None:
    """Says how the ranks hold the parameters of a module that PyTorch prepared, which stays as it is.

    Raises NotImplementedError, before anything is done, for what programs do not communicate: options that only the
    hooks of `fully_shard` and DistributedDataParallel's reducer follow, partial parameters, and parts of different
    sizes along another dimension than the first.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    averaged = {id(p): (p, placement) for wrapper in _wrappers(module) for p, placement in _averaged(wrapper, names)}
    buckets = {id(x.parameter): (x, path) for path, x in _fully_sharded(module)}
    placements = {}
    for i, (sharded, _) in buckets.items():
        if sharded.others:
            raise NotImplementedError(f"thunder.jit of a module under fully_shard with {sharded.others[0]}: {REMEDY}")
        assert i in names, "fully_shard knows parameters of the module"
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        if is_dtensor(p) and placement_of(p) is None:
            sharded, path = buckets.get(id(p), (None, None))
            placements[id(p)] = _placement_of(name, p, sharded, path)
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and id(p) in placements:
                place(p, placements[id(p)])
                own(owner, name, placements[id(p)])
        for p in owner._buffers.values():
            if p is not None and id(p) in placements:
                place(p, placements[id(p)])
    for p, placement in averaged.values():
        place(p, placement)


def adopt_called_by(fn: Callable) -> None:
    """The same for modules that a function names: in its closure, its globals, or the object that it is a method of.
    What programs do not communicate is refused when it is called."""
    if isinstance(fn, functools.partial):
        return adopt_called_by(fn.func)
    values: list = []
    if isinstance(fn, types.MethodType):
        values, fn = [*getattr(fn.__self__, "__dict__", {}).values()], fn.__func__
    if isinstance(fn, types.FunctionType):
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                values.append(cell.cell_contents)
        values += (fn.__globals__.get(n) for n in fn.__code__.co_names)
    for module in values:
        if isinstance(module, torch.nn.Module) and not is_adopted(module):
            with contextlib.suppress(NotImplementedError):
                adopt(module)


def renew(module: torch.nn.Module) -> None:
    """Parameters of a module under `fully_shard` are gathered again in the backward, or not, as it says now; programs
    ask for that."""
    with placing_copies(), compat.DisableTorchFunction():
        for sharded in compat.fully_sharded(module):
            placement = placement_of(sharded.parameter)
            if placement is not None and placement.again != sharded.again:
                place(sharded.parameter, replace(placement, again=sharded.again))


def described(tensor) -> Placement | None:
    """How the ranks hold a DTensor that nobody has prepared, by its own placements; None for a partial one, and where
    parts of different sizes do not lie along the first dimension."""
    try:
        return _placement_of("tensor", tensor, None, None)
    except NotImplementedError:
        return None


def is_adopted(module: torch.nn.Module) -> bool:
    """Whether programs communicate in the place of a module's hooks."""
    with compat.DisableTorchFunction():  # a capture that asks this does not read the parameters
        trained = {id(p) for wrapper in _wrappers(module) for p in wrapper.parameters() if p.requires_grad}
        return all(
            (placement := placement_of(p)) is not None and (placement.synchronizes or id(p) not in trained)
            for p in module.parameters()
            if is_dtensor(p) or id(p) in trained
        )


def _wrappers(module: torch.nn.Module) -> list[torch.nn.parallel.DistributedDataParallel]:
    return [inner for inner in module.modules() if isinstance(inner, torch.nn.parallel.DistributedDataParallel)]


def _averaged(
    wrapper: torch.nn.parallel.DistributedDataParallel, names: dict[int, str]
) -> Iterator[tuple[torch.nn.Parameter, Placement]]:
    """The parameters that a DistributedDataParallel trains and that have no placement, with the one that they get."""
    known = compat.data_parallel_of(wrapper)
    others = [*known.others, *["parameters that are DTensors"] * any(map(is_dtensor, wrapper.parameters()))]
    if others:
        raise NotImplementedError(f"thunder.jit of a module under DistributedDataParallel with {others[0]}: {REMEDY}")
    axis = Held(Axis(known.group, "dp", "avg"), I, R, on_mesh=False)
    for p in wrapper.parameters():
        if p.requires_grad and placement_of(p) is None:
            shape = tuple(p.shape)
            yield p, Placement(names[id(p)], shape, p.dtype, p.dtype, (axis,), bucket_bytes=known.bucket_bytes)


def _fully_sharded(module: torch.nn.Module) -> Iterator[tuple[str, compat.FullyShard]]:
    """The parameters that `fully_shard` has sharded, with the path of the module that it was called for."""
    for path, inner in module.named_modules():
        if compat.is_fully_sharded(inner):
            yield from ((path, one) for one in compat.fully_sharded(inner))


def _placement_of(name: str, p, sharded: compat.FullyShard | None, path: str | None) -> Placement:
    """How ranks hold a parameter that PyTorch has distributed. Raises NotImplementedError for placements that programs
    do not have."""
    # of ranks that share data
    mesh, placements = (p.device_mesh, p.placements) if sharded is None else sharded.seen_on or (None, ())
    axes, shape = [], list(p.shape)
    if any(layout.is_partial() for layout in placements):
        raise NotImplementedError(f"thunder.jit of a module whose parameter {name} is a partial DTensor: {REMEDY}")
    divides = dividing(placements)
    for i in (*(i for i in range(len(placements)) if i not in divides), *divides):
        axis = mesh_axis(mesh, i)
        axes.append(Held(axis, _parts(name, shape, placements[i].dim, axis.size) if i in divides else I, I))
    if sharded is not None:  # which divides what a rank has of a layer
        over = Axis(sharded.shards, "dp", "avg")
        axes.append(Held(over, _parts(name, shape, sharded.dim, over.size), R))
        if sharded.replicas is not None:
            axes.insert(0, Held(Axis(sharded.replicas, "replicas", "avg"), I, R))
    computed = p.dtype if sharded is None or not p.is_floating_point() else sharded.param_dtype or p.dtype
    return Placement(
        name,
        tuple(p.shape),
        computed,
        p.dtype,
        tuple(axes),
        reduce_dtype=None if sharded is None else sharded.reduce_dtype,
        again=sharded is not None and sharded.again,
        bucket=path,
        seen_on=None if mesh is None else (mesh, placements),
    )


def _parts(name: str, shape: list[int], dim: int, ranks: int):
    """The layout of parts along a dimension, whose size is that of a part from then on."""
    size, uneven = shape[dim], shape[dim] % ranks != 0
    if uneven and dim:
        raise NotImplementedError(
            f"thunder.jit of a module whose parameter {name} has {size} elements along dimension {dim}, which the "
            f"{ranks} ranks do not divide: {REMEDY}"
        )
    shape[dim] = -(-size // ranks)
    return S(dim, size if uneven else None)
