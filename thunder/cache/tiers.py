"""Tiers: a program runs at once, and a compiler's kernels take over at a call that is known beforehand (`tiers=5`).
That is the default on the CPU, where there is a C++ compiler.

The first tier is the program without the executors that compile ahead: PyTorch's kernels, and whatever needs no
compiler. When it has run for the first time, with its backward where that comes before the next call, the second tier
is lowered and compiled in the background, for arguments that lie in memory as those of the captured call. Calls up to
the n-th do not wait for it; the n-th does, and has it. So the same program changes its kernels, and its rounding, at
the same call in every run. Forward and backward of a call are of one tier, since each tier is a program of its own,
with its own saved values.

A program that is compiled under torch.use_deterministic_algorithms(True) has one tier by default: the same call gives
the same bits, also behind a resumption from a checkpoint.

A checkpoint runs a program twice, and takes the tensors that the second call saves for those of the first: a program
that is called under hooks of saved tensors while it is in its first tier stays there.

A program whose kernels another process has left on the disk begins with them. One whose second tier cannot be compiled
stays in the first, with a warning. A forked process stays in the first tier. A program that communicates has a second
tier whose collectives come in the order of the first: ranks count their own calls.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.cache.entry import CacheEntry, Lowered, lower_captured, lowered
from thunder.cache.graphs import FunctionGraphs, call_of, graph_tier
from thunder.cache.search import search_later
from thunder.capture import Captured
from thunder.core.proxies import TensorProxy
from thunder.core.trace import Trace, TraceTag
from thunder.distributed.agreement import collectives_of
from thunder.errors import MissingImplementationError, warn_user
from thunder.extend import Executor, add_executor_lists, get_executor
from thunder.extend.fusion import FusionExecutor
from thunder.options import AUTOMATIC, AUTOMATIC_CALL, NUMERICS_OPTIONS, ONE, JitOptions
from thunder.runtime import background, disk_cache


def lower_in_tiers(
    captured: Captured, options: JitOptions, modes: tuple, model: Any, lock: threading.RLock, is_written: bool,
    graphs: FunctionGraphs,
) -> CacheEntry:  # fmt: skip
    """`lower_captured`, in tiers where something is compiled ahead, or recorded, and the options do not say otherwise.
    lock: held while passes run. is_written: the program goes to disk, whatever its kernels are. graphs: of the
    function."""
    last_options: list[JitOptions] = []  # those of the last tier of kernels

    def with_graphs(program: Captured, transform: Any) -> Lowered:
        last = dataclasses.replace(last_options[0], transforms=(*last_options[0].transforms, transform))
        return _lowered_again(program, last, modes, tier.watched if tier is not None else _unwatched)

    tier = None if is_written else graph_tier(captured, options, modes, with_graphs, lock, graphs)
    watch = _unwatched if tier is None else tier.watched
    entry, last = _in_tiers_of_kernels(captured, options, modes, model, lock, is_written, watch)
    last_options.append(last)
    search_later(entry, options)
    if tier is not None:
        tier.begin(entry, call_of(entry.tiers))
    return entry


def _in_tiers_of_kernels(
    captured: Captured, options: JitOptions, modes: tuple, model: Any, lock: threading.RLock, is_written: bool,
    watch: Callable[[Trace, Callable], Callable],
) -> tuple[CacheEntry, JitOptions]:  # fmt: skip
    """The entry, and the options of its last tier. watch: see `thunder.cache.entry.lowered`."""
    call = options.tiers
    if call == AUTOMATIC:
        may_change = options.default_executors and options.device is None and not is_written
        may_change = may_change and not torch.are_deterministic_algorithms_enabled()
        call = AUTOMATIC_CALL if may_change and _on_cpu(captured.computation) else ONE
    if call == ONE:
        return lower_captured(captured, options, modes, model, watch), options
    second = None if call is None else _second(captured, options)
    first = dataclasses.replace(options, executors=tuple(e for e in options.executors if not e.compiles_ahead))
    if second is None:  # where every tier is the same, named executors run from the first call on
        only = first if call is None else options
        return lower_captured(captured, only, modes, model, watch), only
    assert isinstance(call, int), "a second tier begins at a call"
    key = _key(captured, second) if call > 1 else ""
    if call <= 1 or disk_cache.load(key) is not None:
        return lower_captured(captured, second, modes, model, watch), second
    program = captured.only_computation()  # so that a module is freed while its second tier is compiled
    tiers = Tiers(lambda: _lowered_again(program, second, modes, watch), second.executors, lock, call, key)
    entry = lower_captured(captured, first, modes, model, lambda trace, run: tiers.watched(trace, watch(trace, run)))
    tiers.begin(entry)
    return entry, second


def _unwatched(trace: Trace, run: Callable) -> Callable:
    return run


def _second(captured: Captured, options: JitOptions) -> JitOptions | None:
    """The options of the second tier; None where there is none."""
    program = captured.computation
    if options.numerics is NUMERICS_OPTIONS.EAGER:
        return None
    executors = options.executors
    if options.default_executors and _on_cpu(program):
        compiler = get_executor("cpp")
        if isinstance(compiler, FusionExecutor) and compiler.unavailable() is None:
            takes_some = any(map(compiler.takes, program.bound_symbols))
            executors = add_executor_lists((compiler,), executors) if takes_some else executors
    return dataclasses.replace(options, executors=executors) if any(e.compiles_ahead for e in executors) else None


def _on_cpu(program: Trace) -> bool:
    values = [*program.args, *(o for b in program.bound_symbols for o in b.outputs)]
    return all(x.device.type == "cpu" for x in values if isinstance(x, TensorProxy))


def _lowered_again(
    captured: Captured, options: JitOptions, modes: tuple, watch: Callable[[Trace, Callable], Callable] = _unwatched
) -> Lowered:
    """Raises MissingImplementationError where passes decide by sizes that the prologue does not check."""
    with captured.decisions.anew({}) as relations:
        program = lowered(captured, options, modes, watch)
    if relations:
        raise MissingImplementationError("its passes decide by sizes of arguments that the first tier leaves open")
    return program


def _key(captured: Captured, options: JitOptions) -> str:
    """The name on disk of the fact that the kernels of a program are there."""
    names = tuple(f"{e.name} {e.version}" for e in options.executors)
    text = captured.computation.python(memory=True)
    return disk_cache.key_of("tier", torch.__version__, names, captured.output_requires_grad, text)


class Tiers:
    """The two tiers of one program. It is what calls run until the second has taken over, or stays away.

    running: "first" or "second". reason: in words, why. call: the number of the call that has the second tier. key: of
    the note on disk that its kernels are there.
    """

    def __init__(
        self, lower: Callable[[], Lowered], executors: Sequence[Executor], lock: threading.RLock, call: int, key: str
    ):
        self.running, self.reason, self.call = "first", "it has not run yet", call
        self._lower, self._executors, self._lock, self._key = lower, executors, lock, key
        self._entry: Callable[[], CacheEntry | None] = _nothing
        self._first: Lowered | None = None
        self._second: Lowered | None = None
        self._settled: Lowered | None = None
        self._choosing = threading.Lock()
        self._calls, self._begun, self._failure = 0, False, ""
        self._compiled, self._process = threading.Event(), os.getpid()

    def __str__(self) -> str:
        return f"{self.running} tier: {self.reason}"

    @property
    def is_settled(self) -> bool:
        """Whether later calls run the kernels that the last one ran."""
        return self._settled is not None

    def begin(self, entry: CacheEntry) -> None:
        """Takes the calls of an entry that the first tier was lowered to."""
        self._entry, entry.tiers = weakref.ref(entry), self
        self._first = Lowered(entry.computation_traces, entry.backward_traces, entry.computation_fn, entry.executed)
        entry.computation_fn = self

    def watched(self, trace: Trace, run: Callable) -> Callable:
        """The first tier's functions: when a backward has run, the second tier is compiled."""
        if TraceTag.BACKWARD not in trace.tags:
            return run

        def and_begins(*args):
            try:
                return run(*args)
            finally:
                self._start()

        return and_begins

    def __call__(self, *inputs):
        with self._choosing:
            self._calls += 1
            if self._settled is None and compat.saved_hooks(False) is not None:
                self._settle(self._first, "first", "hooks see its saved tensors, as a checkpoint's do")
            if self._calls > 1 and self._settled is None:
                self._start()
            if self._calls >= self.call and self._settled is None:
                self._change()
            program = self._settled or self._first
        assert program is not None, "the first tier was lowered"
        results = program.run(*inputs)
        if not self._begun and not program.backward_traces:
            self._start()
        return results

    def _start(self) -> None:
        """The first call has ended: before, passes would have kept it waiting."""
        if not self._begun and self._settled is None:
            self._begun, self.reason = True, "the second tier is being compiled"
            background.submit(self._compile)

    def _change(self) -> None:
        """Waits for the second tier, which has the calls from now on; the first where it cannot be compiled."""
        if os.getpid() != self._process and not self._compiled.is_set():
            return self._settle(self._first, "first", "this is a fork of the process that compiles")
        while not self._compiled.wait(1.0):
            if background.has_ended():
                return self._settle(self._first, "first", "the process ends")
        if self._second is not None:
            return self._settle(self._second, "second", f"its kernels have taken over at call {self._calls}")
        if self._failure:
            text = f"tiers={self.call}: a program stays in its first tier, PyTorch's kernels, because {self._failure}"
            warn_user(text, UserWarning)
        return self._settle(self._first, "first", self._failure or self.reason)

    def _settle(self, program: Lowered | None, running: str, reason: str) -> None:
        assert program is not None, "a tier that stays was lowered"
        self.running, self.reason, self._settled, entry = running, reason, program, self._entry()
        if entry is not None:
            entry.take(program)
        self._first = self._second = None
        self._lower, self._executors = _nothing, ()  # these hold the program

    def _compile(self) -> None:
        """In the background."""
        entry = self._entry()
        if entry is None:
            return
        del entry
        try:
            with background.whole(self._lock):
                second = self._lower()
            forward = second.computation_traces[-1]
            backward = second.backward_traces[-1] if second.backward_traces else None
            self._check_collectives(second)
            for executor in self._executors:
                executor.compile_ahead(forward, backward, dict(forward.info.strides))
            if any(b.sym.is_fusion for t in (forward, backward) if t is not None for b in t.bound_symbols):
                self._second = second
                if all(e.keeps_kernels for e in self._executors if e.compiles_ahead):
                    disk_cache.store(self._key, {}, b"compiled")
            else:
                self.reason = "the second has no kernels"
        except background.Ended:
            raise
        except MissingImplementationError as error:
            self.reason = f"the second is not compiled: {error}"
        except Exception as error:  # noqa: BLE001  the first tier goes on; the n-th call warns
            self._failure = f"the second cannot be compiled: {type(error).__name__}: {error}"
        self._lower = _nothing  # it holds the program
        self._compiled.set()

    def _check_collectives(self, second: Lowered) -> None:
        """Raises MissingImplementationError where the second tier communicates in another order: other ranks change
        their tier by their own calls, and one may stay in its first."""
        first = [] if self._first is None else _communication(self._first)
        others = _communication(second)
        if len(first) != len(others) or not all(map(_is_same, first, others)):
            raise MissingImplementationError(
                "its collectives would come in another order than in the first tier, which other ranks may run"
            )


def _communication(program: Lowered) -> list[tuple]:
    traces = [program.computation_traces[-1], *program.backward_traces[-1:]]
    if not traces[0].info.communicates:
        return []
    return [(group, said) for group, said, _ in collectives_of(traces)]


def _is_same(first: tuple, other: tuple) -> bool:
    """Whether two lowerings of one program communicate the same. The second has other names of gradients, with a number
    behind those of the first, since these are taken."""
    (group, said), (other_group, other_said) = first, other
    words, other_words = said.split(), other_said.split()
    return (
        group is other_group
        and len(words) == len(other_words)
        and all(
            a == b or a.startswith("d_") and re.fullmatch(rf"{re.escape(a.rstrip(','))}_\d+", b.rstrip(","))
            for a, b in zip(words, other_words, strict=True)
        )
    )


def _nothing(*args) -> Any:
    return None
