"""What fusion executors ask of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from thunder.core.rule_table import Property, RuleTable

layout: RuleTable[
    Literal[
        "as operands", "second operand first", "row-major", "preserved", "memory format", "memory format of the second",
        "own", "as decomposition", "by argument",
    ]
] = RuleTable("as operands")  # fmt: skip
"""How PyTorch lays out the result: as TensorIterator does, likewise with the operands in another order, row-major, as
`empty_like` does, in the memory format of the operands or of the second one, otherwise, as the decomposition says, or
as `memory_format` says, and without it as `empty_like` does."""

convolution: RuleTable[Callable | None] = RuleTable(None)
"""(operation): the image and the weight of a convolution, whose memory formats decide about that of its result; this
result, or its cotangent, and the number of groups. None where it is none in two or three dimensions."""

no_loop_of_inductor = Property()
"""Inductor does not compute it in a loop with PyTorch's results."""

converts_numbers: RuleTable[tuple[int, ...]] = RuleTable(())
"""Positions of operands: of numbers there its kernel on the CPU makes tensors of its type in each call."""

from_uniform: RuleTable[Callable | None] = RuleTable(None)
"""(draw, *args, **kwargs): a random operation as a function of numbers from [0, 1), which `draw(shape, device)` gives
as float32; NotImplemented for arguments it does not know. The numbers are others than PyTorch's."""
