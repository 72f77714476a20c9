"""The entries of one compiled function: the entries of each mode, their limit, and the eviction of old ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder import compat
from thunder.cache.entry import CacheEntry
from thunder.cache.history import CompileStats
from thunder.cache.index import ENTRIES, ENTRIES_WITH_TRANSFORMS, STALE, EntryTable
from thunder.core.signals import interrupts
from thunder.errors import RecompileWarning, warn_user
from thunder.options import CACHE_OPTIONS, RECOMPILE_WARNING_LIMIT, JitOptions

ADVICE = "Numbers and sizes that change stay symbolic unless the program needs their values; pass others as tensors."
# operations of compiled paths from which on there are no more than two: 50,000 take a minute to compile
MOST_OPERATIONS = 10_000
ASTRAY = 4  # calls in a row that go none of the paths, after which one of SCANNED is tried


def path_limit(entries: Sequence[CacheEntry], most: int) -> str:
    """Why no more paths are compiled beside these, in words; "" where one more may be."""
    if len(entries) >= most:
        return f"{len(entries)} compiled paths, as many as max_paths= allows, are not a call's"
    operations = sum(e.length for e in entries)
    if len(entries) > 1 and operations > MOST_OPERATIONS:
        return f"{len(entries)} compiled paths of {operations} operations are not a call's, and another one takes long"
    return ""


ORIGINAL = object()  # in the place of inputs: the original function runs
REFUSALS = 32  # that are remembered
PATIENCE = 64  # calls after which a refusal is tried again, and four times as many after each time


class Refusal:
    """Calls that run the original function: those that answer alike what a capture had asked when it failed.

    It stands in the place of a cache entry. After `patience` calls it fits none, so that the next one is captured
    again: what it failed for may have been something that it did not ask about.
    """

    __slots__ = ("_questions", "patience", "modes", "path", "used", "calls", "from_disk", "__weakref__")

    def __init__(self, questions: Callable, patience: int, modes: tuple):
        self._questions, self.patience, self.modes = questions, patience, modes
        self.path: tuple = ()
        self.used, self.calls, self.from_disk = 0, 0, False

    def prologue_fn(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        inputs = self._questions(fn, args, kwargs)
        if type(inputs) is not tuple:
            return inputs
        if self.calls >= self.patience:
            return "its refusal is tried again"
        self.calls += 1
        return ORIGINAL

    def inputs(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            return self.prologue_fn(fn, args, kwargs)
        except Exception as error:  # noqa: BLE001 - see CacheEntry.inputs
            if interrupts(error):
                raise
            return f"a question that the prologue asks raised {type(error).__name__}: {error}"

    @property
    def is_over(self) -> bool:
        return self.calls >= self.patience


class Strays:
    """Calls that went none of as many paths as may be. Each ran a part of a program before the original function.

    tried: the last call that was tried after others had gone by the programs.
    """

    def __init__(self) -> None:
        self.tried = self._last = self._row = 0

    def noted(self, call: int) -> bool:
        """Takes note of the number of such a call. Whether the next ones are to go by the programs."""
        self._row = self._row + 1 if call in (self.tried, self._last + 1) else 1
        self._last = call
        return self._row >= ASTRAY


class ProgramCache:
    """The entries of one compiled function. tables: the index of the entries for calls in the same modes, by modes."""

    def __init__(self, options: JitOptions, stats: CompileStats):
        self.options, self.stats = options, stats
        self.by_modes: dict[tuple, EntryTable] = {}
        self.refusals: list[Refusal] = []

    def by_last_use(self, modes: tuple) -> list[CacheEntry]:
        """The entries for calls in these modes, the last one that ran first."""
        table = self.by_modes.get(modes)
        return [] if table is None else table.by_last_use()

    def fitting(
        self,
        fn: Callable,
        modes: tuple,
        args: tuple,
        kwargs: dict,
        facts: dict,
        reasons: list[str],
        missed: dict[Any, str],
    ) -> tuple[CacheEntry, Any] | None:
        """The entry that fits a call, with the inputs of its computation, ORIGINAL of a refusal; `reasons` gets those
        why others do not. missed: those of entries that were asked already."""
        for entry in self.by_last_use(modes):
            inputs = missed[entry] if entry in missed else entry.inputs(fn, args, kwargs)
            if isinstance(inputs, str):
                reasons.append(inputs)
                continue
            self.by_modes[modes].learn(entry, facts)
            entry.used = self.stats.calls
            return entry, inputs
        return None

    def refuse(self, modes: tuple, questions: Callable, facts: dict) -> None:
        """Calls for which the questions have the answers of this call run the original function."""
        over = [refusal for refusal in self.refusals if refusal.is_over]
        for refusal in over or self.refusals[: len(self.refusals) + 1 - REFUSALS]:
            self.refusals.remove(refusal)
            self.by_modes[refusal.modes].remove(refusal)
        patience = 4 * max((refusal.patience for refusal in over), default=PATIENCE // 4)
        self.refusals.append(Refusal(questions, patience, modes))
        self.by_modes.setdefault(modes, EntryTable()).add(self.refusals[-1], facts)

    def first_reason(self, modes: tuple) -> list[str]:
        """Why the first call in these modes compiles."""
        if self.options.cache is CACHE_OPTIONS.NO_CACHING and self.stats.cache_misses > 1:
            return ["no caching"]
        reasons = [compat.describe_modes(old, modes) for old in self.by_modes if old != modes]
        return reasons or ["first call"]

    def add(self, modes: tuple, entry: CacheEntry, facts: dict, name: str) -> None:
        """Adds an entry that was compiled for a call with these facts. A full cache forgets its oldest one. name: of
        the function, for the warning after many compilations."""
        if self.options.cache is CACHE_OPTIONS.NO_CACHING:
            return
        stats = self.stats
        entry.used = stats.calls
        if len(stats.interpreter_cache) >= self.limit:
            self.forget(min(stats.interpreter_cache, key=lambda e: e.used))
        stats.interpreter_cache.insert(0, entry)
        table = self.by_modes.get(modes)
        if table is None:
            table = self.by_modes[modes] = EntryTable()
        table.add(entry, facts)
        if not entry.path and stats.cache_misses == RECOMPILE_WARNING_LIMIT + 1:
            why = "; ".join(dict.fromkeys(stats.last_compile_reasons))
            text = f"{name} was compiled {stats.cache_misses} times. The last time because: {why}. {ADVICE}"
            warn_user(text, RecompileWarning)

    @property
    def limit(self) -> int:
        """The largest number of entries."""
        entries = self.options.get(ENTRIES)
        if self.options.transforms and ENTRIES.name not in self.options.compile_options:
            return min(entries, ENTRIES_WITH_TRANSFORMS)
        return entries

    def forget(self, entry: CacheEntry) -> None:
        self.stats.interpreter_cache.remove(entry)
        self.by_modes[entry.modes].remove(entry)

    def drop_outlived(self) -> None:
        """Forgets entries for modules or functions that are gone."""
        for entry in [e for e in self.stats.interpreter_cache if e.captured.outlived]:
            self.forget(entry)

    def is_full(self, original_stands_in: Callable[[], bool]) -> bool:
        """Whether all entries that may be there are there and in use, so that the original function runs in place of
        another compilation."""
        entries, most = self.stats.interpreter_cache, self.limit
        if len(entries) >= most:
            self.drop_outlived()
        if len(entries) < most or not original_stands_in():
            return False
        if any(e.captured.computation.info.communicates for e in entries):  # the original would not
            return False
        return min(e.used for e in entries) > self.stats.calls - STALE * most
