"""A special method that a class lacked and gets later changes what the program means."""

import enum

import pytest
import torch

import thunder


def test_truth_and_comparison_of_objects_follow_methods_added_later():
    class Plain:
        pass

    a, b, x = Plain(), Plain(), torch.ones(2)
    truth = thunder.jit(lambda x: x * 2 if a else x)
    equal = thunder.jit(lambda x: x * 2 if a == b else x)
    for _ in range(2):
        assert torch.equal(truth(x), x * 2) and torch.equal(equal(x), x)
    Plain.__bool__ = lambda self: False
    Plain.__eq__ = lambda self, other: True
    assert torch.equal(truth(x), x) and torch.equal(equal(x), x * 2)
    assert thunder.cache_misses(truth) == thunder.cache_misses(equal) == 2


def test_a_hash_and_an_equality_that_only_look_are_interpreted():
    class Key:
        def __init__(self, *parts):
            self.parts = parts

        def __hash__(self):
            return hash(self.parts[0]) ^ hash(self.parts[1])

        def __eq__(self, other):
            if not isinstance(other, Key):
                return NotImplemented
            return self.parts == other.parts

    def program(x, key):
        table = {Key(1, 2): 3, key: 4}
        return x * table[Key(1, 2)] * table[key]

    compiled, x = thunder.jit(program), torch.ones(2)
    for key in (Key(2, 5), Key(1, 2), Key(2, 5)):
        assert torch.equal(compiled(x, key), program(x, key))


class Loose(str, enum.Enum):
    """Members that are equal to their names in any case."""

    LOW = "low"
    HIGH = "high"

    def __eq__(self, other):
        return self.value == (other.value if isinstance(other, enum.Enum) else str(other).lower())

    def __hash__(self):
        return hash(self.value)


def test_members_of_an_enumeration_are_walked_and_found_by_themselves():
    def program(x, name):
        for key in Loose.__members__:
            x = x + (key.lower() == name)
        member = Loose(Loose["HIGH"])
        return x * 2 if member == name else x * 3

    compiled, x = thunder.jit(program), torch.ones(2)
    for name in ("low", "high", "HIGH", "else"):
        assert torch.equal(compiled(x, name), program(x, name))


@pytest.mark.parametrize("base", [dict, list, str, float])
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_text_that_percent_makes_in_python_is_made_in_each_call(base):
    shown = []

    class Noted(base):
        def __str__(self):
            shown.append(1)
            return "noted"

    noted, compiled = Noted(), thunder.jit(lambda x, o: (x + 1, "a %s" % o), fallback="eager")
    for _ in range(3):
        assert compiled(torch.ones(1), noted)[1] == "a noted"
    assert len(shown) == 3
