"""Wide Products: products of half precision write float32 where a cast to float32 follows.

Before: in the backward under autocast `t4 = torch.mm(t5, x)`, `t6 = Tensor.to(t4, dtype=torch.float32)`. After: `t6 =
mm_in_float32(t5, x)`.

A product of half precision accumulates in float32. If a cast to float32 is its only consumer, the product writes the
accumulator: that saves a pass over memory and a rounding. A kernel that reads the cast makes it while it reads.
"""

from __future__ import annotations

from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import TensorProxy, numbers_in
from thunder.core.symbol import BoundSymbol
from thunder.extend.patterns import Flow
from thunder.extend.rules import CUT, Match, Rule
from thunder.ops import ltorch
from thunder.ops.rules import products

DEVICES = ("cuda",)  # with such products


def _product(x, *_, match: Match, **keywords) -> BoundSymbol | None:
    """The product that a cast to float32 alone reads."""
    out, flow = match.operation.output, match.flow
    if not isinstance(x, TensorProxy) or x.device is not out.device or out.device.type not in DEVICES:
        return None
    if out.dtype is not float32 or x.dtype not in (bfloat16, float16) or keywords.keys() - {"dtype", "device"}:
        return None
    if flow.uses(x) != 1 or any(n.unbacked for n in numbers_in((x,), [])):
        return None
    product = flow.producer(x)
    if product is None or products.in_float32.of(product.sym) is None or not _is_pytorchs(product, flow):
        return None
    return None if any(map(flow.lowering.fuses, flow.consumers(out))) else product


def _is_pytorchs(product: BoundSymbol, flow: Flow) -> bool:
    """Whether PyTorch computes a product, and no other executor."""
    return next((e.name for e in flow.lowering.executors if e.can_execute_or_fuse(product)), "") == "torch"


def _has_product(*args, match: Match, **keywords) -> bool:
    return _product(*args, match=match, **keywords) is not None


def _in_float32(*args, match: Match, **keywords):
    product = _product(*match.arguments, match=match, **match.keywords)
    assert product is not None, "the condition holds"
    return products.in_float32.of(product.sym)(*product.args)  # type: ignore[misc]


WIDE_PRODUCTS = Rule("Wide Products", ltorch.to, _in_float32, _has_product, CUT)
