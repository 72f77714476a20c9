"""Modes: PyTorch's modes and settings, as a program finds and changes them."""

from __future__ import annotations

import functools
from typing import Any

from thunder import compat
from thunder.capture.inference import Inference


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
