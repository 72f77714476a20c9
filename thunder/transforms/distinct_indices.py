"""Distinct Indices: gradients of elements at indices that are all different are written, not sorted and added up.

Before: `perm = ltorch.argsort(x)`, ..., `t5 = index_backward(t4, (2048, 64), [perm, None])`. After: `t5 =
index_backward(t4, (2048, 64), [perm, None], True)`, or, where the program has inverted the permutation, `t5 =
ltorch.index_select(t4, 0, inverse)`, which kernels fuse.

PyTorch cannot know that no place of an index tensor is there twice, and sorts it in each backward, by some ten
launches. A program shows it where places come from sorting, as experts group their tokens by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.analysis.flow import producers
from thunder.core.proxies import Proxy, TensorProxy, equal_shapes
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import ltorch
from thunder.ops.backward import index_backward

__all__ = ["distinct_indices"]


def distinct_indices(trace: Trace) -> Trace:
    """The trace in which gradients at distinct places are written without a sort, and read where the program has the
    inverse of a permutation."""
    producer = producers(trace)
    inverse: dict[Proxy, TensorProxy] = {}

    def rule(b: BoundSymbol, out: Rewriter) -> None:
        if (places := _inverted(b, producer)) is not None:
            inverse.update({places: b.output, b.output: places})
        used = [(d, i) for d, i in enumerate(b.args[2]) if i is not None] if b.sym is index_backward else ()
        if len(used) != 1 or not _is_distinct(used[0][1], producer):
            return out.write(b)
        ((dim, index),) = used
        if index in inverse and equal_shapes(index.shape, b.output.shape[dim : dim + 1]):
            return out.trace(lambda g, *_: ltorch.index_select(g, dim, inverse[index]), b)
        out.write(b.replace(args=(*b.args[:3], True)))

    return rewrite(trace, rule, optional=True)


def _is_distinct(index: Any, producer: Mapping[Proxy, BoundSymbol]) -> bool:
    """Whether no value of a vector is there twice: places that sorting gives, ranges, permutations, and a vector all of
    which is overwritten with such values at such places, as programs invert a permutation."""
    made = producer.get(index) if isinstance(index, TensorProxy) and len(index.shape) == 1 else None
    if made is None:
        return False
    if made.sym in (ltorch.sort, ltorch.argsort):
        return index is made.outputs[-1]
    if made.sym is ltorch.arange:  # from 0 on: a negative index is a place as well
        start, _, step = made.args
        return type(start) is int and type(step) is int and start >= 0 and step > 0
    if made.sym is ltorch.randperm:
        return True
    return all(_is_distinct(x, producer) for x in _overwritten(made)) if made.sym is ltorch.setitem else False


def _overwritten(assignment: BoundSymbol) -> tuple:
    """The places and the values of an assignment to a vector, which are as many as the vector has; None where there are
    others."""
    key, value = assignment.args[1:]
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    shape = assignment.output.shape
    return tuple(x if isinstance(x, TensorProxy) and equal_shapes(x.shape, shape) else None for x in (key, value))


def _inverted(b: BoundSymbol, producer: Mapping[Proxy, BoundSymbol]) -> TensorProxy | None:
    """The permutation whose inverse an operation writes: to each place of it, the number of the place."""
    key, value = _overwritten(b) if b.sym is ltorch.setitem else (None, None)
    made = producer.get(value) if value is not None else None
    if made is None or made.sym is not ltorch.arange:
        return None
    start, _, step = made.args
    counts = type(start) is type(step) is int and (start, step) == (0, 1)
    return key if counts and _is_distinct(key, producer) else None
