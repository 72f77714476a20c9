"""Attributes, as `object`, `type`, modules and `super` find, set and delete them (Objects/object.c, typeobject.c).

`host.lookup` finds the attributes of classes, `host.own` those that an object holds itself; Python code that takes part
is interpreted. Native code answers through the host's `native_get`, `native_set` and `native_delete`.
"""

from __future__ import annotations

import array
import functools
import gc
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from thunder.interpreter.binding import of
from thunder.interpreter.instructions import NULL, PLAIN
from thunder.interpreter.tracebacks import swallow

FUNCTION, METHOD = types.FunctionType, types.MethodType
# Py_TPFLAGS_HEAPTYPE: a class with memory of its own, in C perhaps; Py_TPFLAGS_IMMUTABLETYPE: one in C
HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
# Types of special methods that native code implements. They take the object first, and need no binding.
NATIVE_METHODS = frozenset({types.WrapperDescriptorType, types.MethodDescriptorType})
# Types of functions and bound methods in C; the second is that of methods that are told their class.
BUILTINS = frozenset({types.BuiltinFunctionType, type(array.array("i").extend)})
_OF_C = frozenset({METHOD, types.MethodWrapperType, *BUILTINS, *NATIVE_METHODS})
_DATA = {
    **dict.fromkeys((property, types.MemberDescriptorType, types.GetSetDescriptorType), True),
    **dict.fromkeys((FUNCTION, staticmethod, classmethod, types.ClassMethodDescriptorType, *NATIVE_METHODS), False),
    **dict.fromkeys((type(None), bool, int, float, str, tuple, list, dict, set), False),
}


def type_attribute(kind, name, after=None) -> Any:
    """The attribute as it stands in the class or its bases, not bound; NULL when there is none.

    With `after`, only the bases behind that one are asked, as super does.
    """
    mro = kind.__mro__
    for base in mro if after is None else mro[mro.index(after) + 1 :]:
        if name in base.__dict__:
            return base.__dict__[name]
    return NULL


def plain_attribute(value, name, default=None) -> Any:
    """An attribute that none of the user's `__getattribute__` and `__getattr__` answers: for the machine's own use."""
    kind = type(value)
    if kind in _OF_C:
        return getattr(value, name, default)
    if name == "__dict__" and lacks_dict(value):
        return default
    reader = next((base for base in (type, threading.local) if issubclass(kind, base)), object)
    try:
        return reader.__getattribute__(value, name)
    except AttributeError:
        return default


def name_in_errors(kind: type) -> str:
    """The name that CPython's errors have for a class: of one in C, the module's as well."""
    short = of_python(kind) or kind.__module__ == "builtins"
    return kind.__name__ if short else f"{kind.__module__}.{kind.__qualname__}"


def of_python(kind: type) -> bool:
    """Whether a class was made by a class statement, or a call of its metaclass."""
    return kind.__flags__ & (HEAP_TYPE | _IMMUTABLE_TYPE) == HEAP_TYPE


def stands_alone(kind: type) -> bool:
    """Whether objects of a class have no part that code in C reads by itself, as a list's items."""
    return next(base for base in kind.__mro__ if not of_python(base)) is object


def lacks_dict(value) -> bool:
    """Whether asking for a partial's `__dict__` would make it: functools.partial joins those that have none."""
    return issubclass(type(value), functools.partial) and functools.partial.__reduce__(value)[2][3] is None


def in_python(method) -> bool:
    """Whether a special method that was found on a class is not native code's: `None` and any callable count."""
    return method is not NULL and type(method) not in NATIVE_METHODS


def parts_of(*values, keys: bool = True) -> Iterator:
    """The values and everything in the containers among them but numbers and text, each container once, without the
    user's methods. keys: those of dicts as well."""
    pending, seen = [x for x in values if type(x) not in PLAIN], set()
    while pending:
        value = pending.pop()
        yield value
        base = next((b for b in _HOLDING if isinstance(value, b)), None)
        if isinstance(value, _VIEWS):
            pending += gc.get_referents(value)  # the dict
        if base is None or id(value) in seen:
            continue
        seen.add(id(value))
        inside = dict.values(value) if base is dict else base.__iter__(value)
        pending += [x for x in inside if type(x) not in PLAIN]
        if keys and base is dict:
            pending += [x for x in dict.keys(value) if type(x) not in PLAIN]


_HOLDING: Any = (list, tuple, dict, set, frozenset, deque)
_VIEWS: Any = type({}.keys()), type({}.values()), type({}.items())


def call_special(host, method, value, args, name):
    """Call a special method as it was found on the class of `value`."""
    kind = type(method)
    if kind is FUNCTION:
        return host.call(method, [value, *args], {})
    if kind is types.NoneType:
        return method(value, *args)  # raises
    if kind in NATIVE_METHODS and method.__name__ == name:
        return host.native_special(method, value, args)
    if kind in NATIVE_METHODS:  # under another name, as in `__getattr__ = dict.get`, it is any call
        return host.call(method, [value, *args], {})
    return host.call(bind(host, method, value, type(value), name), list(args), {})


# ---------------------------------------------------------------- reading


def load_attr(host, value, name):
    """`value.name`."""
    kind = type(value)
    reader = host.lookup(kind, "__getattribute__")
    try:
        result = _read(host, reader, value, name)
        if result is not NULL:
            return result
    except AttributeError as error:
        if host.lookup(kind, "__getattr__") is NULL:
            raise
        swallow(error)
    fallback = host.lookup(kind, "__getattr__")
    return host.missing(reader, value, name) if fallback is NULL else host.fallback(fallback, value, name)


def _read(host, reader, value, name):
    """The attribute without the class's `__getattr__`; NULL where object's, type's ... way of reading finds none."""
    if type(reader) is types.WrapperDescriptorType:
        return READERS.get(reader, instance_attribute)(host, value, name)
    return call_special(host, reader, value, [name], "__getattribute__")


def instance_attribute(host, value, name):
    """object.__getattribute__: data descriptors, the object's own attributes, other attributes of the class. NULL
    for none."""
    if value is None:
        return object.__getattribute__(value, name)
    kind = type(value)
    attribute = host.lookup(kind, name)
    if attribute is not NULL and _comes_first(host, attribute):
        return bind(host, attribute, value, kind, name)
    own = host.own(value, name)
    if own is not NULL:
        return own
    return attribute if attribute is NULL else bind(host, attribute, value, kind, name)


def class_attribute(host, cls, name):
    """type.__getattribute__: data descriptors of the metaclass, the class and its bases, the rest of the metaclass."""
    meta = type(cls)
    in_meta = host.lookup(meta, name)
    if in_meta is not NULL and _comes_first(host, in_meta):
        return bind(host, in_meta, cls, meta, name)
    attribute = host.lookup(cls, name)
    if attribute is not NULL:
        return bind(host, attribute, None, cls, name)
    return in_meta if in_meta is NULL else bind(host, in_meta, cls, meta, name)


def module_attribute(host, module, name):
    """types.ModuleType.__getattribute__, with the module's own `__getattr__`."""
    attribute = instance_attribute(host, module, name)
    if attribute is NULL and (hook := host.own(module, "__getattr__")) is not NULL:
        return host.call(hook, [name], {})
    return attribute


def method_attribute(host, method, name):
    """types.MethodType.__getattribute__: the method's own attributes, then those of its function."""
    if type_attribute(METHOD, name) is not NULL:
        return METHOD.__getattribute__(method, name)
    return load_attr(host, method.__func__, name)


def super_attribute(host, proxy, name):
    """super.__getattribute__."""
    receiver, owner = proxy.__self__, proxy.__self_class__
    if receiver is None or name == "__class__":
        return NULL
    attribute = host.lookup(owner, name, proxy.__thisclass__)
    return (
        attribute if attribute is NULL else bind(host, attribute, None if receiver is owner else receiver, owner, name)
    )


# Other native types find attributes as `object` does, and then perhaps in their own way, which `host.missing` asks.
READERS: dict = {
    type.__getattribute__: class_attribute,
    types.ModuleType.__getattribute__: module_attribute,
    types.MethodType.__getattribute__: method_attribute,
    super.__getattribute__: super_attribute,
    **dict.fromkeys(  # which answer for another object
        (kind.__getattribute__ for kind in (types.GenericAlias, weakref.ProxyType, weakref.CallableProxyType)),
        lambda host, value, name: NULL,
    ),
}


def _comes_first(host, attribute) -> bool:
    """Whether reading asks something found on a class before an object's own attributes: a data descriptor that has a
    `__get__` (`tp_descr_get` and `PyDescr_IsData` in Objects/object.c)."""
    return is_data(host, attribute) and (type(attribute) in _GET or host.lookup(type(attribute), "__get__") is not NULL)


def is_data(host, attribute) -> bool:
    """Whether something found on a class is a data descriptor, which takes what is assigned."""
    kind = type(attribute)
    known = _DATA.get(kind)
    if known is None:
        return host.lookup(kind, "__set__") is not NULL or host.lookup(kind, "__delete__") is not NULL
    return known


def bind(host, attribute, value, kind, name):
    """Bind something found on a class to an object of it, or with `value` None to the class itself."""
    descriptor = type(attribute)
    if descriptor is FUNCTION:
        return attribute if value is None else METHOD(attribute, value)
    get = _GET[descriptor] if descriptor in _GET else host.lookup(descriptor, "__get__")
    if get is NULL:
        return host.class_value(kind, name, attribute)
    if get is _PROPERTY:
        if value is None or attribute.fget is None:
            return get(attribute, value, kind)
        return host.call(attribute.fget, [value], {})
    if get is _STATICMETHOD and type(attribute.__func__) is FUNCTION:
        return attribute.__func__
    if get is _CLASSMETHOD and type(attribute.__func__) is FUNCTION:
        return METHOD(attribute.__func__, kind)
    if get is _CACHED and value is not None and attribute.attrname is not None and kind.__dictoffset__:
        result = host.call(attribute.func, [value], {})
        host.own_store(value, attribute.attrname, result)
        return result
    if type(get) is FUNCTION:
        return host.call(get, [attribute, value, kind], {})
    return host.native_get(get, attribute, value, kind, name)


_GET = {kind: type_attribute(kind, "__get__") for kind in _DATA}  # of built-in classes, which stay as they are
_PROPERTY, _STATICMETHOD, _CLASSMETHOD, _CACHED = (
    kind.__dict__["__get__"] for kind in (property, staticmethod, classmethod, functools.cached_property)
)


# ---------------------------------------------------------------- writing


def store_attr(host, value, name, new):
    """`value.name = new`."""
    writer = host.lookup(type(value), "__setattr__")
    if type(writer) is types.WrapperDescriptorType and writer.__name__ == "__setattr__":
        set_attribute(host, value, name, new)
    else:
        call_special(host, writer, value, [name, new], "__setattr__")


def set_attribute(host, value, name, new):
    """object.__setattr__, and those of native types."""
    descriptor = host.lookup(type(value), name)
    put = NULL if descriptor is NULL else host.lookup(type(descriptor), "__set__")
    if put is _PROPERTY_SET and descriptor.fset is not None:
        host.call(descriptor.fset, [value, new], {})
    elif type(put) is FUNCTION:
        host.call(put, [descriptor, value, new], {})
    elif descriptor is not NULL and is_data(host, descriptor):
        host.native_set(descriptor, value, name, new)
    else:
        host.own_store(value, name, new)


def delete_attr(host, value, name):
    """`del value.name`."""
    remover = host.lookup(type(value), "__delattr__")
    if type(remover) is types.WrapperDescriptorType and remover.__name__ == "__delattr__":
        remove_attribute(host, value, name)
    else:
        call_special(host, remover, value, [name], "__delattr__")


def remove_attribute(host, value, name):
    """object.__delattr__, and those of native types."""
    descriptor = host.lookup(type(value), name)
    drop = NULL if descriptor is NULL else host.lookup(type(descriptor), "__delete__")
    if drop is _PROPERTY_DELETE and descriptor.fdel is not None:
        host.call(descriptor.fdel, [value], {})
    elif type(drop) is FUNCTION:
        host.call(drop, [descriptor, value], {})
    elif descriptor is not NULL and is_data(host, descriptor):
        host.native_delete(descriptor, value, name)
    else:
        host.own_delete(value, name)


_PROPERTY_SET, _PROPERTY_DELETE = property.__dict__["__set__"], property.__dict__["__delete__"]


def cell_value(cell: types.CellType, default: Any = None) -> Any:
    """The content of a cell; the default where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return default


def native_method(kind, name):
    """The native special method behind those written in Python."""
    return next(base.__dict__[name] for base in kind.__mro__ if type(base.__dict__.get(name)) in NATIVE_METHODS)


# ---------------------------------------------------------------- the same as functions


_ACCESSES = ("__getattribute__", "__setattr__", "__delattr__")


def _explicit(reader):
    """`object.__getattribute__(value, name)` and the like, called by name."""
    find = READERS.get(reader, instance_attribute)

    def run(host, value, name):
        attribute = find(host, value, name)
        return host.missing(reader, value, name) if attribute is NULL else attribute

    return of(2, named=True)(run)


def _get(host, function, args, kwargs):
    """`p.__get__(value)` of a property or function, called by name."""
    descriptor, value, *rest = args if len(args) > 1 else (None, None)
    if value is None or kwargs or (type(descriptor) is property and descriptor.fget is None):
        return host.call_native(function, args, kwargs)
    return bind(host, descriptor, value, rest[0] if rest and rest[0] is not None else type(value), "")


def _of_kind(kind: type, name: str, perform):
    """`kind.__setattr__` and the like, called by name: another native class's own one raises."""
    native = getattr(kind, name)

    def run(host, value, *args):
        try:
            native(value, None, *args[1:])  # which always raises, and changes nothing
        except TypeError as error:
            if "can't apply" in str(error):
                raise
        perform(host, value, *args)

    return run


def call_by_name(kind: type, name: str) -> Callable:
    """`kind.__getattribute__(value, name)`, `__setattr__` or `__delattr__` of a class in C, as a function."""
    if name == "__getattribute__":
        return _explicit(kind.__getattribute__)
    if name == "__setattr__":
        return of(3, named=True)(_of_kind(kind, name, set_attribute))
    return of(2, named=True)(_of_kind(kind, name, remove_attribute))


_KINDS = (object, type, types.ModuleType, types.MethodType, BaseException, types.SimpleNamespace, functools.partial)
CALLS = {
    **{getattr(kind, name): call_by_name(kind, name) for kind in _KINDS for name in _ACCESSES},
    property.__get__: _get,
    FUNCTION.__get__: _get,
}
