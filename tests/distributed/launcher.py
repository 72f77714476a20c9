"""Processes that run one function on every rank, kept from test to test."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection

from tests import fresh

# what functions of ranks import; each rank would take seconds for it
IMPORTED = (
    "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "transformers.integrations.moe", "thunder.distributed.pipelines",
)  # fmt: skip
_serial = itertools.count()


class Source:
    """A process that has imported what ranks need, and has run nothing: ranks are forked from it."""

    def __init__(self):
        context = fresh.context()
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_forks, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def rank(self, *arguments) -> tuple[Process, Connection]:
        """A process that runs `_serve(*arguments, pipe)`, and this end of the pipe."""
        here, there = fresh.context().Pipe()
        self.pipe.send(arguments)
        reduction.send_handle(self.pipe, there.fileno(), self.process.pid)
        there.close()
        return Process(self.pipe.recv()), here


@functools.cache
def source() -> Source:
    """The one of this process."""
    return Source()


def _forks(pipe: Connection) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is gone
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:  # the tests are over
            return
        handle = reduction.recv_handle(pipe)
        process = os.fork()
        if process:
            os.close(handle)
            pipe.send(process)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pipe.close()
        try:
            _serve(*arguments, Connection(handle))
        finally:
            os._exit(0)


class Process:
    """A rank's."""

    def __init__(self, number: int):
        self.pid = number

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> None:
        """Kills it, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.01)


class Ranks:
    """As many processes as a group has ranks, joined by Gloo. Called with a function of (rank, size, *arguments), it
    runs it on all and raises what any of them raises."""

    def __init__(self, size: int, patience: float = 1800.0):
        """patience: seconds after which a collective gives up."""
        self.size = size
        self.answers: dict[int, object] = {}  # of the ranks that gave one, by rank, of the last call
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, f"store{next(_serial)}")
        self.pipes, self.processes = [], []
        for rank in range(size):
            process, pipe = source().rank(rank, size, store, patience)
            self.pipes.append(pipe)
            self.processes.append(process)
        for pipe in self.pipes:
            if not pipe.poll(120.0):
                self.close()
                raise AssertionError("the processes of the group did not start within 120 seconds")
            pipe.recv()

    def __call__(self, function: Callable, *arguments, timeout: float = 60.0) -> list:
        """The results of all ranks. Raises AssertionError with the tracebacks of the ranks that fail, or do not answer
        in time; these processes are of no use afterwards."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results, failures = [], []
        self.answers = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                ok, value = (
                    pipe.recv()
                    if pipe.poll(timeout / 4 if failures else timeout)
                    else (False, f"no answer within {timeout} seconds")
                )
            except (EOFError, ConnectionResetError):
                ok, value = False, "the process ended"
            results.append(value)
            if ok:
                self.answers[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self.processes = []
        self.folder.cleanup()


def _serve(rank: int, size: int, store: str, patience: float, pipe) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # names before torch 2.13, which programs call
    warnings.filterwarnings("ignore", "`?torch.distributed.* is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # checkpoints before torch 2.11
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, store=dist.FileStore(store, size), timeout=timedelta(seconds=patience)
    )
    pipe.send("started")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            answer = True, function(rank, size, *arguments)
        except BaseException:  # told to the test, whatever it is
            answer = False, traceback.format_exc()
        pipe.send(answer)
        if getattr(function, "ends_process", False):
            os._exit(0)
