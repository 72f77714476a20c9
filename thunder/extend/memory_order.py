"""The order of a program's operations and regions that needs less memory, and the bytes at each of their places.

Before: `t1 = mm(g, w)`, `t2 = mm(g.t(), x)`, where `x` has its last use. After: `t2 = mm(g.t(), x)`, `t1 = mm(g, w)`,
so that the memory of `x` is free when `t1` needs some. In the same way a cast of a parameter moves to its use.

Neighbours that do not depend on each other change places where that lowers what both need at most. None moves across an
effect or a random operation.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.regions import Region
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags

FAR = 64  # places that a unit moves at most
LITTLE = 1 << 20  # bytes; a peak of fewer is counted as of as many
LEAST = 256  # a change of places saves at least this share of the peak


class Piece(NamedTuple):
    """A region of the program; core: the region for a fuser; before, after: operations around it that make views."""

    region: Region
    core: Region
    before: tuple[BoundSymbol, ...]
    after: tuple[BoundSymbol, ...]


Unit = BoundSymbol | Piece | list[Piece]


class Needs:
    """The memory that the units of a program need. outside: values in memory before and after it."""

    def __init__(self, units: Sequence[Unit], output: Sequence[Proxy], outside: Container[Proxy]):
        self.outside = outside
        self.ends = {id(u): ends(u) for u in units}
        self.bases = alias_bases([b for u in units for b in _views(u)], maybe=True)
        self.returned = {self.bases[o] for o in output if isinstance(o, TensorProxy)}
        self.uses: dict[Proxy, set[int]] = {}  # by value, the units (by id) that read it or views of it
        self.produced: dict[int, list[TensorProxy]] = {}
        for unit in units:
            inputs, outputs = self.ends[id(unit)]
            for base in map(self.bases.__getitem__, inputs):
                self.uses.setdefault(base, set()).add(id(unit))
            self.produced[id(unit)] = [
                o for o in outputs if isinstance(o, TensorProxy) and o not in self.bases and o not in outside
            ]

    def occupied(self, units: Sequence[Unit]) -> list[int]:
        """The bytes in memory at each place. What a region or an elementwise operation makes may lie where a value was
        that dies with it."""
        positions = {id(u): i for i, u in enumerate(units)}
        amounts, now = [], 0
        for i, unit in enumerate(units):
            produced, dying = self.produced[id(unit)], [v for v in self.read(unit) if self.last(v, positions) == i]
            now += sum(map(nbytes, produced))
            sizes = collections.Counter((v.dtype, nbytes(v)) for v in dying)
            over = sizes & collections.Counter((v.dtype, nbytes(v)) for v in produced)
            amounts.append(now - (sum(n * k for (_, n), k in over.items()) if _overwrites(unit) else 0))
            unread = [v for v in produced if v not in self.uses and v not in self.returned]
            now -= sum(map(nbytes, (*dying, *unread)))
        return amounts

    def room(self, units: Sequence[Unit]) -> list[int]:
        """The bytes that are missing to the peak at each place."""
        occupied = self.occupied(units)
        peak = max(LITTLE, *occupied)
        return [peak - n for n in occupied]

    def read(self, unit: Unit) -> list[TensorProxy]:
        """The values that a unit reads, itself or through views, and that the program may free."""
        return [
            v
            for v in {self.bases[i] for i in self.ends[id(unit)][0]}
            if isinstance(v, TensorProxy) and v not in self.outside and v not in self.returned
        ]

    def last(self, value: Proxy, positions: Mapping[int, int]) -> int:
        return max(positions[u] for u in self.uses[value])

    def grows(self, unit: Unit, other: Unit, positions: Mapping[int, int]) -> tuple[int, int]:
        """The bytes that a unit makes, and those that it frees whichever of it and a neighbour is first."""
        end = max(positions[id(unit)], positions[id(other)])
        freed = [v for v in self.read(unit) if id(other) not in self.uses[v] and self.last(v, positions) <= end]
        return sum(map(nbytes, self.produced[id(unit)])), sum(map(nbytes, freed))

    def independent(self, first: Unit, second: Unit) -> bool:
        free = not (stays(first) or stays(second))
        return free and self.ends[id(first)][1].isdisjoint(self.ends[id(second)][0])


def in_memory_order(
    units: Sequence[BoundSymbol | Piece], output: Sequence[Proxy], outside: Container[Proxy]
) -> list[BoundSymbol | Piece]:
    """The units in an order in which they can run, and need less memory."""
    order = _Order(units, Needs(units, output, outside))
    for i in reversed(range(len(units))):  # what makes values moves to their uses
        order.move(i, 1)
    for i in range(len(units)):  # what frees values moves to the last of what it reads
        order.move(i, -1)
    return order.units


class _Order:
    """The units in the order that they have now."""

    def __init__(self, units: Sequence[BoundSymbol | Piece], needs: Needs):
        self.units, self.needs = list(units), needs
        self.positions = {id(u): i for i, u in enumerate(units)}
        self.least = max(LITTLE, *needs.occupied(units)) // LEAST

    def move(self, start: int, step: int) -> None:
        """Moves a unit by steps that do not need more memory, to behind the last one that needs less."""
        i = best = start
        while 0 <= i + step < len(self.units) and abs(i - start) < FAR:
            first = min(i, i + step)
            saved = self.saved(first)
            if saved is None or saved < 0:
                break
            self.swap(first)
            i += step
            best = i if saved > self.least else best
        while i != best:
            self.swap(min(i, i - step))
            i -= step

    def saved(self, i: int) -> int | None:
        """The bytes that two neighbours need less the other way round; None where one must come before the other."""
        first, second = self.units[i : i + 2]
        if not self.needs.independent(first, second):
            return None
        a, a_freed = self.needs.grows(first, second, self.positions)
        b, b_freed = self.needs.grows(second, first, self.positions)
        return max(a, a - a_freed + b) - max(b, b - b_freed + a)

    def swap(self, i: int) -> None:
        self.units[i : i + 2] = self.units[i : i + 2][::-1]
        self.positions |= {id(self.units[i]): i, id(self.units[i + 1]): i + 1}


def stays(unit: Unit) -> bool:
    """Whether the place of a unit matters: it has an effect, draws random numbers, or unpacks a collection."""
    if not isinstance(unit, BoundSymbol):
        return False
    return unit.sym.python_printer is not None or not unit.sym.tags.isdisjoint((*EFFECTS, OpTags.RANDOM_OP))


def _overwrites(unit: Unit) -> bool:
    """Whether results may be written over inputs (see `transforms.reuse_memory`)."""
    return not isinstance(unit, BoundSymbol) or unit.sym.elementwise and unit.sym.in_place is not None


def ends(unit: Unit) -> tuple[set[Proxy], set[Proxy]]:
    """The inputs and the outputs of an operation or of regions."""
    if isinstance(unit, BoundSymbol):
        return set(unit.inputs), set(unit.outputs)
    pieces = unit if isinstance(unit, list) else [unit]
    operations = [b for p in pieces for b in p.region.bound_symbols]
    inputs = {i for b in operations for i in b.inputs}.difference(*(b.outputs for b in operations))
    return inputs, {o for p in pieces for o in p.region.outputs}


def _views(unit: Unit) -> list[BoundSymbol]:
    if isinstance(unit, BoundSymbol):
        return [unit]
    return [b for p in (unit if isinstance(unit, list) else [unit]) for b in (*p.before, *p.after)]
