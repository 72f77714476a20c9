"""Inference mode inside of a program: tensors that it makes there are inference tensors outside, too."""

from __future__ import annotations

import torch

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import Recorder


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
