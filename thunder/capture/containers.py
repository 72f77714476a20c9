"""Containers from outside: read through snapshots, whose children have sources, and whose changes are effects.

A snapshot is an empty container of the same type that stands for the original; `observe` fills it and guards its length or keys. A dict of which
only single keys are read is guarded by those keys only.
"""

from __future__ import annotations

import collections
import operator
import weakref

import numpy
import torch

from thunder.capture import calls, opaque_values
from thunder.capture.native import CONTAINERS, container_base
from thunder.core.proxies import AnyProxy, TensorProxy, map_structure
from thunder.interpreter.attributes import type_attribute

__all__ = ["snapshot", "observe", "getitem", "setitem", "contains", "iterate", "dict_item", "escape", "attribute_dict", "written_attributes", "changed"]


def snapshot(c, value, source):
    """The stand-in for a container that came in through a source."""
    s = c.snapshots.get(id(value))
    if s is not None:
        known = c.sources[id(s)]
        if known is not source:
            c.guard(source, "same", known, known)
        return s
    t = type(value)
    s = t.__new__(t)  # no __init__: a subclass's may want arguments, or do something
    if isinstance(value, collections.defaultdict):
        s.default_factory = value.default_factory
    elif isinstance(value, collections.deque):
        collections.deque.__init__(s, maxlen=value.maxlen)
    if t not in CONTAINERS and hasattr(value, "__dict__"):
        s.__dict__.update(value.__dict__)
    c.snapshots[id(value)] = s
    c.keep[id(value)], c.keep[id(s)] = value, s
    c.sources[id(s)] = source
    c.lazy[id(s)] = (value, source)
    c.guard(source, "type", t)
    if isinstance(value, collections.deque):
        c.read(value.maxlen, source.attr("maxlen"))
    return s


def observe(c, s) -> None:
    """Somebody looks at all of a snapshot."""
    value, source = c.lazy.pop(id(s))
    if isinstance(value, dict):
        base = container_base(type(value))
        if any(isinstance(k, torch.Tensor) for k in base.keys(value)):
            c.refuse("a dict from outside whose keys are tensors is read as a whole", "read the entries of single tensors")
        added = dict(base.items(s))
        base.clear(s)
        c.guard(source, "keys", tuple(base.keys(value)))
        c.elements(base.keys(value))
        before = c.read_items.get(id(s), {})
        for k, x in base.items(value):
            base.__setitem__(s, k, before[k] if k in before else c.read(x, source.item(k)))
        c.pristine[id(s)] = (value, source, dict(base.items(s)))
        for k, x in added.items():
            base.__setitem__(s, k, x)
    elif isinstance(value, set):
        c.guard(source, "set", tuple(set.__iter__(value)))
        elements = c.elements(value)
        c.pristine[id(s)] = (value, source, set(elements))
        set.update(s, elements)
    else:
        base = container_base(type(value))
        c.guard(source, "len", base.__len__(value))
        children = [c.read(x, source.item(i)) for i, x in enumerate(base.__iter__(value))]
        c.pristine[id(s)] = (value, source, children)
        added = list(base.__iter__(s))
        base.clear(s)
        base.extend(s, children + added)


def dict_item(c, s, k, *default):
    """One key of a dict that nobody has read as a whole: that key is guarded, no other."""
    if dict.__contains__(s, k):
        return dict.__getitem__(s, k)
    k = calls.real_id(c, k)
    value, source = c.lazy[id(s)]
    outside, item = entry(c, source, k)
    if dict.__contains__(value, outside):
        c.dict_items.add(item)
        child = c.read(dict.__getitem__(value, outside), item)
        c.read_items.setdefault(id(s), {})[k] = child
        container_base(type(s)).__setitem__(s, k, child)
        return child
    c.guard(item, "absent", None)
    if default:
        return default[0]
    if type(value) is collections.defaultdict:
        return _made(c, s, k)
    if hasattr(type(value), "__missing__"):
        observe(c, s)
        return s[k]
    raise KeyError(k)


def _made(c, s, k):
    """What a defaultdict puts under a key that it does not have."""
    factory = c.load_attr(s, "default_factory")
    if factory is None:
        raise KeyError(k)
    s[k] = made = c.call(factory, [], {})
    return made


def entry(c, source, k) -> tuple:
    """(key in the outside dict, source of what stands there) for a key of its snapshot, where the proxy of a tensor from outside stands for that tensor."""
    if type(k) is not TensorProxy:
        k = calls.real_id(c, k)
        told_apart(c, k, ())
        known = c.sources.get(id(k))
        return k, source.item(k) if known is None or known.step == "const" or type(k) is torch.Generator else source.child("keyed", known)
    real, found = c.real.get(c.recorder.memory.holder(k), (None, None))
    if real is None:
        c.refuse("a dict from outside is asked for a tensor that the program made", "key it by something else: a name, or the tensor from outside")
    return real, source.child("keyed", found)


def told_apart(c, value, others) -> None:
    """A hash table or a list compares a value with others: what came from outside stays another object than they are."""
    if isinstance(value, weakref.ref):
        found = value()
        if id(found) in c.sources:
            c.passing.add(id(found))
            c.guard(c.sources[id(found)], "is", found)
    if id(value) in c.sources:
        for x in others:
            if x is not value:
                c.same(value, x)
    elif type(value) is calls.Id:
        for x in others:
            if type(x) is calls.Id and x != value:
                c.guard(c.stand_ins[value][0], "isnot", c.stand_ins[x][0], c.stand_ins[x][0])


def escape(c, value, depth: int = 3):
    """The value goes to native code: whatever that could read in it is read now."""
    if not c.lazy:
        return value
    if id(value) in c.lazy:
        observe(c, value)
    t = type(value)
    if depth and t in (list, tuple, dict, slice) and (t is slice or len(value) < 200):
        for x in value.values() if t is dict else (value.start, value.stop, value.step) if t is slice else value:
            escape(c, x, depth - 1)
    return value


def _hashable(k) -> bool:
    try:
        hash(k)
    except TypeError:
        return False
    return True


def getitem(c, o, k):
    t = type(o)
    if c.lazy and id(o) in c.lazy:
        if isinstance(o, dict) and _hashable(k):
            return dict_item(c, o, k)
        observe(c, o)
    if t is collections.defaultdict and k not in o:
        return _made(c, o, k)
    if t is TensorProxy:
        return c.operation("__getitem__", o, _key(c, k))
    if t is AnyProxy:
        return opaque_values.apply(c, operator.getitem, (o, k), {})
    calls.leak_inside(c, (k,))
    if isinstance(o, dict):
        told_apart(c, k, o)
        if type(k) is calls.Id and k not in o:
            k = calls.real_id(c, k)
    return o[k]


def _key(c, k):
    """An index of a tensor, with tensors in the place of NumPy's arrays."""
    if type(k) is numpy.ndarray or type(k) is tuple:
        return map_structure(lambda x: c.lift(torch.as_tensor(x)) if type(x) is numpy.ndarray else x, k)
    return k


def not_an_array(c, o) -> None:
    if id(o) in c.arrays:
        c.refuse("a numpy array from outside is written to", "pass a tensor (torch.from_numpy shares the memory), or write to a copy of the array")


def setitem(c, o, k, v) -> None:
    if type(o) is TensorProxy:
        c.operation("__setitem__", o, _key(c, k), v)
        return
    not_an_array(c, o)
    if c.lazy and id(o) in c.lazy and not isinstance(o, dict):
        observe(c, o)
    if isinstance(o, dict) and id(o) not in c.lazy:
        c.hashed((k,), o)
    o[k] = v
    written_attributes(c, o)


def contains(c, o, v) -> bool:
    if c.lazy and id(o) in c.lazy:
        if isinstance(o, dict) and _hashable(v):
            if v in o:
                return True
            original, source = c.lazy[id(o)]
            outside, item = entry(c, source, v)
            c.guard(item, "present" if outside in original else "absent", None)
            return outside in original
        observe(c, o)
    if isinstance(o, (list, tuple)):
        escape(c, o)
        escape(c, v)
    calls.leak_inside(c, (o, v))
    if isinstance(o, (list, tuple, dict, set, frozenset, collections.deque)):
        told_apart(c, v, o)
        if type(v) is calls.Id and v not in o and any(type(x) is int for x in o):
            v = calls.real_id(c, v)
    return v in o


def iterate(c, o):
    c.touch(o)
    if id(o) in c.outside_iterators:
        c.sharp("an iterator from outside is advanced, and stays advanced only for the call that captured the program")
    t = type(o)
    if t is TensorProxy:
        return iter(o)
    if t is set and id(o) in c.pristine and o == c.pristine[id(o)][2]:
        return iter(c.elements(c.pristine[id(o)][0]))  # a copy may have another order
    return iter(o)


def attribute_dict(c, o, value: dict, source):
    """`o.__dict__` of an outside object: a plain copy, each entry read through its attribute."""
    c.guard(source.attr("__dict__"), "keys", tuple(value))
    names = [*value, *(n for i, n in c.overlay if i == id(o) and n not in value)]
    entries = source.attr("__dict__")  # where a class's descriptor hides the attribute
    hidden = {k for k in value if hasattr(type(type_attribute(type(o), k)), "__set__")}
    copy = {
        k: c.overlay[id(o), k] if (id(o), k) in c.overlay else c.read(value[k], entries.item(k) if k in hidden else source.attr(k)) for k in names
    }  # fmt: skip
    copy = {k: x for k, x in copy.items() if type(x).__name__ != "_Deleted"}
    c.attribute_dicts[id(copy)] = (copy, o, dict(copy))
    return copy


def written_attributes(c, d) -> None:
    """What the program did to `o.__dict__` it did to o."""
    known = c.attribute_dicts.get(id(d))
    if known is None:
        return
    copy, o, was = known
    for k in [k for k in was if k not in copy]:
        del was[k]
        c.own_delete(o, k)
    for k, v in copy.items():
        if k not in was or was[k] is not v:
            was[k] = v
            c.own_store(o, k, v)


def changed(c) -> list[tuple]:
    """What the program did to outside containers: (kind, original, source, key, value)."""
    found: list[tuple] = []
    for sid, (original, source) in c.lazy.items():  # only written to, or single keys read
        s = c.keep[sid]
        mine = c.read_items.get(sid, {})
        if isinstance(s, dict):
            found += [("item", original, source, k, v) for k, v in container_base(type(s)).items(s) if k not in mine or mine[k] is not v]
            found += [("delitem", original, source, k, None) for k in mine if k not in s]
        elif s:
            found.append(("extend", original, source, None, list(s)))
    for sid, (original, source, was) in c.pristine.items():
        s = c.keep[sid]
        if isinstance(s, dict):
            found += _changed_dict(dict(container_base(type(s)).items(s)), was, original, source)
        elif isinstance(s, set):
            if s != was:
                found.append(("set", original, source, None, set(s)))
        elif len(s) != len(was) or any(a is not b for a, b in zip(s, was, strict=True)):
            grown = len(s) > len(was) and all(a is b for a, b in zip(s, was, strict=False))
            found.append(("extend", original, source, None, list(s)[len(was) :]) if grown else ("replace", original, source, None, list(s)))
    for kind, original, source, k, _ in found:
        if kind == "item":
            c.written.add(entry(c, source, k)[1])
        elif kind == "replace":
            c.written.update(source.item(i) for i in range(len(original)))
    return found


def _changed_dict(s: dict, was: dict, original, source) -> list[tuple]:
    if [k for k in s if k in was] != [k for k in was if k in s]:  # the order of what stayed changed
        return [("replacedict", original, source, None, dict(s))]
    out = [("delitem", original, source, k, None) for k in was if k not in s]
    return out + [("item", original, source, k, v) for k, v in s.items() if k not in was or was[k] is not v]
