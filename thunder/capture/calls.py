"""Calls: which callables are operations, which are interpreted, which run natively, and the handlers of those that need care."""

from __future__ import annotations

import collections
import contextvars
import functools
import operator
import types
import warnings
import weakref

import numpy
import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.capture import containers, opaque_values
from thunder.capture.ask import KEYS, PRESENT
from thunder.capture.expose import as_text, expose
from thunder.capture.identities import told_apart
from thunder.capture.items import VIEWS
from thunder.capture.library import backward, leaves, torch_func
from thunder.capture.native import (
    CALLABLE_FIRST,
    CONTAINERS,
    ENUM,
    HARMLESS,
    ITERATING,
    PRIMITIVE,
    impure,
    native_module,
)  # fmt: skip
from thunder.capture.sources import MISSING
from thunder.capture.strides import LAYOUT_QUESTIONS, answer
from thunder.compat.names import AROUND_DYNAMO, FUNCTORCH
from thunder.core.proxies import METHODS, AnyProxy, Condition, NumberProxy, Size, TensorProxy, concrete, map_structure, settled
from thunder.core.symbol import Symbol
from thunder.errors import SharpEdgeError, SharpEdgeWarning
from thunder.interpreter import Host, construction
from thunder.interpreter.attributes import type_attribute
from thunder.ops import inplace_of, lookup
from thunder.ops.methods import call_torch
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.options import SHARP_EDGES_OPTIONS

__all__ = [
    "call", "call_native", "record", "operation", "tensor_attribute", "NOT_OPERATIONS", "sharp_edge",
    "text_of", "lifted", "all_lifted", "RecordingMode", "ADVANCED", "size", "kind_of", "type_of", "formatted_text",
]  # fmt: skip

OVERRIDABLE = {f for functions in torch.overrides.get_overridable_functions().values() for f in functions if type(f) is types.FunctionType}
IDENTITY_CALLS = {types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType}


class RecordingMode(torch.overrides.TorchFunctionMode):
    """Records every torch call, wherever it is made: code that runs natively never loses an operation."""

    def __init__(self, capture):
        super().__init__()
        self.capture = capture

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.capture.in_cached_call:
            return func(*args, **kwargs or {})
        return record(self.capture, func, args, kwargs or {})


# ---------------------------------------------------------------------------------------------------------------- tensors

class TensorMethod:
    """`x.view`: a method of a proxy that the program has not called yet."""

    __slots__ = ("proxy", "name")

    def __init__(self, proxy: TensorProxy, name: str):
        self.proxy, self.name = proxy, name

    def __call__(self, *args, **kwargs):
        return getattr(self.proxy, self.name)(*args, **kwargs)


_CONVERTED = {"dtype": lambda p: to_torch_dtype(p.dtype), "device": lambda p: to_torch_device(p.device)}


def _shape(p: TensorProxy):
    return size(p.shape)


def size(numbers) -> torch.Size | Size:
    return (Size if any(isinstance(n, NumberProxy) for n in numbers) else torch.Size)(numbers)


_STATED = {
    "shape": lambda c, p: _shape(p), "name": lambda c, p: None,
    "requires_grad": lambda c, p: p.requires_grad, "ndim": lambda c, p: p.ndim, "__class__": lambda c, p: kind_of(c, c.recorder.memory.holder(p)),
    **{n: lambda c, p, convert=convert: convert(p) for n, convert in _CONVERTED.items()},
}  # fmt: skip


def tensor_attribute(c, p: TensorProxy, n: str):
    """What user code sees of a tensor."""
    if n in _STATED:
        return _STATED[n](c, c.recorder.latest(p))
    if n == "grad":
        return backward.read_gradient(c, p)
    real, source = c.real.get(p, (None, None))
    if real is not None:
        with compat.DisableTorchFunction():
            if n in real.__dict__:
                return c.read(real.__dict__[n], source.attr(n))
            if n in ("is_leaf", "grad_fn"):
                c.read(real.is_leaf, source.attr("is_leaf"))
            if n in ("is_leaf", "grad_fn", "names"):
                return getattr(real, n)
    if n in METHODS or n == "size":
        return TensorMethod(p, n)
    attribute = getattr(torch.Tensor, n, None)
    if attribute is not None and callable(attribute) and n not in METHODS.properties:
        return TensorMethod(p, n)
    if attribute is None:
        if real is not None:
            c.ask(source.find(n), PRESENT)
        raise AttributeError(f"'{kind_of(c, p).__name__}' object has no attribute {n!r}")
    c.synchronize()
    value = getattr(p, n)
    return value


def kind_of(c, p: TensorProxy) -> type:
    """The class that user code believes a proxy has."""
    real = c.real.get(p)
    return type(real[0]) if real is not None else torch.Tensor


def _call_method(c, method, args, kwargs):
    p, n = method.proxy, method.name
    if type(p) is AnyProxy:
        return opaque_values.method(c, p, n, all_lifted(c, args), all_lifted(c, kwargs))
    if n == "backward":
        return backward.call_backward(c, torch.Tensor.backward, [p, *args], kwargs)
    if n == "size":
        shape = _shape(c.recorder.latest(p))
        dim = args[0] if args else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    function = METHODS.get(n)
    if function is None or c.has_opaque_values or "requires_grad" in kwargs:
        function = getattr(torch.Tensor, n)
        return record(c, function, [p, *args], kwargs)
    c.synchronize()
    return function(lifted(c, p), *all_lifted(c, args), **all_lifted(c, kwargs))


def all_lifted(c, values, *, typed: bool = False):
    """Arguments: snapshots read, real tensors lifted, lists and dicts copied, since the program may change its own later. numpy's numbers become Python's, unless `typed`."""
    t = type(values)
    if t is dict:
        return {k: lifted(c, v, typed=typed) for k, v in values.items()}
    return [lifted(c, v, typed=typed) for v in values]


def lifted(c, v, *, typed: bool = False):
    t = type(v)
    if t is TensorProxy and c.recorder.memory is not None and c.recorder.memory.formed:
        return c.recorder.latest(v)  # in the shape that it has now
    if t is TensorProxy or t is int or t is float or v is None or t is bool or t is str:
        return v
    if isinstance(v, torch.Tensor) or t is Condition:
        return c.lift(v)
    if t in CONTAINERS or t is tuple or t is slice:
        expose(c, v)
        return _lifted(c, v, typed) if t in (list, tuple, dict, slice) else v
    if t is torch.Generator and id(v) not in c.sources and v is not torch.default_generator:
        c.refuse("a torch.Generator made inside the program is used: every call would go on where the last one stopped", "make it outside and pass it in")
    return v.item() if isinstance(v, numpy.generic) and not typed else v


def _lifted(c, v, typed: bool):
    t = type(v)
    if t is list:
        return [_lifted(c, x, typed) for x in v]
    if t is dict:
        return {k: _lifted(c, x, typed) for k, x in v.items()}
    if t is tuple:
        return tuple(_lifted(c, x, typed) for x in v)
    return v.item() if isinstance(v, numpy.generic) and not typed else map_structure(c.lift, v)


_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}  # make tensors of the type of what they are given


def operation(c, name: str, operands):
    """A special method of a tensor, by its name."""
    c.synchronize()
    return METHODS.call(name, *all_lifted(c, operands))


def record(c, function, args, kwargs):
    """A call of a torch function."""
    if function in NOT_OPERATIONS:
        return function(*args, **kwargs)
    if function in LAYOUT_QUESTIONS:
        return answer(c, function, args, kwargs)
    c.synchronize()
    if kwargs.get("requires_grad") is True and function is not torch.Tensor.requires_grad_:
        return leaves.leaf(c, record(c, function, args, {k: v for k, v in kwargs.items() if k != "requires_grad"}))
    typed = function in _OF_DATA
    args, kwargs = all_lifted(c, args, typed=typed), all_lifted(c, kwargs, typed=typed)
    if opaque_values.involved(c, (args, kwargs)):
        return opaque_values.apply(c, function, args, kwargs)
    if lookup(function) is not None:
        return call_torch(function, tuple(args), kwargs)
    getter = getattr(function, "__self__", None)
    if getter is not None and getattr(function, "__name__", "") == "__get__" and args and type(args[0]) is TensorProxy:
        return tensor_attribute(c, args[0], getter.__name__)
    return opaque_values.note(c, call_torch(function, tuple(args), kwargs))


def _named(names: str) -> set:
    found = set()
    for n in names.split():
        f = getattr(compat.C, n, None) or getattr(torch, n, None)
        if f is not None:
            found.add(f)
    return found


# functions that torch-function modes see and that are no operations
NOT_OPERATIONS = _named(
    "_set_grad_enabled set_autocast_enabled set_autocast_dtype set_autocast_cache_enabled autocast_increment_nesting autocast_decrement_nesting clear_autocast_cache "
    "is_autocast_enabled get_autocast_dtype is_autocast_cache_enabled get_default_dtype is_grad_enabled _is_torch_function_all_disabled device dtype Generator "
    "get_default_device set_default_dtype promote_types finfo iinfo"
) | {torch.Tensor.__repr__, torch.get_default_device}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- calls


def call(c, f, args, kwargs):
    """Any call of the program."""
    t = type(f)
    if t is types.MethodType:
        return call(c, f.__func__, [f.__self__, *args], kwargs)
    if t is TensorMethod:
        return _call_method(c, f, args, kwargs)
    if c.replacements and (symbol := _replacement(c, f)) is not None:
        return _call_symbol(c, symbol, args, kwargs)
    handler = HANDLERS.get(id(f)) or c.handlers.get(id(f))
    if handler is not None:
        return handler(c, f, args, kwargs)
    if t is types.FunctionType:
        return _call_function(c, f, args, kwargs)
    if t is types.MethodWrapperType:  # `super().__setattr__(...)` and the like
        wrapper = type_attribute(f.__objclass__, f.__name__)
        if (handler := HANDLERS.get(id(wrapper))) is not None:
            return handler(c, wrapper, [f.__self__, *args], kwargs)
    if t in IDENTITY_CALLS:
        return (reduced if f.__name__ == "__reduce_ex__" else call_builtin)(c, f, args, kwargs)
    special = _BY_TYPE.get(t)
    if special is not None:
        return special(c, f, args, kwargs)
    return construct_object(c, f, args, kwargs) if isinstance(f, type) else _call_object(c, f, t, args, kwargs)


def _call_object(c, f, t: type, args, kwargs):
    """A call of an object that is neither a function nor a class."""
    if hasattr(t, "_lc_cd") and not isinstance(f, torch.nn.Module):  # its original becomes part of this program
        return call(c, _original(c, f), args, kwargs)
    if lookup(f) is not None:
        return record(c, f, args, kwargs)
    method = c.slot(t, "__call__")
    if method is not None:
        return call(c, method, [f, *args], kwargs)
    if t is functools._lru_cache_wrapper and not native_module(f.__module__):
        return _call_cached(c, f, args, kwargs)
    return call_native(c, f, args, kwargs)


def _call_cached(c, f, args, kwargs):
    """A function of the user's behind functools.lru_cache: the prologue asks it, as eager does at each call, and what it gives is read like anything from outside."""
    hash((*args, *kwargs.values()))  # raises
    if _reaches(c, args, kwargs) or id(f.__wrapped__) in c.fresh:
        return call(c, f.__wrapped__, args, kwargs)
    key = f, *map(type, args), *args, *kwargs.items()
    asked = c.cached_calls.setdefault(key, functools.partial(f, *args, **kwargs))
    c.in_cached_call += 1
    try:
        value = call_native(c, asked, [], {})
    finally:
        c.in_cached_call -= 1
    return c.read(value, c.const(asked, getattr(f, "__name__", "")).call("__call__"))


def _original(c, f):
    """What a compiled function or module was made from, read where it is."""
    original = f._lc_original
    if type(original) is types.FunctionType:
        return original
    return c.read(original, (c.sources.get(id(f)) or c.const(f)).attr("_lc_original"))


def _call_partial(c, f, args, kwargs):
    source = c.sources.get(id(f))
    function, given, keywords = f.func, f.args, f.keywords
    if source is not None:
        function, given = c.read(function, source.attr("func")), [c.read(x, source.attr("args").item(i)) for i, x in enumerate(given)]
        c.ask(source.attr("keywords"), KEYS)
        keywords = {k: c.read(v, source.attr("keywords").item(k)) for k, v in keywords.items()}
    return call(c, function, [*given, *args], {**keywords, **kwargs})


def _call_reference(c, f, args, kwargs):
    """A weak reference: what it refers to now is looked up again at each call."""
    return c.reach((c.sources.get(id(f)) or c.const(f)).call("__call__"))


def _call_operator(c, f, args, kwargs):
    """operator.attrgetter and operator.methodcaller: what they were made with stands in their pickled form."""
    (o,) = args
    made, names, *_ = f.__reduce__()
    if type(f) is operator.attrgetter:
        found = tuple(functools.reduce(c.load_attr, name.split("."), o) for name in names)
        return found if len(found) > 1 else found[0]
    keywords = made.keywords if isinstance(made, functools.partial) else {}
    names = [*(made.args if isinstance(made, functools.partial) else ()), *names]
    return c.call(c.load_attr(o, names[0]), list(names[1:]), dict(keywords))


def _replacement(c, f):
    try:
        return c.replacements.get(f)
    except TypeError:
        return None


def _call_symbol(c, symbol, args, kwargs):
    c.synchronize()
    return symbol(*all_lifted(c, args), **all_lifted(c, kwargs))


def _call_scripted(c, f, args, kwargs):
    """TorchScript's code cannot be read; the Python function that it was made of can."""
    original = compat.scripted_from(f)
    if original is None:
        c.refuse(f"{f.name} is TorchScript's", "call the Python function or module that it was scripted or traced from")
    return call(c, original, args, kwargs)


_BY_TYPE = {functools.partial: _call_partial, operator.attrgetter: _call_operator, operator.methodcaller: _call_operator, Symbol: _call_symbol}
_BY_TYPE |= {weakref.ref: _call_reference, weakref.KeyedRef: _call_reference}
_BY_TYPE[staticmethod] = lambda c, f, args, kwargs: call(c, f.__func__, args, kwargs)
_BY_TYPE |= dict.fromkeys(compat.scripted(), _call_scripted)
_BY_TYPE |= torch_func.KINDS


def _call_function(c, f, args, kwargs):
    if lookup(f) is not None:
        return record(c, f, args, kwargs)
    if inplace_of(f) is not None:
        return record(c, f, args, kwargs)
    module = f.__globals__.get("__name__")
    if native_module(module) and id(f) not in c.fresh and not module.startswith(FUNCTORCH):
        named = BY_NAME.get((module, f.__name__))
        if named is not None:
            return named(c, f, args, kwargs)
        if f in OVERRIDABLE:
            return record(c, f, args, kwargs)
        if module in AROUND_DYNAMO and hasattr(f, "__wrapped__"):  # around what Dynamo leaves alone, once it is imported or was used
            return call(c, f.__wrapped__, args, kwargs)
        if not _reaches(c, args, kwargs):
            return call_native(c, f, args, kwargs)
    return c.enter(f, args, kwargs)


def _reaches(c, args, kwargs) -> bool:
    """Whether an argument is something whose use must be seen: a tensor, an outside object, a function of the user's."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        t = type(a)
        if t is TensorProxy or t is AnyProxy or id(a) in c.sources or isinstance(a, NumberProxy):
            return True
        if t in VIEWS or t is types.MethodType and (id(a.__self__) in c.sources or _reaches(c, (a.__func__,), {})):
            return True
        if t is types.FunctionType and not native_module(a.__globals__.get("__name__")):
            return True
        if t is functools.partial and _reaches(c, (a.func, *a.args), a.keywords) or _is_users(t):
            return True
        if isinstance(a, tuple) and a and _reaches(c, a, {}):
            return True
    return False


def _is_users(t: type) -> bool:
    """Whether objects of a class are the program's own: Python code that they are given is interpreted, which sees what it looks at."""
    return not native_module(t.__module__) and not issubclass(t, type)


def _is_torch(f) -> bool:
    module = getattr(f, "__module__", None)
    if module is None:
        module = getattr(getattr(f, "__objclass__", None), "__module__", None) or getattr(type(getattr(f, "__self__", None)), "__module__", "")
    return module.split(".")[0] == "torch"


def _class_method(cls: type, name: str):
    """The descriptor of a class method in C: the methods that it gives are made anew at each access."""
    return next((vars(base)[name] for base in cls.__mro__ if type(vars(base).get(name)) is types.ClassMethodDescriptorType), None)


def reduced(c, f, args, kwargs):
    """What copy makes a copy of: the attributes of an outside object as the program sees them."""
    o = args[0] if getattr(f, "__self__", None) is None else f.__self__
    c.materialize(o)
    if id(o) not in c.sources or isinstance(o, torch.nn.Module) or c.slot(type(o), "__getstate__") or c.slot(type(o), "__reduce__"):
        return call_native(c, f, args, kwargs)
    found = Host.call_native(c, f, args, kwargs)
    state, own = found[2] if len(found) > 2 else None, dict(c.load_attr(o, "__dict__")) if hasattr(o, "__dict__") else None
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
    if s is None and args and type(args[0]) is TensorProxy and getattr(f, "__objclass__", None) is compat.TensorBase:  # torch.Tensor.is_contiguous(x)
        return record(c, f, args, kwargs)
    if type(s) is str and f.__name__ in ("format", "__mod__"):
        _note_text(c, (*args, *kwargs.values()))
        args, kwargs = [as_text(c, a) for a in args], {k: as_text(c, v) for k, v in kwargs.items()}
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
        some = 2 if f is functools.reduce else 0 if f in (min, max) and len(args) > 1 else 1 if f in (sum, sorted, min, max) else len(args)  # are iterables
        args = [_callable_for_native(c, a) if f in CALLABLE_FIRST and i == 0 else _iterable(c, a) if i < some else a for i, a in enumerate(args)]
        kwargs = {k: _callable_for_native(c, v) if k == "key" else v for k, v in kwargs.items()}
    elif s is not None and type(s) in CONTAINERS | {str} and f.__name__ in ("extend", "update", "join", "sort"):
        args = [_iterable(c, a) for a in args]
        kwargs = {k: _callable_for_native(c, v) if k == "key" else v for k, v in kwargs.items()}
    result = call_native(c, f, args, kwargs)
    if c.attribute_dicts:
        containers.write_attributes(c, s)
    return result


def _is_iterating(f) -> bool:
    try:
        return f in ITERATING
    except TypeError:
        return False


def _iterable(c, a):
    if type(a) is not TensorProxy and not isinstance(a, dict) and (c.slot(type(a), "__iter__") or c.slot(type(a), "__getitem__")):
        return c.steps(a)
    if id(a) in c.outside_iterators or type(a) is set:
        return c.iterate(a)
    return c.materialize(a)


_CALLED_BACK = (types.FunctionType, types.MethodType, TensorMethod, functools._lru_cache_wrapper)


def _callable_for_native(c, f):
    """Native code will call `f`: it comes back to the machine."""
    t = type(f)
    of_users = isinstance(f, type) and not native_module(f.__module__)
    if of_users or t in _CALLED_BACK or t in _BY_TYPE or c.slot(t, "__call__") or lookup(f) is not None:
        return lambda *a, **k: c.call(f, list(a), k)
    return f


def call_native(c, f, args, kwargs):
    if c.outside_iterators and any(id(a) in c.outside_iterators for a in args):
        c.sharp(ADVANCED)
    why = impure(f)
    if why is not None and id(getattr(f, "__self__", None)) not in c.announced:
        c.sharp(why)
    if f is functools.cmp_to_key or getattr(f, "__module__", None) == "itertools":
        args, kwargs = [_called_back(c, a) for a in args], {k: _called_back(c, a) for k, a in kwargs.items()}
    _expose_to(c, f, args, kwargs)
    if _asks_for_types(f):
        args, kwargs = [map_structure(concrete, a) if type(a) is tuple else concrete(a) for a in args], {k: concrete(a) for k, a in kwargs.items()}
    if not _is_torch(f):
        result = Host.call_native(c, f, args, kwargs)
        if why is not None and type(result) not in PRIMITIVE:
            c.announced[id(result)] = result
        return result
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
    if s is None and args and isinstance(getattr(f, "__objclass__", None), type) and issubclass(f.__objclass__, (tuple, *containers.MUTABLE)):
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
    """Whether native code may do another thing with a symbolic number than with a number; others use numbers' own methods."""
    module = getattr(f, "__module__", None) or type(getattr(f, "__self__", None)).__module__
    return (module or "builtins").split(".")[0] not in _NUMERIC


_NUMERIC = {"builtins", "operator", "_operator", "math", "itertools", "functools", "_functools", "torch", "numpy", "thunder", "collections", "_collections"}
_STORING = {
    "append", "extend", "insert", "appendleft", "extendleft", "pop", "popleft", "popitem", "get", "keys", "values", "items", "clear", "copy", "reverse", "update", "setdefault",
    "__setitem__", "__getitem__", "__delitem__", "__init__", "__iter__", "__len__", "__ior__", "__or__", "move_to_end", "fromkeys", "rotate",
}  # fmt: skip
_COMPARING = (set, frozenset, dict, repr, hash)


def _is_question(f) -> bool:
    """Whether a function of PyTorch's without arguments asks for a setting: what it may be asked again at each call."""
    asks = f.__name__.lstrip("_").startswith(("get_", "is_", "are_", "has_")) or f.__name__.endswith("_enabled")
    return asks and getattr(f, "__self__", None) in (None, compat.C) and f not in _OF_MODES


_ANSWERS = (bool, int, float, str)
_OF_MODES = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.cuda.is_current_stream_capturing)  # looked at for every call, or a device's


_MADE_EMPTY = {object, list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque}  # by `__new__`


def _looks_inside(f) -> bool:
    if f.__class__ is type and issubclass(f, BaseException) or getattr(f, "__name__", "") == "__new__" and f.__self__ in _MADE_EMPTY:
        return False
    try:
        return f not in HARMLESS
    except TypeError:
        return True


def construct_object(c, cls, args, kwargs):
    if lookup(cls) is not None:
        return record(c, cls, args, kwargs)
    if cls in ITERATING:
        args = [_callable_for_native(c, a) if cls in CALLABLE_FIRST and i == 0 else _iterable(c, a) for i, a in enumerate(args)]
        return call_native(c, cls, args, kwargs)
    if cls is dict or cls is collections.OrderedDict:
        return call_native(c, cls, [c.materialize(a) if isinstance(a, dict) else pairs(c, a) for a in args], kwargs)
    if cls is torch.Tensor and len(args) == 1 and isinstance(args[0], (torch.Size, Size)):
        return c.call(torch.empty, args, {"device": "cpu"})
    if cls is torch.Size and args:
        return size(tuple(c.iterate(args[0])))
    if issubclass(cls, (ENUM, torch.Tensor)) or cls is torch.Size:
        return record(c, cls, args, kwargs) if issubclass(cls, torch.Tensor) and cls is not torch.nn.Parameter else call_native(c, cls, args, kwargs)
    new, init = c.lookup(cls, "__new__"), c.lookup(cls, "__init__")
    new = getattr(new, "__func__", new)
    interpreted_new = type(new) is types.FunctionType and not native_module(new.__globals__.get("__name__"))
    interpreted_init = type(init) is types.FunctionType and (not native_module(init.__globals__.get("__name__")) or _reaches(c, args, kwargs))
    custom_meta = c.slot(type(cls), "__call__") is not None and not native_module(type(cls).__module__)
    if not (interpreted_new or interpreted_init or custom_meta):
        return call_native(c, cls, args, kwargs)
    return construction.construct(c, cls, args, kwargs)


def pairs(c, a) -> list:
    """What dict() makes of an argument that is no dict: a mapping's items, or pairs."""
    if type(a) is TensorProxy or not hasattr(type(a), "keys"):
        return list(c.steps(a))
    return [(k, c.getitem(a, k)) for k in c.steps(c.call(c.load_attr(a, "keys"), [], {}))]


# ---------------------------------------------------------------- text and types


def type_of(c, a) -> type:
    """The class that user code believes a value has."""
    if type(a) is TensorProxy:
        return kind_of(c, a)
    return a.python_type if isinstance(a, NumberProxy) else {Condition: bool, Size: torch.Size}.get(type(a), type(a))


def _note_text(c, values: tuple) -> None:
    if any(type(v) is TensorProxy for v in values):
        c.sharp("a tensor is put into a string, which shows its name in the trace and not its values")


def text_of(c, p: TensorProxy) -> str:
    _note_text(c, (p,))
    return repr(p)


def formatted_text(c, text: str, values):
    """`text % values`."""
    values = as_text(c, values)
    _note_text(c, values if type(values) is tuple else (values,))
    return text % values


HANDLERS: dict[int, object] = {}  # by the id of a function: see `handlers.py`
BY_NAME: dict[tuple, object] = {}  # of functions whose modules are imported only by programs that use them, by module and name


# ---------------------------------------------------------------------------------------------------------------- sharp edges


_WARNED: dict = {}  # once a site


def sharp_edge(c, what: str) -> None:
    location = c.user_location()
    where = f"{location[0]}:{location[1]}" if location else "unknown place"
    text = f"{what}, at {where}"
    option = c.options.sharp_edges
    if option is SHARP_EDGES_OPTIONS.ERROR:
        raise SharpEdgeError(text)
    if text not in c.sharp_edges:
        c.sharp_edges.append(text)
        if option is SHARP_EDGES_OPTIONS.WARN:
            warnings.warn_explicit(text, SharpEdgeWarning, *(location[:2] if location else ("unknown place", 0)), registry=_WARNED)


