"""Programs that add and write at indices that tensors say, and reads at such indices, whose gradients do."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS, COLUMNS, COUNT = 11, 6, 301
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

# functions of a matrix, values, an index for each of these, an index of columns, and a permutation of rows
ADDITIONS = {
    "index_add": lambda a, s, i, j, p: a.index_add(0, i, s + s),
    "into zeros": lambda a, s, i, j, p: torch.zeros_like(a).index_add(0, i, s + s),
    "into columns": lambda a, s, i, j, p: a.t().index_add(1, i, s.t() + 1),
    "with a factor": lambda a, s, i, j, p: a.index_add(-1, j[:4], s[:ROWS, :4] * 2, alpha=3),
    "scatter_add": lambda a, s, i, j, p: a.scatter_add(0, i[:, None].expand(COUNT, COLUMNS), s + 1),
    "a part of the values": lambda a, s, i, j, p: a.scatter_add(1, j[: ROWS * 2].reshape(ROWS, 2), s[:, :4] + 1),
    "twice": lambda a, s, i, j, p: (a + 1).index_add(0, i, s).index_add(0, i, s * 2),
    "a constant": lambda a, s, i, j, p: a[:, 0].index_add(0, i, torch.ones_like(i, dtype=a.dtype)) + 1,
    "one index for a row": lambda a, s, i, j, p: a.scatter_add(1, j[:ROWS, None].expand(ROWS, COLUMNS), s[:ROWS] + 1),
    "two indices": lambda a, s, i, j, p: a.index_put((i - ROWS, j), s[:, 0] + 1, accumulate=True) * 2,
    "one value": lambda a, s, i, j, p: a.index_put((i, j), s[0, 0] + 1, accumulate=True) * 2,
    "a reduction": lambda a, s, i, j, p: a[:, 0].index_add(0, i, (s * 2).sum(1, dtype=s.dtype)),
}
WRITES = {
    "index_put": lambda a, s, i, j, p: (a + 1).index_put((p,), s[:ROWS] * 2),
    "scatter": lambda a, s, i, j, p: (a + 1).scatter(0, p[:, None].expand(ROWS, COLUMNS), s[:ROWS] * 2),
    "a number": lambda a, s, i, j, p: (a + 1).scatter(1, j[:ROWS, None], 3) * 2,
    "index_copy": lambda a, s, i, j, p: (torch.zeros_like(a) + 1).index_copy(0, p, s[:ROWS] + 2),
}


def arguments(dtype: torch.dtype) -> list[torch.Tensor]:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-50, 50, shape).to(dtype)

    torch.manual_seed(0)
    indices = [torch.randint(0, ROWS, (COUNT,)), torch.randint(0, COLUMNS, (COUNT,)), torch.randperm(ROWS)]
    return [some(ROWS, COLUMNS), some(COUNT, COLUMNS), *indices]


def gradient_of(run, inputs: list[torch.Tensor], *indices: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = run(*leaves, *indices)
    weight = torch.arange(y.numel()).cos().view(y.shape)
    return [*torch.autograd.grad((y.double() * weight).sum(), leaves)]


READS = {
    "rows": lambda x, i, j: x[i].sin(),
    "columns": lambda x, i, j: x[:, j].sin(),
    "elements": lambda x, i, j: x[i, j].sin(),
    "of two dimensions": lambda x, i, j: x[i[:300].view(20, 15)] * 2,
    "gather": lambda x, i, j: x.gather(0, i[:, None].expand(COUNT, COLUMNS)) * 2,
    "index_select": lambda x, i, j: x.index_select(1, j) * 2,
    "embedding": lambda x, i, j: F.embedding(i, x, padding_idx=3).sin(),
}
