"""Operations with PyTorch's semantics, by name: `ltorch.add`, as printed traces have it.

An operation is looked up when it is used, so that families use operations of families that are imported later. The stub
lists the operations, so that a type checker finds a wrong name; `python tests/stubs.py` writes it.
"""

from __future__ import annotations

from thunder.core.symbol import Symbol
from thunder.ops.registry import LTORCH


def __getattr__(name: str) -> Symbol:
    try:
        symbol = globals()[name] = LTORCH[name]
    except KeyError:
        raise AttributeError(f"there is no operation ltorch.{name}") from None
    return symbol
