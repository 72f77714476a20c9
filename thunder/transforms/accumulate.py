"""Accumulate: a backward that adds gradients to those that parameters have, each as soon as it is computed.

Where gradients of several backwards are accumulated, one that returns them has all of them in memory beside those that
were there. Before: `t1 = mul(c0, x)`, `t2 = mul(c0, w)`, `return (t1, t2)`. After, where the first gradient has a place
to go: `t1 = mul(c0, x)`, `add_to_gradient(held0, t1)`, `t2 = mul(c0, w)`, `return (None, t2)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags, primitive
from thunder.core.trace import ForwardBackward
from thunder.ops.rules import effects
from thunder.transforms.partition import unpack_sequence


@primitive(lambda held, gradient: None, tags=(OpTags.DONT_DCE,), module="ltorch")
def add_to_gradient(held, gradient) -> None:
    """The sum of two gradients of a parameter, in the memory of the one that it has: as autograd accumulates them."""
    held.add_(gradient)


effects.leaves_gradient.add(add_to_gradient)


def accumulating(cut: ForwardBackward, into: Collection[int]) -> tuple[ForwardBackward, list[int]]:
    """The cut with a backward that adds the gradients at the places `into` to tensors, which it takes behind the
    cotangents, and returns None for them; and the places where it does. Others are no results of operations."""
    backward, claim = cut.backward, cut.backward.names.make
    computed = {o for b in backward.bound_symbols if b.sym.python_printer is None for o in b.outputs}
    gradients = list(backward.output)
    places = [i for i in into if type(gradients[i]) is TensorProxy and gradients[i] in computed]
    held = {i: gradients[i].replace(name=claim("held"), requires_grad=False) for i in places}
    waiting: dict[Proxy, list[int]] = {}
    for i in places:
        waiting.setdefault(gradients[i], []).append(i)
        gradients[i] = None
    operations: list[BoundSymbol] = []
    for b in backward.bound_symbols:
        if b.sym is unpack_sequence and b.args[1] is backward.args[1]:
            values = (*b.args[0], *held.values())
            outputs = (*b.outputs, *held.values())
            b = BoundSymbol(b.sym, (values, b.args[1]), {}, None, inputs=b.inputs, outputs=outputs)
        operations.append(b)
        for o in b.outputs:
            operations += [add_to_gradient.bind(held[i], o, output=None, context=b.context) for i in waiting.pop(o, ())]
    backward = backward.replace(bound_symbols=operations, output=tuple(gradients))
    return dataclasses.replace(cut, backward=backward, cotangents=[*cut.cotangents, *held.values()]), places
