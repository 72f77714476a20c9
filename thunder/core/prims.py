"""`thunder.core.prims`: the primitives by name, a re-export of `thunder.ops` (the one place under core that reaches
outward, lazily)."""

from __future__ import annotations


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    from thunder.ops import PRIMS

    try:
        return PRIMS[name]
    except KeyError:
        raise AttributeError(f"thunder.core.prims has no primitive {name!r}") from None
