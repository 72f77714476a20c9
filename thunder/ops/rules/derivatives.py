"""What differentiation asks of operations, beside their derivative rules (`Symbol.vjp`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from thunder.core.rule_table import Property, RuleTable

composed: RuleTable[bool | Callable[..., bool]] = RuleTable(False)
"""PyTorch composes the operation of the operations of its decomposition, so that these are differentiated; or a
function of the arguments."""

of_complex: RuleTable[Literal["holomorphic", "as written", "PyTorch's"]] = RuleTable("holomorphic")
"""What the derivative rule is for complex operands: that of a holomorphic function, so that what multiplies a cotangent
is conjugated; right as it is written; or not right, so that PyTorch's derivative is taken."""

conjugates = Property()
"""A kernel of derivatives that conjugates the complex numbers which it multiplies cotangents by."""

functional: RuleTable[Callable | None] = RuleTable(None)
"""The derivative rule where a second derivative may follow."""

formula: RuleTable[Callable | None] = RuleTable(None)
"""What a kernel computes, in operations: where the kernel is differentiated, these are."""

once_differentiable: RuleTable[str | None] = RuleTable(None)
"""Why the operation has no second derivative, for the error."""

inexact = Property()
"""The derivative rule rounds otherwise than PyTorch's derivative."""

reaches_all = Property()
"""PyTorch has a derivative for each floating operand, so that no examples are differentiated to see which."""

accepts_missing_cotangents = Property()
"""A backward that takes None in the place of a cotangent."""

statistics: RuleTable[tuple[int, ...]] = RuleTable(())
"""Positions of the arguments that gradients do not depend on, as a backward kernel's running statistics."""

regathers: RuleTable[Callable[[Any], bool] | None] = RuleTable(None)
"""(bound symbol): whether backwards compute its result again, whatever that costs, as they gather parameters."""
