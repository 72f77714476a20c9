"""Wide Products: products of half precision write float32 where a cast to float32 follows.

Before: in the backward under autocast `t4 = torch.mm(t5, x)`, `t6 = Tensor.to(t4, dtype=torch.float32)`. After: `t6 =
mm_in_float32(t5, x)`.

A product of half precision accumulates in float32. If a cast to float32 is its only consumer, the product writes the
accumulator: that saves a pass over memory and a rounding.
"""

from __future__ import annotations

from thunder.analysis.cost import original_of
from thunder.analysis.flow import producers, uses
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import TensorProxy, numbers_in
from thunder.core.symbol import BoundSymbol, form_of
from thunder.core.trace import Trace
from thunder.ops import ltorch
from thunder.ops.rules import products

DEVICES = ("cuda",)  # with such products


def _is_cast(operation: BoundSymbol) -> bool:
    """Whether an operation only converts the type of one tensor, and PyTorch runs it."""
    out = operation.output
    if not isinstance(out, TensorProxy) or out.device.type not in DEVICES:
        return False
    if original_of(operation).sym is not ltorch.to or operation.sym.is_fusion:
        return False
    x = operation.args[0]
    return (
        isinstance(x, TensorProxy)
        and operation.kwargs.keys() <= {"dtype", "device"}
        and x.device is out.device
        and x.dtype is not out.dtype
        and not any(n.unbacked for n in numbers_in(x, []))
    )


def wide_products(trace: Trace) -> Trace:
    """The trace whose products of half precision write float32 where a cast is their only consumer."""
    casts = [*filter(_is_cast, trace.bound_symbols)]
    if not casts:
        return trace
    read = uses(trace.bound_symbols, trace.output_proxies)
    producer = producers(trace)
    wide: dict[BoundSymbol, BoundSymbol] = {}  # by the product, the cast
    for operation in casts:
        x = operation.args[0]
        product = producer.get(x)
        if (
            product is not None
            and products.in_float32.of(product.sym) is not None
            and original_of(product) is not product
            and operation.output.dtype is float32
            and x.dtype in (bfloat16, float16)
            and read[x] == 1
        ):
            wide[product] = operation
    if not wide:
        return trace
    dropped = set(wide.values())
    made = []
    for b in trace.bound_symbols:
        if b in wide:
            made.append(
                b.replace(sym=form_of(b.sym, "in_float32", products.in_float32.of(b.sym)), output=wide[b].output)
            )
        elif b not in dropped:
            made.append(b)
    return trace.replace(bound_symbols=made)
