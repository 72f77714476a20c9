"""Passes over many facts: compiled and in Python they are one; what they notice, and what they leave alone."""

import random
import shutil
import types
from collections import Counter, OrderedDict

import pytest
import torch

import thunder
from thunder.capture import checks
from thunder.options import C_COMPILER

COMPILER = C_COMPILER.value or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
MISSING = object()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    library = checks.build(COMPILER) if COMPILER else None
    if library is None:
        pytest.skip("no C compiler, or no headers of this Python")
    path = tmp_path_factory.mktemp("checks") / "checks.so"
    path.write_bytes(library)
    return checks.loaded(path)


class Raising(type):
    def __getattr__(cls, name):
        raise {"value": ValueError, "lookup": KeyError}.get(name, RuntimeError)(name)


class Owner(metaclass=Raising):
    a, b = object(), (1, 2)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - which one is compared
        return type(error)


def rows(seed, counters):
    """Tables with keys, what is expected of them, and an owner of attributes with names: some fit, some do not."""
    draw = random.Random(seed)
    values = [object(), None, 1, "text", MISSING]
    tables = [
        {"a": values[0], "b": values[1]}, OrderedDict(a=values[1], b=values[2]), {1: values[3], None: values[0]},
        types.MappingProxyType({"a": values[0]}), vars(Owner), *[Counter(a=1)] * counters,
    ]  # fmt: skip
    n = draw.randint(1, 5)
    chosen, keys = draw.choices(tables, k=n), draw.choices(["a", "b", "c", 1, None], k=n)
    fits = [t.get(k, MISSING) for t, k in zip(chosen, keys)]
    if draw.random() < 0.4:
        fits[draw.randrange(n)] = draw.choice(values)
    return tuple(chosen), tuple(keys), fits


@pytest.mark.parametrize("name", [f.__name__ for f in checks.FUNCTIONS])
def test_compiled_functions_do_what_those_in_python_do(compiled, name):
    in_python = {f.__name__: f for f in checks.FUNCTIONS}[name]
    results = Counter()
    for seed in range(600):
        tables, keys, expected = rows(seed, counters=name == "holds")  # the others are given none
        names = random.Random(seed).choices(["a", "b", "value", "lookup", "other"], (9, 9, 1, 1, 1), k=len(keys))
        arguments = {
            "entries_are": (tables, keys, expected),
            "holds": (tables[0], keys, [tables[0].get(k, MISSING) for k in keys[:-1]] + expected[-1:], MISSING),
            "attributes_are": ((Owner,) * len(names), tuple(names), [vars(Owner).get(n) for n in names]),
            "types_are": (tables, [type(t) for t in tables[:-1]] + [type(tables[seed % len(tables)])]),
            "none_in": (tables, keys),
            "read_entries": (tables, keys, MISSING),
            "any_filled": (
                [dict.fromkeys("ab"[i % 2 :: 2][: seed % (i + 2)]) for i in range(2)] + [OrderedDict(), ()],
            ),
            "keys_are": (dict(zip("abc", keys)), tuple("abc"[: seed % 4])),
        }[name]
        actual = outcome(getattr(compiled, name), *arguments)
        assert actual == outcome(in_python, *arguments), arguments
        results[actual if type(actual) is bool else type(actual)] += 1
    assert len(results) > 1 or name == "read_entries", "one answer to everything compares nothing"


def test_keys_have_an_order(compiled):
    moved = OrderedDict.fromkeys(["".join(("fir", "st")), "second"])
    for f in (compiled.keys_are, checks.keys_are):
        assert f(moved, ("first", "second")) and f(dict(moved), ("first", "second"))
    moved.move_to_end("first")
    for f in (compiled.keys_are, checks.keys_are):
        assert f(moved, ("second", "first")) and not f(moved, ("first", "second"))
        assert not f({1: 2}, ("first",)) and f({}, ()) and f(types.MappingProxyType({"a": 1}), ("a",))


def test_a_key_that_cannot_be_asked_for_raises_the_same(compiled):
    for name in ("entries_are", "read_entries"):
        arguments = ({},), ([],), [None] if name == "entries_are" else None
        in_python = {f.__name__: f for f in checks.FUNCTIONS}[name]
        assert outcome(getattr(compiled, name), *arguments) is outcome(in_python, *arguments) is TypeError


def test_arguments_that_do_not_belong_together_are_refused(compiled):
    with pytest.raises(TypeError, match="of one length"):
        compiled.entries_are(({},), ("a", "b"), [None])
    with pytest.raises(TypeError, match="of one length"):
        compiled.types_are([1], (int,))


@pytest.fixture(params=["compiled", "in Python"])
def either(request, monkeypatch):
    source = request.getfixturevalue("compiled") if request.param == "compiled" else None
    for f in checks.FUNCTIONS:
        monkeypatch.setattr(checks, f.__name__, getattr(source, f.__name__, f))


class Settings:
    scale = 5.0

    def __init__(self):
        self.scale, self.shift = None, 1.0


def test_an_attribute_that_was_none_and_is_gone(either):
    settings = Settings()

    def program(x):
        return x + (settings.shift if settings.scale is None else settings.scale)

    compiled, x = thunder.jit(program), torch.zeros(1)
    assert compiled(x).item() == 1.0
    del settings.scale  # the class has one
    assert compiled(x).item() == program(x).item() == 5.0
    assert "settings.scale" in thunder.compile_stats(compiled).last_compile_reasons[0]


def test_an_equal_value_costs_no_recompilation_and_a_new_entry_does(either):
    settings = Settings()

    def program(x):
        return x * settings.shift if settings.scale is None and not hasattr(settings, "bias") else x + settings.bias

    compiled, x = thunder.jit(program), torch.ones(1)
    for _ in range(3):
        settings.shift = float("1.0")  # another object
        assert compiled(x).item() == 1.0
    assert thunder.cache_misses(compiled) == 1
    settings.bias = 2.0
    assert compiled(x).item() == program(x).item() == 3.0
    assert thunder.cache_misses(compiled) == 2


class Watched:
    """Says who reads its attributes."""

    read: list = []

    def __init__(self):
        self.scale, self.names = 2.0, {"a": 1.0}

    def __getattribute__(self, name):
        Watched.read.append(name)
        return object.__getattribute__(self, name)


def test_prologues_run_no_getattribute_of_the_users(either):
    watched = Watched()

    def program(x):
        return x * watched.scale + watched.names["a"]

    compiled, x = thunder.jit(program), torch.ones(1)
    compiled(x)
    Watched.read.clear()
    assert compiled(x).item() == 3.0
    compiled.programs[0].prologue_fn(program, (x,), {})
    assert "__dict__" not in Watched.read and "__class__" not in Watched.read


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.factor = torch.nn.Linear(2, 2), 2.0

    def forward(self, x):
        return self.inner(x) * self.factor


def test_what_stands_in_modules_is_read_and_checked(either):
    model = torch.nn.Sequential(Layer(), Layer())
    compiled, x = thunder.jit(model), torch.ones(1, 2)
    changes = [
        lambda: setattr(model[1], "factor", 3.0),
        lambda: setattr(model[0], "inner", torch.nn.Linear(2, 2)),
        lambda: setattr(model[0].inner, "bias", None),
        lambda: model[1].__setattr__("forward", lambda x: x - 1),
        lambda: setattr(model[0], "__class__", type("Other", (Layer,), {"forward": lambda self, x: x})),
    ]
    for change in [lambda: None, *changes]:
        change()
        torch.testing.assert_close(compiled(x), model(x))
    assert thunder.cache_misses(compiled) == 1 + len(changes)
