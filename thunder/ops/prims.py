"""Primitives, by name: `prims.add`, as printed traces have it. See `thunder.ops.ltorch`."""

from __future__ import annotations

from thunder.core.symbol import Symbol
from thunder.ops.registry import PRIMS


def __getattr__(name: str) -> Symbol:
    try:
        symbol = globals()[name] = PRIMS[name]
    except KeyError:
        raise AttributeError(f"there is no primitive prims.{name}") from None
    return symbol
