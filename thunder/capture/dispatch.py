"""Dispatch: what a capture knows of the functions that the program calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
    now. library: the call of the standard library that runs. is_in_cache: whether values from outside are computed by a
    function that keeps its results.
    """

    __slots__ = ("handlers", "replacements", "patched", "reading", "library", "_cached")

    def __init__(self, handlers: dict[int, Callable], replacements: dict[Any, Any], patched: dict[str, Any]):
        self.handlers, self.replacements, self.patched = handlers, replacements, patched
        self.reading: Reading | None = None
        self.library: LibraryCall | None = None
        self._cached = 0

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
