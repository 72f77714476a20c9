"""Passes, the steps of `thunder.jit` from a captured program to the one that runs, and lists of them.

    thunder.jit(model, passes=lambda passes: passes.without("Unstack Saved"))
    thunder.jit(model, passes=thunder.passes().after("Dead Code Elimination", thunder.Pass("Mine", mine)))

A pass is a function from a trace to a trace. Passes run in the order of the list. Each one that changes a program adds
its trace, under its own header, to `thunder.last_traces`. Facts say which orders are valid: a pass needs some facts of
a trace, and gives or ends others.
"""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from thunder.core.check import check_change
from thunder.core.recording import undecided
from thunder.core.symbol import BoundSymbol
from thunder.core.tables import table
from thunder.core.trace import Trace, TraceBuilder, headed
from thunder.errors import DataDependentError, DeclarationError, OptionError, TraceCheckError, said_by, warn_user
from thunder.extend import Executor
from thunder.extend.fusion import FusionExecutor
from thunder.extend.own import finder_of
from thunder.extend.rules import Rule
from thunder.options import JitOptions

OPERATIONS = "operations"  # the fact that a captured trace begins with
RUNS = "executors"  # the fact that a program needs to run


@dataclass(frozen=True)
class Lowering:
    """The target of a lowering: the options, and the executors that run on the devices of the program.

    differentiates: results require grad, so that the program gets a backward. plain: PyTorch's own operations only, for
    values that no kernel takes (`is_grads_batched=True`).
    """

    options: JitOptions
    executors: tuple[Executor, ...]
    differentiates: bool = False
    plain: bool = False

    @cached_property
    def fusers(self) -> tuple[FusionExecutor, ...]:
        return tuple(e for e in self.executors if isinstance(e, FusionExecutor))

    def fuses(self, operation: BoundSymbol) -> bool:
        """Whether a fusion executor takes an operation."""
        return any(e.takes(operation) for e in self.fusers)

    def keeps(self, operation: BoundSymbol) -> bool:
        """Whether a fusion executor takes an operation and wants its results kept for the backward."""
        return any(e.takes(operation) and e.keeps(operation) for e in self.fusers)


def _always(trace: Trace, lowering: Lowering) -> bool:
    return True


@dataclass(frozen=True)
class Pass:
    """A function from a trace to a trace, with the facts that it requires and establishes.

    The result of a user's pass is checked: an invalid trace raises a TraceCheckError that names the pass, and
    exceptions of the pass get a note with its name.

    Args:
        name: The name of the pass, and the header of the traces that it returns.
        run: `run(trace, lowering)` returns the changed trace, the same trace if nothing changed, or a list of traces if
            the pass has several steps with headers; the last trace of the list is the result.
        needs: Facts that must hold for a trace before the pass.
        gives: Facts that hold afterwards.
        ends: Facts that no longer hold afterwards.
        when: `when(trace, lowering)` returns whether the pass runs.
        meaning: One line that says what the pass does. By default the first line of the docstring of `run`.
        inside: Whether the pass also runs for the operations before a `backward()` inside a program, when capture
            differentiates them.
        necessary: Why the pass cannot be removed from the list. Empty if it can.
        rules: For a pass that applies rules, the built-in rules; they are the third argument of `run`.
    """

    name: str
    run: Callable[..., Any]
    needs: Sequence[str] = ()
    gives: Sequence[str] = ()
    ends: Sequence[str] = ()
    when: Callable[[Trace, Lowering], bool] = _always
    meaning: str = ""
    inside: bool = False
    necessary: str = ""
    rules: Sequence[Rule] | None = None

    def __post_init__(self):
        if not callable(self.run):
            raise OptionError(f"thunder.Pass({self.name!r}, ...) takes a function (trace, lowering) -> trace")
        for field in ("needs", "gives", "ends"):
            facts = getattr(self, field)
            object.__setattr__(self, field, (facts,) if isinstance(facts, str) else tuple(facts))
        if not self.meaning:
            first = (getattr(self.run, "__doc__", None) or "").strip().partition("\n")[0]
            object.__setattr__(self, "meaning", first)

    def traces(self, trace: Trace, lowering: Lowering) -> list[Trace]:
        """Returns the traces of the steps of the pass. Empty if the pass does not run or changes nothing."""
        try:
            with undecided():
                return self._checked_traces(trace, lowering) if self._runs(trace, lowering) else []
        except DataDependentError as error:
            if not set(self.needs).issuperset(self.gives):
                raise
            warn_user(f"the pass {self.name} is left out: {error}", UserWarning)
            return []

    def _runs(self, trace: Trace, lowering: Lowering) -> bool:
        if self.when is _always or finder_of(self) is not None:
            return self.when(trace, lowering)
        who = f"when= of the pass {self.name}"
        with named(who):
            return said_by(who, self.when, (trace, lowering), {})

    def _checked_traces(self, trace: Trace, lowering: Lowering) -> list[Trace]:
        if finder_of(self) is not None:
            return self._traces(trace, lowering)
        with named(f"the pass {self.name}"):
            traces = self._traces(trace, lowering)
            for before, after in itertools.pairwise((trace, *traces)):
                check_change(before, after)
            return traces

    def _traces(self, trace: Trace, lowering: Lowering) -> list[Trace]:
        start = time.perf_counter_ns()
        result = self.run(trace, lowering) if self.rules is None else self.run(trace, lowering, self.rules)
        if isinstance(result, list) and all(isinstance(one, Trace) for one in result) or result is trace:
            return [] if result is trace else result
        if not isinstance(result, (Trace, TraceBuilder)):
            wanted = "return a trace, or a list of traces"
            raise OptionError(f"the pass {self.name} returned {type(result).__name__}: {wanted}")
        return [headed(self.name, result, start)]

    @property
    def described(self) -> str:
        """The meaning of the pass, and its built-in rules."""
        return f"{self.meaning}: {', '.join(r.name for r in self.rules)}" if self.rules else self.meaning

    def _without(self, names: Sequence) -> Pass:
        """Without the rules of these names."""
        left = tuple(r for r in self.rules or () if r.name not in names)
        return self if len(left) == len(self.rules or ()) else replace(self, rules=left)

    def __repr__(self) -> str:
        return f"<pass {self.name}>"

    def __reduce_ex__(self, protocol):
        """A pass of thunder's own is pickled by its name."""
        return super().__reduce_ex__(protocol) if (find := finder_of(self)) is None else (find, (self.name,))


@contextmanager
def named(what: str) -> Iterator[None]:
    """A block of a user's that makes a trace: its errors name it."""
    try:
        yield
    except TraceCheckError as error:
        if isinstance(error, DeclarationError):
            error.add_note(f"in {what}")
            raise
        better = TraceCheckError(f"{what} made a program that cannot run: {error}")
        better.bound_symbol = error.bound_symbol
        raise better from None
    except Exception as error:
        error.add_note(f"in {what}")
        raise


class PassList(tuple[Pass, ...]):
    """Passes in the order in which they run. Prints as a table.

    The methods return changed lists. Functions of Python sequences work as well. An unknown name raises an OptionError
    that names the most similar one.
    """

    def __getitem__(self, index):  # type: ignore[override]
        if isinstance(index, str):
            return self[self._index_of(index)]
        selected = super().__getitem__(index)
        return PassList(selected) if isinstance(index, slice) else selected

    def _index_of(self, name: str) -> int:
        """The place of a pass, given its name or itself."""
        names = [p.name for p in self]
        if isinstance(name, Pass):
            name = name.name
        if name in names:
            return names.index(name)
        lowered = {n.lower(): n for n in (*names, *(r.name for p in self for r in p.rules or ()))}
        near = difflib.get_close_matches(str(name).lower(), lowered, 1)
        hint = f"did you mean {lowered[near[0]]!r}?" if near else "`python -m thunder passes` lists those there are"
        raise OptionError(f"no pass is called {name!r}: {hint}")

    def before(self, name: str, *passes: Pass) -> PassList:
        """Returns the list with these passes inserted directly before the named one."""
        index = self._index_of(name)
        return PassList((*self[:index], *passes, *self[index:]))

    def after(self, name: str, *passes: Pass) -> PassList:
        """Returns the list with these passes inserted directly after the named one."""
        index = self._index_of(name) + 1
        return PassList((*self[:index], *passes, *self[index:]))

    def without(self, *names: str) -> PassList:
        """Returns the list without the passes and rules of these names."""
        rules = {r.name for p in self for r in p.rules or ()}
        gone = {self._index_of(name) for name in names if name not in rules}
        return PassList(p._without(names) for i, p in enumerate(self) if i not in gone)

    def replacing(self, name: str, *passes: Pass) -> PassList:
        """Returns the list with these passes in place of the named one."""
        index = self._index_of(name)
        return PassList((*self[:index], *passes, *self[index + 1 :]))

    def giving(self, fact: str) -> int:
        """Returns the index of the first pass that establishes a fact."""
        return next((i for i, p in enumerate(self) if fact in p.gives), len(self))

    def checked(self, known: Sequence[Pass] = ()) -> PassList:
        """Returns the list if it is valid. Raises OptionError if a pass needs a fact that does not hold at its
        position, two passes have the same name, or a necessary pass is missing. known: other passes that messages
        may name."""
        holds, ended = {OPERATIONS}, dict[str, Pass]()
        names = set[str]()
        for p in self:
            if not isinstance(p, Pass):
                raise OptionError(f"passes= has {p!r}, which is not a pass: thunder.Pass(name, run) makes one")
            if p.name in names:
                raise OptionError(f"passes= has two passes that are called {p.name!r}: give one of them another name")
            names.add(p.name)
            for fact in p.needs:
                if fact not in holds:
                    raise OptionError(f"passes=: {p.name} needs {fact!r}, {self._giver(fact, ended, known)}")
            ended |= dict.fromkeys(p.ends, p)
            holds = holds.difference(p.ends).union(p.gives)
        if RUNS not in holds:
            raise OptionError(f"passes=: a program that runs needs {RUNS!r}, {self._giver(RUNS, ended, known)}")
        for p in known:
            if p.necessary and p.name not in names:
                raise OptionError(
                    f"passes= has no {p.name!r}, without which programs are wrong: {p.necessary}. Leave it in the "
                    "list, or put a pass of that name in its place"
                )
        return self

    def _giver(self, fact: str, ended: dict[str, Pass], known: Sequence[Pass]) -> str:
        """In words, why a fact does not hold at some place, and how it would."""
        if fact in ended:
            return f"which {ended[fact].name} ends: put it before that one"
        givers = [p for p in (*self, *known) if fact in p.gives]
        if givers:
            return f"which {givers[0].name} gives: put that one before it"
        facts = {f for p in (*self, *known) for f in p.gives}
        near = difflib.get_close_matches(fact, facts, 1)
        return "which no pass gives" + (f": did you mean {near[0]!r}?" if near else "")

    def __str__(self) -> str:
        head = ("pass", "needs", "gives", "ends", "meaning")
        rows = ((p.name, *map(", ".join, (p.needs, p.gives, p.ends)), p.described) for p in self)
        return table(head, rows)

    __repr__ = __str__


def resolve_passes(wanted: Any, default: PassList) -> PassList:
    """The list that `thunder.jit(passes=given)` asks for: a function of the default list, or a sequence.

    Raises OptionError, in words, for anything else, and for a list that does not work.
    """
    passes = wanted(default) if callable(wanted) else wanted
    if isinstance(passes, (str, bytes, Pass)) or not isinstance(passes, Iterable):
        what = "returns" if callable(wanted) else "is"
        raise OptionError(f"passes= {what} {passes!r}: give a function from the list of passes to a list, or a list")
    return PassList(passes).checked(default)
