"""What rewriting asks of operations."""

from __future__ import annotations

from thunder.core.rule_table import Property

commutes = Property()
"""Computes the same with its first two operands exchanged."""
