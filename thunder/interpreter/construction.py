"""Making objects and classes: `C(...)` and `class C: ...` with the Python code in them interpreted."""

from __future__ import annotations

import abc
import sys
import types

from thunder.interpreter.attributes import cell_value, in_python, type_attribute
from thunder.interpreter.control import NULL
from thunder.interpreter.operators import derives
from thunder.interpreter.tracebacks import swallow

FUNCTION = types.FunctionType


def construct(host, cls, args, kwargs):
    """Call a class, as type.__call__ does, but with Python-level `__call__`, `__new__` and `__init__` interpreted."""
    kind = type(cls)
    if kind is not type:
        method = host.lookup(kind, "__call__")
        if type(method) is FUNCTION:
            return host.call(method, [cls, *args], kwargs)
        if method is not _TYPE_CALL:
            return host.call_native(cls, args, kwargs)
    return type_call(host, cls, args, kwargs)


def type_call(host, cls, args, kwargs):
    """type.__call__(cls, ...)."""
    new = host.lookup(cls, "__new__")
    initialize = host.lookup(cls, "__init__")
    if type(new) is staticmethod:
        new = new.__func__
    new_is_python, initialize_is_python = type(new) is FUNCTION, type(initialize) is FUNCTION
    natively = not (new_is_python or initialize_is_python or in_python(host.lookup(type(cls), "__call__")))
    if cls is type or natively:
        return host.call_native(cls, args, kwargs)
    if new_is_python:
        made = host.call(new, [cls, *args], kwargs)
    elif new is object.__new__:
        made = object.__new__(cls) if initialize_is_python else object.__new__(cls, *args, **kwargs)
    else:
        made = host.call_native(cls.__new__, [cls, *args], kwargs)
    if not derives(type(made), cls):
        return made
    initialize = host.lookup(type(made), "__init__")
    if type(initialize) is FUNCTION:
        result = host.call(initialize, [made, *args], kwargs)
    else:
        result = host.call_native(type(made).__init__, [made, *args], kwargs)
    if result is not None:
        raise TypeError(f"__init__() should return None, not '{type(result).__name__}'")
    return made


def _type_call(host, function, args, kwargs):
    """type.__call__ called by name: `super().__call__(...)` in a metaclass."""
    return type_call(host, args[0], args[1:], kwargs)


_TYPE_CALL = type.__dict__["__call__"]
CALLS = {_TYPE_CALL: _type_call}


def build_class(host, body, name, bases, keywords):
    """builtins.__build_class__ with an interpreted body, and the metaclass called through the host."""
    resolved = _resolve_bases(host, bases)
    keywords = dict(keywords)
    metaclass = keywords.pop("metaclass", None)
    if metaclass is None:
        metaclass = type(resolved[0]) if resolved else type
    if isinstance(metaclass, type):
        metaclass = _most_derived(metaclass, resolved)
    namespace = {}
    try:
        prepare = host.load_attr(metaclass, "__prepare__")
    except AttributeError as error:
        swallow(error)
        prepare = None
    if prepare is not None:
        namespace = host.call(prepare, [name, resolved], keywords)
        if type_attribute(type(namespace), "__getitem__") is NULL:
            shown = metaclass.__name__ if isinstance(metaclass, type) else "<metaclass>"
            raise TypeError(f"{shown}.__prepare__() must return a mapping, not {type(namespace).__name__}")
    cell = host.run_code(body.__code__, body.__globals__, namespace, body.__closure__)
    if resolved is not bases:
        namespace["__orig_bases__"] = bases
    named = _named_by_python(host, metaclass, resolved, namespace)
    for key in named:
        namespace[key] = None
    made = host.call(metaclass, [name, resolved, namespace], {} if named else keywords)
    for key, value in named.items():
        type.__setattr__(made, key, value)
    for key, value in named.items():
        _set_name(host, made, key, value)
    if named and keywords:
        super(made, made).__init_subclass__(**keywords)  # raises
    if type(cell) is types.CellType and isinstance(made, type):
        _check_class_cell(cell, made, name)
    return made


def _named_by_python(host, metaclass, bases, namespace) -> dict:
    """Attributes with a `__set_name__` written in Python, which `type.__new__` would call natively, by name.

    None where `__init_subclass__` follows, or where a metaclass of the program's sees the namespace.
    """
    if metaclass not in (type, abc.ABCMeta) or type(namespace) is not dict:
        return {}
    if any(host.lookup(base, "__init_subclass__") is not object.__dict__["__init_subclass__"] for base in bases):
        return {}
    return {
        key: value for key, value in namespace.items() if type(host.lookup(type(value), "__set_name__")) is FUNCTION
    }


def _set_name(host, cls, key, value):
    kind = type(value)
    try:
        host.call(host.lookup(kind, "__set_name__"), [value, cls, key], {})
        return
    except Exception as error:
        text = f"Error calling __set_name__ on {kind.__name__!r} instance {key!r} in {cls.__name__!r}"
        if sys.version_info < (3, 12):
            raise RuntimeError(text) from error
        error.add_note(text)
        raise


def _check_class_cell(cell, made, name):
    inside = cell_value(cell)
    if inside is None:
        raise RuntimeError(
            f"__class__ not set defining {name!r} as {made!r}. Was __classcell__ propagated to type.__new__?"
        )
    if inside is not made:
        raise TypeError(f"__class__ set to {inside!r} defining {name!r} as {made!r}")


def _resolve_bases(host, bases):
    """The bases with `__mro_entries__` replaced; the same tuple when there are none."""
    resolved, changed = [], False
    for base in bases:
        if isinstance(base, type) or not hasattr(base, "__mro_entries__"):
            resolved.append(base)
            continue
        entries = host.call(host.load_attr(base, "__mro_entries__"), [bases], {})
        if not isinstance(entries, tuple):
            raise TypeError("__mro_entries__ must return a tuple")
        resolved += entries
        changed = True
    return tuple(resolved) if changed else bases


def _most_derived(metaclass, bases):
    for base in bases:
        kind = type(base)
        if kind in metaclass.__mro__:
            continue
        if metaclass not in kind.__mro__:
            raise TypeError(
                "metaclass conflict: the metaclass of a derived class must be a (non-strict) subclass of the "
                "metaclasses of all its bases"
            )
        metaclass = kind
    return metaclass
