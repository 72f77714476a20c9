"""Engine: the graphs of a program that calls backward, as PyTorch's engine would know them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Recorder
from thunder.transforms.derivative import Derivative


class Engine:
    """The graphs of one program. known: operation of the forward -> the derivative it belongs to.
    freed: derivatives whose saved values are gone.

    leaves: the tensors from outside whose `.grad` is read or written, by id. hooked: those whose hooks would be called
    if there were any. heads: see `hooks.node`. retained: values whose gradient a backward leaves in `.grad` -> the
    tensor. ran: those that a backward has reached.
    """

    def __init__(self):
        self.leaves: dict[int, TensorProxy] = {}
        self.hooked: dict[TensorProxy, None] = {}
        self.heads: dict[TensorProxy, Proxy] = {}
        self.retained: dict[TensorProxy, TensorProxy] = {}
        self.ran: set[TensorProxy] = set()
        self.known: dict[BoundSymbol, Derivative] = {}
        self.freed: dict[Derivative, None] = {}
        self.used: set[Derivative] = set()
        self.backwards = 0
        self.changed_by_hooks: list[tuple] = []  # (tensor, what its hook has changed), of the backward that runs
        self._gone: set = set()  # results of the freed derivatives' operations
        self._left: dict[TensorProxy, bool] = {}  # results of the program -> whether their graphs are freed

    def free(self, steps: Iterable[Derivative]) -> None:
        for step in steps:
            if step.saves:
                self.freed[step] = None
                self._gone.update(o for operation in step.forward for o in operation.outputs)

    def is_freed(self, recorder: Recorder, value: TensorProxy) -> bool:
        """Whether somebody outside of the program gets a value with a graph that the program has freed: whether the way
        to its leaves leads through values that are gone."""
        if not self.freed:
            return False
        if value not in self._left and value.requires_grad:
            self._left[value] = self._passes_gone(recorder, value)
        return self._left.get(value, False)

    def _passes_gone(self, recorder: Recorder, value: TensorProxy) -> bool:
        """Whether a way from a value to its leaves, along values that require grad, leads through one that is gone."""
        pending, seen = [value], {value}
        while pending:
            value = pending.pop()
            if value in self._gone:
                return True
            operation = recorder.producer(value)
            inputs = () if operation is None else operation.inputs
            inputs = {i for i in inputs if isinstance(i, TensorProxy) and i.requires_grad}
            pending += inputs - seen
            seen |= inputs
        return False

    def begin_hooks(self) -> None:
        """A backward calls the hooks of its leaves."""
        self.changed_by_hooks.clear()

    def note_changed(self, p: TensorProxy, changed: Any) -> None:
        """The hook of a tensor changes these."""
        self.changed_by_hooks.append((p, changed))

    def close(self) -> None:
        """The program is captured: freed values are not differentiated any more."""
        for value in (*self._gone, *(v for v, gone in self._left.items() if gone)):
            if isinstance(value, TensorProxy):
                value.requires_grad = False
