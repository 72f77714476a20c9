"""Canonical instructions, first part: names, attributes, operators, calls.

A handler is `handler(frame, stack, argument)`. It returns None to go on with the next instruction, or the index to go
on at (see `control.py`). Whatever may touch provenance goes through `frame.host`. Errors are raised outside of `except`
blocks, so that the interpreted program does not see the interpreter's own exceptions as `__context__`.
"""

from __future__ import annotations

import builtins
import types
import typing
from typing import Any

from thunder.interpreter.tables import VERSION


class _Null:
    """The NULL that CPython keeps beside a callable without receiver."""

    def __repr__(self):
        return "NULL"


NULL = typing.cast(Any, _Null())
# an unbound variable; interpreted code that is this package's own may store NULL in variables
UNBOUND = _Null()
# Operands of exactly these types never have provenance: the machine computes with them directly.
PLAIN = frozenset({int, float, bool, str, bytes, complex})


def take(stack, n):
    """Pop n values, oldest first."""
    if not n:
        return []
    values = stack[-n:]
    del stack[-n:]
    return values


# ---------------------------------------------------------------- variables


def LOAD_CONST(frame, stack, value):
    stack.append(value)


def LOAD_FAST(frame, stack, name):
    try:
        stack.append(frame.locals[name])
        return
    except KeyError:
        pass
    raise unbound_local(name)


def unbound_local(name):
    return UnboundLocalError(f"cannot access local variable {name!r} where it is not associated with a value")


def STORE_FAST(frame, stack, name):
    value = frame.locals[name] = stack.pop()
    if type(value) is frame.named_type:
        frame.host.name_value(value, name)


def RESTORE_FAST(frame, stack, name):
    """STORE_FAST of a variable that an inlined comprehension hid, and that may have been unbound."""
    value = stack.pop()
    if value is UNBOUND:
        frame.locals.pop(name, None)
        return
    frame.locals[name] = value
    if type(value) is frame.named_type:
        frame.host.name_value(value, name)


def DELETE_FAST(frame, stack, name):
    if frame.locals.pop(name, NULL) is NULL:
        raise unbound_local(name)


def LOAD_FAST_AND_CLEAR(frame, stack, name):
    stack.append(frame.locals.pop(name, UNBOUND))


def MAKE_CELL(frame, stack, name):
    variables = frame.locals
    variables[name] = types.CellType(variables[name]) if name in variables else types.CellType()


def COPY_FREE_VARS(frame, stack, _):
    fn = frame.fn
    frame.locals.update(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))


def LOAD_DEREF(frame, stack, name):
    stack.append(frame.host.load_cell(frame.fn, frame.locals[name], name))


def STORE_DEREF(frame, stack, name):
    value = stack.pop()
    if type(value) is frame.named_type:
        frame.host.name_value(value, name)
    frame.host.store_cell(frame.fn, frame.locals[name], value)


def DELETE_DEREF(frame, stack, name):
    cell = frame.locals[name]
    frame.host.load_cell(frame.fn, cell, name)  # raises when it is empty
    frame.host.delete_cell(frame.fn, cell)


def LOAD_GLOBAL(frame, stack, name):
    stack.append(frame.host.load_global(frame.fn, name))


def LOAD_GLOBAL_CALLABLE(frame, stack, name):
    value = frame.host.load_global(frame.fn, name)
    stack.append(NULL)
    stack.append(value)


def STORE_GLOBAL(frame, stack, name):
    frame.host.store_global(frame.fn, name, stack.pop())


def DELETE_GLOBAL(frame, stack, name):
    frame.host.delete_global(frame.fn, name)


# ---------------------------------------------------------------- attributes, items, imports


def LOAD_ATTR(frame, stack, name):
    stack[-1] = frame.host.load_attr(stack[-1], name)


def LOAD_METHOD(frame, stack, name):
    stack[-1] = frame.host.load_attr(stack[-1], name)
    stack.append(NULL)


def LOAD_SUPER(frame, stack, explicit):
    """super().x and super(A, b).x: the compiler passed class and receiver, for the case that `super` is the builtin."""
    function, cls, receiver = take(stack, 3)
    arguments = [cls, receiver] if explicit or function is super else []
    stack.append(frame.host.call(function, arguments, {}))


def STORE_ATTR(frame, stack, name):
    target = stack.pop()
    frame.host.store_attr(target, name, stack.pop())


def DELETE_ATTR(frame, stack, name):
    frame.host.delete_attr(stack.pop(), name)


def SUBSCRIPT(frame, stack, _):
    key = stack.pop()
    stack[-1] = frame.host.getitem(stack[-1], key)


def STORE_SUBSCR(frame, stack, _):
    value, target, key = take(stack, 3)
    frame.host.setitem(target, key, value)


def DELETE_SUBSCR(frame, stack, _):
    target, key = take(stack, 2)
    frame.host.delitem(target, key)


def IMPORT_NAME(frame, stack, name):
    level, names = take(stack, 2)
    stack.append(frame.host.import_name(frame.fn, name, names, level))


def IMPORT_FROM(frame, stack, name):
    stack.append(frame.host.import_from(stack[-1], name))


# ---------------------------------------------------------------- stack


def POP_TOP(frame, stack, _):
    stack.pop()


def PUSH_NULL(frame, stack, _):
    stack.append(NULL)


def COPY(frame, stack, n):
    stack.append(stack[-n])


def SWAP(frame, stack, n):
    stack[-1], stack[-n] = stack[-n], stack[-1]


# ---------------------------------------------------------------- operators


def BINARY(frame, stack, operation):
    function, symbol = operation
    b = stack.pop()
    a = stack[-1]
    if type(a) in PLAIN and type(b) in PLAIN:
        stack[-1] = function(a, b)
    else:
        stack[-1] = frame.host.binary(symbol, a, b)


def COMPARE(frame, stack, operation):
    function, symbol = operation
    b = stack.pop()
    a = stack[-1]
    if type(a) in PLAIN and type(b) in PLAIN:
        stack[-1] = function(a, b)
    else:
        stack[-1] = frame.host.compare(symbol, a, b)


def UNARY(frame, stack, operation):
    function, symbol = operation
    a = stack[-1]
    stack[-1] = function(a) if type(a) in PLAIN else frame.host.unary(symbol, a)


def NOT(frame, stack, _):
    a = stack[-1]
    stack[-1] = a is False or (a is not True and not frame.host.truth(a))


def TO_BOOL(frame, stack, _):
    a = stack[-1]
    if a is not True and a is not False:
        stack[-1] = frame.host.truth(a)


def IS_OP(frame, stack, inverted):
    b = stack.pop()
    stack[-1] = frame.host.same(stack[-1], b) is not bool(inverted)


def CONTAINS_OP(frame, stack, inverted):
    b = stack.pop()
    stack[-1] = frame.host.contains(b, stack[-1]) is not bool(inverted)


# ---------------------------------------------------------------- calls


def CALL(frame, stack, n):
    arguments = stack[-n:] if n else []
    function, receiver = stack[-n - 2], stack[-n - 1]
    del stack[-n - 2 :]
    if receiver is NULL:
        stack.append(frame.host.call(function, arguments, {}))
    elif function is NULL:
        stack.append(frame.host.call(receiver, arguments, {}))
    else:
        stack.append(frame.host.call(function, [receiver, *arguments], {}))


def CALL_KEYWORDS(frame, stack, n):
    names = stack.pop()
    operands = take(stack, n)
    count = n - len(names)
    function, arguments = _callee(stack, operands[:count])
    keywords = dict(zip(names, operands[count:]))  # noqa: B905 - the lengths are equal
    stack.append(frame.host.call(function, arguments, keywords))


def CALL_FUNCTION_EX(frame, stack, flags):
    """`f(*arguments, **keywords)`."""
    host = frame.host
    keywords = stack.pop() if flags & 1 else NULL
    arguments = stack.pop()
    function, positional = _callee(stack, [])
    if type(arguments) is not tuple and not is_iterable(arguments):
        kind = type(arguments).__name__
        raise TypeError(f"{before_stars(function)} after * must be an iterable, not {kind}")
    positional += host.steps(arguments)
    if keywords is NULL:
        keywords = {}
    else:
        host.materialize(keywords)
        if not hasattr(keywords, "keys"):
            kind = type(keywords).__name__
            raise TypeError(f"{before_stars(function)} after ** must be a mapping, not {kind}")
        keywords = dict(keywords)  # pyright: ignore[reportCallIssue, reportArgumentType]
    stack.append(host.call(function, positional, keywords))


def before_stars(function):
    return f"{function_text(function)} argument" if VERSION < (3, 15) else "Value"


def function_text(function):
    """How CPython names a callable in errors of calls: `module.qualname()`."""
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(qualname, str):
        return str(function)
    module = getattr(function, "__module__", None)
    prefix = f"{module}." if isinstance(module, str) and module != "builtins" else ""
    return f"{prefix}{qualname}()"


def provides(kind, name):
    """Whether a class or a base has a special method. As with CPython's type slots its metaclass has no say."""
    return any(name in base.__dict__ for base in kind.__mro__)


def is_iterable(value):
    return provides(type(value), "__iter__") or provides(type(value), "__getitem__")


def _callee(stack, arguments):
    first, second = take(stack, 2)
    if first is NULL:
        return second, arguments
    return first, arguments if second is NULL else [second, *arguments]


def MAKE_FUNCTION(frame, stack, flags):
    """`def` or `lambda`, with defaults, annotations and a closure where the flags say so."""
    code = stack.pop()
    closure = stack.pop() if flags & 8 else None
    incomplete = code.co_freevars and closure is None  # the closure is attached afterwards; until then, empty cells
    if incomplete:
        closure = tuple(types.CellType() for _ in code.co_freevars)
    fn = types.FunctionType(code, frame.fn.__globals__, closure=closure)
    fn.__qualname__ = code.co_qualname
    for bit in (4, 2, 1):
        if flags & bit:
            _set_attribute(fn, bit, stack.pop())
    stack.append(fn if incomplete else frame.host.made_function(fn))


def SET_FUNCTION_ATTRIBUTE(frame, stack, bit):
    """Sets the defaults, annotations or closure of a function that was just made."""
    fn = stack.pop()
    value = stack.pop()
    if bit == 8:  # a closure cannot be replaced: make the function again
        function = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, value)
        function.__qualname__, function.__kwdefaults__ = fn.__qualname__, fn.__kwdefaults__
        if fn.__annotations__:
            function.__annotations__ = fn.__annotations__
        fn = frame.host.made_function(function)
    else:
        _set_attribute(fn, bit, value)
    stack.append(fn)


def _set_attribute(fn, bit, value):
    if bit == 1:
        fn.__defaults__ = value
    elif bit == 2:
        fn.__kwdefaults__ = value
    elif bit == 4:
        fn.__annotations__ = dict(zip(value[::2], value[1::2], strict=True)) if type(value) is tuple else value
    elif bit == 16:
        fn.__annotate__ = value


def LOAD_BUILD_CLASS(frame, stack, _):
    stack.append(frame.host.load_builtin(frame.fn.__globals__, "__build_class__"))


def name_not_defined(name):
    return NameError(f"name {name!r} is not defined", name=name)


def builtin_namespace(namespace):
    """The dict of builtins that a function with these globals sees."""
    names = namespace.get("__builtins__", builtins)
    return names if isinstance(names, dict) else vars(names)
