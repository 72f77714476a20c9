"""`str`, `repr`, `format` and `isinstance` with special methods written in Python interpreted (Objects/object.c)."""

from __future__ import annotations

import _string  # as string.Formatter does
import types
from typing import Any

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
    if holds_python(host, value):
        return _container(host, value)
    return _text(host, repr, host.lookup(type(value), "__repr__"), value, "__repr__")


BRACKETS: dict[Any, Any] = {list: "[]", tuple: "()", dict: "{}", set: "{}", frozenset: ("frozenset({", "})")}


def bracketed(host, kind: type) -> Any:
    """The builtin container whose text objects of a class have, or None."""
    if kind in BRACKETS:
        return kind
    base = next((b for b in (list, tuple, dict) if issubclass(kind, b)), None)
    return base if base is not None and host.lookup(kind, "__repr__") is base.__repr__ else None


def holds_python(host, value) -> bool:
    """Whether a value is a container, written in brackets, of something whose `__repr__` is written in Python, at any
    depth."""
    if bracketed(host, type(value)) is None:
        return False
    pending, seen, kinds = [value], set(), set()
    while pending:
        value = pending.pop()
        base = bracketed(host, type(value))
        if base is None:
            kinds.add(type(value))
        elif id(value) not in seen:
            seen.add(id(value))
            host.materialize(value)
            pending += (*dict.keys(value), *dict.values(value)) if base is dict else base.__iter__(value)
    return any(in_python(host.lookup(kind, "__repr__")) for kind in kinds)


def is_in_python(host, kind: type) -> bool:
    """Whether a text of objects of a class is made in Python."""
    return any(in_python(host.lookup(kind, name)) for name in ("__repr__", "__str__", "__format__"))


def _container(host, value) -> str:
    """list_repr, tuplerepr, dict_repr and set_repr."""
    base = bracketed(host, type(value))
    before, after = BRACKETS[base]
    if id(value) in host.shown:
        return f"{before}...{after}" if base in (list, tuple, dict) else f"{base.__name__}(...)"
    host.shown.add(id(value))
    try:
        if base is dict:
            items = [map(host.handed, (representation(host, k), representation(host, x))) for k, x in dict.items(value)]
            parts = [": ".join(item) for item in items]
        else:
            inside = host.steps(value) if base is type(value) else base.__iter__(value)
            parts = [host.handed(representation(host, x)) for x in inside]
    finally:
        host.shown.discard(id(value))
    return f"{before}{', '.join(parts)}{',' if base is tuple and len(parts) == 1 else ''}{after}"


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


def looks_inside(template: str) -> bool:
    """Whether a field of a text for `format` looks into a value: `{0.name}`, `{0[key]}`."""
    try:
        fields = [field for _, field, *_ in _string.formatter_parser(template) if field is not None]
        return any(list(_string.formatter_field_name_split(field)[1]) for field in fields)
    except ValueError:  # which `format` words
        return False


def _format(host, function, args, kwargs):
    if len(args) not in (1, 2) or kwargs or len(args) == 2 and not isinstance(args[1], str):
        return host.call_native(function, args, kwargs)
    return formatted(host, args[0], args[1] if len(args) > 1 else "")


def _ascii(host, function, args, kwargs):
    if len(args) != 1 or kwargs:
        return host.call_native(function, args, kwargs)
    found = host.call(repr, args, {})
    encoded = host.call(host.load_attr(found, "encode"), ["ascii", "backslashreplace"], {})
    return host.call(host.load_attr(encoded, "decode"), ["ascii"], {})


def is_instance(host, value, cls):
    """`isinstance(value, cls)`, or a member of a tuple or union of classes."""
    return _asks(host, "__instancecheck__", host.native_isinstance, value, cls)


def is_subclass(host, value, cls):
    """`issubclass(value, cls)`."""
    return _asks(host, "__subclasscheck__", host.native_issubclass, value, cls)


def _asks(host, name, natively, value, cls):
    if type(cls) is type or name == "__instancecheck__" and type(value) is cls:
        return natively(value, cls)
    if type(cls) is types.UnionType:
        cls = cls.__args__
    if isinstance(cls, tuple):
        return any(_asks(host, name, natively, value, c) for c in tuple.__iter__(cls))
    hook = host.lookup(type(cls), name)
    if not host.asks_in_python(hook, value):
        return natively(value, cls)
    return host.truth(call_special(host, hook, cls, [value], name))


CALLS = {
    str: of(1)(string), repr: of(1)(representation), format: _format, ascii: _ascii,
    isinstance: of(2)(is_instance), issubclass: of(2)(is_subclass),
}  # fmt: skip
