"""Making objects: `C(...)` with the Python code in it interpreted. Class statements run natively."""

from __future__ import annotations

import types

from thunder.interpreter.attributes import in_python
from thunder.interpreter.operators import derives

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
        instance = host.call(new, [cls, *args], kwargs)
    elif new is object.__new__:
        instance = object.__new__(cls) if initialize_is_python else object.__new__(cls, *args, **kwargs)
    else:
        instance = host.call_native(cls.__new__, [cls, *args], kwargs)
    if not derives(type(instance), cls):
        return instance
    initialize = host.lookup(type(instance), "__init__")
    if type(initialize) is FUNCTION:
        result = host.call(initialize, [instance, *args], kwargs)
    else:
        result = host.call_native(type(instance).__init__, [instance, *args], kwargs)
    if result is not None:
        raise TypeError(f"__init__() should return None, not '{type(result).__name__}'")
    return instance


def _type_call(host, function, args, kwargs):
    """type.__call__ called by name: `super().__call__(...)` in a metaclass."""
    return type_call(host, args[0], args[1:], kwargs)


_TYPE_CALL = type.__dict__["__call__"]
CALLS = {_TYPE_CALL: _type_call}
