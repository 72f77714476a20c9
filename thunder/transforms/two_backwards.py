"""Two Backwards: a backward in two programs, for gradients of some inputs now and of the others later.

Pipeline schedules without bubbles ask for the gradients of a stage's inputs first, and for those of its parameters when
the stage would idle: `torch.autograd.grad` twice, with the same cotangents (P. Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"). The first program is what the wanted gradients depend on, and returns besides what the second reads of
it; the second computes nothing again.

Before: `t0 = mul(c0, w)`, `t1 = cos(h)`, `t2 = mul(t0, t1)`, `t3 = mul(t2, v)`, `t4 = mul(t2, x)`, `return (t3, t4)`.
After, where the second gradient is for later: `t0 = mul(c0, w)`, `t1 = cos(h)`, `t2 = mul(t0, t1)`, `t3 = mul(t2, v)`,
`return (t3, None, t2)`; and `t4 = mul(t2, x)`, `return (None, t4)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from thunder.core.proxies import TensorProxy
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import ForwardBackward
from thunder.ops.eager_calls import is_eager_backward
from thunder.ops.rules import effects
from thunder.transforms.partition import has_effect, unpack_sequence


def two_backwards(cut: ForwardBackward, later: Collection[int]) -> tuple[ForwardBackward, ForwardBackward, int] | None:
    """The cut with the backward of the gradients that are not at the places `later`, the cut with that of the others,
    and how many values the first returns behind the gradients, which the second takes behind the cotangents. None
    where the backward has effects, or runs code of an eager call, which may have some: each backward has them. What is
    added to gradients of parameters (`effects.leaves_gradient`) belongs to the second."""
    backward = cut.backward
    head = [b for b in backward.bound_symbols if b.sym.python_printer is not None]
    body = [b for b in backward.bound_symbols if b.sym.python_printer is None]
    if any(map(_may_have_effect, body)):
        return None
    now = tuple(None if i in later else g for i, g in enumerate(backward.output))
    then = tuple(g if i in later else None for i, g in enumerate(backward.output))
    first = leading_to(body, now)
    done = {id(b) for b in first}
    second = [b for b in leading_to(body, then, effects.leaves_gradient.holds) if id(b) not in done]
    computed = {o for b in first for o in b.outputs}
    read = [*(i for b in second for i in b.inputs), *(g for g in then if g is not None)]
    handed = list(dict.fromkeys(x for x in read if x in computed))
    if not all(type(x) is TensorProxy for x in handed):
        return None
    takes = []
    for b in head:
        if b.sym is unpack_sequence and b.args[1] is backward.args[1]:
            values = (*b.args[0], *handed)
            b = BoundSymbol(b.sym, (values, b.args[1]), {}, None, inputs=b.inputs, outputs=(*b.outputs, *handed))
        takes.append(b)
    return (
        dataclasses.replace(cut, backward=backward.replace(bound_symbols=[*head, *first], output=(*now, *handed))),
        dataclasses.replace(
            cut,
            backward=backward.replace(bound_symbols=[*takes, *second], output=then),
            cotangents=[*cut.cotangents, *handed],
        ),
        len(handed),
    )


def _may_have_effect(operation: BoundSymbol) -> bool:
    leaves = effects.leaves_gradient.holds(operation)  # of parameters, whose gradients are for later
    return has_effect(operation) and not leaves or is_eager_backward(operation.sym)
