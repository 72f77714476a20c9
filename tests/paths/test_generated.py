"""Generated programs that decide by data, beside eager: those of the first seeds. `tests.properties.run --paths` runs more."""

import pytest

from tests.paths.generated import generate, run, smaller


@pytest.mark.parametrize("seed", range(40))
def test_program(seed):
    program = generate(seed)
    kind, words = run(program)
    if kind == "wrong":
        pytest.fail(f"{words}\n{smaller(program).source()}")
