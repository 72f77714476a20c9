"""Generated programs that decide by data, beside eager: those of the first seeds. `tests.properties.run --paths` runs more."""

import pytest

from tests.paths import generated
from tests.paths.generated import generate, run, smaller


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(40))
def test_program(seed):
    program = generate(seed)
    kind, words = run(program)
    if kind == "wrong":
        pytest.fail(f"{words}\n{smaller(program).source()}")


def test_rounding_is_told_from_a_wrong_result():
    def program(a, b, m, i, state):
        return m.diagonal() @ a + i

    args = generated.inputs(3)[0]
    want = generated.outcome(program, (*args, generated.new_state()))
    for change, is_rounding in ((3e-8, True), (1e-4, False)):
        got = (want[0] * (1 + change), *want[1:])
        assert generated._is_rounding(program, 3, 0, want, got) is is_rounding
    assert not generated._is_rounding(program, 3, 0, want, (want[0], want[1], "printed", *want[3:]))
