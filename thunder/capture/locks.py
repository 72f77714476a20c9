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

KINDS = type(threading.Lock()), type(threading.RLock())


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

    def change(self, taken: TakenLock, by: int, host_calls: int) -> None:
        """The program takes or releases a lock. host_calls: how many the program has made."""
        if not self.is_any_held:
            self._before = host_calls
        self.taken[id(taken.lock)] = taken
        self.depth[id(taken.lock)] = self.depth.get(id(taken.lock), 0) + by
        if not self.is_any_held:
            self.host_calls += host_calls - self._before

    @property
    def held(self) -> TakenLock | None:
        """A lock that the program holds."""
        return next((taken for number, taken in self.taken.items() if self.depth[number]), None)


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
