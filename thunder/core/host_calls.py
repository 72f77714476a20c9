"""Host calls: Python code with effects, or with another value in each call, as bound symbols of a program.

    v0 = host_call(0, random, (), {}, 'float', 0)
    t0 = ltorch.mul(x, v0)
    h0 = host_call(None, format, (t1, '.2f'), {}, 'str', None)
    host_call(1, print, (h0,), {}, 'NoneType', None)

They run in program order, on real values. Each has a number, unless its value is the same whenever it is repeated. The
log of a call holds the results of the numbered ones. Where a program leaves for another path (`thunder.core.paths`),
that path takes the results from the log, so that each effect happens exactly once. Capture needs values to choose a
path and runs host calls too; the program that it records begins with their log.
"""

from __future__ import annotations

import functools
import operator
import random
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy

from thunder.core.codegen import OBJECT_NAMES
from thunder.core.paths import OtherPath
from thunder.core.proxies import AnyProxy, Proxy
from thunder.core.recording import note_look
from thunder.core.symbol import OpTags, Symbol, current_recorder, user_location
from thunder.errors import CaptureError

for _kind in (types.BuiltinFunctionType, types.FunctionType):
    OBJECT_NAMES[_kind] = lambda function: function.__name__


class HostProxy(AnyProxy):
    """A Python value that a host call returns: a text, a list, a file. kind: its type."""

    __slots__ = ("kind", "_value")

    def __init__(self, name: str, kind: type, value: Callable[[], Any]):
        self.name, self.kind, self._value = name, kind, value

    def replace(self) -> HostProxy:
        """A copy, which an equal call gives."""
        return HostProxy(self.name, self.kind, self._value)

    @property
    def example(self) -> Any:
        """The value at capture."""
        return self._value()

    def _refuse(self, *args: Any) -> Any:
        note_look()
        raise CaptureError(
            f"a {self.kind.__name__} that a host call gives is passed to native code that thunder cannot analyze",
            location=user_location(),
            remedy="write this part in Python, or call it outside of the compiled function",
        )

    __str__ = __format__ = __len__ = __iter__ = _refuse  # type: ignore[assignment]

    def _number(self) -> Any:
        """A number of NumPy's that native code asks for: the program decides by it."""
        recorder = current_recorder()
        if recorder is None or recorder.decide is None or not issubclass(self.kind, numpy.generic):
            return self._refuse()
        return recorder.decide.host_value(self)

    def _compared(self, compare: Callable, other: object) -> Any:
        """Native code compares a value that is inside of a container: the program decides by it."""
        recorder = current_recorder()
        theirs = type(other) is HostProxy
        if recorder is None or recorder.decide is None or isinstance(other, Proxy) and not theirs:
            return NotImplemented
        if self.kind.__hash__ in (None, object.__hash__):
            return self._refuse()
        value = recorder.decide.host_value(self)
        return compare(value, recorder.decide.host_value(other) if theirs else other)

    def __eq__(self, other: object) -> Any:
        return True if self is other else self._compared(operator.eq, other)

    def __lt__(self, other: object) -> Any:
        return self._compared(operator.lt, other)

    def __le__(self, other: object) -> Any:
        return self._compared(operator.le, other)

    def __gt__(self, other: object) -> Any:
        return self._compared(operator.gt, other)

    def __ge__(self, other: object) -> Any:
        return self._compared(operator.ge, other)

    __hash__ = object.__hash__

    def __int__(self) -> int:
        return int(self._number())

    def __float__(self) -> float:
        return float(self._number())

    def __index__(self) -> int:
        return operator.index(self._number())

    @example.setter
    def example(self, value: Any) -> None:
        raise AssertionError("a host call gives the value")


CONTAINERS = (list, dict, set)


def contents(value: Any, written: bool = False) -> list:
    """All that is in a container, and in those inside of it, in order; a value that is none by itself. written: of a
    tensor also how often it was written to."""
    if type(value) not in (*CONTAINERS, tuple):
        return [value, value._version] if written and hasattr(type(value), "_version") else [value]
    inside = [part for item in value.items() for part in item] if type(value) is dict else value
    return [type(value), len(value), *(entries for part in inside for entries in contents(part, written))]


class Lent:
    """A container that host code is given: a copy of the program's, which it must not change, now or later. written:
    and tensors that it must not write to now."""

    def __init__(self, container: Any, name: str, written: bool = False):
        self.container, self.name, self.written = container, name, written
        self.before = contents(container, written)

    @property
    def is_changed(self) -> bool:
        now = contents(self.container, self.written)
        same = (a is b or type(a) is int and a == b for a, b in zip(now, self.before, strict=False))
        return len(now) != len(self.before) or not all(same)


def check_lent(lent: list[Lent]) -> None:
    """Raises CaptureError where host code has changed a container or a tensor that it was given."""
    for one in lent:
        if one.is_changed:
            raise CaptureError(
                f"{one.name}() runs on the host and changes a {type(one.container).__name__} that it is given",
                remedy="give it a container from outside of the compiled function, or call it there",
            )


class Mark(NamedTuple):
    """What a log was at a time. journal, effects, states: how many."""

    results: dict[int, Any]
    called: dict[int, tuple]
    journal: int
    effects: int
    states: int


class OfKind(NamedTuple):
    """A tensor that a call was given, which the journal does not keep."""

    kind: type


class Entry(NamedTuple):
    """A call in the journal of a log: a function, or `call_method` and `call_function` of what they call.

    value: its result, or the `Outcome` of an eager call. is_effect: whether others have seen it, so that it must happen
    once. index: its number. owner: the module that an eager call is of. arrays: those that an effect was given, by
    position or keyword, with what was in them behind it. where: the code and instruction of the call, where capture has
    made it. shown: arguments whose memory the result may show without a reference to it."""

    function: Callable
    args: tuple
    value: Any
    is_effect: bool
    index: int | None = None
    owner: Any = None
    arrays: Mapping[int | str, tuple[numpy.ndarray, numpy.ndarray]] = types.MappingProxyType({})
    where: tuple[types.CodeType, int] | None = None
    shown: Any = None


class Log(dict[int, Any]):
    """The results of the numbered host calls of one call. journal: these calls, in order, without those that draw
    random numbers, which draw again. effects: how many of them others have seen. called: the functions, and
    names of methods, by number. lent: containers that they were given. where: the place in the program of the call that
    runs now, while it is captured."""

    __slots__ = ("journal", "effects", "called", "lent", "where", "_states")

    def __init__(self):
        super().__init__()
        self.journal: list[Entry] = []
        self.effects = 0
        self.lent: list[Lent] = []
        self.called: dict[int, tuple] = {}
        self.where: tuple[types.CodeType, int] | None = None
        # of generators, since each mark: what sets a state, and the state
        self._states: list[dict[int, tuple[Callable, Any]]] = [{}]

    @contextmanager
    def at(self, where: tuple[types.CodeType, int] | None) -> Iterator[None]:
        """The calls inside the block stand there in the program."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def note_draw(self, function: Callable, args: tuple) -> None:
        """A host call is about to run that draws from Python's or NumPy's generators, or from the one that it is a
        method of."""
        for generator in (random, numpy.random, getattr(function, "__self__", None), *args[:1]):
            if id(generator) not in self._states[-1] and (state := _state_of(generator)) is not None:
                self._states[-1][id(generator)] = state

    def happens(self, index: int, function: Callable, owner: Any, outcome: Any, shown: Any) -> None:
        """An eager call, number `index`, has run. owner: the module that it calls. shown: see `Entry`."""
        self[index], self.called[index] = outcome, _called(function, ())
        self.note(Entry(function, (), outcome, True, index, owner, where=self.where, shown=shown))

    def note(self, entry: Entry) -> None:
        """A call has been made."""
        self.journal.append(entry)
        self.effects += entry.is_effect

    def result(self, index: int, function: Callable, args: tuple = ()) -> Any:
        """The result of call number `index`. Raises CaptureError where another capture of the program has called
        something else under this number."""
        called = _called(function, args)
        if self.called.get(index, called) != called:
            raise CaptureError(
                f"{name_of(function)}() runs on the host, and another function did so at this place in an earlier call"
            )
        return self[index]

    def keep(self, index: int, function: Callable, args: tuple, value: Any) -> None:
        """The result of host call number `index`."""
        self[index], self.called[index] = value, _called(function, args)

    def place(self, places: Mapping[int, tuple[types.CodeType, int]]) -> None:
        """Says where calls stand that a compiled program has made. places: by the numbers of the calls."""
        self.journal = [
            entry._replace(where=places.get(entry.index)) if entry.where is None and entry.index is not None else entry
            for entry in self.journal
        ]

    def forget(self, index: int, value: Any) -> None:
        """Host call number `index` runs again: its result could not be used."""
        del self[index], self.called[index]
        if self.journal and self.journal[-1].value is value:
            self.effects -= self.journal.pop().is_effect

    def take_changed(self) -> Lent | None:
        """A container that host code was lent by an earlier call, and that it has changed since."""
        changed = next((one for one in self.lent if one.is_changed), None)
        self.lent = [one for one in self.lent if not one.is_changed]
        return changed

    def mark(self) -> Mark:
        """The log as it is now."""
        self._states.append({})
        return Mark(dict(self), dict(self.called), len(self.journal), self.effects, len(self._states) - 1)

    def rewind(self, mark: Mark) -> None:
        """Makes the log what it was, so that host code runs again, unless others have seen some."""
        if self.effects == mark.effects:
            self._set_back(mark.states)
            self.clear()
            self.update(mark.results)
            self.called = mark.called
            del self.journal[mark.journal :]

    def undo(self) -> None:
        """Sets the generators back to their states before this call."""
        self._set_back(0)
        self._states = [{}]

    def _set_back(self, first: int) -> None:
        while len(self._states) > first:
            for restore, state in self._states.pop().values():
                restore(state)


def _state_of(generator: Any) -> tuple[Callable, Any] | None:
    """The function that sets the state of a generator of random numbers, and the state; None for another object."""
    if generator is random or type(generator) is random.Random:
        return generator.setstate, generator.getstate()
    if generator is numpy.random or isinstance(generator, numpy.random.RandomState):
        return generator.set_state, generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        return lambda state: setattr(bits, "state", state), bits.state
    return None


class _Current(threading.local):
    """The logs of the program that this thread runs."""

    results: Log | None = None  # of the program that runs
    next: Log | None = None  # that the next program begins with
    lent: list[Lent] | None = None  # of a program without a log


_LOG = _Current()


def current_log() -> Log | None:
    """The log of the program that runs on this thread; None where it keeps none."""
    return _LOG.results


@contextmanager
def logged(results: Log | None) -> Iterator[None]:
    """Host calls inside the block take their results from `results`, and append theirs."""
    outer, _LOG.results = _LOG.results, results
    try:
        yield
    finally:
        _LOG.results = outer


@contextmanager
def beginning_with(results: Log | None) -> Iterator[None]:
    """The program that runs inside the block begins with the results of earlier host calls of its call."""
    _LOG.next = results
    try:
        yield
    finally:
        _LOG.next = None


def warn_at(message: str, category: type, file: str, line: int, module: str) -> None:
    """`warnings.warn` of a program: at the line of the user's that it names. line: 0 is the line of the caller, for
    which file is the number of frames to leave out."""
    if not line:
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "thunder").partition(".")[0] in _BETWEEN:
            frame = frame.f_back
        for _ in range(int(file)):
            frame = frame.f_back or frame
        file, line, module = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")
    known = _WARNED if module not in sys.modules else vars(sys.modules[module])
    warnings.warn_explicit(message, category, file, line, module, known.setdefault("__warningregistry__", {}))


_BETWEEN = ("thunder", "torch")  # a program and its caller
_WARNED: dict = {}  # by functions of no module


def with_log(program: Callable, decides: bool) -> Callable:
    """A program with host calls, with a log of its own, which it hands over where it leaves for another path.

    decides: whether it may leave; otherwise it keeps no log.
    """

    def run(*inputs):
        results, _LOG.next = _LOG.next, None
        if results is None and decides:
            results = Log()
        outer, lent = (_LOG.results, _LOG.lent), [] if results is None else results.lent
        _LOG.results, _LOG.lent = results, lent
        try:
            values = program(*inputs)
            if lent:
                check_lent(lent)
            return values
        except OtherPath as other:
            other.log = results
            raise
        finally:
            _LOG.results, _LOG.lent = outer

    return run


def taken_from_log(
    index: int | None, function: Callable, args: tuple, kwargs: dict, effect: str = "",
    lent: Collection[int | str] = (), frames: Frames = (),
) -> Any:  # fmt: skip
    """The result of host call number `index`: from the log, or of running it now. effect: "random" where it draws
    numbers, see `Log.note_draw`; "outside" where it does something that cannot be undone. lent: which
    arguments are containers of the program's, by position or keyword, that it may read and not change. frames: see
    `called_from`."""
    results = _LOG.results
    if results is None and not lent:
        return called_from(frames, function, args, kwargs) if frames else function(*args, **kwargs)
    if results is not None and index is not None and index in results:
        return results.result(index, function, args)
    name = name_of(function, args)
    arguments = [Lent(kwargs[at] if isinstance(at, str) else args[at], name, written=True) for at in lent]
    if results is not None and effect == "random":
        results.note_draw(function, args)
    value = called_from(frames, function, args, kwargs) if frames else function(*args, **kwargs)
    if results is not None:
        _note(results, index, function, args, kwargs, effect, value)
    if arguments:
        check_lent(arguments)
        lent_values = _LOG.lent if results is None else results.lent
        if lent_values is not None:
            lent_values += [Lent(one.container, name) for one in arguments]
    return value


def _note(log: Log, index: int | None, function: Callable, args: tuple, kwargs: dict, effect: str, value: Any) -> None:
    """Writes a call that has been made into a log."""
    is_effect = effect == "outside"
    if is_effect or index is not None and not (effect and _may_draw(function)):
        arrays = _arrays(function, args, kwargs) if is_effect else {}
        operands = tuple(OfKind(type(a)) if hasattr(type(a), "requires_grad") else a for a in args)
        log.note(Entry(function, operands, value, is_effect, index, None, arrays, log.where))
    if index is not None:
        log.keep(index, function, args, value)


def _may_draw(function: Callable) -> bool:
    """Whether a function that gives another value in each call may draw from a generator, as a clock does not."""
    owner = getattr(function, "__self__", None)
    return not isinstance(owner, (types.ModuleType, type)) or owner.__name__.startswith(("random", "numpy"))


def _arrays(function: Callable, args: tuple, kwargs: dict) -> dict[int | str, tuple[numpy.ndarray, numpy.ndarray]]:
    """The arrays that a call was given, with copies of what is in them behind it."""
    operands = (*enumerate(args[2:] if function is call_method else args), *kwargs.items())
    return {key: (a, a.copy()) for key, a in operands if isinstance(a, numpy.ndarray) and a.flags.writeable}


Frames = tuple[tuple[str, int, str], ...]  # file, line and function


def called_from(frames: Frames, function: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a function that writes down its caller, called from frames of the user's, the innermost first."""
    call = functools.partial(function, *args, **kwargs)
    for frame in frames:
        call = functools.partial(_caller(*frame), call)
    return call()


@functools.lru_cache(maxsize=1024)
def _caller(file: str, line: int, name: str) -> Callable:
    """A function that calls what it is given, at a line of a file."""
    caller = lambda call: call()  # noqa: E731 - all of it is one line
    code = caller.__code__.replace(co_filename=file, co_firstlineno=line, co_name=name, co_qualname=name)
    return types.FunctionType(code, {})


def name_of(function: Callable, args: tuple = ()) -> str:
    """What messages call a function, or an object of a class in C that is called as one. args: of `call_method`, which
    name the method."""
    return args[1] if function is call_method and args else getattr(function, "__name__", type(function).__name__)


def _called(function: Callable, args: tuple) -> tuple:
    """What tells one call from another: a function that a program makes is another object in each capture."""
    called = function.__code__ if type(function) is types.FunctionType else function
    return called, args[1] if function is call_method or function is getattr else None


class Kind(str):
    """The type of a host call's value that a program is compiled for, in words, with the metadata of a tensor: "?" is
    any size."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        pattern = re.escape(self).replace(r"\?", r"(\d+|\?)")
        return isinstance(other, str) and re.fullmatch(pattern, other) is not None

    __hash__ = str.__hash__


def kind_of(value: Any, any_size: Collection[int] = ()) -> Kind:
    """any_size: dimensions of a tensor whose size may be any."""
    t = type(value)
    if hasattr(t, "requires_grad") and hasattr(t, "stride"):
        shape = ", ".join("?" if i in any_size else str(n) for i, n in enumerate(value.shape))
        return Kind(f"{t.__qualname__} {value.dtype} [{shape}] {value.device} {value.requires_grad}")
    return Kind(t.__qualname__)


def next_or_end(iterator: Iterator) -> tuple | None:
    """A tuple of the next element, None at the end."""
    return next(((element,) for element in iterator), None)


def call_method(value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """`value.name(*args, **kwargs)`."""
    return getattr(value, name)(*args, **kwargs)


def call_function(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`."""
    return function(*args, **kwargs)


def _run(
    index: int | None, function: Callable, args: tuple, kwargs: dict, kind: str, decision: int | None,
    effect: str = "", lent: Collection[int | str] = (), frames: Frames = (),
) -> Any:  # fmt: skip
    """The result of a host call in a program that runs: from its log, else of the call itself."""
    value = taken_from_log(index, function, args, kwargs, effect, lent, frames)
    if value is None and kind == "NoneType":
        return None
    kind_now = kind_of(value)
    if not (str.__eq__(kind_now, kind) or Kind(kind) == kind_now):
        if decision is None:
            raise RuntimeError(f"{name_of(function)}() returned a {kind_now} where a {kind} was expected")
        raise OtherPath(decision, kind_now)
    return value


host_call = Symbol(
    "host_call", is_prim=True,
    tags=(OpTags.DONT_DCE, OpTags.DECISION), fn=_run,
)  # fmt: skip
