"""The corpus of programs that decide by data, beside eager."""

import pytest
import torch

from tests.paths import corpus_host, corpus_search, corpus_training  # noqa: F401 - they register their programs
from tests.paths.compared import beside_eager
from tests.paths.corpus import PROGRAMS

CALLS = 20


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    make, arguments = PROGRAMS[name]
    g = torch.Generator().manual_seed(0)
    compiled = beside_eager(make, [arguments(g) for _ in range(CALLS)])
    print(f"{name}: {len(compiled.programs)} paths")
