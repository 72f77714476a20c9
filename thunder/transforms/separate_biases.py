"""Separate Biases: products in float32 leave their biases to the fused kernels that read the results.

Before: `t0 = torch.nn.functional.linear(x, w, b)`, `t1 = torch.relu(t0)`. After: `t2 = torch.nn.functional.linear(x,
w)`, `t0 = torch.add(t2, b)`, `t1 = torch.relu(t0)`, the last two of which fuse.

Without TensorFloat-32, cuBLAS has other kernels for products with a bias, which take 0.95 to 2.1 times as long
(docs/lab_log.md, "Biases of float32 products"). A fused kernel that reads the result adds the bias for nothing. As much
is saved: a backward reads the sum, or adds the bias again. Products of a narrower type, which would be rounded before
the addition, keep their biases, as do products in tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder.analysis.aliases import may_view
from thunder.analysis.flow import consumers
from thunder.compat.torch_settings import tensor_cores_multiply_float32
from thunder.core.dtypes import float32
from thunder.core.proxies import Proxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import ltorch

__all__ = ["separate_biases"]


def _layer(x, weight, bias):
    return ltorch.add(ltorch.linear(x, weight), bias)


def _sum_with_product(a, x, y, **_):
    return ltorch.add(ltorch.mm(x, y), a)


_SEPARATE: dict = {ltorch.linear: _layer, ltorch.addmm: _sum_with_product}


def _has_bias(operation: BoundSymbol) -> bool:
    """Whether an operation is a product of matrices in float32, to which a vector is added."""
    if operation.sym not in _SEPARATE or len(operation.args) != 3 or set(operation.kwargs.values()) - {1}:
        return False  # `addmm` has factors
    bias = operation.args[2 if operation.sym is ltorch.linear else 0]
    return bias is not None and len(bias.shape) == 1 and operation.output.dtype is float32


def separate_biases(trace: Trace, fuses: Callable[[BoundSymbol], bool]) -> Trace:
    """The trace whose float32 products have no biases where fused kernels alone read the results. fuses: whether a
    fusion executor takes an operation."""
    products = [b for b in trace.bound_symbols if _has_bias(b) and not fuses(b)]
    if not products or tensor_cores_multiply_float32():
        return trace
    read = consumers(trace.bound_symbols)
    elsewhere = {*(x.name for x in trace.output_proxies), *trace.info.written.values()}

    def in_kernels(value: Proxy) -> bool:
        """Whether kernels alone read a value, and its views. Nothing would fuse with an addition before a view that
        another operation reads."""
        return value.name not in elsewhere and all(
            fuses(c) and (not may_view(c) or all(map(in_kernels, c.outputs))) for c in read.get(value, ())
        )

    chosen = {b for b in products if in_kernels(b.output)}

    def rule(operation: BoundSymbol, out: Rewriter) -> None:
        if operation in chosen:
            out.trace(_SEPARATE[operation.sym], operation)
        else:
            out.write(operation)

    return rewrite(trace, rule, optional=True) if chosen else trace
