"""Recording: which recorder the operations of a program go to, and the blocks around them that the program has entered.

Transforms of functions, and lines whose operations are needed twice, are recorded apart: in a recorder inside of that
of the program around them. `Modes` are PyTorch's modes and settings, as a program finds and changes them; `Inference`
is about tensors that it makes in inference mode, which are inference tensors outside, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import Proxy, TensorProxy
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


class Inference:
    """What a program makes in inference mode, where it enters the mode itself.

    start: how many bound symbols there were when it entered, None outside. made: results of those behind. leaving: of
    these, by memory, those that leave the program.
    """

    __slots__ = ("around", "start", "values", "leaving")

    def __init__(self) -> None:
        self.around = torch.is_inference_mode_enabled()
        self.start: int | None = None
        self.values: set[Proxy] = set()
        self.leaving: dict[TensorProxy, TensorProxy] = {}

    def follow(self, recorder: Recorder) -> None:
        """The program may have entered or left the mode."""
        if self.around or torch.is_inference_mode_enabled() == (self.start is not None):
            return
        if self.start is None:
            self.start = len(recorder.bound_symbols)
        else:
            self.values.update(p for b in recorder.bound_symbols[self.start :] for p in b.outputs)
            self.start = None

    def is_made(self, recorder: Recorder, p: TensorProxy) -> bool:
        """Whether the memory of a tensor is one that the program makes in inference mode."""
        if self.start is None and not self.values:
            return False
        base, inside = recorder.memory.base(p), () if self.start is None else recorder.bound_symbols[self.start :]
        return base in self.values or any(base in b.outputs for b in inside)

    def first_leaving(self, recorder: Recorder, p: TensorProxy) -> TensorProxy | None:
        """Of the tensors in the memory of one that leaves the program, the first that did; None where they are no
        inference tensors."""
        return self.leaving.setdefault(recorder.memory.base(p), p) if self.is_made(recorder, p) else None


def inference_tensor(x: torch.Tensor) -> torch.Tensor:
    """An inference tensor with the values of `x`, whose memory nobody else has."""
    with torch.inference_mode():
        return x.clone()


class Modes:
    """The modes of one capture.

    dispatch: those that each operator of PyTorch's goes to, when the program begins. functions: how many torch-function
    modes there are then. innermost: the torch-function mode that was seen last, which may be the program's own.
    same_settings: whether PyTorch's settings are those under which the program began. inference: see `Inference`.
    """

    __slots__ = ("dispatch", "functions", "innermost", "same_settings", "inference")

    def __init__(self, recording: Any):
        self.dispatch = compat.dispatch_modes()
        self.functions = 0
        self.innermost: Any = recording
        self.same_settings: functools.partial[bool] = functools.partial(compat.settings_are, {})
        self.inference = Inference()

    def begin(self, settings: dict[str, Any]) -> None:
        """The program begins under these settings."""
        self.same_settings = functools.partial(compat.settings_are, compat.beside_modes(settings))

    def record(self) -> None:
        """The mode that records all calls is entered."""
        self.functions = compat.function_modes()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings under which the program began."""
        return self.same_settings.args[0]

    def is_new(self, mode: Any) -> bool:
        """Whether a torch-function mode is the innermost one since now."""
        changed, self.innermost = mode is not self.innermost, mode
        return changed
