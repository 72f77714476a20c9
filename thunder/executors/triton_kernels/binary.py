"""A kernel's machine code: known to this process, on the disk, or compiled by Triton in a pool of threads. Only the
last needs Triton."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from thunder import compat
from thunder.core.codegen import compile_source
from thunder.runtime import disk_cache

KEPT = 4096  # kernels that a process remembers
THREADS = 8  # of which each waits most of its time for the assembler


class Request(NamedTuple):
    """All that the machine code of a kernel depends on. arguments: for each one Triton's name of the type, and whether
    it is a multiple of 16. capability: 90 for 9.0."""

    name: str
    text: str
    arguments: tuple[tuple[str, bool], ...]
    warps: int
    capability: int


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
        found = _requested.get(request)
        if found is None:
            while len(_requested) >= KEPT:
                del _requested[next(iter(_requested))]
            found = _requested[request] = _pool().submit(_binary, request)
        return found


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="thunder_compile")


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _pool.cache_clear()
    for request in [r for r, made in _requested.items() if not made.done()]:
        del _requested[request]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _binary(request: Request) -> Binary:
    key = disk_cache.key_of("triton kernel", importlib.metadata.version("triton"), *request)
    found = disk_cache.load(key)
    if found is None:
        facts, code = _compile(request)
        return Binary(path=str(disk_cache.store(key, facts, code)), **facts)
    facts, path = found
    return Binary(path=str(path), **facts)


def _compile(request: Request) -> tuple[dict, bytes]:
    """The facts of a Binary but for its path, and the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Triton 3.6 asks functions for their modules
    function = compile_source(request.text, request.name, {"__name__": "kernels"})
    signature = {name: kind for name, (kind, _) in zip(function.arg_names, request.arguments, strict=True)}
    attributes = {(i,): [["tt.divisibility", 16]] for i, (_, aligned) in enumerate(request.arguments) if aligned}
    source = ASTSource(function, signature, {}, attributes)
    options = {"num_warps": request.warps, "enable_fp_fusion": True}
    if "tl.device_assert" in request.text:  # Triton leaves assertions out otherwise, and adds some of its own then
        options |= {"debug": True, "sanitize_overflow": False}
    made = triton.compile(source, target=GPUTarget("cuda", request.capability, 32), options=options)
    scratch = [getattr(made.metadata, f"{what}_scratch_size", None) for what in ("global", "profile")]
    assert not any(scratch), "kernels of ours need no scratch memory"
    return {
        "name": made.metadata.name,
        "shared": made.metadata.shared,
        "scratch": len(scratch) - scratch.count(None),
    }, made.asm["cubin"]


@functools.cache
def _loaded(binary: Binary, device: int) -> int:
    with torch.cuda.device(device):
        compat.set_device(device)  # which makes its context, where the thread has none
        return compat.load_kernel(binary.path, binary.name, binary.shared, device)
