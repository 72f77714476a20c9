"""`thunder.examine`: the operations, fusions and saved values of a program."""

from __future__ import annotations

from thunder.inspect.examine import (
    SavedValue,
    SavedValues,
    examine,
    get_fusion_symbols,
    get_fusions,
    operations_in,
    saved_for_backward,
    torch_calls,
)

__all__ = [
    "SavedValue", "SavedValues", "examine", "get_fusion_symbols", "get_fusions", "operations_in", "saved_for_backward",
    "torch_calls",
]  # fmt: skip
