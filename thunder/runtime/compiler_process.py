"""The process that compiles for another one: `python -m thunder.runtime.compiler_process`.

It reads pickled jobs from its standard input, calls `job.compile()`, and writes the result, pickled, and the words of
what was raised or None, to its standard output. It ends, with all that it has started, when its input does.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO, Any, NoReturn


def _read(jobs: IO[bytes], waiting: queue.Queue[Any]) -> None:
    """Puts jobs into the queue; the end of input is the end of the process, and of compilers that it runs."""
    try:
        while True:
            waiting.put(pickle.load(jobs))
    except EOFError:
        end_all()
    except Exception as error:  # noqa: BLE001  a job of a class that is not known here
        waiting.put(error)


def end_all() -> NoReturn:
    """Ends this process and all that it has started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def compiled(job: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `job().compile()` returns, and the words of what is raised."""
    try:
        return job().compile(), None
    except Exception as error:  # noqa: BLE001  the other process says so
        return None, f"{type(error).__name__}: {error}"


def main() -> None:
    """Answers each job from the standard input with what was compiled."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    waiting: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(jobs, waiting), daemon=True).start()

    def next_job() -> Any:
        job = waiting.get()
        if isinstance(job, Exception):
            raise job
        return job

    while True:
        pickle.dump(compiled(next_job), answers)
        answers.flush()


if __name__ == "__main__":
    main()
