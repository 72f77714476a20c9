"""Items, containment, iteration, length and truth (Objects/abstract.c, iterobject.c)."""

from __future__ import annotations

import sys
from typing import Any, cast

from thunder.interpreter.attributes import call_special, in_python, load_attr
from thunder.interpreter.binding import of
from thunder.interpreter.instructions import NULL, PLAIN
from thunder.interpreter.operators import index
from thunder.interpreter.tables import VERSION
from thunder.interpreter.tracebacks import swallow

INDEXED = (list, tuple, str, bytes, bytearray, range)


def getitem(host, value, key):
    """`value[key]`."""
    kind = type(value)
    method = host.lookup(kind, "__getitem__")
    if in_python(method):
        return call_special(host, method, value, [key], "__getitem__")
    if issubclass(type(value), type) and method is NULL and value is not type:
        try:
            hook = load_attr(host, value, "__class_getitem__")
        except AttributeError as error:
            swallow(error)
            hook = None
        if hook is not None:
            return host.call(hook, [key], {})
    if issubclass(type(value), dict) and kind is not dict:
        missing = host.lookup(kind, "__missing__")
        if in_python(missing) and method is dict.__getitem__ and dict.get(cast(dict, value), key, NULL) is NULL:
            return call_special(host, missing, value, [key], "__missing__")
    return host.native_getitem(value, _key(host, value, key))


def _key(host, value, key):
    """An index of a builtin sequence as an int, where `__index__` is written in Python."""
    if issubclass(type(value), INDEXED) and in_python(host.lookup(type(key), "__index__")):
        return index(host, key)
    if type(key) is slice and issubclass(type(value), INDEXED):
        parts = (key.start, key.stop, key.step)
        if any(in_python(host.lookup(type(part), "__index__")) for part in parts):
            # no generator, which makes a RuntimeError of StopIteration
            return slice(*[part if part is None else index(host, part) for part in parts])
    return key


def setitem(host, value, key, new):
    """`value[key] = new`."""
    method = host.lookup(type(value), "__setitem__")
    if in_python(method):
        call_special(host, method, value, [key, new], "__setitem__")
    else:
        host.native_setitem(value, _key(host, value, key), new)


def delitem(host, value, key):
    """`del value[key]`."""
    method = host.lookup(type(value), "__delitem__")
    if in_python(method):
        call_special(host, method, value, [key], "__delitem__")
    else:
        host.native_delitem(value, _key(host, value, key))


def contains(host, value, item):
    """`item in value`."""
    kind = type(value)
    method = host.lookup(kind, "__contains__")
    if in_python(method) and method is not None:
        return host.truth(call_special(host, method, value, [item], "__contains__"))
    if method is None:
        raise TypeError(f"'{kind.__name__}' object is not a container")
    if method is NULL and (in_python(host.lookup(kind, "__iter__")) or in_python(host.lookup(kind, "__getitem__"))):
        try:
            iterator = host.iterate(value)
        except TypeError as error:
            swallow(error)
            iterator = None
        # native code words the error
        return item in type(kind.__name__, (), {})() if iterator is None else found_in(host, iterator, item)
    base: Any = next((base for base in (list, tuple) if issubclass(kind, base)), None)
    if base is not None and any(
        in_python(host.lookup(t, "__eq__")) for t in {type(item), *map(type, base.__iter__(value))} - PLAIN
    ):
        own = host.lookup(kind, "__iter__") is not base.__iter__  # which native code does not ask
        return found_in(host, base.__iter__(value) if own else host.native_iter(value), item)
    return host.native_contains(value, item)


def found_in(host, iterator, item):
    """Whether an iterator gives the item itself, or something equal."""
    while True:
        try:
            element = host.next(iterator)
        except StopIteration as stop:
            swallow(stop)
            return False
        if element is item or host.truth(host.compare("==", element, item)):
            return True


# ---------------------------------------------------------------- iteration


def _no_iterator(kind: type, result_type: str) -> str:
    if VERSION < (3, 15):
        return f"iter() returned non-iterator of type '{result_type}'"
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}.__iter__() must return an iterator, not {result_type}"


def iterate(host, value):
    """`iter(value)`."""
    kind = type(value)
    method = host.lookup(kind, "__iter__")
    if in_python(method) and method is not None:
        iterator = call_special(host, method, value, [], "__iter__")
        if host.lookup(type(iterator), "__next__") is NULL:
            raise TypeError(_no_iterator(kind, type(iterator).__name__))
        return iterator
    if method is NULL and in_python(host.lookup(kind, "__getitem__")):
        return Items(host, value)
    return host.native_iter(value)


class Items:
    """The iterator of an object that has only `__getitem__`: items 0, 1, 2 ... until an IndexError."""

    __slots__ = ("host", "value", "position")

    def __init__(self, host, value):
        self.host, self.value, self.position = host, value, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.value is NULL:
            raise StopIteration
        try:
            item = self.host.getitem(self.value, self.position)
        except (IndexError, StopIteration) as error:
            swallow(error)
            item = self.value = NULL
        if item is NULL:
            raise StopIteration
        self.position += 1
        return item


def following(host, iterator):
    """`next(iterator)`."""
    method = host.lookup(type(iterator), "__next__")
    if in_python(method) and type(iterator) not in NATIVE_ITERATORS:
        return call_special(host, method, iterator, [], "__next__")
    return host.native_next(iterator)


class Steps:
    """An iterator of a value for native code, whose steps come back to the host."""

    __slots__ = ("host", "iterator", "value")

    def __init__(self, host, iterator, value):
        self.host, self.iterator, self.value = host, iterator, value

    def __length_hint__(self):
        """The answer to native code that makes a list (PyObject_LengthHint)."""
        kind = type(self.value)
        if in_python(self.host.lookup(kind, "__len__")):
            try:
                count = length(self.host, self.value)
                return count if type(count) is int else NotImplemented
            except TypeError as error:
                swallow(error)
        elif self.host.lookup(kind, "__len__") is not NULL:
            return NotImplemented
        method = self.host.lookup(kind, "__length_hint__")
        if not in_python(method):
            return NotImplemented
        return call_special(self.host, method, self.value, [], "__length_hint__")

    def __iter__(self):
        return self

    def __next__(self):
        return self.host.next(self.iterator)


NATIVE_ITERATORS = {Items, Steps}  # of the interpreter's own


def iterates_in_python(host, value, counted: bool = False) -> bool:
    """Whether code of the user's gives the elements of a value. counted: or says how many there are."""
    kind = type(value)
    method = host.lookup(kind, "__iter__")
    if method is NULL:
        return in_python(host.lookup(kind, "__getitem__"))
    names = ("__len__", "__length_hint__") if counted else ()
    return in_python(method) or any(in_python(host.lookup(kind, name)) for name in names)


def steps(host, value):
    """`iter(value)`, for native code."""
    iterator = host.iterate(value)
    method = host.lookup(type(iterator), "__next__")
    told = any(in_python(host.lookup(type(value), name)) for name in ("__len__", "__length_hint__"))
    if told or in_python(method) and type(iterator) not in NATIVE_ITERATORS:
        return Steps(host, iterator, value)
    return iterator


# ---------------------------------------------------------------- length and truth


def length(host, value):
    """`len(value)`."""
    method = host.lookup(type(value), "__len__")
    if not in_python(method):
        return host.native_len(value)
    result = call_special(host, method, value, [], "__len__")
    fits = type(result) is int and 0 <= result <= sys.maxsize
    return result if fits else host.converted(len, type(value), "__len__", result)


def truth(host, value):
    """`bool(value)`."""
    kind = type(value)
    method = host.lookup(kind, "__bool__")
    if in_python(method):
        result = call_special(host, method, value, [], "__bool__")
        return result if type(result) is bool else host.converted(bool, kind, "__bool__", result)
    if method is NULL and in_python(host.lookup(kind, "__len__")):
        return host.truth(length(host, value))
    return host.native_truth(value)


# ---------------------------------------------------------------- the same as functions


def _next(host, function, args, kwargs):
    if kwargs or len(args) not in (1, 2) or host.lookup(type(args[0]), "__next__") is NULL:
        return host.call_native(function, args, kwargs)
    if len(args) == 1:
        return host.next(args[0])
    try:
        return host.next(args[0])
    except StopIteration as stop:
        swallow(stop)
        return args[1]


def _reversed(host, function, args, kwargs):
    method = host.lookup(type(args[0]), "__reversed__") if len(args) == 1 and not kwargs else NULL
    if in_python(method) and method is not None:
        return call_special(host, method, args[0], [], "__reversed__")
    if method is NULL and len(args) == 1 and in_python(host.lookup(type(args[0]), "__getitem__")):
        return _backwards(host, args[0], length(host, args[0]))
    return host.call_native(function, args, kwargs)


def _backwards(host, value, size):
    for position in range(size - 1, -1, -1):
        try:
            item = host.getitem(value, position)
        except (IndexError, StopIteration) as error:
            swallow(error)
            return
        yield item


CALLS = {
    len: of(1)(length),
    bool: of(1)(lambda host, value: host.truth(value)),
    next: _next,
    reversed: _reversed,
}
