"""Capture: what the functions of this package may read and call of the capture that runs.

A capture has parts, each a class of one file with its own state: `World` (where values come from, and what was asked),
`Effects` (what the program writes to the outside), `Recording` (where operations go), `Dispatch` (of calls), `Path`
(which way it goes by data), `Engine` (its graphs for backward), `Modes` (PyTorch's), `Fallbacks` (what is called as it
is), `Tensors`, `Containers`, `Numbers` and `Locks`. `thunder.capture.host` makes the parts and fills in the methods.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch

from thunder.capture.dispatch import Dispatch, Fallbacks, LibraryCall
from thunder.capture.effects import Effects
from thunder.capture.engine import Engine
from thunder.capture.locks import Locks
from thunder.capture.path import Path
from thunder.capture.recording import Modes, Recording
from thunder.capture.state import Containers, Known, Numbers, Outside, Request, Tensors
from thunder.capture.world import Source, World
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Recorder
from thunder.interpreter import Host


class Guarded(Protocol):
    """What a prologue is written from: a capture, or a program on disk that asks the same in this process."""

    world: World
    request: Request
    outside: Outside
    tensors: Tensors
    numbers: Numbers

    def guarded_tensor(self, source: Source) -> torch.Tensor:
        """The tensor that the prologue checks at a source."""
        ...

    def distinct_groups(self) -> list[tuple[list[Source], str]]:
        """Objects that must stay apart."""
        ...


class Capture(Host, abc.ABC):
    """One capture of a program.

    compiling: the answer of `torch.compiler.is_compiling()`. filters: the filters of warnings, which the program may
    replace. fresh: ids of functions that the program made; made: these functions.
    """

    request: Request
    compiling: bool
    filters: Any
    world: World
    effects: Effects
    recording: Recording
    path: Path
    engine: Engine
    dispatch: Dispatch
    fallbacks: Fallbacks
    outside: Outside
    tensors: Tensors
    numbers: Numbers
    containers: Containers
    known: Known
    locks: Locks
    modes: Modes
    fresh: set[int]
    functions: dict[int, weakref.ref]
    sharp_edges: list[str]
    limit: int

    @property
    def recorder(self) -> Recorder:
        """The recorder that operations go to."""
        return self.recording.recorder

    def is_freed(self, value: TensorProxy) -> bool:
        """Whether somebody outside of the program gets a value with a graph that the program has freed."""
        return value not in self.tensors.real and self.engine.is_freed(self.recorder, value)

    # --- values
    @abc.abstractmethod
    def read(self, value: Any, source: Source) -> Any:
        """A value from a source, as the program may hold it."""

    @abc.abstractmethod
    def reach(self, source: Source) -> Any:
        """The value at a source, as the program may hold it; MISSING, asked, where there is none."""

    @abc.abstractmethod
    def elements(self, value: Iterable) -> list:
        """The elements of a set from outside."""

    @abc.abstractmethod
    def lift(self, value: Any) -> Any:
        """The proxy of a tensor that came from nowhere the program can name: it is pinned."""

    @abc.abstractmethod
    def note_own(self, value: Any) -> Any:
        """The value, a function that the program made."""

    @abc.abstractmethod
    def slot(self, t: type, name: str) -> Any:
        """The Python function that implements a special method, or None."""

    # --- operations
    @abc.abstractmethod
    def operation(self, name: str, *operands: Any) -> Any:
        """The result of a special method of a tensor."""

    @abc.abstractmethod
    def tensor_attribute(self, p: TensorProxy, n: str) -> Any:
        """An attribute of a tensor, as user code sees it."""

    @abc.abstractmethod
    def call_operator(self, f: Callable, args: Sequence, kwargs: dict, error: Exception) -> Any:
        """The result of an operator of the user's that could not be typed: it is called as it is."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """The recorder's context follows PyTorch's own modes, which the program switches as it always does."""

    @abc.abstractmethod
    def follow_settings(self, f: Any, result: Any) -> None:
        """PyTorch's function `f` has run, and may have changed a setting."""

    # --- places in the user's code, and trouble
    @abc.abstractmethod
    def own_location(self) -> Any:
        """The place of the innermost frame that is not library code."""

    @abc.abstractmethod
    def user_location(self) -> tuple | None:
        """(filename, line, function, source line) of that place."""

    @abc.abstractmethod
    def sharp(self, reason: str) -> None:
        """Something that a compiled program cannot repeat: listed, warned about, or an error, by option."""

    @abc.abstractmethod
    def refuse(self, reason: str, remedy: str = "") -> NoReturn:
        """Raises CaptureError at the user's line."""
        raise NotImplementedError

    @abc.abstractmethod
    def refuse_whole(self, reason: str, remedy: str = "") -> NoReturn:
        """`refuse`, where no function around the line would do the same if it were called as it is."""
        raise NotImplementedError

    @abc.abstractmethod
    def note_library(self, entered: LibraryCall) -> bool:
        """Notes a function of the standard library that may run as it is from now on."""

    @abc.abstractmethod
    def note_class(self, cls: type, is_made_here: bool = False) -> bool:
        """Notes a class of the standard library whose objects may be the host's from now on."""

    # --- the end
    @abc.abstractmethod
    def ask_at_the_end(self) -> None:
        """Ask the questions that are known to matter only once the program is captured."""

    @abc.abstractmethod
    def restore_context(self) -> None:
        """Context variables that the program leaves set are as they were."""

    @abc.abstractmethod
    def cell_source(self, f: Any, cell: Any) -> Source:
        """Where a cell of a function from outside is read."""

    @abc.abstractmethod
    def guarded_tensor(self, source: Source) -> torch.Tensor:
        """The tensor that the prologue checks at a source."""

    @abc.abstractmethod
    def distinct_groups(self) -> list[tuple[list[Source], str]]:
        """Objects that must stay apart."""
