"""Canonical instructions: names, attributes, operators, calls, jumps, loops, generators, exceptions, `with`.

A handler is `handler(frame, stack, argument)`. It returns None to go on with the next instruction, or the index to go
on at; RETURN and YIELD leave the frame with the value on top of the stack. Whatever may touch provenance goes through
`frame.host`. Errors are raised outside of `except` blocks, so that the interpreted program does not see the
interpreter's own exceptions as `__context__`.
"""

from __future__ import annotations

import builtins
import types
import typing
from typing import Any, NoReturn

from thunder.interpreter.tables import ITERATOR, VERSION
from thunder.interpreter.tracebacks import swallow


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


RETURN, YIELD = -1, -2


# ---------------------------------------------------------------- jumps and loops


def JUMP(frame, stack, target):
    return target


def POP_JUMP_IF_TRUE(frame, stack, target):
    value = stack.pop()
    if value is True or (value is not False and frame.host.truth(value)):
        return target


def POP_JUMP_IF_FALSE(frame, stack, target):
    value = stack.pop()
    if value is False or (value is not True and not frame.host.truth(value)):
        return target


def POP_JUMP_IF_NONE(frame, stack, target):
    if frame.host.same(stack.pop(), None):
        return target


def POP_JUMP_IF_NOT_NONE(frame, stack, target):
    if not frame.host.same(stack.pop(), None):
        return target


def GET_ITER(frame, stack, _):
    stack[-1] = frame.host.iterate(stack[-1])


def FOR_ITER(frame, stack, target):
    try:
        stack.append(frame.host.next(stack[ITERATOR]))
    except StopIteration as stop:
        swallow(stop)
        del stack[ITERATOR:]
        return target


def RETURN_VALUE(frame, stack, _):
    return RETURN


# ---------------------------------------------------------------- generators


def RETURN_GENERATOR(frame, stack, _):
    stack.append(None)  # the generator object was made at the call; CPython leaves a value here that POP_TOP drops


def RETURN_STARTED_GENERATOR(frame, stack, _):
    """The instructions before it have run at the call."""
    stack.append(None)
    return YIELD


def YIELD_VALUE(frame, stack, _):
    frame.delegate = None
    return YIELD


def YIELD_FROM(frame, stack, target):
    """The yield inside `yield from`; `target` is where the loop ends."""
    frame.delegate = target
    return YIELD


def GET_YIELD_FROM_ITER(frame, stack, _):
    value = stack[-1]
    if type(value) is types.CoroutineType:
        raise TypeError("cannot 'yield from' a coroutine object in a non-coroutine generator")
    if type(value) is not types.GeneratorType:
        stack[-1] = frame.host.iterate(value)


def SEND(frame, stack, target):
    """`yield from` and `await` give a value to the inner iterator."""
    host, value = frame.host, stack.pop()
    receiver = stack[ITERATOR]
    try:
        if value is None and provides(type(receiver), "__next__"):
            stack.append(host.next(receiver))
        else:
            stack.append(host.call(host.load_attr(receiver, "send"), [value], {}))
    except StopIteration as stop:
        swallow(stop)
        stack[ITERATOR:] = [stop.value]
        return target


def CLEANUP_THROW(frame, stack, _):
    error = stack[-1]
    if isinstance(error, StopIteration):
        stack[ITERATOR - 2 :] = [error.value]
        return
    reraise(frame, error)


def STOPITERATION_ERROR(frame, stack, _):
    """A StopIteration that would leave a generator becomes a RuntimeError."""
    stack[-1] = stop_iteration_error(stack[-1])


def stop_iteration_error(error):
    """The exception that leaves a generator when `error` is raised in it."""
    if not isinstance(error, StopIteration):
        return error
    replacement = RuntimeError("generator raised StopIteration")
    replacement.__cause__ = replacement.__context__ = error
    return replacement


# ---------------------------------------------------------------- exceptions


def RAISE_VARARGS(frame, stack, n):
    """`raise`, `raise error` or `raise error from cause`."""
    host = frame.host
    if n == 0:
        if host.exc is None:
            raise RuntimeError("No active exception to reraise")
        reraise(frame, host.exc)
    values = take(stack, n)
    error = _exception(host, values[0], "exceptions must derive from BaseException")
    if n == 2:
        cause = values[1]
        error.__cause__ = (
            cause if cause is None else _exception(host, cause, "exception causes must derive from BaseException")
        )
    if host.exc is not None:
        set_context(error, host.exc)
    raise error


def _exception(host, value, message):
    if isinstance(value, BaseException):
        return value
    if not (isinstance(value, type) and issubclass(value, BaseException)):
        raise TypeError(message)
    error = host.call(value, [], {})
    if not isinstance(error, BaseException):
        raise TypeError(f"calling {value!r} should have returned an instance of BaseException, not {type(error)!r}")
    return error


def set_context(error, handled):
    """error.__context__ = handled, without making the chain circular (as CPython's _PyErr_SetObject)."""
    if error is handled:
        return
    link = handled
    seen = set()
    while (context := link.__context__) is not None and id(context) not in seen:
        if context is error:
            link.__context__ = None
            break
        seen.add(id(context))
        link = context
    error.__context__ = handled


def RERAISE(frame, stack, _):
    reraise(frame, stack.pop())


def reraise(frame, error) -> NoReturn:
    """The exception goes on, without a new entry in its traceback."""
    frame.reraising = True
    raise_as_it_is(error)


def raise_as_it_is(error) -> NoReturn:
    """Python's own `raise` gives an exception the context of what is handled around the machine."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, context  # whose traceback leads here: they would hold each other


def PUSH_EXC_INFO(frame, stack, _):
    error = stack.pop()
    stack.append(frame.exc)
    stack.append(error)
    frame.exc = frame.host.exc = error


def POP_EXCEPT(frame, stack, _):
    previous = frame.exc = stack.pop()
    frame.host.handles()
    frame.host.exc = frame.outer_exc if previous is None else previous


def CHECK_EXC_MATCH(frame, stack, _):
    wanted = stack.pop()
    check_exception_classes(wanted)
    stack.append(matches(stack[-1], wanted))


def check_exception_classes(wanted) -> None:
    for t in wanted if isinstance(wanted, tuple) else (wanted,):
        if not (isinstance(t, type) and issubclass(t, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")


def matches(error, wanted):
    """Like CPython, by the class's real bases: `__instancecheck__` has no say."""
    mro = type(error).__mro__
    return any(t in mro for t in wanted) if isinstance(wanted, tuple) else wanted in mro


# ---------------------------------------------------------------- with


def BEFORE_WITH(frame, stack, _):
    host, manager = frame.host, stack.pop()
    enter_method = host.load_special(manager, "__enter__")
    if enter_method is NULL:
        raise TypeError(_no_context_manager(host, manager))
    leave_method = host.load_special(manager, "__exit__")
    if leave_method is NULL:
        raise TypeError(_no_context_manager(host, manager) + " (missed __exit__ method)")
    stack.append(leave_method)
    stack.append(host.call(enter_method, [], {}))


def _no_context_manager(host, manager):
    return f"'{host.type_name(manager)}' object does not support the context manager protocol"


def LOAD_SPECIAL(frame, stack, name):
    manager = stack[-1]
    method = frame.host.load_special(manager, name)
    if method is NULL:
        raise TypeError(_no_context_manager(frame.host, manager) + f" (missed {name} method)")
    stack[-1] = method
    stack.append(NULL)


def WITH_EXCEPT_START(frame, stack, depth):
    error = stack[-1]
    stack.append(frame.host.call(stack[-depth], [type(error), error, error.__traceback__], {}))


# ---------------------------------------------------------------- the rest


def UNSUPPORTED(frame, stack, opname):
    """An instruction that is not known: functions with one are not interpreted (`Record.foreign`)."""
    raise AssertionError(f"{opname} is interpreted")
