"""Dispatch: what a capture knows of the functions that the program calls, and which of them are called as they are.

A program that is refused names the unit around the refused line; the next capture calls that as it is.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thunder.core.host_calls import Log, host_call
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


@dataclass(frozen=True)
class EagerFunctions:
    """The functions of a compiled one whose calls are eager calls, or one host call each, by their code, and classes of
    the standard library. reasons: why. excluded: functions whose calls are none, since they change what the program
    depends on. failing: functions in which thunder failed, or which raise by themselves. superseding: lines whose
    writes gradients do not allow -> why, and what to do. allowed: False where no function may become one. forgotten:
    functions that a first call has named, in which libraries fill the tables that they have empty. cheaper: functions
    that could be read, and cost less as one call. later: of these, those that become eager calls when the program is
    captured for the next call, and why."""

    reasons: dict[types.CodeType | type, str] = field(default_factory=dict)
    excluded: set[types.CodeType | type] = field(default_factory=set)
    failing: set[types.CodeType | type] = field(default_factory=set)
    superseding: dict[tuple | None, tuple[str, str]] = field(default_factory=dict)
    allowed: bool = True
    forgotten: set[types.CodeType | type] = field(default_factory=set)
    cheaper: set[types.CodeType | type] = field(default_factory=set)
    later: dict[types.CodeType | type, str] = field(default_factory=dict)

    def __contains__(self, unit: types.CodeType | type) -> bool:
        return unit in self.reasons

    def may_have(self, unit: types.CodeType | type) -> bool:
        """Whether a function may become one."""
        return self.allowed and unit not in self.reasons and unit not in self.excluded

    def exclude(self, codes: Iterable[types.CodeType]) -> None:
        for code in codes:
            self.reasons.pop(code, None)
            self.excluded.add(code)

    def take_later(self) -> bool:
        """Lets units that were named for later be called as they are. Gives whether there are any."""
        named = {unit: reason for unit, reason in self.later.items() if self.may_have(unit)}
        self.reasons.update(named)
        self.later.clear()
        return bool(named)

    @property
    def read_again(self) -> set[types.CodeType | type]:
        """The functions that were to cost less as one call, and are read since they cannot be called as they are."""
        return self.cheaper & self.excluded

    def forget_first(self, known: set) -> None:
        """A call could not be captured. What it has named beside the known units is no eager call until a second call
        names it, unless it could be read."""
        named = self.reasons.keys() - known - self.forgotten - self.cheaper
        self.forgotten.update(named)
        for unit in named:
            del self.reasons[unit]

    def not_failing(self, unit: types.CodeType | type) -> bool:
        """The function has raised by itself. Gives whether it was called as it is to see that."""
        raises = unit in self.failing
        if raises:
            self.failing.discard(unit)
            self.reasons.pop(unit, None)
        return raises


class Candidate(NamedTuple):
    """The innermost unit around a refused line whose calls can be made as they are: the code of a function, or a class
    of the standard library. again: whether this call of the program can be captured with that: nothing has happened
    inside of it that others have seen, or that stands under a number in the log of such effects."""

    unit: types.CodeType | type
    again: bool


class LibraryCall(NamedTuple):
    """A call of a function of the standard library by the user's code. happened: the host calls before it."""

    function: Any
    args: Any
    kwargs: dict
    happened: tuple[int, int]


@dataclass(slots=True)
class Reading:
    """A call of a `__getattribute__` that runs.

    only_looks: whether it does nothing but look. looked_at: containers from outside.
    """

    only_looks: bool = True
    looked_at: list[Any] = field(default_factory=list)

    def note(self, only_looks: bool, looked_at: list[Any]) -> None:
        """It calls something that looks at these."""
        self.only_looks &= only_looks
        self.looked_at += looked_at


class Dispatch:
    """The calls of one capture.

    handlers: handlers of functions in modules that few programs import, by id. replacements: operations in the place of
    functions. patched: methods of tensors that somebody has replaced. reading: the attribute that Python code answers
    now. library: the call of the standard library that runs. log: the results of this call's host calls;
    host_calls: how many with a number are recorded. is_in_cache: whether values from outside are computed by a function
    that keeps its results.
    """

    __slots__ = ("handlers", "replacements", "patched", "reading", "library", "log", "host_calls", "_cached")

    def __init__(self, handlers: dict[int, Callable], replacements: dict[Any, Any], patched: dict[str, Any], log: Log):
        self.handlers, self.replacements, self.patched, self.log = handlers, replacements, patched, log
        self.host_calls = 0
        self.reading: Reading | None = None
        self.library: LibraryCall | None = None
        self._cached = 0

    @property
    def happened(self) -> tuple[int, int]:
        """How many calls others have seen, and how many have numbers."""
        return self.log.effects, self.host_calls

    def is_as_before(self, happened: tuple[int, int]) -> bool:
        """Whether nothing has happened since that a capture of the same call would find under another number."""
        return not self.log.effects or self.happened == happened

    def count_host_call(self) -> None:
        """A host call with a number is recorded."""
        self.host_calls += 1

    @property
    def is_in_cache(self) -> bool:
        return self._cached > 0

    @contextlib.contextmanager
    def in_cache(self) -> Iterator[None]:
        """A function that keeps its results computes one of values from outside."""
        self._cached += 1
        try:
            yield
        finally:
            self._cached -= 1

    @contextlib.contextmanager
    def read(self) -> Iterator[Reading]:
        """Python code answers an attribute, as a part of another such answer maybe."""
        outer, reading = self.reading, Reading()
        self.reading = reading
        try:
            yield reading
        finally:
            if outer is not None:
                outer.note(reading.only_looks, reading.looked_at)
            self.reading = outer

    def enter_library(self, call: LibraryCall | None) -> None:
        """The user's code calls the standard library, or (None) is called by it or left again."""
        self.library = call


def _computes_with_tensors(b: BoundSymbol) -> bool:
    return b.sym is not host_call and any(type(p) is TensorProxy for p in (*b.inputs, *b.outputs))


class Fallbacks:
    """The eager calls of one capture, and the unit around a refused line that may become one.

    calls: the functions that are called as they are. candidate: what a refusal has named. raises: whether a function
    that was called to see whether it raises by itself does. reaches_back_to: the first operation that a refusal has to
    do with.
    """

    __slots__ = (
        "calls", "candidate", "raises", "reaches_back_to", "_error", "_left", "_seen", "_operations", "_cheaper"
    )  # fmt: skip

    def __init__(self):
        self.calls: list[Any] = []
        self.candidate: Candidate | None = None
        self.raises = False
        self.reaches_back_to = sys.maxsize
        self._error = 0  # the id of an exception on its way: its frames hold objects that end with them
        self._left: list[tuple] = []  # the calls that it has left
        self._operations: list[int] = []  # where operations with tensors are among the bound symbols that were seen
        self._seen = 0
        self._cheaper: list[tuple[int, int]] = []

    def name(self, unit: types.CodeType | type, again: bool) -> None:
        """A refusal names a unit: see `Candidate`."""
        self.candidate = Candidate(unit, again)

    def note_cheaper(self, start: int, recorded: int) -> None:
        """The unit that is named is to be called as it is from the next call of the program on. start, recorded: the
        first of its bound symbols, and how many there are."""
        self.candidate = None
        self._cheaper.append((start, recorded))

    def cheaper_since(self, start: int) -> int:
        """How many bound symbols from `start` on are of such units."""
        return sum(recorded for first, recorded in self._cheaper if first >= start)

    def note_call(self, function: Any) -> None:
        """A function is called as it is."""
        self.calls.append(function)

    def note_raises(self, raises: bool) -> None:
        """A function was called to see whether it raises by itself."""
        self.raises = raises

    def operations_since(self, bound_symbols: Sequence[BoundSymbol], start: int) -> int:
        """How many bound symbols from `start` on compute with tensors, and not on the host."""
        if len(bound_symbols) < self._seen:  # a backward inside of the program replaces operations
            self._operations, self._seen = [], 0
        seen = range(self._seen, len(bound_symbols))
        self._operations += [i for i in seen if _computes_with_tensors(bound_symbols[i])]
        self._seen = len(bound_symbols)
        return len(self._operations) - bisect.bisect_left(self._operations, start)

    def note_failing(self, error: Exception, call: tuple) -> None:
        """An exception leaves a call, (function, args, kwargs, what had happened before)."""
        if self._error != id(error):
            self._error, self._left = id(error), []
        self._left.append(call)

    def forget_failing(self) -> None:
        """The program handles the exception."""
        self._error, self._left = 0, []

    def calls_left_by(self, error: Exception) -> list[tuple]:
        """The calls that an exception has left, the innermost first."""
        return self._left if self._error == id(error) else []

    def reach_back(self, operation: int) -> None:
        """What is refused has to do with this operation."""
        self.reaches_back_to = operation
