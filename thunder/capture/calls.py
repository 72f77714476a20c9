"""Calls: which callables are operations, which are interpreted, which run natively, and the handlers of those that need care."""

from __future__ import annotations

import collections.abc
import contextvars
import copy
import functools
import inspect
import operator
import os
import types
import warnings
import weakref

import numpy
import torch
import torch.utils.checkpoint

from thunder import _torch_compat as compat
from thunder.capture import containers, objects, opaque_values
from thunder.capture.library import autograd_function, backward, torch_func
from thunder.capture.native import (
    CALLABLE_FIRST,
    CONTAINERS,
    ENUM,
    HARMLESS,
    ITERATING,
    impure,
    native_module,
)  # fmt: skip
from thunder.capture.strides import LAYOUT_QUESTIONS, answer
from thunder.core.proxies import METHODS, AnyProxy, Condition, NumberProxy, TensorProxy, concrete, converted, extreme, map_structure
from thunder.core.symbol import Symbol
from thunder.core.unbacked import assume
from thunder.errors import SharpEdgeError, SharpEdgeWarning
from thunder.extend.debugging import breakpoint_line
from thunder.interpreter import NULL, Host, attributes, construction
from thunder.interpreter.attributes import type_attribute
from thunder.interpreter.builtin_calls import FRAME_CALLS
from thunder.interpreter.protocols import PROTOCOL_CALLS
from thunder.ops import inplace_of, lookup, random
from thunder.ops.methods import as_number, call_torch
from thunder.ops.opaque_values import CONSTRUCTORS
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.options import SHARP_EDGES_OPTIONS

__all__ = [
    "call", "call_native", "record", "operation", "tensor_attribute", "SymbolicSize", "NOT_OPERATIONS", "sharp_edge", "text_of",
    "materialize", "RecordingMode",
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


class SymbolicSize(tuple):
    """`x.shape` with entries that stay symbolic."""

    def numel(self):
        return functools.reduce(operator.mul, self, 1)

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return SymbolicSize(found) if isinstance(index, slice) else found


def _shape(p: TensorProxy):
    return size(p.shape)


def size(numbers) -> torch.Size | SymbolicSize:
    return (SymbolicSize if any(isinstance(n, NumberProxy) for n in numbers) else torch.Size)(numbers)


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
        with torch._C.DisableTorchFunction():
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
            c.guard(source.attr(n), "noattr", None)
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
        return opaque_values.method(c, p, n, materialized(c, args), materialized(c, kwargs))
    if n == "backward":
        return backward.call_backward(c, torch.Tensor.backward, [p, *args], kwargs)
    if n == "size":
        shape = _shape(c.recorder.latest(p))
        dim = args[0] if args else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    function = METHODS.get(n)
    if function is None or c.has_opaque_values:
        function = getattr(torch.Tensor, n)
        return record(c, function, [p, *args], kwargs)
    c.synchronize()
    return function(materialize(c, p), *materialized(c, args), **materialized(c, kwargs))


def materialized(c, values, *, typed: bool = False):
    """Arguments: snapshots read, real tensors lifted, lists and dicts copied, since the program may change its own later. numpy's numbers become Python's, unless `typed`."""
    t = type(values)
    if t is dict:
        return {k: materialize(c, v, typed=typed) for k, v in values.items()}
    return [materialize(c, v, typed=typed) for v in values]


def materialize(c, v, *, typed: bool = False):
    t = type(v)
    if t is TensorProxy and c.recorder.memory is not None and c.recorder.memory.formed:
        return c.recorder.latest(v)  # in the shape that it has now
    if t is TensorProxy or t is int or t is float or v is None or t is bool or t is str:
        return v
    if isinstance(v, torch.Tensor) or t is Condition:
        return c.lift(v)
    if t in CONTAINERS or t is tuple or t is slice:
        containers.escape(c, v)
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
    return METHODS.call(name, *materialized(c, operands))


def record(c, function, args, kwargs):
    """A call of a torch function."""
    if function in NOT_OPERATIONS:
        return function(*args, **kwargs)
    if function in LAYOUT_QUESTIONS:
        return answer(c, function, args, kwargs)
    c.synchronize()
    typed = function in _OF_DATA
    args, kwargs = materialized(c, args, typed=typed), materialized(c, kwargs, typed=typed)
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
        f = getattr(torch._C, n, None) or getattr(torch, n, None)
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
        return (_reduced if f.__name__ == "__reduce_ex__" else _call_builtin)(c, f, args, kwargs)
    special = _BY_TYPE.get(t)
    if special is not None:
        return special(c, f, args, kwargs)
    return _construct(c, f, args, kwargs) if isinstance(f, type) else _call_object(c, f, t, args, kwargs)


def _call_object(c, f, t: type, args, kwargs):
    """A call of an object that is neither a function nor a class."""
    if hasattr(t, "_lc_cd"):
        return _call_compiled(c, f, args, kwargs)
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
    if _reaches(c, args, kwargs) or id(f.__wrapped__) in c.fresh:
        return call(c, f.__wrapped__, args, kwargs)
    key = f, *map(type, args), *args, *kwargs.items()
    asked = c.cached_calls.setdefault(key, functools.partial(f, *args, **kwargs))
    c.in_cached_call += 1
    try:
        value = call_native(c, asked, [], {})
    finally:
        c.in_cached_call -= 1
    return c.read(value, c.const(asked, getattr(f, "__name__", "")).child("call", ("__call__",)))


def _call_compiled(c, f, args, kwargs):
    """A compiled function or module: its original becomes part of this program."""
    if isinstance(f, torch.nn.Module):
        if any(f.__dict__[n] for n in HOOKS):  # hooks of the wrapper's own
            return _module_call(c, None, [f, *args], kwargs)
        _watch_hooks(c, f)
    return call(c, _original(c, f), args, kwargs)


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
        c.guard(source.attr("keywords"), "keys", tuple(keywords))
        keywords = {k: c.read(v, source.attr("keywords").item(k)) for k, v in keywords.items()}
    return call(c, function, [*given, *args], {**keywords, **kwargs})


def _call_reference(c, f, args, kwargs):
    """A weak reference: what it refers to now is looked up again at each call."""
    return c.read(f(), (c.sources.get(id(f)) or c.const(f)).child("call", ("__call__",)))


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
    return symbol(*materialized(c, args), **materialized(c, kwargs))


def _call_scripted(c, f, args, kwargs):
    """TorchScript's code cannot be read; the Python function that it was made of can."""
    original = compat.scripted_from(f)
    if original is None:
        c.refuse(f"{f.name} is TorchScript's", "call the Python function or module that it was scripted or traced from")
    return call(c, original, args, kwargs)


_BY_TYPE = {functools.partial: _call_partial, operator.attrgetter: _call_operator, operator.methodcaller: _call_operator, Symbol: _call_symbol}
_BY_TYPE |= {weakref.ref: _call_reference, weakref.KeyedRef: _call_reference}
_BY_TYPE |= dict.fromkeys(compat.SCRIPTED, _call_scripted)
_BY_TYPE |= torch_func.KINDS


def _call_function(c, f, args, kwargs):
    if lookup(f) is not None:
        return record(c, f, args, kwargs)
    if inplace_of(f) is not None:
        return record(c, f, args, kwargs)
    module = f.__globals__.get("__name__")
    if native_module(module) and id(f) not in c.fresh and not module.startswith("torch._functorch"):
        named = _BY_NAME.get((module, f.__name__))
        if named is not None:
            return named(c, f, args, kwargs)
        if f in OVERRIDABLE:
            return record(c, f, args, kwargs)
        if module in ("torch._compile", "torch._dynamo.eval_frame") and hasattr(f, "__wrapped__"):  # around what Dynamo leaves alone, once it is imported or was used
            return call(c, f.__wrapped__, args, kwargs)
        if not _reaches(c, args, kwargs):
            return call_native(c, f, args, kwargs)
    return c.enter(f, args, kwargs)


VIEWS = {collections.abc.KeysView, collections.abc.ItemsView, collections.abc.ValuesView}  # of mappings written in Python


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
        if t is functools.partial and _reaches(c, (a.func, *a.args), a.keywords) or not native_module(t.__module__) and type_attribute(t, "__call__") is not NULL:
            return True
        if t is tuple and a and _reaches(c, a, {}):
            return True
    return False


def _is_torch(f) -> bool:
    module = getattr(f, "__module__", None)
    if module is None:
        module = getattr(getattr(f, "__objclass__", None), "__module__", None) or getattr(type(getattr(f, "__self__", None)), "__module__", "")
    return module.split(".")[0] == "torch"


def _reduced(c, f, args, kwargs):
    """What copy makes a copy of: the attributes of an outside object as the program sees them."""
    o = args[0] if getattr(f, "__self__", None) is None else f.__self__
    c.touch(o)
    if id(o) not in c.sources or isinstance(o, torch.nn.Module) or c.slot(type(o), "__getstate__") or c.slot(type(o), "__reduce__"):
        return call_native(c, f, args, kwargs)
    found = Host.call_native(c, f, args, kwargs)
    state, own = found[2] if len(found) > 2 else None, dict(c.load_attr(o, "__dict__")) if hasattr(o, "__dict__") else None
    if type(state) is tuple:
        state = own, {n: c.load_attr(o, n) for n in state[1]}
    for x in (own or {}).values():
        containers.escape(c, x)
        leak(c, x)
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
    source = c.const(variable).child("call", ("get", *args))
    try:
        value = f(*args)
    except LookupError:
        c.guards.setdefault((source, "empty", None), None)
        raise
    return c.read(value, source)


def _note_factory(c, f, operands) -> None:
    """A copy of a defaultdict has its factory."""
    if f.__name__ in ("copy", "__copy__"):
        for o in operands:
            if isinstance(o, collections.defaultdict):
                c.load_attr(o, "default_factory")


def _call_builtin(c, f, args, kwargs):
    if lookup(f) is not None or inplace_of(f) is not None:
        return record(c, f, args, kwargs)
    s = getattr(f, "__self__", None)
    if type(s) is contextvars.ContextVar:
        return _context_variable(c, f, args)
    if s is None and args and type(args[0]) is TensorProxy and getattr(f, "__objclass__", None) is torch._C.TensorBase:  # torch.Tensor.is_contiguous(x)
        return record(c, f, args, kwargs)
    if type(s) is str and f.__name__ in ("format", "__mod__"):
        _note_text(c, (*args, *kwargs.values()))
        args, kwargs = [spoken(c, a) for a in args], {k: spoken(c, v) for k, v in kwargs.items()}
    if type(s) is torch.Generator:
        return record(c, getattr(torch.Generator, f.__name__), [s, *args], kwargs)
    _note_factory(c, f, (s, *args))
    if type(s) is TensorProxy:
        return f(*materialized(c, args), **materialized(c, kwargs))
    if s is not None and c.lazy and id(s) in c.lazy:
        n = f.__name__
        if isinstance(s, dict) and n == "get" and args:
            return containers.dict_item(c, s, args[0], args[1] if len(args) > 1 else None)
        if isinstance(s, dict) and n == "__getitem__":
            return containers.dict_item(c, s, *args)
        if n not in ("append", "extend") and not (isinstance(s, dict) and n == "__setitem__"):
            containers.observe(c, s)
    elif s is None and args and c.lazy and id(args[0]) in c.lazy:
        containers.observe(c, args[0])
    if _is_iterating(f):
        some = 2 if f is functools.reduce else 0 if f in (min, max) and len(args) > 1 else 1 if f in (sum, sorted, min, max) else len(args)  # are iterables
        args = [_callable_for_native(c, a) if f in CALLABLE_FIRST and i == 0 else _iterable(c, a) if i < some else a for i, a in enumerate(args)]
        kwargs = {k: _callable_for_native(c, v) if k == "key" else v for k, v in kwargs.items()}
    elif s is not None and type(s) in CONTAINERS | {str} and f.__name__ in ("extend", "update", "join", "sort"):
        args = [_iterable(c, a) for a in args]
        kwargs = {k: _callable_for_native(c, v) if k == "key" else v for k, v in kwargs.items()}
    result = call_native(c, f, args, kwargs)
    if c.attribute_dicts:
        containers.written_attributes(c, s)
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
    return c.touch(a)


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
        c.sharp("an iterator from outside is advanced, and stays advanced only for the call that captured the program")
    why = impure(f)
    if why is not None:
        c.sharp(why)
    if c.lazy:
        for a in (*args, *kwargs.values()):
            containers.escape(c, a)
    if f is functools.cmp_to_key or getattr(f, "__module__", None) == "itertools":
        args, kwargs = [_called_back(c, a) for a in args], {k: _called_back(c, a) for k, a in kwargs.items()}
    _shown_to_native(c, f, args, kwargs)
    if not _is_torch(f):
        return Host.call_native(c, f, args, kwargs)
    c.synchronize()
    result = Host.call_native(c, f, [c.lift(a) if isinstance(a, torch.Tensor) else a for a in args], kwargs)
    if type(result) is torch.Tensor and not result.requires_grad and not any(id(a) in c.arrays for a in args):
        return c.call(torch.clone, [c.lift(result)], {})  # made anew at each call
    if type(result) in _ANSWERS and not (args or kwargs) and _is_question(f):
        c.questions[f, None] = result
    return result


def _called_back(c, a):
    return _callable_for_native(c, a) if callable(a) and not hasattr(type(a), "__iter__") else a


def _shown_to_native(c, f, args, kwargs) -> None:
    """What native code may look at is guarded: the attributes of outside objects, and what containers compare."""
    s, values = getattr(f, "__self__", None), (*args, *kwargs.values())
    if _looks_inside(f):
        for a in (s, *values):
            if id(a) in c.sources:
                leak(c, a)
    if type(s) in CONTAINERS or type(s) is tuple:
        if f.__name__ not in ("append", "extend", "insert"):
            leak_inside(c, (s, *args))
            for a in args:
                containers.told_apart(c, a, s)
    elif type(f) is not type or f not in _KEEPING:
        for a in values:
            leak_inside(c, a)


def _is_question(f) -> bool:
    """Whether a function of PyTorch's without arguments asks for a setting: what it may be asked again at each call."""
    asks = f.__name__.lstrip("_").startswith(("get_", "is_", "are_", "has_")) or f.__name__.endswith("_enabled")
    return asks and getattr(f, "__self__", None) in (None, torch._C) and f not in _OF_MODES


_ANSWERS = (bool, int, float, str)
_KEEPING = (list, tuple, enumerate, zip, map, filter, reversed)  # make containers or iterators, and compare nothing
_OF_MODES = (torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.cuda.is_current_stream_capturing)  # looked at for every call, or a device's
_COMPARED = ("__eq__", "__lt__", "__gt__", "__format__", "__hash__", "__index__", "__repr__", "__str__")


def leak_inside(c, value, depth: int = 2) -> None:
    """A container goes to native code, which may compare or print what is in it: objects whose classes say how are guarded."""
    kind = type(value)
    if kind in (list, tuple, dict, set, frozenset):
        if depth and len(value) < 200:
            for x in (*value, *value.values()) if kind is dict else value:
                leak_inside(c, x, depth - 1)
    elif depth < 2 and id(value) in c.sources:
        methods = (getattr(kind, n, None) for n in _COMPARED)
        if any(type(m) is types.FunctionType and not native_module(m.__globals__.get("__name__")) for m in methods):
            leak(c, value)


def _looks_inside(f) -> bool:
    if type(getattr(f, "__self__", None)) in CONTAINERS:
        return False
    try:
        return f not in HARMLESS
    except TypeError:
        return True


def leak(c, o, depth: int = 2) -> None:
    """An outside object goes to native code that may look inside: all of its attributes are guarded, two levels deep."""
    source = c.sources.get(id(o))
    if source is None or isinstance(o, (torch.nn.Module, type, types.FunctionType)) or type(o) in CONTAINERS or ("leak", id(o)) in c.seen_names:
        return
    if any(i == id(o) for i, _ in c.overlay):
        c.refuse(f"{source.describe(c.parameters)}, which the program has written to, goes to code that thunder does not read", "use what it needs of the object")
    c.seen_names.add(("leak", id(o)))
    d = getattr(o, "__dict__", None)
    if not isinstance(d, dict):
        return
    c.guard(source.attr("__dict__"), "keys", tuple(d))
    for n, x in list(d.items()):
        child = concrete(c.read(x, source.attr(n)))
        if depth and id(child) in c.sources:
            containers.escape(c, child)
            leak(c, child, depth - 1)


def _construct(c, cls, args, kwargs):
    if lookup(cls) is not None:
        return record(c, cls, args, kwargs)
    if cls in ITERATING:
        args = [_callable_for_native(c, a) if cls in CALLABLE_FIRST and i == 0 else _iterable(c, a) for i, a in enumerate(args)]
        return call_native(c, cls, args, kwargs)
    if cls is dict or cls is collections.OrderedDict:
        return call_native(c, cls, [c.touch(a) if isinstance(a, dict) else pairs(c, a) for a in args], kwargs)
    if cls is torch.Tensor and len(args) == 1 and isinstance(args[0], (torch.Size, SymbolicSize)):
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


# ---------------------------------------------------------------------------------------------------------------- handlers


def _type(c, f, args, kwargs):
    if len(args) != 1 or kwargs:
        return _construct(c, f, args, kwargs) if args and isinstance(args[0], type) else call_native(c, f, args, kwargs)
    return type_of(c, args[0])


def type_of(c, a) -> type:
    """The class that user code believes a value has."""
    if type(a) is TensorProxy:
        return kind_of(c, a)
    return a.python_type if isinstance(a, NumberProxy) else {Condition: bool, SymbolicSize: torch.Size}.get(type(a), type(a))


def _number(c, f, args, kwargs):
    """int and float."""
    if len(args) == 1 and isinstance(args[0], NumberProxy):
        return converted(args[0], f)
    if len(args) == 1 and type(args[0]) is TensorProxy:
        c.synchronize()
        return as_number(args[0], f)
    return PROTOCOL_CALLS[id(f)](c, f, args, kwargs)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _module_call(c, f, args, kwargs):
    """nn.Module.__call__: without hooks it goes straight to forward."""
    m = args[0]
    d = m.__dict__
    M = torch.nn.modules.module
    has_hooks = any(c.snapshots.get(id(d[n])) or d[n] for n in HOOKS)
    has_global = M._global_forward_hooks or M._global_forward_pre_hooks or M._global_backward_hooks or M._global_backward_pre_hooks
    if d.get("_compiled_call_impl") is not None:
        c.refuse("a module that torch.compile compiled is called inside", "compile with one of the two")
    if has_hooks or has_global:
        if d["_backward_hooks"] or d["_backward_pre_hooks"] or M._global_backward_hooks or M._global_backward_pre_hooks:
            c.refuse("a module with full backward hooks is called", "remove the hooks, or register hooks on the compiled module's outputs")
        _guard_hooks(c, m)
        return c.enter(torch.nn.Module._call_impl, args, kwargs)
    _watch_hooks(c, m)
    return c.call(c.load_attr(m, "forward"), args[1:], kwargs)


def _watch_hooks(c, m) -> None:
    """The hook dicts of a module without hooks are checked to stay empty."""
    if id(m) not in c.sources or id(m) in c.seen_hooks:
        return
    M = torch.nn.modules.module
    if not c.seen_hooks:
        c.hook_dicts += [M._global_forward_hooks, M._global_forward_pre_hooks, M._global_backward_hooks, M._global_backward_pre_hooks]
    c.seen_hooks.add(id(m))
    c.hook_dicts += [m.__dict__[n] for n in HOOKS]


def _guard_hooks(c, m) -> None:
    """The hook dicts of a module with hooks are read by the interpreted call; those that are empty are checked to stay so."""
    source = c.sources.get(id(m))
    if source is None:
        return
    for n in HOOKS:
        c.touch(c.load_attr(m, n))


def _checkpoint(c, f, args, kwargs):
    """What is computed inside is marked: the backward computes it again instead of finding it saved."""
    options = set(inspect.signature(torch.utils.checkpoint.checkpoint).parameters) - {"function", "args", "kwargs"} | {"preserve_rng_state"}
    if kwargs.get("use_reentrant"):
        c.refuse("torch.utils.checkpoint with use_reentrant=True", "pass use_reentrant=False")
    recorder, outer = c.recorder, c.recorder.context.checkpoint
    recorder.context = recorder.context.replace(checkpoint=(*outer, object()))
    try:
        return c.call(args[0], args[1:], {k: v for k, v in kwargs.items() if k not in options})
    finally:
        recorder.context = recorder.context.replace(checkpoint=outer)


def _leave_autocast(c, f, args, kwargs):
    """`autocast.__exit__`: where no other one is around it, the casts that it kept are gone."""
    result = call_native(c, f, args, kwargs)
    if not compat.autocast_nesting():
        c.recorder.casts.clear()
    return result


def _torch_compile(c, f, args, kwargs):
    c.refuse("torch.compile is called inside the program", "compile with one of the two: remove the inner torch.compile")


def _associative_scan(c, f, args, kwargs):
    """torch's associative_scan by its definition: y[0] = x[0], y[i] = combine(y[i - 1], x[i])."""
    names = ("combine_fn", "xs", "dim", "reverse", "combine_mode")
    given = dict(zip(names, args)) | kwargs
    leaves, spec = torch.utils._pytree.tree_flatten(given["xs"])
    dim, reverse = given["dim"], given.get("reverse", False)
    slices = list(zip(*(record(c, torch.unbind, [x, dim], {}) for x in leaves)))
    slices = slices[::-1] if reverse else slices
    out = [slices[0]]
    for x in slices[1:]:
        previous = torch.utils._pytree.tree_unflatten(list(out[-1]), spec)
        combined = c.call(given["combine_fn"], [previous, torch.utils._pytree.tree_unflatten(list(x), spec)], {})
        out.append(tuple(torch.utils._pytree.tree_leaves(combined)))
    out = out[::-1] if reverse else out
    stacked = [record(c, torch.stack, [list(column), dim], {}) for column in zip(*out)]
    return torch.utils._pytree.tree_unflatten(stacked, spec)


# handlers of functions whose modules are imported only by programs that use them
_BY_NAME = {
    ("torch._higher_order_ops.associative_scan", "associative_scan"): _associative_scan,
    **torch_func.BY_NAME,
}


def _is_compiling(c, f, args, kwargs):
    """Answered as eager PyTorch answers, so that the program goes the way it goes there; with yes in a second reading, where that way can not be captured."""
    c.asked_whether_compiling = True
    return c.compiling


def _constant(value):
    return lambda c, f, args, kwargs: value


def _extreme(c, f, args, kwargs):
    """min and max of numbers some of which only the run tells."""
    numbers = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
    if kwargs or not any(isinstance(n, NumberProxy) and n.unbacked for n in numbers) or not all(isinstance(n, (int, float, NumberProxy)) for n in numbers):
        return _call_builtin(c, f, args, kwargs)
    return functools.reduce(lambda a, b: extreme(f.__name__, a, b), numbers)


def _symbolic(c, f, args, kwargs):
    """torch.sym_max and the like: what Python's functions do, without branching."""
    if f is torch.sym_not:
        return args[0].__sym_not__() if type(args[0]) is Condition else not args[0]
    if f in (torch.sym_int, torch.sym_float):
        return converted(args[0], int if f is torch.sym_int else float)
    found = extreme("max" if f is torch.sym_max else "min", *args)
    return converted(found, float) if any(isinstance(x, float) or isinstance(x, NumberProxy) and x.python_type is float for x in args) else found


class Id(int):
    """What id() says of an object from outside."""


def _id(c, f, args, kwargs):
    """What came from outside has an id of its own, until that meets ids from outside (`real_id`)."""
    (o,) = args
    seen = c.lazy.get(id(o)) or c.pristine.get(id(o))
    real, source = c.real.get(o, (None, None)) if type(o) is TensorProxy else (seen[0] if seen else o, c.sources.get(id(o)))
    if source is None:
        return id(o)
    for k, (known, other) in c.stand_ins.items():
        if other is real and known is not source:
            c.guard(source, "same", known, known)
            return k
    k = Id(id(o))
    c.stand_ins[k] = source, real
    return k


def real_id(c, k):
    """A number that meets ids from outside: the id of what came from outside holds as long as that is the same."""
    if type(k) is not Id:
        return k
    source, real = c.stand_ins[k]
    if type(real).__weakrefoffset__:
        c.passing.add(id(real))
    if source.step != "const":
        c.guard(source, "is", real)
    return id(real)


def _callable(c, f, args, kwargs):
    return False if type(args[0]) is TensorProxy else callable(args[0])


def _check_is_size(c, f, args, kwargs):
    """torch._check_is_size: of a number that only the run tells; others are checked by PyTorch's own function."""
    (n, *rest), most = args, kwargs.get("max")
    if not (isinstance(n, NumberProxy) and n.unbacked):
        return c.enter(f, args, kwargs)
    for condition in (n >= 0, True if most is None else n <= most):
        _checks(c, torch._check, [condition, *rest], {k: v for k, v in kwargs.items() if k == "message"})


def _checks(c, f, args, kwargs):
    """torch._assert and torch._check: a condition on tensors cannot be asked, one on numbers that only the run tells is checked when the program runs."""
    condition, *rest = args
    if type(condition) is Condition:
        message = rest[0] if rest else kwargs.get("message")
        assume(condition, str(message if isinstance(message, str) else f"Expected {condition.text()}" if message is None else c.call(message, [], {})))
        return None
    if type(condition) is TensorProxy:
        c.sharp("an assertion on a tensor's value is not checked in the compiled program")
        return None
    return c.enter(f, args, kwargs)


def _note_text(c, values: tuple) -> None:
    if any(type(v) is TensorProxy for v in values):
        c.sharp("a tensor is put into a string, which shows its name in the trace and not its values")


def text_of(c, p: TensorProxy) -> str:
    _note_text(c, (p,))
    return repr(p)


def formatted_text(c, text: str, values):
    """`text % values`."""
    leak_inside(c, (values,))
    values = spoken(c, values)
    _note_text(c, values if type(values) is tuple else (values,))
    return text % values


def spoken(c, value):
    """What goes into a string: numbers that stay symbolic are there as what they are."""
    containers.escape(c, value)
    if type(value) in CONTAINERS and isinstance(value, (dict, collections.deque)):
        value = copy.copy(value)
        for k, x in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[k] = spoken(c, x)
        return value
    return map_structure(concrete, value) if type(value) in (list, tuple) else concrete(value)


def _print(c, f, args, kwargs):
    c.sharp("print() runs while the program is captured and not again")
    return print(*args, **kwargs)


HANDLERS: dict[int, object] = {}


def _install() -> None:
    HANDLERS.update(FRAME_CALLS)
    HANDLERS.update(PROTOCOL_CALLS)
    M = torch.nn.Module
    table = {
        type: _type, callable: _callable, id: _id, print: _print, int: _number, float: _number,
        breakpoint: lambda c, f, a, k: breakpoint_line(),
        M._wrapped_call_impl: _module_call, M._call_impl: _module_call, M.__call__: _module_call,
        M.__getattr__: lambda c, f, a, k: objects.of_torch_module(c, *a),
        M.__setattr__: _module_setattr,
        object.__reduce_ex__: _reduced,
        torch.utils.checkpoint.checkpoint: _checkpoint,
        torch.compile: _torch_compile,
        torch.random.fork_rng: lambda c, f, a, k: random.fork_rng(*a, **k),
        torch.autocast.__exit__: _leave_autocast, torch.cpu.amp.autocast.__exit__: _leave_autocast, torch.cuda.amp.autocast.__exit__: _leave_autocast,
        torch.autograd.Function.apply.__func__: autograd_function.apply,
        torch.compiler.is_compiling: _is_compiling,
        torch.compiler.is_dynamo_compiling: _constant(False),
        torch.overrides.has_torch_function: _constant(False),
        torch.overrides.has_torch_function_unary: _constant(False),
        torch.overrides.has_torch_function_variadic: _constant(False),
        torch.jit.is_scripting: _constant(False), torch.jit.is_tracing: _constant(False), torch._C._get_tracing_state: _constant(None),
        torch.Tensor.backward: backward.call_backward,
        torch.autograd.backward: lambda c, f, a, k: c.enter(f, a, k), torch.autograd.grad: lambda c, f, a, k: c.enter(f, a, k),
        torch._C._group_tensors_by_device_and_dtype: backward.group_by_device_and_dtype,
        torch.autograd._make_grads: backward.make_gradients,
        torch.autograd.graph._engine_run_backward: backward.run_engine,
        os.getenv: lambda c, f, a, k: c.call(c.load_attr(c.load_attr(os, "environ"), "get"), a, k),
        torch.is_tensor: lambda c, f, a, k: type(a[0]) is TensorProxy or isinstance(a[0], torch.Tensor),
        torch._assert: _checks, torch._check: _checks, torch._check_is_size: _check_is_size, min: _extreme, max: _extreme,
        torch.autograd.profiler.record_function.__enter__: lambda c, f, a, k: a[0],  # a compiled program has no such ranges
        torch.autograd.profiler.record_function.__exit__: _constant(None),
        **dict.fromkeys((torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not), _symbolic),
        **dict.fromkeys(CONSTRUCTORS, record),
        torch._C._log_api_usage_once: _constant(None),
        **torch_func.HANDLERS,
    }  # fmt: skip
    HANDLERS.update({id(f): h for f, h in table.items()})
    KEEP.extend(table)


KEEP: list = []


def _module_setattr(c, f, args, kwargs):
    """nn.Module.__setattr__ of an outside module: the name may be a parameter, a buffer or a child."""
    m, n, v = args
    if id(m) in c.sources:
        parameters = m.__dict__.get("_parameters", {})
        if n in parameters and v is not None and not (type(v) is TensorProxy and kind_of(c, v) is torch.nn.Parameter) and not isinstance(v, torch.nn.Parameter):
            raise TypeError(f"cannot assign '{_type_name(v)}' as parameter '{n}' (torch.nn.Parameter or None expected)")
    attributes.set_attribute(c, m, n, v)


def _type_name(v) -> str:
    return "torch.FloatTensor" if type(v) is TensorProxy else type(v).__name__


_install()


# ---------------------------------------------------------------------------------------------------------------- sharp edges


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
            warnings.warn_explicit(text, SharpEdgeWarning, *(location[:2] if location else ("unknown place", 0)))


