"""Phases: the part of a training step that a bound symbol belongs to.

A program may have several backwards: those of `loss.backward()` inside of it, and one that autograd asks for, which is
cut off and runs later. The bound symbols of a backward carry its number in their contexts, counted from 1, and follow
each other. The bound symbols before them are its forward, those behind them its update. So planners handle all
backwards in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from thunder.core.proxies import Proxy, like, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace, TraceTag

get_grad_symbol = Symbol("get_grad", lambda value: like(value), module="prims", is_prim=True, tags=(OpTags.DONT_DCE,))


class Phases(NamedTuple):
    """The bound symbols of a program, as one of its backwards divides them.

    starts: `get_grad` for each cotangent that comes from outside. update: the bound symbols behind the backward.
    returned: in a joint trace, the values that the backward returns.
    """

    forward: list[BoundSymbol]
    starts: list[BoundSymbol]
    backward: list[BoundSymbol]
    update: list[BoundSymbol]
    returned: list[Proxy]


def phase_of(operation: BoundSymbol) -> int:
    """The number of the backward that a bound symbol belongs to; 0 for forwards and updates."""
    return operation.context.backward if operation.context is not None else 0


def phases(trace: Trace, number: int | None = None) -> Phases:
    """The phases of a backward; by default of the last one, which in a joint trace is the one that is cut off."""
    operations, last = trace.bound_symbols, trace.info.backwards
    number = last if number is None else number
    places = [i for i, b in enumerate(operations) if phase_of(b) == number]
    if not number or not places:
        return Phases(list(operations), [], [], [], [])
    is_cut_off = TraceTag.JOINT in trace.tags and number == last
    begin, end = places[0], len(operations) if is_cut_off else places[-1] + 1
    inside = operations[begin:end]
    return Phases(
        list(operations[:begin]),
        [b for b in inside if b.sym is get_grad_symbol],
        [b for b in inside if b.sym is not get_grad_symbol],
        list(operations[end:]),
        proxies_in(trace.output["output"], []) if is_cut_off else [],
    )


def marked(operations: Iterable[BoundSymbol], backward: int) -> list[BoundSymbol]:
    """The bound symbols with the number of a backward in their contexts."""
    contexts: dict = {}
    marked_operations = []
    for operation in operations:
        if operation.context is not None and phase_of(operation) != backward:
            if operation.context not in contexts:
                contexts[operation.context] = operation.context.replace(backward=backward)
            operation = operation.replace(context=contexts[operation.context])
        marked_operations.append(operation)
    return marked_operations
