"""Exceptions that are none of the program's: signal handlers and hooks for saved tensors raise them while it is captured
or runs, and whoever called the program gets them."""

from __future__ import annotations

import contextlib
import signal
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder
from tests import fresh
from thunder.executors.cpp_fuser import CppFuser, KernelRegion
from thunder.kernels import cpp

WEIGHT = torch.linspace(-1, 1, 16).view(4, 4)


def with_autocast(x):
    with torch.autocast("cpu", enabled=False):
        return F.gelu(x @ WEIGHT)


def with_no_grad(x):
    with torch.no_grad():
        scale = x.mean()
    return F.gelu(x @ WEIGHT) * scale


def with_try(x):
    try:
        return F.gelu(x @ WEIGHT)
    except ValueError:
        return x


@pytest.mark.parametrize("f", [with_autocast, with_no_grad, with_try])
def test_a_checkpoint_stops_a_program_that_handles_exceptions(f):
    """The recomputation of a checkpoint ends early by an exception of its hook for saved tensors."""
    compiled = thunder.jit(f, fallback="error")
    x = torch.linspace(-2, 2, 16).view(4, 4).requires_grad_()
    (wanted,) = torch.autograd.grad(f(x).sum(), x)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(checkpoint(compiled, x, use_reentrant=False).sum(), x)
        torch.testing.assert_close(gradient, wanted)


def test_an_error_of_a_hook_is_raised_once():
    calls = []

    def pack(t):
        calls.append(t)
        raise ValueError("a full disk")

    compiled = thunder.jit(with_try, fallback="error")
    x = torch.ones(4, 4, requires_grad=True)
    compiled(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(ValueError, match="a full disk"):
        compiled(x)
    assert len(calls) == 1


class _Alarm:
    """A signal handler that is an object, and raises when it is called."""

    def __call__(self, number, frame):
        raise TimeoutError("too late")


def _rings(*args):
    signal.raise_signal(signal.SIGUSR1)
    return 2.0


@pytest.fixture
def alarm():
    before = signal.signal(signal.SIGUSR1, _Alarm())
    yield
    signal.signal(signal.SIGUSR1, before)


class _Ringing:
    """A value whose length is asked for while it is captured."""

    rings = True

    def __len__(self):
        if _Ringing.rings:
            _rings()
        return 2


def _handles(x, value):
    try:
        return x * len(value)
    except TimeoutError:
        return x


def test_a_signal_handler_raises_while_a_program_is_captured(alarm, monkeypatch):
    from thunder.ops import LTORCH

    monkeypatch.setattr(_Ringing, "rings", False)
    meta, rang = LTORCH["mul"].meta, []

    def ringing(*args, **kwargs):
        if not rang:
            rang.append(_rings())
        return meta(*args, **kwargs)

    monkeypatch.setattr(LTORCH["mul"], "meta", ringing)
    compiled = thunder.jit(_handles)
    with pytest.raises(TimeoutError, match="too late"):
        compiled(torch.ones(2), _Ringing())
    rang.append(None)
    torch.testing.assert_close(compiled(torch.ones(2), _Ringing()), torch.full((2,), 2.0))
    assert len(compiled.programs) == 1


def _dropped_by_a_handler():
    with contextlib.suppress(Exception):
        _rings()


def _dropped_by_a_weak_reference():
    """Python prints an exception of a callback of a weak reference, and goes on."""
    value = {1}
    weakref.finalize(value, _rings)
    del value


def _taken_for_another():
    try:
        _rings()
    except Exception as error:
        raise ValueError("something else") from error


@pytest.mark.parametrize("ring", [_dropped_by_a_handler, _dropped_by_a_weak_reference, _taken_for_another])
def test_an_exception_of_a_signal_handler_arrives_whatever_handles_it(alarm, monkeypatch, ring):
    from thunder.ops import LTORCH

    handler, meta, rang = signal.getsignal(signal.SIGUSR1), LTORCH["mul"].meta, []

    def ringing(*args, **kwargs):
        if not rang:
            rang.append(True)
            ring()
        return meta(*args, **kwargs)

    monkeypatch.setattr(LTORCH["mul"], "meta", ringing)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    compiled = thunder.jit(lambda x: x * 3)
    with pytest.raises(TimeoutError, match="too late"):
        compiled(torch.ones(2))
    assert signal.getsignal(signal.SIGUSR1) is handler
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert len(compiled.programs) == 1


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x):
        try:
            x = self.norm(F.gelu(self.first(x)))
        except ValueError:
            x = x + 1
        return self.last(x) if x.sum() < 1e9 else x


def _first_call(at: int | None = None) -> int:
    """The first call of a module, forward and backward, in which a signal comes at call number `at` of a Python
    function. How many were called."""
    compiled, x, calls = thunder.jit(_Block()), torch.ones(2, 4), 0

    def count(frame, event, argument):
        nonlocal calls
        if event == "call":
            calls += 1
            if calls == at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(count)
    try:
        compiled(x).sum().backward()
    finally:
        sys.setprofile(None)
    return calls


def signals_at_calls():
    """Raises where a call takes a signal's exception, or leaves another handler than it met. Python itself delivers no
    exception that comes while a generator is finalized."""
    finalized = []
    sys.unraisablehook = lambda unraisable: finalized.append(type(unraisable.object) is types.GeneratorType)
    handler = _Alarm()
    signal.signal(signal.SIGUSR1, handler)
    _first_call()
    calls = _first_call()
    for at in range(1, calls - 200, calls // 100):  # the program itself runs at the end
        finalized.clear()
        try:
            _first_call(at)
        except TimeoutError as error:
            assert str(error) == "too late"
        else:
            assert finalized == [True], f"the exception at call {at} of {calls} is lost"
        assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_signal_at_any_call_of_a_compilation_arrives():
    """A TimeoutError is an OSError: what expects a missing file would take it. In a process of its own: PyTorch's context
    managers do not restore their state where an exception comes in the middle of `__exit__`."""
    done = fresh.run("-c", "from tests.test_foreign_exceptions import signals_at_calls as f; f()")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(cpp.unavailable() is not None, reason="no C++ compiler here")
def test_a_signal_while_a_region_waits_for_its_kernels_arrives(alarm, monkeypatch):
    """A TimeoutError is an OSError, as what a compiler raises that is missing."""
    compiled = thunder.jit(lambda x: (x * 2).sin(), executors=[CppFuser("every_region", always=True)], tiers=0)
    compiled(torch.ones(3, 4))
    monkeypatch.setattr(KernelRegion, "_library", _rings)
    columns = torch.ones(4, 3).t()  # for which there are no kernels yet
    with pytest.raises(TimeoutError, match="too late"):
        compiled(columns)
    monkeypatch.undo()
    torch.testing.assert_close(compiled(columns), (columns * 2).sin())


def test_a_program_sees_the_handlers_of_the_process(alarm):
    handler = signal.getsignal(signal.SIGUSR1)
    compiled = thunder.jit(lambda x: (x * 2, signal.getsignal(signal.SIGUSR1)), fallback="error")
    for _ in range(2):
        assert compiled(torch.ones(2))[1] is handler
    assert len(compiled.programs) == 1


@thunder.disable
def _has_a_deadline(x):
    """Python code with a deadline of its own, which it handles."""
    before = signal.signal(signal.SIGUSR1, _Alarm())
    try:
        _rings()
    except TimeoutError:
        return x * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_eager_call_handles_its_own_signals(alarm):
    handler = signal.getsignal(signal.SIGUSR1)
    compiled = thunder.jit(lambda x: _has_a_deadline(x + 1) - 1)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0))
        assert signal.getsignal(signal.SIGUSR1) is handler
    assert len(compiled.programs) == 1


def test_a_signal_handler_raises_while_guards_are_checked(alarm, monkeypatch):
    compiled = thunder.jit(lambda x: x * 2)
    compiled(torch.ones(2))
    entry = compiled.programs[0]
    checks = entry.prologue_fn

    def ringing(*args):
        _rings()
        return checks(*args)

    monkeypatch.setattr(entry, "prologue_fn", ringing)
    with pytest.raises(TimeoutError, match="too late"):
        compiled(torch.ones(2))


@pytest.mark.parametrize("fallback", ["eager", "error"])
def test_a_program_handles_an_operation_that_fails_by_data(fallback):
    """The compiled program has no place for the handler: the original function runs, with the same random numbers."""

    def f(x, index, log):
        noise = torch.rand(3)
        try:
            return x.index_select(0, index) + noise[:1]
        except IndexError:
            return x * 3 + noise
        finally:
            log.append("finally")

    compiled = thunder.jit(f, fallback=fallback)
    for places in ([1], [99], [0], [7]):
        results, logs = [], []
        for g in (f, compiled):
            torch.manual_seed(1)
            logs.append([])
            results.append((g(torch.ones(3), torch.tensor(places), logs[-1]), torch.rand(2)))
        torch.testing.assert_close(results[0], results[1])
        assert logs == [["finally"], ["finally"]]


class _Rescaled(torch.Tensor):
    """Its operations go through `__torch_function__`, where that is on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "seen" if func is torch.cos else super().__torch_function__(func, types, args, kwargs or {})


def _state_of_thread():
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    dispatching = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    modes_on = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return modes, dispatching, modes_on, torch.get_default_dtype(), thunder.core.recording.current_recorder()


class _Notes(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def _with_modes(x, weight):
    with torch.no_grad():
        scale = (x * 2).mean()
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ weight
    with torch.device("cpu"):
        y = y + torch.ones(2)
    return y * scale if scale.item() > 0 else y


@pytest.mark.parametrize("part", range(4))
def test_an_exception_in_any_exit_of_a_context_leaves_the_state_of_the_thread(alarm, part):
    """Wherever a signal handler raises at the beginning of an `__exit__` during a compilation."""
    x, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    calls = 0

    def raises_at(number):
        def hook(frame, event, arg):
            nonlocal calls
            if event == "call" and frame.f_code.co_name == "__exit__":
                calls += 1
                if calls == number:
                    _rings()

        return hook

    def compile_once(number):
        nonlocal calls
        calls, compiled = 0, thunder.jit(_with_modes)
        sys.setprofile(raises_at(number))
        try:
            compiled(x, weight)
        except TimeoutError:
            pass
        finally:
            sys.setprofile(None)
        return calls

    most = compile_once(0)
    assert most > 50
    with torch.device("cpu"), _Notes():
        before = _state_of_thread()
        for number in range(1 + part, most, 4 * max(1, most // 80)):
            compile_once(number)
            assert _state_of_thread() == before, number
            assert torch.cos(torch.ones(2).as_subclass(_Rescaled)) == "seen", number
        torch.testing.assert_close(thunder.jit(_with_modes)(x, weight), _with_modes(x, weight))
