"""Distinct Indices: gradients of elements at indices that are all different are written, not sorted and added up.

Before: `perm = ltorch.argsort(x)`, ..., `t5 = index_backward(t4, (2048, 64), [perm, None])`. After: `t5 =
index_backward(t4, (2048, 64), [perm, None], True)`.

PyTorch cannot know that no place of an index tensor is there twice, and sorts it in each backward, by some ten
launches. A program shows it where places come from sorting, as experts group their tokens by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thunder.analysis.flow import producers
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import LTORCH
from thunder.ops.backward import index_backward

__all__ = ["distinct_indices"]


def distinct_indices(trace: Trace) -> Trace:
    """The trace in which gradients at distinct places are written without a sort."""
    producer = producers(trace)

    def marked(b: BoundSymbol) -> BoundSymbol:
        used = [i for i in b.args[2] if i is not None] if b.sym is index_backward else ()
        return b.replace(args=(*b.args[:3], True)) if len(used) == 1 and _is_distinct(used[0], producer) else b

    return trace.replace(bound_symbols=[marked(b) for b in trace.bound_symbols])


def _is_distinct(index: Any, producer: Mapping[Proxy, BoundSymbol]) -> bool:
    """Whether no value of a vector is there twice: places that sorting gives, ranges, permutations, and a vector all of
    which is overwritten with such values at such places, as programs invert a permutation."""
    made = producer.get(index) if isinstance(index, TensorProxy) and len(index.shape) == 1 else None
    if made is None:
        return False
    if made.sym in (LTORCH["sort"], LTORCH["argsort"]):
        return index is made.outputs[-1]
    if made.sym is LTORCH["arange"]:  # from 0 on: a negative index is a place as well
        start, _, step = made.args
        return type(start) is int and type(step) is int and start >= 0 and step > 0
    if made.sym is LTORCH["randperm"]:
        return True
    if made.sym is not LTORCH["setitem"]:
        return False
    key, value = made.args[1:]
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    both = key, value
    return all(isinstance(x, TensorProxy) and x.shape == index.shape and _is_distinct(x, producer) for x in both)
