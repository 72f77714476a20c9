"""The corpus of programs that decide by data, beside eager."""

import warnings

import pytest
import torch

from tests.paths import corpus_host, corpus_leaves, corpus_search, corpus_training  # noqa: F401 - registered
from tests.paths.compared import beside_eager
from tests.paths.corpus import HOST, PROGRAMS
from thunder.errors import FallbackWarning

CALLS = 20
ALL = PROGRAMS | HOST
BY_THE_ORIGINAL = {"greedy_matching"}  # writes to the NumPy array of a tensor that it has made


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ALL)
def test_program(name):
    make, arguments = ALL[name]
    g = torch.Generator().manual_seed(0)
    calls = [arguments(g) for _ in range(CALLS)]
    if name in BY_THE_ORIGINAL:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert not beside_eager(make, calls, fallback="eager").programs
        return
    compiled = beside_eager(make, calls)
    print(f"{name}: {len(compiled.programs)} paths")
