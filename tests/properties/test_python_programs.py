"""Generated Python programs with tensors in them do what CPython does, compiled and in the interpreter alone."""

from __future__ import annotations

import pytest
import torch

from tests.properties import programs
from tests.properties.compared import run, script, wrong
from tests.properties.run import smaller
from thunder.interpreter import Host

SEEDS = range(40)
OPEN: dict[int, str] = {}
OPEN_IN_THE_INTERPRETER: dict[int, str] = {}


def seeds(known: dict[int, str]) -> list:
    return [
        pytest.param(s, marks=[pytest.mark.xfail(strict=True, reason=known[s])] if s in known else []) for s in SEEDS
    ]


@pytest.mark.parametrize("seed", seeds(OPEN))
def test_compiled(seed):
    program = programs.generate(seed)
    words = [v.words for v in run(program) if v.kind == "wrong"]
    if words:
        pytest.fail(f"{words[0]}\n{script(program if seed in OPEN else smaller(program, words[0]))}")


@pytest.mark.parametrize("seed", seeds(OPEN_IN_THE_INTERPRETER))
def test_interpreted(seed):
    def interpreted(f):
        assert not isinstance(f, torch.nn.Module)
        return lambda *args, **kwargs: Host().interpret(f, args, kwargs)

    program = programs.generate(seed)
    assert not (words := wrong(program, jit=interpreted)), words + "\n" + script(program)
