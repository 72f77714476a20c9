"""Operations with PyTorch's semantics, by name: `ltorch.add`, as printed traces have it.

An operation is looked up when it is used, so that families use operations of families that are imported later. The stub
lists the operations, so that a type checker finds a wrong name; `python tests/stubs.py` writes it.
"""

from __future__ import annotations

from thunder.ops.registry import LTORCH, attributes_of

__getattr__ = attributes_of(LTORCH, globals(), "operation ltorch")
