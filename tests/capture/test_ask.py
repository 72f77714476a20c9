"""Questions: what capture asks, the prologue asks again; what was not asked may change."""

import collections
import json

import numpy as np
import pytest
import torch

import thunder
from thunder.capture import checks
from thunder.capture.world import (
    CONTENT,
    FILLED,
    HELPERS,
    IDENTITY,
    KEYS,
    KIND,
    LENGTH,
    MISSING,
    PRESENT,
    TYPE,
    VALUE,
    World,
)

ANSWERS = [
    (TYPE, [1, True, 1.0, [], {}]),
    (IDENTITY, [[], [], object()]),
    (
        VALUE,
        [
            1,
            True,
            1.0,
            0.0,
            -0.0,
            float("nan"),
            "a",
            b"a",
            (1, 2),
            (1, True),
            None,
            ...,
            slice(1, 2),
            slice(1, 3),
            torch.float32,
        ],
    ),
    (LENGTH, [[], [1], {1: 2, 3: 4}, collections.deque([1, 2, 3])]),
    (KEYS, [{}, {1: 2}, {True: 2}, {1: 1, 2: 2}, {2: 1, 1: 2}]),
    (
        CONTENT,
        [
            [1] * 20,
            [True] * 20,
            [1.0] * 20,
            [[1], [2]],
            [(1,), [2]],
            np.zeros(3),
            np.zeros(4),
            bytearray(b"a"),
            {"a": [1]},
        ],
    ),
    (PRESENT, [1, MISSING]),
    (KIND, [torch.zeros(2).to_sparse(), torch.zeros(3).to_sparse(), None]),
    (FILLED, [[{}], [{1: 2}]]),
]


@pytest.mark.parametrize("question, values", ANSWERS, ids=[q.name for q, _ in ANSWERS])
def test_the_text_of_a_question_tells_the_answers_of_two_values_apart(question, values):
    objects = {f.__name__: f for f in HELPERS.values()} | {"MISSING": MISSING, "checks": checks}
    for i, a in enumerate(values):
        world = World()
        was = world.ask(world.const(a), question)
        for j, b in enumerate(values):
            now = question.text.format(v="v", k=None)
            changed = question.changed.format(now=now, was="was")
            assert bool(eval(changed, {**objects, "v": b, "was": was})) == (i != j), (a, b, changed)


def test_a_question_is_asked_once():
    queries = []
    question = LENGTH._replace(ask=lambda v, _: queries.append(v) or len(v))
    world = World()
    assert [world.ask(world.const([1, 2]), question) for _ in range(2)] == [2, 2] and len(queries) == 2
    source = world.const([1, 2])
    assert [world.ask(source, question) for _ in range(3)] == [2, 2, 2] and len(queries) == 3


DEEP = {"five deep": lambda: [[[[[1.0, 2.0]]]]], "200 rows": lambda: [[float(i), 2.0] for i in range(200)]}
READERS = {
    "torch.tensor": torch.tensor, "json.dumps": json.dumps, "np.array": lambda rows: np.array(rows).sum().item(),
    "sum": lambda rows: str(sum(rows, [])),
    "==": lambda rows: rows == DEEP_COPY, "str": str,
}  # fmt: skip
DEEP_COPY = [[float(i), 2.0] for i in range(200)]


@pytest.mark.parametrize("make", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_native_code_sees_containers_whole_however_long_or_deep(read, make):
    def program(x, rows):
        return x + 1, read(rows)

    def agrees():
        ours, eagers = compiled(x, rows), program(x, rows)
        assert torch.equal(ours[0], eagers[0]) and type(ours[1]) is type(eagers[1])
        assert torch.equal(ours[1], eagers[1]) if isinstance(ours[1], torch.Tensor) else ours[1] == eagers[1]

    compiled, x, rows = thunder.jit(program), torch.ones(2), make()
    agrees()
    agrees()
    assert thunder.cache_misses(compiled) == 1
    innermost = rows
    while isinstance(innermost[-1], list):
        innermost = innermost[-1]
    innermost[-1] = 7.0
    agrees()
    assert thunder.cache_misses(compiled) == 2


LONG = list(range(100_000))


@pytest.mark.parametrize(
    "read, unread",
    [
        (lambda l: len(l), lambda l: l.__setitem__(5, -1)),
        (lambda l: l[5], lambda l: l.append(1)),
        (lambda l: l[-1], lambda l: l.__setitem__(5, -1)),
    ],
    ids=["len", "item", "last item"],
)
def test_a_program_depends_on_what_it_read_of_a_list(read, unread):
    compiled, numbers = thunder.jit(lambda x, l: x * read(l)), list(LONG)
    x = torch.ones(2)
    assert torch.equal(compiled(x, numbers), x * read(numbers))
    unread(numbers)
    assert torch.equal(compiled(x, numbers), x * read(numbers)) and thunder.cache_misses(compiled) == 1
    del numbers[3:]
    numbers += range(10)
    assert torch.equal(compiled(x, numbers), x * read(numbers)) and thunder.cache_misses(compiled) == 2
    guards = thunder.compile_stats(compiled).last_entry.captured.guard_count
    assert guards < 10


def test_a_long_list_of_numbers_is_one_question_and_one_constant():
    compiled = thunder.jit(lambda l: torch.tensor(l) + 1)
    numbers = list(LONG)
    assert torch.equal(compiled(numbers), torch.tensor(numbers) + 1)
    assert thunder.compile_stats(compiled).last_entry.captured.guard_count < 10
    assert len(str(thunder.last_traces(compiled)[-1])) < 1000
    numbers[77] = True
    assert torch.equal(compiled(numbers), torch.tensor(numbers) + 1) and thunder.cache_misses(compiled) == 2


@pytest.mark.parametrize("kind", [list, tuple])
def test_writes_into_what_was_asked_for_its_content_are_effects(kind):
    def program(x, rows):
        before = len(json.dumps(rows))
        rows[3].append(1.0)
        rows[4][0] = 5.0
        return x + before, rows[3]

    compiled, ours, eagers = thunder.jit(program), kind([1.0] for _ in range(40)), kind([1.0] for _ in range(40))
    for _ in range(2):
        actual, wanted = compiled(torch.ones(2), ours), program(torch.ones(2), eagers)
        assert torch.equal(actual[0], wanted[0]) and actual[1] is ours[3] and ours == eagers


KNOWN, WANTED = {int, "relu"}, frozenset({"sigmoid"})


def by_membership(x, name):
    return x.relu() if name in KNOWN and name not in WANTED else x.neg()


def in_order(x):
    for element in KNOWN:
        x = x + len(str(element))
    return x


def test_a_set_is_asked_for_one_element():
    """What else is in it, and its order, is no question of a program that only looks for one."""
    compiled, x = thunder.jit(by_membership), torch.randn(3)
    KNOWN.add("tanh")
    try:
        compiled(x, "relu")
        KNOWN.add(float)
        torch.testing.assert_close(compiled(x, "relu"), x.relu())
        assert thunder.cache_misses(compiled) == 1
        KNOWN.discard("relu")
        torch.testing.assert_close(compiled(x, "relu"), x.neg())
        assert "held relu, does not" in thunder.last_recompile_reasons(compiled)[0]
        KNOWN.add("relu")
        whole = thunder.jit(in_order)
        for change in (lambda: KNOWN.add("softplus"), lambda: KNOWN.discard("softplus")):
            torch.testing.assert_close(whole(x), in_order(x))
            change()
        torch.testing.assert_close(whole(x), in_order(x))
    finally:
        KNOWN.clear()
        KNOWN.update({int, "relu"})


class Never:
    """Equal to nothing, and hashed as a text."""

    def __init__(self):
        self.compared = 0

    def __hash__(self):
        return hash("relu")

    def __eq__(self, other):
        return False


def test_a_set_with_objects_that_compare_themselves_is_read():
    never, x = Never(), torch.randn(3)
    KNOWN.add(never)
    try:
        compiled = thunder.jit(by_membership)
        torch.testing.assert_close(compiled(x, "relu"), by_membership(x, "relu"))
        KNOWN.discard("relu")
        torch.testing.assert_close(compiled(x, "relu"), by_membership(x, "relu"))
    finally:
        KNOWN.clear()
        KNOWN.update({int, "relu"})
