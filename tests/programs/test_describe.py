"""What objects are said to be, and finding them by what is said."""

import collections
import contextvars
import functools
import json
import operator
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thunder.programs.describe import MISSING, Describer, Unspeakable, code_digest, named

# how long values take to make says something of the machine only
SLOW_MACHINES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
VARIABLE = contextvars.ContextVar("variable")


class Plain:
    @property
    def size(self):
        return 3

    @functools.wraps(re.sub)
    def wrapped(self):
        return 4

    @staticmethod
    def fixed():
        return 5


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.sampled_from([
        ..., NotImplemented, torch.float32, torch.strided, torch.channels_last, torch.device("cpu"), torch.Size([1, 2]),
        torch, torch.nn.functional, torch.nn.Linear, torch.nn.functional.gelu, torch.nn.functional.softmax, Plain,
        collections.OrderedDict.__setitem__, Plain.size.fget, Plain.fixed, len, tuple.__new__, int, type(None),
        slice(1, None, 2), range(3), torch.nn.init.calculate_gain,
    ]),
)  # fmt: skip
values = st.recursive(leaves, lambda inner: st.tuples(inner, inner) | st.frozensets(st.integers()), max_leaves=8)


def shown(x) -> str:
    """What a value is; the order of a frozenset is none of it."""
    inside = sorted(map(shown, x)) if type(x) is frozenset else [*map(shown, x)] if type(x) is tuple else repr(x)
    return f"{type(x).__name__} {inside}"


@SLOW_MACHINES
@given(values)
def test_what_is_said_leads_back(x):
    said = json.loads(json.dumps(Describer()(x)))
    names = named(said)
    assert type(names) is type(x) and shown(names) == shown(x)
    assert json.loads(json.dumps(Describer()(names))) == said


@SLOW_MACHINES
@given(values, values)
def test_what_differs_is_said_differently(a, b):
    same = shown(a) == shown(b)
    assert (Describer()(a) == Describer()(b) and json.dumps(Describer()(a)) == json.dumps(Describer()(b))) is same


def test_objects_are_told_apart_by_their_first_mention():
    a, b, say, other = Plain(), Plain(), Describer(), Describer()
    assert say(a) == other(b) and say(b) != other(b)
    assert say(a) != say(b) and named(say(a)) is MISSING
    assert say([]) != say([])


def test_codes():
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert code_digest(one.__code__) != code_digest(two.__code__)
    source = "def f(x):\n  return [y for y in x if y in {1, 2, 3}]"
    spaces = [{}, {}]
    for i, space in enumerate(spaces):
        exec(compile("\n" * i + source, f"file {i}", "exec"), space)
    assert code_digest(spaces[0]["f"].__code__) == code_digest(spaces[1]["f"].__code__)


def test_objects_of_libraries_say_what_is_in_them():
    def said(x):
        return Describer()(x)

    assert said(re.compile("a")) != said(re.compile("b")) and said(re.compile("a")) == said(re.compile("a"))
    assert said(torch.no_grad()) == said(torch.no_grad())
    assert said(VARIABLE)[2] == "variable"
    assert said(operator.itemgetter(1)) != said(operator.itemgetter(2))
    assert said(functools.partial(operator.add, 1)) != said(functools.partial(operator.add, 2))


def test_what_cannot_be_said():
    with pytest.raises(Unspeakable, match="generator"):
        Describer()(x for x in ())


def test_nothing_runs_while_a_name_is_looked_up():
    for said in (["class", "antigravity", "x"], ["function", "os", "system", ""], ["builtin", "builtins", "no"],
                 ["module", "antigravity"], ["enum", ["class", "builtins", "int"], "real"], ["no such"], ["class", 1]):  # fmt: skip
        assert named(said) is MISSING
