"""Generated programs of numbers that change from call to call do what CPython does, in few programs."""

import pytest

import thunder
from tests.properties import numbers
from tests.properties.compared import run, script
from tests.properties.run import smaller

# a dict that is read is read under the values of its keys, and each answer about a text is a branch
BY_VALUE = (
    "TABLE.get(", " in TABLE", "len(TABLE)", "TABLE.pop(", "list(TABLE)", "TABLE.setdefault(", "TABLE.update(",
    " in s ", "s.startswith(",
)  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(60))
def test_numbers_that_change(seed):
    program = numbers.generate(seed)
    programs = []

    def jit(f):
        programs.append(thunder.jit(f, numerics="eager"))
        return programs[-1]

    wrong = [v.words for v in run(program, jit) if v.kind != "same"]
    if wrong:
        pytest.fail(f"{wrong[0]}\n{script(smaller(program, wrong[0]))}")
    if not any(part in program.source for part in BY_VALUE):
        assert thunder.cache_misses(programs[0]) <= 5, f"{programs[0].recompilations}\n{program.source}"
