"""The state outside of a program that its meaning depends on: grad mode, default dtype, autocast, torch-function modes,
tracing by others."""

from __future__ import annotations

import contextlib
import operator
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.compat.names import AtFirstUse

MODES = (
    "grad mode",
    "inference mode",
    "default dtype",
    "autocast",
    "torch-function modes or default device",
    "placement of parameters, and no_sync,",
    "tracing by others",
    "the number of attributes of torch.Tensor, some of which are the user's,",
    "the number of derivatives and implementations that were registered since programs were compiled",
)
_data_parallel: tuple | None = None
_registrations = 0


def set_data_parallel(state: tuple) -> None:
    """The part of thunder.distributed in the key of compiled programs."""
    global _data_parallel
    _data_parallel = state


def note_registration() -> None:
    """A derivative or an implementation is another than compiled programs have: calls compile again."""
    global _registrations
    _registrations += 1


@AtFirstUse
def modes_key() -> Callable[[], tuple]:
    """The state outside of a program that its meaning depends on: grad mode, inference mode, default dtype, autocast,
    torch-function modes, data parallelism, whether others trace or transform operations, which guards on tensors do not
    tell, registrations, and methods of torch.Tensor that the user has replaced: most are inherited, so that there are
    more. Where `torch.compiler.set_stance` is in force, its stance stands behind them: see `without_stance`."""
    forward_ad = torch.autograd.forward_ad
    any_autocast, autocast_state, function_modes = compat.any_autocast, compat.autocast_state, compat.function_modes
    functorch_level, tracing, dispatch_modes = compat.functorch_level, compat.tracing_state, compat.dispatch_modes
    methods, imported = vars(torch.Tensor), sys.modules
    grad, inference, dtype = torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype

    def key() -> tuple:
        modes = (
            grad(),
            inference(),
            dtype(),
            autocast_state() if any_autocast() else None,
            _stack_of_modes() if function_modes() else None,
            _data_parallel,
            functorch_level() is not None
            or forward_ad._current_level >= 0
            or tracing() is not None
            or dispatch_modes()
            and _proxy_mode() is not None,
            len(methods) - ("__slotnames__" in methods),  # which copies of tensors leave behind
            _registrations,
        )
        dynamo = imported.get("torch._dynamo.eval_frame")  # which set_stance imports
        if dynamo is None or (stance := dynamo._stance.stance) == "default":
            return modes
        return (*modes, stance)

    return key


def compile_modes_key(make: Callable) -> None:
    """`modes_key` is a function in C++ from now on, which calls this one where the state that it reads has changed.
    make: `modes_key_of` of the extension."""
    own = globals()
    watched = (vars(torch.autograd.forward_ad), "_current_level"), (own, "_data_parallel"), (own, "_registrations")
    key = make(compat.modes_key, watched, vars(torch.Tensor), sys.modules, "torch._dynamo.eval_frame", "_stance")
    setattr(compat, "modes_key", key)  # noqa: B010 - a function of this package, which it declares


def without_stance(modes: tuple) -> tuple[tuple, str]:
    """The modes of a call, and the stance that `torch.compiler.set_stance` wants of compiled functions."""
    return modes[: len(MODES)], modes[-1] if len(modes) > len(MODES) else "default"


def _proxy_mode():
    return compat.dispatch_mode(compat.DispatchModeKey.PROXY)


def _stack_of_modes() -> tuple:
    entries = []
    for i in range(compat.function_modes()):
        mode = compat.function_mode_at(i)
        entries.append((type(mode), str(getattr(mode, "device", None)) if hasattr(mode, "device") else id(mode)))
    return tuple(entries)


def describe_modes(old: tuple, new: tuple) -> str:
    """The difference between two keys in words."""
    return ", ".join(f"{name} was {a}, is {b}" for name, a, b in zip(MODES, old, new, strict=True) if a != b)


def grad_enabled_in(modes: tuple) -> bool:
    return modes[0]


def inference_in(modes: tuple) -> bool:
    return modes[1]


def autocast_in(modes: tuple):
    return modes[3]


def function_modes_in(modes: tuple) -> bool:
    return modes[4] is not None


@contextlib.contextmanager
def without_function_modes():
    """The block runs without torch-function modes, those of subclasses' own rules stay."""
    modes = [compat.pop_function_mode() for _ in range(compat.function_modes())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            compat.push_function_mode(mode)


class _Modes:
    """The modes of this thread: torch-function and dispatch modes, whether torch functions are disabled, inference
    mode, autocast and settings."""

    def __init__(self) -> None:
        self.disabling = compat.DisableTorchFunction()
        with self.disabling:  # which remembers what it replaces
            self.functions, self.dispatching = _function_modes(), _dispatch_modes()
            self.inference = torch.is_inference_mode_enabled()
            self.settings, self.nesting = compat.settings(), compat.autocast_nesting()

    def restore(self) -> None:
        """Sets the thread's modes and settings to those that were noted."""
        _replace(_function_modes(), self.functions, compat.pop_function_mode, compat.push_function_mode)
        _replace(_dispatch_modes(), self.dispatching, compat.pop_dispatch_mode, compat.push_dispatch_mode)
        with compat.DisableTorchFunction():
            if torch.is_inference_mode_enabled() != self.inference:
                guard = torch.inference_mode(self.inference)
                guard.__enter__()
                _GUARDS.append(guard)
            compat.set_settings(self.settings)
            for _ in range(compat.autocast_nesting() - self.nesting):
                torch.autocast_decrement_nesting()
        self.disabling.__exit__(None, None, None)


_GUARDS: list[torch.inference_mode] = []  # which leave the mode that they enter where nothing holds them


def _function_modes() -> list:
    return [compat.function_mode_at(i) for i in range(compat.function_modes())]


def _dispatch_modes() -> list:
    return [compat.dispatch_mode_at(i) for i in range(compat.dispatch_modes())]


def _replace(now: list, before: list, pop: Callable[[], Any], push: Callable[[Any], None]) -> None:
    """Makes a stack of modes, which holds those of `now`, hold those of `before`."""
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    for _ in now:
        pop()
    for mode in before:
        push(mode)


@contextlib.contextmanager
def modes_restored():
    """The block leaves settings, autocast, inference mode, torch-function and dispatch modes as they were before: a
    program that fails half way leaves its own on, and so does a context manager of which an exception leaves
    `__exit__`, such as a signal handler's."""
    before = _Modes()
    try:
        yield
    except BaseException as error:
        _close_left(error)
        raise
    finally:
        try:
            before.restore()
        except BaseException:
            before.restore()  # a signal handler has raised half way
            raise


def _close_left(error: BaseException | None) -> None:
    """Ends context managers whose `__exit__` the exception has left before they did: it holds them, and they would
    restore modes when it goes."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code is _EXIT:
                with contextlib.suppress(Exception):
                    frame.f_locals["self"].gen.close()
        error = error.__context__


_EXIT = contextlib._GeneratorContextManager.__exit__.__code__  # of functions with @contextmanager


def default_device() -> torch.device | None:
    """The device of the innermost `with torch.device(...)` or torch.set_default_device, None where there is none."""
    for i in reversed(range(compat.function_modes())):
        mode = compat.function_mode_at(i)
        if type(mode) is compat.DeviceContext:
            return mode.device
    return None


def is_exporting() -> bool:
    """Whether torch.export, an exporter of ONNX or torch.jit.trace records this call."""
    return torch.compiler.is_exporting() or compat.tracing_state() is not None


def foreign_tracer(args: tuple, kwargs: dict) -> str | None:
    """The name of another system that is tracing or transforming this call (torch.func, forward mode, a FakeTensorMode,
    torch.export, make_fx), or None."""
    if compat.in_functorch():
        return "a torch.func transform"
    if compat.in_forward_mode():
        return "forward-mode differentiation"
    if compat.tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if compat.dispatch_mode(compat.DispatchModeKey.FAKE) is not None:
        return "a FakeTensorMode"
    if _proxy_mode() is not None:  # which does not see kernels of executors
        return "make_fx"
    try:
        leaves = compat.tree_leaves((args, kwargs))
    except RecursionError:  # a list that holds itself
        return None
    return "a FakeTensorMode" if any(isinstance(x, compat.FakeTensor) for x in leaves) else None
