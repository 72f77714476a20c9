"""Functions of PyTorch that are Python: capture interprets them, and our operations begin where PyTorch's C++ does."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.ops.harness import maker
from thunder.core.symbol import OpTags

make = maker(torch.float32)
IMAGES, ROWS = make(2, 4, 6, 6), make(5, 4)
SHARES = make(5, 4, low=0.0, high=1.0)


def unpooled(rank: int, **options):
    def program(a):
        y, indices = getattr(F, f"max_pool{rank}d")(a, 2, return_indices=True)
        return getattr(F, f"max_unpool{rank}d")(y, indices, 2, **options)

    return program


PROGRAMS = {
    "softsign": (F.softsign, ROWS),
    "tanhshrink": (F.tanhshrink, ROWS),
    "softmin": (lambda a: F.softmin(a, 1), ROWS),
    "norm": (torch.norm, ROWS),
    "norm, nuclear": (lambda a: torch.norm(a, "nuc", dtype=torch.float64), ROWS),
    "norm, Frobenius, of a dimension": (lambda a: a.norm("fro", 1, True), ROWS),
    "norm of an order": (lambda a: a.norm(1.5, 0, dtype=torch.float64), ROWS),
    "local_response_norm of rows": (lambda a: F.local_response_norm(a, 3), make(2, 6, 4)),
    "local_response_norm": (lambda a: F.local_response_norm(a, 2, 1e-2, 0.5, 2.0), IMAGES),
    "lp_pool1d": (lambda a: F.lp_pool1d(a, 3, 3, 2, True), make(3, 7, low=0.1)),
    "lp_pool2d": (lambda a: F.lp_pool2d(a, 2.0, 2), IMAGES.abs()),
    "lp_pool2d, the largest": (lambda a: F.lp_pool2d(a, math.inf, 2), IMAGES.abs()),
    "lp_pool3d": (lambda a: F.lp_pool3d(a, 2.0, 2), IMAGES.abs()),
    "multilabel_soft_margin_loss": (
        lambda a: F.multilabel_soft_margin_loss(a, SHARES, SHARES[0], reduction="none"), ROWS,
    ),
    "multilabel_soft_margin_loss, mean": (lambda a: F.multilabel_soft_margin_loss(a, SHARES), ROWS),
    "gumbel_softmax": (lambda a: F.gumbel_softmax(a, 0.7), ROWS),
    "gumbel_softmax, hard": (lambda a: F.gumbel_softmax(a.t(), hard=True), ROWS),
    "svd_lowrank": (lambda a: torch.svd_lowrank(a, 3)[1], ROWS),
    "pca_lowrank": (lambda a: torch.pca_lowrank(a, 3)[1], ROWS),
    "fractional_max_pool2d": (lambda a: F.fractional_max_pool2d(a, 2, 3), IMAGES),
    "fractional_max_pool3d": (lambda a: F.fractional_max_pool3d(a, 2, output_ratio=0.5), make(3, 6, 6, 6)),
    "max_unpool1d": (unpooled(1), make(2, 3, 6)),
    "max_unpool2d": (unpooled(2, output_size=(7, 7)), IMAGES),
    "max_unpool3d": (unpooled(3), IMAGES),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_eagers(name):
    program, x = PROGRAMS[name]
    compiled = thunder.jit(program, fallback="error")
    gradients = []
    for run in (program, compiled, compiled):
        torch.manual_seed(0)
        a = x.clone().requires_grad_()
        y = run(a)
        y.square().sum().backward()
        gradients.append((y.detach(), a.grad))
    for y, gradient in gradients[1:]:
        torch.testing.assert_close(y, gradients[0][0], rtol=0, atol=0)
        torch.testing.assert_close(gradient, gradients[0][1], equal_nan=True)  # 2.9 has NaN for infinite norms
    operations = thunder.last_traces(compiled)[0].bound_symbols
    assert not [b.sym.name for b in operations if OpTags.OPAQUE in b.sym.tags]


@pytest.mark.parametrize("function, arguments", [
    (F.local_response_norm, (make(3), 2)), (F.multilabel_soft_margin_loss, (make(4, 3), make(4, 2))),
    (F.lp_pool2d, (make(2, 3, 2, 2), 2.0, 5)), (torch.norm, (make(4, 3), "two")), (torch.norm, (make(4), 2, 3)),
    (torch.norm, (make(2, 3, 4), "nuc")), (torch.pca_lowrank, (make(5, 4), 5)),
    (F.max_unpool2d, (make(2, 3, 3, 3), torch.zeros(2, 3, 3, 3, dtype=torch.int64), 2, None, 0, (9, 9))),
    (F.fractional_max_pool2d, (make(2, 3, 5, 5), 2)),
])  # fmt: skip
def test_errors_are_eagers(function, arguments):
    with pytest.raises((RuntimeError, ValueError, IndexError)) as eager:
        function(*arguments)
    with pytest.raises(type(eager.value)) as raised:
        thunder.jit(lambda *arguments: function(*arguments))(*arguments)
    assert str(raised.value).startswith(str(eager.value).split("\n")[0][:60])
