"""A kernel's machine code: known to this process, on the disk, or compiled by Triton in processes. Only the last
needs Triton.

Triton holds Python's lock for part of the time that it compiles: threads would keep capture waiting, and each other."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import queue
import threading
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch

from thunder import compat
from thunder.executors.triton_kernels.compiling import Request
from thunder.runtime import disk_cache
from thunder.runtime.processes import Died, ForkServer

REMEMBERED = 4096  # kernels that a process remembers
PROCESSES = 8  # at most, that compile at a time
IDLE = 60.0  # seconds, after which the process ends that has imported Triton


class Binary(NamedTuple):
    """name: of the function in the file. shared: bytes of shared memory. scratch: how many null pointers it takes after
    its arguments."""

    name: str
    path: str
    shared: int
    scratch: int

    def load(self, device: int) -> int:
        """The function's handle on a device."""
        return _loaded(self, device)


_requested: dict[Request, Future] = {}
_lock = threading.Lock()


def binary_of(request: Request) -> Future[Binary]:
    """The machine code, compiled once in a process however often it is asked for."""
    with _lock:
        future = _requested.get(request)
        if future is None:
            while len(_requested) >= REMEMBERED:
                del _requested[next(iter(_requested))]
            future = _requested[request] = Future()
            _jobs().put((request, future))
        return future


def wait_for_kernels() -> None:
    """Waits for all kernels that were asked for."""
    with _lock:
        waiting = [*_requested.values()]
    wait(waiting)


@functools.cache
def _jobs() -> queue.SimpleQueue[tuple[Request, Future[Binary]]]:
    """What waits for one of the threads. These are daemons: a program that ends waits for no kernel."""
    jobs: queue.SimpleQueue[tuple[Request, Future[Binary]]] = queue.SimpleQueue()
    for i in range(min(PROCESSES, os.cpu_count() or 1)):
        threading.Thread(target=_work, args=(jobs,), name=f"thunder_compile_{i}", daemon=True).start()
    return jobs


def _work(jobs: queue.SimpleQueue[tuple[Request, Future[Binary]]]) -> None:
    """Compiles the kernels of a queue, one after the other, in a thread of its own. An error is raised where the kernel
    is needed."""
    while True:
        request, future = jobs.get()
        try:
            future.set_result(_binary(request))
        except BaseException as error:  # noqa: BLE001  it is raised where the kernel is needed
            with _lock:  # the next one that asks tries again
                if _requested.get(request) is future:
                    del _requested[request]
            future.set_exception(error)
        del request, future


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()
    _jobs.cache_clear()
    for request in [r for r, future in _requested.items() if not future.done()]:
        del _requested[request]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _binary(request: Request) -> Binary:
    key = disk_cache.key_of("triton kernel", importlib.metadata.version("triton"), *request)
    entry = disk_cache.load(key)
    if entry is None:
        facts, code = _compile(request)
        return Binary(path=str(disk_cache.store(key, facts, code)), **facts)
    facts, path = entry
    return Binary(path=str(path), **facts)


def _compile(request: Request) -> tuple[dict, bytes]:
    """In a fork of a process that has imported Triton, which may have ended since it compiled last."""
    for is_last in (False, True):
        try:
            server = _server()
        except OSError:  # the machine gives this one no more processes
            return request.compile()
        try:
            return server.run(request)
        except Died as error:
            if is_last:
                what = f"the process that compiles the kernel {request.name}"
                raise RuntimeError(f"{what} has ended with {error}") from None
    raise AssertionError("the last one returns or raises")


def expect_kernels() -> None:
    """Starts what takes most of a second before the first kernel, while the program is captured."""
    with contextlib.suppress(OSError):  # the machine gives this one no more processes
        _server()


def _server() -> ForkServer:
    with _lock:
        if not _servers or _servers[0].poll() is not None:
            for ended in _servers:
                ended.close()
            _servers[:] = [ForkServer("thunder.executors.triton_kernels.compiling", IDLE)]
        return _servers[0]


_servers: list[ForkServer] = []  # one, or none


@functools.cache
def _loaded(binary: Binary, device: int) -> int:
    with torch.cuda.device(device):
        compat.set_device(device)  # which makes its context, where the thread has none
        return compat.load_kernel(binary.path, binary.name, binary.shared, device)
