"""ProtocolHost: CPython's protocols with special methods written in Python interpreted.

`Host` leaves the protocols to native code, where a user's `__add__`, `__getattr__` or property runs natively. The
algorithms stand in `attributes`, `operators`, `sequences`, `text` and `construction`, as functions of a host. They
reach the outside through the methods of this class only: `lookup` for what a class says, `own` for what an object
holds, and the methods `native_...` where native code answers. A subclass with provenance overrides these.
"""

# The functions name their first parameter `host`; as methods of ProtocolHost they override methods with `self`.
# pyright: reportAssignmentType=false

from __future__ import annotations

import builtins
import operator
from typing import Any

from thunder.interpreter import attributes, construction, operators, sequences, standins, text
from thunder.interpreter.attributes import bind, call_special, in_python, native_method
from thunder.interpreter.host import UNARY, Host
from thunder.interpreter.instructions import NULL
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS

CALLS = {**attributes.CALLS, **operators.CALLS, **sequences.CALLS, **text.CALLS, **construction.CALLS, **standins.CALLS}
PROTOCOL_CALLS = {id(function): handler for function, handler in CALLS.items()}
_NATIVE_CALLS = {id(function): handler for function, handler in sequences.NATIVE_CALLS.items()}


class ProtocolHost(Host):
    """A host under which special methods, properties, descriptors and callbacks written in Python are interpreted
    too."""

    native_frames_per_call = 14
    load_attr, store_attr, delete_attr = attributes.load_attr, attributes.store_attr, attributes.delete_attr
    binary, unary, compare = operators.binary, operators.unary, operators.compare
    getitem, setitem, delitem = sequences.getitem, sequences.setitem, sequences.delitem
    contains, iterate, next, steps = sequences.contains, sequences.iterate, sequences.following, sequences.steps
    truth, format_value = sequences.truth, text.format_value

    def __init__(self, record_history: bool = False):
        super().__init__(record_history)
        self.shown: set[int] = set()  # containers whose text is being written
        self.frame_calls = {**self.frame_calls, **PROTOCOL_CALLS, **_NATIVE_CALLS}

    def load_special(self, value, name):
        found = self.lookup(type(value), name)
        return found if found is NULL else bind(self, found, value, type(value), name)

    def unpack(self, value, before, after=None):
        if in_python(self.lookup(type(value), "__iter__")) or in_python(self.lookup(type(value), "__getitem__")):
            value = self.steps(value)
        return super().unpack(value, before, after)

    def handed(self, value) -> Any:
        """What native code found through a stand-in."""
        return value

    def mapping(self, value):
        if isinstance(value, dict) or self.lookup(type(value), "keys") is NULL:
            return self.materialize(value)
        return {key: self.getitem(value, key) for key in self.steps(self.call(self.load_attr(value, "keys"), [], {}))}

    # ---------------------------------------------------------------- what objects hold

    def own(self, value, name):
        """What the object holds under a name in its `__dict__`, or NULL."""
        if not type(value).__dictoffset__:
            return NULL
        try:
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:  # native code keeps it for itself
            return NULL
        return dict.get(own, name, NULL)

    def own_store(self, value, name, new):
        """No descriptor takes the value: the object's `__dict__` does, or native code says why not."""
        native_method(type(value), "__setattr__")(value, name, new)

    def own_delete(self, value, name):
        native_method(type(value), "__delattr__")(value, name)

    # ---------------------------------------------------------------- what native code answers

    def class_value(self, kind, name, found):
        """Something on a class that is no descriptor is the attribute's value."""
        return found

    def native_get(self, get, found, value, kind, name) -> Any:
        """What a descriptor's native `__get__` gives."""
        return get(found, value, kind)

    def native_set(self, found, value, name, new):
        """A descriptor with a native `__set__` takes the value."""
        native_method(type(value), "__setattr__")(value, name, new)

    def native_delete(self, found, value, name):
        native_method(type(value), "__delattr__")(value, name)

    def fallback(self, method, value, name) -> Any:
        """The class's `__getattr__` answers."""
        return call_special(self, method, value, [name], "__getattr__")

    def missing(self, reader, value, name) -> Any:
        """CPython's algorithm finds no such attribute: native code words the error, or finds it in its own way."""
        return reader(value, name)

    def type_name(self, value) -> str:
        """What an error calls the class of a value."""
        return type(value).__name__

    def converted(self, function, kind, name, result, *more) -> Any:
        """What a builtin makes of the result of a method of `kind`: native code checks it, of an object that gives
        it."""
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        made = type(kind.__name__, (), {**named, name: lambda *_: result})
        return function(made(), *more)

    def native_binary(self, symbol, a, b) -> Any:
        if symbol == "+=" and type(a) is list and in_python(self.lookup(type(b), "__iter__")):
            b = self.steps(b)
        return ARITHMETIC[symbol](a, b)

    def native_compare(self, symbol, a, b) -> Any:
        return COMPARISONS[symbol](a, b)

    def native_unary(self, symbol, a) -> Any:
        return UNARY[symbol](a)

    def native_text(self, function, value, *spec) -> Any:
        """str, repr or format."""
        return function(value, *spec)

    def asks_in_python(self, hook, value) -> bool:
        """Whether `__instancecheck__` or `__subclasscheck__` of a metaclass is to be interpreted."""
        return in_python(hook)

    native_index = staticmethod(operator.index)
    native_getitem = staticmethod(operator.getitem)
    native_setitem = staticmethod(operator.setitem)
    native_delitem = staticmethod(operator.delitem)
    native_contains = staticmethod(operator.contains)
    native_iter = staticmethod(iter)
    native_next = staticmethod(builtins.next)
    native_len = staticmethod(len)
    native_truth = staticmethod(bool)
    native_isinstance = staticmethod(isinstance)
