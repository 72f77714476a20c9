"""Processes that compile for this one, so that its interpreter stays free.

A process is in its own session, so that Ctrl-C reaches the program alone. It ends, with the compilers that it has
started, when the program closes its end of the connection or ends.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from typing import IO, Any

from thunder.options import environment_of_children


class Died(Exception):
    """The process has ended, with a code, before it answered."""


class _Process(abc.ABC):
    """`python -m thunder.runtime.<module> <arguments>`."""

    def __init__(self, module: str, *arguments: object, stdin: int | socket.socket, stdout: int):
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"thunder.runtime.{module}", *map(str, arguments)],
            stdin=stdin if isinstance(stdin, int) else stdin.fileno(),
            stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True,
            env=environment_of_children(),
        )  # fmt: skip
        _known.add(self)

    @abc.abstractmethod
    def _ends(self) -> list[IO[bytes] | socket.socket | None]:
        """This process's ends of the connections."""

    @abc.abstractmethod
    def run(self, job: Any) -> Any:
        """`job.compile()`, there. Raises RuntimeError with the words of what it raised, and Died."""

    def _has_ended(self) -> Died:
        self.kill()
        self.close()
        return Died(self._process.returncode)

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """With all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for end in self._ends():
            with contextlib.suppress(OSError, AttributeError):  # what was not written any more
                end.close()  # type: ignore[union-attr]

    def leave_to_parent(self) -> None:
        """In a fork: the connections must be open nowhere else when the program ends whose process it is."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for end in self._ends():
            if end is not None and not getattr(end, "closed", False) and end.fileno() >= 0:
                os.dup2(nothing, end.fileno())
        os.close(nothing)


class CompilerProcess(_Process):
    """Runs jobs one after the other, for one thread at a time."""

    def __init__(self) -> None:
        super().__init__("compiler_process", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _ends(self) -> list[IO[bytes] | socket.socket | None]:
        return [self._process.stdin, self._process.stdout]

    def run(self, job: Any) -> Any:
        jobs, answers = self._process.stdin, self._process.stdout
        assert jobs is not None and answers is not None, "it was started with pipes"
        try:
            return _answer(job, jobs, answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._has_ended() from error


class ForkServer(_Process):
    """Runs each job in a fork of a process that is prepared, for any number of threads."""

    def __init__(self, module: str, idle: float):
        """module: its `prepare()` is called there first. idle: seconds without a job after which it ends by itself."""
        self._control, theirs = socket.socketpair()
        with theirs:
            super().__init__("fork_server", module, idle, stdin=theirs, stdout=subprocess.DEVNULL)

    def _ends(self) -> list[IO[bytes] | socket.socket | None]:
        return [self._control]

    def run(self, job: Any) -> Any:
        ours, theirs = socket.socketpair()
        try:
            with ours, ours.makefile("rwb") as connection:
                with theirs:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                return _answer(job, connection, connection)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._has_ended() from error


def _answer(job: Any, jobs: IO[bytes] | io.BufferedRWPair, answers: IO[bytes] | io.BufferedRWPair) -> Any:
    pickle.dump(job, jobs)
    jobs.flush()
    result, failure = pickle.load(answers)
    if failure is not None:
        raise RuntimeError(failure)
    return result


_known: weakref.WeakSet[_Process] = weakref.WeakSet()
_of_parents: list[_Process] = []


def _end() -> None:
    """Processes that wait for a job have none to end for."""
    for process in [*_known]:
        process.kill()
        process.close()


def _forked() -> None:
    for process in [*_known]:
        process.leave_to_parent()
        _of_parents.append(process)
    _known.clear()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
