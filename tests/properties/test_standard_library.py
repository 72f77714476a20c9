"""Functions of the standard library, called inside compiled programs with tensors and containers that change.

`python -m tests.properties.run --library` calls all of them; here is a sample, with the names that are wrong today.
"""

from __future__ import annotations

import zlib

import pytest

from tests.properties import library
from tests.properties.compared import run, script
from tests.properties.run import smaller

# on every version the same
NAMES = [n for n in library.names() if n not in library.LEFT_OUT and zlib.crc32(n.encode()) % 45 == 0]
OPEN: dict[str, str] = {}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.xfail(strict=True, reason=OPEN[n])] if n in OPEN else []) for n in NAMES],
)
def test_function(name):
    for program in library.programs_of(name, wanted=1):
        if words := [v.words for v in run(program) if v.kind == "wrong"]:
            pytest.fail(f"{words[0]}\n{script(program if name in OPEN else smaller(program, words[0]))}")


def test_all_names_but_few_are_called():
    """Every public function of the modules is called, but for those that LEFT_OUT gives a reason for."""
    assert len(library.names()) > 2500
    assert all(reason for reason in library.LEFT_OUT.values())
