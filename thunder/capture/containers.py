"""Containers from outside: read through snapshots, whose children have sources, and whose changes are effects.

A snapshot is an empty container of the same type that stands for the original; `materialize` fills it and asks for the
length or the keys. A list or dict of which only single items are read is asked for those only. One that is long and
holds nothing but data is asked for its content at once.
"""

from __future__ import annotations

import collections
import operator
import types
from typing import Any

import torch

from thunder.capture.identities import real_id, told_apart
from thunder.capture.interface import Capture
from thunder.capture.native import CONTAINERS, IDENTICAL, PRIMITIVE, container_base, slots
from thunder.capture.numbers import length as known_length
from thunder.capture.numbers import source_of
from thunder.capture.state import AttributeDict, Look
from thunder.capture.world import CONTENT, ELEMENTS, HOLDS, KEYS, LENGTH, MISSING, PRESENT, SAME, TYPE, Source, is_data
from thunder.capture.world import length as native_length
from thunder.core.proxies import NumberProxy, TensorProxy, concrete, extreme
from thunder.interpreter import NULL
from thunder.interpreter.attributes import plain_attribute, type_attribute

LARGE = 16  # a longer list, tuple or dict of nothing but data is asked for its content


def snapshot(c: Capture, value, source: Source):
    """The snapshot of a container that came in through a source."""
    s = _known(c, value, source)
    if s is not None:
        return s
    s = _empty(c, value, source)
    c.world.ask(source, TYPE)
    if isinstance(value, collections.deque):
        c.reach(source.attr("maxlen"))
    return s


def _known(c: Capture, value, source: Source):
    """The snapshot of a container that has come in before, through this source or another one; None for others."""
    s = c.containers.snapshots.get(id(value))
    if s is not None and c.world.sources[id(s)] is not source:
        c.world.ask(source, SAME, c.world.sources[id(s)])
    if s is not None and c.containers.looks[id(s)].by_position and not _is_called_by_position(c):
        c.world.ask(source, KEYS)
    return s


def _is_called_by_position(c: Capture) -> bool:
    """Whether the code that runs is that of calls of modules, which the keys of hooks mean nothing to."""
    return c.stack_of_frames[-1].fn.__globals__ is vars(torch.nn.modules.module)


def held(c: Capture, value):
    """What native code gives, with the snapshots of the containers from outside that are in it: an object in C that
    came from outside keeps those themselves."""
    known = c.containers.snapshots
    if not known or type(value) not in (tuple, list) or id(value) in known:
        return known.get(id(value), value)
    elements = [held(c, x) if type(x) is tuple else known.get(id(x), x) for x in value]
    if all(map(operator.is_, elements, value)):
        return value
    if type(value) is tuple:
        return tuple(elements)
    value[:] = elements
    return value


def _stand_for(c: Capture, s, value, source: Source) -> Look:
    look = c.containers.looks[id(s)] = Look(value, source)
    c.containers.snapshots[c.world.hold(value)] = s
    c.world.know(s, source)
    return look


def _empty(c: Capture, value, source: Source):
    """A container without elements that stands for one from outside."""
    t: Any = type(value)
    s = t.__new__(t)  # no __init__: a subclass's may want arguments, or do something
    if isinstance(value, collections.defaultdict):
        s.default_factory = value.default_factory
    elif isinstance(value, collections.deque):
        collections.deque.__init__(s, maxlen=value.maxlen)
    if t.__dictoffset__:
        plain_attribute(s, "__dict__").update(plain_attribute(value, "__dict__"))
    for name in slots(t) if t not in CONTAINERS else ():
        if (held := plain_attribute(value, name, MISSING)) is not MISSING:
            object.__setattr__(s, name, held)
    c.containers.lazy[id(s)] = _stand_for(c, s, value, source)
    return s


def materialize(c: Capture, s) -> None:
    """Somebody looks at all of a snapshot."""
    settle(c, s)
    look = c.containers.lazy.pop(id(s))
    if (known := c.containers.attribute_dicts.get(id(s))) is not None:
        _fill_attributes(c, known, look)
        return
    source, value = look.source, look.original
    base = container_base(type(value))
    if type(value) in (list, dict) and len(value) > LARGE and _is_settled(c, look) and is_data(value):
        c.world.ask(source, CONTENT)
        c.containers.data.add(id(s))
        _fill(s, look, base, [data(c, x, source.item(k)) for k, x in _pairs(value)])
    elif base is set:
        c.world.ask(source, ELEMENTS)
        elements = c.elements(set.__iter__(value))
        look.was = set(elements)
        set.update(s, elements)
    elif issubclass(base, dict):
        if any(isinstance(k, torch.Tensor) for k in base.keys(value)):
            c.refuse(
                "the program reads all entries of a dict from outside whose keys are tensors",
                "read the entries of single tensors",
            )
        c.world.ask(source, LENGTH if look.by_position else KEYS)
        if isinstance(value, collections.defaultdict):  # native code copies it
            c.reach(source.attr("default_factory"))
        c.elements(base.keys(value))
        hidden = dict.fromkeys(base.keys(s), MISSING) | look.items  # by items of the program
        at = {k: source.child("nth", i) if look.by_position else source.item(k) for i, k in enumerate(base.keys(value))}
        _fill(s, look, base, [hidden[k] if k in hidden else c.read(x, at[k]) for k, x in base.items(value)])
    else:
        n = c.world.ask(source, LENGTH)
        read = {(k if k >= 0 else k + n): x for k, x in look.items.items()}
        items = enumerate(base.__iter__(value))
        _fill(s, look, base, [read[i] if i in read else c.read(x, source.item(i)) for i, x in items])


def _fill(s, look: Look, base: type, children: list) -> None:
    """Put the elements from outside into a snapshot, before those that the program has added."""
    if issubclass(base, dict):
        added = dict(base.items(s))
        base.clear(s)
        look.was = dict(zip(base.keys(look.original), children, strict=True))
        for k, x in (*look.was.items(), *added.items()):
            base.__setitem__(s, k, x)
    else:
        added = list(base.__iter__(s))
        base.clear(s)
        look.was = children
        base.extend(s, children + added)


def _pairs(value):
    return value.items() if isinstance(value, dict) else enumerate(value)


def _is_settled(c: Capture, look: Look) -> bool:
    """Whether no item was read by itself, and no number in it is to stay symbolic."""
    path = c.world.describe(look.source) if c.request.changing else ""
    return not look.items and not c.numbers.symbolic and not any(p.startswith(path) for p in c.request.changing)


def data(c: Capture, value, source: Source):
    """A part of a value that is asked for its content: of a list or dict a snapshot, filled."""
    if type(value) is tuple and not {list, tuple, dict}.isdisjoint(map(type, value)):
        inside = [data(c, x, source.item(i)) for i, x in enumerate(value)]
        return value if all(map(operator.is_, inside, value)) else tuple(inside)
    if type(value) not in (list, dict):
        return value
    s = c.containers.snapshots.get(id(value))
    if s is None:
        s = _empty(c, value, source)
        c.containers.data.add(id(s))
        look = c.containers.lazy.pop(id(s))
        _fill(s, look, type(value), [data(c, x, source.item(k)) for k, x in _pairs(value)])
    elif id(s) in c.containers.lazy:
        materialize(c, s)
    return s


# ---------------------------------------------------------------- single items


def length(c: Capture, s) -> Any:
    """The length of a list or a deque that nobody has looked at as a whole; the snapshot holds the program's own
    items."""
    look = c.containers.lazy[id(s)]
    n = known_length(c, native_length(look.original), look.source) + native_length(s)
    limit = s.maxlen if isinstance(s, collections.deque) else None
    return n if limit is None else extreme("min", n, limit)


def list_item(c: Capture, s, k: int):
    """One item of a list that nobody has looked at as a whole; NULL where the length says whose item it is."""
    if list.__len__(s):
        return list.__getitem__(s, k) if -list.__len__(s) <= k < 0 else NULL  # the program has appended it
    look = c.containers.lazy[id(s)]
    if k not in look.items:
        item = c.reach(look.source.item(k))
        if item is MISSING:
            raise IndexError("list index out of range")
        look.items[k] = item
    return look.items[k]


def dict_item(c: Capture, s, k, *default):
    """One key of a dict that nobody has read as a whole: that key is asked, no other."""
    settle(c, s)
    if dict.__contains__(s, k):
        return dict.__getitem__(s, k)
    k, look = real_id(c, k), c.containers.lazy[id(s)]
    if (known := c.containers.attribute_dicts.get(id(s))) is not None:
        entry_value = _attribute(c, known, look, k)
        if entry_value is MISSING and not default:
            raise KeyError(k)
        return default[0] if entry_value is MISSING else entry_value
    outside, item = entry(c, look.source, k)
    if dict.__contains__(look.original, outside):
        child = c.read(dict.__getitem__(look.original, outside), item)
        look.items[k] = child
        container_base(type(s)).__setitem__(s, k, child)
        return child
    c.world.ask(item, PRESENT)
    if default:
        return default[0]
    if type(look.original) is collections.defaultdict:
        return made_by_factory(c, s, k)
    if hasattr(type(look.original), "__missing__"):
        materialize(c, s)
        return s[k]
    raise KeyError(k)


def has_key(c: Capture, s, k) -> bool:
    """`k in s`, of a dict that nobody has read as a whole."""
    settle(c, s)
    if k in s:
        return True
    if (known := c.containers.attribute_dicts.get(id(s))) is not None:
        written = c.effects.value(known.owner, k)
        if written is not NULL:
            return not _is_deleted(written)
    return c.world.ask(entry(c, c.containers.lazy[id(s)].source, k)[1], PRESENT)


def has_element(c: Capture, s, v) -> bool | None:
    """`v in s`, of a set that nobody has read as a whole; None where comparing runs code that is not Python's."""
    look = c.containers.lazy[id(s)]
    if type(s) is not set or not all(map(_compares_by_itself, (v, *look.original))):
        return None
    return c.world.ask(look.source, HOLDS, v)


def _compares_by_itself(v) -> bool:
    """Whether no code of the user's compares a value with others."""
    return type(v) in PRIMITIVE or type(v) in IDENTICAL or type(v).__eq__ in (object.__eq__, type.__eq__)


def made_by_factory(c: Capture, s, k):
    """The value that a defaultdict makes for a key that it does not have."""
    factory = c.load_attr(s, "default_factory")
    if factory is None:
        raise KeyError(k)
    s[k] = item = c.call(factory, [], {})
    return item


def entry(c: Capture, source: Source, k) -> tuple:
    """(key in the outside dict, source of the item) for a key of its snapshot: the proxy of a tensor from
    outside stands for it."""
    if type(k) is not TensorProxy:
        k = real_id(c, k)
        told_apart(c, k, ())
        known = c.world.sources.get(id(k))
        itself = known is None or known.step == "const" or type(k) is torch.Generator and id(k) not in c.world.anew
        return k, source.item(k) if itself else source.child("keyed", known)
    real, real_source = c.tensors.real.get(c.recorder.memory.holder(k), (None, None))
    if real is None:
        c.refuse(
            "the program looks up a tensor that it created in a dict from outside",
            "use another key: a name, or a tensor from outside",
        )
    return real, source.child("keyed", real_source)


def item_at(c: Capture, s, k: NumberProxy):
    """The item under a number that stays symbolic, of a list or a dict that nobody has looked at as a whole; NULL where
    the program has written to it."""
    look = c.containers.lazy[id(s)]
    if not _is_place(k) or native_length(s) or look.late or not isinstance(s, (list, dict)) or _hides_missing(s):
        return NULL
    source_of_item = look.source.child("at", source_of(c, k))
    item = c.reach(source_of_item)
    if item is MISSING:
        raise KeyError(k.concrete()) if isinstance(s, dict) else IndexError("list index out of range")
    return item


def write_late(c: Capture, s, k, v) -> bool:
    """Write an item behind, or under, a number that stays symbolic to a dict that nobody has read as a whole."""
    look = c.containers.lazy.get(id(s)) if isinstance(s, dict) else None
    if look is None or not (look.late or _is_place(k)):
        return False
    look.late.append((k, v))
    return True


def settle(c: Capture, s) -> None:
    """A dict is read: what was written under numbers stands under their values."""
    look = c.containers.lazy[id(s)]
    for k, v in look.late:
        container_base(type(s)).__setitem__(s, concrete(k), v)
    look.late = []


def _is_place(k) -> bool:
    return isinstance(k, NumberProxy) and not k.unbacked and k.python_type is int


def _hides_missing(s) -> bool:
    return isinstance(s, collections.defaultdict) or hasattr(type(s), "__missing__")


# ---------------------------------------------------------------- changes


def attribute_dict(c: Capture, o, value: dict, source) -> dict:
    """`o.__dict__` of an outside object: a plain dict, the same one each time, which is filled like a snapshot. Each
    entry is read through its attribute."""
    if (copy := c.containers.attribute_dicts_of.get(id(o))) is None:
        copy = c.containers.attribute_dicts_of[id(o)] = {}
        c.containers.attribute_dicts[id(copy)] = AttributeDict(copy, o, {})
        c.containers.lazy[id(copy)] = Look(value, source.attr("__dict__"))
    return copy


def _attribute(c: Capture, known: AttributeDict, look: Look, name):
    """One entry of `o.__dict__`, as the program has it; MISSING where there is none."""
    copy, o, was = known
    if name not in copy:
        attribute = c.effects.value(o, name)
        if attribute is NULL:
            attribute = _outside_attribute(c, o, look, name)
        if attribute is MISSING or _is_deleted(attribute):
            return MISSING
        copy[name] = was[name] = attribute
    return copy[name]


def _is_deleted(value) -> bool:
    """Whether the program has deleted the attribute that stands under this value."""
    return type(value).__name__ == "_Deleted"


def _outside_attribute(c: Capture, o, look: Look, name):
    item, entries = look.source.item(name), look.original
    if name not in entries:
        c.world.ask(item, PRESENT)
        return MISSING
    hidden = hasattr(type(type_attribute(type(o), name)), "__set__")  # by a class's descriptor
    return c.read(entries[name], item if hidden else look.source.base.attr(name))


def _fill_attributes(c: Capture, known: AttributeDict, look: Look) -> None:
    """Somebody looks at all of an `o.__dict__`."""
    copy, o, was = known
    c.world.ask(look.source, KEYS)
    names = [*look.original, *(n for n in c.effects.names(o) if n not in look.original)]
    attributes = {name: x for name in names if (x := _attribute(c, known, look, name)) is not MISSING}
    for table in (copy, was):
        table.clear()
        table.update(attributes)


def write_attributes(c: Capture, d) -> None:
    """Write changes of `o.__dict__` to the attributes of o."""
    known = c.containers.attribute_dicts.get(id(d))
    if known is None:
        return
    copy, o, was = known
    for k in [k for k in was if k not in copy]:
        del was[k]
        c.own_delete(o, k)
    for k, v in copy.items():
        if k not in was or was[k] is not v:
            if type(type_attribute(type(o), k)) is types.GetSetDescriptorType:
                c.refuse(
                    f"{k!r} is assigned in the __dict__ of an object, and is not the name of an attribute",
                    "use another name",
                )
            was[k] = v
            c.own_store(o, k, v)


def changes(c: Capture) -> list[tuple]:
    """The changes of containers from outside: (kind, original, source, key, value)."""
    rows: list[tuple] = []
    for sid, look in c.containers.looks.items():
        rows += (changed := _changes(c.world.keep[sid], look))
        if look.by_position and changed:
            c.world.ask(look.source, KEYS)
    for kind, original, source, k, value in rows:
        if id(original) in c.outside.namespaces:
            c.refuse("globals() is written to", "assign the global by its name (global x; x = ...)")
        if kind == "item":
            source_of_key = source.child("at", source_of(c, k)) if _is_place(k) else entry(c, source, k)[1]
            c.effects.note({source_of_key: value})
        elif kind == "replace":
            n = native_length(original)
            c.effects.note(dict.fromkeys(source.item(i) for i in range(n)))
            c.effects.note({source.item(i): x for i, x in enumerate(value[:n])})
    return rows


def state(c: Capture) -> dict[Any, Any]:
    """The program's writes to attributes, variables and containers outside so far, to compare with later ones."""
    identities: dict[Any, Any] = {key: id(value) for key, value in c.effects.held.items()}
    for kind, original, _, key, value in changes(c):
        identities[kind, id(original), id(key)] = _identities(kind, value)
    return identities


def _identities(kind: str, value) -> Any:
    """A change of a container, to compare: values by their identity, but for a container that stands for the whole."""
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, set)) else ()
    identities = map(id, inside)
    return id(value) if kind == "item" else None, tuple(sorted(identities) if type(value) is set else identities)


def is_changed(c: Capture, s) -> bool:
    """Whether a value is a snapshot that the program has changed."""
    look = c.containers.looks.get(id(s))
    return look is not None and bool(_changes(s, look))


def _changes(s, look: Look) -> list[tuple]:
    """(kind, original, source, key, value) of each change of one snapshot."""
    original, source, was = look.original, look.source, look.was
    if isinstance(s, dict) and was is None:  # only written to, or single keys read
        now, mine = container_base(type(s)).items(s), look.items
        rows = [("item", original, source, k, v) for k, v in now if k not in mine or mine[k] is not v]
        rows += [("item", original, source, k, v) for k, v in look.late]
        return rows + [("delitem", original, source, k, None) for k in mine if not dict.__contains__(s, k)]
    if isinstance(s, dict):
        return _changed_dict(dict(container_base(type(s)).items(s)), was, original, source)
    if isinstance(s, set):
        now = set(set.__iter__(s))
        # an element may have given way to one that equals it
        differs = was is not None and set(map(id, now)) != set(map(id, was))
        return [("set", original, source, None, now)] if differs else []
    s = list(container_base(type(s)).__iter__(s))
    if was is None:
        return [("extend", original, source, None, s)] if s else []
    if len(s) == len(was) and all(map(operator.is_, s, was)):
        return []
    grown = len(s) > len(was) and all(a is b for a, b in zip(s, was, strict=False))
    return [("extend", original, source, None, s[len(was) :]) if grown else ("replace", original, source, None, s)]


def _changed_dict(s: dict, was: dict, original, source) -> list[tuple]:
    written = [k for k in was if k in s] + [k for k in s if k not in was]  # what is new is written behind what stayed
    if len(s) != len(written) or not all(map(operator.is_, s, written)):  # a key, to one that equals it
        return [("replacedict", original, source, None, dict(s))]
    out = [("delitem", original, source, k, None) for k in was if k not in s]
    return out + [("item", original, source, k, v) for k, v in s.items() if k not in was or was[k] is not v]
