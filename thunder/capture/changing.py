"""Texts, NumPy's numbers and arrays from outside that change from call to call: values of the host.

As numbers do (`numbers`), they have one value once, which the prologue asks for. From the second one on they are inputs
of the program: code on the host gets them, PyTorch gets the number or the tensor that they are. Where a text decides
something, the prologue asks for it again.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy
import torch

from thunder import compat
from thunder.capture.expose import settle_values
from thunder.capture.interface import Capture
from thunder.capture.native import IMMUTABLE
from thunder.capture.numbers import length, number, parts_of_plain, primitive
from thunder.capture.world import CONTENT, LENGTH, SAME, TYPE, VALUE, Source
from thunder.core.host_calls import HostProxy, call_method
from thunder.core.proxies import TensorProxy, map_structure
from thunder.interpreter import NULL
from thunder.interpreter.attributes import parts_of, plain_attribute
from thunder.interpreter.operators import COMPARE_METHOD, REFLECTED
from thunder.interpreter.tables import COMPARISONS

TEXTS = (str, bytes)


def changes(c: Capture, value, source: Source) -> bool:
    """Whether a value of the host had another value before."""
    if not c.request.changing or source.step == "at":
        return source.step == "at"
    values = c.request.changing.get(c.world.describe(source), _NONE)
    return values is None or value_key(value) not in values and values is not _NONE


_NONE: frozenset = frozenset()


def value_key(value) -> Any:
    """What tells values apart, as a number or a text."""
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return repr(value) if isinstance(value, (bytes, *IMMUTABLE)) else value


def is_of_host(value) -> bool:
    return type(value) in TEXTS or isinstance(value, (numpy.ndarray, *IMMUTABLE))


def read(c: Capture, value, source: Source) -> HostProxy:
    """The value of the host that stands for a value from outside."""
    proxy = c.outside.host_values.get(source)
    if proxy is None and isinstance(value, numpy.ndarray):
        for other, proxy in c.outside.host_values.items():
            if proxy.example is value:
                c.world.ask(source, SAME, other)
                return proxy
        proxy = None
    if proxy is None:
        proxy = HostProxy(c.recorder.context.names.make("h"), type(value), lambda: value)
        c.outside.host_values[source] = proxy
        c.path.comes_from(proxy, source)
        c.world.hold(value)
        c.world.ask(source, TYPE)
    return proxy


def is_text(c: Capture, value) -> bool:
    """Whether a value stands for a text from outside."""
    return type(value) is HostProxy and value.kind in TEXTS and c.path.source_of(value) is not None


def answer(c: Capture, function, args: tuple, kwargs: dict) -> Any:
    """The number or the truth that an operator or a method gives of a text from outside and constants: the prologue
    asks for it, and the text may be another. NULL where there is none."""
    name = _METHODS.get(function)
    if name is not None and not is_text(c, args[0]):
        name, args = _REFLECTED.get(name), args[::-1]
    elif function is call_method:
        name, args = args[1], (args[0], *args[2:])
    if name is None or kwargs or not is_text(c, args[0]) or not all(type(a) in (*TEXTS, int) for a in args[1:]):
        return NULL
    source = c.path.source_of(args[0])
    assert source is not None, "a text from outside has a source"
    if name == "__len__":
        return length(c, len(args[0].example), source)
    source_of_answer = source.call(name, *args[1:])
    try:
        value = c.world.value_at(source_of_answer)
    except Exception:  # noqa: BLE001 - the program raises it, of the text itself
        return NULL
    return primitive(c, value, source_of_answer) if type(value) in (int, bool) else NULL


_METHODS = {len: "__len__", operator.contains: "__contains__"}
_METHODS |= {COMPARISONS[symbol]: method for symbol, method in COMPARE_METHOD.items()}
_REFLECTED = {COMPARE_METHOD[symbol]: COMPARE_METHOD[other] for symbol, other in REFLECTED.items()}


def settled(c: Capture, value):
    """The value itself where only a value will do (a name, a key, also in a tuple): the program is for this one."""
    if isinstance(value, tuple):
        return map_structure(lambda x: settled(c, x), value)
    if type(value) is not HostProxy:
        for name, x in plain_attribute(value, "__dict__", {}).items() if id(value) not in c.world.sources else ():
            if type(x) is HostProxy:  # of a key that hashes its attributes
                value.__dict__[name] = settled(c, x)
        return value
    if value.kind not in TEXTS and (not c.path.is_of_arguments(value) or issubclass(value.kind, numpy.ndarray)):
        c.refuse(f"a {value.kind.__name__} that a host call gives is a key, or compared", "use a text or a number")
    return c.path.host_value(value)


def settle_inside(c: Capture, *values) -> None:
    """Containers among the values hold the values of texts from now on: native code hashes what is in them."""
    for part in parts_of(*values):
        settle_values(c, c.materialize(part), functools.partial(settled, c))


def number_of(c: Capture, value: HostProxy):
    """The number of Python's that a number of NumPy's from outside is; None for other values."""
    source = c.path.source_of(value)
    if source is None or not isinstance(value.example, numpy.generic):
        return None
    constant = value.example.item()
    if type(constant) is int or type(constant) is float and constant != 0 and constant - constant == 0:
        return number(c, constant, source.call("item"))
    return c.path.host_value(value).item()  # equality does not say all about it


def tensor_of(c: Capture, value):
    """The tensor that shares the memory of an array from outside; None for other values."""
    source = c.path.source_of(value) if type(value) is HostProxy else None
    if source is None or not isinstance(value.example, numpy.ndarray):
        return None
    source_of_tensor = source.child("tensor", None)
    again = source_of_tensor in c.world.values
    if not again:
        with compat.DisableTorchFunction(), torch.inference_mode(False):
            c.world.note(source_of_tensor, source_of_tensor.fetch(value.example, c.world.values))
    tensor = c.read(c.world.values[source_of_tensor], source_of_tensor)
    c.path.watch(tensor)
    c.path.share(value.example)
    return c.call(torch.Tensor.detach, [tensor], {}) if again else tensor  # another tensor of the same memory


def attribute(c: Capture, value: HostProxy, name: str):
    """A property of an array from outside that all of its values have; None for others."""
    source = c.path.source_of(value)
    if source is None or name not in _PROPERTIES or not isinstance(value.example, numpy.ndarray):
        return None
    return c.read(getattr(value.example, name), source.attr(name))


_PROPERTIES = ("shape", "ndim", "size", "dtype", "itemsize", "nbytes")

# ------------------------------------------------------------------------------------------------- of which one is held


def _held_sizes(c: Capture) -> dict[str, int]:
    """Sizes of arguments that the program holds for one value of and that are symbolic once they were another."""
    options = c.request.options
    if options.dynamic is not None or any(getattr(t, "needs_sizes", False) for t in options.transforms):
        return {}
    kinds = {p.device.type for p in c.tensors.real}
    if any(e.needs_sizes and e.runs_on(kinds) for e in options.executors):
        return {}
    return {
        c.world.describe(source.child("size", i)): n
        for source, sizes in c.tensors.shapes.items()
        if source.root.key in ("args", "kwargs")
        for i, n in enumerate(sizes)
        if n is not None and n >= 2
    }


def outgrown_sizes(c: Capture, held: Container[str]) -> set[str]:
    """The paths of sizes of arguments that the program holds for one value of, and in whose places it puts tensors of
    another size: what a cache grows by. held: the paths of `constants`."""
    changed_sizes = set()
    for source, value in c.effects.places.items():
        sizes = c.tensors.shapes.get(source)
        if sizes is not None and isinstance(value, TensorProxy) and len(value.shape) == len(sizes):
            paths = (c.world.describe(source.child("size", i)) for i in range(len(sizes)))
            changed_sizes |= {
                p
                for p, n, now in zip(paths, sizes, value.shape, strict=True)
                if p in held and (type(now) is not int or now != n)
            }
    return changed_sizes


def constants(c: Capture) -> dict[str, Any]:
    """The values that the program holds one of and that are inputs once they were another, by their paths: a
    temperature, a count of steps, a name; under `cache="constant values"` floats of objects alone (the learning rate of
    an optimizer). Values of the host stand as their `value_key`, functions, modules and generators as `(id,)`."""

    def may_change(source: Source, value) -> bool:
        argument = source.root.key in ("args", "kwargs")
        is_candidate = c.request.options.numbers_may_change or type(value) is float and not argument
        if type(value) in (int, float):
            return is_candidate and value == value
        return c.request.options.numbers_may_change and is_of_host(value)

    held = [(s, v) for s, v in _held_values(c) if may_change(s, v)]
    held += [(s.child("len", None), len(v)) for s, v in held if type(v) in TEXTS]
    values = {c.world.describe(s): value_key(v) for s, v in held}
    values |= {c.world.describe(s): (number,) for s, number in c.outside.identities.items()}
    return values | _held_sizes(c) | (c.path.sizes if c.request.options.dynamic is None else {})


def _held_values(c: Capture) -> Iterator[tuple[Source, Any]]:
    """The plain values that the program holds for one value of, by themselves or in tuples and slices."""
    for (source, question, _), value in c.world.observed.items():
        if question is VALUE:
            yield from parts_of_plain(value, source)
        elif question is LENGTH:
            yield source.child("len", None), value
        elif question is CONTENT and isinstance(array := c.world.values.get(source), numpy.ndarray):
            yield source, array


def read_numbers(c: Capture) -> set[str]:
    """The paths of the numbers that the program holds for one value of."""
    return {c.world.describe(s) for s, v in _held_values(c) if type(v) in (int, float)}


# ---------------------------------------------------------------- calls

# which make a text, or hand one on
_OF_TEXT = {print, format, str, repr, ascii, str.join, operator.add, operator.mod, operator.iadd}


def known_result(c: Capture, function: Callable, args, kwargs: dict, effect: str):
    """The result of a call that needs no host call: the tensor of an array from outside, or a call that decides by a
    text from outside, whose value the prologue asks for. NULL for others."""
    if function is torch.from_numpy:
        result = tensor_of(c, args[0])
        return NULL if result is None else result
    if not effect and (result := answer(c, function, args, kwargs)) is not NULL:
        return result
    if effect or function in _OF_TEXT or not any(is_text(c, a) for a in parts_of(args, kwargs)):
        return NULL
    settle_inside(c, args, kwargs)
    return c.call(function, [settled(c, a) for a in args], {k: settled(c, a) for k, a in kwargs.items()})
