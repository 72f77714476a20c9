"""Canonical instructions, first part: names, attributes, operators, builders, patterns, calls.

A handler is `handler(frame, stack, argument)`. It returns None to go on with the next instruction, or the index to go
on at (see `control.py`). Whatever may touch provenance goes through `frame.host`. Errors are raised outside of `except`
blocks, so that the interpreted program does not see the interpreter's own exceptions as `__context__`.
"""

from __future__ import annotations

import builtins
import functools
import types
import typing
from typing import Any

from thunder.interpreter.matching import match_class, match_keys
from thunder.interpreter.tables import VERSION


class _Null:
    """The NULL that CPython keeps beside a callable without receiver, or in an unbound variable."""

    def __repr__(self):
        return "NULL"


NULL = typing.cast(Any, _Null())
# Operands of exactly these types never have provenance: the machine computes with them directly.
PLAIN = frozenset({int, float, bool, str, bytes, complex})
SEQUENCE_FLAG, MAPPING_FLAG = 1 << 5, 1 << 6  # Py_TPFLAGS_SEQUENCE, Py_TPFLAGS_MAPPING


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
    if value is NULL:
        frame.locals.pop(name, None)
        return
    frame.locals[name] = value
    if type(value) is frame.named_type:
        frame.host.name_value(value, name)


def DELETE_FAST(frame, stack, name):
    if frame.locals.pop(name, NULL) is NULL:
        raise unbound_local(name)


def LOAD_FAST_AND_CLEAR(frame, stack, name):
    stack.append(frame.locals.pop(name, NULL))


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
    del cell.cell_contents


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


def LOAD_NAME(frame, stack, name):
    try:
        stack.append(frame.names[name])
        return
    except KeyError:
        pass
    stack.append(frame.host.load_global(frame.fn, name))


def STORE_NAME(frame, stack, name):
    frame.names[name] = stack.pop()


def DELETE_NAME(frame, stack, name):
    try:
        del frame.names[name]
        return
    except KeyError:
        pass
    raise NameError(f"name {name!r} is not defined", name=name)


def LOAD_LOCALS(frame, stack, _):
    stack.append(frame.names)


def LOAD_FROM_DICT_OR_DEREF(frame, stack, name):
    namespace = stack.pop()
    try:
        stack.append(namespace[name])
        return
    except KeyError:
        pass
    LOAD_DEREF(frame, stack, name)


def LOAD_FROM_DICT_OR_GLOBALS(frame, stack, name):
    namespace = stack.pop()
    try:
        stack.append(namespace[name])
        return
    except KeyError:
        pass
    LOAD_GLOBAL(frame, stack, name)


def SETUP_ANNOTATIONS(frame, stack, _):
    if "__annotations__" not in frame.names:
        frame.names["__annotations__"] = {}


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


def IMPORT_STAR(frame, stack, _):
    module = stack.pop()
    names = getattr(module, "__all__", None)
    if names is None:
        names = [n for n in vars(module) if not n.startswith("_")]
    for n in names:
        frame.names[n] = frame.host.load_attr(module, n)
    stack.append(None)  # 3.12's intrinsic has a result; 3.11 never reads this slot


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


# ---------------------------------------------------------------- builders


def BUILD_LIST(frame, stack, n):
    stack.append(take(stack, n))


def BUILD_TUPLE(frame, stack, n):
    stack.append(tuple(take(stack, n)))


def BUILD_SET(frame, stack, n):
    elements = take(stack, n)
    frame.host.hashed(elements)
    stack.append(set(elements))


def BUILD_MAP(frame, stack, n):
    flat = take(stack, 2 * n)
    frame.host.hashed(flat[::2])
    stack.append(dict(zip(flat[::2], flat[1::2])))  # noqa: B905 - the lengths are equal


def BUILD_CONST_KEY_MAP(frame, stack, n):
    keys = stack.pop()
    stack.append(dict(zip(keys, take(stack, n))))  # noqa: B905 - the lengths are equal


def BUILD_SLICE(frame, stack, n):
    stack.append(slice(*take(stack, n)))


def BUILD_STRING(frame, stack, n):
    stack.append(frame.host.join(take(stack, n)))


def LIST_EXTEND(frame, stack, n):
    values = stack.pop()
    if not _is_iterable(values):
        raise TypeError(f"Value after * must be an iterable, not {type(values).__name__}")
    stack[-n].extend(frame.host.steps(values))


def SET_UPDATE(frame, stack, n):
    values = stack.pop()
    stack[-n].update(frame.host.steps(values))


def DICT_UPDATE(frame, stack, n):
    values = frame.host.mapping(stack.pop())
    if not hasattr(values, "keys"):
        raise TypeError(f"{type(values).__name__!r} object is not a mapping")
    stack[-n].update(values)


def before_stars(function):
    return f"{function_text(function)} argument" if VERSION < (3, 15) else "Value"


def DICT_MERGE(frame, stack, depths):
    """`**values` of a call: like DICT_UPDATE, but a key may come once only."""
    n, callable_depth = depths
    values, target, function = frame.host.mapping(stack.pop()), stack[-n], stack[-callable_depth]
    if not hasattr(values, "keys"):
        raise TypeError(f"{before_stars(function)} after ** must be a mapping, not {type(values).__name__}")
    for key in values.keys():
        if key in target:
            raise TypeError(f"{function_text(function)} got multiple values for keyword argument {key!r}")
        target[key] = values[key]


def function_text(function):
    """How CPython names a callable in errors of calls: `module.qualname()`."""
    qualname = getattr(function, "__qualname__", None)
    if not isinstance(qualname, str):
        return str(function)
    module = getattr(function, "__module__", None)
    prefix = f"{module}." if isinstance(module, str) and module != "builtins" else ""
    return f"{prefix}{qualname}()"


def LIST_TO_TUPLE(frame, stack, _):
    stack[-1] = tuple(stack[-1])


def LIST_APPEND(frame, stack, n):
    value = stack.pop()
    stack[-n].append(value)


def SET_ADD(frame, stack, n):
    value = stack.pop()
    frame.host.hashed((value,), stack[-n])
    stack[-n].add(value)


def MAP_ADD(frame, stack, n):
    key, value = take(stack, 2)
    frame.host.hashed((key,), stack[-n])
    stack[-n][key] = value


def UNPACK_SEQUENCE(frame, stack, n):
    stack.extend(frame.host.unpack(stack.pop(), n))


def UNPACK_EX(frame, stack, counts):
    stack.extend(frame.host.unpack(stack.pop(), counts & 255, counts >> 8))


@functools.cache
def unpacker(before, after=None):
    """A native function that unpacks a value into `before` names, and `*rest` and `after` names unless `after` is None.

    It returns them in reverse, as the stack wants them. Native code gives the errors of the running version.
    """
    names = [f"a{k}" for k in range(before)]
    if after is not None:
        names += ["*rest", *(f"b{k}" for k in range(after))]
    returned = ", ".join(name.lstrip("*") for name in reversed(names))
    namespace: dict = {}
    source = f"def unpack(value):\n    [{', '.join(names)}] = value\n    return [{returned}]"
    exec(compile(source, __file__, "exec"), namespace)  # named like this file, so that tracebacks leave it out
    return namespace["unpack"]


# ---------------------------------------------------------------- text

CONVERSIONS = (None, str, repr, ascii)


def FORMAT_VALUE(frame, stack, flags):
    spec = stack.pop() if flags & 4 else ""
    stack[-1] = frame.host.format_value(stack[-1], flags & 3, spec)


def CONVERT_VALUE(frame, stack, conversion):
    stack[-1] = frame.host.call(CONVERSIONS[conversion], [stack[-1]], {})


def BUILD_INTERPOLATION(frame, stack, flags):
    from string.templatelib import Interpolation

    spec = stack.pop() if flags & 1 else ""
    value, expression = take(stack, 2)
    stack.append(Interpolation(value, expression, (None, "s", "r", "a")[flags >> 2], spec))


def BUILD_TEMPLATE(frame, stack, _):
    from string.templatelib import Template

    strings, interpolations = take(stack, 2)
    parts = [strings[0]]
    for interpolation, text in zip(interpolations, strings[1:], strict=True):
        parts += (interpolation, text)
    stack.append(Template(*parts))


# ---------------------------------------------------------------- patterns


def GET_LEN(frame, stack, _):
    stack.append(frame.host.call(len, [stack[-1]], {}))


def MATCH_SEQUENCE(frame, stack, _):
    stack.append(bool(frame.host.pattern_type(stack[-1]).__flags__ & SEQUENCE_FLAG))


def MATCH_MAPPING(frame, stack, _):
    stack.append(bool(frame.host.pattern_type(stack[-1]).__flags__ & MAPPING_FLAG))


def MATCH_KEYS(frame, stack, _):
    stack.append(match_keys(frame.host, stack[-2], stack[-1]))


def MATCH_CLASS(frame, stack, positional):
    subject, cls, names = take(stack, 3)
    stack.append(match_class(frame.host, subject, cls, positional, names))


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
    split = len(stack) - len(names)
    keywords = dict(zip(names, stack[split:]))  # noqa: B905 - the lengths are equal
    start = len(stack) - n
    arguments = stack[start:split]
    function, receiver = stack[start - 2], stack[start - 1]
    del stack[start - 2 :]
    if receiver is NULL:
        stack.append(frame.host.call(function, arguments, keywords))
    elif function is NULL:
        stack.append(frame.host.call(receiver, arguments, keywords))
    else:
        stack.append(frame.host.call(function, [receiver, *arguments], keywords))


def CALL_FUNCTION_EX(frame, stack, flags):
    host = frame.host
    keywords = stack.pop() if flags & 1 else NULL
    arguments = stack.pop()
    function, positional = _callee(stack, [])
    if type(arguments) is not tuple and not _is_iterable(arguments):
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


def provides(kind, name):
    """Whether a class or a base has a special method. As with CPython's type slots its metaclass has no say."""
    return any(name in base.__dict__ for base in kind.__mro__)


def _is_iterable(value):
    return provides(type(value), "__iter__") or provides(type(value), "__getitem__")


def _callee(stack, arguments):
    first, second = take(stack, 2)
    if first is NULL:
        return second, arguments
    return first, arguments if second is NULL else [second, *arguments]


def MAKE_FUNCTION(frame, stack, flags):
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
    fn = stack.pop()
    value = stack.pop()
    if bit == 8:  # a closure cannot be replaced: make the function again
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, value)
        made.__qualname__, made.__kwdefaults__ = fn.__qualname__, fn.__kwdefaults__
        if fn.__annotations__:
            made.__annotations__ = fn.__annotations__
        fn = frame.host.made_function(made)
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
    found = namespace.get("__builtins__", builtins)
    return found if isinstance(found, dict) else vars(found)
