"""Host: the machine's way to everything that may have provenance, with CPython's semantics.

Special methods, properties, descriptors and callbacks that are written in Python are interpreted. The algorithms stand
in `attributes`, `operators`, `sequences`, `text` and `construction`, as functions of a host. They reach the outside
through the methods of this class only: `lookup` for attributes of classes, `own` for those of objects, and `native_...`
where native code answers. The torch side subclasses it and overrides the methods that it watches. Operations
between two values of exactly the types in `instructions.PLAIN` (int, float, bool, str, bytes, complex) and the truth of
True and False never reach the host.
"""

# The functions name their first parameter `host`; as methods of Host they override methods with `self`.
# pyright: reportAssignmentType=false

from __future__ import annotations

import builtins
import collections
import functools
import operator
import sys
import types
from typing import Any

from thunder.interpreter import attributes, construction, operators, sequences, standins, text
from thunder.interpreter.attributes import (
    call_special,
    in_python,
    name_in_errors,
    native_method,
    type_attribute,
)
from thunder.interpreter.building import unpacker
from thunder.interpreter.builtin_calls import FRAME_CALLS
from thunder.interpreter.decode import format_location
from thunder.interpreter.errors import UnsupportedError
from thunder.interpreter.history import SHORT_LOG_LENGTH, FullLog
from thunder.interpreter.instructions import NULL, builtin_namespace, name_not_defined, provides
from thunder.interpreter.machine import Frame, enter
from thunder.interpreter.recursion import FIRST_ROOM, original_limit, with_frames
from thunder.interpreter.tables import ARITHMETIC, COMPARISONS
from thunder.interpreter.tracebacks import clean, swallow

UNARY = {"-": operator.neg, "~": operator.invert, "+": operator.pos}
PLACEHOLDER = getattr(functools, "Placeholder", None)
FUNCTION, METHOD = types.FunctionType, types.MethodType
_CALLS = {
    **attributes.CALLS, **operators.CALLS, **sequences.CALLS, **text.CALLS, **construction.CALLS, **standins.CALLS,
}  # fmt: skip
PROTOCOL_CALLS = {id(function): handler for function, handler in _CALLS.items()}
_HANDLERS = {**FRAME_CALLS, **PROTOCOL_CALLS}


def _call(f, args, kwargs):
    return f(*args, **kwargs)


_CALLED = _call.__code__


class _Unnamed:
    """No value has this type: the default for `Host.named_type`."""


class Host:
    """CPython's semantics, with statistics.

    Attributes: `instructions` counts canonical instructions, `frames` counts calls by code object, `stack_of_frames`
    holds the running frames (innermost last), `exc` is the exception that the interpreted program is handling,
    `uncatchable` are exception types that the interpreted program cannot catch, `named_type` is the type whose values
    are reported to `name_value` when stored in a variable, `history` is the short log, `log` the full one or None.
    """

    named_type: type = _Unnamed
    uncatchable: tuple = (UnsupportedError,)
    # Native Python frames for one interpreted call: run, the handler, call, enter, and room for a subclass's own.
    native_frames_per_call = 14

    def __init__(self, record_history: bool = False):
        self.instructions = 0
        self.calls: dict = {}  # decoded record -> calls: hashing a code object would take longer than the counting
        self.stack_of_frames: list[Frame] = []
        self.exc: BaseException | None = None
        self.recursion_limit = original_limit()
        self.stack_room = FIRST_ROOM
        self.log = FullLog() if record_history else None
        self.history = collections.deque(maxlen=SHORT_LOG_LENGTH)

    def passes(self, error: BaseException) -> bool:
        """Whether the interpreted program cannot catch an exception, and runs no `finally` for it."""
        return isinstance(error, self.uncatchable)

    def handles(self) -> None:
        """The interpreted program handles an exception."""

    @property
    def frames(self):
        """How often each code object was run, as a Counter."""
        counted = ((record.reference(), n) for record, n in self.calls.items())
        return collections.Counter({code: n for code, n in counted if code is not None})

    # ---------------------------------------------------------------- running

    @with_frames
    def interpret(self, f, args=(), kwargs=None):
        """Call `f` in the interpreter. The traceback of an exception shows the user's frames only."""
        try:
            return self.call(f, list(args), dict(kwargs or {}))
        except BaseException as error:
            error.__traceback__ = clean(error.__traceback__)
            raise

    def call(self, f, args, kwargs):
        """Call anything: Python functions are interpreted, also those behind methods, partials, classes and
        `__call__`."""
        kind = type(f)
        if kind is FUNCTION:
            return self.enter(f, args, kwargs)
        if kind is METHOD:
            return self.call(f.__func__, [f.__self__, *args], kwargs)
        special = _HANDLERS.get(id(f))
        if special is not None:
            return special(self, f, args, kwargs)
        if isinstance(f, type) and id(f) not in standins.CALLING:
            return construction.construct(self, f, args, kwargs)
        if kind is staticmethod:
            return self.call(f.__func__, args, kwargs)
        if kind is functools.partial:
            return self.call(f.func, partial_arguments(f, args), {**f.keywords, **kwargs})
        if kind is types.MethodWrapperType:  # of `super().__setattr__(...)` and the like
            wrapper = type_attribute(f.__objclass__, f.__name__)
            if (special := _HANDLERS.get(id(wrapper))) is not None:
                return special(self, wrapper, [f.__self__, *args], kwargs)
        method = self.lookup(kind, "__call__")
        if type(method) is FUNCTION:
            return self.call(method, [f, *args], kwargs)
        return self.call_native(f, *standins.with_functions(self, f, args, kwargs))

    enter = enter

    def foreign_function(self, f, args, kwargs, construct: str) -> Any:
        """A call of a function with a construct that is not interpreted: generic syntax, templates, a
        coroutine, which runs when somebody awaits it."""
        return f(*args, **kwargs)

    def call_native(self, f, args, kwargs):
        """Call something that is not interpreted. Inside an `except` block it sees the handled exception."""
        if self.log is not None:
            self.log.note("Opaque", f)
        if self.stack_of_frames:
            called = FUNCTION(_CALLED, self.stack_of_frames[-1].fn.__globals__)  # who asks finds the caller's module
            args, kwargs, f = (f, args, kwargs), {}, called
        if self.exc is None:
            return f(*args, **kwargs)
        handled, traceback = self.exc, self.exc.__traceback__
        try:
            raise handled
        except BaseException:  # noqa: BLE001 - this makes it the handled exception of the native call
            handled.__traceback__ = traceback
            return f(*args, **kwargs)

    # ---------------------------------------------------------------- where the program is

    def location(self):
        """(code, canonical instruction index) of the innermost frame, or None. Cheap: formatting is `where`'s work."""
        if not self.stack_of_frames:
            return None
        frame = self.stack_of_frames[-1]
        return frame.fn.__code__, frame.ip

    def where(self, location=None):
        """(file name, line, (column, end column), source line, qualified name) of a location, by default the
        current."""
        return format_location(location or self.location())

    # ---------------------------------------------------------------- attributes, items, truth

    # (class, name, after=None): the attribute as it stands in a class or its bases, not bound, or NULL. Every protocol
    # asks classes through this method.
    lookup = staticmethod(type_attribute)
    load_attr, store_attr, delete_attr = attributes.load_attr, attributes.store_attr, attributes.delete_attr
    getitem, setitem, delitem = sequences.getitem, sequences.setitem, sequences.delitem
    contains, iterate, next = sequences.contains, sequences.iterate, sequences.following
    steps, truth = sequences.steps, sequences.truth  # `steps` is `iterate`, for native code
    same = staticmethod(operator.is_)
    pattern_type = staticmethod(type)

    def materialize(self, value):
        """The value is about to be read as a whole; returns it."""
        return value

    def mapping(self, value):
        """`**value`, `{**value}`: the dict, or one with the same items. AttributeError where it is no mapping."""
        if isinstance(value, dict) and not in_python(self.lookup(type(value), "__iter__")):
            return self.materialize(value)
        return {key: self.getitem(value, key) for key in self.steps(self.call(self.load_attr(value, "keys"), [], {}))}

    def attribute_name(self, value):
        """A value that is about to be the name of an attribute."""
        return value

    def hashed(self, keys, others=()):
        """Keys that are about to be put into a set or a dict of the program's, which holds others."""
        return keys

    def load_special(self, value, name):
        """A special method looked up on the type, bound to the value; NULL when there is none."""
        method = self.lookup(type(value), name)
        return method if method is NULL else attributes.bind(self, method, value, type(value), name)

    def unpack(self, value, before, after=None):
        """The items of `value` in reverse: `before` of them, or with a rest and `after` more. Errors as in CPython."""
        if sequences.iterates_in_python(self, value):
            value = self.steps(value)
        return unpacker(before, after)(value)

    # `a + b`, or in place `a += b` when the symbol is "+="; `-a`; `a < b`
    binary, unary, compare = operators.binary, operators.unary, operators.compare
    format_value = text.format_value

    def join(self, parts):
        """The parts of an f-string."""
        return "".join(parts)

    # ---------------------------------------------------------------- attributes of objects

    def own(self, value, name):
        """The entry of the object's `__dict__` under a name, or NULL."""
        if not type(value).__dictoffset__:
            return NULL
        try:
            own = {} if attributes.lacks_dict(value) else _attributes(value)
        except AttributeError:  # native code keeps it for itself
            return attributes.plain_attribute(value, name, NULL)
        space: Any = dict if isinstance(own, dict) else types.MappingProxyType
        return space.get(own, name, NULL)

    def own_store(self, value, name, new):
        """No descriptor takes the value: the object's `__dict__` does, or native code says why not."""
        native_method(type(value), "__setattr__")(value, name, new)

    def own_delete(self, value, name):
        native_method(type(value), "__delattr__")(value, name)

    def sum_of_numbers(self, numbers: list):
        """The sum of ints, floats and bools, as `sum` makes it, which starts with the first."""
        return sum(numbers[1:], numbers[0])

    def compares(self, kind) -> bool:
        """Whether the host compares objects of a class itself."""
        return False

    # ---------------------------------------------------------------- native code

    def native_special(self, method, value, args) -> Any:
        """A special method in C, as it was found on the class of `value`."""
        return method(value, *args)

    def class_value(self, kind, name, attribute):
        """Something on a class that is no descriptor is the attribute's value."""
        return attribute

    def native_get(self, get, descriptor, value, kind, name) -> Any:
        """The result of a descriptor's native `__get__`."""
        own = name == "__dict__" and type(descriptor) is types.GetSetDescriptorType and value is not None
        return _attributes(value) if own else get(descriptor, value, kind)

    def native_set(self, descriptor, value, name, new):
        """A descriptor with a native `__set__` takes the value."""
        native_method(type(value), "__setattr__")(value, name, new)

    def native_delete(self, descriptor, value, name):
        native_method(type(value), "__delattr__")(value, name)

    def fallback(self, method, value, name) -> Any:
        """The class's `__getattr__` answers."""
        return call_special(self, method, value, [name], "__getattr__")

    def missing(self, reader, value, name) -> Any:
        """CPython's algorithm finds no such attribute: native code words the error, or finds it in its own way."""
        return reader(value, name)

    def type_name(self, value) -> str:
        """The name of a value's class in errors."""
        return name_in_errors(type(value))

    def converted(self, function, kind, name, result, *more) -> Any:
        """The result of a builtin whose method of `kind` has given `result`: native code checks it, of an object that
        gives it."""
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        kind_with_result = type(kind.__name__, (), {**named, name: lambda *_: result})
        return function(kind_with_result(), *more)

    def native_binary(self, symbol, a, b) -> Any:
        if symbol == "+=" and issubclass(type(a), list) and sequences.iterates_in_python(self, b, counted=True):
            b = self.steps(b)
        return ARITHMETIC[symbol](a, b)

    def natively(self, function, *operands) -> Any:
        """Native code runs an operator, and calls special methods of the operands in Python."""
        return function(*operands)

    def computes(self, a, b) -> bool:
        """Whether operands without special methods compute with each other natively."""
        return False

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
    native_isinstance, native_issubclass = staticmethod(isinstance), staticmethod(issubclass)

    # ---------------------------------------------------------------- names

    def default(self, f, name, value):
        """A parameter's default value is used."""
        return value

    def load_global(self, f, name):
        namespace = f.__globals__
        if name in namespace:
            return namespace[name]
        if type(namespace) is not dict and provides(type(namespace), "__missing__"):
            try:
                return namespace[name]
            except KeyError:
                pass
        return self.load_builtin(namespace, name)

    def load_builtin(self, namespace, name):
        names = builtin_namespace(namespace)
        if name not in names:
            raise name_not_defined(name)
        return names[name]

    def store_global(self, f, name, value):
        f.__globals__[name] = value

    def delete_global(self, f, name):
        if name not in f.__globals__:
            raise name_not_defined(name)
        del f.__globals__[name]

    def load_cell(self, f, cell, name):
        try:
            return cell.cell_contents
        except ValueError:
            pass
        if name in f.__code__.co_freevars:
            text = f"cannot access free variable {name!r} where it is not associated with a value in enclosing scope"
            raise NameError(text)
        raise UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")

    def store_cell(self, f, cell, value):
        cell.cell_contents = value

    def delete_cell(self, f, cell):
        """The cell of a function is empty from now on; it is not."""
        del cell.cell_contents

    def name_value(self, value, name):
        """A value of `named_type` was stored in the variable `name`."""

    def made_function(self, f):
        """A `def` or `lambda` made a function; returns it."""
        return f

    def import_name(self, f, name, names, level):
        """`import name` or `from name import names`."""
        importer = self.load_builtin(f.__globals__, "__import__")
        return self.call(importer, [name, f.__globals__, None, names, level], {})

    def import_from(self, module, name):
        try:
            return self.load_attr(module, name)
        except AttributeError as error:
            swallow(error)
        package = getattr(module, "__name__", None)
        submodule = sys.modules.get(f"{package}.{name}")
        if submodule is not None:
            return submodule
        return native_import_from(module, name)


def native_import_from(module, name):
    """Raise the running version's ImportError for a name that a module has not."""
    code = compile(f"from module import {name}", "<import>", "exec")
    exec(code.replace(co_filename=__file__), {"__builtins__": {"__import__": lambda *_: module}})


def partial_arguments(f, args):
    """The positional arguments of a call of a functools.partial; 3.14 has placeholders among them."""
    if PLACEHOLDER is None or not any(value is PLACEHOLDER for value in f.args):
        return [*f.args, *args]
    values = iter(args)
    merged = [next(values, PLACEHOLDER) if value is PLACEHOLDER else value for value in f.args]
    if any(value is PLACEHOLDER for value in merged):
        raise TypeError(
            "missing positional arguments in 'partial' call; expected at least "
            f"{sum(value is PLACEHOLDER for value in f.args)}, got {len(args)}"
        )
    return [*merged, *values]


def _attributes(value) -> Any:
    """The `__dict__` of an object: of a `threading.local` the one of this thread."""
    return native_method(type(value), "__getattribute__")(value, "__dict__")
