"""A special method that a class lacked and gets later changes what the program means."""

import enum

import pytest
import torch

import thunder
from thunder.errors import CaptureError


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


def test_a_refused_key_names_the_method_that_does_something():
    class Key(dict):
        def __setitem__(self, key, value):
            raise TypeError

        def __eq__(self, other):
            return self is other

        times_hashed = 0

        def __hash__(self):
            self.times_hashed = self.times_hashed + 1
            return hash(tuple(self.items()))

    with pytest.raises(CaptureError, match=r"a hash table is native code that may call .*Key\.__hash__,"):
        thunder.jit(lambda x: x * len({Key(a=1): 2}), fallback="error")(torch.ones(2))


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


class Remembering:
    """Keeps its hash, as many immutable objects of libraries do."""

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts):
        self.parts, self._hash = parts, None

    def __hash__(self):
        if self._hash is None:
            self._hash = hash(self.parts)
        return self._hash

    def __eq__(self, other):
        return type(other) is Remembering and self.parts == other.parts


class RememberingDict(dict):
    _hash = -1

    def __hash__(self):
        if self._hash != -1:
            return self._hash
        object.__setattr__(self, "_hash", hash(frozenset(self.items())))
        return self._hash


def test_a_hash_that_an_object_keeps_is_interpreted():
    def program(x, key):
        table = {Remembering(1, 2): 3.0, RememberingDict(a=1, b=2): 4.0, key: 5.0}
        same = len({Remembering(1), Remembering(1), RememberingDict(a=1)})
        first = Remembering(x.shape[0], 2)
        return x * table.get(first, 7.0) * table[RememberingDict(b=2, a=1)] * table[key] + same, {first: 1}

    compiled, key = thunder.jit(program), Remembering(9)
    hash(key)  # an object from outside that has its hash
    for n in (1, 3, 1, 4):
        result, keys = compiled(torch.ones(n), key)
        expected, expected_keys = program(torch.ones(n), key)
        assert torch.equal(result, expected) and keys == expected_keys

    class Overridden(RememberingDict):
        seen = []

        def items(self):
            self.seen.append(len(self))  # native code would call it once more
            return super().items()

    class Counting(Remembering):
        __slots__ = ("compared",)
        __hash__ = Remembering.__hash__

        def __eq__(self, other):
            self.compared = other
            return super().__eq__(other)

    outside = Remembering(5)  # without its hash: the program would write it there
    for key in (lambda: Overridden(a=1), lambda: Counting(1), lambda: outside):
        with pytest.raises(CaptureError, match=r"a hash table is native code that may call .*__hash__,"):
            thunder.jit(lambda x, key=key: x * len({key(): 2}), fallback="error")(torch.ones(2))


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


class Size:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n

    def __len__(self):
        return self.n

    __hash__ = None
    __repr__ = lambda self: "n" * self.n


NATIVELY = {
    "index": lambda x, a, b: x * [b, a].index(a),
    "count": lambda x, a, b: x * [b].count(a),
    "text": lambda x, a, b: x * len(str([a])),
    "field": lambda x, a, b: x * len("{0.n}".format(a)),  # noqa: UP032
    "names": lambda x, a, b: x * len([n for n in dir(a) if n == "n"]),
    "a class": lambda x, a, b: x * type("Other", (Size,), {})(a.n).n,
}


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
@pytest.mark.parametrize("name", NATIVELY)
def test_native_code_that_would_call_the_users_is_in_eager_calls(name):
    """It would run unseen: objects that it looks at may change."""
    inner = NATIVELY[name]

    def f(x, a, b):
        return inner(x * 2, a, b) + 1

    compiled, x, a, b = thunder.jit(f, fallback="eager"), torch.ones(2), Size(2), Size(3)
    for n in (2, 3, 2):
        a.n = n
        assert torch.equal(compiled(x, a, b), f(x, a, b))
    assert [s.sym.name for s in thunder.last_traces(compiled)[0].bound_symbols].count("eager_call") == 1
    with pytest.raises(CaptureError):
        thunder.jit(f, fallback="error")(x, a, b)


@pytest.mark.parametrize("text", [lambda a: "%s %r" % (a, a), lambda a: "{} {!r}".format(a, a)])  # noqa: UP031, UP032
def test_texts_of_the_users_objects_are_made_as_f_strings_are(text):
    def f(x, a):
        a.n += 1
        return x * len(text(a))

    compiled, x = thunder.jit(f, fallback="error"), torch.ones(2)
    for n in (2, 3):
        assert torch.equal(compiled(x, Size(n)), f(x, Size(n)))
