"""Attributes of objects, modules and globals, and writes to them.

CPython's algorithms stand in `thunder.interpreter.attributes`. The functions here answer them: first from the program's
own writes (the overlay), then from the outside object, which is asked. Functions take the capture first.
"""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

import torch

from thunder.capture import containers, host_lines, opaque_values, reads
from thunder.capture.classes import entry, forget_lookups, is_fixed, lookup, of_library, owner_of
from thunder.capture.effects import DELETED
from thunder.capture.interface import Capture
from thunder.capture.library import assigned_data, gradients
from thunder.capture.methods import TensorMethod
from thunder.capture.namespaces import namespace, namespace_value
from thunder.capture.native import CONTAINERS, DICT_VIEWS, ENUM, IDENTICAL, PRIMITIVE
from thunder.capture.policy import bound_method, is_library
from thunder.capture.remade import native_new, stored
from thunder.capture.world import PRESENT, TYPE, VALUE, Source
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import AnyProxy, Condition, NumberProxy, TensorProxy, concrete
from thunder.interpreter import NULL, attributes
from thunder.interpreter.attributes import call_special, native_method, of_python, type_attribute

# ---------------------------------------------------------------- objects


def origin(c: Capture, o) -> Source | None:
    """Where attributes of an object are read; None for the program's own objects, and for functions and classes that a
    library gives by its names."""
    source = c.world.sources.get(id(o))
    if source is not None or id(o) in c.fresh:
        return source
    if type(o) is types.FunctionType and not is_library(o.__globals__.get("__name__")):
        return c.world.const(o)
    if issubclass(type(o), type):
        return None if of_library(o) else c.world.const(o)  # pyright: ignore[reportArgumentType]
    return c.world.origins.get(id(o)) if type(o) in IDENTICAL or isinstance(o, ENUM) else None


def own(c: Capture, o, name):
    """The entry of an object's `__dict__` under a name, or NULL."""
    if c.effects and (attribute := c.effects.value(o, name)) is not NULL:
        return NULL if attribute is DELETED else attribute
    t = type(o)
    if not t.__dictoffset__:
        return NULL
    try:
        space = {} if attributes.lacks_dict(o) else object.__getattribute__(o, "__dict__")  # of a class in C++, a view
        kind: Any = dict if isinstance(space, dict) else types.MappingProxyType
        attribute = kind.get(space, name, NULL)
    except AttributeError:  # native code keeps it for itself
        return attributes.plain_attribute(o, name, NULL)
    source = origin(c, o) or c.world.origins.get(id(o))
    if source is None:
        return attribute
    said = lookup(c, t, name)
    if attribute is not NULL:
        owner = None if said is NULL or is_fixed(said) else owner_of(t, name, said)
        if owner is not None:
            # it is no data descriptor, which would come first; a number is looked up together with others
            c.world.ask(entry(c, owner, name), VALUE if type(said) in PRIMITIVE else TYPE)
        return c.read(attribute, source.attr(name))
    if not issubclass(t, torch.nn.Module) or said is not NULL:
        c.world.ask(source.attr("__dict__").item(name), PRESENT)
    return NULL


def own_of_class(c: Capture, kind, name):
    """An attribute of a class itself, or NULL."""
    if c.effects and (attribute := c.effects.value(kind, name)) is not NULL:
        return NULL if attribute is DELETED else attribute
    c.world.ask(entry(c, kind, name), PRESENT)
    return kind.__dict__.get(name, NULL)


def cached_outside(c: Capture, o) -> bool:
    """Whether an object is a function behind functools.lru_cache that the program did not make."""
    wrapped = getattr(o, "__wrapped__", None) if type(o) is functools._lru_cache_wrapper else None
    return wrapped is not None and id(wrapped) not in c.fresh and id(o) not in c.fresh


def native_get(c: Capture, get, descriptor, o, kind, name):
    """The result of a native descriptor: slots and the like of outside objects are read."""
    if type(descriptor) is staticmethod and id(descriptor) in c.world.origins:
        if type(descriptor.__func__) is types.MethodType or bound_method(descriptor.__func__) is not None:
            return c.read(descriptor.__func__, c.world.origins[id(descriptor)].attr("__func__"))
    source = None if o is None or name == "__class__" or not attributes.is_data(c, descriptor) else origin(c, o)
    if c.effects and (written := c.effects.value(o, name)) is not NULL:
        return _written(c, get, descriptor, o, kind, name, written)
    if name == "__dict__" and cached_outside(c, o):
        return c.read(get(descriptor, o, kind), c.world.const(o).attr(name))
    if type(o) is types.CellType:
        c.refuse("the program reads a variable of a function through its cell", "read it by its name")
    if source is None or name in _CONSTANT.get(type(o), ()):
        return get(descriptor, o, kind)
    return _read_outside(c, get, descriptor, o, kind, name, source)


def _written(c: Capture, get, descriptor, o, kind, name, value):
    """The result of a descriptor that the program has written to, or deleted."""
    if value is not DELETED:
        return value
    if type(descriptor) is types.MemberDescriptorType:
        get(descriptor, native_new(kind)(kind), kind)  # an empty slot says so
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")


def _read_outside(c: Capture, get, descriptor, o, kind, name, source):
    """The result of a native descriptor for an object from outside, whose attributes are read at `source`."""
    if name != "__dict__" and (state := host_lines.outside_state(c, o)) is not None:
        return host_lines.attribute(c, state, name)
    if name == "__globals__":
        return namespace(c, o)
    if name == "__closure__" and type(o) is types.FunctionType:
        return o.__closure__
    try:
        value = get(descriptor, o, kind)
    except AttributeError:  # an empty slot
        c.world.ask(source.find(name), PRESENT)
        raise
    return _attributes_as_one(c, o, value, source) if name == "__dict__" else c.read(value, source.attr(name))


def _attributes_as_one(c: Capture, o, value, source):
    """The `__dict__` of an object from outside, or the view of a class's."""
    if isinstance(value, dict):
        return containers.attribute_dict(c, o, value, source)
    if isinstance(o, type) and c.effects.names(o):
        reason = f"the attributes of {o.__qualname__}, which the program has written to, are read as one"
        c.refuse(reason, "read them by name")
    return c.read(value, source.attr("__dict__"))


# attributes that never change, or are no part of a program's meaning
_CONSTANT = {types.FunctionType: ("__builtins__",), type: ("__flags__", "__dictoffset__", "__weakrefoffset__")}


def _no_attribute(o, name: str) -> AttributeError:
    kind = "type object" if issubclass(type(o), type) else "module" if isinstance(o, types.ModuleType) else None
    shown = f"{type(o).__name__!r} object" if kind is None else f"{kind} {o.__name__!r}"
    return AttributeError(f"{shown} has no attribute {name!r}", name=name, obj=o)


def missing(c: Capture, getattribute, o, name):
    """There is no such attribute, or the type keeps it in its own way (threading.local). An attribute that the
    program deleted is still there for native code."""
    if c.effects:
        places = (o, *type(o).__mro__, *(o.__mro__ if issubclass(type(o), type) else ()))
        if any(c.effects.value(source_of_attribute, name) is DELETED for source_of_attribute in places):
            raise _no_attribute(o, name)
    if (source := origin(c, o)) is None:
        return getattribute(o, name)
    try:
        attribute = getattribute(o, name)
    except AttributeError:
        if not type(o).__dictoffset__ and not issubclass(type(o), type):
            c.world.ask(source.find(name), PRESENT)
        raise
    return c.read(attribute, source.attr(name))


def fallback(c: Capture, method, o, name):
    """The class's `__getattr__` answers. A setting that one of PyTorch's objects says is asked again."""
    if method is torch.nn.Module.__getattr__ and c.dispatch.reading is None:
        return of_torch_module(c, o, name)
    value = call_special(c, method, o, [name], "__getattr__")
    if c.world.sources.get(id(o)) is None and of_library(type(o)):
        ask_setting(c, o, name, value)
    return value


def load_attr(c: Capture, o, n):
    t = type(o)
    getattribute = c.known.attribute_functions.get(t)
    if getattribute is None:
        getattribute = c.known.attribute_functions[t] = _attribute_function(t)
    return getattribute(c, o, n)


def _attribute_function(t: type):
    """How attributes of objects of a class are read."""
    if t is TensorProxy:
        return lambda c, o, n: c.tensor_attribute(o, n)
    if t is AnyProxy:
        return opaque_values.attribute
    if t is HostProxy:
        return host_lines.attribute
    if t is TensorMethod:
        return _of_tensor_method
    if issubclass(t, types.ModuleType):
        return _of_module
    if t in PRIMITIVE or t in CONTAINERS and not t.__dictoffset__ or t in DICT_VIEWS or t is tuple:
        return _of_builtin
    if issubclass(t, NumberProxy):
        return _of_number
    if t is types.FrameType:
        return _of_frame
    if type(type_attribute(t, "__getattribute__")) is types.FunctionType:
        return reads.load_attr
    return (lambda c, o, n: getattr(o, n)) if t is Condition else attributes.load_attr


def _of_builtin(c: Capture, o, n):
    if c.effects and (written := c.effects.value(o, n)) is not NULL:
        return _overlaid(o, n, written)
    value, source = getattr(o, n), c.world.sources.get(id(o))
    return value if source is None or n not in ("maxlen", "default_factory") else c.read(value, source.attr(n))


def _of_tensor_method(c: Capture, o, n):
    if n == "__self__":
        return o.proxy
    if n in ("__name__", "__doc__"):
        return getattr(getattr(torch.Tensor, o.name), n)
    return c.refuse(f"{n} of a method of a tensor is read", "call the method")


def _of_number(c: Capture, o, n):
    if n in ("real", "imag"):
        return o if n == "real" else o.python_type()
    return getattr(o.concrete() if hasattr(o.python_type, n) else o.python_type(), n)  # raises


def _of_frame(c: Capture, o, n):
    if n == "f_back":
        c.refuse("the program reads a frame's caller", "call it outside of the compiled function")
    return getattr(o, n)


def _of_module(c: Capture, o, n):
    """An attribute of a Python module."""
    if c.effects and (written := c.effects.value(o, n)) is not NULL:
        return _overlaid(o, n, written)
    try:
        value = getattr(o, n)
    except AttributeError:
        c.world.ask(c.world.const(vars(o), f"{o.__name__}.").item(n), PRESENT)
        raise
    if n == "__dict__" and not is_library(o.__name__):
        return containers.attribute_dict(c, o, value, c.world.const(o))
    if type(o) is not types.ModuleType and n not in vars(o):
        ask_setting(c, o, n, value)
    return namespace_value(c, vars(o), f"{o.__name__}.", n, value, None if n in vars(o) else c.world.const(o).attr(n))


def _overlaid(o, n, value):
    if value is DELETED:
        raise AttributeError(f"{type(o).__name__!r} object has no attribute {n!r}")
    return value


def ask_setting(c: Capture, o, n: str, value) -> None:
    """An attribute of a library's object that a setting answers: `torch.backends.cudnn.deterministic`."""
    if type(value) in (bool, int, float, str) and (type(o).__module__ or "").startswith("torch."):
        c.world.ask_setting(c.world.const(o).attr(n), value)


def of_torch_module(c: Capture, m, n: str):
    """nn.Module.__getattr__: parameters, buffers, children."""
    source = c.world.sources.get(id(m))
    for where in ("_parameters", "_buffers", "_modules"):
        d = m.__dict__.get(where)
        written = c.containers.snapshots.get(id(d))
        if written is not None and n in written:
            return written[n]
        if d is not None and n in d and (written is None or id(written) in c.containers.lazy):
            return d[n] if source is None else c.read(d[n], source.attr(where).item(n))
    if source is not None:
        for where in ("_parameters", "_buffers", "_modules"):
            c.world.ask(source.attr(where).item(n) if where in m.__dict__ else source.attr(where), PRESENT)
        c.world.ask(source.attr("__dict__").item(n), PRESENT)
    raise AttributeError(f"{type(m).__name__!r} object has no attribute {n!r}")


# ---------------------------------------------------------------- writes


def store_attr(c: Capture, o, n, v) -> None:
    """`o.n = v`."""
    o = concrete(o)
    if type(o) is HostProxy:
        host_lines.run(c, setattr, (o, n, v))
    elif type(o) is not TensorProxy:
        attributes.store_attr(c, o, n, v)
    elif n == "grad":
        gradients.write_gradient(c, o, v)
    elif n == "data":
        assigned_data.assign(c, o, v)
    elif n == "requires_grad":
        c.call(torch.Tensor.requires_grad_, [o, v], {})
    else:
        _store_on_tensor(c, c.recorder.memory.holder(o), n, v)


def _store_on_tensor(c: Capture, p: TensorProxy, n: str, v) -> None:
    """An attribute that PyTorch does not know: an effect, where the tensor is from outside or leaves the program."""
    if type_attribute(torch.Tensor, n) is not NULL:
        c.refuse(f"attribute {n!r} is set on a tensor", "set it outside of the compiled function")
    c.world.hold(p)
    c.effects.write("attr", p, n, v)
    if p in c.tensors.real:
        c.effects.note({c.tensors.real[p][1].attr(n): v})


def native_set(c: Capture, descriptor, o, n, v) -> None:
    """A slot takes a value; a property without a setter raises."""
    if type(o) is types.CellType:
        c.refuse(
            "the program writes to a variable of a function through its cell", "write to it by its name (nonlocal)"
        )
    elif isinstance(descriptor, property):
        native_method(type(o), "__setattr__")(o, n, v)
    elif (value := host_lines.outside_state(c, o)) is not None:
        host_lines.run(c, setattr, (value, n, v))
    else:
        own_store(c, o, n, v)


def _is_own(c: Capture, o) -> bool:
    """Whether an object is the program's own. Classes, modules and functions that nobody asked about are not."""
    shared = issubclass(type(o), (type, types.ModuleType, types.FunctionType)) and id(o) not in c.fresh
    return id(o) not in c.world.sources and not shared


def own_store(c: Capture, o, n, v) -> None:
    """An attribute write: real on objects of this capture, an effect on objects that came from outside."""
    if type(o) in (TensorProxy, HostProxy):  # by `object.__setattr__`
        return store_attr(c, o, n, v)
    if issubclass(type(o), type):
        forget_lookups(c)
    if _is_own(c, o):
        if id(o) in c.world.origins:
            c.refuse(
                f"attribute {n!r} of a {type(o).__name__} from outside is set, which is not watched for changes",
                "set it outside of the compiled function",
            )
        native_method(type(o), "__setattr__")(o, n, v)
        return
    if n == "__class__":
        c.refuse("the class of an object from outside is changed", "change it outside of the compiled function")
    if issubclass(type(o), type) and not of_python(o):
        type.__setattr__(o, n, v)  # raises
    if issubclass(type(o), types.ModuleType) and is_library(o.__name__):
        c.refuse(
            f"{o.__name__}.{n} is assigned, which the library's own code reads",
            "assign it outside of the compiled function",
        )
    has_attributes = type_attribute(type(o), "__dict__") is not NULL or isinstance(o, threading.local)
    if not has_attributes and type_attribute(type(o), n) is NULL:
        native_method(type(o), "__setattr__")(o, n, v)  # raises, but for a class in C that takes any name
        c.refuse(f"attribute {n!r} is set on a {type(o).__name__}, which is an object of native code", "set it outside")
    descriptor = type_attribute(type(o), n)
    native = type(descriptor) in (types.MemberDescriptorType, types.GetSetDescriptorType)
    if native:
        v = stored(descriptor, o, v)
    if id(o) not in c.world.sources:
        c.world.know(o, c.world.const(o))
    if native and id(o) in c.containers.looks:  # native code reads the default_factory of what stands for it
        descriptor.__set__(o, v)
    hidden = hasattr(type(descriptor), "__set__") and not native
    c.effects.write("entry" if hidden else "attr", o, n, v)
    copy = c.containers.attribute_dicts_of.get(id(o))
    if copy is not None and type(descriptor) is not types.MemberDescriptorType:
        copy[n] = c.containers.attribute_dicts[id(copy)].was[n] = v
    c.effects.note({c.world.sources[id(o)].attr(n): v})


def delete_attr(c: Capture, o, n) -> None:
    o = concrete(o)
    if type(o) is HostProxy:
        c.refuse(f"attribute {n!r} of a {o.kind.__name__} that a host call gives is deleted", "make the object outside")
    if type(o) is TensorProxy and n == "grad":
        gradients.write_gradient(c, o, None)
    elif type(o) is TensorProxy:
        _delete_on_tensor(c, c.recorder.memory.holder(o), n)
    else:
        attributes.delete_attr(c, o, n)


def _delete_on_tensor(c: Capture, p: TensorProxy, n: str) -> None:
    c.load_attr(p, n)  # raises where there is none
    if p in c.tensors.real and n in c.tensors.real[p][0].__dict__ or type_attribute(torch.Tensor, n) is not NULL:
        c.refuse(f"attribute {n!r} of a tensor is deleted", "delete it outside of the compiled function")
    c.effects.drop(p, n)


def native_delete(c: Capture, descriptor, o, n) -> None:
    if isinstance(descriptor, property):
        native_method(type(o), "__delattr__")(o, n)
    else:
        own_delete(c, o, n)


def own_delete(c: Capture, o, n) -> None:
    """`del o.n`, where no descriptor takes it: an effect, or a change of the program's own object."""
    if type(o) in (TensorProxy, HostProxy):
        return delete_attr(c, o, n)
    if issubclass(type(o), type):
        forget_lookups(c)
    if _is_own(c, o) or issubclass(type(o), type) and not of_python(o):
        native_method(type(o), "__delattr__")(o, n)
        return
    if id(o) not in c.world.sources:
        c.world.know(o, c.world.const(o))
    if issubclass(type(o), type):
        if own_of_class(c, o, n) is NULL:
            raise _no_attribute(o, n)
    elif own(c, o, n) is NULL and not hasattr(type(type_attribute(type(o), n)), "__set__"):
        raise _no_attribute(o, n)
    else:
        _check_filled(c, o, n)
    c.effects.hold(o, n, DELETED)
    if (copy := c.containers.attribute_dicts_of.get(id(o))) is not None:
        copy.pop(n, None)
        c.containers.attribute_dicts[id(copy)].was.pop(n, None)
    native = type(type_attribute(type(o), n)) in (types.MemberDescriptorType, types.GetSetDescriptorType)
    source = c.world.sources[id(o)]
    source_of_attribute = source.find(n) if native else source.attr("__dict__").item(n)
    if c.world.ask(entry(c, o, n) if issubclass(type(o), type) else source_of_attribute, PRESENT):
        c.effects.write("delattr", o, n, DELETED)
    else:  # the program made it
        c.effects.drop(o, n)
        c.effects.hold(o, n, DELETED)


def _check_filled(c: Capture, o, n) -> None:
    """There is something to delete, and it may be deleted: of an empty slot, or an attribute in C, an empty object says
    so."""
    t, descriptor = type(o), type_attribute(type(o), n)
    if type(descriptor) is types.MemberDescriptorType:
        try:
            native_get(c, type(descriptor).__get__, descriptor, o, t, n)
        except AttributeError:
            descriptor.__delete__(native_new(t)(t))
            raise
    elif type(descriptor) is types.GetSetDescriptorType:
        descriptor.__delete__(native_new(t)(t))
    else:
        c.load_attr(o, n)
