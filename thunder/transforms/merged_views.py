"""Merge Views: views one after the other that keep the order of the elements become one view.

Before: `t1 = ltorch.reshape(t0, (1, -1, 1, 128))`, `t2 = ltorch.transpose(t1, 1, 2)`, `t3 = ltorch.contiguous(t2)`,
`t4 = ltorch.reshape(t3, (1, 2048))`. After: `t5 = ltorch.reshape(t0, (1, 2048))`, `t4 = ltorch.contiguous(t5)`.

A view takes the host a microsecond, a fifth of a launch, and a token that is decoded has as many of them as of
launches: what moves dimensions of a batch of sequences only moves dimensions of size 1 there. Nothing is merged across
an effect, and an output of the program is left alone: it has the strides of eager PyTorch's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from thunder.analysis import aliases
from thunder.analysis.flow import uses
from thunder.core.proxies import Proxy, TensorProxy, numbers_in
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import EFFECTS, BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import ltorch, prims
from thunder.transforms.dce import dce


class _Views(NamedTuple):
    """Views one after the other. base: what the first one reads. is_strict: none of them copies, whatever the strides
    are. may_fail: one of them is an error for some strides. is_dense: one of them makes its result dense. effects: how
    many there were before the first."""

    base: TensorProxy
    is_strict: bool
    may_fail: bool
    is_dense: bool
    effects: int


def merged_views(trace: Trace) -> Trace:
    """The trace with one view in the place of several."""
    read = uses(trace.bound_symbols, trace.output_proxies)
    outputs = set(trace.output_proxies)
    views: dict[Proxy, _Views] = {}
    effects, merged = 0, False

    def rule(operation: BoundSymbol, out: Rewriter) -> None:
        nonlocal effects, merged
        effects += bool(operation.sym.tags & EFFECTS)
        if not _keeps_order(operation) or operation.output in outputs:
            return out.write(operation)
        x, result = operation.args[0], operation.output
        is_dense = operation.sym is ltorch.contiguous
        own = _Views(
            x,
            not is_dense and not aliases.may_copy.of(operation.sym),
            operation.sym is ltorch.view,
            is_dense,
            effects,
        )
        before = views.get(x) if read[x] == 1 else None
        now = own if before is None else _together(before, own)
        views[result] = now
        if now is own:
            return out.write(operation)
        merged = True
        view = ltorch.view if now.is_strict else ltorch.reshape
        dense = ltorch.contiguous if now.is_dense else lambda x: x
        out.trace(lambda *_, **__: dense(view(now.base, result.shape)), operation)

    found = rewrite(trace, rule, optional=True)
    return dce(found) if merged else trace


def _together(before: _Views, last: _Views) -> _Views:
    """One view more, where it may be one with those before; else the last one alone."""
    is_strict, may_fail = before.is_strict and last.is_strict, before.may_fail or last.may_fail
    if before.effects != last.effects or may_fail and not is_strict:
        return last
    return _Views(before.base, is_strict, may_fail, before.is_dense or last.is_dense, last.effects)


def _keeps_order(operation: BoundSymbol) -> bool:
    """Whether the result has all elements of the first argument, in their order."""
    x = operation.args[0] if operation.args else None
    result = operation.output
    if not isinstance(x, TensorProxy) or not isinstance(result, TensorProxy) or result is x:
        return False
    if result.dtype is not x.dtype or result.requires_grad is not x.requires_grad:
        return False
    if any(n.unbacked for n in numbers_in((operation.args, result), [])):
        return False
    symbol = operation.sym
    if symbol is prims.transpose:
        moved = [d % len(x.shape) for d in operation.args[1]]
        return [d for d in moved if x.shape[d] != 1] == [d for d in range(len(moved)) if x.shape[d] != 1]
    if symbol is ltorch.contiguous:
        return operation.kwargs.get("memory_format", torch.contiguous_format) is torch.contiguous_format
    return symbol.reshapes or len(operation.subsymbols) == 1 and _keeps_order(operation.subsymbols[0])
