"""Tiers: a program runs at once, and a compiler's kernels come in between calls (`tiers="background"`).

The first tier is the program without the executors that compile ahead: PyTorch's kernels, and whatever needs no
compiler. When it has run for the first time, with its backward where that comes before the next call, the second tier
is lowered and compiled in the background, for arguments that lie in memory as those of the captured call. Calls do not
wait for it. Forward and backward of a call are of one tier, since each tier is a program of its own, with its own saved
values.

On the CPU the clock decides which one stays. `TIMED` calls of each are measured, the first one of each left out: the
median of the forward's times and that of the backward's. A second tier that is slower is given back. One that cannot be
compiled, too, with a warning. Regions of symbolic sizes are compiled when they run: a program with such regions stays
in its first tier, and says so.

A forked process stays in the first tier. Programs of several ranks wait: these would not change tiers at one call.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from thunder.cache.entry import CacheEntry, Lowered, lower_captured, lowered
from thunder.capture import Captured
from thunder.core.proxies import TensorProxy
from thunder.core.trace import Trace, TraceTag
from thunder.errors import MissingImplementationError, warn_user
from thunder.extend import add_executor_lists, get_executor
from thunder.options import NUMERICS_OPTIONS, TIERS_OPTIONS, JitOptions
from thunder.runtime import background

TIMED = 5  # calls of each tier whose times count
clock: Callable[[], float] = time.perf_counter


def lower_in_tiers(
    captured: Captured, options: JitOptions, modes: tuple, model: Any, lock: threading.RLock
) -> CacheEntry:
    """`lower_captured`, in two tiers where that was asked for and something is compiled ahead. lock: held while passes
    run."""
    second = _second(captured, options) if options.tiers is TIERS_OPTIONS.BACKGROUND else None
    if second is None:
        return lower_captured(captured, options, modes, model)
    kept = tuple(e for e in second.executors if not e.compiles_ahead)
    first = dataclasses.replace(options, executors=kept)
    tiers = Tiers(lambda watch: _lowered_again(captured, second, modes, watch), second.executors, lock)
    entry = lower_captured(captured, first, modes, model, tiers.first.watched)
    tiers.begin(entry)
    return entry


def _second(captured: Captured, options: JitOptions) -> JitOptions | None:
    """The options of the second tier; None where there is none."""
    program = captured.computation
    if program.info.communicates or options.numerics is NUMERICS_OPTIONS.EAGER:
        return None
    executors = options.executors
    if options.default_executors and _on_cpu(program):
        inductor = get_executor("inductor")
        if inductor is not None and inductor.unavailable() is None:
            executors = add_executor_lists((inductor,), executors)
    return dataclasses.replace(options, executors=executors) if any(e.compiles_ahead for e in executors) else None


def _on_cpu(program: Trace) -> bool:
    values = [*program.args, *(o for b in program.bound_symbols for o in b.outputs)]
    return all(x.device.type == "cpu" for x in values if isinstance(x, TensorProxy))


def _lowered_again(captured: Captured, options: JitOptions, modes: tuple, watch: Callable) -> Lowered:
    """Raises RuntimeError where passes decide by sizes that the prologue does not check."""
    with captured.decisions.anew({}) as made:
        found = lowered(captured, options, modes, watch)
    if made:
        raise RuntimeError("its passes decide by sizes of arguments that the first tier leaves open")
    return found


class _Tier:
    """A lowered program, and how long its calls have taken, by the clock: those of its forward and of its backward.

    after: called when a backward has run.
    """

    def __init__(self, after: Callable[[], None]):
        self._after = after
        self.program: Lowered | None = None
        self.forward: list[float] = []
        self.backward: list[float] = []

    def watched(self, trace: Trace, run: Callable) -> Callable:
        is_backward = TraceTag.BACKWARD in trace.tags
        times = self.backward if is_backward else self.forward

        def timed(*args):
            if len(times) > TIMED:
                return run(*args)
            start = clock()
            try:
                return run(*args)
            finally:
                times.append(clock() - start)
                if is_backward:
                    self._after()

        return timed

    @property
    def is_timed(self) -> bool:
        return len(self.forward) > TIMED and (not self.backward or len(self.backward) > TIMED)

    def took(self, backward: bool) -> float:
        """Seconds of a call, without the first one, which is slower."""
        return median(self.forward[1:]) + (median(self.backward[1:]) if backward else 0.0)


class Tiers:
    """The two tiers of one program. It is what calls run while it is open which one stays.

    running: "first" or "second". reason: in words, why.
    """

    def __init__(self, lower: Callable[[Callable], Lowered], executors: Sequence, lock: threading.RLock):
        self.first, self.second = _Tier(self._start), _Tier(_nothing)
        self.running, self.reason = "first", "it has not run yet"
        self._lower, self._executors, self._lock = lower, executors, lock
        self._entry: Callable[[], CacheEntry | None] = _nothing
        self._kept: Lowered | None = None
        self._choosing = threading.Lock()
        self._called, self._begun, self._failure, self._ready = False, False, "", False
        self._calls = 0  # while both are measured

    def __str__(self) -> str:
        return f"{self.running} tier: {self.reason}"

    def begin(self, entry: CacheEntry) -> None:
        """Takes the calls of an entry that the first tier was lowered to."""
        self._entry, entry.tiers = weakref.ref(entry), self
        self.first.program = Lowered(
            entry.computation_traces, entry.backward_traces, entry.computation_fn, entry.executed
        )
        entry.computation_fn = self

    def __call__(self, *inputs):
        with self._choosing:
            program = self._kept or self._chosen(inputs).program
        assert program is not None, "a tier that is chosen was lowered"
        results = program.run(*inputs)
        if not self._begun and not program.backward_traces:
            self._start()
        return results

    def _start(self) -> None:
        """The first call has ended: before, passes would have kept it waiting."""
        if not self._begun:
            self._begun, self.reason = True, "the second tier is being compiled"
            background.submit(self._compile)

    def _chosen(self, inputs: tuple) -> _Tier:
        """The tier that runs this call. Where it is known which one stays, that has the calls from now on."""
        if self._called:
            self._start()
        self._called = True
        if self._failure:
            tier = self._settle(self.first, self._failure)
            text = f"tiers='background': a program stays in its first tier, PyTorch's kernels, because {self._failure}"
            warn_user(text, UserWarning)
            return tier
        if not self._ready:
            return self.first
        if any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in inputs):
            return self._settle(self.second, "its regions are compiled")
        self._calls += 1
        timed = [self.first.is_timed, self.second.is_timed]
        if not all(timed) and self._calls < 4 * TIMED:  # not each call need have a backward
            self.reason = "both tiers are being measured"
            return self.second if timed[0] or not timed[1] and self._calls % 2 else self.first
        return self._faster()

    def _faster(self) -> _Tier:
        backward = min(len(self.first.backward), len(self.second.backward)) > 1
        first, second = self.first.took(backward), self.second.took(backward)
        times = f"{1e3 * first:.3f} ms in the first tier, {1e3 * second:.3f} ms in the second"
        if second > first:
            return self._settle(self.first, f"the second is slower: {times}")
        return self._settle(self.second, f"it is faster: {times}")

    def _settle(self, tier: _Tier, reason: str) -> _Tier:
        self._kept, entry = tier.program, self._entry()
        assert self._kept is not None, "a tier that stays was lowered"
        self.running, self.reason = "first" if tier is self.first else "second", reason
        if entry is not None:
            entry.take(self._kept)
        for other in (self.first, self.second):
            other.program = self._kept if other is tier else None
        self._lower, self._executors = _nothing, ()  # these hold the captured program
        return tier

    def _compile(self) -> None:
        """In the background."""
        entry = self._entry()
        if entry is None:
            return
        del entry
        try:
            with self._lock:
                found = self._lower(self.second.watched)
            forward = found.computation_traces[-1]
            backward = found.backward_traces[-1] if found.backward_traces else None
            for executor in self._executors:
                executor.compile_ahead(forward, backward, dict(forward.info.strides))
        except background.Ended:
            raise
        except MissingImplementationError as error:
            self.reason = f"the second is not compiled: {error}"
            return
        except Exception as error:  # noqa: BLE001  the first tier goes on; the next call warns
            self._failure = f"the second cannot be compiled: {type(error).__name__}: {error}"
            return
        self.second.program, self._ready = found, True


def _nothing(*args) -> Any:
    return None
