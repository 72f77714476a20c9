"""A program that is given up behind effects runs again in the interpreter, which takes what has happened from a log."""

import threading

import pytest
import torch

import thunder
from thunder.capture.replay import Replay
from thunder.core.host_calls import Effect, Log
from thunder.interpreter import Host

CALLS: list = []


def noted(x):
    CALLS.append(x)
    return x * 10


def twice():
    first = noted(1)
    return first, noted(1)


class Places(Host):
    """Notes where `noted` is called."""

    def __init__(self):
        super().__init__()
        self.places: list = []

    def enter(self, f, args, kwargs):
        if f is noted:
            self.places.append(self.location())
        return super().enter(f, args, kwargs)


def test_a_call_is_known_by_its_place():
    """Of two calls that look alike the second one has happened."""
    seen, log = Places(), Log()
    seen.interpret(twice)
    CALLS.clear()
    log.effects.append(Effect(noted, None, None, "happened", where=seen.places[1]))
    assert Replay(log).interpret(twice) == (10, "happened") and CALLS == [1]


def test_a_call_without_a_place_is_the_next_one():
    log = Log()
    CALLS.clear()
    log.effects.append(Effect(noted, None, None, "happened"))
    assert Replay(log).interpret(twice) == ("happened", 10) and CALLS == [1]


class State:
    calls = 0


def goes_elsewhere(x):
    State.calls += 1
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return x * 2


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
@pytest.mark.parametrize("steps", [list, lambda file: [next(file), *file], lambda file: [line for line in file]])
def test_a_file_that_was_read_is_not_read_again(steps, tmp_path):
    """An iterator that others see goes on where it stands: its steps have happened, too."""
    (tmp_path / "numbers").write_text("1\n2\n3\n")

    def f(x):
        with open(tmp_path / "numbers") as file:
            for line in steps(file):
                x = x * int(line)
        return goes_elsewhere(x) * State.calls

    State.calls, expected = 0, []
    for _ in range(3):
        expected.append(f(torch.ones(2)))
    State.calls, compiled = 0, thunder.jit(f, fallback="eager")
    for wanted in expected:
        assert torch.equal(compiled(torch.ones(2)), wanted)


def test_an_exception_that_the_program_handles_keeps_nothing_alive():
    """A generator that a frame leaves unfinished ends with the frame, as in eager."""
    left = []

    def numbers():
        try:
            yield from range(2)
        finally:
            left.append("closed")

    def missing():
        raise KeyError

    def program(x):
        steps = numbers()
        for _ in steps:
            break
        try:
            missing()
        except KeyError:
            pass
        return x + 1

    def around(x):
        return program(x), len(left)

    for f in (around, thunder.jit(around)):
        left.clear()
        assert [f(torch.ones(2))[1] for _ in range(3)] == [1, 2, 3]
