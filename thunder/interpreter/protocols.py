"""CPython's attribute, operator, comparison and iteration protocols, with Python-level special methods interpreted.

`Host` leaves these protocols to native code, where a user's `__add__`, `__getattr__` or property runs natively. A
`ProtocolHost` interprets them. Its parts are functions of a host, so that a subclass may use each where it wants to.
Every function falls back to the native operation when no Python-level method takes part.
"""

# The functions below name their first parameter `host`; as methods of ProtocolHost they override methods with `self`.
# pyright: reportAssignmentType=false

from __future__ import annotations

import functools
import operator
import types
from typing import Any

from thunder.interpreter.host import Host, type_attribute
from thunder.interpreter.instructions import NULL, provides
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS

FUNCTION = types.FunctionType
METHOD_OF = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
COMPARE_METHOD = {"<": "__lt__", "<=": "__le__", "==": "__eq__", "!=": "__ne__", ">": "__gt__", ">=": "__ge__"}
REFLECTED = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">": "<", ">=": "<="}
UNARY_METHOD = {"-": "__neg__", "+": "__pos__", "~": "__invert__"}
# Their `+` and `*` are tried after the other operand's reflected method, as CPython does for sequences.
SEQUENCES = (list, tuple, str, bytes, bytearray)


def python_method(kind, name):
    """The Python function that implements a special method of a type, or None."""
    found = type_attribute(kind, name)
    return found if type(found) is FUNCTION else None


# ---------------------------------------------------------------- attributes


def load_attr(host, value, name):
    """`value.name`: properties, descriptors, `__getattribute__` and `__getattr__` written in Python are interpreted."""
    kind = type(value)
    if kind is super:
        return _super_attribute(host, value, name)
    fallback = python_method(kind, "__getattr__")
    if fallback is None:
        return _attribute(host, value, kind, name)
    try:
        return _attribute(host, value, kind, name)
    except AttributeError:
        pass
    return host.call(fallback, [value, name], {})


def _attribute(host, value, kind, name):
    """The attribute without `__getattr__`."""
    reader = type_attribute(kind, "__getattribute__")
    if type(reader) is FUNCTION:
        return host.call(reader, [value, name], {})
    if isinstance(value, type):
        return _class_attribute(host, value, kind, name)
    found = type_attribute(kind, name)
    if found is not NULL:
        descriptor = type(found)
        if descriptor is property and found.fget is not None:
            return host.call(found.fget, [value], {})
        own: Any = getattr(value, "__dict__", ()) if descriptor not in _NEVER_PYTHON else ()
        if descriptor is functools.cached_property and name not in own:
            result = own[name] = host.call(found.func, [value], {})
            return result
        get = python_method(descriptor, "__get__")
        if get is not None and (name not in own or provides(descriptor, "__set__") or provides(descriptor, "__delete__")):
            return host.call(get, [found, value, kind], {})
    return reader(value, name) if python_method(kind, "__getattr__") else getattr(value, name)


_NEVER_PYTHON = {FUNCTION, property, classmethod, staticmethod, types.MemberDescriptorType, types.GetSetDescriptorType}


def _class_attribute(host, cls, kind, name):
    in_meta = type_attribute(kind, name)
    if type(in_meta) is property and in_meta.fget is not None:
        return host.call(in_meta.fget, [cls], {})
    found = type_attribute(cls, name)
    if found is not NULL and type(found) not in _NEVER_PYTHON:
        get = python_method(type(found), "__get__")
        if get is not None:
            return host.call(get, [found, None, cls], {})
    return type.__getattribute__(cls, name) if python_method(kind, "__getattr__") else getattr(cls, name)


def _super_attribute(host, proxy, name):
    receiver, owner = proxy.__self__, proxy.__self_class__
    if receiver is not None:
        mro = owner.__mro__
        for base in mro[mro.index(proxy.__thisclass__) + 1 :]:
            if name in base.__dict__:
                found = base.__dict__[name]
                if type(found) is property and found.fget is not None and receiver is not owner:
                    return host.call(found.fget, [receiver], {})
                get = python_method(type(found), "__get__") if type(found) not in _NEVER_PYTHON else None
                if get is not None:
                    return host.call(get, [found, None if receiver is owner else receiver, owner], {})
                break
    return getattr(proxy, name)


def store_attr(host, value, name, new):
    kind = type(value)
    writer = python_method(kind, "__setattr__")
    if writer is not None:
        host.call(writer, [value, name, new], {})
        return
    found = type_attribute(kind, name)
    if type(found) is property and found.fset is not None:
        host.call(found.fset, [value, new], {})
    elif found is not NULL and (put := python_method(type(found), "__set__")) is not None:
        host.call(put, [found, value, new], {})
    else:
        setattr(value, name, new)


def delete_attr(host, value, name):
    kind = type(value)
    remover = python_method(kind, "__delattr__")
    if remover is not None:
        host.call(remover, [value, name], {})
        return
    found = type_attribute(kind, name)
    if type(found) is property and found.fdel is not None:
        host.call(found.fdel, [value], {})
    elif found is not NULL and (put := python_method(type(found), "__delete__")) is not None:
        host.call(put, [found, value], {})
    else:
        delattr(value, name)


# ---------------------------------------------------------------- operators


def binary(host, symbol, a, b):
    """`a + b` and `a += b`: in-place method, then the operands' methods in CPython's order (binary_op1)."""
    kind_a, kind_b = type(a), type(b)
    plain = symbol.removesuffix("=")
    name = METHOD_OF[plain]
    if plain != symbol:
        method = python_method(kind_a, f"__i{name}__")
        if method is not None:
            result = host.call(method, [a, b], {})
            if result is not NotImplemented:
                return result
        elif type_attribute(kind_a, f"__i{name}__") is not NULL:
            return ARITHMETIC[symbol](a, b)
    left, right = type_attribute(kind_a, f"__{name}__"), type_attribute(kind_b, f"__r{name}__")
    left_is_python, right_is_python = type(left) is FUNCTION, type(right) is FUNCTION
    if not left_is_python and not right_is_python:
        return ARITHMETIC[symbol](a, b)
    steps = [(left, a, b), (right, b, a)] if kind_a is not kind_b else [(left, a, b)]
    if kind_a is not kind_b and kind_a in kind_b.__mro__ and right is not type_attribute(kind_a, f"__r{name}__"):
        steps.reverse()
    elif isinstance(a, SEQUENCES) and not left_is_python and name in ("add", "mul"):
        steps.reverse()
        if name == "mul" and not provides(kind_b, "__index__"):
            steps[1] = (_no_multiple, a, b)
    for method, x, y in steps:
        if method is NULL or method is None:
            continue
        native = type(method) is not FUNCTION or method is _no_multiple
        result = method(x, y) if native else host.call(method, [x, y], {})
        if result is not NotImplemented:
            return result
    shown = {"**": "** or pow()"}.get(symbol, symbol)
    raise TypeError(f"unsupported operand type(s) for {shown}: '{kind_a.__name__}' and '{kind_b.__name__}'")


def _no_multiple(sequence, factor):
    raise TypeError(f"can't multiply sequence by non-int of type '{type(factor).__name__}'")


def unary(host, symbol, a):
    method = python_method(type(a), UNARY_METHOD[symbol])
    return host.call(method, [a], {}) if method is not None else Host.unary(host, symbol, a)


def compare(host, symbol, a, b):
    """Rich comparison (do_richcompare): a subclass's reflected method first, then forward, then reflected, then identity."""
    kind_a, kind_b = type(a), type(b)
    forward, reflected = COMPARE_METHOD[symbol], COMPARE_METHOD[REFLECTED[symbol]]
    if not (_compares_in_python(kind_a, forward) or _compares_in_python(kind_b, reflected)):
        return COMPARISONS[symbol](a, b)
    steps = [(a, forward, b), (b, reflected, a)]
    if kind_a is not kind_b and kind_a in kind_b.__mro__:
        steps.reverse()
    for x, name, y in steps:
        result = _compare_one(host, x, name, y)
        if result is not NotImplemented:
            return result
    if symbol in ("==", "!="):
        return (a is b) is (symbol == "==")
    raise TypeError(f"{symbol!r} not supported between instances of '{kind_a.__name__}' and '{kind_b.__name__}'")


def _compares_in_python(kind, name):
    return bool(python_method(kind, name) or (name == "__ne__" and python_method(kind, "__eq__")))


def _compare_one(host, a, name, b):
    method = type_attribute(type(a), name)
    if type(method) is FUNCTION:
        return host.call(method, [a, b], {})
    if method is object.__ne__ and (equal := python_method(type(a), "__eq__")) is not None:
        result = host.call(equal, [a, b], {})
        return result if result is NotImplemented else not host.truth(result)
    return NotImplemented if method is None or method is NULL else method(a, b)


# ---------------------------------------------------------------- containers and truth


def getitem(host, value, key):
    method = python_method(type(value), "__getitem__")
    if method is not None:
        return host.call(method, [value, key], {})
    if isinstance(value, type) and type_attribute(type(value), "__getitem__") is NULL:
        hook = type_attribute(value, "__class_getitem__")
        if type(hook) is classmethod and type(hook.__func__) is FUNCTION:
            return host.call(hook.__func__, [value, key], {})
    return _native_getitem(value, key)


_native_getitem: Any = operator.getitem


def setitem(host, value, key, new):
    method = python_method(type(value), "__setitem__")
    if method is not None:
        host.call(method, [value, key, new], {})
    else:
        value[key] = new


def delitem(host, value, key):
    method = python_method(type(value), "__delitem__")
    if method is not None:
        host.call(method, [value, key], {})
    else:
        del value[key]


def contains(host, value, item):
    method = type_attribute(type(value), "__contains__")
    if type(method) is FUNCTION:
        return host.truth(host.call(method, [value, item], {}))
    if method is NULL and python_method(type(value), "__iter__") is not None:
        iterator = host.iterate(value)
        while True:
            try:
                found = host.next(iterator)
            except StopIteration:
                return False
            if found is item or host.truth(host.compare("==", found, item)):
                return True
    return item in value


def iterate(host, value):
    method = python_method(type(value), "__iter__")
    if method is None:
        return iter(value)
    iterator = host.call(method, [value], {})
    if not provides(type(iterator), "__next__"):
        raise TypeError(f"iter() returned non-iterator of type '{type(iterator).__name__}'")
    return iterator


def following(host, iterator):
    method = python_method(type(iterator), "__next__")
    return host.call(method, [iterator], {}) if method is not None else next(iterator)


def truth(host, value):
    kind = type(value)
    method = type_attribute(kind, "__bool__")
    if type(method) is FUNCTION:
        result = host.call(method, [value], {})
        if not isinstance(result, bool):
            raise TypeError(f"__bool__ should return bool, returned {type(result).__name__}")
        return result
    if method is NULL and python_method(kind, "__len__") is not None:
        return length(host, len, [value], {}) != 0
    return bool(value)


def format_value(host, value, conversion, spec):
    if conversion:
        return Host.format_value(host, value, conversion, spec)
    method = python_method(type(value), "__format__")
    if method is None:
        return format(value, spec)
    result = host.call(method, [value, spec], {})
    if not isinstance(result, str):
        raise TypeError(f"__format__ must return a str, not {type(result).__name__}")
    return result


# ---------------------------------------------------------------- builtins that call special methods


def length(host, function, args, kwargs):
    method = python_method(type(args[0]), "__len__") if len(args) == 1 else None
    if method is None:
        return host.call_native(function, args, kwargs)
    return len(range(_index(host.call(method, [args[0]], {}))))


def _index(result):
    if not provides(type(result), "__index__"):
        raise TypeError(f"'{type(result).__name__}' object cannot be interpreted as an integer")
    number = int(result)
    if number < 0:
        raise ValueError("__len__() should return >= 0")
    return number


def _through(name):
    """A builtin of one argument that calls one special method and returns a str or anything."""

    def run(host, function, args, kwargs):
        method = python_method(type(args[0]), name) if len(args) == 1 and not kwargs else None
        if method is None:
            return host.call_native(function, args, kwargs)
        result = host.call(method, args, {})
        if name in ("__str__", "__repr__") and not isinstance(result, str):
            raise TypeError(f"{name} returned non-string (type {type(result).__name__})")
        return result

    return run


def _isinstance(host, function, args, kwargs):
    hook = python_method(type(args[1]), "__instancecheck__") if len(args) == 2 else None
    if hook is None or type(args[0]) is args[1]:
        return host.call_native(function, args, kwargs)
    return host.truth(host.call(hook, [args[1], args[0]], {}))


def _truth(host, function, args, kwargs):
    return host.truth(args[0]) if len(args) == 1 and not kwargs else function(*args, **kwargs)


def _iter(host, function, args, kwargs):
    if len(args) == 2:
        return iter(callback(host, args[0]), args[1])
    return host.iterate(args[0]) if len(args) == 1 and not kwargs else function(*args, **kwargs)


def callback(host, f):
    """What native code may call in place of `f`: the call comes back to the machine."""
    if type(f) not in (FUNCTION, types.MethodType) and python_method(type(f), "__call__") is None:
        return f
    return lambda *args, **kwargs: host.call(f, list(args), kwargs)


def _with_callbacks(positional):
    """A native function that calls back: its first `positional` arguments and its `key`."""

    def run(host, function, args, kwargs):
        args = [callback(host, a) if k < positional else a for k, a in enumerate(args)]
        if kwargs.get("key") is not None:
            kwargs = {**kwargs, "key": callback(host, kwargs["key"])}
        return host.call_native(function, args, kwargs)

    return run


CALLS = {
    len: length,
    bool: _truth,
    iter: _iter,
    str: _through("__str__"),
    repr: _through("__repr__"),
    abs: _through("__abs__"),
    isinstance: _isinstance,
    map: _with_callbacks(1),
    filter: _with_callbacks(1),
    functools.reduce: _with_callbacks(1),
    sorted: _with_callbacks(0),
    min: _with_callbacks(0),
    max: _with_callbacks(0),
}


class ProtocolHost(Host):
    """A host under which special methods, properties, descriptors and callbacks written in Python are interpreted too."""

    native_frames_per_call = 12
    load_attr, store_attr, delete_attr = load_attr, store_attr, delete_attr
    binary, unary, compare, format_value = binary, unary, compare, format_value
    getitem, setitem, delitem, contains = getitem, setitem, delitem, contains
    iterate, next, truth = iterate, following, truth

    def __init__(self, record_history: bool = False):
        super().__init__(record_history)
        self.frame_calls = {**self.frame_calls, **{id(function): handler for function, handler in CALLS.items()}}

    def steps(self, value):
        return _native_iterator(self, self.iterate(value))

    def unpack(self, value, before, after=None):
        if python_method(type(value), "__iter__") is not None:
            value = self.steps(value)
        return super().unpack(value, before, after)


def _native_iterator(host, iterator):
    """The iterator for native code; `__next__` written in Python comes back to the machine."""
    return _Iterator(host, iterator) if python_method(type(iterator), "__next__") else iterator


class _Iterator:
    def __init__(self, host, iterator):
        self.host, self.iterator = host, iterator

    def __iter__(self):
        return self

    def __next__(self):
        return self.host.next(self.iterator)
