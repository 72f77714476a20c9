"""A call of the original function behind what has happened: it runs in the interpreter, on real values, and takes the
results of the calls that others have seen from the log of the program that was given up. So each effect happens once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from thunder.core.host_calls import Effect, Log, next_or_end
from thunder.interpreter import Host
from thunder.interpreter.attributes import plain_attribute
from thunder.interpreter.host import UNARY
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS
from thunder.ops.eager_calls import Outcome, happened, module_of


class Replay(Host):
    """The interpreter without capture. It makes each call itself, but those that the log says have happened."""

    def __init__(self, log: Log):
        super().__init__()
        self._effects = log.effects[::-1]  # the next one last

    def call(self, f, args, kwargs):
        return self._taken(args, kwargs) if self._is_next(f, args) else super().call(f, args, kwargs)

    def enter(self, f, args, kwargs):
        return self._taken(args, kwargs) if self._is_next(f, args) else super().enter(f, args, kwargs)

    def call_native(self, f, args, kwargs):
        if self._is_next(f, args):
            return self._taken(args, kwargs)
        return super().call_native(f, [self._steps(a) if self._has_stepped(a) else a for a in args], kwargs)

    def getitem(self, value, key):
        return self._once(operator.getitem, super().getitem, value, key)

    def setitem(self, value, key, new):
        self._once(operator.setitem, super().setitem, value, key, new)

    def delitem(self, value, key):
        self._once(operator.delitem, super().delitem, value, key)

    def contains(self, value, item):
        return self._once(operator.contains, super().contains, value, item)

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

    def _once(self, function, perform, *args):
        """What an operator or an access of an attribute does, by the function that the log knows it by."""
        return self._taken(args, {}) if self._is_next(function, args) else perform(*args)

    def native_iter(self, value):
        return self._steps(value) if self._has_stepped(value) else iter(value)

    def next(self, iterator):  # one of a class in Python, too
        if not self._has_stepped(iterator):
            return super().next(iterator)
        following = self._effects.pop().value
        if following is None:
            raise StopIteration
        return following[0]

    def _has_stepped(self, iterator: Any) -> bool:
        """Whether a step of an iterator is the next thing that has happened."""
        effect = self._effects[-1] if self._effects else None
        return effect is not None and effect.function is next_or_end and effect.owner is iterator

    def _steps(self, iterator: Any) -> Iterator:
        while True:
            try:
                element = self.next(iterator)
            except StopIteration:
                return
            yield element

    def _is_next(self, f: Callable, args: Sequence) -> bool:
        if not self._effects or not _is_call_of(self._effects[-1], f, args):
            return False
        where = self._effects[-1].where  # calls of a function that were made for all programs stand elsewhere
        return where is None or any((x.fn.__code__, x.ip) == where for x in self.stack_of_frames)

    def _taken(self, args, kwargs) -> Any:
        effect = self._effects.pop()
        for key, (array, filled) in effect.arrays.items():  # which the program makes anew
            target = kwargs[key] if isinstance(key, str) else args[key]
            if target is not array:
                target[...] = filled
        value = effect.value
        return happened(value, tuple(args), kwargs) if type(value) is Outcome else value


def _is_call_of(effect: Effect, f: Callable, args: Sequence) -> bool:
    """Whether `f` is the function, or the method of an object, that an effect is a call of, with such arguments:
    `list` is called with objects that others see and with the program's own."""
    if effect.kinds is not None and effect.kinds != tuple(map(type, args)):
        return False
    if effect.name is not None:
        return plain_attribute(f, "__self__") is effect.owner and plain_attribute(f, "__name__") == effect.name
    if effect.owner is not None and effect.owner is not module_of(args):
        return False
    code = plain_attribute(f, "__code__")
    return f is effect.function or code is not None and code is plain_attribute(effect.function, "__code__")


def replay(function: Callable, args: tuple, kwargs: dict, log: Log) -> Any:
    """The result of `function(*args, **kwargs)`, of which the effects in `log` have happened."""
    return Replay(log).interpret(function, args, kwargs)
