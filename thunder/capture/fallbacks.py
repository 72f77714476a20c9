"""Fallbacks: where a program was refused, and what of it is called as it is."""

from __future__ import annotations

import sys
import types
from typing import Any

from thunder.capture.state import Candidate


class Fallbacks:
    """The eager calls of one capture, and the unit around a refused line that may become one.

    calls: the functions that are called as they are. candidate: what a refusal has named. raises: whether a function
    that was called to see whether it raises by itself does. reaches_back_to: the first operation that a refusal has to
    do with.
    """

    __slots__ = ("calls", "candidate", "raises", "reaches_back_to", "_error", "_left")

    def __init__(self):
        self.calls: list[Any] = []
        self.candidate: Candidate | None = None
        self.raises = False
        self.reaches_back_to = sys.maxsize
        self._error = 0  # the id of an exception on its way: its frames hold objects that end with them
        self._left: list[tuple] = []  # the calls that it has left

    def name(self, unit: types.CodeType | type, again: bool) -> None:
        """A refusal names a unit: see `Candidate`."""
        self.candidate = Candidate(unit, again)

    def note_call(self, function: Any) -> None:
        """A function is called as it is."""
        self.calls.append(function)

    def note_raises(self, raises: bool) -> None:
        """A function was called to see whether it raises by itself."""
        self.raises = raises

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
