"""Calls: which callables are operations, which are interpreted, and which run natively."""

from __future__ import annotations

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.capture import cached_calls, callbacks, eager, host_lines
from thunder.capture.construct import construct_object, reduced
from thunder.capture.dispatch import LibraryCall
from thunder.capture.expose import contents_of
from thunder.capture.interface import Capture
from thunder.capture.library import higher_order, torch_func
from thunder.capture.locations import holds_state
from thunder.capture.methods import TensorMethod
from thunder.capture.native import CONTAINERS, PRIMITIVE, among
from thunder.capture.native_calls import IDENTITY_CALLS, call_builtin, call_native, reaches
from thunder.capture.operations import OVERRIDABLE, all_lifted, call_method, record
from thunder.capture.policy import (
    DEFINED,
    DEFINED_BY_KIND,
    DEFINED_BY_NAME,
    Ask,
    Eager,
    Fold,
    Host,
    is_library,
    is_of_library,
    native_row,
)
from thunder.capture.reads import note_call
from thunder.capture.world import IDENTITY, KEYS, LENGTH, SAME, Source
from thunder.compat.names import AROUND_DYNAMO, FUNCTORCH
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.errors import CaptureError
from thunder.extend.disable import Disabled
from thunder.interpreter import NULL, UnsupportedError, attributes, text
from thunder.interpreter import Host as Machine
from thunder.interpreter.attributes import NATIVE_METHODS, plain_attribute, type_attribute
from thunder.ops import inplace_of, lookup
from thunder.options import FALLBACK_OPTIONS


def call(c: Capture, f, args, kwargs):
    """Any call of the program."""
    t = type(f)
    if c.dispatch.reading is not None:
        note_call(c, f)
    if t is types.FunctionType and id(f) in c.known.interpreted:
        return c.enter(f, args, kwargs)
    if t is types.MethodType:
        return call(c, f.__func__, [f.__self__, *args], kwargs)
    if t is TensorMethod:
        return call_method(c, f, args, kwargs)
    if c.dispatch.replacements and among(f, c.dispatch.replacements):
        return _call_symbol(c, c.dispatch.replacements[f], args, kwargs)
    handler = DEFINED.get(id(f)) or c.dispatch.handlers.get(id(f))
    if handler is not None:
        return handler(c, f, args, kwargs)
    if t is types.FunctionType:
        return _call_function(c, f, args, kwargs)
    if t is types.MethodWrapperType:  # `super().__setattr__(...)` and the like
        wrapper = type_attribute(f.__objclass__, f.__name__)
        if (handler := DEFINED.get(id(wrapper))) is not None:
            return handler(c, wrapper, [f.__self__, *args], kwargs)
        if type(f.__self__) in CONTAINERS and f.__name__ in ("__repr__", "__str__") and not args:
            return text.representation(c, f.__self__)
    if t is types.BuiltinFunctionType and f.__name__ == "__format__" and type(f.__self__) in CONTAINERS:
        return text.formatted(c, f.__self__, *args)
    if t in IDENTITY_CALLS:
        return _BOUND.get(f.__name__, call_builtin)(c, f, args, kwargs)
    special = DEFINED_BY_KIND.get(t)
    if special is not None:
        return special(c, f, args, kwargs)
    return construct_object(c, f, args, kwargs) if isinstance(f, type) else _call_object(c, f, t, args, kwargs)


def _attribute_by_name(c: Capture, f, args, kwargs):
    """`float.__getattribute__(value, name)` and the like: a builtin class finds attributes as `object` does."""
    owner = plain_attribute(f, "__objclass__")
    if owner is None or owner.__module__ not in ("builtins", "collections"):
        return call_builtin(c, f, args, kwargs)
    operands = args if type(f) is types.WrapperDescriptorType else [f.__self__, *args]
    return attributes.call_by_name(owner, f.__name__)(c, f, operands, kwargs)


def _following(c: Capture, f, args, kwargs):
    """`iterator.__next__`."""
    owner = plain_attribute(f, "__self__")
    return call(c, next, args if owner is None else [owner, *args], kwargs)


_BOUND = {  # methods that an object gives anew
    "__reduce_ex__": reduced, "__next__": _following,
    **dict.fromkeys(("__getattribute__", "__setattr__", "__delattr__"), _attribute_by_name),
}  # fmt: skip


def _call_object(c: Capture, f, t: type, args, kwargs):
    """A call of an object that is neither a function nor a class."""
    # a compiled function: its original becomes part of this program
    if type_attribute(t, "_lc_cd") is not NULL and not isinstance(f, torch.nn.Module):
        return call(c, _original(c, f), args, kwargs)
    implementation = c.lookup(t, "__call__")
    if implementation is NULL:
        return f(*args, **kwargs)  # raises
    if type(implementation) in NATIVE_METHODS and implementation.__name__ != "__call__":  # `__call__ = dict.get`
        return call(c, implementation, [f, *args], kwargs)
    if is_library(t.__module__) and lookup(f) is not None:
        return record(c, f, args, kwargs)
    if (definition := higher_order.definition_of(f)) is not None:
        return c.enter(definition, args, kwargs)
    method = c.slot(t, "__call__")
    if method is not None:
        return call(c, method, [f, *args], kwargs)
    if t is functools._lru_cache_wrapper and not is_library(cached_calls.module_of(f)):
        return cached_calls.call(c, f, args, kwargs)
    if any(map(callbacks.runs_python, contents_of(f))):
        c.refuse(
            f"a call of a {t.__name__} calls a function natively, which thunder would not see", "write it in Python"
        )
    return call_native(c, f, args, kwargs)


def _original(c: Capture, f):
    """The original of a compiled function or module, read where it is."""
    original = f._lc_original
    if type(original) is types.FunctionType:
        return original
    return c.read(original, (c.world.sources.get(id(f)) or c.world.const(f)).attr("_lc_original"))


def _call_partial(c: Capture, f, args, kwargs):
    """A call of a `functools.partial`: of its function, with its arguments read where the partial stands."""
    source = c.world.sources.get(id(f))
    function, bound_arguments, keywords = f.func, f.args, f.keywords
    if source is not None:
        function = c.read(function, source.attr("func"))
        bound_arguments = [c.read(x, source.attr("args").item(i)) for i, x in enumerate(bound_arguments)]
        c.world.ask(source.attr("args"), LENGTH)
        c.world.ask(source.attr("keywords"), KEYS)
        known = c.containers.snapshots.get(id(keywords))  # which the program may have changed
        keywords = {k: c.read(v, source.attr("keywords").item(k)) for k, v in keywords.items()}
        keywords = keywords if known is None else dict(c.materialize(known))
    return call(c, function, [*bound_arguments, *args], {**keywords, **kwargs})


def _call_reference(c: Capture, f, args, kwargs):
    """A call of a weak reference: of one from outside the prologue asks for its object again."""
    if args or kwargs:
        return f(*args, **kwargs)  # raises
    if id(f) in c.world.sources:
        return c.reach(c.world.sources[id(f)].call("__call__"))
    referent = f()
    if type(referent) is TensorProxy and referent not in c.tensors.real:
        c.refuse("whether a tensor that the program makes is still alive", "keep a reference to it that is not weak")
    return referent


def _call_operator(c: Capture, f, args, kwargs):
    """A call of an object of the module `operator`, whose pickled form has its arguments."""
    if len(args) != 1 or kwargs:
        return f(*args, **kwargs)  # raises
    (o,) = args
    reduced: Any = f.__reduce__()
    constructor, names = reduced[:2]
    if type(f) is not operator.methodcaller:
        of_items = type(f) is operator.itemgetter
        items = [c.getitem(o, n) if of_items else functools.reduce(c.load_attr, n.split("."), o) for n in names]
        return tuple(items) if len(items) > 1 else items[0]
    keywords = constructor.keywords if isinstance(constructor, functools.partial) else {}
    names = [*(constructor.args if isinstance(constructor, functools.partial) else ()), *names]
    return c.call(c.load_attr(o, names[0]), list(names[1:]), dict(keywords))


def _leads_out(c: Capture, f, args) -> bool:
    """Whether what a library's function keeps, in its closure or as the object that it is a method of, leads to
    something whose use must be seen. The machine's own functions see it themselves."""
    if f.__module__.startswith("thunder."):
        return False
    is_method = args and type_attribute(type(args[0]), f.__name__) is not NULL  # `Signature.format`
    inside = (x for x in contents_of(f, *(args[:1] if is_method else ())) if not isinstance(x, (type, tuple)))
    return any(reaches(c, (x,), {}) for x in inside)


def _call_symbol(c: Capture, symbol, args, kwargs):
    c.synchronize()
    return symbol(*all_lifted(c, args), **all_lifted(c, kwargs))


def _call_scripted(c: Capture, f, args, kwargs):
    """TorchScript's code cannot be read, and is called as it is; the Python function that it was made of can."""
    original = compat.scripted_from(f)
    return eager.disabled(c, f, args, kwargs) if original is None else call(c, original, args, kwargs)


DEFINED_BY_KIND |= {
    functools.partial: _call_partial,
    **dict.fromkeys((operator.attrgetter, operator.itemgetter, operator.methodcaller), _call_operator),
    Symbol: _call_symbol,
    HostProxy: host_lines.call,
    host_lines.HostMethod: host_lines.call,
}
DEFINED_BY_KIND |= {weakref.ref: _call_reference, weakref.KeyedRef: _call_reference}
DEFINED_BY_KIND |= dict.fromkeys(compat.scripted(), _call_scripted)
DEFINED_BY_KIND |= torch_func.KINDS
DEFINED_BY_KIND[Disabled] = lambda c, f, args, kwargs: eager.disabled(c, f.function, args, kwargs)
DEFINED_BY_KIND[staticmethod] = lambda c, f, args, kwargs: call(c, f.__func__, args, kwargs)


# functions that look at who calls them are interpreted
_FRAMES = frozenset(("_getframe", "_getframemodulename", "currentframe"))


def _call_function(c: Capture, f, args, kwargs):
    """A call of a Python function: recorded where it is an operation, else handled by its row in the policy."""
    if lookup(f) is not None or inplace_of(f) is not None:
        return record(c, f, args, kwargs)
    module = f.__globals__.get("__name__")
    if is_library(module) and id(f) not in c.fresh:
        named = DEFINED_BY_NAME.get((module, f.__name__))
        if named is not None:
            return named(c, f, args, kwargs)
        if f in OVERRIDABLE and not module.startswith(FUNCTORCH):
            return record(c, f, args, kwargs)
        # a wrapper around code that Dynamo leaves alone, once it is imported or was used
        if module in AROUND_DYNAMO and hasattr(f, "__wrapped__"):
            # PyTorch disables methods of its own optimizers, which no user has asked for
            by_user = compat.is_disabled(f) and not (f.__wrapped__.__module__ or "").startswith("torch.")
            return (eager.disabled if by_user else call)(c, f.__wrapped__, args, kwargs)
        if _runs_natively(c, f, args, kwargs):
            return call_native(c, f, args, kwargs)
    elif id(f) in c.world.keep or id(f) in c.fresh:
        c.known.interpreted.add(id(f))
    return c.enter(f, args, kwargs)


def _runs_natively(c: Capture, f, args, kwargs) -> bool:
    """Whether a library's function runs as it is: on the host, or because it is folded and is given nothing whose use
    must be seen."""
    row = native_row(f)
    answer = row.answer
    if type(answer) is Host:
        return True
    if type(answer) not in (Fold, Ask) or not row.name and _FRAMES.intersection(f.__code__.co_names):
        return False
    return not (reaches(c, args, kwargs) or callbacks.reached(c, f, args, kwargs) or _leads_out(c, f, args))


# ---------------------------------------------------------------- functions that are interpreted


def enter(c: Capture, f, args, kwargs):
    """A call of a Python function: the program depends on its code, and is refused or called as it is by policy."""
    if id(f) not in c.known.asked_functions and id(f) not in c.fresh:
        if type(native_row(f).answer) is Eager:
            host_lines.refuse(c, f)
        c.known.asked_functions.add(id(f))
        library = is_library(f.__globals__.get("__name__"))
        if not library:
            c.world.ask(_part_of(c, f, "__code__"), IDENTITY)
        for i, (name, cell) in enumerate(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)):
            if not library or holds_state(f, name, cell):
                _shared(c, c.outside.cells.setdefault(id(cell), f), f, i, cell)
        if id(f) in c.world.anew:
            c.world.ask(c.world.sources[id(f)].attr("__globals__"), IDENTITY)
    if f.__code__ in c.request.eager and (result := eager.called(c, f, args, kwargs)) is not NULL:
        return result
    with Entered(c, f, args, kwargs):
        return Machine.enter(c, f, args, kwargs)


def foreign_function(c: Capture, f, args, kwargs, construct):
    c.refuse(f"{f.__qualname__}() has {construct}, which is not interpreted", "call it outside of the program")


def _shared(c: Capture, owner, f, index: int, cell) -> None:
    """A cell of a function that is known by its structure: another function has it too, or none may."""
    if id(f) not in c.world.anew:
        return
    source = c.world.sources[id(f)].attr("__closure__").item(index)
    if owner is f:
        c.outside.own_cells[source] = None
    else:
        c.world.ask(source, SAME, _part_of(c, owner, "__closure__").item(owner.__closure__.index(cell)))


def _part_of(c: Capture, f, name: str) -> Source:
    """The code or the defaults of a function. A closure is found where it came from, so that the program does not
    keep it alive."""
    if id(f) in c.world.anew:
        return c.world.sources[id(f)].attr(name)
    comes_and_goes = f.__closure__ is not None and id(f) not in c.world.constant_sources
    known = c.outside.function_sources.get(id(f)) if comes_and_goes else None
    return (known or c.world.const(f, f.__name__)).attr(name)


def default(c: Capture, f, name, value):
    """The default of a parameter, read where the function stands."""
    if type(value) is TensorProxy or id(f) in c.fresh or is_library(f.__globals__.get("__name__")):
        return value
    if id(f) in c.world.anew:
        parts = [c.read(getattr(f, n), _part_of(c, f, n)) for n in ("__defaults__", "__kwdefaults__")]
        if name is None:
            return None
        index = f.__code__.co_varnames.index(name) - f.__code__.co_argcount
        return c.getitem(parts[index >= 0], index if index < 0 else name)
    if name is None:
        c.world.ask(_part_of(c, f, "__defaults__"), IDENTITY)
        c.world.ask(_part_of(c, f, "__kwdefaults__"), IDENTITY)
        return None
    code = f.__code__
    source = c.world.sources.get(id(f)) or c.world.const(f)
    index = code.co_varnames.index(name) - code.co_argcount
    if index >= 0:
        return c.read(value, source.attr("__kwdefaults__").item(name))
    c.world.ask(_part_of(c, f, "__defaults__"), IDENTITY)
    if type(value) in PRIMITIVE:
        return value
    return c.read(value, source.attr("__defaults__").item(index))


# calls on the host that a function may record, and how many there may be for an operation with tensors: more cost more
# than one call of the function, which no kernels are fused with
_MOST_LINES, _LINES_OF_OPERATION = 64, 16


class Entered:
    """A function that is being read. A context, and no function around it: it takes no frame of each call."""

    __slots__ = ("c", "function", "args", "kwargs", "happened", "outer", "writes", "recorded")

    def __init__(self, c: Capture, function: types.FunctionType, args: Sequence, kwargs: dict):
        self.c, self.function, self.args, self.kwargs = c, function, args, kwargs

    def __enter__(self) -> None:
        c, dispatch = self.c, self.c.dispatch
        self.happened, self.outer, self.writes = c.dispatch.happened, dispatch.library, len(c.effects.held)
        self.recorded = len(c.recording.recorder.bound_symbols)
        if not is_of_library(self.function):
            dispatch.enter_library(None)
        elif self.outer is None:
            dispatch.enter_library(LibraryCall(self.function, self.args, self.kwargs, self.happened))

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        c, library, call = self.c, self.c.dispatch.library, (self.function, self.args, self.kwargs, self.happened)
        c.dispatch.enter_library(self.outer)
        if isinstance(error, (CaptureError, UnsupportedError)):
            if library is not None and self.outer is None:
                eager.note_library(c, library)
            stores = any(map(_has_gradient, itertools.islice(c.effects.held.values(), self.writes, None)))
            holds = self.recorded <= c.fallbacks.reaches_back_to and not stores
            if c.fallbacks.candidate is None and c.request.options.fallback is FALLBACK_OPTIONS.EAGER and holds:
                eager.note_function(c, *call)
        elif isinstance(error, Exception):
            c.fallbacks.note_failing(error, call)
        elif error is None and library is None and self.outer is None:
            self._call_as_it_is_where_cheaper()

    def _call_as_it_is_where_cheaper(self) -> None:
        """A function that records little but calls on the host, and many of them, costs less as one call. The program
        is refused and captured again with such calls. Where something has happened inside of the function, this call
        runs what it has recorded, and the next one is captured with them."""
        c, bound_symbols, fallbacks = self.c, self.c.recording.recorder.bound_symbols, self.c.fallbacks
        recorded = len(bound_symbols) - self.recorded
        if recorded <= _MOST_LINES or c.request.path or c.request.options.fallback is not FALLBACK_OPTIONS.EAGER:
            return
        recorded -= fallbacks.cheaper_since(self.recorded)
        operations = fallbacks.operations_since(bound_symbols, self.recorded)
        if recorded <= _MOST_LINES or operations * (_LINES_OF_OPERATION + 1) > recorded:
            return
        if not any(map(_has_gradient, itertools.islice(c.effects.held.values(), self.writes, None))):
            eager.note_function(c, self.function, self.args, self.kwargs, self.happened)
        if (candidate := fallbacks.candidate) is None:
            return
        reason = f"{self.function.__qualname__}() would be {recorded} calls on the host and decisions by their results"
        c.request.eager.cheaper.add(candidate.unit)
        if candidate.again:
            c.refuse(reason)
        c.request.eager.later[candidate.unit] = reason
        fallbacks.note_cheaper(self.recorded, recorded)


def _has_gradient(value: Any) -> bool:
    return type(value) is TensorProxy and value.requires_grad
