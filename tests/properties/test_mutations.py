"""Programs over generated objects, which mutations change between two calls: the next result is eager's.

`python -m tests.properties.run --mutations 20000` runs many more. OPEN holds the seeds that show a fault of today, with
the program of `failures.txt` that it is; when one is repaired the test of its seed fails until it is taken out of OPEN.
"""

from __future__ import annotations

import random

import pytest

from tests.properties import mutations
from tests.properties.compared import Program, kind_of, run, script, wrong
from tests.properties.run import smaller
from tests.properties.shrink import shrink

SEEDS = range(80)
OPEN: dict[int, str] = {}


@pytest.mark.parametrize(
    "seed",
    [pytest.param(s, marks=[pytest.mark.xfail(strict=True, reason=OPEN[s])] if s in OPEN else []) for s in SEEDS],
)
def test_result_is_eagers(seed):
    program = mutations.generate(seed)
    words = [v.words for v in run(program) if v.kind == "wrong"]
    if words:
        pytest.fail(f"{words[0]}\n{script(program if seed in OPEN else smaller(program, words[0]))}")


def test_generator_gives_the_same_program_again():
    random.seed(3)
    assert mutations.generate(5) == mutations.generate(5)


def test_a_forgotten_guard_is_found_and_shrunk():
    """The oracle can fail: a compiler that looks at its first inputs only is wrong, as a small program shows."""
    source = "import torch\nARGS = [torch.ones(2), [1, 2]]\ndef f(t, a):\n    u = t * 3\n    return t + a[0]\n"
    program = Program(source, ("ARGS[1][1] = 4", "ARGS[1][0] = 5", "pass"))

    def frozen(f):
        programs = []

        def run(*args):
            programs.append(f(*args))
            return programs[0].clone()

        return run

    def fails(p):
        return bool(difference := wrong(p, jit=frozen)) and kind_of(difference) == kind_of(wrong(program, jit=frozen))

    small = shrink(program, fails)
    assert small.steps == ("ARGS[1][0] = 5",)
    assert "u = " not in small.source
    assert wrong(program) == ""


def test_needless_recompilations_are_counted():
    source = "import torch\nARGS = [torch.ones(2), {'a': 1, 'b': 2}]\ndef f(t, a): return t + a['a']\n"
    verdicts = run(Program(source, ("ARGS[1]['b'] = 5", "pass", "ARGS[1]['a'] = 3"), frozenset([0])))
    assert [v.checked for v in verdicts] == [False, True, True, False]
    assert not any(v.needless for v in verdicts)
    verdicts = run(Program(source, ("ARGS[1]['a'] = 3",), frozenset([0])))  # a claim that is not true
    assert verdicts[1].needless and "a['a']" in verdicts[1].words


def test_programs_that_depend_on_addresses_are_unstable():
    """Also where the addresses of two worlds lie too near for a float to show it."""
    source = "import torch\nARGS = [torch.ones(2)]\ndef f(t): return t + hash(f)\n"
    verdicts = run(Program(source), jit=lambda f: lambda t: f(t) * 2)
    assert [v.kind for v in verdicts] == ["unstable"]
    verdicts = run(Program(source.replace("hash(f)", "hash('f')")), jit=lambda f: lambda t: f(t) * 2)
    assert [v.kind for v in verdicts] == ["wrong"]
