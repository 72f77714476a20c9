"""Programs that the generators found wrong (`failures.txt`): those that are still wrong are strict xfails."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.properties import issue18
from tests.properties.compared import Program, run

TEXT = pathlib.Path(__file__).with_name("failures.txt").read_text()
HEAD = re.compile(r"^## (open|closed) (\w+): (.*)$", re.M)


def failures() -> list:
    """A parameter for each program of the file."""
    parts = HEAD.split(TEXT)[1:]
    parameters = []
    for state, name, reason, text in zip(*(parts[i::4] for i in range(4)), strict=True):
        source, *steps = (part.strip("\n") for part in text.split("-- step\n"))
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if state == "open" else []
        parameters.append(pytest.param(Program(source + "\n", tuple(steps)), id=name, marks=marks))
    return parameters


@pytest.mark.parametrize("name", issue18.PROGRAMS)
def test_program_of_the_list_of_wrong_results(name):
    ours, theirs = issue18.outcomes(issue18.PROGRAMS[name])
    assert issue18.same(ours, theirs), (ours, theirs)


@pytest.mark.parametrize("program", failures())
def test_program(program):
    verdicts = run(program)
    assert [v.words for v in verdicts if v.kind in ("wrong", "failed")] == []
