"""Align Products: products of odd sizes write padded rows, and run as a fast product and a small remainder.

Before: `t0 = torch.nn.functional.linear(x, w)` with 50257 rows of w, whose result a kernel and two other products read.
After: `t0 = linear_aligned(x, w)`, of the same shape and with a row stride of 50264, which computes 50256 columns by
one kernel and the last one by another. The products that read it are `mm_aligned`.

The fast product kernels of a GPU, those of its tensor cores, need rows that begin at multiples of 16 bytes. Other
kernels are several times as slow, and weights of odd sizes, as those of vocabularies, need them. Products in float32
without TensorFloat-32 have no such kernels, and stay. Padding a result costs no copy, as padding a weight
would. A product pads its result or operand where all consumers, in the backward too, accept a larger row stride:
products, fused kernels, and views. The program returns dense rows as PyTorch does: the result of a large product in
half precision is copied for that, which is one pass over the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from itertools import chain

import torch

from thunder.analysis import aliases, cost
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import original_of, tensors_in
from thunder.analysis.flow import consumers, producers
from thunder.compat.torch_settings import tensor_cores_multiply_float32
from thunder.core.dtypes import float32
from thunder.core.proxies import Proxy, TensorProxy, equal_shapes, like, number_value, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, form_of
from thunder.core.trace import Trace, TraceTag
from thunder.ops.layout import padded_row
from thunder.ops.rules import products

# the least number of rows and of columns of the first operand for which a fast product is worth a copy of its result
LEAST_ROWS, LEAST_DEPTH = 128, 256


def _has_odd_products(trace: Trace) -> bool:
    """Whether a product of the trace, or of its backward, reads or writes a matrix of an odd size."""
    return any(map(_is_odd, chain(*_matrices(trace.bound_symbols).values(), *_matrices(_later(trace)).values())))


def _later(trace: Trace) -> Sequence[BoundSymbol]:
    """The backward of a forward."""
    cut = trace.info.cut
    return cut.backward.bound_symbols if cut is not None and TraceTag.BACKWARD not in trace.tags else ()


def aligned_products(trace: Trace, fuses: Callable[[BoundSymbol], bool]) -> Trace:
    """The trace with products that pad the rows of their results. `info.padded` names the padded values for fusion
    executors. fuses: whether one of these takes an operation of the backward, which is not lowered yet."""
    if not _has_odd_products(trace):
        return trace
    fusible, cut = trace.info.fusible, trace.info.cut
    saved: Sequence[Proxy] = ()
    returned, after = trace.output, None
    if cut is not None and TraceTag.BACKWARD not in trace.tags:
        returned, (saved, _) = trace.output
        after = _Half(cut.backward, cut.backward.output, fuses)
    here = _Half(trace, returned, fusible.__contains__, frozenset(proxies_in(saved, [])), after)
    padded = set(trace.info.padded)
    produced_by = producers(trace)
    matrices = _matrices(trace.bound_symbols)
    for value in dict.fromkeys(chain(*matrices.values(), *_matrices(_later(trace)).values())):
        producer = produced_by.get(value)
        if (
            producer is not None
            and (_pads(producer) or producer in fusible)
            and not _is_view(producer)
            and _is_odd(value)
            and value not in padded
        ):
            padded |= here.views_taken(value) or set()
    operations: list[BoundSymbol] = []
    for b in trace.bound_symbols:
        reads_padded = b in matrices and not padded.isdisjoint(matrices[b])
        if _pads(b) and reads_padded and (b.output in padded or not _is_odd(b.output)):
            operations.append(b.replace(sym=form_of(b.sym, "aligned", products.aligned.of(b.sym))))
        elif _pads(b) and _is_odd(b.output) and _is_worth_a_copy(b):
            apart = b.output.replace(name=trace.names.make())
            operations.append(b.replace(sym=form_of(b.sym, "aligned", products.aligned.of(b.sym)), output=apart))
            operations.append(dense_rows.bind(apart, output=b.output, context=b.context))
        else:
            operations.append(b)
    return trace.replace(bound_symbols=operations, info=trace.info.replace(padded=frozenset(padded)))


def _matrices(operations: Sequence[BoundSymbol]) -> dict[BoundSymbol, list[TensorProxy]]:
    """By product, its results and operands, or the bases of these."""
    source: dict[Proxy, Proxy] = {}
    matrices: dict[BoundSymbol, list[TensorProxy]] = {}
    for b in operations:
        keeps_rows = products.takes_rows_apart.of(b.sym) and OpTags.MATMUL_OP not in b.sym.tags
        if (keeps_rows or _is_view(b)) and isinstance(b.args[0], TensorProxy):
            source |= dict.fromkeys(b.outputs, source.get(b.args[0], b.args[0]))
        if OpTags.MATMUL_OP in b.sym.tags and products.takes_rows_apart.of(b.sym):
            matrices[b] = tensors_in(source.get(v, v) for v in (*b.outputs, *b.inputs))
    return matrices


def _is_view(operation: BoundSymbol) -> bool:
    """Whether an operation returns a view, whatever the strides; `contiguous` may write dense rows."""
    return may_view(operation) and (operation.sym.reshapes or not aliases.may_copy.of(operation.sym))


def _is_odd(value: TensorProxy) -> bool:
    if len(value.shape) < 2 or type(value.shape[-1]) is not int or value.dtype.category != 2:
        return False
    if value.dtype is float32 and not tensor_cores_multiply_float32():
        return False
    several = any(type(n) is not int or n > 1 for n in value.shape[:-1])
    return several and padded_row(value.shape[-1], value.dtype.bytes) != value.shape[-1]


def _pads(operation: BoundSymbol) -> bool:
    """Whether an executor runs an operation as a product that can pad its rows."""
    if products.aligned.of(operation.sym) is None or original_of(operation) is operation:
        return False
    x, y = [i for i in operation.inputs if isinstance(i, TensorProxy)][cost.rules.of(operation.sym).factors[0] :][:2]
    return len(x.shape) >= 2 and (len(y.shape) == 2 or equal_shapes(x.shape[:-2], y.shape[:-2]))


def _is_worth_a_copy(operation: BoundSymbol) -> bool:
    out, x = operation.output, next(i for i in operation.inputs if len(i.shape) >= 2)
    rows, depth = number_value(math.prod(out.shape[:-1])), number_value(x.shape[-1])
    return out.dtype.bytes == 2 and rows >= LEAST_ROWS and depth >= LEAST_DEPTH


# dense rows, as PyTorch lays them out
dense_rows = Symbol("dense_rows", lambda a: like(a), id="dense_rows", is_prim=True, fn=torch.Tensor.contiguous)


class _Half:
    """The consumers of values in a program, a forward or a backward. returned: values that leave the program with dense
    rows. saved: values that `after`, the backward, reads. fuses: whether a fusion executor takes an operation."""

    def __init__(
        self, trace: Trace, returned, fuses: Callable[[BoundSymbol], bool], saved: Set[Proxy] = frozenset(),
        after: _Half | None = None,
    ):  # fmt: skip
        self.consumers, self.fuses, self.saved, self.after = consumers(trace.bound_symbols), fuses, saved, after
        self.returned, self.written = frozenset(proxies_in(returned, [])), frozenset(trace.info.written.values())

    def views_taken(self, value: Proxy, by_rows: bool = True) -> set[Proxy] | None:
        """The value and its views with the same rows; None where a consumer needs dense rows, or writes to them.
        by_rows: whether the last dimension of the value is that of its rows."""
        taken_views, waiting = set[Proxy](), [(value, by_rows)]
        while waiting:
            value, by_rows = waiting.pop()
            if value in self.returned or value.name in self.written:
                return None
            if by_rows:
                taken_views.add(value)
            for operation in self.consumers.get(value, ()):
                views = self._views(operation, value, by_rows)
                if views is None:
                    return None
                waiting += views
            if value in self.saved and self.after is not None and self.after.views_taken(value, by_rows) is None:
                return None
        return taken_views

    def _views(self, operation: BoundSymbol, value: Proxy, by_rows: bool) -> list[tuple[Proxy, bool]] | None:
        """The views of a value that an operation returns, with whether each has the rows of the value; None where the
        operation needs dense rows."""
        symbol = operation.sym
        if products.takes_rows_apart.of(symbol):
            return [] if OpTags.MATMUL_OP in symbol.tags else [(o, by_rows) for o in operation.outputs]
        if not may_view(operation):
            return [] if self.fuses(operation) else None
        if symbol.reshapes:
            (view,) = operation.outputs
            keeps = by_rows and view.shape and type(view.shape[-1]) is int and view.shape[-1] == value.shape[-1]
            return [(view, True)] if keeps else None
        if aliases.may_copy.of(symbol):  # `contiguous`, which has nothing to do for rows that are not apart
            return [] if self.fuses(operation) and not by_rows else None
        return [(o, False) for o in operation.outputs]
