"""Exceptions of signal handlers while a program is compiled.

A handler may raise between any two instructions, for example a TimeoutError. It may do so inside of a weak reference's
callback, of native code, or of any library's `except Exception`, each of which drops the exception or takes it for its
own. `reported` notes what handlers raise, and raises it at the end of the block whatever has handled it there.
"""

from __future__ import annotations

import _signal  # the module `signal` wraps each number in an enum, which takes twenty times as long
import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator

_SIGNALS = frozenset(map(int, _signal.valid_signals()))


class _Watch:
    """The handlers of the process during a compilation. raised: their exceptions, in order. handlers: by signal, the
    handler of the user's and the function that is installed in its place."""

    def __init__(self) -> None:
        self.raised: list[BaseException] = []
        self.handlers: dict[int, tuple[Callable, Callable]] = {}

    def install(self) -> None:
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            # numbers are the default action, or none; Python's own one of SIGINT raises what no handler takes
            if callable(handler) and handler is not _signal.default_int_handler and type(handler) is not int:
                noting = functools.partial(self._call, handler)
                self.handlers[number] = handler, noting
                _signal.signal(number, noting)

    def uninstall(self) -> None:
        """Puts the user's handlers back, all of them, although one of them may run meanwhile."""
        while self.handlers:
            number, (handler, noting) = next(iter(self.handlers.items()))
            try:
                if _signal.getsignal(number) is noting:
                    _signal.signal(number, handler)
                del self.handlers[number]
            except BaseException as error:  # noqa: BLE001 - it is raised when all are back
                self.raised.append(error)

    def _call(self, handler: Callable, *args):
        try:
            return handler(*args)
        except BaseException as error:
            self.raised.append(error)
            raise


_watch: _Watch | None = None


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """What signal handlers raise inside of the block leaves it, whatever handles it there. Python runs handlers in the
    main thread only, so that the block of another thread does nothing."""
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _watch = _Watch()
    try:
        watch.install()
        yield
    except BaseException as error:
        watch.uninstall()
        if not watch.raised or any(error is x for x in watch.raised):
            watch.raised.clear()  # tracebacks lead here
            raise
    finally:
        watch.uninstall()
        _watch = None
    if watch.raised:
        raise watch.raised.pop()


@contextlib.contextmanager
def as_they_are() -> Iterator[None]:
    """User code runs inside of the block, as a compilation does it: it sees its own handlers."""
    watch = _watch
    if watch is None or not watch.handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch.uninstall()
    try:
        yield
    except BaseException as error:
        if interrupts(error):
            watch.raised.append(error)
        raise
    finally:
        watch.install()


def handler_of(answer):
    """What `signal.getsignal` answers, with the user's handler in the place of the one that is installed for it."""
    if type(answer) is functools.partial and _watch is not None:
        return next((handler for handler, noting in _watch.handlers.values() if noting is answer), answer)
    return answer


def interrupts(error: BaseException) -> bool:
    """Whether a signal handler raised an exception. It may come between any two instructions, of thunder's as well, and
    is none of the program's: whoever called the program gets it. During a compilation, so is each exception after it,
    which may have come of it."""
    if _watch is not None and _watch.raised and threading.current_thread() is threading.main_thread():
        return True
    handlers = map(_signal.getsignal, _SIGNALS)
    return raised_by(error, [h for h in handlers if type(h) is not int])


def raised_by(error: BaseException, callables: Iterable) -> bool:
    """Whether an exception comes out of a call of one of these."""
    codes = {code for x in callables if (code := _code_of(x)) is not None}
    traceback = error.__traceback__ if codes else None
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(function) -> types.CodeType | None:
    """The code that a call of something written in Python runs; None for native code."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself
    return getattr(function, "__code__", None)
