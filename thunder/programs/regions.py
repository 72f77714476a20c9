"""Regions of fusion executors in a program on disk.

A region is kept as what its executor says of it (`FusionExecutor.as_text`), and as PyTorch's operations, which stand in
for calls that differ from those that were seen. How its inputs lie in memory, and so its kernels, is known when it has
run: a program with regions is written a while after its first call, again when more has run, and when the process ends.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from thunder.core.regions import FusedFunction
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace, TraceInfo
from thunder.extend import get_always_executors, get_executor
from thunder.extend.fusion import FusionExecutor
from thunder.options import NUMERICS_OPTIONS, JitOptions
from thunder.pipeline import lower
from thunder.programs.describe import Unspeakable
from thunder.programs.text import Damaged, function_of, written_text

FIRST, LAST = 1.0, 64.0  # seconds until a program is written, and after which new kernels wait for the end


def named_transforms(transforms: Iterable) -> dict[str, Any]:
    """What texts call the transforms of a program. Those of another process take their places there."""
    return {f"transform{i}": t for i, t in enumerate(transforms)}


class Regions:
    """The regions of a program that is written. allowed: whether it may have some."""

    def __init__(self, options: JitOptions, allowed: bool = True):
        self._allowed = allowed
        self._options = dataclasses.replace(
            options, executors=tuple(get_always_executors()), transforms=(), numerics=NUMERICS_OPTIONS.CLOSE
        )
        # what texts refer to by name: functions of regions, and transforms, which operations of theirs have as operands
        self.functions: dict[str, Any] = named_transforms(options.transforms)
        self._said: dict[str, tuple[FusionExecutor, dict]] = {}

    def add(self, traces: Iterable[Trace | None]) -> None:
        """Raises Unspeakable for a region that text cannot say."""
        for trace in traces:
            if trace is None:
                continue
            for b in trace.bound_symbols:
                if b.sym.is_fusion and not any(known is b.sym.fn for known in self.functions.values()):
                    self._add(b, trace)

    def _add(self, b: BoundSymbol, trace: Trace) -> None:
        """Adds a fused region, as text or as its kernels. Raises Unspeakable for machine code."""
        executor, function = b.sym.executor, b.sym.fn
        is_text = (
            isinstance(executor, FusionExecutor) and function is not None and executor.as_text(function) is not None
        )
        if not is_text or not self._allowed:
            raise Unspeakable(f"the region {b.sym.name} of the executor {b.sym.executor.name} is machine code")
        program = trace.replace(
            name="operations", args=b.inputs, bound_symbols=b.subsymbols, output=b.outputs, info=TraceInfo()
        )
        operations = written_text(lower(program, self._options, self._options.executors)[-1], {}, {})
        name = f"region{len(self._said)}"
        self.functions[name] = function
        self._said[name] = executor, operations

    @property
    def has_kernels(self) -> bool:
        return bool(self._said)

    def said(self) -> dict[str, dict]:
        return {
            name: {
                "executor": executor.name,
                "operations": operations,
                **(executor.as_text(self.functions[name]) or {}),
            }
            for name, (executor, operations) in self._said.items()
        }


def kept_regions(said: dict[str, dict], unusual: Callable[[], None]) -> dict[str, FusedFunction]:
    """By name, the functions of regions of a program from the disk. unusual: see `FusionExecutor.from_text`."""
    return {name: _function(each, unusual) for name, each in said.items()}


def _function(said: dict, unusual: Callable[[], None]) -> FusedFunction:
    """The function of a fused region that a file describes."""
    executor = get_executor(said["executor"])
    if not isinstance(executor, FusionExecutor):
        raise Damaged(f"it has regions of {said['executor']}, which is no fusion executor here")
    function: list[Callable] = []

    def operations(*inputs):
        if not function:
            function.append(function_of(said["operations"]))
        return function[0](*inputs)

    return executor.from_text(said, operations, unusual)


class Later:
    """Writes programs a while after they have run, in a thread, and again where more is known."""

    def __init__(self):
        self._waiting: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, write: Callable[[], Any]) -> None:
        """write: writes a program where what is to be written has changed."""
        with self._lock:
            if not self._waiting:
                atexit.register(self.write)
            self._waiting.append(write)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="thunder_programs", daemon=True)
                self._thread.start()

    def write(self) -> None:
        for write in [*self._waiting]:
            write()

    def _run(self) -> None:
        wait = FIRST
        while wait <= LAST:
            time.sleep(wait)
            self.write()
            wait *= 2


LATER = Later()
