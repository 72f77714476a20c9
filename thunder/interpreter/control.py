"""Canonical instructions, second part: jumps, loops, generators, exceptions, `with`.

A handler that returns an index continues there; RETURN and YIELD leave the frame with the value on top of the stack.
"""

from __future__ import annotations

import types
from typing import NoReturn

from thunder.interpreter.instructions import NULL, provides, take
from thunder.interpreter.tables import ITERATOR
from thunder.interpreter.tracebacks import swallow

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
    for t in wanted if isinstance(wanted, tuple) else (wanted,):
        if not (isinstance(t, type) and issubclass(t, BaseException)):
            raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    stack.append(_matches(stack[-1], wanted))


def _matches(error, wanted):
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
