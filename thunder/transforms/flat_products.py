"""Flat Products: linear layers read and return matrices.

Before: `t0 = ltorch.linear(x, w)` with x of shape (2, 512, 64). After: `t1 = ltorch.reshape(x, (1024, 64))`, `t2 =
ltorch.linear(t1, w)`, `t0 = ltorch.view(t2, (2, 512, 96))`.

The gradients of a layer are products of matrices, whose operands are then saved as matrices. The kernels of fusion
executors read and write values in any shape at no cost. Elementwise results of such matrices and columns of them are
matrices as well, so that there are no views from layer to layer. An output of the program is left alone: as in eager
PyTorch, it is no view.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from thunder.analysis.aliases import alias_bases
from thunder.analysis.flow import uses
from thunder.core.proxies import Proxy, TensorProxy, equal_shapes, map_structure, numbers_in
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.ops import LTORCH
from thunder.transforms.dce import dce


def flat_products(trace: Trace) -> Trace:
    """The trace with linear layers of matrices in the place of those of tensors of more dimensions."""
    flat = _Flat(trace)
    found = rewrite(trace, flat.rule)
    return dce(found) if flat.matrices else trace


def _flat_shape(x: TensorProxy) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


class _Flat:
    """The rule of the rewriting, with the matrices found so far.

    matrices: by view, the matrix that is its base: a product, columns of one, or an elementwise result of those.
    source: by reshaped value with one use, the value before. given: by value, a matrix with its elements.
    """

    def __init__(self, trace: Trace):
        operations = trace.bound_symbols
        bases = alias_bases(operations, maybe=True)
        self.returned = {bases[o] for o in trace.output_proxies}
        self.read = uses(operations, trace.output_proxies)
        # a reshaped value with a later use may be written to before
        self.has_effects = any(operation.sym.tags & EFFECTS for operation in operations)
        self.matrices: dict[Proxy, TensorProxy] = {}
        self.source: dict[Proxy, TensorProxy] = {}
        self.given: dict[Proxy, TensorProxy] = {}

    def matrix(self, x: TensorProxy) -> TensorProxy:
        # the matrix of another layer may have been made under no_grad
        if x not in self.given or self.given[x].requires_grad is not x.requires_grad:
            base = self.matrices.get(x, self.source.get(x, x))
            self.given[x] = (
                base if equal_shapes(base.shape, _flat_shape(x)) else LTORCH["reshape"](base, _flat_shape(x))
            )
        return self.given[x]

    def columns(self, x: TensorProxy) -> TensorProxy | None:
        """The matrix of which a value is a view whose last dimension is that of the columns."""
        found = self.matrices.get(x)
        return found if found is not None and equal_shapes(found.shape, _flat_shape(x)) else None

    def rule(self, operation: BoundSymbol, out: Rewriter) -> None:
        x = operation.args[0] if operation.args else None
        if (
            not isinstance(x, TensorProxy)
            or any(n.unbacked for n in numbers_in((operation.args, operation.kwargs, operation.output), []))
            or 0 in x.shape
        ):
            made = None
        elif operation.sym is LTORCH["linear"]:
            made = self._layer(operation, x)
        elif operation.sym.reshapes:
            made = self._reshaped(operation, x)
        elif operation.sym in (LTORCH["split"], LTORCH["chunk"]):
            made = self._split(operation, x)
        else:
            made = self._elementwise(operation)
        if made is None:
            return out.write(operation)
        return out.trace(made, operation)

    def _layer(self, operation: BoundSymbol, x: TensorProxy) -> Callable | None:
        if len(x.shape) <= 2 or len(operation.args[1].shape) != 2 or operation.output in self.returned:
            return None
        return lambda x, *rest, **named: self._view(operation.output, operation.sym(self.matrix(x), *rest, **named))

    def _reshaped(self, operation: BoundSymbol, x: TensorProxy) -> Callable | None:
        result, is_view = operation.output, operation.sym is LTORCH["view"]
        if (
            not isinstance(result, TensorProxy)
            or result.dtype is not x.dtype
            or result.requires_grad is not x.requires_grad
        ):
            return None
        if x in self.matrices:
            base = self.matrices[result] = self.matrices[x]
            shaped = operation.sym if is_view else LTORCH["reshape"]  # columns in other shapes may be a copy
            return lambda *args, **kwargs: shaped(base, result.shape)
        # a view that is none is an error
        if not is_view and self.read[result] == 1 and not self.has_effects:
            self.source[result] = self.source.get(x, x)
        return None

    def _split(self, operation: BoundSymbol, x: TensorProxy) -> Callable | None:
        whole = self.columns(x)
        if whole is None or not all(equal_shapes(part.shape[:-1], x.shape[:-1]) for part in operation.output):
            return None
        return lambda *args, **kwargs: self._parts(operation.output, whole)

    def _elementwise(self, operation: BoundSymbol) -> Callable | None:
        symbol, result = operation.sym, operation.output
        if (
            not symbol.elementwise
            or symbol.tags & {*EFFECTS, OpTags.RANDOM_OP, OpTags.VIEW}
            or not isinstance(result, TensorProxy)
            or result in self.returned
        ):
            return None
        tensors = [i for i in operation.inputs if isinstance(i, TensorProxy)]
        if not all(equal_shapes(i.shape, result.shape) and self.columns(i) is not None for i in tensors):
            return None
        args, kwargs = map_structure(
            lambda a: self.matrices[a] if isinstance(a, TensorProxy) else a, (operation.args, operation.kwargs)
        )
        return lambda *_, **__: self._view(result, symbol(*args, **kwargs))

    def _view(self, value: TensorProxy, matrix: TensorProxy) -> TensorProxy:
        self.matrices[value] = matrix
        return LTORCH["view"](matrix, value.shape)

    def _parts(self, values: tuple[TensorProxy, ...], whole: TensorProxy) -> tuple[TensorProxy, ...]:
        parts = LTORCH["split"](whole, [value.shape[-1] for value in values], 1)
        return tuple(self._view(value, part) for value, part in zip(values, parts, strict=True))
