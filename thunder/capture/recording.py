"""Recording: which recorder the operations of a program go to, and the blocks around them that the program has entered.

Transforms of functions, and lines whose operations are needed twice, are recorded apart: in a recorder inside of that
of the program around them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from thunder.core.symbol import Recorder


class Recording:
    """The recorders of one capture.

    recorder: the one that operations go to. outer: those of the program around it, the outermost first. levels: levels
    of torch.func that the program has entered and not left; differentiated: those of `grad` among all that it has
    entered. ranges: names of the profiler's ranges that it has entered.
    """

    __slots__ = ("recorder", "outer", "levels", "differentiated", "ranges")

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.outer: list[Recorder] = []
        self.levels: list[Any] = []
        self.differentiated: list[Any] = []
        self.ranges: list[str] = []

    @property
    def all(self) -> tuple[Recorder, ...]:
        """The recorders, the outermost first."""
        return *self.outer, self.recorder

    @property
    def is_apart(self) -> bool:
        """Whether a part of the program is recorded apart."""
        return bool(self.outer)

    # --- recorders
    def begin(self, inner: Recorder) -> None:
        """Operations go to a recorder inside of the present one."""
        self.outer.append(self.recorder)
        self.recorder = inner

    def end(self) -> Recorder:
        """Operations go to the recorder around the present one again, which is returned."""
        self.recorder = self.outer.pop()
        return self.recorder

    def switch(self, recorder: Recorder) -> None:
        """A level that goes on lets operations go to the program around it for a while, or to itself again."""
        self.recorder = recorder

    @contextlib.contextmanager
    def behind(self, recorder: Recorder) -> Iterator[None]:
        """Inside of the block values of this recorder, too, are known."""
        self.outer.append(recorder)
        try:
            yield
        finally:
            self.outer.remove(recorder)

    def change(self, **fields: Any) -> None:
        """The operations from now on are recorded under another context."""
        self.recorder.context = self.recorder.context.replace(**fields)

    # --- blocks
    def enter(self, level: Any, inner: Recorder) -> None:
        """The program enters a level of torch.func."""
        self.begin(inner)
        self.levels.append(level)

    def leave(self) -> Recorder:
        """The program leaves the innermost level. The recorder around it."""
        self.levels.pop()
        return self.end()

    def differentiate(self, level: Any) -> None:
        """The level is one of `grad`."""
        self.differentiated.append(level)

    def enter_range(self, name: str) -> None:
        self.ranges.append(name)

    def leave_range(self) -> None:
        if self.ranges:
            self.ranges.pop()
