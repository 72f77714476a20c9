"""Functions of the user's behind functools.lru_cache: the prologue calls them, as eager does at each call.

    t0 = table(self, 3)   # self from outside: its cache may have the result, of an object that is another since
    if checks.attributes_are(...): ...; table_0 = ask_table((self,))

An object of the program's own is a key that no cache has; where its class compares, an equal one is made: once, or by
each call where objects from outside are in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from thunder.capture import callbacks, containers
from thunder.capture.expose import is_written
from thunder.capture.interface import Capture
from thunder.capture.native import ENUM, IDENTICAL, IMMUTABLE, MUTABLE, PRIMITIVE, slots
from thunder.capture.world import IDENTITY, PRESENT, TYPE, Source, say
from thunder.core.proxies import NumberProxy, Size, TensorProxy, map_structure, numbers_in, settled
from thunder.interpreter import NULL, Host
from thunder.interpreter.attributes import of_python, parts_of, plain_attribute, type_attribute


class _Placeholder(NamedTuple):
    """An argument that the prologue reads: the position of its source."""

    index: int


class _Instance(NamedTuple):
    """An object of the program's own, of which each call makes an equal one. items: of a dict."""

    kind: type
    items: tuple
    attributes: tuple


def module_of(f) -> str:
    """The module of the function behind functools.lru_cache, through partial objects, which have the module of theirs.

    A cached method of a class has no `__module__` of its own."""
    function = _function_of(f)
    return getattr(function, "__module__", None) or type(function).__module__


def _function_of(f) -> Any:
    """The function behind functools.lru_cache, and behind partial objects."""
    function = f.__wrapped__
    while type(function) is functools.partial:
        function = function.func
    return function


def call(c: Capture, f, args, kwargs):
    """The result is read like anything from outside."""
    is_own = id(f.__wrapped__) in c.fresh
    if not is_own and numbers_in([*args, *kwargs.values()], []):
        if (result := _computed(c, f, args, kwargs)) is not NULL:
            return result
    args, kwargs = [_as_key(a) for a in args], {k: _as_key(a) for k, a in kwargs.items()}
    callbacks.check_hashed(c, (*args, *kwargs.values()))
    hash((*args, *kwargs.values()))  # raises
    values = tuple(parts_of(*args, *kwargs.values()))
    if is_own:
        if not all(_by_identity(x) for x in values if not _is_constant(c, x)):
            _refuse(c, f, "compares an object of the program with others")
        return _own_cache(c, f)(*args, **kwargs)
    if any(type(a) is TensorProxy for a in values):
        _refuse(c, f, "keeps results by tensor")
    own = [x for x in values if not (_is_constant(c, x) or id(x) in c.world.sources or type(x) is tuple)]
    if any(map(_by_identity, own)):
        return _own_cache(c, f)(*args, **kwargs)
    if not all(_is_made_again(c, x) for x in own):
        _refuse(c, f, "compares an object of the program with others")
    if any(is_written(c, x) for x in (f.__wrapped__, *values)):
        _refuse(c, f, "is given an object that the program has written to")
    return _repeated_call(c, f, args, kwargs)


def _as_key(x: Any) -> Any:
    """An argument with the values of symbolic numbers, which would be other keys than the numbers they stand for."""
    return torch.Size([int(settled(n)) for n in x]) if type(x) is Size else map_structure(settled, x)


def _computed(c: Capture, f, args, kwargs):
    """The result of a function of sizes that vary: the program computes it, as on a miss of the cache. NULL where the
    function is more than its arguments: a cache may then have another result than a call has now."""
    if type(f.__wrapped__) is not types.FunctionType:
        return NULL
    if any(type(a) is TensorProxy for a in parts_of(*args, *kwargs.values())):
        return NULL
    symbols = [*map(_symbol, (*args, *kwargs, *kwargs.values()))]
    key = f, len(args), *symbols, *map(type, symbols)
    if key in c.known.computed:  # raises as the cache does
        return c.known.computed[key]
    roots = {c.world.sources[id(x)].root for x in parts_of(*args, *kwargs.values()) if id(x) in c.world.sources}
    observed, written, recorded = set(c.world.observed), containers.state(c), len(c.recorder.bound_symbols)
    result = c.call(f.__wrapped__, list(args), dict(kwargs))
    new = [(source, question) for source, question, _ in c.world.observed.keys() - observed]
    alone = all(question in _OF_DEFINITIONS or source.root in roots for source, question in new)
    if containers.state(c) != written or len(c.recorder.bound_symbols) > recorded:
        _refuse(c, f, "does not repeat its effects")  # they would be done again
    if not alone:
        return NULL
    for x in parts_of(result):
        if isinstance(x, MUTABLE) and id(x) not in c.world.sources:
            c.path.lend(x)  # a cache would give the same one to others
    c.known.computed[key] = result
    return result


def _symbol(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_symbol, tuple.__iter__(x)))
    return x.expression if isinstance(x, NumberProxy) else x


_OF_DEFINITIONS = (IDENTITY, PRESENT, TYPE)  # functions and classes that stay


def _refuse(c: Capture, f, why: str):
    name = getattr(_function_of(f), "__qualname__", "a function")
    reason = f"{name}() is behind functools.lru_cache, which {why}"
    c.refuse(reason, "call it without the cache (`__wrapped__`), or outside of the compiled function")


def _is_constant(c: Capture, x) -> bool:
    """Whether a key is compared by value, or is something that stays."""
    kind = type(x)
    if kind in PRIMITIVE or issubclass(kind, IMMUTABLE):
        return True
    stays = id(x) not in c.fresh and id(x) not in c.world.anew
    return stays and (kind in IDENTICAL or issubclass(kind, (type, ENUM)))


def _by_identity(x) -> bool:
    """Whether an object is equal to no other."""
    return type(x) in (tuple, TensorProxy) or type_attribute(type(x), "__hash__") is object.__hash__


def _is_made_again(c: Capture, x) -> bool:
    """Whether an object of the program's own has attributes, and items as a dict, from which each call makes an equal
    one. The items are keys as well."""
    if next(base for base in type(x).__mro__ if not of_python(base)) not in (object, dict):
        return False
    parts = parts_of(*(_as_key(value) for _, value in _attributes(x)))
    return all(
        type(part) is tuple or _is_constant(c, part) or id(part) in c.world.sources and not is_written(c, part)
        for part in parts
    )


def _attributes(x) -> list[tuple[str, Any]]:
    """The attributes in an object's `__dict__` and slots."""
    in_slots = ((name, plain_attribute(x, name, NULL)) for name in slots(type(x)))
    return [*plain_attribute(x, "__dict__", {}).items(), *(pair for pair in in_slots if pair[1] is not NULL)]


def _repeated_call(c: Capture, f, args, kwargs):
    """The prologue makes the call again, of what is then at the places of the arguments."""
    sources: list[Source] = []

    def placeholder(x) -> Any:
        x = _as_key(x)
        if type(x) is tuple:
            return tuple(map(placeholder, x))
        if _is_constant(c, x):
            return x
        if id(x) not in c.world.sources:
            before, items = len(sources), dict.items(x) if isinstance(x, dict) else ()
            parts = (tuple((placeholder(k), placeholder(v)) for k, v in pairs) for pairs in (items, _attributes(x)))
            instance = _Instance(type(x), *parts)
            return instance if len(sources) > before else _filled(instance, ())
        sources.append(c.world.sources[id(x)])
        return _Placeholder(len(sources) - 1)

    places = [placeholder(x) for x in args], {k: placeholder(x) for k, x in kwargs.items()}
    key = f, *map(type, args), *places[0], *places[1].items()
    computation = c.known.same_call(key, functools.partial(_ask, f, *places))
    values = tuple(c.world.value_at(source) for source in sources)
    with c.dispatch.in_cache():  # the values are those from outside, as are the result's
        result = Host.call_native(c, computation, [values], {})
    source = c.world.const(computation, _label(f, places)).child("of", tuple(sources))
    if type(result) is _Raised:
        c.world.ask(source, TYPE)
        raise c.read(result.error, source.attr("error"))
    return c.read(result, source)


def _label(f, places: tuple[list, dict]) -> str:
    """The function with the constants among its arguments: calls with others give other numbers."""
    constants = _constants([*places[0], *places[1].values()])
    shown = [say(x) if type(x) in PRIMITIVE else getattr(x, "kind", type(x)).__name__ for x in constants]
    name = getattr(f, "__name__", "")
    return f"{name}[{', '.join(shown)}]" if shown else name


def _constants(places: list) -> Iterator:
    for x in places:
        if type(x) is tuple:
            yield from _constants(list(x))
        elif type(x) is not _Placeholder:
            yield x


class _Raised:
    """The result of a call that raises, which is no other result."""

    __slots__ = ("error",)

    def __init__(self, error: Exception):
        self.error = error


def _ask(f, args, kwargs, values: tuple):
    """The result, with values in the places of arguments."""
    try:
        return f(*(_filled(x, values) for x in args), **{k: _filled(x, values) for k, x in kwargs.items()})
    except Exception as error:  # noqa: BLE001 - the program that asks raises it
        return _Raised(error)


def _filled(x, values: tuple) -> Any:
    """An argument, with values in the places of its parts."""
    if type(x) is _Placeholder:
        return values[x.index]
    if type(x) is not _Instance:
        return tuple(_filled(part, values) for part in x) if type(x) is tuple else x
    is_dict = issubclass(x.kind, dict)
    instance = dict.__new__(x.kind) if is_dict else object.__new__(x.kind)
    if is_dict:
        dict.update(instance, _filled(x.items, values))
    for name, part in x.attributes:
        object.__setattr__(instance, name, _filled(part, values))
    return instance


def _own_cache(c: Capture, f):
    """A cache in the place of one that the program made, or that has nothing of what the program made, whose function
    comes back to the machine."""
    cached = c.known.own_caches.get(id(f))
    if cached is None:
        function = f.__wrapped__
        cached = functools.lru_cache(**f.cache_parameters())(lambda *a, **k: c.call(function, list(a), k))
        c.known.own_caches[c.world.hold(f)] = cached
    return cached
