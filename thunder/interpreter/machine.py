"""The machine: calls a Python function, and runs its frame. No torch, no wrappers, no version checks.

Values on its stack are the program's own objects. Whatever may touch provenance goes through the frame's host.
"""

from __future__ import annotations

from thunder.interpreter.binding import bind
from thunder.interpreter.decode import decode
from thunder.interpreter.instructions import RETURN, YIELD, raise_as_it_is, set_context, stop_iteration_error
from thunder.interpreter.recursion import run_deeper
from thunder.interpreter.tables import ITERATOR
from thunder.interpreter.tracebacks import clean, entry, is_interpreted, release, swallow


class Frame:
    """One activation of a function: variables by name (cells among them), value stack, position."""

    __slots__ = (
        "fn", "record", "program", "host", "locals", "stack", "ip", "exc", "outer_exc", "delegate",
        "suspended", "reraising", "named_type", "snapshot",
    )  # fmt: skip

    def __init__(self, fn, record, variables, host):
        self.fn, self.record, self.locals, self.host = fn, record, variables, host
        self.program = record.program if host.log is None else host.log.program(fn.__code__, record)
        self.stack, self.ip = [], 0
        self.exc = self.outer_exc = self.delegate = self.snapshot = None
        self.suspended = self.reraising = False
        self.named_type = host.named_type

    def run(self, sent=None, thrown=None):
        """Run until the frame returns or yields (then `suspended` is set); the value is returned in both cases.

        A suspended frame goes on with `sent` as the value of its yield, or with `thrown` raised there.
        """
        host, program, stack, ip = self.host, self.program, self.stack, self.ip
        frames = host.stack_of_frames
        if len(frames) >= host.stack_room:
            return run_deeper(self, sent, thrown)
        if self.suspended:
            self.suspended = False
            stack.append(sent)
            if thrown is None:
                ip += 1
        self.outer_exc = host.exc
        if self.exc is not None:
            host.exc = self.exc
        frames.append(self)
        executed = 0
        start = ip
        try:
            while True:
                try:
                    if thrown is not None:
                        error, thrown = thrown, None
                        target = self.throw(error)
                        if target == YIELD:
                            self.suspended = True
                            return stack.pop()
                        ip = start = target
                    while True:
                        handler, argument = program[ip]
                        self.ip = ip
                        target = handler(self, stack, argument)
                        if target is None:
                            ip += 1
                        elif target >= 0:
                            executed += ip - start + 1
                            ip = start = target
                        else:
                            executed += ip - start + 1
                            self.suspended = target != RETURN
                            start = ip + 1
                            return stack.pop()
                except BaseException as error:  # noqa: BLE001 - `catch` raises it again unless the program handles it
                    executed += self.ip - start + 1
                    start = ip = self.ip + 1
                    ip = start = self.catch(error)
        finally:
            host.exc, self.outer_exc = self.outer_exc, None  # which leads to whoever runs a generator
            host.instructions += executed
            frames.pop()

    def catch(self, error):
        """Note the exception's traceback and context; the index of the handler, or the exception goes on."""
        try:
            if self.host.passes(error):
                raise error
            self.note(error)
            handler = self.record.handlers[self.ip]
            if handler is None:
                # 3.11 leaves this to the generator object; later versions have an instruction for it
                if self.record.is_generator:
                    error = stop_iteration_error(error)
                raise error
            release(error)
            target, depth, keeps_instruction = handler
            stack = self.stack
            del stack[depth:]
            if keeps_instruction:
                stack.append(self.ip)
            stack.append(error)
            return target
        finally:
            del error  # its traceback leads to this frame: they would hold each other

    def note(self, error):
        """Give an exception the traceback and the context that the interpreted frame's would have."""
        if self.reraising:
            self.reraising = False
            error.__traceback__ = clean(error.__traceback__)
            return
        traceback = clean(error.__traceback__)
        if self.host.exc is not None and error.__context__ is None and not is_interpreted(traceback):
            set_context(error, self.host.exc)  # it begins here
        error.__traceback__ = entry(self, traceback)

    def _of_iterator(self, iterator, name):
        try:
            return self.host.load_attr(iterator, name)
        except AttributeError as error:
            swallow(error)
            return None

    def throw(self, error):
        """Raise at the yield where the frame is suspended; an inner iterator of `yield from` comes first."""
        if self.delegate is None:
            if self.exc is not None:
                set_context(error, self.exc)
            raise_as_it_is(error)
        host, stack = self.host, self.stack
        iterator = stack[ITERATOR - 1]
        if isinstance(error, GeneratorExit):
            close = self._of_iterator(iterator, "close")
            if close is not None:
                host.call(close, [], {})
            raise error
        throw = self._of_iterator(iterator, "throw")
        if throw is None:
            raise error
        try:
            stack[-1] = host.call(throw, [error], {})
            return YIELD
        except StopIteration as stop:
            swallow(stop)
            stack[ITERATOR - 1 :] = [stop.value]
        return self.delegate


def enter(host, f, args, kwargs):
    """Interpret a call of a Python function; generators give their object at once."""
    code = f.__code__
    record = decode(code)
    if record.foreign is not None:
        return host.foreign_function(f, args, kwargs, record.foreign)
    if record.simple and not kwargs and len(args) == record.argument_count:
        variables = dict(zip(record.arguments, args))  # noqa: B905 - the lengths were just compared
    else:
        variables = bind(f, record, args, kwargs, host.default)
    host.calls[record] = host.calls.get(record, 0) + 1
    host.history.append(code)
    frame = Frame(f, record, variables, host)
    if host.log is not None:
        host.log.call(host, f)
    if record.is_generator:
        if record.starts:
            frame.run()
        driven = drive(frame)
        driven.__name__ = f.__name__  # pyright: ignore[reportAttributeAccessIssue]
        driven.__qualname__ = f.__qualname__  # pyright: ignore[reportAttributeAccessIssue]
        return driven
    if host.log is None:
        return frame.run()
    result = frame.run()
    host.log.returned(host, f, result)
    return result


def drive(frame):
    """An interpreted generator is a real generator: native code may iterate it, and each step comes back here."""
    sent = thrown = None
    while True:
        try:
            value = frame.run(sent, thrown)
        finally:
            sent = thrown = None  # the traceback leads to this frame: they would hold each other
        if not frame.suspended:
            return value
        sent = thrown = None
        try:
            sent = yield value
        except BaseException as error:  # noqa: BLE001 - it is raised in the interpreted frame
            if not hasattr(frame.host, "stack_of_frames"):
                return None  # the host has been emptied
            thrown = error
