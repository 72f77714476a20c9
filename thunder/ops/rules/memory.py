"""What the pass that reuses memory asks of operations."""

from __future__ import annotations

from thunder.core.rule_table import Property

owns_result = Property()
"""PyTorch's kernel writes its result to memory that nobody else has."""

accumulates = Property()
"""Adds to its first operand: in place where that dies, as PyTorch's autograd does."""
