"""`Compiled`: a compiled function, its programs, and the way of a call."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.lazy import LazyModuleMixin

from thunder import compat
from thunder.cache.compile import Compilation, ProgramFails
from thunder.cache.entry import LOCKED, CacheEntry
from thunder.cache.graphs import FunctionGraphs
from thunder.cache.history import CompileStats, Recompilation
from thunder.cache.index import PATHS, SCANNED, facts_of
from thunder.cache.logs import configure, log_fallback, log_recompilation
from thunder.cache.store import ADVICE, ORIGINAL, REFUSALS, ProgramCache, Strays, path_limit
from thunder.capture.decisions import RaisesBefore
from thunder.capture.dispatch import EagerFunctions
from thunder.capture.locks import Holding
from thunder.capture.reachable import reaches_placed
from thunder.capture.replay import places_of_calls, replay
from thunder.capture.state import original_stands_in
from thunder.core.host_calls import Log, beginning_with
from thunder.core.paths import OtherPath
from thunder.core.signals import interrupts, raised_by
from thunder.core.symbol import current_recorder
from thunder.core.utils import compiling
from thunder.errors import (
    CaptureError,
    DataDependentError,
    DeclarationError,
    FallbackWarning,
    MissingImplementationError,
    OptionError,
    RecompileWarning,
    ThunderError,
    UnforeseenShapeError,
    add_location,
    calling_line,
    warn_user,
)
from thunder.methods import CompiledMethod
from thunder.ops.eager_calls import RunAgain
from thunder.options import CACHE_OPTIONS, DISABLE, FALLBACK_OPTIONS, LOGS, JitOptions
from thunder.programs.keep import find, keep, prepare, wanted

MOST_RAISED = 2
_PATIENCE = 0.05  # seconds after which a call looks what another thread waits for


class Compiled:
    """A compiled function or module: the original, its options, its programs and its history.

    otherwise: runs in the place of the original where that cannot be captured, given its positional and keyword
    arguments. It gives the result, and whether compiled programs have run in it: then nobody is warned.
    """

    def __init__(self, fn: Callable, options: JitOptions, otherwise: Callable | None = None):
        configure(LOGS.value)
        prepare(options)
        self.fn, self.options, self.otherwise = fn, options, otherwise
        self.stats = CompileStats()
        self._cache = ProgramCache(options, self.stats)
        self._tables = self._cache.by_modes  # by modes; looked up in each call
        self._lock = threading.RLock()
        self._graphs = FunctionGraphs()
        self._log: Log | None = None  # of the call that is being compiled
        self.refused: ThunderError | None = None  # the last refusal of a program as a whole
        self._warned: set[str] = set()
        self._raised = 0  # captures of calls that raise, up to MOST_RAISED: then such calls are not captured
        self._eager_calls = 0  # that ran the original function because there are too many programs
        self.eager_functions = EagerFunctions()
        self._strays = Strays()
        self.documents: tuple[Any, ...] = ()  # programs that `thunder.load` read
        self.replaced: Compiled | None = None  # of a module: the forward that a library has put there
        self.module: Callable = lambda: None  # the ThunderModule that calls it, held weakly
        # the tensors in the place of the module's parameters and buffers
        self.overrides: tuple[dict[str, torch.Tensor], ...] = ({}, {}) if isinstance(fn, torch.nn.Module) else ()
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn, updated=())

    _lc_cd = property(lambda self: self)
    _lc_original = property(lambda self: self.fn)
    _lc_cs = property(lambda self: self.stats)
    _lc_transforms = property(lambda self: list(self.options.transforms))

    @property
    def programs(self) -> tuple[CacheEntry, ...]:
        """The compiled programs, in the order in which they were compiled."""
        return tuple(reversed(self.stats.interpreter_cache))

    @property
    def recompilations(self) -> tuple[Recompilation, ...]:
        """When, where and why it was compiled again, the first time first: the last 1000 times."""
        return tuple(self.stats.recompilations)

    @property
    def _name(self) -> str:
        return f"<thunder.jit of {getattr(self.fn, '__qualname__', type(self.fn).__name__)}>"

    def __repr__(self) -> str:
        stats = self.stats
        if not stats.calls and not stats.interpreter_cache:
            return self._name
        again = f", compiled again because {stats.recompilations[-1].reason}" if stats.recompilations else ""
        return f"{self._name[:-1]}: calls {stats.calls}, programs {len(stats.interpreter_cache)}{again}>"

    def __call__(self, *args, **kwargs):
        if is_dynamo_compiling():
            return self.fn(*args, **kwargs)
        stats = self.stats
        stats.calls += 1
        modes = compat.modes_key()
        table, missed = self._tables.get(modes), None
        if table is not None:
            tree = table.tree
            entries = tree.entries if tree.ask is None else tree.likely(self.fn, args, kwargs)
            for entry in entries:
                prologue = entry.prologue_fn
                try:
                    inputs = prologue(self.fn, args, kwargs)
                except Exception as error:  # noqa: BLE001 - see CacheEntry.inputs
                    if interrupts(error):
                        raise
                    continue
                if type(inputs) is tuple:
                    if entry is not entries[0]:
                        self._to_front(entries, entry)
                    stats.cache_hits += 1
                    stats.last_entry = entry
                    entry.used = stats.calls
                    entry.calls += 1
                    if entry.calls >= entry.due_at:
                        entry.arrive()
                    try:
                        values = entry.computation_fn(*inputs)
                    except OtherPath as left:
                        other = left.with_traceback(None)  # which holds the program's values
                    except Exception as error:
                        if not self._fails_over(entry, error):
                            raise
                        other = None
                    else:
                        run = entry.epilogue_fn
                        return values if run is None else run(self.fn, args, kwargs, values)
                    return self._on_other_path(modes, entry, other, args, kwargs)
                if inputs is ORIGINAL:
                    return self._run_original("", args, kwargs, None) if self.otherwise else self.fn(*args, **kwargs)
                if inputs is LOCKED:
                    stats.cache_hits += 1
                    entry.used = stats.calls
                    return self._run_handled(modes, entry, (), args, kwargs)
                missed = {**(missed or {}), entry: inputs}
        return self._miss(modes, args, kwargs, missed)

    def __get__(self, instance, owner=None):
        """A compiled function in a class body is a method."""
        return self if instance is None else CompiledMethod(self, instance)

    def _to_front(self, entries: list[CacheEntry], entry: CacheEntry) -> None:
        if entry in entries and self._lock.acquire(blocking=False):  # while another thread compiles, the order stays
            try:
                entries[:] = [entry, *(e for e in entries if e is not entry)]
            finally:
                self._lock.release()

    def lower(self, *args, **kwargs) -> CacheEntry:
        """The program that a call with these arguments would run, compiled where there is none.

        Nothing runs, and nothing is counted as a call.
        """
        return self.entry_for(args, kwargs)[0]

    def entry_for(self, args: tuple, kwargs: dict) -> tuple[CacheEntry, tuple]:
        """`lower`, with the inputs of the program's computation."""
        modes, _ = compat.without_stance(compat.modes_key())
        with self._lock:
            facts = self._facts(modes, args, kwargs)
            fitting = self._cache.fitting(self.fn, modes, args, kwargs, facts, [], {})
            if fitting is not None and fitting[1] is not ORIGINAL and not fitting[0].path and not fitting[0].from_disk:
                return fitting
            entry = self._compile_alone(modes, args, kwargs)  # which knows the path of the call
            for known in self.programs if fitting is not None else ():
                if known.from_disk:
                    continue  # which has no bound symbols to look at
                if known.path == entry.path and type(inputs := known.inputs(self.fn, args, kwargs)) is tuple:
                    return known, inputs
            self._cache.add(modes, entry, facts, self._name)
            return entry, self._inputs(entry, args, kwargs)

    def with_open_capture(
        self, modes: tuple, args: tuple, kwargs: dict, look: Callable, path: tuple = ()
    ) -> tuple[Any, CacheEntry]:
        """A new entry for a call with these arguments, and the result of `look` for it, before its capture is closed.
        Nothing runs, and the entry is not remembered. path: its first decisions."""
        results: list = []
        with self._lock:
            entry = self._compile_alone(modes, args, kwargs, path, lambda entry: results.append(look(entry)))
        return results[-1], entry

    def _compile_alone(
        self, modes: tuple, args: tuple, kwargs: dict, path: tuple = (), look: Callable | None = None
    ) -> CacheEntry:
        """A new entry where nothing is to run, so that no call can tell whether the program raises by itself: what was
        raised leaves with a note."""
        try:
            return self._compile(modes, args, kwargs, path, look=look)
        except ProgramFails as error:
            failure = error.__cause__
            assert failure is not None, "a program fails by an exception"
            failure.add_note(f"raised while thunder captured {self._name}; nothing has run")
            if error.location is not None:
                add_location(failure, error.location)
            raise failure from None

    # --- a call that no entry fits
    def _miss(self, modes: tuple, args: tuple, kwargs: dict, missed: dict[Any, str] | None = None):
        """missed: the entries that were asked, and why they do not fit."""
        if current_recorder() is not None:
            return self.fn(*args, **kwargs)  # called while another program is traced: part of that program
        modes, stance = compat.without_stance(modes)
        if DISABLE.value:
            return self._run_disabled(DISABLE.name, args, kwargs)
        if stance == "force_eager" or stance.endswith("eager_then_compile") and self.stats.calls == 1:
            return self._run_disabled(f'torch.compiler.set_stance("{stance}")', args, kwargs)
        neighbour = compat.foreign_tracer(args, kwargs)
        if neighbour:
            if self.options.transforms or any(self.overrides) or not compat.is_exporting():
                text = f"{self._name} was called under {neighbour}: the original function runs"
                self._warn_once(text, UserWarning, "neighbour")
            return self.fn(*args, **kwargs)
        if self.options.cache is CACHE_OPTIONS.SAME_INPUT and self.stats.interpreter_cache:
            entry = self.stats.interpreter_cache[0]  # made in other modes
            self.stats.cache_hits += 1
            return self._run(entry, self._inputs(entry, args, kwargs), args, kwargs)
        if not self._takes_lock(args, kwargs):
            return self._run_original("", args, kwargs, None)
        try:
            self._log = log = Log()
            program = self._found_or_compiled(modes, args, kwargs, log, missed or {})
        finally:
            self._log = None
            self._lock.release()
        if isinstance(program, str):
            return self._run_original(program, args, kwargs, log)
        entry, inputs, compiled = program
        return self._run_handled(modes, entry, inputs, args, kwargs, log, compiled)

    def _takes_lock(self, args: tuple, kwargs: dict) -> bool:
        """Waits for other threads that compile. False where a host call runs while one of them captures, which may take
        as long as it wants, and the original does what this call does."""
        while not self._lock.acquire(timeout=_PATIENCE):
            log = self._log
            if log is not None and log.where is not None and self._original_stands_in(args, kwargs):
                return False
        return True

    def _run_handled(
        self, modes: tuple, entry: CacheEntry, inputs: tuple, args: tuple, kwargs: dict, log: Log | None = None,
        compiled: bool = False,
    ):  # fmt: skip
        """Runs an entry that fits a call, and what handles an error of it. compiled: whether this call compiled it."""
        start = time.perf_counter_ns() if compiled else 0
        try:
            return self._run(entry, inputs, args, kwargs, log)
        except OtherPath as left:
            other = left.with_traceback(None)
        except Exception as error:
            if not self._fails_over(entry, error):
                raise
            other = None
        finally:
            if compiled:
                self.stats.times["computation execution"] = (start, time.perf_counter_ns())
        return self._on_other_path(modes, entry, other, args, kwargs, log)

    def _run_disabled(self, switch: str, args: tuple, kwargs: dict):
        """The original function, which a switch wants to run. Raises OptionError where it would compute something
        else."""
        if not self._original_stands_in():
            raise OptionError(
                f"{switch} is set, and the original of {self._name} does not compute what it computes with "
                f"its transforms ({', '.join(type(t).__name__ for t in self.options.transforms)}): leave them out, or "
                "unset it"
            )
        return self.fn(*args, **kwargs)

    def _run(self, entry: CacheEntry, inputs: tuple, args: tuple, kwargs: dict, log: Log | None = None):
        if not entry.locks:
            return self._run_now(entry, inputs, args, kwargs, log)
        with (
            entry.locks[0].lock if len(entry.locks) == 1 else Holding(entry.locks)
        ):  # another thread may have written to what the questions were asked about
            inputs_now = entry.inputs(self.fn, args, kwargs)
            if type(inputs_now) is tuple:
                return self._run_now(entry, inputs_now, args, kwargs, log)
        return self._miss(compat.modes_key(), args, kwargs)

    def _run_now(self, entry: CacheEntry, inputs: tuple, args: tuple, kwargs: dict, log: Log | None):
        """The result of a program, with its epilogue. log: host calls that capture has made already."""
        self.stats.last_entry = entry
        entry.calls += 1
        if entry.calls >= entry.due_at:
            entry.arrive()
        if log is None:
            values = entry.computation_fn(*inputs)
        else:
            with beginning_with(log):
                values = entry.computation_fn(*inputs)
        return values if entry.epilogue_fn is None else entry.epilogue_fn(self.fn, args, kwargs, values)

    def _run_original(self, warning: str, args: tuple, kwargs: dict, log: Log | None, left: CacheEntry | None = None):
        """left: the program that has made the last calls in the log; None where capture has."""
        if log is not None:
            log.undo()  # the original draws its random numbers itself
        if log is not None and log.effects:
            if left is not None:
                log.place(places_of_calls(left.captured.computation))
            result, is_compiled = replay(self.fn, args, kwargs, log), False
        elif self.otherwise:
            result, is_compiled = self.otherwise(args, kwargs)
        else:
            result, is_compiled = self.fn(*args, **kwargs), False
        self._raised = min(self._raised, MOST_RAISED - 1)
        if warning and self.options.fallback is FALLBACK_OPTIONS.ERROR:  # only running it tells whether it raises
            raise CaptureError(
                "the original function ran, to see whether it raises the same exception, and it did not; its result is "
                f"dropped (fallback='error'). {warning}"
            )
        if warning and not is_compiled:
            self._warn_once(warning, FallbackWarning, "failure")
        return result

    # --- a call that leaves the path of a program
    def _on_other_path(
        self,
        modes: tuple,
        entry: CacheEntry,
        other: OtherPath | None,
        args: tuple,
        kwargs: dict,
        log: Log | None = None,
    ):
        """Runs the program of the path that a call goes: a known one, or one that is compiled for it.

        No effect of a program has taken place when it is left, and each program that is tried agrees with the call for
        one decision more than the one before. Where the kernels of two programs answer one question differently, so
        that each leaves for the other, the original function runs; as where the program has failed and it may handle
        that (other is None). Later calls try the program of this call first once the one tried before was left twice
        in a row: where calls alternate, every second one is tried right.
        """
        tried, again = [entry], other is not None and entry.left_after == entry.calls - 1
        while other is not None:
            entry.calls -= 1  # it was left
            if isinstance(other, RunAgain):
                return self._run_behind(entry, other, args, kwargs)
            path = (*entry.path[: other.index], entry.path[other.index]._replace(answer=other.answer))
            with self._lock:
                log = other.log if isinstance(other.log, Log) else Log()
                program = self._of_path(modes, path, args, kwargs, log)
                if not isinstance(program, str) and program[0] in tried:
                    program = self._refused_path(
                        "each of two compiled paths finds that a call goes the other", path, args, kwargs
                    )
            if isinstance(program, str):
                return self._run_original(program, args, kwargs, log, entry)
            entry, inputs = program
            tried.append(entry)
            entry.used = self.stats.calls
            try:
                result = self._run(entry, inputs, args, kwargs, log)
                tried[0].left_after = tried[0].calls
                if again and modes in self._tables:
                    self._to_front(self._tables[modes].tree.likely(self.fn, args, kwargs), entry)
                return result
            except OtherPath as left:
                other = left.with_traceback(None)
            except Exception as error:
                if not self._fails_over(entry, error):
                    raise
                other = None
        self._note_stray(modes)
        return self._run_original("", args, kwargs, log, entry)

    def _run_behind(self, entry: CacheEntry, left: RunAgain, args: tuple, kwargs: dict):
        """Runs the original behind an eager call that raised, or that changed what the program depends on."""
        if left.changed is not None:
            self._exclude(entry)
        return self._run_original("", args, kwargs, left.log, entry)

    def _exclude(self, entry: CacheEntry) -> None:
        """The eager calls of a program change what it depends on: later programs have others."""
        functions = ", ".join(f"{code.co_qualname}()" for code in entry.captured.eager_codes)
        text = (
            f"{self._name}: {functions} changes state that the program has read, so that no program can call it. In "
            "this call the program may have read that state as it was afterwards"
        )
        self._warn_once(text, FallbackWarning, f"state {functions}")
        self.eager_functions.exclude(entry.captured.eager_codes)
        entry.retire("an eager call changes what the program depends on")

    def _note_stray(self, modes: tuple) -> None:
        """A call ran a part of a program, and then the original function. After some in a row, calls go by the
        programs."""
        if self._strays.noted(self.stats.calls):
            self._tables = {m: table for m, table in self._cache.by_modes.items() if m != modes}
            self._eager_calls = 1

    def _of_path(
        self, modes: tuple, path: tuple, args: tuple, kwargs: dict, log: Log
    ) -> tuple[CacheEntry, tuple] | str:
        """The program whose decisions begin with `path`, with its inputs; a str as in `_found_or_compiled`."""
        known = [e for e in self._cache.by_last_use(modes) if e.path and e.path[0].where == path[0].where]
        for entry in known:
            if entry.path[: len(path)] == path and type(inputs := entry.inputs(self.fn, args, kwargs)) is tuple:
                return entry, inputs
        others = [e for e in known if type(e.inputs(self.fn, args, kwargs)) is tuple]
        if reason := path_limit(others, self.options.get(PATHS)):
            refused = self._refused_path(reason, path, args, kwargs)
            self._note_stray(modes)
            return refused
        reason = f"another path: {path[-1].question} is {path[-1].answer}"
        program = self._compiled_for(modes, self._facts(modes, args, kwargs), [reason], args, kwargs, path, log)
        return program if isinstance(program, str) else program[:2]

    def _refused_path(self, reason: str, path: tuple, args: tuple, kwargs: dict) -> str:
        """The words of a warning. Raises where the original function does not stand in."""
        error = DataDependentError(
            f"{reason} ({self._name}: {path[-1].question} is {path[-1].answer})",
            location=path[-1].where,
            remedy="use operations that go without the decision (torch.where, masks)",
        )
        if self.options.fallback is FALLBACK_OPTIONS.ERROR or not self._original_stands_in(args, kwargs):
            raise error
        return str(error)

    def _found_or_compiled(
        self, modes: tuple, args: tuple, kwargs: dict, log: Log, missed: dict[Any, str]
    ) -> tuple[CacheEntry, tuple, bool] | str:
        """An entry, the inputs of its computation, and whether it was compiled for this call. log: gets what host calls
        give that capture makes. missed: see `_miss`.

        A str where the original function is to run: the text of the warning.
        """
        stats, clock = self.stats, time.perf_counter_ns
        start = clock()
        full, tables = self._cache.is_full(self._original_stands_in), self._cache.by_modes
        rests = modes in tables and modes not in self._tables
        if (full or rests or len(self._cache.refusals) == REFUSALS) and self._eager_calls % SCANNED:
            self._eager_calls += 1
            return ""
        if rests:
            self._tables, self._strays.tried = tables, stats.calls
        facts = self._facts(modes, args, kwargs)
        reasons: list[str] = []
        fitting = self._cache.fitting(self.fn, modes, args, kwargs, facts, reasons, missed)
        if fitting is not None and fitting[1] is ORIGINAL:
            return ""
        if fitting is not None:  # an entry that was not likely to fit, or that another thread compiled meanwhile
            stats.cache_hits += 1
            return *fitting, False
        if full:
            self._eager_calls += 1
            self._warn_full(reasons)
            return ""
        if isinstance(self.fn, torch.nn.Module) and any(map(_is_lazy, self.fn.modules())):
            return ""  # the first call of a lazy module, which gives it its parameters, is eager's
        self._cache.drop_outlived()
        stats.times["lookup"] = (start, clock())
        return self._compiled_for(modes, facts, reasons, args, kwargs, (), log)

    def _compiled_for(
        self, modes: tuple, facts: dict, reasons: list[str], args: tuple, kwargs: dict, path: tuple, log: Log
    ) -> tuple[CacheEntry, tuple, bool] | str:
        """`_found_or_compiled`, of a call that no entry fits. reasons: why. path: the first decisions of the call."""
        stats, clock = self.stats, time.perf_counter_ns
        _, stance = compat.without_stance(compat.modes_key())
        if stance == "fail_on_recompile":
            because = reasons[0] if reasons else "it has no program for the modes of this call"
            raise RuntimeError(f"{self._name} would be compiled under set_stance({stance!r}), because: {because}")
        # a call that raises probably; where it does not, the next one that no entry fits is captured
        raises = self._raised == MOST_RAISED
        if (raises or stance == "eager_on_recompile") and self._original_stands_in(args, kwargs):
            return ""
        stats.cache_misses += 1
        stats.last_compile_reasons = reasons or self._cache.first_reason(modes)
        if stats.cache_misses > 1:
            record = Recompilation(stats.last_compile_reasons[0], calling_line(), stats.calls, time.time())
            stats.recompilations.append(record)
            log_recompilation(self._name, record)
        known, read_again = set(self.eager_functions.reasons), self.eager_functions.read_again
        try:
            entry = self._loaded(modes, args, kwargs, path) or self._compile(modes, args, kwargs, path, log)
            start = clock()
            inputs = entry.inputs(self.fn, args, kwargs)
            if isinstance(inputs, str):  # imports of PyTorch's during capture replace some of its functions
                entry = self._compile(modes, args, kwargs, path, log)
                inputs = self._inputs(entry, args, kwargs)
        except ProgramFails as error:
            if not self._original_stands_in(args, kwargs):
                raise error.__cause__ from None  # type: ignore[misc]
            # no effect has taken place: run, it fails with its own effects, words and traceback, if it does
            if self.options.fallback is FALLBACK_OPTIONS.ERROR and not error.theirs:
                return str(error)
            if not error.theirs:
                return self._refused_for(error, modes, facts)
            self._raised += self.options.fallback is not FALLBACK_OPTIONS.ERROR
            if error.questions is not None:
                self._cache.refuse(modes, error.questions, facts)
            return ""
        except RaisesBefore as error:
            if not self._original_stands_in(args, kwargs):
                raise error.__cause__ from None  # type: ignore[misc]
            return str(error)
        except (CaptureError, MissingImplementationError) as error:
            if self.options.fallback is FALLBACK_OPTIONS.ERROR or not self._original_stands_in(args, kwargs):
                raise
            if self.eager_functions.reasons.keys() > known or self.eager_functions.read_again > read_again:
                self.eager_functions.forget_first(known)  # the next call is captured with the others
                return ""
            return self._refused_for(error, modes, facts)
        self._warn_of_eager_calls(entry)
        if (failure := entry.captured.failure) is not None:
            self._run_now(entry, inputs, args, kwargs, log)
            raise failure from failure.__cause__
        self._keep_in_cache(modes, entry, facts)
        stats.times["prologue execution"] = (start, clock())
        return entry, inputs, True

    def _keep_in_cache(self, modes: tuple, entry: CacheEntry, facts: dict) -> None:
        """Keeps a program for other calls, unless these are to be captured with other eager calls."""
        if not self.eager_functions.take_later():
            self._cache.add(modes, entry, facts, self._name)

    def _refused_for(self, error: ThunderError, modes: tuple, facts: dict) -> str:
        """The words of a warning. Calls of which the program asks the same run the original function from now on."""

        look = _no_facts if compat.function_modes_in(modes) else facts_of  # which keeps nothing alive
        alike = error.questions or (lambda *call: () if look(*call) == facts else "the call looks different")
        self._cache.refuse(modes, alike, facts)
        self.refused = error.with_traceback(None)
        log_fallback(self._name, str(error))
        self._eager_calls += 1
        return f"{error}\nThe original function ran, as it does at calls like this one (fallback='error' raises)."

    def _warn_full(self, reasons: list[str]) -> None:
        text = (
            f"{self._name} has {len(self.programs)} compiled programs, as many as max_entries= allows, and a call fits "
            f"none of them: the original function runs. Because: {reasons[0] if reasons else 'other modes'}. {ADVICE}"
        )
        self._warn_once(text, RecompileWarning, "full")

    def _facts(self, modes: tuple, args: tuple, kwargs: dict) -> dict:
        """The facts that the index notes of a call; nothing under torch-function modes of the user's, which would see
        it."""
        return (_no_facts if compat.function_modes_in(modes) else facts_of)(self.fn, args, kwargs)

    def _inputs(self, entry: CacheEntry, args: tuple, kwargs: dict) -> tuple:
        """The inputs of a program that was compiled for these arguments."""
        inputs = entry.inputs(self.fn, args, kwargs)
        if isinstance(inputs, str):
            if entry.captured.has_eager_calls:
                self._exclude(entry)
            raise CaptureError(
                f"the program does not fit the inputs it was captured from: {inputs}",
                remedy="something it reads changes while it runs; please report this with the program",
            )
        return inputs

    def _loaded(self, modes: tuple, args: tuple, kwargs: dict, path: tuple) -> CacheEntry | None:
        """The entry of a program on disk that fits a call."""
        if not (self.documents or wanted(self.options)):
            return None
        why = self.stats.not_loaded = []
        with compiling():
            entry = find(self.fn, self.options, modes, args, kwargs, self.overrides, self.documents, why, path)
        self.stats.loaded += entry is not None
        return entry

    # --- compilation
    def _compile(
        self, modes: tuple, args: tuple, kwargs: dict, path: tuple = (), log: Log | None = None,
        look: Callable | None = None,
    ) -> CacheEntry:  # fmt: skip
        """look: is shown the entry before its capture is closed."""
        if look is None and wanted(self.options):
            look = self._keep
        return Compilation(
            self.fn, self._name, self.options, self.stats, modes, args, kwargs, path, log, self.overrides,
            self.module(), self._lock, self.eager_functions, look, self._graphs,
        ).run()  # fmt: skip

    def _keep(self, entry: CacheEntry) -> None:
        keep(entry, self.fn, self.options, entry.modes)

    def _original_stands_in(self, args: tuple = (), kwargs: dict | None = None) -> bool:
        """Whether the original function computes what the compiled one does. It would not communicate."""
        if not original_stands_in(self.options, self.overrides):
            return False
        return not reaches_placed((self.fn, *args, *(kwargs or {}).values()))

    def _warn_of_eager_calls(self, entry: CacheEntry) -> None:
        for code in entry.captured.eager_codes:
            reason = self.eager_functions.reasons.get(code)
            if reason is not None:
                log_fallback(self._name, f"{code.co_qualname}() is an eager call: {reason}")
                text = (
                    f"{self._name}: {code.co_qualname}() runs as it is in each call of the program, because: {reason}"
                )
                self._warn_once(text, FallbackWarning, f"{code.co_qualname} {code.co_firstlineno}")

    def _warn_once(self, text: str, category: type[Warning], about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warn_user(text, category)

    def _fails_over(self, entry: CacheEntry, error: Exception) -> bool:
        """An operation of a program raised. Whether the original runs, which may handle that: nothing was done."""
        if interrupts(error) or raised_by(error, compat.saved_hooks(False) or ()):
            return False  # somebody else's code did, and to whoever called the program
        # fallback="error" is about what thunder cannot do; this is the program's own way
        own = self.options.fallback is FALLBACK_OPTIONS.EAGER or not isinstance(error, ThunderError)
        eager = own and entry.captured.may_fail_over and not isinstance(error, DeclarationError)
        code = getattr(entry.epilogue_fn, "__code__", None)
        inside = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if eager and all(frame.f_code is not code for frame in inside) and self._original_stands_in():
            if isinstance(error, UnforeseenShapeError):
                self._point_at_user(entry, error)
                self._warn_once(f"{error}. The original function runs", FallbackWarning, "shape")
            return True
        self._point_at_user(entry, error)
        return False

    def _point_at_user(self, entry: CacheEntry, error: Exception) -> None:
        """An error of an operation names the user's line it came from."""
        location = entry.captured.user_location(entry.computation_traces[-1], error.__traceback__)
        if location is not None:
            add_location(error, location)

    # --- copies keep function and options, and drop programs
    def __deepcopy__(self, memo):
        return Compiled(copy.deepcopy(self.fn, memo), self.options)

    def __reduce__(self):
        if _by_name(self) is self:
            return vars(self)["__qualname__"]  # a decorated function is found again under its name
        return Compiled, (self.fn, self.options)


def run_compiled(module, *args, **kwargs):
    """`forward` of a compiled module."""
    return module._compiled(*args, **kwargs)


def compiled_of(fn: Any) -> Compiled | None:
    """The compiled function behind a compiled function, module or method, None where `fn` is not compiled."""
    function = getattr(fn, "__func__", None)
    if getattr(function, "__code__", None) is run_compiled.__code__:  # functions that wrap it have its attributes
        fn = fn.__self__
    for candidate in (fn, getattr(fn, "_running", None), getattr(fn, "_compiled", None), getattr(fn, "__func__", None)):
        if isinstance(candidate, Compiled):
            return candidate
    return None


def _no_facts(fn: Callable, args: tuple, kwargs: dict) -> dict:
    return {}


def _is_lazy(module: torch.nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook")


def _by_name(fn: Any) -> Any:
    """The object under the name and module that `fn` gives as its own."""
    value = sys.modules.get(getattr(fn, "__module__", None) or "")
    for name in getattr(fn, "__qualname__", "<locals>").split("."):
        value = getattr(value, name, None)
    return value
