"""Numbers from outside: held for one value, or symbolic."""

from __future__ import annotations

import math
from typing import Any

from thunder.capture.interface import Capture
from thunder.capture.world import LENGTH, TYPE, VALUE, Computation, Source
from thunder.core.proxies import FloatProxy, IntegerProxy, NumberProxy
from thunder.core.symbolic import constant, symbol


def primitive(c: Capture, value, source: Source):
    return number(c, value, source) if is_symbolic(c, value, source) else c.world.ask(source, VALUE)


def is_symbolic(c: Capture, value, source: Source) -> bool:
    """Whether a number from outside stays symbolic: where that is asked for, or it was another one before."""
    t = type(value)
    if not (t is int or t is float and value != 0 and math.isfinite(value)):  # equality does not say all about it
        return False
    if c.numbers.symbolic and source.root.key in ("args", "kwargs"):
        return not (t is int and value in (0, 1))
    if source.step == "at":  # another one is another item
        return True
    values = c.request.changing.get(c.world.describe(source), value) if c.request.changing else value
    return values is None or type(values) is set and value not in values


def length(c: Capture, n: int, source: Source) -> Any:
    """The length of the container or the text at a source."""
    source_of_length = source.child("len", None)
    return number(c, n, source_of_length) if is_symbolic(c, n, source_of_length) else c.world.ask(source, LENGTH)


MARK = "_thunder_dynamic"  # the attribute that `thunder.mark_dynamic` sets
# those of mark_dynamic, maybe_mark_dynamic and mark_unbacked of torch._dynamo
_MARKS = (MARK, "_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices")
_STATIC = "_dynamo_static_indices"  # that of its mark_static


def is_marked(tensor) -> bool:
    """Whether the user has said of a dimension of a tensor whether its size is symbolic."""
    attributes = vars(tensor)
    return bool(attributes) and any(mark in attributes for mark in (*_MARKS, _STATIC))


def size(c: Capture, n: int, source: Source, tensor) -> int | NumberProxy:
    """A size of an argument: symbolic where it is asked for, or was another one before."""
    if n < 2 or source.key in getattr(tensor, _STATIC, ()):
        return n
    if c.numbers.symbolic_sizes or any(source.key in getattr(tensor, mark, ()) for mark in _MARKS):
        return number(c, n, source)
    values = c.request.changing.get(c.world.describe(source), (n,)) if c.request.changing else (n,)
    return n if values is not None and n in values else number(c, n, source)


def parts_of_plain(value: Any, source: Source) -> list[tuple[Source, Any]]:
    """The parts of a tuple or a slice, or the value itself, with their sources."""
    if isinstance(value, tuple):
        return [(source.item(i), x) for i, x in enumerate(tuple.__iter__(value))]
    if type(value) is slice:
        return [(source.attr(n), getattr(value, n)) for n in ("start", "stop", "step")]
    return [(source, value)]


def source_of(c: Capture, n: NumberProxy) -> Source:
    """The source of a number that is computed of numbers from outside alone."""
    sources = tuple((name, c.numbers.sources[name]) for name in sorted(n.expression.symbols()))
    (name, base), *_ = sources
    if n.expression != symbol(name):
        base = base.child("number", Computation(n.expression, sources))
    c.world.value_at(base)
    return base


def number_at(c: Capture, source: Source) -> NumberProxy:
    """The number at such a source."""
    if source.step != "number":
        return c.numbers.proxies[source]
    return IntegerProxy(c.recorder.context.names.make("i"), c.numbers.decisions, source.key.expression)


def number(c: Capture, value, source: Source) -> NumberProxy:
    """A number that stays symbolic."""
    proxy = c.numbers.proxies.get(source)
    if proxy is None:
        t = type(value)
        name = c.recorder.context.names.make("i" if t is int else "f")
        proxy = c.numbers.proxies[source] = (IntegerProxy if t is int else FloatProxy)(name, c.numbers.decisions)
        c.numbers.decisions.values[name] = value
        c.numbers.sources[name] = source
        c.world.note(source, value)
        if source.step != "size":
            c.world.ask(source, TYPE)
        if source.step == "size":
            c.numbers.decisions.add_size(name)
        elif t is int and value not in (0, 1):
            for special in (0, 1):
                c.numbers.decisions.decide(symbol(name), "!=", constant(special))
    return proxy
