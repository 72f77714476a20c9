"""Event loops that a program runs (`asyncio.run`).

The loop is a part of the program: it runs the steps of its tasks in the order in which asyncio runs them, and the
interpreter runs the coroutines. Its clock stands still while the program computes: where all tasks wait for a
time, the program sleeps until the next one, as a host call. What comes from outside of the program is refused: files,
other threads and processes, signals, the time.
"""

from __future__ import annotations

import asyncio
import asyncio.mixins
import contextlib
import heapq
import inspect
import itertools
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from thunder.capture import host_lines
from thunder.capture.native_calls import call_native
from thunder.core.symbol import current_recorder
from thunder.errors import CaptureError, ThunderError
from thunder.interpreter.errors import UnsupportedError

_REMEDY = "compile the functions that it calls"


class EventLoop:
    """The loop that tasks and futures of a program know."""

    def __init__(self, c):
        self._c, self._now, self._number = c, 0.0, itertools.count()
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tasks: list[asyncio.Task] = []
        self._unnamed: set[asyncio.Task] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._c.refuse(f"{name} of an event loop of the program is used", _REMEDY)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def time(self) -> float:
        frames = self._c.stack_of_frames
        if not frames or not str(frames[-1].fn.__module__).startswith("asyncio"):
            self._c.refuse("the time of an event loop of the program is asked for", "ask time.monotonic()")
        return self._now

    def call_soon(self, callback: Callable, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)  # type: ignore[arg-type]
        self._ready.append(handle)
        return handle

    def call_later(self, delay: Any, callback: Callable, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        if type(delay) not in (int, float):
            self._c.refuse("an event loop of the program waits for a time that changes", _REMEDY)
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)  # type: ignore[arg-type]
        heapq.heappush(self._timers, (when, next(self._number), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task:
        if type(coroutine) is not types.CoroutineType or context is not None:
            self._c.refuse("a task of something else than a coroutine, or with a context, is made", _REMEDY)
        task = asyncio.Task(coroutine, loop=self, name=name)  # type: ignore[arg-type]
        self._tasks.append(task)
        if name is None:
            self._unnamed.add(task)
        return task

    def name_of(self, task: asyncio.Task) -> str:
        if task in self._unnamed:
            self._c.refuse("a task is asked for the name that asyncio gives it", "give it a name")
        return task.get_name()

    def call_exception_handler(self, context: dict) -> None:
        self._c.refuse(f"asyncio logs an error of the program: {context.get('message')}", _REMEDY)

    def _run(self, *tasks: asyncio.Task) -> None:
        """Runs until these tasks are done."""
        while not all(task.done() for task in tasks):
            if not self._ready:
                self._sleep()
            handle = self._ready.popleft()
            if not handle.cancelled():
                self._step(handle)

    def _sleep(self) -> None:
        """Until the next time that a task waits for."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            self._c.refuse("an event loop of the program waits for what nobody in the program gives it", _REMEDY)
        if (when := timers[0][0]) > self._now:
            self._c.call(time.sleep, [when - self._now], {})
            self._now = when
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])

    def _step(self, handle: Any) -> None:
        callback, task = handle._callback, getattr(handle._callback, "__self__", None)
        if isinstance(task, asyncio.Task):
            handle._context.run(callback, *handle._args)
            if task.done() and not task.cancelled() and isinstance(task._exception, (ThunderError, UnsupportedError)):  # type: ignore[attr-defined]
                raise task._exception  # type: ignore[attr-defined]  # which is not the program's
            return
        try:
            handle._context.run(self._c.call, callback, [*handle._args], {})
        except (ThunderError, UnsupportedError):
            raise
        except Exception as error:  # noqa: BLE001 - which asyncio would log
            self._c.refuse(f"a callback of an event loop raises {type(error).__name__}", "handle exceptions in it")

    def _close(self) -> None:
        """What asyncio does once the first task is done."""
        pending = [task for task in self._tasks if not task.done()]
        for task in pending:
            task.cancel()
        self._run(*pending)
        for task in self._tasks:
            if task._log_traceback:  # type: ignore[attr-defined]
                task._log_traceback = False  # type: ignore[attr-defined]
                self._c.refuse("asyncio logs an exception of a task that is never retrieved", "await the task")


@contextlib.contextmanager
def _running(c) -> Iterator[EventLoop]:
    """An event loop that runs inside the block. Nothing of it stays behind where the block fails."""
    generators: list[Any] = []
    loop, hooks = EventLoop(c), sys.get_asyncgen_hooks()
    asyncio._set_running_loop(loop)  # type: ignore[arg-type]
    sys.set_asyncgen_hooks(generators.append, None)
    c.loop = loop
    try:
        yield loop
        if any(generator.ag_frame is not None for generator in generators):
            c.refuse("an async generator of the program is left before its end", "use contextlib.aclosing")
    finally:
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(*hooks)
        c.loop = None
        for task in loop._tasks:
            task._log_destroy_pending = task._log_traceback = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # of which Python would warn that nobody awaits it


def _run(c, f, args, kwargs):
    """`asyncio.run`."""
    running = asyncio._get_running_loop()
    if running is not None and running is c.loop:
        raise RuntimeError("asyncio.run() cannot be called from a running event loop")
    try:
        _check(c, running, args, kwargs)
    except CaptureError:
        for coroutine in (a for a in args if type(a) is types.CoroutineType):
            coroutine.close()  # of which Python would warn that nobody awaits it
        raise
    c.setting(c.const(asyncio._get_running_loop, "the running event loop: ").call("__call__"), None)
    with _running(c) as loop:
        main = loop.create_task(args[0])
        loop._run(main)
        main._log_traceback = False  # type: ignore[attr-defined]
        loop._close()
    host_lines.run(c, asyncio.set_event_loop, [None])
    return main.result()


def _check(c, running, args, kwargs) -> None:
    if running is not None:
        c.refuse("asyncio.run is called beside an event loop that runs", "await the coroutine")
    if kwargs or len(args) != 1 or type(args[0]) is not types.CoroutineType:
        c.refuse("asyncio.run is called with options, or with something else than a coroutine", _REMEDY)
    if current_recorder() is not c.recorder or c.outer_recorders or c.recorder.context.checkpoint or c.threads:
        c.refuse("an event loop runs in a checkpoint, a transform of functions or a thread of the program", _REMEDY)


def _bound_loop(c, f, args, kwargs):
    """The loop of a lock, an event or a queue of asyncio's, which is that of its first use."""
    (bound,) = args
    if c.loop is None:
        return c.enter(f, args, kwargs)
    known = c.load_attr(bound, "_loop")
    if known is None and id(bound) in c.sources:
        c.refuse(f"a {type(bound).__name__} from outside is used in an event loop of the program", "make it inside")
    if known is None:
        c.store_attr(bound, "_loop", c.loop)
    elif known is not c.loop:
        raise RuntimeError(f"{bound!r} is bound to a different event loop")
    return c.loop


def _of_tasks(c, f, args, kwargs):
    """`current_task` and `all_tasks`: asyncio itself knows those of the program."""
    if c.loop is not None:
        return f(*args, **kwargs)
    return c.enter(f, args, kwargs) if type(f) is types.FunctionType else call_native(c, f, args, kwargs)


HANDLERS: dict[Any, Callable] = {
    asyncio.run: _run, vars(asyncio.mixins._LoopBoundMixin)["_get_loop"]: _bound_loop,
    asyncio.current_task: _of_tasks, asyncio.all_tasks: _of_tasks,
}  # fmt: skip
