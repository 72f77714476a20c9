"""A call of the original function behind what has happened: it runs in the interpreter, on real values, and takes the
results of calls on the host from the journal of the program that was given up (`thunder.core.host_calls.Log`).

So each effect happens once, and an object that the host has made is one object: what the program has done to it is in
it, and what the program saw of it stands in the journal. A call that others have not seen is passed over where the
interpreter does not meet it again, since capture made it in the place of something else.
"""

from __future__ import annotations

import bisect
import collections
import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch

from thunder.core.host_calls import Entry, Log, OfKind, call_function, call_method, host_call, next_or_end
from thunder.errors import FallbackWarning, warn_user
from thunder.interpreter import Host
from thunder.interpreter.attributes import NATIVE_METHODS, plain_attribute
from thunder.interpreter.host import UNARY
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS
from thunder.ops.eager_calls import Outcome, happened, is_eager_call, module_of, results_of


class Replay(Host):
    """The interpreter without capture. It makes each call itself, but those that stand in the journal."""

    def __init__(self, log: Log):
        super().__init__()
        self._journal, self._next = log.journal, 0
        self._effects = [i for i, entry in enumerate(log.journal) if entry.is_effect]
        self._positions: dict[Any, list[int]] = collections.defaultdict(list)
        for i, entry in enumerate(log.journal):
            self._positions[_key_of_entry(entry)].append(i)
        self._of_host = {id(x) for value in log.values() for x in _objects_in(value)}

    @property
    def missed(self) -> list[Entry]:
        """The effects that the interpreter has not met again."""
        return [self._journal[i] for i in self._effects if i >= self._next]

    # ---------------------------------------------------------------- calls

    def call(self, f, args, kwargs):
        at = self._position(f, args)
        return super().call(f, args, kwargs) if at is None else self._taken(at, args, kwargs)

    def enter(self, f, args, kwargs):
        at = self._position(f, args)
        return super().enter(f, args, kwargs) if at is None else self._taken(at, args, kwargs)

    def call_native(self, f, args, kwargs):
        at = self._position(f, args)
        if at is not None:
            return self._taken(at, args, kwargs)
        return super().call_native(f, [self._as_seen(a) for a in args], kwargs)

    # ---------------------------------------------------------------- operators and attributes

    def getitem(self, value, key):
        return self._once(operator.getitem, super().getitem, value, key)

    def setitem(self, value, key, new):
        self._once(operator.setitem, super().setitem, value, key, new)

    def delitem(self, value, key):
        self._once(operator.delitem, super().delitem, value, key)

    def contains(self, value, item):
        return self._once(operator.contains, super().contains, value, item)

    def truth(self, value):
        return self._once(operator.truth, super().truth, value)

    def load_attr(self, value, name):
        return self._once(getattr, super().load_attr, value, name)

    def store_attr(self, value, name, new):
        self._once(setattr, super().store_attr, value, name, new)

    def delete_attr(self, value, name):
        self._once(delattr, super().delete_attr, value, name)

    def binary(self, symbol, a, b):
        return self._once(ARITHMETIC[symbol], functools.partial(super().binary, symbol), a, b)

    def unary(self, symbol, value):
        return self._once(UNARY[symbol], functools.partial(super().unary, symbol), value)

    def compare(self, symbol, a, b):
        return self._once(COMPARISONS[symbol], functools.partial(super().compare, symbol), a, b)

    def native_text(self, function, value, *spec):
        return self._once(function, functools.partial(super().native_text, function), value, *spec)

    def format_value(self, value, conversion, spec):
        at = None if conversion else self._position(format, [value, spec])
        return super().format_value(value, conversion, spec) if at is None else self._taken(at, [value, spec], {})

    def _once(self, function, perform, *args):
        """What an operator or an access of an attribute does, by the function that the journal knows it by."""
        at = self._position(function, args)
        return perform(*args) if at is None else self._taken(at, args, {})

    # ---------------------------------------------------------------- iteration

    def iterate(self, value):
        seen = self._as_seen(value)
        return super().iterate(value) if seen is value else iter(seen)

    def steps(self, value):
        return super().steps(self._as_seen(value))

    def mapping(self, value):
        if not self._asks_for_keys(value):
            return super().mapping(value)
        return {key: self.getitem(value, key) for key in self.steps(self.call(value.keys, [], {}))}

    def unpack(self, value, before, after=None):
        return super().unpack(self._as_seen(value), before, after)

    def native_iter(self, value):
        return iter(self._as_seen(value))

    def next(self, iterator):  # one of a class in Python, too
        at = self._position(next_or_end, [iterator])
        if at is None:
            return super().next(iterator)
        following = self._taken(at, [iterator], {})
        if following is None:
            raise StopIteration
        return following[0]

    def _as_seen(self, value: Any) -> Any:
        """An iterator, or the elements of an object, as the program saw them; other values as they are."""
        if self._position(next_or_end, [value]) is not None:
            return self._steps(value)
        if self._asks_for_keys(value):
            return self.mapping(value)
        if (at := self._position(iter, [value])) is not None:
            return self._steps(self._taken(at, [value], {}))
        at = self._position(list, [value])
        return value if at is None else list(self._taken(at, [value], {}))

    def _asks_for_keys(self, value: Any) -> bool:
        """Whether the program asks an object for its keys now, as `dict(value)` does."""
        return _KEYS in self._positions and self._position(plain_attribute(value, "keys"), []) is not None

    def _steps(self, iterator: Any) -> Iterator:
        while True:
            try:
                element = self.next(iterator)
            except StopIteration:
                return
            yield element

    # ---------------------------------------------------------------- the journal

    def _position(self, f: Callable, args: Sequence) -> int | None:
        """The place in the journal of a call that is made now; None where it has not happened. No effect that has is
        passed over."""
        if self._next == len(self._journal):
            return None
        following = bisect.bisect_left(self._effects, self._next)
        last = self._effects[following] if following < len(self._effects) else len(self._journal)
        for key in _keys(f, args):
            positions = self._positions.get(key, ())
            for i in positions[bisect.bisect_left(positions, self._next) :] if positions else ():
                if i > last:
                    break
                if self._is_call_of(self._journal[i], f, args):
                    return i
        return None

    def _is_call_of(self, entry: Entry, f: Callable, args: Sequence) -> bool:
        """Whether a call of the function of an entry, or of a method of its name, is the one in the entry."""
        operands, of_host = entry.args, False
        if type(entry.value) is Outcome:
            operands = args
            if entry.owner is not None and entry.owner is not module_of(args):
                return False
        elif entry.function is call_method:
            receiver = plain_attribute(f, "__self__")
            if type(f) in NATIVE_METHODS:
                receiver, *args = args
            if receiver is not operands[0]:
                return False
            operands, of_host = operands[2:], True
        elif entry.function is call_function:
            operands, of_host = operands[1:], True
        elif entry.function in _NAMING and operands[1] != args[1]:
            return False
        if len(operands) != len(args) or not all(map(functools.partial(self._are_alike, entry), operands, args)):
            return False
        if entry.function is next_or_end:  # of this iterator, which was made elsewhere
            return True
        if entry.where is not None:  # calls of a function that were made for all programs stand elsewhere
            return any((x.fn.__code__, x.ip) == entry.where for x in self.stack_of_frames)
        return entry.is_effect or of_host or any(id(x) in self._of_host for x in operands)

    def _are_alike(self, entry: Entry, then: Any, now: Any) -> bool:
        """Whether an operand is the one of an entry. An object of the host is that object, and an array of it that an
        effect was given may be another array now. A text may have been printed of an object."""
        if then is now or type(then) is OfKind and then.kind is type(now):
            return True
        if id(then) in self._of_host and not (entry.is_effect and isinstance(then, numpy.ndarray)):
            return False
        return type(then) is type(now) or entry.function is print and type(then) is str

    def _taken(self, at: int, args, kwargs) -> Any:
        entry, self._next = self._journal[at], at + 1
        for key, (array, filled) in entry.arrays.items():  # which the program makes anew
            target = kwargs[key] if isinstance(key, str) else args[key]
            if target is not array:
                target[...] = filled
        value = entry.value
        return happened(value, tuple(args), kwargs) if type(value) is Outcome else value


_KEYS = "method", "keys"
_NAMING = {getattr, setattr, delattr}


def _objects_in(value: Any) -> Iterator[Any]:
    """The objects that can be changed among what a call has given."""
    for x in results_of(value) if type(value) is Outcome and value.error is None else (value,):
        if not isinstance(x, (str, bytes, int, float, complex, type(None), torch.Tensor)):
            yield x


def _key_of_entry(entry: Entry) -> Any:
    if entry.function is call_method:
        return "method", entry.args[1]
    return _key(entry.args[0] if entry.function is call_function else entry.function)


def _keys(f: Callable, args: Sequence) -> Iterator[Any]:
    """The keys of entries that a call may be."""
    if type(f) in NATIVE_METHODS and args or plain_attribute(f, "__self__") is not None:
        yield "method", plain_attribute(f, "__name__")
    yield _key(f)


def _key(f: Callable) -> Any:
    """What tells functions apart: a bound method is another object each time, and so is a function that the program
    makes."""
    owner = plain_attribute(f, "__self__")
    if owner is not None and not isinstance(owner, types.ModuleType):
        return id(owner), plain_attribute(f, "__name__")
    return plain_attribute(f, "__code__") or id(f)


def places_of_calls(program: Any) -> dict[int, tuple[types.CodeType, int]]:
    """By the number of a call on the host, where it stands in the program that a trace records; nothing of a program
    from disk."""
    calls = [b for b in getattr(program, "bound_symbols", ()) if b.sym is host_call or is_eager_call(b.sym)]
    return {b.args[0]: b.location[:2] for b in calls if b.args[0] is not None and b.location}


def replay(function: Callable, args: tuple, kwargs: dict, log: Log) -> Any:
    """The result of `function(*args, **kwargs)`, of which what is in the log has happened."""
    host = Replay(log)
    result = host.interpret(function, args, kwargs)
    if missed := host.missed:
        names = ", ".join(dict.fromkeys(_name(entry) for entry in missed))
        warn_user(
            f"the original function ran behind calls that had happened, and did not meet {names} again: what these do "
            "may have happened twice in this call. Call them outside of the compiled function",
            FallbackWarning,
        )
    return result


def _name(entry: Entry) -> str:
    method = entry.args[1] if entry.function is call_method else getattr(entry.function, "__name__", "a function")
    return f"{method}()"
