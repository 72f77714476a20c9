"""A program that is given up behind effects runs again in the interpreter, which takes what has happened from a log."""

import collections
import email.message
import io
import itertools
import json
import queue
import random
import threading
import time

import numpy as np
import pytest
import torch

import thunder
from thunder.capture.replay import Replay, replay
from thunder.core.host_calls import Entry, Log
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
    log.note(Entry(noted, (1,), "happened", True, where=seen.places[1]))
    assert Replay(log).interpret(twice) == (10, "happened") and CALLS == [1]


def test_a_call_without_a_place_is_the_next_one():
    log = Log()
    CALLS.clear()
    log.note(Entry(noted, (1,), "happened", True))
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


SEEN = queue.SimpleQueue()  # what others see


def a_mail(value):
    mail = email.message.EmailMessage()
    mail["Subject"] = f"{value:.1f}"
    SEEN.put(mail.as_string())
    return len(mail), mail["Subject"], "Subject" in mail


def a_clock(value):
    now = time.perf_counter()
    SEEN.put(now)
    same = SEEN.get() == now
    SEEN.put(1)
    return same


def a_list(value):
    values = json.loads(f"[1, {value}]")
    SEEN.put(0)
    shown = f"{values} {values!r} {len(values)}", [*values], 1 in values
    values.append(3)
    values += [4]
    values[0] = 2
    del values[1]
    SEEN.put(len(values))
    return *shown, str(values), list(values), [v for v in values], bool(values), values + [1]


def an_object(value):
    SEEN.put(collections.UserDict(a=1))
    table = SEEN.get()
    table["z"], table.color, table.n = value, "red", 1
    table.n += 1
    SEEN.put(len(table))
    del table["a"]
    return dict(table), table.color, table.n, hasattr(table, "color"), sorted(table)


def a_leaked_queue(value):
    ours = queue.SimpleQueue()
    ours.put(value)
    SEEN.put(ours)
    ours.put(2.0)
    SEEN.put(SEEN.get().qsize())
    return ours.qsize(), ours.get(), ours.qsize()


def steps(value):
    SEEN.put(itertools.count())
    counter = SEEN.get()
    first = next(counter)
    SEEN.put(value)
    return first, next(counter)


def a_file_of_its_own(value):
    with io.StringIO() as file:
        file.write("a")
        SEEN.put(file.getvalue())
        print(value, file=file)
        return file.getvalue(), file.tell()


def numbers(value):
    first, values = random.random(), np.zeros(3)
    values += value
    SEEN.put(first)
    values[0] = 7
    SEEN.put(1)
    return first, random.random(), values.tolist()


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
@pytest.mark.parametrize(
    "part", [a_mail, a_clock, a_list, an_object, a_leaked_queue, steps, a_file_of_its_own, numbers]
)
def test_what_the_program_has_done_to_an_object_of_the_host_is_done_once(part):
    def f(x):
        told = part(x.sum().item())
        return goes_elsewhere(x) * State.calls, told

    def calls(function):
        State.calls, rows = 0, []
        for n in range(3):
            random.seed(n)
            y, told = function(torch.full((3,), n + 1.0))
            seen = [SEEN.get() for _ in range(SEEN.qsize())]
            rows.append((y.tolist(), told, seen))
        return rows

    expected = calls(f)
    assert calls(thunder.jit(f, fallback="eager")) == expected


def test_an_effect_that_is_not_met_again_is_told():
    log = Log()
    CALLS.clear()
    log.note(Entry(SEEN.put, (1,), None, True))
    with pytest.warns(thunder.errors.FallbackWarning, match=r"did not meet put\(\) again"):
        replay(twice, (), {}, log)


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
