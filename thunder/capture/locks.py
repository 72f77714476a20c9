"""Locks from outside. A program that takes some runs under all of them, from its last questions to its effects.

Capture takes no lock: it would wait while it holds the lock of the function's other calls. It notes which locks the
program takes, and refuses one that depends on who holds them. A call takes them, asks the questions again, as
another thread may have written meanwhile, and releases them behind the epilogue (`Holding`). Several are taken in an
order in which nobody waits while holding one, so longer holding cannot make threads wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from thunder.capture.native import PRIMITIVE

KINDS = type(threading.Lock()), type(threading.RLock())
_TAKES = {"__enter__", "acquire", "acquire_lock"}
_RELEASES = {"__exit__", "release", "release_lock"}


class TakenLock(NamedTuple):
    """A lock that a program takes, and where it comes from in words."""

    lock: Any
    name: str


class Locks:
    """The locks of a capture, by their ids. depth: how often the program holds one. host_calls: how many the
    program makes while it holds a lock. own: how often it has taken locks of its own that are reentrant."""

    __slots__ = ("taken", "depth", "host_calls", "own", "_before")

    def __init__(self):
        self.taken: dict[int, TakenLock] = {}
        self.depth: dict[int, int] = {}
        self.host_calls = self._before = 0  # the latter: of the program, when it took a lock and held none

    @property
    def is_any_held(self) -> bool:
        return any(self.depth.values())

    def change(self, c, taken: TakenLock, by: int) -> None:
        if not self.is_any_held:
            self._before = c.path.host_calls
        self.taken[id(taken.lock)] = taken
        self.depth[id(taken.lock)] = self.depth.get(id(taken.lock), 0) + by
        if not self.is_any_held:
            self.host_calls += c.path.host_calls - self._before


def call(c, f, args, kwargs):
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
        c.locks.change(c, taken, 1)
        return True
    if name in _RELEASES:
        if not depth:
            _refuse(c, taken, "is released, and the program has not taken it")
        c.locks.change(c, taken, -1)
        return None
    if name in ("locked", "locked_lock", "_is_owned") and depth:
        return True
    return _refuse(c, taken, f"is asked for {name}(), whose answer is known only when the program runs")


def _own(c, f, args, kwargs):
    """A lock that the program made: nobody else would release it."""
    waits = not args and not kwargs
    if f.__name__ in _TAKES and waits and type(f.__self__) is KINDS[0] and f.__self__.locked():
        c.refuse("the program waits for another thread to release a lock", "wait outside of the compiled function")
    return f(*args, **kwargs)


def _waits(c, f, args, kwargs, taken: TakenLock) -> bool:
    given = {**dict(zip(("blocking", "timeout"), args)), **kwargs}
    if any(type(v) not in PRIMITIVE for v in given.values()) or given.get("timeout", -1) != -1:
        _refuse(c, taken, "is waited for with a timeout")
    return bool(given.get("blocking", True))


def _refuse(c, taken: TakenLock, reason: str):
    c.refuse(f"the lock {taken.name} {reason}", "do that outside of the compiled function")


def check_host_call(c) -> None:
    """Host code is about to run at capture."""
    if c.locks.is_any_held:
        taken = next(t for t in c.locks.taken.values() if c.locks.depth[id(t.lock)])
        _refuse(c, taken, "is held around host code on whose result the program depends")


def taken_locks(c) -> tuple[TakenLock, ...]:
    """The locks that the captured program takes. Raises CaptureError where it does not release them again, or runs host
    code beside them, which could wait for one who waits for the lock."""
    locks = c.locks
    for taken in locks.taken.values():
        if locks.depth[id(taken.lock)]:
            _refuse(c, taken, "is held when the program ends")
        if c.path.host_calls > locks.host_calls or c.path.log:
            _refuse(c, taken, "is taken by a program that runs host code while it does not hold it")
    return tuple(locks.taken.values())


class Holding:
    """A context that takes all of these locks, and waits for each only while it holds no other one."""

    __slots__ = ("locks",)

    def __init__(self, taken: Sequence[TakenLock]):
        self.locks = [t.lock for t in taken]

    def __enter__(self) -> None:
        locks = self.locks
        while True:
            locks[0].acquire()
            have = 1
            while have < len(locks) and locks[have].acquire(blocking=False):
                have += 1
            if have == len(locks):
                break
            for lock in locks[:have]:
                lock.release()
            locks = [*locks[have:], *locks[:have]]  # the one that somebody holds comes first
        self.locks = locks

    def __exit__(self, *error: object) -> None:
        for lock in self.locks:
            lock.release()
