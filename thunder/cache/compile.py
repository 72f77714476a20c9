"""One compilation: capture of a call, the passes, and the entry that they give."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder import compat
from thunder.cache.entry import CacheEntry
from thunder.cache.graphs import FunctionGraphs
from thunder.cache.history import CompileStats
from thunder.cache.logs import log_program
from thunder.cache.tiers import lower_in_tiers
from thunder.capture import Captured, FailsWithParts, Request, capture
from thunder.capture.dispatch import EagerFunctions
from thunder.core.host_calls import Log
from thunder.core.recording import current_recorder, recording
from thunder.core.signals import interrupts
from thunder.core.utils import compiling
from thunder.errors import CaptureError, SharpEdgeWarning, ThunderError, add_location, is_noted, user_line
from thunder.options import JitOptions


class ProgramFails(CaptureError):
    """A program raised while it was captured: it does so itself, or thunder has failed, which only running it can tell.

    Nothing has run. theirs: the user's own code raised it, for example a backward that is captured with its forward.
    """

    def __init__(self, failure: Exception, questions: Callable | None = None):
        self.questions = questions
        location, self.theirs = user_line(failure)
        self.theirs = self.theirs and not is_noted(failure)
        reason = f"thunder fails on it, or it raises: {type(failure).__name__}: {_text_of(failure)}"
        super().__init__(reason, location=location, remedy="please report this with the program, if it runs by itself")
        entries = traceback.walk_tb(failure.__traceback__)
        self.calls = [(frame.f_code.co_filename, line) for frame, line in entries][::-1]


def _text_of(failure: Exception) -> str:
    try:
        return "; ".join([str(failure), *getattr(failure, "__notes__", ())])
    except CaptureError:  # its text depends on data
        return "..."


class Compilation(NamedTuple):
    """The inputs of one compilation.

    name: of the function, for messages. modes: of the call. path: the first decisions of the call. log: gets the
    results of host calls that capture makes. overrides: the tensors in the place of a module's parameters and buffers.
    module: the compiled module, which transforms are shown. lock: held while passes run. eager: see `Request`. look: is
    shown the entry before its capture is closed, to write it to disk. graphs: of the function.
    """

    fn: Callable
    name: str
    options: JitOptions
    stats: CompileStats
    modes: tuple
    args: tuple
    kwargs: dict
    path: tuple
    log: Log | None
    overrides: tuple
    module: Any
    lock: threading.RLock
    eager: EagerFunctions
    look: Callable[[CacheEntry], None] | None
    graphs: FunctionGraphs

    def run(self) -> CacheEntry:
        """Captures and lowers the program. Where that fails with numbers or values that change from call to call, it is
        tried again with fewer of them."""
        for executor in self.options.executors:
            executor.in_use = True
            executor.expect_program()
        with recording(current_recorder()), compat.modes_restored(), compiling():
            changing = changing_values(self.stats.interpreter_cache)
            written: dict[str, set | None] = {source: None for source, values in changing.items() if values is None}
            numbers = {
                source: values for source, values in changing.items() if values and _are_numbers(values)
            } | written
            for held, fewer in ((changing, numbers), (numbers, written)):
                if len(held) > len(fewer):
                    before = None if self.log is None else self.log.mark()
                    try:
                        return self._run_with(held)
                    except Exception as error:  # noqa: BLE001 - with fewer it succeeds, or raises its own error
                        if interrupts(error) or isinstance(error, ProgramFails) and error.theirs:
                            raise
                        if before is not None:
                            self.log.rewind(before)  # type: ignore[union-attr]
            return self._run_with(written)

    def _run_with(self, changing: dict[str, set | None]) -> CacheEntry:
        """changing: see `changing_values`."""
        stats, clock, options = self.stats, time.perf_counter_ns, self.options
        start = clock()
        if options.debug.show_interpreter_progress:
            print(f"Begin interpretation of {self.name}", file=sys.stderr)
        captured = self._capture(changing)
        if options.debug.show_interpreter_progress:
            frames = captured.frames.total()
            print(f"Finished interpretation: {captured.instructions} instructions in {frames} frames", file=sys.stderr)
        stats.times["construction"] = (start, clock())
        stats.interpreted_instructions = captured.instructions
        stats.bound_symbols_created = len(captured.computation.bound_symbols)
        start = clock()
        try:
            captured.transform(options, self.overrides, self.module)
            is_written = self.look is not None
            entry = lower_in_tiers(captured, options, self.modes, self.module, self.lock, is_written, self.graphs)
            if self.look is not None:
                self.look(entry)
            log_program(self.name, entry)
            return entry
        except ThunderError as error:
            if error.bound_symbol is not None and error.bound_symbol.location is not None:
                add_location(error, captured.where(error.bound_symbol.location))
            error.questions = captured.prologue_fn
            raise
        finally:
            stats.times["prologue"] = (start, clock())
            captured.close()

    def _capture(self, changing: dict[str, set | None]) -> Captured:
        """Captures the function. Errors that may be the program's own are ProgramFails."""
        log = Log() if self.log is None else self.log
        request = Request(
            self.fn, self.args, self.kwargs, self.options, changing, self.overrides, self.path, log, self.eager
        )
        try:
            return capture(request)
        except ThunderError as error:
            error.questions = next(iter(request.failed), None)
            raise
        except SharpEdgeWarning:
            raise
        except FailsWithParts as failure:
            raise failure.__cause__ from failure.__cause__.__cause__  # type: ignore[misc,union-attr]
        except Exception as failure:
            if interrupts(failure):
                raise
            raise ProgramFails(failure, next(iter(request.failed), None)) from failure


def changing_values(entries: Sequence[CacheEntry]) -> dict[str, set | None]:
    """Places whose values are inputs of the program, and the values for which they are not.

    They are those that earlier captures saw written (None), and those of others, with the values they had.
    """
    seen: dict[str, set] = {}
    for entry in entries:
        for source, value in entry.captured.constants.items():
            seen.setdefault(source, set()).add(value)
    return {**seen, **{source: None for entry in entries for source in entry.captured.effects}}


def _are_numbers(values: set) -> bool:
    return all(type(value) in (int, float) for value in values)
