"""Random generators: those from outside advance as in eager, one made inside is refused."""

import pytest
import torch

import thunder
from thunder.errors import CaptureError


def test_a_generator_from_outside_advances_as_in_eager():
    compiled = thunder.jit(lambda x, g: x + torch.randn(3, generator=g))
    ours, theirs, x = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3), torch.ones(3)
    for _ in range(3):
        assert torch.equal(compiled(x, ours), x + torch.randn(3, generator=theirs))


def test_a_generator_made_inside_is_refused():
    compiled = thunder.jit(lambda x: x + torch.randn(3, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CaptureError, match="torch.Generator made inside the program.*\n.*\n.*\n.*make it outside"):
        compiled(torch.ones(3))
