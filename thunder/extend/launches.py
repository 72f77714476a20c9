"""Shared launches: independent small regions become one launch.

Before: `t2 = f(p0, g0)`, `v1 = Tensor.item(n)`, `t3 = f(p1, g1, v1)`. After: `v1 = Tensor.item(n)`, and one region with
two parts, `[t2, t3] = f_and_f(p0, g0, p1, g1, v1)`.

A kernel of few elements takes a device less time than its launch. Two linear passes over a program join regions: the
first delays a region until its results have a use (updates of parameters), the second moves regions forward to the last
definition of their operands (casts of weights). None moves across an effect. Both extend lifetimes, of operands or
results, up to the peak of the program's memory without them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from thunder.analysis.cost import nbytes, tensors_in
from thunder.core.proxies import Proxy, TensorProxy, numbers_in
from thunder.core.regions import Region
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags
from thunder.extend.memory_order import Needs, Piece, ends

ARGUMENTS = 400  # of a launch: CUDA gives those of a kernel 4 KiB
DIFFERENT = 128  # operations of regions that are not alike: a longer kernel takes too long to compile


def share_launches(
    items: Sequence[BoundSymbol | Piece],
    shares: Callable[[Region], bool],
    output: Sequence[Proxy],
    outside: Container[Proxy],
) -> list[BoundSymbol | list[Piece]]:
    """The operations and regions of a program in an order in which they can run, those in one list that are launched
    together. shares: whether a region may be."""
    open_to = {id(x.core) for x in items if isinstance(x, Piece) and shares(x.core)}
    if len(open_to) < 2:
        return [[x] if isinstance(x, Piece) else x for x in items]
    return _shared(items, open_to, output, outside)


def _shared(
    items: Sequence[BoundSymbol | Piece], open_to: set[int], output: Sequence[Proxy], outside: Container[Proxy]
) -> list[BoundSymbol | list[Piece]]:
    """The regions that may be are put into lists."""
    chosen: Sequence[BoundSymbol | list[Piece]] = [[x] if isinstance(x, Piece) else x for x in items]
    last: dict[Proxy, int] = {}
    for position, x in enumerate(items):
        last |= dict.fromkeys(x.region.inputs if isinstance(x, Piece) else x.inputs, position)
    produced = {o for x in items for o in (x.region.outputs if isinstance(x, Piece) else x.outputs)}.difference(output)
    dying = {
        id(x.core): sum(nbytes(t) for t in tensors_in(x.region.inputs) if last[t] == position and t in produced)
        for position, x in enumerate(items)
        if isinstance(x, Piece)
    }
    for waits in (True, False):
        room = Needs(chosen, output, outside).room(chosen)
        chosen = _gathered(*((chosen, room) if waits else (chosen[::-1], room[::-1])), open_to, dying, waits)
    return list(chosen[::-1])


class _Unit(NamedTuple):
    """Regions that wait for others, or others for them. names: values that nothing in between may read, or make.
    live_bytes: bytes. kinds: how many operations there are of each kind of region."""

    pieces: list[Piece]
    names: set[Proxy]
    live_bytes: int
    arguments: int
    kinds: dict[tuple, int]


def _fit(units: Sequence[_Unit]) -> bool:
    """Whether regions may share a launch."""
    kinds = {kind: count for u in units for kind, count in u.kinds.items()}
    return (
        len({kind[0] for kind in kinds}) == 1
        and sum(u.arguments for u in units) <= ARGUMENTS
        and sum(kinds.values()) <= DIFFERENT
    )


def _gathered(
    units: Sequence[BoundSymbol | list[Piece]], room: Sequence[int], open_to: set[int], dying: dict[int, int],
    waits: bool,
) -> list[BoundSymbol | list[Piece]]:  # fmt: skip
    """Joins regions to the next one, in the order of `units`: of a program, or, where `waits` is False, of one that is
    read backwards. room: the bytes that are free at each place."""
    groups: list[BoundSymbol | list[Piece]] = []
    waiting: list[_Unit] = []

    def launch(chosen: Sequence[_Unit]) -> None:
        if chosen:
            groups.append([p for u in (chosen if waits else chosen[::-1]) for p in u.pieces])

    for unit, free in zip(units, room, strict=True):
        pieces = unit if isinstance(unit, list) else []
        inputs, outputs = ends(unit)
        known = inputs if waits else outputs
        blocked = _is_barrier(unit) or not all(u.names.isdisjoint(known) for u in waiting)
        if blocked or sum(u.live_bytes for u in waiting) > free:
            launch(waiting)
            waiting = []
        if not pieces or not all(id(p.core) in open_to for p in pieces):
            groups.append(unit)
            continue
        # what is read stays, but for what is made in its place, or the other way round
        stays, comes = sum(dying[id(p.core)] for p in pieces), sum(map(nbytes, tensors_in(outputs)))
        live_bytes = max(0, stays - comes if waits else comes - stays)
        names, arguments = outputs if waits else inputs, sum(map(_arguments, pieces))
        new = _Unit(pieces, names, live_bytes, arguments, dict(map(_kind, pieces)))
        if waiting and not _fit([*waiting, new]):
            launch(waiting)
            waiting = []
        waiting.append(new)
    launch(waiting)
    return groups


def _is_barrier(unit: BoundSymbol | list[Piece]) -> bool:
    return (
        not isinstance(unit, list) and not unit.sym.tags.isdisjoint(EFFECTS) and OpTags.RANDOM_OP not in unit.sym.tags
    )


def _kind(piece: Piece) -> tuple[tuple, int]:
    """The device and the operations of a region, and their number."""
    operations = piece.core.bound_symbols
    return (_device(piece.core), *(b.sym.id for b in operations)), len(operations)


def _device(region: Region):
    return next(o.device for o in region.outputs if isinstance(o, TensorProxy))


def _arguments(piece: Piece) -> int:
    """A bound on the number of arguments of a region's kernel."""
    operations = piece.core.bound_symbols
    numbers = numbers_in([(b.args, b.kwargs) for b in operations], [])
    return len(piece.core.inputs) + len(piece.core.outputs) + len({n.expression for n in numbers})
