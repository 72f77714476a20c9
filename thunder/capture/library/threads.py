"""Threads that a program starts (`threading.Thread`, `concurrent.futures.ThreadPoolExecutor`).

A thread runs where it is started, from its beginning to its end: one of the orders that threads may have. So its
operations are a part of the program, and joining it or asking for a result waits for nothing. It begins as any thread
does, with grad enabled and without autocast. What would depend on another order is refused: waiting for what comes
later, asking whether it has come, threads' own variables.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.capture.locks import refuse_in_threads
from thunder.capture.native_calls import call_native
from thunder.core.symbol import current_recorder
from thunder.errors import CaptureError

_CALLS = 50_000  # in one thread: one that makes more may run until others stop it
_REMEDY = "do that outside of the compiled function"


def _calls(function, args, kwargs):
    """Interpreted, under decorators that set modes."""
    return function(*args, **kwargs)


def _run(c, function, args, kwargs, thread: Any = None):
    """A call in a thread that the program starts. thread: its object, None in a pool of threads."""
    if current_recorder() is not c.recorder or c.outer_recorders or c.recorder.context.checkpoint:
        c.refuse("a thread is started in a checkpoint or in a transform of functions", "start it outside of that")
    if c.locks.is_reentrant_held:
        c.refuse("a thread is started while a reentrant lock is held, for which it would wait", "start it before")
    if torch.is_inference_mode_enabled() or compat.default_device() is not None or _has_left_defaults():
        c.refuse(
            "a thread is started under a mode, a device or a stream that holds for the thread that starts it alone",
            "compile the functions that it calls",
        )
    c.known.interpreted.add(id(_calls))
    run: Callable = _calls if torch.is_grad_enabled() else torch.enable_grad()(_calls)
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            run = torch.autocast(device, enabled=False)(run)
    left, outer = [_CALLS], vars(c).get("call")

    def counted(f, args, kwargs):
        left[0] -= 1
        if left[0] < 0:
            c.refuse(f"a thread makes more than {_CALLS} calls, and may wait for others to stop it", _REMEDY)
        return type(c).call(c, f, args, kwargs)

    c.threads.append(thread)
    c.call = counted
    try:
        return c.enter(run, [function, args, kwargs], {})
    finally:
        c.threads.pop()
        del c.call
        if outer is not None:
            c.call = outer


def _has_left_defaults() -> bool:
    if not torch.cuda.is_initialized():
        return False
    return torch.cuda.current_device() != 0 or torch.cuda.current_stream() != torch.cuda.default_stream()


# ---------------------------------------------------------------- threading.Thread


def _make(c, f, args, kwargs) -> None:
    if kwargs.pop("context", None) is not None:  # Python 3.14
        c.refuse("a thread is made with a context", _REMEDY)
    c.enter(_init, args, kwargs)


def _init(thread, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None):
    """Interpreted. No list of the process has the thread, and Python gives it no name."""
    assert group is None, "group argument must be None for now"
    thread._target, thread._args, thread._kwargs = target, args, {} if kwargs is None else kwargs
    thread._name, thread._daemonic = None if name is None else str(name), bool(daemon)
    thread._started, thread._initialized = threading.Event(), True  # with a lock it cannot leave the program


def _name(c, f, args, kwargs):
    found = c.load_attr(args[0], "_name")
    if found is None:
        c.refuse("a thread is asked for the name that Python gives it", "give it a name")
    return found


def _start(c, f, args, kwargs) -> None:
    (thread,) = args
    if id(thread) in c.sources:
        c.refuse("a thread from outside is started", _REMEDY)
    if id(thread) in c.known.started:
        raise RuntimeError("threads can only be started once")
    c.known.started.add(id(thread))
    c.keep[id(thread)] = thread
    try:
        _run(c, c.load_attr(thread, "run"), [], {}, thread)
    except CaptureError:
        raise
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - which threading.excepthook would print
        c.refuse(f"a thread of the program raises {type(error).__name__}", "handle exceptions in the thread")


def _of_started(answer: Any) -> Callable:
    """The handler of a method of threads; those that the program has started have ended."""

    def ask(c, f, args, kwargs):
        thread = args[0]
        if id(thread) in c.sources or thread in c.threads:
            c.refuse(f"Thread.{f.__name__}() of a thread that runs beside the program", _REMEDY)
        if f is threading.Thread.join and id(thread) not in c.known.started:
            raise RuntimeError("cannot join thread before it is started")
        return answer

    return ask


def _current(c, f, args, kwargs):
    """`threading.current_thread`."""
    if c.threads and c.threads[-1] is None:
        c.refuse("a thread of a pool asks for its own object", _REMEDY)
    return c.threads[-1] if c.threads else call_native(c, f, args, kwargs)


def _number(c, f, args, kwargs):
    """`get_ident` and `get_native_id`."""
    refuse_in_threads(c, f"{f.__name__}() is called")
    return call_native(c, f, args, kwargs)


def _ask_event(c, f, args, kwargs):
    """`is_set` and `wait` of an event: no is an answer of the time before others set it."""
    if not c.truth(c.load_attr(args[0], "_flag")):
        refuse_in_threads(c, "it is asked whether an event is set")
    return c.enter(f, args, kwargs)


def _interpreted(c, f, args, kwargs):
    """The library's code that calls the user's, or waits for other threads: that shows where it takes a lock."""
    return c.enter(f, args, kwargs)


# ---------------------------------------------------------------- concurrent.futures.ThreadPoolExecutor


def _make_pool(c, f, args, kwargs) -> None:
    c.enter(_init_pool, args, kwargs)


def _init_pool(pool, max_workers=None, thread_name_prefix="", initializer=None, initargs=()):
    if max_workers is None:
        max_workers = min(32, (os.cpu_count() or 1) + 4)
    if max_workers <= 0:
        raise ValueError("max_workers must be greater than 0")
    if initializer is not None and not callable(initializer):
        raise TypeError("initializer must be a callable")
    pool._max_workers, pool._thread_name_prefix, pool._shutdown = max_workers, thread_name_prefix, False
    pool._initializer, pool._initargs, pool._broken = initializer, initargs, False
    pool._work_queue = queue.SimpleQueue()  # with which it cannot leave the program


def _submit(c, f, args, kwargs):
    pool, function, *given = args
    if c.truth(c.load_attr(pool, "_broken")) or c.load_attr(pool, "_initializer") is not None:
        c.refuse("a pool of threads has an initializer", "let the functions that it runs do that")
    if c.truth(c.load_attr(pool, "_shutdown")):
        raise RuntimeError("cannot schedule new futures after shutdown")
    future = c.call(concurrent.futures.Future, [], {})
    try:
        value, name = _run(c, function, given, kwargs), "set_result"
    except CaptureError:
        raise
    except BaseException as error:  # noqa: BLE001 - which the future has
        value, name = error, "set_exception"
    c.call(c.load_attr(future, name), [value], {})
    return future


def _shutdown(c, f, args, kwargs) -> None:
    pool = args[0]
    if id(pool) in c.sources:
        c.refuse("a pool of threads from outside is shut down", _REMEDY)
    c.store_attr(pool, "_shutdown", True)


_POOL, _THREAD = concurrent.futures.ThreadPoolExecutor, threading.Thread


HANDLERS: dict[Any, Callable] = {
    _THREAD.start: _start, _THREAD.join: _of_started(None), _THREAD.is_alive: _of_started(False),
    _THREAD.__init__: _make, vars(_THREAD)["name"].fget: _name, threading.current_thread: _current,
    threading.Event.is_set: _ask_event, threading.Event.wait: _ask_event,
    **dict.fromkeys((
        _THREAD.run, threading.Timer.run, threading.Condition.wait, threading.Condition.wait_for,
        threading.Semaphore.acquire, threading.Barrier.wait,
    ), _interpreted),
    threading.get_ident: _number, threading.get_native_id: _number,
    _POOL.__init__: _make_pool, _POOL.submit: _submit, _POOL.shutdown: _shutdown,
}  # fmt: skip
