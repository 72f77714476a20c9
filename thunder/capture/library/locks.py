"""Calls of the methods of locks, see `thunder.capture.locks`."""

from __future__ import annotations

from thunder.capture.interface import Capture
from thunder.capture.locks import KINDS, TakenLock
from thunder.capture.native import PRIMITIVE

_TAKES = {"__enter__", "acquire", "acquire_lock"}
_RELEASES = {"__exit__", "release", "release_lock"}


def call_lock(c: Capture, f, args, kwargs):
    """A call of a lock's method."""
    lock, name = f.__self__, f.__name__
    source = c.world.origins.get(id(lock)) or c.world.sources.get(id(lock)) or c.world.origins.get(id(f))
    if source is None:
        return _own(c, f, args, kwargs)
    depth, reentrant = c.locks.depth.get(id(lock), 0), type(lock) is KINDS[1]
    taken = TakenLock(lock, c.world.describe(source))
    if name in _TAKES:
        waits = _waits(c, f, args, kwargs, taken)
        if depth and not reentrant:
            return False if not waits else _refuse(c, taken, "is taken twice, for which a thread would wait for ever")
        if not waits and not depth:
            _refuse(c, taken, "is taken if it is free, which is known only when the program runs")
        c.locks.change(taken, 1, c.dispatch.host_calls)
        return True
    if name in _RELEASES:
        if not depth:
            _refuse(c, taken, "is released, and the program has not taken it")
        c.locks.change(taken, -1, c.dispatch.host_calls)
        return None
    if name in ("locked", "locked_lock", "_is_owned") and depth:
        return True
    return _refuse(c, taken, f"is asked for {name}(), whose answer is known only when the program runs")


def _own(c: Capture, f, args, kwargs):
    """A lock that the program made: nobody else would release it."""
    waits = not args and not kwargs
    if f.__name__ in _TAKES and waits and type(f.__self__) is KINDS[0] and f.__self__.locked():
        c.refuse("the program waits for another thread to release a lock", "wait outside of the compiled function")
    return f(*args, **kwargs)


def _waits(c: Capture, f, args, kwargs, taken: TakenLock) -> bool:
    arguments = {**dict(zip(("blocking", "timeout"), args)), **kwargs}
    if any(type(v) not in PRIMITIVE for v in arguments.values()) or arguments.get("timeout", -1) != -1:
        _refuse(c, taken, "is waited for with a timeout")
    return bool(arguments.get("blocking", True))


def _refuse(c: Capture, taken: TakenLock, reason: str):
    c.refuse(f"the lock {taken.name} {reason}", "do that outside of the compiled function")


def check_host_call(c: Capture) -> None:
    """Host code is about to run at capture."""
    if (taken := c.locks.held) is not None:
        _refuse(c, taken, "is held around host code on whose result the program depends")


def taken_locks(c: Capture) -> tuple[TakenLock, ...]:
    """The locks that the captured program takes. Raises CaptureError where it does not release them again, or runs host
    code beside them, which could wait for one who waits for the lock."""
    locks = c.locks
    if (taken := locks.held) is not None:
        _refuse(c, taken, "is held when the program ends")
    for taken in locks.taken.values():
        if c.dispatch.host_calls > locks.host_calls or c.dispatch.log:
            _refuse(c, taken, "is taken by a program that runs host code while it does not hold it")
    return tuple(locks.taken.values())
