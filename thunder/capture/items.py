"""Items of anything: `o[k]`, `o[k] = v`, `v in o` and iteration, of snapshots, tensors and objects with methods of
their own."""

from __future__ import annotations

import collections
import collections.abc
import operator
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from thunder.capture import arrays, changing, containers, host_lines, numpy_values, opaque_values
from thunder.capture.expose import expose, is_for_library
from thunder.capture.identities import Id, real_id, told_apart
from thunder.capture.interface import Capture
from thunder.capture.native import CONTAINERS, PRIMITIVE, is_hashable
from thunder.capture.reads import look_at
from thunder.capture.watched import check_watched
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import AnyProxy, NumberProxy, TensorProxy, map_structure
from thunder.interpreter import NULL, standins
from thunder.interpreter.tracebacks import swallow
from thunder.options import SHARP_EDGES_OPTIONS

# of mappings written in Python
VIEWS = {collections.abc.KeysView, collections.abc.ItemsView, collections.abc.ValuesView}


def getitem(c: Capture, o, k):
    """`o[k]`."""
    t = type(o)
    if c.dispatch.reading is not None:
        look_at(c, o)
    k = _settled(c, o, k)
    if c.containers.lazy and id(o) in c.containers.lazy:
        if isinstance(k, NumberProxy) and (item := containers.item_at(c, o, k)) is not NULL:
            return item
        if isinstance(o, dict) and is_hashable(k):
            return containers.dict_item(c, o, k)
        if type(k) is int and isinstance(o, list) and (item := containers.list_item(c, o, k)) is not NULL:
            return item
        containers.materialize(c, o)
    if t is collections.defaultdict and k not in o:
        return containers.made_by_factory(c, o, k)
    if t is TensorProxy:
        return c.operation("__getitem__", o, _key(c, k))
    if t is AnyProxy:
        return opaque_values.apply(c, operator.getitem, (o, k), {})
    of_array = t is numpy.ndarray and id(o) in c.outside.arrays and isinstance(k, NumberProxy)
    of_array = of_array or t is numpy.ndarray and host_lines.holds_host_values(c, k, numbers=False)
    if t is HostProxy or type(k) is HostProxy or of_array:
        return host_lines.operate(c, operator.getitem, o, k)
    check_watched(c, o, "__getitem__", f"an item of a {t.__name__}")
    if type(k) not in PRIMITIVE:
        expose(c, k, concretely=is_for_library(o))
    if isinstance(o, dict):
        told_apart(c, k, o)
        if type(k) is Id and k not in o:
            k = real_id(c, k)
    return o[k]  # pyright: ignore


def _settled(c: Capture, o, k):
    """A key of a dict, or an index of a list, with the values of texts and NumPy's numbers."""
    if isinstance(o, dict):
        return changing.settled(c, k)
    if type(o) in (list, tuple) and type(k) is slice:
        return slice(*[numpy_values.as_number(c, x) for x in (k.start, k.stop, k.step)])
    return numpy_values.as_number(c, k) if type(o) in (list, tuple) else k


def _key(c: Capture, k):
    """An index of a tensor, with tensors in the place of NumPy's arrays."""
    if type(k) in (numpy.ndarray, tuple, list, slice, HostProxy):
        return map_structure(lambda x: _of_array(c, x), k)
    return k


def _of_array(c: Capture, x):
    return c.lift(torch.as_tensor(x)) if type(x) is numpy.ndarray else numpy_values.as_index(c, x)


def check_iterators(c: Capture, *operands) -> None:
    """Native code iterates over operands: it would advance an iterator from outside, which no later call would
    repeat."""
    if not (c.outside.iterators and any(id(o) in c.outside.iterators for o in operands)):
        return
    reason = "an iterator from outside is advanced"
    if c.request.options.sharp_edges is SHARP_EDGES_OPTIONS.WARN:
        c.refuse(reason, "pass a list, or advance it outside of the compiled function")
    c.sharp(f"{reason}, and stays advanced only for the call that captured the program")


def setitem(c: Capture, o, k, v) -> None:
    """`o[k] = v`."""
    if type(o) is TensorProxy:
        c.operation("__setitem__", o, _key(c, k), v)
        return
    if type(o) is HostProxy:
        host_lines.run(c, operator.setitem, (o, k, v))
        return
    k = changing.settled(c, k) if isinstance(o, dict) else k
    arrays.refuse_array(c, o)
    check_iterators(c, v)
    if c.containers.lazy and id(o) in c.containers.lazy and not isinstance(o, dict):
        containers.materialize(c, o)
    if isinstance(o, dict):
        c.hashed((k,), () if id(o) in c.containers.lazy else o)
        if c.containers.lazy and containers.write_late(c, o, k, v):
            return
    if type(k) is slice and isinstance(o, list):
        if type(v) in CONTAINERS or c.slot(type(v), "__iter__") or c.slot(type(v), "__getitem__"):
            v = standins.Listed(c, v)
    o[k] = v
    containers.write_attributes(c, o)


def contains(c: Capture, o, v) -> bool:
    """`v in o`."""
    if c.dispatch.reading is not None:
        look_at(c, o)
    v = changing.settled(c, v) if isinstance(o, (dict, set, frozenset)) else v
    if c.containers.lazy and id(o) in c.containers.lazy:
        if isinstance(o, dict) and is_hashable(v):
            return containers.has_key(c, o, v)
        if type(o) is set and not o and id(v) not in c.world.sources:
            answer = containers.has_element(c, o, v)
            if answer is not None:
                return answer
        containers.materialize(c, o)
    if type(o) is HostProxy or host_lines.holds_host_values(c, o) or type(v) is HostProxy:
        return bool(host_lines.operate(c, operator.contains, o, v))
    if isinstance(o, (dict, set, frozenset)):
        c.hashed((v,), o)
    else:
        check_iterators(c, o)
        check_watched(c, o, "__contains__", f"a search in a {type(o).__name__}")
        expose(c, o, v)
    if isinstance(o, (list, tuple, dict, set, frozenset, collections.deque)):
        told_apart(c, v, o)
        if type(v) is Id and v not in o and any(type(x) is int for x in o):
            v = real_id(c, v)
    return v in o


def iterate(c: Capture, o):
    """`iter(o)`, where no Python code of the user's defines it."""
    c.materialize(o)
    check_iterators(c, o)
    t = type(o)
    if t is TensorProxy:
        return iter(o)
    if t is HostProxy:
        return host_lines.elements(c, o)
    check_watched(c, o, "__iter__", f"iteration over a {t.__name__}")
    look = c.containers.looks.get(id(o)) if t is set else None
    if look is not None and o == look.was:
        original = look.original  # a copy may have another order
        elements = c.elements(original)
        return iter(original if all(map(operator.is_, elements, original)) else elements)
    return iter(o)


def pairs(c: Capture, a):
    """An argument of dict(): a dict, a mapping's items, or pairs (dict_update_arg)."""
    if isinstance(a, dict) and not c.slot(type(a), "__iter__"):
        return c.materialize(a)
    if type(a) is TensorProxy or not _has_keys(c, a):
        return [_pair(c, p) for p in c.steps(a)] if type(a) in (list, tuple) else _Pairs(c, a)
    keys = []
    for k in c.steps(c.call(c.load_attr(a, "keys"), [], {})):  # `list` would ask for a length
        keys.append(k)  # noqa: PERF402
    return [(k, c.getitem(a, k)) for k in keys]


class _Pairs(standins.Iterated):
    """An iterable of keys and values, which native code hashes one by one."""

    __slots__ = ()

    def __iter__(self):
        return self._hashed(self.host.steps(self.value))  # whose StopIteration is no end of a generator

    def _hashed(self, steps: Iterator) -> Iterator:
        for element in steps:
            pair: Any = _pair(self.host, element)
            is_pair = type(pair) is tuple and len(pair) == 2
            yield (*self.host.hashed(pair[:1]), pair[1]) if is_pair else pair


def _has_keys(c: Capture, a) -> bool:
    try:
        c.load_attr(a, "keys")
    except AttributeError as error:
        swallow(error)
        return False
    return True


def _pair(c: Capture, p):
    known = c.lookup(type(p), "__iter__") is not NULL or c.lookup(type(p), "__getitem__") is not NULL
    if not known or type(p) is tuple:
        return p
    try:
        elements = iter(standins.Listed(c, p))
    except TypeError as error:
        swallow(error)
        return None  # of which native code says that it is no sequence
    return tuple(elements)
