"""Processes that compile for this one, so that its interpreter stays free.

A process is in its own session, so that Ctrl-C reaches the program alone. It ends, with the compilers that it has
started, when the program closes its pipe or ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import weakref
from typing import Any

from thunder.options import environment_of_children


class Died(Exception):
    """The process has ended, with a code, before it answered."""


class CompilerProcess:
    """Runs jobs one after the other, for one thread at a time."""

    def __init__(self, idle: float | None = None):
        """idle: seconds without a job after which it ends by itself."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "thunder.runtime.compiler_process", str(idle or 0)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env=environment_of_children(),
        )  # fmt: skip
        _known.add(self)

    def run(self, job: Any) -> Any:
        """`job.compile()`, there. Raises RuntimeError with the words of what it raised, and Died."""
        jobs, answers = self._process.stdin, self._process.stdout
        assert jobs is not None and answers is not None, "it was started with pipes"
        try:
            pickle.dump(job, jobs)
            jobs.flush()
            result, failure = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._process.kill()
            code = self._process.wait()
            self.close()
            raise Died(code) from error
        if failure is not None:
            raise RuntimeError(failure)
        return result

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """With all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, AttributeError):  # what was not written any more
                pipe.close()  # type: ignore[union-attr]

    def leave_to_parent(self) -> None:
        """In a fork: the pipes must be open nowhere else when the program ends whose process it is."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(nothing, pipe.fileno())
        os.close(nothing)


_known: weakref.WeakSet[CompilerProcess] = weakref.WeakSet()
_of_parents: list[CompilerProcess] = []


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
