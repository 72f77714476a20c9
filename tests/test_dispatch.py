"""The index of compiled programs: how many prologues a call asks, and how many programs are kept."""

import gc
import random
import warnings

import pytest
import torch

import thunder
from thunder.cache.index import DEPTH, FACTS, STALE, facts_of
from thunder.errors import RecompileWarning

pytestmark = pytest.mark.filterwarnings("ignore::thunder.errors.RecompileWarning")
ONES = torch.ones(2)
SETTING = 0


class Counted:
    """Counts the prologues that calls of a compiled function ask."""

    def __init__(self, compiled):
        self.compiled, self.prologues, self.seen = compiled, 0, {}

    def _watch(self):
        for entry in self.compiled.programs:
            if entry not in self.seen:
                self.seen[entry] = entry.prologue_fn

                def counted_prologue(*call, prologue=entry.prologue_fn):
                    self.prologues += 1
                    return prologue(*call)

                entry.prologue_fn = counted_prologue

    def calls(self, calls, program=None) -> float:
        """Prologues asked a call, of calls that compile nothing: each is (args, kwargs), or a function that makes
        them."""
        self._watch()
        self.prologues, misses = 0, self.compiled.stats.cache_misses
        for call in calls:
            args, kwargs = call() if callable(call) else call
            result = self.compiled(*args, **kwargs)
            if program is not None:
                assert torch.equal(result, program(*args, **kwargs))
        assert self.compiled.stats.cache_misses == misses
        return self.prologues / len(calls)


def in_turn(program, calls, rounds=3, dynamic=False, **options):
    """Compiles for each call, and returns the prologues asked a call in turn, in the last of some rounds."""
    compiled = thunder.jit(program, dynamic=dynamic, **options)
    for call in calls:
        args, kwargs = call() if callable(call) else call
        compiled(*args, **kwargs)
    assert len(compiled.programs) == len(calls)
    counted = Counted(compiled)
    for _ in range(rounds):
        actual = counted.calls(calls, program)
    return actual


@pytest.mark.parametrize("count", [100, 400])
def test_shapes_asked_in_turn_cost_one_prologue_each(count):
    calls = [((torch.ones(n + 1), torch.ones(n + 1)), {}) for n in range(count)]
    assert in_turn(lambda x, y: (x * y + 1).sum(), calls) == 1


class Settings:
    def __init__(self, mode):
        self.mode, self.unread = mode, object()


class Model:
    def __init__(self):
        self.k = 0

    def method(self, x):
        return x * int(self.k)


def read_global(x):
    return x * int(SETTING)


def _with_global(n):
    def call():
        global SETTING
        SETTING = n
        return (ONES,), {}

    return call


def _with_attribute(model, n):
    def call():
        model.k = n
        return (ONES,), {}

    return call


def _with_cell():
    k = 0

    def program(x):
        return x * int(k)

    def setting(n):
        def call():
            nonlocal k
            k = n
            return (ONES,), {}

        return call

    return program, setting


TRAINED = [torch.nn.Linear(2, 2).requires_grad_(False) for _ in range(12)]
FLOATS = [((ONES, float(n)), {}) for n in range(12)]
CELL, SET_CELL = _with_cell()
MODEL = Model()
TOLD_APART = {
    "floats": (lambda x, f: x * {f: 2.0}[f], FLOATS),  # of which a key needs the value
    "strings by name": (lambda x, mode: x * int(mode), [((ONES,), {"mode": str(n)}) for n in range(12)]),
    "dtypes": (
        lambda x: x + 1,
        [((ONES.to(t),), {}) for t in (torch.int8, torch.int16, torch.float16, torch.float32, torch.float64)],
    ),
    "requires_grad": (lambda x: x.detach() + 1, [((ONES.clone().requires_grad_(g),), {}) for g in (False, True)]),
    "types": (lambda x, k: x * k, [((ONES, k), {}) for k in (1.0, True, 1)]),
    "lengths": (lambda xs: sum(xs), [(([ONES] * n,), {}) for n in range(1, 12)]),
    "places in lists": (lambda x, l: x * int(l[1][2]), [((ONES, [0.0, (1, 2, str(n))]), {}) for n in range(12)]),
    "entries of dicts": (lambda x, d: x * int(d["a"]["b"]), [((ONES, {"a": {"b": str(n)}}), {}) for n in range(12)]),
    "keys of dicts": (lambda x, d: x * len(d) + d.get("k3", 0.0), [((ONES, {f"k{n}": 1.0}), {}) for n in (1, 3)]),
    "objects": (lambda x, s: x * int(s.mode), [(lambda n=n: ((ONES, Settings(str(n))), {})) for n in range(12)]),
    "modules": (lambda m, x: m(x) * (id(m) > 0), [((m, ONES), {}) for m in TRAINED]),
    "strides": (
        lambda x: x.reshape(-1) if x.is_contiguous() else x.t().reshape(-1),
        [((torch.ones(2, 3),), {}), ((torch.ones(3, 2).t(),), {})],
    ),
    "functions": (lambda f, x: f(x), [((f, ONES), {}) for f in (torch.sin, torch.cos, torch.exp)]),
    "globals": (read_global, [_with_global(str(n)) for n in range(12)]),
    "cells": (CELL, [SET_CELL(str(n)) for n in range(12)]),
    "attributes of self": (MODEL.method, [_with_attribute(MODEL, str(n)) for n in range(12)]),
}


@pytest.mark.parametrize("what", TOLD_APART)
def test_what_tells_programs_apart(what):
    program, calls = TOLD_APART[what]
    assert in_turn(program, calls) == 1


def test_the_mode_of_a_module():
    module = torch.nn.Dropout(0.0)

    def call(training):
        module.train(training)
        return (ONES,), {}

    assert in_turn(module.forward, [lambda: call(True), lambda: call(False)]) == 1


def test_a_number_that_changes_all_the_time_does_not_spoil_the_index():
    """It is in no program, or symbolic in all but the first, which calls show."""
    for program in (lambda x, step: x * 2, lambda x, step: x * step):
        compiled, step = thunder.jit(program), iter(range(10**6))
        shapes = [torch.ones(n + 1) for n in range(60)]
        for _ in range(3):
            for x in shapes:
                compiled(x, next(step))
        assert len(compiled.programs) <= 2 * len(shapes)
        assert Counted(compiled).calls([(lambda x=x: ((x, next(step)), {})) for x in shapes], program) <= 2


def test_a_fact_that_some_programs_read_and_others_do_not():
    def program(x, d, unread):
        return x * float(d["mode"]) if x.dim() == 1 else x * 2

    calls = [((ONES, {"mode": str(n)}, {"n": n}), {}) for n in range(40)]
    compiled = thunder.jit(program)
    for args, _ in calls:
        compiled(*args)
        compiled(torch.ones(2, 2), *args[1:])
    assert len(compiled.programs) == len(calls) + 1
    mixed = [((x, *args[1:]), {}) for args, _ in calls for x in (ONES, torch.ones(2, 2))]
    counted = Counted(compiled)
    for _ in range(3):
        actual = counted.calls(mixed, program)
    assert actual <= 2


def test_one_program_is_asked_no_question():
    compiled = thunder.jit(lambda x, y: x + y)
    compiled(ONES, ONES)
    (table,) = compiled._tables.values()
    assert table.tree.ask is None
    compiled(torch.ones(3), torch.ones(3))
    compiled(torch.ones(3, 3), torch.ones(3, 3))
    sizes = [f"torch.Size([{', '.join(map(str, s))}])" for s in ((2,), (3,), (3, 3))]
    assert str(table.tree) == "\n  ".join(["shape(item(args, 0))", *(f"{size}: 1 entries" for size in sizes)])


def test_programs_that_nothing_tells_apart_are_asked_in_the_order_of_their_last_use():
    class Deep:
        def __init__(self):
            self.a = self
            for _ in range(DEPTH + 2):
                self.a = [self.a]
            self.value = [[[[[0.0]]]]]

    deep = Deep()

    def program(x, d):
        return x * int(d.value[0][0][0][0][0])

    def call(n):
        deep.value[0][0][0][0][0] = n
        return (ONES, deep), {}

    calls = [lambda n=n: call(str(n)) for n in range(4)]
    compiled = thunder.jit(program)
    for c in calls:
        compiled(*c()[0])
    actual = Counted(compiled).calls([calls[0], calls[0], calls[0], calls[3], calls[3]], program)
    assert actual == (4 + 1 + 1 + 2 + 1) / 5


class Watched:
    """Notes what runs of its own code."""

    ran: list = []

    def __init__(self):
        self.value = 1

    def _note(self, *_):
        Watched.ran.append(1)
        return object.__getattribute__(self, "value")

    __len__ = __bool__ = __iter__ = __getitem__ = _note
    other = property(_note)

    def __getattribute__(self, name):
        Watched.ran.append(name)
        return object.__getattribute__(self, name)

    def __eq__(self, other):
        Watched.ran.append("eq")
        return True

    def __hash__(self):
        Watched.ran.append("hash")
        return 0


def test_noting_facts_runs_no_code_of_the_users():
    class Meta(type):
        def __eq__(cls, other):
            Watched.ran.append("type eq")
            return True

        def __hash__(cls):
            Watched.ran.append("type hash")
            return 0

    class Odd(metaclass=Meta):
        pass

    Watched.ran.clear()
    facts = facts_of(lambda x: x, (Watched(), [Watched()], {Watched(): 1, "a": Watched()}, Odd()), {"k": Watched()})
    ran = list(Watched.ran)
    assert facts and [r for r in ran if r != "hash"] == [], "a dict's own insertion hashes its key, nothing else runs"
    Watched.ran.clear()
    {f: a for f, a in facts.items()}, [hash(a) for a in facts.values()]
    assert Watched.ran == []


def test_noting_facts_keeps_nothing_alive_and_ends():
    cycle: list = [torch.ones(2)]
    cycle.append(cycle)
    assert len(facts_of(print, (cycle,) * 200, {})) < FACTS + 100
    with warnings.catch_warnings(action="ignore"):
        nested = torch._nested_tensor_from_tensor_list([torch.ones(2), torch.ones(3)])
    facts_of(print, (nested, torch.ones(2).to_sparse(), float("nan")), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = thunder.jit(lambda x: x * 2)
        for x in (torch.ones(2), torch.ones(3), torch.ones(4)):
            compiled(x)


def test_random_calls_of_many_programs():
    """Results are eager's whatever the index thinks, and it is right in the end."""
    rng = random.Random(0)

    def program(x, k, *rest, flag=False, settings=None):
        y = x * (k + 1) if flag else x + k
        if settings is not None and x.dim() < 2:
            y = y * settings.mode
        return y.sum() + len(rest)

    def call():
        x = torch.ones(*rng.choice([(2,), (3,), (4,), (2, 2)]), dtype=rng.choice([torch.float32, torch.float64]))
        k = rng.choice([0.5, 1.5, 1, True, rng.randrange(1000)])
        kwargs = rng.choice([{}, {"flag": True}, {"settings": Settings(rng.choice([1, 2.0]))}])
        return (x, k, *[0] * rng.choice([0, 0, 1])), kwargs

    compiled = thunder.jit(program, max_entries=1000)
    for _ in range(1200):
        args, kwargs = call()
        actual, expected = compiled(*args, **kwargs), program(*args, **kwargs)
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    calls, misses = [call() for _ in range(200)], compiled.stats.cache_misses
    for args, kwargs in calls:
        compiled(*args, **kwargs)
    assert compiled.stats.cache_misses - misses < 40 < len(compiled.programs)
    assert Counted(compiled).calls(calls, program) < 4


# ------------------------------------------------------------------------------------------------------------ the limit


def test_beyond_the_limit_the_original_runs_with_one_warning():
    ran = []

    def program(x):
        ran.append(1)  # a sharp edge on purpose: it shows who runs
        return x * 2

    compiled = thunder.jit(program, max_entries=4, cache="constant values")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            for n in range(10):
                assert torch.equal(compiled(torch.ones(n + 1)), 2 * torch.ones(n + 1))
    (warning,) = [w for w in caught if "the original function runs" in str(w.message)]
    assert warning.category is RecompileWarning and warning.filename == __file__
    assert str(warning.message).startswith(
        "<thunder.jit of test_beyond_the_limit_the_original_runs_with_one_warning.<locals>.program> has 4 compiled "
        "programs, as many as max_entries= allows, and a call fits none of them: the original function runs. "
        "Because: x.shape[0] was 4, is 5."
    )
    assert compiled.stats.cache_misses == len(compiled.programs) == 4 and compiled.stats.cache_hits == 4 * 4


def test_beyond_the_limit_a_call_asks_few_prologues():
    compiled = thunder.jit(lambda x: x * 2, max_entries=50, dynamic=False)
    for n in range(60):
        compiled(torch.ones(n + 1))
    assert len(compiled.programs) == 50
    others = [((torch.ones(n + 1),), {}) for n in range(60, 60 + 256)]
    assert Counted(compiled).calls(others, lambda x: x * 2) < 2


def test_an_entry_that_is_not_used_any_more_gives_way():
    compiled = thunder.jit(lambda x: x * 2, max_entries=2)
    for n in (1, 2, 3):
        compiled(torch.ones(n))
    assert compiled.stats.cache_misses == 2
    for _ in range(2 * STALE):
        compiled(torch.ones(2))
    compiled(torch.ones(3))
    for _ in range(64):
        compiled(torch.ones(3))
    assert compiled.stats.cache_misses == 3 and len(compiled.programs) == 2
    hits = compiled.stats.cache_hits
    compiled(torch.ones(2)), compiled(torch.ones(3))
    assert compiled.stats.cache_hits == hits + 2


class Doubles(thunder.Transform):
    """The original does not do what programs with it do."""

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        return computation_trace


@pytest.mark.parametrize("options", [{"transforms": [Doubles()]}, {"disable_torch_autograd": True}])
def test_where_the_original_does_something_else_the_least_recently_used_program_goes(options):
    compiled = thunder.jit(lambda x: x * 2, max_entries=2, **options)
    w = torch.ones(3, requires_grad=True)
    for x in (torch.ones(1), torch.ones(2), torch.ones(1), w):
        result = compiled(x)
        assert torch.equal(result, x * 2) and ("transforms" in options or not result.requires_grad)
    assert compiled.stats.cache_misses == 3 and len(compiled.programs) == 2
    compiled(torch.ones(1))
    assert compiled.stats.cache_misses == 3, "1 was used last but one and is still there"
    compiled(torch.ones(2))
    assert compiled.stats.cache_misses == 4, "2 was the least recently used"


def test_how_many_programs_are_kept_by_default():
    assert thunder.jit(torch.sin)._cache.limit == 512
    assert thunder.jit(torch.sin, transforms=[Doubles()])._cache.limit == 64
    assert thunder.jit(torch.sin, transforms=[Doubles()], max_entries=512)._cache.limit == 512


def test_memory_of_many_shapes_is_bounded():
    """Objects and programs after 600 shapes, which a step backward goes through, are those after 100."""
    w = torch.ones(1, requires_grad=True)
    compiled = thunder.jit(lambda x, w: (x * w).sin().sum(), max_entries=50, dynamic=False)
    counts = []
    for n in range(600):
        compiled(torch.ones(n + 1), w).backward()
        if n in (100, 599):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert len(compiled.programs) == 50 == compiled.stats.cache_misses
    assert sum(len(t.by_last_use()) for t in compiled._tables.values()) == 50
    assert counts[1] - counts[0] < 500, counts
    evicting = thunder.jit(lambda x, w: (x * w).sin().sum(), max_entries=50, transforms=[Doubles()], dynamic=False)
    counts = []
    for n in range(600):
        evicting(torch.ones(n + 1), w).backward()
        if n in (100, 599):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert len(evicting.programs) == 50 and evicting.stats.cache_misses == 600
    # 500 more recompilations are remembered, with a line and a reason
    assert counts[1] - counts[0] < 500 + 500 * 4, counts
    (table,) = evicting._tables.values()
    assert len(table.tree.answers) == len(table.tree.known) == 50
