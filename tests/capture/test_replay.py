"""A program that is given up behind effects runs again in the interpreter, which takes what has happened from a log."""

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
