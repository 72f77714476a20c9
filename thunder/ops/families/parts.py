"""Gradients of views: what several views of one value get is added up in one buffer.

The gradient of a view of a value is zeros of the value's size with the view's gradient written into them. Added up, T
views would read and write T such tensors; `add_part(a, part, *steps)` adds a view's gradient where it belongs. A step
names an operation that writes its operand into zeros, or rearranges it, with its arguments; the last one is nearest to
the part.

Before: `t2 = select_backward(t1, (8, 4), 0, 3)`, `t3 = add(t0, t2)`. After: `t3 = add_part(t0, t1, ("select", (8, 4),
0, 3))`, where t2 is dead code, and, where t0 is dead afterwards, `t3 = add_part_(t0, t1, ...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thunder.core.definition import InPlaceForm
from thunder.core.proxies import Proxy, TensorProxy, like
from thunder.core.symbol import BoundSymbol, Symbol, carries_out
from thunder.ops import ltorch
from thunder.ops.backward import (
    diagonal_backward,
    getitem_backward,
    index_backward,
    select_backward,
    slice_backward,
)
from thunder.ops.families.scatter import gather_backward, index_select_backward
from thunder.ops.registry import LTORCH
from thunder.ops.rules import kernels, memory
from thunder.ops.shape_rules import along

# (tensor or proxy, *arguments of the operation): the view that shows what was put there
_VIEWS = {
    "select": lambda a, sizes, dim, index: a.select(dim, index),
    "slice": lambda a, sizes, dim, start, end, step: a[along(a, dim, slice(start, end, step))],
    "diagonal": lambda a, sizes, offset, dim1, dim2: a.diagonal(offset, dim1, dim2),
    "t": lambda a: a.t(),
    "transpose": lambda a, dim0, dim1: a.transpose(dim0, dim1),
    "permute": lambda a, dims: a.permute(
        tuple(sorted(range(len(dims)), key=[d % len(dims) for d in dims].__getitem__))
    ),
    "reshape": lambda a, operand, result: a.reshape(operand),
}
_INTO_ZEROS = {"select": select_backward, "slice": slice_backward, "diagonal": diagonal_backward}
_REARRANGED = {name: LTORCH[name] for name in ("t", "transpose", "permute")}
_NAMES = {symbol: name for name, symbol in (_INTO_ZEROS | _REARRANGED).items()}


def part_of_zeros(value: Proxy, producer: Mapping[Proxy, BoundSymbol]) -> tuple[Proxy, tuple[tuple, ...]] | None:
    """The part that is all of a value beside zeros, and the steps that put it there; None for any other value."""
    part, steps = None, []
    while (b := producer.get(value)) is not None and (step := _step(b)) is not None:
        steps.append(step)
        value = b.args[0]
        if step[0] in _INTO_ZEROS:
            part = value, tuple(steps)
    return part


def _step(b: BoundSymbol) -> tuple | None:
    name = _NAMES.get(b.sym)
    if name is not None:
        return (name, *b.args[1:]) if not b.kwargs else None
    operand = b.args[0] if b.args else None
    if b.sym.reshapes and isinstance(operand, TensorProxy) and operand.dtype is b.output.dtype:
        return "reshape", operand.shape, b.output.shape
    return None


def rearranges(b: BoundSymbol) -> bool:
    """Whether an operation, as executed, gives its operand with the dimensions in another order."""
    return bool(b.subsymbols) and b.subsymbols[0].sym in _REARRANGED.values()


def _view(a: Any, steps: tuple) -> Any:
    for name, *args in steps:
        a = _VIEWS[name](a, *args)
    return a


def _add_part(a: torch.Tensor, part: torch.Tensor, *steps: tuple) -> torch.Tensor:
    return a + _put(part, steps)


@carries_out
def _add_part_(a: torch.Tensor, part: torch.Tensor, *steps: tuple) -> torch.Tensor:
    view = _view(a, steps)
    if (
        any(name == "reshape" for name, *_ in steps)
        and view.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
    ):
        return a.add_(_put(part, steps))  # no view of what lies in memory like this
    view.add_(part)
    return a


_add_part.__name__, _add_part_.__name__ = "add_part", "add_part_"


def _put(part: Any, steps: tuple) -> Any:
    """The part in zeros."""
    for name, *args in reversed(steps):
        if name == "reshape":
            part = part.reshape(args[1])
        elif name in _INTO_ZEROS:
            part = (
                _INTO_ZEROS[name](part, *args) if isinstance(part, TensorProxy) else _INTO_ZEROS[name].fn(part, *args)
            )
        else:
            part = getattr(part, name)(*args)
    return part


add_part = Symbol("add_part", lambda a, part, *steps: like(a), id="add_part", is_prim=True, fn=_add_part)
add_part.in_place = InPlaceForm(_add_part_, {0: 0})
memory.accumulates.add(add_part, ltorch.add)


@add_part.decomposed_by
def _(a, part, *steps):
    return ltorch.add(a, _put(part, steps))


@add_part.vjp
def _(a, part, *steps):
    g = yield add_part(a, part, *steps)
    return g, _view(g, steps)


kernels.layout.set("as decomposition", add_part)
memory.owns_result.add(
    add_part, ltorch.add, select_backward, slice_backward, diagonal_backward, index_backward, getitem_backward,
    index_select_backward, gather_backward, ltorch.zeros, ltorch.zeros_like, ltorch.sum,
)  # fmt: skip
