"""What operations do beside computing their results: what dead code elimination, CUDA graphs and fusion respect."""

from __future__ import annotations

from thunder.core.rule_table import Property

checks_data = Property()
"""Raises for what it reads (an index out of range), which would end the process in a generated kernel."""

may_raise = Property()
"""Raises for some values of its operands (a singular matrix), beside what `checks_data` says. So it runs where eager
PyTorch runs it, even if nobody uses its results."""

synchronises = Property()
"""PyTorch's kernel waits for the device: it looks at data or copies it to or from the host."""

asks_autograd = Property()
"""Its effect depends on the inputs that autograd wants gradients of (`ops.wanted`)."""

holds_generator = Property()
"""Asks for the state of a generator, or sets it."""

leaves_gradient = Property()
"""Adds to the gradient of a parameter, which no program returns then."""

of_held = Property()
"""Does something to a tensor from outside, whatever its values are: of a parameter that ranks hold together, to what
this rank holds."""

changes_metadata = Property()
"""Changes an argument's shape or strides in place."""
