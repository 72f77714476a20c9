"""Programs of several ranks on disk: how the ranks hold the inputs, and what they communicate.

Every rank says the same of its inputs, so that the file that one rank has written is a program of the others. Groups,
axes and placements are no text: a file says of which input of the program they are, and a process has them of its own
input there. Where ranks that share data hold parts (split layers, positions, experts), what a program computes depends
on the rank, and a file is that rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thunder.cache.entry import CacheEntry
from thunder.distributed.agreement import agree, collectives_of
from thunder.distributed.placement import Held, Placement
from thunder.programs.describe import Unspeakable
from thunder.programs.text import Damaged


def described_placement(q: Placement) -> list:
    """How the ranks hold an input, the same for each of them."""
    mesh = None
    if q.seen_on is not None:
        on, placements = q.seen_on
        mesh = [[*on.mesh.shape], list(on.mesh_dim_names or ()), str(on.device_type), [*map(repr, placements)]]
    return [
        [*q.shape], str(q.dtype), str(q.held_dtype), str(q.reduce_dtype), q.again, q.bucket, q.bucket_bytes,
        q.sequence_dim, mesh, [*map(_described_axis, q.axes)],
    ]  # fmt: skip


def _described_axis(held: Held) -> list:
    axis = held.axis
    return [
        str(held.layout), str(held.seen), held.on_mesh, held.positions, held.experts, axis.name, axis.reduction,
        axis.outside, axis.groups, axis.folded, axis.size, None if held.averages else axis.rank,
    ]  # fmt: skip


def objects_of_placements(placements: Sequence[Placement]) -> dict[str, Any]:
    """What texts may name of the placements of a program's inputs, by names that are the same in every process."""
    objects: dict[str, Any] = {}
    for i, q in enumerate(placements):
        objects[f"placement{i}"] = q
        for j, held in enumerate(q.axes):
            objects |= {f"axis{i}_{j}": held.axis, f"group{i}_{j}": held.axis.group}
    return objects


def written_agreement(entry: CacheEntry, objects: Mapping[str, Any]) -> list[list[str]]:
    """The collectives of a program, with their groups by name. Raises Unspeakable for another group."""
    traces = [entry.forward, *([entry.backward] if entry.backward is not None else [])]
    said = []
    for group, line, where in collectives_of(traces):
        name = next((name for name, x in objects.items() if x is group), None)
        if name is None:
            raise Unspeakable(f"it communicates in the group {group.group_name}, which no input of it lies on")
        said.append([name, line, where])
    return said


def agree_with_others(said: Sequence[Sequence[str]], objects: Mapping[str, Any]) -> None:
    """Waits until the other ranks have a program with the same collectives, compiled or from a file. Raises Damaged
    where the text is none of collectives."""
    if not isinstance(said, list) or not all(isinstance(one, list) and len(one) == 3 for one in said):
        raise Damaged("its collectives are no list of them")
    if unknown := [name for name, *_ in said if not isinstance(objects.get(name), dist.ProcessGroup)]:
        raise Damaged(f"it communicates in {unknown[0]}, which is no group of its inputs")
    agree([(objects[name], line, where) for name, line, where in said])


def check_one_result(requires_grad: Sequence[bool | None]) -> None:
    """Raises Unspeakable where cotangents of some results may be missing: their backward is compiled when it is met,
    and a file has no program to compile it from that communicates."""
    if sum(map(bool, requires_grad)) > 1:
        raise Unspeakable("ranks communicate in it, and it has several results that require grad: return the loss")


def no_second_derivative(*inputs: torch.Tensor) -> Any:
    raise RuntimeError(
        "a backward of a program from the disk in which ranks communicate is differentiated, or run in another way: "
        "compile the function with keep_programs=False"
    )
