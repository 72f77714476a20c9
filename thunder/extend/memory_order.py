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

SWEEPS = 4  # over the program, in turns from its end and from its begin
LEAST = 256  # a change of places saves at least this share of the peak
LITTLE = 1 << 20  # bytes of a peak that may be reached in any case


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
        self.readers: dict[Proxy, set[int]] = {}  # by value, the units (by id) that read it or views of it
        self.made: dict[int, list[TensorProxy]] = {}
        for unit in units:
            inputs, outputs = self.ends[id(unit)]
            for base in map(self.bases.__getitem__, inputs):
                self.readers.setdefault(base, set()).add(id(unit))
            self.made[id(unit)] = [
                o for o in outputs if isinstance(o, TensorProxy) and o not in self.bases and o not in outside
            ]

    def occupied(self, units: Sequence[Unit]) -> list[int]:
        """The bytes in memory at each place. What a region or an elementwise operation makes may lie where a value was
        that dies with it."""
        place = {id(u): i for i, u in enumerate(units)}
        found, now = [], 0
        for i, unit in enumerate(units):
            made, dying = self.made[id(unit)], [v for v in self.read(unit) if self.last(v, place) == i]
            now += sum(map(nbytes, made))
            sizes = collections.Counter((v.dtype, nbytes(v)) for v in dying)
            over = sizes & collections.Counter((v.dtype, nbytes(v)) for v in made)
            found.append(now - (sum(n * k for (_, n), k in over.items()) if _overwrites(unit) else 0))
            unread = [v for v in made if v not in self.readers and v not in self.returned]
            now -= sum(map(nbytes, (*dying, *unread)))
        return found

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

    def last(self, value: Proxy, place: Mapping[int, int]) -> int:
        return max(place[u] for u in self.readers[value])

    def grows(self, unit: Unit, other: Unit, place: Mapping[int, int]) -> tuple[int, int]:
        """The bytes that a unit makes, and those that it frees whichever of it and a neighbour is first."""
        end = max(place[id(unit)], place[id(other)])
        freed = [v for v in self.read(unit) if id(other) not in self.readers[v] and self.last(v, place) <= end]
        return sum(map(nbytes, self.made[id(unit)])), sum(map(nbytes, freed))

    def independent(self, first: Unit, second: Unit) -> bool:
        free = not (stays(first) or stays(second))
        return free and self.ends[id(first)][1].isdisjoint(self.ends[id(second)][0])


def in_memory_order(
    units: Sequence[BoundSymbol | Piece], output: Sequence[Proxy], outside: Container[Proxy]
) -> list[BoundSymbol | Piece]:
    """The units in an order in which they can run, and need less memory."""
    found, needs = list(units), Needs(units, output, outside)
    least = max(needs.occupied(units), default=0) // LEAST
    place = {id(u): i for i, u in enumerate(found)}
    for sweep in range(SWEEPS):
        places = range(len(found) - 1)
        for i in reversed(places) if sweep % 2 == 0 else places:
            first, second = found[i], found[i + 1]
            if not needs.independent(first, second):
                continue
            (a, a_freed), (b, b_freed) = needs.grows(first, second, place), needs.grows(second, first, place)
            if max(a, a - a_freed + b) - max(b, b - b_freed + a) > least:
                found[i], found[i + 1] = second, first
                place[id(second)], place[id(first)] = i, i + 1
    return found


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
