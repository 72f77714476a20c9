"""PyTorch's higher-order operators are captured as the code that they stand for."""

import pytest
import torch
from torch._higher_order_ops import scan, while_loop

import thunder

PROGRAMS = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x.sin(), (x,)),
    "while_loop": lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x)),
    "scan": lambda x: scan(lambda c, row: (c + row, c * row), x[0] * 0, x),
    "scan_from_the_end": lambda x: scan(lambda c, row: (c + row, c * row), x[0] * 0, x, dim=1, reverse=True),
    "scan_to_numbers": lambda x: scan(lambda c, row: (c + row, row.sum()), x[0] * 0, x, dim=-1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_eagers(name):
    f = PROGRAMS[name]
    compiled = thunder.jit(f)
    for sign in (1, -1):
        x = sign * torch.rand(3, 3)
        torch.testing.assert_close(compiled(x), f(x))


def test_a_condition_on_data_is_a_decision():
    compiled = thunder.jit(PROGRAMS["cond"])
    for x in (torch.ones(2), -torch.ones(2), torch.ones(2)):
        compiled(x)
    assert [path.calls for path in thunder.last_paths(compiled)] == [2, 1]
