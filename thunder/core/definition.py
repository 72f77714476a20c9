"""Definition: the facts about an operation that most passes ask for, as typed fields.

What one pass asks is a row in its table (`core/rule_table.py`). The family of an operation sets both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from typing import Any, NamedTuple


class Unfit(RuntimeError):
    """An operation refuses its arguments. `infer.as_pytorch` finds PyTorch's words for it."""


class InPlaceForm(NamedTuple):
    """function: takes the operation's arguments, and overwrites some of them. overwrites: {place of a result: place of
    the argument that it overwrites}, or a function from the bound symbol to {place of a result: tensor}."""

    function: Callable
    overwrites: dict[int, int] | Callable[[Any], dict[int, Any]]


@dataclasses.dataclass(eq=False, slots=True)
class Definition:
    """What is known of an operation beyond its type rule, its decomposition and its derivative. Each field is false, or
    says nothing, until the operation's family sets it."""

    rules: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """The operation's rows in rule tables, by table."""

    elementwise: bool = False
    """Computes each element of its results from those in the same place of its operands, after broadcasting."""
    reshapes: bool = False
    """Gives all elements of its operand, in their order, another shape."""
    typed_by_running: bool = False
    """Its meta rule runs PyTorch, so that it knows which results require grad as well."""
    bind_postprocess: Callable | None = None
    """Called with each bound symbol that is recorded; what it returns takes its place."""
    condition: Callable[[Any, Any], str] | None = None
    """(bound symbol, printer): printed before a call, so that it is not made where it would do nothing: `n > 0 or`."""
    declared_outside: bool = False
    """Somebody who extends thunder declared it, so that its results are compared with the declaration."""

    nondifferentiable: Container[int] = ()
    """Places of the results that never require grad."""
    detaches: Callable[..., bool] | None = None
    """(*args, **kwargs): whether the results do not require grad, whatever the arguments do."""
    own_derivative: bool = False
    """A `torch.autograd.Function`: its derivative need not be that of its decomposition."""

    in_place: InPlaceForm | None = None
    """How it runs in place where PyTorch's form with a trailing underscore does not follow from its name."""

    def take_facts(self, other: Definition) -> None:
        """Makes all facts of another operation those of this one, which executes it."""
        for field in _FIELDS:
            setattr(self, field, getattr(other, field))
        self.rules = dict(other.rules)


_FIELDS = tuple(field.name for field in dataclasses.fields(Definition))
