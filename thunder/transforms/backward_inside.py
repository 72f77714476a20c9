"""Backwards inside of a program: what `loss.backward()` in a compiled function has recorded.

The bound symbols of such a backward carry its number in their context, and stand together: what is before them is its
forward, what is behind them is what the program does with the gradients. So the plans for backwards of their own, of
what is recomputed and gathered again, hold for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from thunder.core.proxies import Proxy, TensorProxy, like
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.transforms.autodiff import get_grad_symbol, sides
from thunder.transforms.recompute import recompute

__all__ = ["backwards_inside", "marked", "recompute_inside"]


def marked(operations: Iterable[BoundSymbol], backward: int) -> list[BoundSymbol]:
    """The bound symbols, as those of this backward."""
    contexts: dict = {}
    made = []
    for operation in operations:
        if operation.context is not None and operation.context.backward != backward:
            if operation.context not in contexts:
                contexts[operation.context] = operation.context.replace(backward=backward)
            operation = operation.replace(context=contexts[operation.context])
        made.append(operation)
    return made


def backwards_inside(operations: Iterable[BoundSymbol]) -> list[int]:
    """The numbers of the backwards inside of a program, in order."""
    return sorted({operation.context.backward for operation in operations if operation.context is not None} - {0})


def recompute_inside(trace: Trace, chosen: Callable[[Trace], Iterable[Proxy]]) -> Trace:
    """A program whose backwards recompute what `chosen` says of each, given the joint trace of its forward and it.

    Before: `t0 = sin(x)`, `t1 = exp(t0)`; backward: `t2 = mul(g, t1)`, `t3 = cos(x)`, `t4 = mul(t2, t3)`.
    After, for t1: the same, with `bw_t1 = exp(t0)` right before the operation that reads `bw_t1`.
    """
    for number in backwards_inside(trace.bound_symbols):
        joint, rest = _joint(trace, number)
        if found := frozenset(chosen(joint)):
            forward, _, backward = sides(recompute(joint, found))
            trace = trace.replace(bound_symbols=[*forward, *marked(backward, number), *rest])
    return trace


def _joint(trace: Trace, number: int) -> tuple[Trace, Sequence[BoundSymbol]]:
    """One of the backwards with its forward, as a joint trace that keeps all of both, and what comes behind it."""
    operations = trace.bound_symbols
    places = [i for i, b in enumerate(operations) if b.context is not None and b.context.backward == number]
    forward, backward, rest = (
        operations[: places[0]],
        operations[places[0] : places[-1] + 1],
        operations[places[-1] + 1 :],
    )
    made = [tuple(o for operation in part for o in operation.outputs) for part in (forward, backward)]
    value = next(o for o in (*made[0], *trace.args) if isinstance(o, TensorProxy))
    border = get_grad_symbol.bind(value, output=like(value))
    border.outputs[0].name = trace.names.make()
    output = {"output": made[1], "flat_args": trace.args, "fw_flat_out": made[0]}
    return trace.replace(bound_symbols=[*forward, border, *backward], output=output), rest
