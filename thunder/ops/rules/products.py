"""What the passes over matrix products ask: Align Products and Wide Products."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.rule_table import Property, RuleTable
from thunder.core.symbol import Symbol

aligned: RuleTable[Callable | None] = RuleTable(None)
"""(*args, **kwargs): a product that is fast for odd sizes and aligns the rows of its result
(`ops/families/aligned.py`)."""

takes_rows_apart = Property()
"""Reads rows that are apart as fast as others; a result that is no product may have its operand's memory."""

in_float32: RuleTable[Symbol | None] = RuleTable(None)
"""The product of half precision with its result in float32, in which it is added up."""
