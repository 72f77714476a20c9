"""Numbers from outside: held for one value, or symbolic."""

from __future__ import annotations

import math

from thunder.capture.ask import TYPE, VALUE, ask
from thunder.capture.sources import Source
from thunder.core.proxies import FloatProxy, IntegerProxy, NumberProxy
from thunder.core.symbolic import constant, symbol


def primitive(c, value, t: type, source: Source):
    plain = t is int or t is float and value != 0 and math.isfinite(value)  # equality says all about it
    if plain and c.numbers.symbolic and source.root.key in ("args", "kwargs") and not (t is int and value in (0, 1)):
        return number(c, value, source)
    if plain and c.request.changing:
        path = source.describe(c.parameters)
        if path in c.request.changing and value not in (c.request.changing[path] or ()):
            return number(c, value, source)
    return ask(c, source, VALUE)


MARK = "_thunder_dynamic"  # the attribute that `thunder.mark_dynamic` sets


def size(c, n: int, source: Source, tensor) -> int | NumberProxy:
    """A size of an argument: symbolic where it is asked for, or was another one before."""
    if n < 2:
        return n
    if c.numbers.symbolic_sizes or source.key in getattr(tensor, MARK, ()):
        return number(c, n, source)
    values = c.request.changing.get(source.describe(c.parameters)) if c.request.changing else None
    return n if values is None or n in values else number(c, n, source)


def _held_sizes(c) -> dict[str, int]:
    """Sizes of arguments that the program holds for one value of and that are symbolic once they were another."""
    options = c.request.options
    if options.dynamic is not None or any(getattr(t, "needs_sizes", False) for t in options.transforms):
        return {}
    kinds = {p.device.type for p in c.tensors.real}
    if any(e.needs_sizes and e.runs_on(kinds) for e in options.executors):
        return {}
    return {
        source.child("size", i).describe(c.parameters): n
        for source, sizes in c.tensors.shapes.items()
        if source.root.key in ("args", "kwargs")
        for i, n in enumerate(sizes)
        if n is not None and n >= 2
    }


def constant_numbers(c) -> dict[str, int | float]:
    """The numbers that the program holds for one value of and that stay symbolic once they were another, by their
    paths: int arguments, and floats (a temperature, the learning rate of an optimizer)."""

    def may_change(source: Source, value) -> bool:
        if source.root.key in ("args", "kwargs"):
            return c.request.options.numbers_may_change and type(value) in (int, float) and value == value
        return type(value) is float and value == value

    found = {
        s.describe(c.parameters): v
        for (s, question, _), v in c.observed.items()
        if question is VALUE and may_change(s, v)
    }
    return found | _held_sizes(c)


def read_numbers(c) -> set[str]:
    """The paths of the numbers that the program holds for one value of."""
    return {
        s.describe(c.parameters)
        for (s, question, _), v in c.observed.items()
        if question is VALUE and type(v) in (int, float)
    }


def number(c, value, source: Source) -> NumberProxy:
    """A number that stays symbolic."""
    found = c.numbers.proxies.get(source)
    if found is None:
        t = type(value)
        name = c.recorder.context.names.make("i" if t is int else "f")
        found = c.numbers.proxies[source] = (IntegerProxy if t is int else FloatProxy)(name, c.numbers.decisions)
        c.numbers.decisions.values[name] = value
        c.numbers.sources[name] = source
        c.values[source] = value
        if source.step != "size":
            ask(c, source, TYPE)
        if source.step == "size":
            c.numbers.decisions.add_size(name)
        elif t is int and value not in (0, 1) and source.root.key in ("args", "kwargs"):
            for special in (0, 1):
                c.numbers.decisions.decide(symbol(name), "!=", constant(special))
    return found
