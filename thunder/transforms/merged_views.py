"""Merge Views: views one after the other that keep the order of the elements become one view.

Before: `t1 = ltorch.reshape(t0, (1, -1, 1, 128))`, `t2 = ltorch.transpose(t1, 1, 2)`, `t3 = ltorch.contiguous(t2)`,
`t4 = ltorch.reshape(t3, (1, 2048))`. After: `t5 = ltorch.reshape(t0, (1, 2048))`, `t4 = ltorch.contiguous(t5)`.

A view takes the host a microsecond, a fifth of a launch, and a token that is decoded has as many of them as of
launches: what moves dimensions of a batch of sequences only moves dimensions of size 1 there. Nothing is merged across
an effect, and an output of the program is left alone: it has the strides of eager PyTorch's.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder.analysis import aliases
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend.patterns import Flow, keeps_order
from thunder.extend.rules import CUT, EVERY, Match, Rule
from thunder.ops import ltorch


class _Views(NamedTuple):
    """Views one after the other. base: what the first one reads. is_strict: none of them copies, whatever the strides
    are. may_fail: one of them is an error for some strides. is_dense: one of them makes its result dense. effects: how
    many there were before the first. count: of the views."""

    base: TensorProxy
    is_strict: bool
    may_fail: bool
    is_dense: bool
    effects: int
    count: int = 1


def _views(operation: BoundSymbol, flow: Flow) -> _Views | None:
    """The views that end in an operation; None where it is none, or gives a result of the program."""
    known: dict[Proxy, _Views] = flow.answers.setdefault(_views, {})
    if not keeps_order(operation) or operation.output in flow.results:
        return None
    if operation.output not in known:
        x, is_dense = operation.args[0], operation.sym is ltorch.contiguous
        is_strict, may_fail = not is_dense and not aliases.may_copy.of(operation.sym), operation.sym is ltorch.view
        own = _Views(x, is_strict, may_fail, is_dense, flow.effects[flow.position(operation)])
        before = known.get(x) if flow.uses(x) == 1 else None
        known[operation.output] = own if before is None else _together(before, own)
    return known[operation.output]


def _together(before: _Views, last: _Views) -> _Views:
    """One view more, where it may be one with those before; else the last one alone."""
    is_strict, may_fail = before.is_strict and last.is_strict, before.may_fail or last.may_fail
    if before.effects != last.effects or may_fail and not is_strict:
        return last
    is_dense = before.is_dense or last.is_dense
    return _Views(before.base, is_strict, may_fail, is_dense, last.effects, before.count + 1)


def _are_several(*_, match: Match, **__) -> bool:
    views = _views(match.operation, match.flow)
    return views is not None and views.count > 1


def _merged(*_, match: Match, **__):
    views, shape = _views(match.operation, match.flow), match.operation.output.shape
    assert views is not None, "the condition holds"
    merged = (ltorch.view if views.is_strict else ltorch.reshape)(views.base, shape)
    return ltorch.contiguous(merged) if views.is_dense else merged


MERGE_VIEWS = Rule("Merge Views", EVERY, _merged, _are_several, CUT, where=lambda flow: bool(flow.lowering.fusers))
