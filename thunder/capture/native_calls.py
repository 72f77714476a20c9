"""Native calls: builtins, classes and library functions that run as they are, with what they may look at exposed
before."""

from __future__ import annotations

import collections
import contextvars
import functools
import types

import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.capture import containers, host_lines, operations
from thunder.capture.expose import as_text, expose
from thunder.capture.identities import told_apart
from thunder.capture.items import VIEWS
from thunder.capture.methods import TensorMethod
from thunder.capture.native import (
    CALLABLE_FIRST,
    CONTAINERS,
    ENUM,
    HARMLESS,
    ITERATING,
    impure,
    native_module,
)  # fmt: skip
from thunder.capture.operations import all_lifted, record, size
from thunder.capture.sources import MISSING
from thunder.core.proxies import AnyProxy, NumberProxy, Size, TensorProxy, concrete, map_structure, settled
from thunder.interpreter import Host, construction
from thunder.ops import inplace_of, lookup

__all__ = [
    "ADVANCED", "HANDLERS", "BY_NAME", "BY_TYPE", "IDENTITY_CALLS", "call_builtin", "call_native", "construct_object",
    "reaches", "reduced", "pairs",
]  # fmt: skip

IDENTITY_CALLS = {
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
}


def _is_torch(f) -> bool:
    module = getattr(f, "__module__", None)
    if module is None:
        module = getattr(getattr(f, "__objclass__", None), "__module__", None) or getattr(
            type(getattr(f, "__self__", None)), "__module__", ""
        )
    return module.split(".")[0] == "torch"


def _class_method(cls: type, name: str):
    """The descriptor of a class method in C: the methods that it gives are made anew at each access."""
    return next(
        (vars(base)[name] for base in cls.__mro__ if type(vars(base).get(name)) is types.ClassMethodDescriptorType),
        None,
    )


def reduced(c, f, args, kwargs):
    """What copy makes a copy of: the attributes of an outside object as the program sees them."""
    o = args[0] if getattr(f, "__self__", None) is None else f.__self__
    c.materialize(o)
    if (
        id(o) not in c.sources
        or isinstance(o, torch.nn.Module)
        or c.slot(type(o), "__getstate__")
        or c.slot(type(o), "__reduce__")
    ):
        return call_native(c, f, args, kwargs)
    found = Host.call_native(c, f, args, kwargs)
    state, own = (
        found[2] if len(found) > 2 else None,
        dict(c.load_attr(o, "__dict__")) if hasattr(o, "__dict__") else None,
    )
    if type(state) is tuple:
        state = own, {n: c.load_attr(o, n) for n in state[1]}
    expose(c, own)
    return *found[:2], own if state is None or type(state) is dict else state, *found[3:]


def _context_variable(c, f, args):
    """get, set and reset: what the program sets is set while it is captured only, and at its end by the epilogue."""
    variable, first = f.__self__, c.context_tokens.get(f.__self__)
    if f.__name__ == "set":
        token = f(*args)
        c.context_tokens.setdefault(variable, token)
        c.keep[id(token)] = token
        return token
    if f.__name__ == "reset":
        if id(args[0]) not in c.keep:
            c.refuse("a context variable is reset with a token from outside", "set and reset it on the same side")
        f(*args)
        if args[0] is first:
            del c.context_tokens[variable]
        return None
    if first is not None:
        return f(*args)
    found = c.reach(c.const(variable).call("get", *args))
    return f(*args) if found is MISSING else found


def _note_factory(c, f, operands) -> None:
    """A copy of a defaultdict has its factory."""
    if f.__name__ in ("copy", "__copy__"):
        for o in operands:
            if isinstance(o, collections.defaultdict):
                c.load_attr(o, "default_factory")


def call_builtin(c, f, args, kwargs):
    if lookup(f) is not None or inplace_of(f) is not None:
        return record(c, f, args, kwargs)
    s = getattr(f, "__self__", None)
    if isinstance(s, type) and (handler := HANDLERS.get(id(_class_method(s, f.__name__)))) is not None:
        return handler(c, f, [s, *args], kwargs)
    if type(s) is contextvars.ContextVar:
        return _context_variable(c, f, args)
    # torch.Tensor.is_contiguous(x)
    if s is None and args and type(args[0]) is TensorProxy and getattr(f, "__objclass__", None) is compat.TensorBase:
        return record(c, f, args, kwargs)
    if type(s) is str and f.__name__ in ("format", "__mod__"):
        return _formatted(c, f, args, kwargs)
    if type(s) is torch.Generator:
        return record(c, getattr(torch.Generator, f.__name__), [s, *args], kwargs)
    _note_factory(c, f, (s, *args))
    if type(s) is TensorProxy:
        return f(*all_lifted(c, args), **all_lifted(c, kwargs))
    if s is not None and c.lazy and id(s) in c.lazy:
        n = f.__name__
        if isinstance(s, dict) and n == "get" and args:
            return containers.dict_item(c, s, args[0], args[1] if len(args) > 1 else None)
        if isinstance(s, dict) and n == "__getitem__":
            return containers.dict_item(c, s, *args)
        if n not in ("append", "extend") and not (isinstance(s, dict) and n == "__setitem__"):
            containers.materialize(c, s)
    elif s is None and args and c.lazy and id(args[0]) in c.lazy:
        containers.materialize(c, args[0])
    if _is_iterating(f):
        # are iterables
        some = (
            2
            if f is functools.reduce
            else 0
            if f in (min, max) and len(args) > 1
            else 1
            if f in (sum, sorted, min, max)
            else len(args)
        )
        args = [
            _callable_for_native(c, a) if f in CALLABLE_FIRST and i == 0 else _iterable(c, a) if i < some else a
            for i, a in enumerate(args)
        ]
        kwargs = {k: _callable_for_native(c, v) if k == "key" else v for k, v in kwargs.items()}
    elif s is not None and type(s) in CONTAINERS | {str} and f.__name__ in ("extend", "update", "join", "sort"):
        args = [_iterable(c, a) for a in args]
        kwargs = {k: _callable_for_native(c, v) if k == "key" else v for k, v in kwargs.items()}
    result = call_native(c, f, args, kwargs)
    if c.attribute_dicts:
        containers.write_attributes(c, s)
    return result


def _formatted(c, f, args, kwargs):
    if operations.is_unknown_text((*args, *kwargs.values())):
        return host_lines.text(c, f, *args, **kwargs)
    return call_native(c, f, [as_text(c, a) for a in args], {k: as_text(c, v) for k, v in kwargs.items()})


def _is_iterating(f) -> bool:
    try:
        return f in ITERATING
    except TypeError:
        return False


def _iterable(c, a):
    if (
        type(a) is not TensorProxy
        and not isinstance(a, dict)
        and (c.slot(type(a), "__iter__") or c.slot(type(a), "__getitem__"))
    ):
        return c.steps(a)
    if id(a) in c.outside_iterators or type(a) is set:
        return c.iterate(a)
    return c.materialize(a)


_CALLED_BACK = (types.FunctionType, types.MethodType, TensorMethod, functools._lru_cache_wrapper)


def _callable_for_native(c, f):
    """Native code will call `f`: it comes back to the machine."""
    t = type(f)
    of_users = isinstance(f, type) and not native_module(f.__module__)
    if of_users or t in _CALLED_BACK or t in BY_TYPE or c.slot(t, "__call__") or lookup(f) is not None:
        return lambda *a, **k: c.call(f, list(a), k)
    return f


def call_native(c, f, args, kwargs):
    if c.outside_iterators and any(id(a) in c.outside_iterators for a in args):
        c.sharp(ADVANCED)
    if impure(f) is not None:
        return host_lines.run_impure(c, f, args, kwargs)
    if host_lines.takes(f, args, kwargs):
        return host_lines.run(c, f, args, kwargs)
    if f is functools.cmp_to_key or getattr(f, "__module__", None) == "itertools":
        args, kwargs = [_called_back(c, a) for a in args], {k: _called_back(c, a) for k, a in kwargs.items()}
    _expose_to(c, f, args, kwargs)
    if _asks_for_types(f):
        args, kwargs = (
            [map_structure(concrete, a) if type(a) is tuple else concrete(a) for a in args],
            {k: concrete(a) for k, a in kwargs.items()},
        )
    if not _is_torch(f):
        return Host.call_native(c, f, args, kwargs)
    c.synchronize()
    if type(f) in IDENTITY_CALLS:  # which takes numbers only
        args, kwargs = map_structure(settled, list(args)), map_structure(settled, kwargs)
    result = Host.call_native(c, f, [c.lift(a) if isinstance(a, torch.Tensor) else a for a in args], kwargs)
    if type(result) is torch.Tensor and not result.requires_grad and not any(id(a) in c.arrays for a in args):
        return c.call(torch.clone, [c.lift(result)], {})  # made anew at each call
    if type(result) in _ANSWERS and not (args or kwargs) and _is_question(f):
        c.setting(c.const(f).call("__call__"), result)
    return result


ADVANCED = "an iterator from outside is advanced, and stays advanced only for the call that captured the program"


def _called_back(c, a):
    return _callable_for_native(c, a) if callable(a) and not hasattr(type(a), "__iter__") else a


def _expose_to(c, f, args, kwargs) -> None:
    """What native code may look at is asked before it runs."""
    s, given = getattr(f, "__self__", None), (*args, *kwargs.values())
    if (
        s is None
        and args
        and isinstance(getattr(f, "__objclass__", None), type)
        and issubclass(f.__objclass__, (tuple, *containers.MUTABLE))
    ):
        s, *given = given  # dict.__setitem__(d, k, v)
    if isinstance(s, (tuple, *containers.MUTABLE)):
        for a in given:
            c.materialize(a)
            told_apart(c, a, s)
        if f.__name__ not in _STORING:
            expose(c, s, *given)
    elif _looks_inside(f):
        expose(c, s, *given, concretely=_asks_for_types(f))
    else:
        for a in given:
            c.materialize(a)
            if f in _COMPARING:
                expose(c, a)


def _asks_for_types(f) -> bool:
    """Whether native code may do another thing with a symbolic number than with a number; others use numbers' own
    methods."""
    module = getattr(f, "__module__", None) or type(getattr(f, "__self__", None)).__module__
    return (module or "builtins").split(".")[0] not in _NUMERIC


_NUMERIC = {
    "builtins",
    "operator",
    "_operator",
    "math",
    "itertools",
    "functools",
    "_functools",
    "torch",
    "numpy",
    "thunder",
    "collections",
    "_collections",
}
_STORING = {
    "append", "extend", "insert", "appendleft", "extendleft", "pop", "popleft", "popitem", "get", "keys", "values",
    "items", "clear", "copy", "reverse", "update", "setdefault",
    "__setitem__", "__getitem__", "__delitem__", "__init__", "__iter__", "__len__", "__ior__", "__or__", "move_to_end",
    "fromkeys", "rotate",
}  # fmt: skip
_COMPARING = (set, frozenset, dict, repr, hash)


def _is_question(f) -> bool:
    """Whether a function of PyTorch's without arguments asks for a setting: what it may be asked again at each call."""
    asks = f.__name__.lstrip("_").startswith(("get_", "is_", "are_", "has_")) or f.__name__.endswith("_enabled")
    return asks and getattr(f, "__self__", None) in (None, compat.C) and f not in _OF_MODES


_ANSWERS = (bool, int, float, str)
# looked at for every call, or a device's
_OF_MODES = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_enabled,
    torch.cuda.is_current_stream_capturing,
)
# by `__new__`
_MADE_EMPTY = {object, list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque}


def _looks_inside(f) -> bool:
    if (
        f.__class__ is type
        and issubclass(f, BaseException)
        or getattr(f, "__name__", "") == "__new__"
        and f.__self__ in _MADE_EMPTY
    ):
        return False
    try:
        return f not in HARMLESS
    except TypeError:
        return True


def construct_object(c, cls, args, kwargs):
    if lookup(cls) is not None:
        return record(c, cls, args, kwargs)
    if cls in ITERATING:
        args = [
            _callable_for_native(c, a) if cls in CALLABLE_FIRST and i == 0 else _iterable(c, a)
            for i, a in enumerate(args)
        ]
        return call_native(c, cls, args, kwargs)
    if cls is dict or cls is collections.OrderedDict:
        return call_native(c, cls, [c.materialize(a) if isinstance(a, dict) else pairs(c, a) for a in args], kwargs)
    if cls is torch.Tensor and len(args) == 1 and isinstance(args[0], (torch.Size, Size)):
        return c.call(torch.empty, args, {"device": "cpu"})
    if cls is torch.Size and args:
        return size(tuple(c.iterate(args[0])))
    if issubclass(cls, (ENUM, torch.Tensor)) or cls is torch.Size:
        return (
            record(c, cls, args, kwargs)
            if issubclass(cls, torch.Tensor) and cls is not torch.nn.Parameter
            else call_native(c, cls, args, kwargs)
        )
    new, init = c.lookup(cls, "__new__"), c.lookup(cls, "__init__")
    new = getattr(new, "__func__", new)
    interpreted_new = type(new) is types.FunctionType and not native_module(new.__globals__.get("__name__"))
    interpreted_init = type(init) is types.FunctionType and (
        not native_module(init.__globals__.get("__name__")) or reaches(c, args, kwargs)
    )
    custom_meta = c.slot(type(cls), "__call__") is not None and not native_module(type(cls).__module__)
    if not (interpreted_new or interpreted_init or custom_meta):
        return call_native(c, cls, args, kwargs)
    return construction.construct(c, cls, args, kwargs)


def pairs(c, a) -> list:
    """What dict() makes of an argument that is no dict: a mapping's items, or pairs."""
    if type(a) is TensorProxy or not hasattr(type(a), "keys"):
        return list(c.steps(a))
    return [(k, c.getitem(a, k)) for k in c.steps(c.call(c.load_attr(a, "keys"), [], {}))]


HANDLERS: dict[int, object] = {}  # by the id of a function: see `handlers.py`
BY_TYPE: dict[type, object] = {}  # what calls an object of a type
# of functions whose modules are imported only by programs that use them, by module and name
BY_NAME: dict[tuple, object] = {}


def reaches(c, args, kwargs) -> bool:
    """Whether an argument is something whose use must be seen: a tensor, an outside object, a function of the
    user's."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        t = type(a)
        if t is TensorProxy or t is AnyProxy or id(a) in c.sources or isinstance(a, NumberProxy):
            return True
        if t in VIEWS or t is types.MethodType and (id(a.__self__) in c.sources or reaches(c, (a.__func__,), {})):
            return True
        if t is types.FunctionType and not native_module(a.__globals__.get("__name__")):
            return True
        if t is functools.partial and reaches(c, (a.func, *a.args), a.keywords) or _is_users(t):
            return True
        if isinstance(a, tuple) and a and reaches(c, a, {}):
            return True
    return False


def _is_users(t: type) -> bool:
    """Whether objects of a class are the program's own: Python code that they are given is interpreted, which sees what
    it looks at."""
    return not native_module(t.__module__) and not issubclass(t, type)
