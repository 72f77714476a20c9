"""How the ranks of one axis of a mesh hold a value: the types of local values in programs.

    S0, S1, ...   each rank has an equal part along a dimension
    R             replicated: all have the same value, and each a gradient of its own, whose sum is the gradient
    I             invariant: all have the same value and the same gradient
    V             varying: each has a value of its own
    P             partial: each has a summand of the value

The gradient of a value has the dual layout: R and P are duals of each other, and the others of themselves. So a
gradient is partial where its value is replicated. Beside DTensor's placements, which do not tell R from I, this says
which gradients are summed over ranks, and which are whole already.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist

from thunder.core import codegen


@dataclass(frozen=True)
class Layout:
    """kind: S, R, I, V or P. dim: the dimension that parts are along. size: of that dimension of the whole value, where
    the ranks do not divide it: all but the last parts have ceil(size / ranks) elements, the last ones fewer or none,
    and in programs padding behind them."""

    kind: Literal["S", "R", "I", "V", "P"]
    dim: int = 0
    size: int | None = None

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" if self.size is None else f"S{self.dim}_of_{self.size}"

    @property
    def dual(self) -> Layout:
        """The layout of gradients."""
        return {R: P, P: R}.get(self, self)


R, I, V, P = Layout("R"), Layout("I"), Layout("V"), Layout("P")  # noqa: E741


@functools.cache
def S(dim: int, size: int | None = None) -> Layout:
    """Parts along a dimension."""
    return Layout("S", dim, size)


class PlannedGroup(dist.ProcessGroup):
    """The group of a program that is planned, of which this process is rank 0. It never communicates; ranks send each
    other as many rows as they get. stride: how far apart its ranks are among all."""

    def __init__(self, ranks: int, stride: int = 1):
        super().__init__(0, ranks)  # type: ignore[call-arg]
        self.stride = stride


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: a group of ranks. name: in the text of programs; axes that differ in it alone are equal.
    reduction: how one value becomes of partial ones. The loss of a program is the mean over ranks with data of their
    own ("avg"), and every rank's own over ranks that share data ("sum"). outside: along which the ranks hold what is a
    DTensor outside of the program: gradients, states of optimizers, results.

    The ranks divide a dimension in their order. groups: the dimension is so many sequences in a row, each of which the
    ranks divide. folded: they divide it into twice as many pieces as there are ranks, and a rank has one from the front
    and the one as far from the end, so that all ranks attend to as many keys under a causal mask.
    """

    group: Any
    name: str = field(compare=False)
    reduction: Literal["sum", "avg"]
    outside: bool = False
    groups: int = 1
    folded: bool = False

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def pieces(self) -> int:
        """The number of equal pieces that the ranks divide a dimension into."""
        return self.size * self.groups * (2 if self.folded else 1)

    @property
    def of_sequences(self) -> Axis:
        """The axis along which the same ranks divide one sequence."""
        return self if self.groups == 1 else self.in_groups(1)

    def in_groups(self, groups: int) -> Axis:
        """The axis along which the same ranks divide so many sequences in a row."""
        return replace(self, groups=groups)

    def ends(self, size: int) -> list[tuple[int, int]]:
        """Of this rank's pieces of a sequence: the position behind the last one, and how many there are."""
        places = (self.rank, 2 * self.size - 1 - self.rank) if self.folded else (self.rank,)
        own = size // (self.size * len(places))
        return [((number + 1) * own, own) for number in places]

    def __str__(self) -> str:
        return self.name


def outside_axis(axis: Axis) -> Axis:
    """The axis of the same ranks, for what is a DTensor outside."""
    return Axis(axis.group, axis.name, "sum", outside=True)


def mesh_axis(mesh, i: int, outside: bool = False) -> Axis:
    """Dimension i of a DeviceMesh whose ranks share data."""
    name = mesh.mesh_dim_names[i] if mesh.mesh_dim_names else "mesh" if outside else "tp"
    return Axis(mesh.get_group(i), name, "sum", outside)


def steps_from(mesh, placements, shape) -> list[tuple[Axis, Layout]]:
    """(axis, layout) of the parts that a DTensor of a shape lies in, in the order in which they divide it."""
    sizes, steps = list(shape), []
    for i in dividing(placements):
        axis, dim = mesh_axis(mesh, i, outside=True), placements[i].dim
        steps.append((axis, S(dim, sizes[dim] if sizes[dim] % axis.size else None)))
        sizes[dim] = -(-sizes[dim] // axis.size)
    return steps


def dividing(placements) -> list[int]:
    """The dimensions of a mesh along which a DTensor lies in parts, in the order in which they divide it: that of the
    mesh, and those last that divide what ranks behind them have (`_StridedShard`)."""
    strided = [i for i, placement in enumerate(placements) if hasattr(placement, "split_factor")]
    return [i for i, placement in enumerate(placements) if placement.is_shard() and i not in strided] + strided[::-1]


codegen.OBJECT_NAMES |= {Layout: str, Axis: str}
