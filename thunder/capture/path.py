"""Path: the decisions by data of one capture, and what host calls and eager calls have to do with each other."""

from __future__ import annotations

import abc
from typing import Any

import numpy

from thunder.capture.world import Source
from thunder.core.host_calls import HostProxy, Lent
from thunder.core.paths import Decision
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, numbers_in, proxies_in
from thunder.core.symbol import BoundSymbol
from thunder.ops.eager_calls import Outcome, Shown


class Path(abc.ABC):
    """The decisions of one capture, in order. It is the recorder's `decide`.

    expected: the decisions of a program that a call has left at the last of them: they are answered as there.
    may_not_decide: whether the program would have decided, and neither this call nor one of its ranks may by itself.
    """

    def __init__(self, expected: tuple[Decision, ...]):
        self.expected = expected
        self.taken: list[Decision] = []
        self.may_not_decide = False
        self.why = ""  # it may not decide, where that is not plain to see
        self.held: set[Proxy] = set()  # objects that eager calls give, and what these give
        self.shown: dict[TensorProxy, None] = {}  # whose memory such objects may show
        self.watched: list[tuple[TensorProxy, TensorProxy]] = []
        self.lent: list[Lent] = []  # the program's own containers
        self.values_of: dict[HostProxy, TensorProxy] = {}  # arrays with the values of tensors
        self.sizes: dict[str, int] = {}  # of tensors that host calls give, see `arrays.any_size`
        self.arrays: list[Any] = []  # NumPy's, whose memory tensors of the program share
        self._settled: dict[HostProxy, Any] = {}
        # what a text is made of: numbers of the arguments, and sources of values from outside (see `changing`)
        self._made_of: dict[HostProxy, list[NumberProxy | Source]] = {}
        self._sources: dict[HostProxy, Source] = {}  # of values from outside

    def note_text(self, result, pure: bool, operands) -> None:
        """A host call gives a text. Where nothing but numbers of the arguments is in it, the prologue decides by it."""
        if not pure or type(result) is not HostProxy or result.kind is not str:
            return
        texts, numbers = proxies_in(operands, []), numbers_in(operands, [])
        if all(text in self._made_of for text in texts):  # data-dependent numbers are among these
            self._made_of[result] = [*numbers, *(n for text in texts for n in self._made_of[text])]

    def comes_from(self, value: HostProxy, source: Source) -> None:
        """A value of the host stands for one from outside."""
        self._sources[value] = source
        if not issubclass(value.kind, numpy.ndarray):  # whose content changes
            self._made_of[value] = [source]

    def is_of_arguments(self, value: HostProxy) -> bool:
        """Whether the arguments alone say what a value of the host is, so that the prologue can ask for it."""
        return value in self._made_of

    def source_of(self, value: HostProxy) -> Source | None:
        return self._sources.get(value)

    def hold(self, result: Any) -> None:
        """An eager call gives it; where it is an object, what it gives is such an object, too."""
        if type(result) is HostProxy:
            self.held.add(result)

    def share(self, array: Any) -> None:
        """A tensor of the program is in the memory of this array, where it is one."""
        if isinstance(array, numpy.ndarray):
            self.arrays.append(array)

    def lend(self, container: Any) -> None:
        """Host code is given a copy of a container, and may keep it: the program must not change it any more."""
        self.lent.append(Lent(container, ""))

    # --- filled in by `thunder.capture.decisions`
    @abc.abstractmethod
    def at_capture(self, number: NumberProxy) -> int | float | None:
        """The number in the call that is captured, by which nothing is decided. None where that is not known."""

    @abc.abstractmethod
    def host_value(self, proxy: HostProxy) -> Any:
        """The value that the program goes on with."""

    @abc.abstractmethod
    def value_of(self, proxy: Proxy) -> Any:
        """The value of a proxy at capture."""

    @abc.abstractmethod
    def knows(self, proxy: Proxy, value: Any, ran: BoundSymbol | None = None) -> None:
        """The value of a proxy. ran: the bound symbol that gives it, whose operations have run."""

    @abc.abstractmethod
    def equals(self, proxy: Proxy, other: Proxy) -> None:
        """A proxy has the value of another."""

    @abc.abstractmethod
    def take_kind(self, name: str, kind: str) -> int:
        """The number of a decision by the type of a host call's result, which the host call checks."""

    @abc.abstractmethod
    def run_host_call(
        self, index: int | None, function: Any, args: tuple, kwargs: dict, effect: str, lent: tuple, frames: tuple
    ) -> Any:
        """The result of a host call that is not recorded yet, after those before it."""

    @abc.abstractmethod
    def run_eager_call(self, index: int, function: Any, args: tuple, kwargs: dict, how: tuple, shown: Shown) -> Outcome:
        """The outcome of an eager call that is not recorded yet, after the calls before it."""

    @abc.abstractmethod
    def watch(self, p: TensorProxy) -> None:
        """Host code has seen memory of a tensor: the program must not write to it any more."""

    @abc.abstractmethod
    def keep_alive(self) -> None:
        """At the end of the program: objects that eager calls gave may show memory of these tensors."""

    @abc.abstractmethod
    def check_watched(self) -> None:
        """At the end of the program: refuses writes to what host code has seen."""
