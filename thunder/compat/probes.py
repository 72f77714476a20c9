"""Probes: thunder runs functions of PyTorch on tensors of its own, to see how they behave.

The state that the user's code set up is for the user's operations: hooks that pack saved tensors, dispatch modes that
count, autocast, and random numbers that a probe would take from the program.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from thunder import compat


class probing:  # noqa: N801 - a context manager, used as a function
    """The block runs outside of torch-function and dispatch modes, hooks for saved tensors, autocast and inference
    mode, with grad mode as given.

    draws: the block may draw random numbers. It draws them from a generator of its own, so that neither the program nor
    another thread sees the default generator move. own_rules: the `__torch_function__` of tensor subclasses is called.

    Entered for each operation that is typed, so that it looks before it does anything.
    """

    __slots__ = ("grad", "draws", "own_rules", "functions", "before", "stack")

    def __init__(self, grad: bool = False, draws: bool = False, own_rules: bool = False):
        self.grad, self.draws, self.own_rules = grad, draws, own_rules

    def __enter__(self) -> None:
        self.functions = compat.without_function_modes() if self.own_rules else compat.DisableTorchFunction()
        self.functions.__enter__()
        self.stack = self._around() if self._is_observed() else None
        self.before = torch.is_grad_enabled()
        compat.set_grad_enabled(self.grad)

    def _is_observed(self) -> bool:
        return bool(
            self.draws
            or compat.dispatch_modes()
            or compat.any_autocast()
            or torch.is_inference_mode_enabled()
            or compat.saved_hooks(False) is not None
        )

    def _around(self) -> contextlib.ExitStack:
        """The modes that a probe of PyTorch's functions runs under, entered: no hooks, autocast or inference mode of
        the user's."""
        stack = contextlib.ExitStack()
        enter = stack.enter_context
        if compat.saved_hooks(False) is not None:
            enter(torch.autograd.graph.saved_tensors_hooks(_same, _same))  # only the innermost pair is called
        if compat.dispatch_modes():
            enter(compat.without_dispatch_modes())
        if compat.any_autocast():
            enter(compat.autocast_off())
        if torch.is_inference_mode_enabled():
            enter(torch.inference_mode(False))
        if self.draws:
            enter(drawing_apart({}))
        return stack

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        compat.set_grad_enabled(self.before)
        if self.stack is not None:
            self.stack.__exit__(kind, error, traceback)
        self.functions.__exit__(kind, error, traceback)


def quiet() -> contextlib.AbstractContextManager:
    """A block of a probe whose warnings are not shown. Filters of warnings are the process's: a thread that sets and
    resets them takes those away that a block of the user's sets meanwhile, so that only the main thread does."""
    is_main = threading.current_thread() is threading.main_thread()
    return warnings.catch_warnings(action="ignore") if is_main else contextlib.nullcontext()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def drawing_apart(generators: Mapping[torch.device, torch.Generator]) -> contextlib.AbstractContextManager:
    """A block whose operations draw from these generators in the place of the default ones of their devices; from new
    ones of devices that have none here. Only attention and recurrent layers with dropout on GPUs, whose kernels take no
    generator, and dropout there, if the numbers matter, move the default one meanwhile."""
    return _drawing_apart()(generators)


@functools.cache
def _drawing_apart() -> type:
    """A dispatch mode in which random operations draw from generators of its own."""

    class DrawingApart(compat.TorchDispatchMode):
        def __init__(self, generators: Mapping[torch.device, torch.Generator]):
            super().__init__()
            self.generators, self.exact = dict(generators), bool(generators)

        def __torch_dispatch__(
            self, operation: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if torch.Tag.nondeterministic_seeded not in operation.tags:  # type: ignore[attr-defined]
                return operation(*args, **kwargs)
            return self.draw(operation, args, kwargs)

        def draw(self, operation: Callable, args: tuple, kwargs: dict) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            if device.type not in compat.AUTOCAST_KINDS:
                return operation(*args, **kwargs)
            if device not in self.generators:
                self.generators[device] = torch.Generator(device).manual_seed(0)
            generator = self.generators[device]
            taking = _taking_generator(operation)
            if taking is not None:
                if kwargs.get("generator") is None:
                    kwargs = {**kwargs, "generator": generator}
                return taking(*args, **kwargs)
            if operation is torch.ops.aten.native_dropout.default and (device.type == "cpu" or not self.exact):
                return _dropout(generator, *args, **kwargs)
            default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
            before = default.get_state()
            default.set_state(generator.get_state())
            try:
                return operation(*args, **kwargs)
            finally:
                generator.set_state(default.get_state())
                default.set_state(before)

    return DrawingApart


def _dropout(
    generator: torch.Generator, x: torch.Tensor, p: float, train: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout`, which takes no generator, with the numbers that the CPU's kernel draws."""
    share = 1.0 - p if train is not False else 1.0
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).fill_(True)
    if train is not False and x.numel():
        mask.bernoulli_(share, generator=generator)
    return x.mul(mask).mul_(1.0 / share if share else 0.0), mask


@functools.cache
def _taking_generator(operation: Any) -> Callable | None:
    """The overload of an operator that takes a generator by keyword, and otherwise the same arguments."""
    names = [a.name for a in operation._schema.arguments]
    if "generator" in names:
        return operation
    packet = getattr(torch.ops.aten, operation._schema.name.removeprefix("aten::"), None)
    for overload in packet.overloads() if packet is not None else ():
        operator = getattr(packet, overload)
        if sorted(a.name for a in operator._schema.arguments) == sorted([*names, "generator"]):
            return operator
    return None
