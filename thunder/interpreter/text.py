"""`str`, `repr`, `format` and `isinstance` with special methods written in Python interpreted (Objects/object.c)."""

from __future__ import annotations

import types

from thunder.interpreter.attributes import call_special, in_python
from thunder.interpreter.binding import of
from thunder.interpreter.building import CONVERSIONS


def string(host, value):
    """`str(value)`."""
    method = host.lookup(type(value), "__str__")
    if method is object.__str__:
        return representation(host, value)
    return _text(host, str, method, value, "__str__")


def representation(host, value):
    """`repr(value)`."""
    return _text(host, repr, host.lookup(type(value), "__repr__"), value, "__repr__")


def _text(host, function, method, value, name):
    if not in_python(method):
        return host.native_text(function, value)
    result = call_special(host, method, value, [], name)
    return result if type(result) is str else host.converted(function, type(value), name, result)


def formatted(host, value, spec):
    """`format(value, spec)`."""
    method = host.lookup(type(value), "__format__")
    if method is object.__format__ and spec == "":
        return string(host, value)
    if not in_python(method):
        return host.native_text(format, value, spec)
    result = call_special(host, method, value, [spec], "__format__")
    return result if type(result) is str else host.converted(format, type(value), "__format__", result, spec)


def format_value(host, value, conversion, spec):
    """f"{value!r:spec}"; conversion is 0 (none), 1 (str), 2 (repr) or 3 (ascii)."""
    if conversion:
        value = host.call(CONVERSIONS[conversion], [value], {})
    return formatted(host, value, spec)


def _format(host, function, args, kwargs):
    if len(args) not in (1, 2) or kwargs or len(args) == 2 and not isinstance(args[1], str):
        return host.call_native(function, args, kwargs)
    return formatted(host, args[0], args[1] if len(args) > 1 else "")


def is_instance(host, value, cls):
    """`isinstance(value, cls)`, or a member of a tuple or union of classes."""
    return _asks(host, "__instancecheck__", host.native_isinstance, value, cls)


def is_subclass(host, value, cls):
    """`issubclass(value, cls)`."""
    return _asks(host, "__subclasscheck__", host.native_issubclass, value, cls)


def _asks(host, name, natively, value, cls):
    """`isinstance` or `issubclass`, with the hooks of metaclasses interpreted."""
    if type(cls) is type or name == "__instancecheck__" and type(value) is cls:
        return natively(value, cls)
    if type(cls) is types.UnionType:
        cls = cls.__args__
    if issubclass(type(cls), tuple):
        return any(_asks(host, name, natively, value, c) for c in tuple.__iter__(cls))
    hook = host.lookup(type(cls), name)
    if not host.asks_in_python(hook, value):
        return natively(value, cls)
    return host.truth(call_special(host, hook, cls, [value], name))


CALLS = {
    str: of(1)(string), repr: of(1)(representation), format: _format,
    isinstance: of(2)(is_instance), issubclass: of(2)(is_subclass),
}  # fmt: skip
