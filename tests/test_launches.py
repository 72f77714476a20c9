"""Launches of handwritten kernels on a GPU, without one: what the launcher is given, and how little the host does for it.
Stand-ins take the place of the driver."""

import contextlib
import functools
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import thunder
from thunder import compat
from thunder.executors import handwritten, matvec
from thunder.executors.matvec import few_rows, linears_of_row
from thunder.programs import text

pytest.importorskip("triton")


@pytest.fixture
def driver(monkeypatch):
    """A GPU of capability 9.0 that only writes down what it is asked."""
    state = SimpleNamespace(calls=[], requests=[], device=0)

    def launch_kernel(*arguments):
        state.calls.append(arguments)

    def compiled(request):
        state.requests.append(request)
        kernel = SimpleNamespace(shared=64, scratch=2, load=lambda device: f"{request.name} on {device}")
        return SimpleNamespace(result=lambda: kernel)

    @contextlib.contextmanager
    def on(device):
        before, state.device = state.device, 0
        try:
            yield
        finally:
            state.device = before

    for name, value in {
        "current_device": lambda: 0,
        "get_device_capability": lambda device: (9, 0),
        "device": on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(handwritten, "interpreting", lambda: False)
    monkeypatch.setattr(handwritten, "binary_of", compiled)
    monkeypatch.setattr(compat, "current_device", lambda: state.device)
    monkeypatch.setattr(compat, "current_stream", lambda index: 7)
    monkeypatch.setattr(compat, "launch_kernel", launch_kernel, raising=False)
    monkeypatch.setattr(compat, "set_device", lambda index: None)
    for function in (few_rows, linears_of_row):
        monkeypatch.setattr(function, "_variants", {})
        monkeypatch.setattr(function, "_unusual", {})
        monkeypatch.setattr(function, "_usual", None)
    return state


def row(k=64):
    return torch.ones(1, 1, k)


def test_a_launch_passes_addresses_and_numbers(driver):
    """PyTorch's launcher gets the addresses and the numbers that are no constants, and nothing for the memory that a
    kernel could ask for."""
    x, w, b = row(), torch.ones(40, 64), torch.ones(40)
    for _ in range(2):
        out = few_rows(x, w, b)
        assert out.shape == (1, 1, 40)
        addresses = [t.data_ptr() for t in (x, w, w, w, b, out)]
        assert driver.calls.pop() == (
            "_one_row on 0", 40, 1, 1, 1, 64, "OOOOOOiiiOO", (*addresses, 40, 40, 40, None, None), 7
        )  # fmt: skip
    (request,) = driver.requests
    assert request.arguments[:6] == (("*fp32", True),) * 6


def test_a_thread_is_given_the_context_of_its_device(driver, monkeypatch):
    """PyTorch's launcher takes that of device 0 in a thread that has none."""
    inputs = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(compat, "current_device", lambda: 1)
    monkeypatch.setattr(compat, "set_device", inputs.append)
    few_rows(row(), torch.ones(40, 64))
    assert inputs == [1] and driver.calls[0][0] == "_one_row on 1"


def test_other_arguments_have_functions_of_their_own(driver):
    """By size, type, strides, alignment and the current device; those of a kind that was there before have it again."""
    x, w = row(), torch.ones(40, 64)
    moved = torch.ones(65)[1:].view(1, 1, 64)
    for operand in (x, moved, x.half(), torch.ones(1, 1, 128)[..., ::2]) * 2:
        few_rows(operand, w.to(operand.dtype))
    aligned = [[a for _, a in r.arguments[:2]] for r in driver.requests]
    assert aligned == [[True, True], [False, True], [True, True], [True, True]]
    assert len(driver.calls) == 8
    driver.device = 1
    few_rows(x, w)
    assert driver.device == 1 and len(driver.calls) == 9


def test_what_is_not_dense_is_left_to_pytorch(driver):
    torch.manual_seed(0)
    x, w = torch.randn(1, 1, 64), torch.randn(64, 40).t()
    for _ in range(2):
        torch.testing.assert_close(few_rows(x, w), torch.nn.functional.linear(x, w))
    assert not driver.calls


def python_calls(run):
    """The names of the functions of Python that a call runs, and how many built-in ones it calls."""
    names, builtin = [], []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            builtin.append(argument.__name__)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names, builtin[:-1]  # without setprofile


def test_what_the_host_does_for_a_launch(driver):
    """Two functions of Python, of which one is the text that was made for such arguments: it takes addresses, allocates
    and launches. The stand-ins are functions of Python too."""
    x, w, v, b = row(), torch.ones(40, 64), torch.ones(8, 64), torch.ones(40)
    stand_ins = ["<lambda>", "<lambda>", "<lambda>", "launch_kernel"]  # device, memory, stream
    for function, inputs, views in (
        (few_rows, (x, w), []),
        (few_rows, (x, w, b), []),
        (linears_of_row, (x, w, v), [1]),
    ):
        run = functools.partial(function.for_call(), *inputs)
        run()
        names, builtin = python_calls(run)
        assert names == ["__call__", "launch", *stand_ins]
        assert builtin == [
            "check", *["data_ptr"] * len(inputs), "empty_strided", "data_ptr", "append", *["split_with_sizes" for _ in views]
        ]  # fmt: skip


def test_each_call_of_a_program_has_a_function_of_its_own(driver, monkeypatch):
    """So layers of several sizes do not look for their launches. Programs from the disk have them as well.

    The executor is thunder's own, which takes all linear layers of one row: the first call with one of a user's
    compares its results (`thunder.transforms.check_results`), and does so before a call has its function."""
    monkeypatch.setattr(matvec.MatvecExecutor, "_checker", lambda self, x, weight, bias=None: True)

    def layers(x, a, b, c):
        for w in (a, b, c):
            x = torch.nn.functional.linear(x, w)
        return x

    inputs = row(), torch.ones(40, 64), torch.ones(24, 40), torch.ones(64, 24)
    compiled = thunder.jit(layers, executors=[matvec.MatvecExecutor("everywhere", usable=lambda device: True)])
    with torch.no_grad():
        compiled(*inputs)
    trace = thunder.last_traces(compiled)[-1]
    assert [f"few_rows_linear{n}(" in trace.python() for n in ("", "_1", "_2", "_3")] == [True] * 3 + [False]
    other = text.function_of(json.loads(json.dumps(text.written_text(trace, {}, {}))))
    with torch.no_grad():
        other(*inputs)
        assert len(driver.calls) == 6
        for run in (compiled, other):
            names, _ = python_calls(lambda run=run: run(*inputs))
            assert names.count("launch") == 3 and "_by_strides" not in names
    assert len(driver.calls) == 12 and len({*driver.requests}) == 3


def test_steps_know_all_tensors():
    """A tensor that an operation computes otherwise would become a constant of its text."""

    @handwritten.launching
    def wrong(steps, x):
        return x + 1

    with pytest.raises(AssertionError, match="do not know a tensor"):
        wrong(torch.ones(2))


def test_other_arguments_than_tensors_are_compared():
    seen = []

    @handwritten.launching
    def scaled(steps, x, pair, factor, dtype=None):
        seen.append((factor, dtype))
        return steps.call(torch.mul, pair[1], factor), steps.call(torch.add, x, pair[0])

    x, pair = torch.ones(2), [torch.full((2,), 2.0), torch.full((2,), 3.0)]
    for factor, dtype in ((2, None), (2.0, None), (2, torch.float32), (True, None)) * 2:
        times, plus = scaled(x, pair, factor, dtype)
        torch.testing.assert_close(times, pair[1] * factor)
        torch.testing.assert_close(plus, x + pair[0])
    assert seen == [(2, None), (2.0, None), (2, torch.float32), (True, None)]
    assert [type(factor) for factor, _ in seen] == [int, float, int, bool]
    with pytest.raises(IndexError):
        scaled(x, pair[:1], 2)
