"""Join Casts: what autocast casts takes few launches.

Before: `t0 = Tensor.to(w, dtype=torch.bfloat16)`, `t1 = torch.nn.functional.linear(x, t0)`, `t2 = Tensor.to(v,
dtype=torch.bfloat16)`, `t3 = torch.nn.functional.linear(t1, t2)`, and in the backward `t4 = torch.mm(t5, x)`, `t6 =
Tensor.to(t4, dtype=torch.float32)`. After: `[t0, t2] = cast_together([w, v], torch.bfloat16)`, and `t6 =
mm_in_float32(t5, x)`.

A layer casts each of its weights, by a kernel that takes the device less time than the host takes to launch it. Those
that stand near each other are cast by one. Near, since what is cast early fills the memory. A gradient that a product
computes of half precision, and that is read in float32 alone, is written so by the product, which has added it up in
float32: a pass less, and a rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from thunder import compat
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import original_of
from thunder.analysis.flow import producers, uses
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import Proxy, TensorProxy, numbers_in
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.ops import LTORCH
from thunder.ops.torch_types import to_torch_dtype

__all__ = ["has_casts", "join_casts"]

DEVICES = ("cuda",)  # where a launch costs more than what it does
NEAR = 8  # operations that compute, from the first to the last of the casts that join
_, _copy_all = compat.foreach("copy")
MOST = 32  # casts that join


def has_casts(trace: Trace) -> bool:
    """Whether PyTorch casts something on a device that is launched on."""
    return any(map(_is_cast, trace.bound_symbols))


def join_casts(trace: Trace, exact: bool = False) -> Trace:
    """The trace with casts that stand near each other in one operation, and with products that write what is cast of
    them. exact: products round as PyTorch's do."""
    made = trace if exact else trace.replace(bound_symbols=_with_wide_products(trace))
    return made.replace(bound_symbols=_with_joined_casts(made.bound_symbols))


def _is_cast(operation: BoundSymbol) -> bool:
    """Whether PyTorch converts the type of one tensor, and does nothing else."""
    if original_of(operation).sym is not LTORCH["to"] or operation.sym.is_fusion:
        return False
    x, out = operation.args[0], operation.output
    return (
        isinstance(x, TensorProxy)
        and isinstance(out, TensorProxy)
        and operation.kwargs.keys() <= {"dtype", "device"}
        and x.device is out.device
        and x.device.type in DEVICES
        and x.dtype is not out.dtype
        and not any(n.unbacked for n in numbers_in(x, []))
    )


def _with_wide_products(trace: Trace) -> list[BoundSymbol]:
    read = uses(trace.bound_symbols, trace.output_proxies)
    producer = producers(trace)
    wide: dict[BoundSymbol, BoundSymbol] = {}  # by the product, the cast
    for operation in filter(_is_cast, trace.bound_symbols):
        x = operation.args[0]
        product = producer.get(x)
        if (
            product is not None
            and product.sym.in_float32 is not None
            and original_of(product) is not product
            and operation.output.dtype is float32
            and x.dtype in (bfloat16, float16)
            and read[x] == 1
        ):
            wide[product] = operation
    dropped = set(wide.values())
    made = []
    for b in trace.bound_symbols:
        if b in wide:
            made.append(b.replace(sym=_in_float32(b.sym), output=wide[b].output))
        elif b not in dropped:
            made.append(b)
    return made


@functools.cache
def _in_float32(symbol: Symbol) -> Symbol:
    name = f"{symbol.name}_in_float32"
    return symbol.executed(name, symbol.in_float32, symbol.executor, id=f"float32.{symbol.id}")  # type: ignore[arg-type]


def _with_joined_casts(operations: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    groups: list[list[int]] = []  # places of casts that join
    open_groups: dict[tuple, tuple[list[int], int]] = {}  # by what they have in common, and how much stood before
    produced: dict[Proxy, int] = {}
    computing = 0
    for i, b in enumerate(operations):
        if not b.sym.tags.isdisjoint(EFFECTS) and OpTags.RANDOM_OP not in b.sym.tags:
            open_groups.clear()
        if _is_cast(b):
            x = b.args[0]
            key = x.dtype, b.output.dtype, x.device, b.context.backward if b.context is not None else 0
            group, before = open_groups.get(key, ([], computing))
            fits = group and computing - before <= NEAR and len(group) < MOST and produced.get(x, -1) < group[0]
            if not fits:
                group, before = [], computing
                groups.append(group)
            group.append(i)
            open_groups[key] = group, before
        elif not may_view(b):
            computing += 1
        produced |= dict.fromkeys(b.outputs, i)
    first = {g[0]: g for g in groups if len(g) > 1}
    moved = {i for g in first.values() for i in g}
    made: list[BoundSymbol] = []
    for i, b in enumerate(operations):
        if i in first:
            made.append(_together([operations[n] for n in first[i]]))
        elif i not in moved:
            made.append(b)
    return made


def _together(casts: Sequence[BoundSymbol]) -> BoundSymbol:
    first = casts[0]
    return _cast_together(first.sym.executor).bind(
        [b.args[0] for b in casts], to_torch_dtype(first.output.dtype),
        output=[b.output for b in casts], subsymbols=tuple(casts), context=first.context,
    )  # fmt: skip


@functools.cache
def _cast_together(executor) -> Symbol:
    return Symbol("cast_together", id="cast_together", is_prim=True, fn=_run, executor=executor)


def _run(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    made = [torch.empty_like(x, dtype=dtype) for x in tensors]
    _copy_all(made, tensors)
    return made
