"""Lifetimes: the last uses of values, and how many bytes are in memory at each place of a program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from thunder.analysis.cost import nbytes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol


def first_uses(bound_symbols: Sequence[BoundSymbol]) -> dict[Proxy, int]:
    """By value, the place of the first bound symbol that uses it."""
    return {v: i for i, b in reversed([*enumerate(bound_symbols)]) for v in b.inputs}


def last_uses(
    bound_symbols: Sequence[BoundSymbol],
    outputs: Iterable[Proxy] = (),
    base: Callable[[Proxy], Proxy] = lambda value: value,
    counts: Callable[[BoundSymbol], bool] = lambda b: True,
) -> dict[Proxy, int]:
    """By value, the place of the last bound symbol that uses it; the end of the program for its outputs. base: the
    value that a use counts for. counts: bound symbols that are uses: `del` is none."""
    last: dict[Proxy, int] = {}
    for i, b in enumerate(bound_symbols):
        if counts(b):
            last |= dict.fromkeys(map(base, b.inputs), i)
    return last | dict.fromkeys(map(base, outputs), len(bound_symbols))


class Occupancy:
    """Bytes in memory at each of `places`."""

    def __init__(self, places: int, changes: Sequence[int] | None = None):
        self.places = places
        self._changes = list(changes) if changes is not None else [0] * (places + 1)

    def hold(self, value: TensorProxy, begin: int, end: int) -> None:
        """A value is in memory from `begin` to `end`, both with it; nowhere, where that is no span."""
        if begin <= end:
            self._changes[begin] += nbytes(value)
            self._changes[end + 1] -= nbytes(value)

    def copied(self) -> Occupancy:
        return Occupancy(self.places, self._changes)

    def filled(self) -> list[int]:
        """The bytes, place by place."""
        return list(itertools.accumulate(self._changes))

    @property
    def peak(self) -> int:
        return max(self.filled())
