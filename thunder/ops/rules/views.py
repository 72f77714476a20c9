"""What functionalization asks of views and of operations in place."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.rule_table import Property, RuleTable

inverse: RuleTable[Callable | None] = RuleTable(None)
"""(bound symbol, view, whole, part): `whole` with `part` in the place of the view; None where it is not known whether
the operation made a view."""

several = Property()
"""Gives several views, none of which PyTorch's autograd lets a program write to."""

undo: RuleTable[Callable | None] = RuleTable(None)
"""(tensor, *args): the operation, and its arguments, that undoes the in-place form, which changes what a tensor is and
not what it holds; None where nothing does."""

check_in_place: RuleTable[Callable | None] = RuleTable(None)
"""(*args, **kwargs): raises PyTorch's error for what the in-place form refuses and the operation does not."""
