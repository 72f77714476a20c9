"""Primitives, by name: `prims.add`, as printed traces have it. See `thunder.ops.ltorch`."""

from __future__ import annotations

from thunder.ops.registry import PRIMS, attributes_of

__getattr__ = attributes_of(PRIMS, globals(), "primitive prims")
