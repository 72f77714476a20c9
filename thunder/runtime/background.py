"""Background compilation: one thread of the program, and one process that compiles for it.

Jobs run one after the other, in order, in a daemon thread that ends with the last one. A job compiles graphs by
`elsewhere`, in a process of its own (see `processes.py`). The program then finds the results in the caches of the
compiler on disk. At exit waiting jobs are dropped and the process is killed: nobody waits for a compiler.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from thunder.runtime.processes import CompilerProcess, Died


class Ended(Exception):
    """Raised in a job that is not finished when the program ends."""


class _Background:
    """The thread, its jobs, and the process that it talks to."""

    def __init__(self):
        self.condition = threading.Condition()
        self.jobs: collections.deque[Callable[[], None]] = collections.deque()
        self.thread: threading.Thread | None = None
        self.process: CompilerProcess | None = None
        self.ended = self.busy = False
        self.owner = os.getpid()

    def submit(self, job: Callable[[], None]) -> None:
        with self.condition:
            if self.ended:
                return
            self.jobs.append(job)
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="thunder-compiles", daemon=True)
                self.thread.start()
            self.condition.notify_all()

    def run(self) -> None:
        """Runs the jobs one by one, until there are none."""
        while True:
            with self.condition:
                self.busy = False
                self.condition.notify_all()
                if not self.jobs or self.ended:
                    self.thread = None
                    return
                job, self.busy = self.jobs.popleft(), True
            with contextlib.suppress(Ended):
                job()
            del job  # which holds a program

    def elsewhere(self, job: Any) -> None:
        """Runs a job in the process that compiles. Raises Ended at the end of the program, RuntimeError where the
        process dies."""
        with self.condition:
            if self.ended:
                raise Ended("the program ends")
            self.process = self.process or CompilerProcess()
            process = self.process
        try:
            process.run(job)
        except Died as error:
            with self.condition:
                if self.ended:
                    raise Ended("the program ends") from error
                self.process = None
            raise RuntimeError(f"the process that compiles has ended with {error}") from error

    def idle(self, timeout: float | None) -> bool:
        with self.condition:
            return self.condition.wait_for(lambda: not self.jobs and not self.busy, timeout)

    def end(self) -> None:
        """Drops the jobs and ends the thread and the process, at the end of the program."""
        if os.getpid() != self.owner:  # a fork: the thread and the process are another program's
            return
        with self.condition:
            self.ended = True
            self.jobs.clear()
            thread, process = self.thread, self.process
            self.condition.notify_all()
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join()
        if process is not None:
            process.close()


_BACKGROUND = _Background()
_OF_PARENTS: list[_Background] = []


def submit(job: Callable[[], None]) -> None:
    """Runs a job in the background, unless the program ends before. The job handles its exceptions, except for
    Ended."""
    _BACKGROUND.submit(job)


def elsewhere(job: Any) -> None:
    """Runs `job.compile()` in the compiling process, for jobs in the background. Raises RuntimeError with the message
    of an exception there, and Ended at the end of the program."""
    _BACKGROUND.elsewhere(job)


def has_ended() -> bool:
    """Whether the program ends, so that no job runs any more."""
    return _BACKGROUND.ended


def idle(timeout: float | None = None) -> bool:
    """Waits until no job is left. Returns whether that is so."""
    return _BACKGROUND.idle(timeout)


# held while a job holds locks of the program, which a child would find held by nobody: a fork waits for it
_WHOLE = threading.RLock()


@contextlib.contextmanager
def whole(lock: threading.RLock) -> Iterator[None]:
    """A block of a job under a lock of the program. A fork in another thread waits until it has ended, unless that
    thread holds the lock: then the block waits."""
    while True:
        _WHOLE.acquire()
        if lock.acquire(blocking=False):
            break
        _WHOLE.release()
        time.sleep(0.002)
    try:
        yield
    finally:
        lock.release()
        _WHOLE.release()


def _forked() -> None:
    """The thread and the process are another program's."""
    global _BACKGROUND
    _OF_PARENTS.append(_BACKGROUND)
    _BACKGROUND = _Background()
    _WHOLE.release()


atexit.register(lambda: _BACKGROUND.end())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_WHOLE.acquire, after_in_parent=_WHOLE.release, after_in_child=_forked)
