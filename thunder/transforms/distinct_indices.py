"""Distinct Indices: gradients of elements at indices that are all different are written, not sorted and added up.

Before: `perm = ltorch.argsort(x)`, ..., `t5 = index_backward(t4, (2048, 64), [perm, None])`. After: `t5 =
index_backward(t4, (2048, 64), [perm, None], True)`, or, where the program has inverted the permutation, `t5 =
ltorch.index_select(t4, 0, inverse)`, which kernels fuse.

PyTorch cannot know that no place of an index tensor is there twice, and sorts it in each backward, by some ten
launches. A program shows it where places come from sorting, as experts group their tokens by.
"""

from __future__ import annotations

from typing import Any

from thunder.core.proxies import TensorProxy, equal_shapes
from thunder.core.symbol import BoundSymbol
from thunder.extend.patterns import Flow
from thunder.extend.rules import JOINT, Match, Rule
from thunder.ops import ltorch
from thunder.ops.backward import index_backward


def _only_index(indices: Any) -> tuple[int, TensorProxy] | None:
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    return used[0] if len(used) == 1 else None


def _are_distinct(g, shape, indices, distinct=False, *, match: Match) -> bool:
    used = _only_index(indices)
    return not distinct and used is not None and _is_distinct(used[1], match.flow)


def _written(g, shape, indices, *, match: Match):
    used = _only_index(match.arguments[2])
    assert used is not None, "the condition holds"
    dim, index = used
    inverse = _inverse(index, match)
    if inverse is not None and equal_shapes(index.shape, match.outputs[0].shape[dim : dim + 1]):  # type: ignore[attr-defined]
        return ltorch.index_select(g, dim, inverse)
    return index_backward(g, shape, indices, True)


def _is_distinct(index: Any, flow: Flow) -> bool:
    """Whether no value of a vector is there twice: places that sorting gives, ranges, permutations, and a vector all of
    which is overwritten with such values at such places, as programs invert a permutation."""
    producer = flow.producer(index) if isinstance(index, TensorProxy) and len(index.shape) == 1 else None
    if producer is None:
        return False
    if producer.sym in (ltorch.sort, ltorch.argsort):
        return index is producer.outputs[-1]
    if producer.sym is ltorch.arange:  # from 0 on: a negative index is a place as well
        start, _, step = producer.args
        return type(start) is int and type(step) is int and start >= 0 and step > 0
    if producer.sym is ltorch.randperm:
        return True
    return all(_is_distinct(x, flow) for x in _overwritten(producer)) if producer.sym is ltorch.setitem else False


def _overwritten(assignment: BoundSymbol) -> tuple:
    """The places and the values of an assignment to a vector, which are as many as the vector has; None where there are
    others."""
    key, value = assignment.args[1:]
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    shape = assignment.output.shape
    return tuple(x if isinstance(x, TensorProxy) and equal_shapes(x.shape, shape) else None for x in (key, value))


def _inverse(index: TensorProxy, match: Match) -> TensorProxy | None:
    """The inverse of a permutation that the program has computed already."""
    flow = match.flow
    producer = flow.producer(index)
    inverted = None if producer is None else _inverted(producer, flow)
    if inverted is not None:
        return inverted
    before = (c for c in flow.consumers(index) if flow.position(c) < flow.position(match.operation))
    return next((c.output for c in before if _inverted(c, flow) is index), None)


def _inverted(b: BoundSymbol, flow: Flow) -> TensorProxy | None:
    """The permutation whose inverse an operation writes: to each place of it, the number of the place."""
    key, value = _overwritten(b) if b.sym is ltorch.setitem else (None, None)
    producer = flow.producer(value) if value is not None else None
    if producer is None or producer.sym is not ltorch.arange:
        return None
    start, _, step = producer.args
    counts = type(start) is type(step) is int and (start, step) == (0, 1)
    return key if counts and _is_distinct(key, flow) else None


DISTINCT_INDICES = Rule("Distinct Indices", index_backward, _written, _are_distinct, JOINT, exact=True)
