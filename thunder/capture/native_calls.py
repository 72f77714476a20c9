"""Native calls: builtins, classes and library functions that run as they are, once everything that they may look at is
exposed."""

from __future__ import annotations

import collections
import contextvars
import functools
import math
import operator
import queue
import re
import types
import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.utils.checkpoint

from thunder import compat
from thunder.capture import (
    arrays,
    callbacks,
    changing,
    containers,
    host_lines,
    items,
    locks,
    operations,
    settings,
)
from thunder.capture.classes import of_library
from thunder.capture.expose import expose, in_tuples, is_for_library, with_numbers
from thunder.capture.identities import told_apart
from thunder.capture.interface import Capture
from thunder.capture.items import VIEWS
from thunder.capture.library.locks import call_lock
from thunder.capture.native import CONTAINERS, DICT_VIEWS, MUTABLE, PRIMITIVE, is_iterator
from thunder.capture.operations import all_lifted, record
from thunder.capture.policy import DEFINED, Host, Interpret, class_of_library, folded, native_row, policy
from thunder.capture.reads import note_call
from thunder.capture.watched import check_watched
from thunder.capture.world import MISSING
from thunder.capture.world import keys as keys_of
from thunder.core import signals
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import AnyProxy, Condition, NumberProxy, Proxy, TensorProxy, concrete, map_structure, settled
from thunder.interpreter import NULL, standins
from thunder.interpreter import Host as Machine
from thunder.interpreter.attributes import BUILTINS, NATIVE_METHODS, parts_of, plain_attribute
from thunder.interpreter.sequences import iterates_in_python
from thunder.ops import inplace_of, lookup

IDENTITY_CALLS = {
    *BUILTINS,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
}


def _is_torch(f) -> bool:
    module = plain_attribute(f, "__module__")
    if module is None:
        module = getattr(plain_attribute(f, "__objclass__"), "__module__", None) or getattr(
            type(plain_attribute(f, "__self__")), "__module__", ""
        )
    return module.split(".")[0] == "torch"


def _class_method(cls: type, name: str):
    """The descriptor of a class method in C: the methods that it gives are made anew at each access."""
    return next(
        (vars(base)[name] for base in cls.__mro__ if type(vars(base).get(name)) is types.ClassMethodDescriptorType),
        None,
    )


def _context_variable(c: Capture, f, args):
    """get, set and reset: the program's values are set while it is captured only, and at its end by the epilogue."""
    variable, first = f.__self__, c.effects.token(f.__self__)
    if f.__name__ == "set":
        token = f(*args)
        c.effects.note_token(variable, token)
        c.world.hold(token)
        return token
    if f.__name__ == "reset":
        if id(args[0]) not in c.world.keep:
            c.refuse("a context variable is reset with a token from outside", "set and reset it on the same side")
        f(*args)
        if args[0] is first:
            c.effects.note_token(variable, None)
        return None
    if first is not None:
        return f(*args)
    value = c.reach(c.world.const(variable).call("get", *args))
    return f(*args) if value is MISSING else value


def call_builtin(c: Capture, f, args, kwargs):
    """A call of a function or method in C."""
    if lookup(f) is not None or inplace_of(f) is not None:
        return record(c, f, args, kwargs)
    s = plain_attribute(f, "__self__")
    if isinstance(s, type) and (handler := DEFINED.get(id(_class_method(s, f.__name__)))) is not None:
        return handler(c, f, [s, *args], kwargs)
    looked_at = args[0] if args and type(f) in NATIVE_METHODS else s  # decimal.Context.copy(context)
    if (answer := host_lines.of_outside(c, f, looked_at, args, kwargs)) is not NULL:
        return answer
    if type(s) is str and f.__name__ == "join" and len(args) == 1 and isinstance(args[0], Iterator):
        args = [list(iter(standins.Listed(c, args[0])))]  # data-dependent texts among them
    answer = _by_receiver(c, f, s, args, kwargs)
    if answer is not NULL:
        return answer
    args = _with_keys(c, f, s, args)
    if c.containers.lazy and (answer := _of_lazy(c, f, s, args)) is not NULL:
        return answer
    if (answer := standins.run(c, f, args, kwargs)) is not NULL:
        return answer
    result = call_native(c, f, stepping(c, f, s, args), kwargs)
    if c.containers.attribute_dicts:
        containers.write_attributes(c, s)
    return result


def _with_keys(c: Capture, f, s, args) -> list:
    """The arguments of a method of a dict or a set, with the values of texts that it hashes."""
    first = 1 if s is None else 0  # dict.get(d, k)
    owner = s if first == 0 else args[0] if args else None
    if not isinstance(owner, (dict, set, frozenset)):
        return args
    if isinstance(owner, dict) or f.__name__ in _OF_ELEMENT:
        return [changing.settled(c, a) if i == first else a for i, a in enumerate(args)]
    if f.__name__.startswith("__"):  # an operator, of sets alone
        return [c.materialize(a) for a in args]
    return [a if i < first else _hashed(c, a) for i, a in enumerate(args)]


_OF_ELEMENT = ("add", "discard", "remove", "__contains__")


def _hashed(c: Capture, a):
    """An iterable of elements of a set, with the values of texts among them. A set that comes from another one asks for
    no iterator."""
    if isinstance(a, (list, tuple)):
        return [changing.settled(c, x) for x in c.steps(a)]
    if isinstance(a, Iterator):
        return _Hashed(c, a)
    changing.settle_inside(c, a)
    elements = c.materialize(a) if isinstance(a, (set, frozenset)) else iterable(c, a)
    return _Hashed(c, a) if type(elements) is standins.Iterated else elements


class _Hashed(standins.Iterated):
    """An iterable of the user's whose elements native code hashes."""

    __slots__ = ()

    def __iter__(self):
        return (self.host.hashed([x])[0] for x in self.host.steps(self.value))


class _HashedSteps(_Hashed):
    """An iterator of the program's, which native code is given and may hash the elements of."""

    __slots__ = ()

    def __iter__(self):
        return self

    def __next__(self):
        return self.host.hashed([self.host.next(self.value)])[0]


def _by_receiver(c: Capture, f, s, args, kwargs):
    """Methods of context variables, locks, text, generators of random numbers and tensors; NULL for others."""
    if type(s) is contextvars.ContextVar and f.__name__ in ("get", "set", "reset"):
        return _context_variable(c, f, args)
    # torch.Tensor.is_contiguous(x)
    if s is None and args and type(args[0]) is TensorProxy and plain_attribute(f, "__objclass__") is compat.TensorBase:
        return record(c, f, args, kwargs)
    if type(s) in locks.KINDS:
        return call_lock(c, f, args, kwargs)
    if type(s) is queue.SimpleQueue and f.__name__ == "get" and id(s) not in c.world.sources and s.empty():
        c.refuse("the program waits for a queue that another thread fills", "fill the queue before the call")
    if type(s) is str and f.__name__ in ("format", "format_map", "__mod__"):
        return _formatted(c, f, args, kwargs)
    if type(s) is torch.Generator:
        return record(c, getattr(torch.Generator, f.__name__), [s, *args], kwargs)
    if type(s) is TensorProxy:
        return f(*all_lifted(c, args), **all_lifted(c, kwargs))
    if f in (str.format, str.format_map, str.__mod__) and args and type(args[0]) is str:
        return _formatted(c, getattr(args[0], f.__name__), args[1:], kwargs)
    return NULL


_LOOKS_INSIDE = re.compile(r"\{[^{}:!]*[.\[]")  # a text for `format`, of whose fields one has a path


def _formatted(c: Capture, f, args, kwargs):
    if f.__name__ == "format_map" or f.__name__ == "format" and _LOOKS_INSIDE.search(f.__self__):
        c.refuse("str.format reads attributes or items of tensors", "write an f-string")
    kwargs = {k: v for k, v in kwargs.items() if isinstance(k, str) and k in f.__self__}  # which it may look at
    if operations.is_unknown_text(c, *args, *kwargs.values()):
        return host_lines.text(c, f, *args, **kwargs)
    return f(*(operations.shown(c, a) for a in args), **{k: operations.shown(c, v) for k, v in kwargs.items()})


def stepping(c: Capture, f, s, args) -> list:
    """The arguments with iterators that come back to the machine."""
    kind = standins.Listed if plain_attribute(f, "__name__") == "join" else standins.Iterated
    if steps := folded(f).steps:
        several = f in (min, max) and len(args) > 1
        last = steps if not several else 0
        called, _ = standins.CALLING.get(id(f), (None, ""))
        if f in (set, frozenset):
            return [_hashed(c, a) for a in args]
        return [iterable(c, a, kind) if i < last and i != called else a for i, a in enumerate(args)]
    if s is not None and type(s) in CONTAINERS | {str} and f.__name__ in ("extend", "update", "join", "sort"):
        return [items.pairs(c, a) if isinstance(s, dict) else iterable(c, a, kind) for a in args]
    return args


def iterated(c: Capture, a, kind=standins.Iterated):
    """Native code will iterate over `a`, when it asks for an iterator."""
    return a if type(a) in PRIMITIVE else kind(c, a)


def iterable(c: Capture, a, kind=standins.Iterated):
    t = type(a)
    if t is HostProxy and kind is standins.Listed:  # `join`, which the host then does
        return a
    if t is HostProxy or t is not TensorProxy and iterates_in_python(c, a, counted=True):
        return iterated(c, a, kind)
    if id(a) in c.outside.iterators or type(a) is set:
        return c.iterate(a)
    check_watched(c, a, "__iter__", f"iteration over a {t.__name__}")
    return c.materialize(a)


def _of_lazy(c: Capture, f, s, args):
    """The result of a function of a container whose elements are read when they are asked for. Other functions than
    those that add to it see it whole."""
    owner, n = args[0] if s is None and args else s, f.__name__
    if owner is None or id(owner) not in c.containers.lazy:
        return NULL
    containers.settle(c, owner)
    is_dict = isinstance(s, dict)
    if is_dict and n == "get" and args:
        return containers.dict_item(c, s, args[0], args[1] if len(args) > 1 else None)
    if is_dict and n == "__getitem__":
        return containers.dict_item(c, s, *args)
    if s is None or n not in ("append", "extend") and not (is_dict and n == "__setitem__"):
        containers.materialize(c, owner)
    return NULL


def special(c: Capture, method, value, args):
    """A special method in C, which an operator has found on the class of `value`: any call where it may call methods of
    what it is given, or a library looks at it. A container's compares its elements with those of such a container, and
    looks at nothing else."""
    operands, owner = args, method.__objclass__
    if issubclass(owner, _HOLDING):
        compared = (value, *args) if method.__name__ in standins.COMPARED and isinstance(args[0], owner) else ()
        operands = [x for x in parts_of(*compared) if not any(x is whole for whole in compared)]
    if is_for_library(value, *args) or any(callbacks.called_in(c, type(x), method) for x in parts_of(*operands)):
        return c.call(method, [value, *args], {})
    return method(value, *args)


def call_native(c: Capture, f, args, kwargs):
    """A call that native code answers: on the host, folded, asked again by the prologue, or refused, by policy."""
    if c.dispatch.reading is not None:
        note_call(c, f)
    items.check_iterators(c, *args)
    if (answer := host_lines.native(c, f, args, kwargs)) is not NULL:
        return answer
    args, kwargs = standins.with_functions(c, f, args, kwargs)
    if _makes_class(f) and len(args) > 2:
        c.refuse("the program creates a class", "create the class outside, and its objects inside")
    args, kwargs = _expose_to(c, f, args, kwargs)
    # values in containers from outside are seen now
    if (c.outside.host_values or c.numbers.proxies) and (answer := host_lines.native(c, f, args, kwargs)) is not NULL:
        return answer
    operands = *args, *kwargs.values()
    if _asks_for_types(f):
        args = [in_tuples(concrete, a) for a in args]
        kwargs = {k: concrete(a) for k, a in kwargs.items()}
    elif c.numbers.proxies and _looks_inside(f) and is_for_library(*operands):
        answer = with_numbers(c, *operands)
        args, kwargs = list(answer[: len(args)]), dict(zip(kwargs, answer[len(args) :], strict=True))
    if not _is_torch(f):
        result = _run(c, f, args, kwargs)
        _note_made(c, f, args, result)
        result = containers.held(c, result)
        if type(plain_attribute(f, "__self__")) is types.GeneratorType:
            c.follow_settings(f, result)  # of a context manager of PyTorch's that ends
        if all(type(x) in PRIMITIVE or isinstance(x, type) for x in operands) and settings.is_question(c, f):
            return settings.asked_again(c, f, args, kwargs, lambda f: result)
        return result
    return _call_torch(c, f, args, kwargs)


def _run(c: Capture, f, args, kwargs):
    """The call. Where native code has looked at what stands for a value, the call is refused: a text of it may have
    gone anywhere, and native code may have handled an error."""
    recorder, looks = c.recorder, c.recorder.looks
    try:
        result = signals.handler_of(Machine.call_native(c, f, args, kwargs))
    except c.uncatchable:
        raise
    except BaseException as error:
        _check_looks(c, f, recorder, looks)
        if isinstance(error, TypeError):
            _name_operands(c, error, args)
        raise
    _check_looks(c, f, recorder, looks)
    return result


def _check_looks(c: Capture, f, recorder, before: int) -> None:
    if recorder.looks != before:
        shown = plain_attribute(f, "__qualname__", f)
        c.refuse(
            f"{shown}, which runs natively, makes a text of a tensor, or looks at what a host call gives",
            "write this part in Python",
        )


def _call_torch(c: Capture, f, args, kwargs):
    """A call of PyTorch's that is no operation, which may enter or leave a mode."""
    c.synchronize()
    if type(f) in IDENTITY_CALLS:  # which takes numbers only
        args, kwargs = map_structure(settled, list(args)), map_structure(settled, kwargs)
    result = Machine.call_native(c, f, [c.lift(a) if isinstance(a, torch.Tensor) else a for a in args], kwargs)
    c.synchronize()
    c.follow_settings(f, result)
    if type(result) is torch.Tensor and not result.requires_grad and not any(id(a) in c.outside.arrays for a in args):
        return c.call(torch.clone, [c.lift(result)], {})  # made anew at each call
    if type(result) in settings.ANSWERS and not (args or kwargs) and settings.is_question(c, f):
        c.world.ask_setting(c.world.const(f).call("__call__"), result)
    return result


def _makes_class(f) -> bool:
    return isinstance(f, type) and issubclass(f, type) or f is type.__new__


def _note_made(c: Capture, f, args, result) -> None:
    """Native code has run: a cache that it made is the program's own; arrays from outside are as they were."""
    if f is functools._lru_cache_wrapper:
        c.note_own(result)
    if c.outside.arrays:
        arrays.check_arrays(c)


def _name_operands(c: Capture, error: TypeError, args) -> None:
    """Native code names the classes of its operands: put the classes that proxies stand for in their place."""
    for a in args:
        if isinstance(a, Proxy) and len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (error.args[0].replace(type(a).__name__, operations.type_of(c, a).__name__),)


def _expose_container(c: Capture, f, s, operands) -> None:
    """A method of a container looks at it and at its arguments, or stores them."""
    hashes = isinstance(s, (dict, set))
    for a in operands:
        c.materialize(a)
        if hashes or f.__name__ not in _STORING:
            told_apart(c, a, s)
    if hashes:
        _check_keys(c, s, operands)
    elif f.__name__ in _INDEXED and operands and callbacks.called_in(c, type(operands[0]), operator.index):
        callbacks.refuse(c, operands[0], operator.index)
    if f.__name__ not in _STORING:
        expose(c, s, *operands, called=None if standins.compares(f) else f)


def _expose_to(c: Capture, f, args, kwargs) -> tuple:
    """Expose everything that native code may look at; return the arguments. Refuses functions that it may call."""
    s, operands = plain_attribute(f, "__self__"), (*args, *kwargs.values())
    owner = plain_attribute(f, "__objclass__")
    if s is None and args and isinstance(owner, type) and issubclass(owner, _HOLDING):
        s, *operands = operands  # dict.__setitem__(d, k, v)
    if isinstance(s, _HOLDING):
        _expose_container(c, f, s, operands)
        return args, kwargs
    if _looks_inside(f):
        stands = not _is_torch(f)
        if stands:
            if c.outside.host_values:
                args = [_HashedSteps(c, a) if _steps(c, a) else a for a in args]
            callbacks.check_functions(c, f, operands)
        called = f if stands and not standins.compares(f) else None
        expose(c, s, *args, *kwargs.values(), concretely=_asks_for_types(f), called=called)
        return args, kwargs
    if f in _KEYED:  # values are put in unseen
        return [_with_hashed(c, a) for a in args], kwargs
    for a in operands:
        c.materialize(a)
        if f in _COMPARING:
            expose(c, a, called=f if f is repr else None)
            if f in _HASHING and isinstance(a, Iterable) and not isinstance(a, (str, bytes)):
                _check_keys(c, (), [a])
    return args, kwargs


def _steps(c: Capture, a) -> bool:
    """Whether a value is an iterator of the program's over what may be texts."""
    return type(a).__module__ in ("builtins", "itertools") and is_iterator(a) and id(a) not in c.outside.iterators


def _with_hashed(c: Capture, a):
    """The argument of `dict`, with the values of the keys that it hashes, unless `a` hashes them as they come."""
    if isinstance(a, dict):
        c.hashed(keys_of(a))
    if isinstance(a, (dict, standins.StandIn)):
        return a
    return [(*c.hashed(pair[:1]), *pair[1:]) if type(pair) is tuple and pair else pair for pair in a]


_HOLDING = (tuple, *MUTABLE)


def _check_keys(c: Capture, table, operands) -> None:
    """Native code hashes keys that it is given: the program depends on which objects they are."""
    keys: list = []
    for a in operands:
        if isinstance(a, (dict, set, frozenset)) or type(a) in DICT_VIEWS:
            keys += keys_of(a)
        elif type(a) in (list, tuple):
            keys += [a] if type(a) is tuple else []
            keys += [x[0] if type(x) is tuple and x else x for x in a]
        else:
            keys.append(a)
    callbacks.check_hashed(c, keys, keys_of(table))


def _asks_for_types(f) -> bool:
    """Whether native code may do another thing with a symbolic number than with a number; others use numbers' own
    methods."""
    if f is getattr(math, "sumprod", None):  # Python 3.12: it multiplies floats in a precision of its own
        return True
    if isinstance(plain_attribute(f, "__self__"), _PLAIN) or plain_attribute(f, "__objclass__") in _PLAIN:
        return True
    module = plain_attribute(f, "__module__") or type(plain_attribute(f, "__self__")).__module__
    return (module or "builtins").split(".")[0] not in _NUMERIC


_PLAIN = (int, float, complex)
_NUMERIC = {
    "builtins", "operator", "_operator", "math", "itertools", "functools", "_functools", "torch", "numpy", "thunder",
    "collections", "_collections", "_bisect", "_heapq",
}  # fmt: skip
_STORING = {
    "append", "extend", "insert", "appendleft", "extendleft", "pop", "popleft", "popitem", "get", "keys", "values",
    "items", "clear", "copy", "reverse", "update", "setdefault",
    "__setitem__", "__getitem__", "__delitem__", "__init__", "__iter__", "__len__", "__ior__", "__or__", "move_to_end",
    "fromkeys", "rotate",
}  # fmt: skip
_INDEXED = {"__getitem__", "__setitem__", "__delitem__", "insert", "pop", "rotate"}
_COMPARING = (set, frozenset, repr, hash)
_HASHING = (set, frozenset)
_KEYED = (dict, collections.OrderedDict)


# by `__new__`
_MADE_EMPTY = {object, list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque}


def _looks_inside(f) -> bool:
    if f.__class__ is type and issubclass(f, (BaseException, weakref.ref)):
        return False
    if plain_attribute(f, "__name__", "") == "__new__" and f.__self__ in _MADE_EMPTY:
        return False
    return folded(f).looks


def reaches(c: Capture, args, kwargs) -> bool:
    """Whether an argument is something whose use must be seen: a tensor, an outside object, a function of the
    user's."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        t = type(a)
        if t is TensorProxy or t is AnyProxy or id(a) in c.world.sources or isinstance(a, (NumberProxy, Condition)):
            return True
        if t in VIEWS or t is types.MappingProxyType or t in BUILTINS and type(policy(a)) is Host:
            return True
        if t is types.MethodType and (id(a.__self__) in c.world.sources or reaches(c, (a.__func__,), {})):
            return True
        if t is types.FunctionType and type(native_row(a).answer) is Interpret:
            return True
        if t is functools.partial and reaches(c, (a.func, *a.args), a.keywords) or _is_users(t):
            return True
        if isinstance(a, tuple) and a and reaches(c, a, {}) or isinstance(a, type) and not of_library(a):
            return True
    return False


def _is_users(t: type) -> bool:
    """Whether objects of a class are the program's own: Python code that gets one is interpreted."""
    return not class_of_library(t) and not issubclass(t, type)
