"""Arguments that tests call the operations of `thunder/ops/families/linalg.py` and `grouped_products.py` with."""

from __future__ import annotations

import torch

from thunder.ops.families.grouped_products import _grouped_mm, grouped_mm
from thunder.ops.families.linalg import (
    addbmm,
    addmm,
    addmv,
    addr,
    baddbmm,
    bilinear,
    bmm,
    dot,
    inner,
    kron,
    linalg_cross,
    linear,
    matmul,
    mm,
    multi_dot,
    mv,
    outer,
    tensordot,
    trace,
    vdot,
    vecdot,
)


@linear.samples
def _(make):
    yield make(4, 3), make(5, 3)
    yield make(2, 4, 3), make(5, 3), make(5)
    yield make(3), make(5, 3), make(5)
    yield make(4, 3), make(3)


@linear.error_samples
def _(make):
    yield make(4, 3), make(5, 4)
    yield make(4, 3), make(5, 3), make(4)


@matmul.samples
def _(make):
    yield make(4, 3), make(3, 5)
    yield make(3), make(3)
    yield make(4, 3), make(3)
    yield make(3), make(3, 4)
    yield make(2, 4, 3), make(3, 5)
    yield make(2, 1, 4, 3), make(6, 3, 5)
    yield make(2, 4, 3), make(3)
    yield make(3), make(2, 3, 4)
    yield make(0, 3), make(3, 2)


@matmul.error_samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(), make(3)
    yield make(2, 4, 3), make(3, 3, 5)
    yield make(4, 3), make(3, 4, dtype=torch.int64)


@mm.samples
def _(make):
    yield make(4, 3), make(3, 5)


@bmm.samples
def _(make):
    yield make(2, 4, 3), make(2, 3, 5)


@mv.samples
def _(make):
    yield make(4, 3), make(3)


@dot.samples
def _(make):
    yield make(4), make(4)


@mm.error_samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(2, 4, 3), make(3, 5)


@bmm.error_samples
def _(make):
    yield make(4, 3), make(4, 3)
    yield make(2, 4, 3), make(3, 3, 5)


@dot.error_samples
def _(make):
    yield make(4), make(3)
    yield make(4, 1), make(4)


@vdot.samples
def _(make):
    yield make(4), make(4)


@vecdot.samples
def _(make):
    yield make(2, 4), make(2, 4)
    yield (make(2, 4), make(4)), {"dim": 0}


@outer.samples
def _(make):
    yield make(3), make(4)
    yield make(3), make(4, dtype=torch.int64)


@outer.error_samples
def _(make):
    yield make(3, 1), make(4)


@inner.samples
def _(make):
    yield make(2, 3), make(4, 3)
    yield make(3), make(3)
    yield make(2, 3), make()


@inner.error_samples
def _(make):
    yield make(2, 3), make(4, 2)


@addmm.samples
def _(make):
    yield make(4, 5), make(4, 3), make(3, 5)
    yield make(5), make(4, 3), make(3, 5)
    yield (make(4, 5), make(4, 3), make(3, 5)), {"beta": 0.5, "alpha": 2.0}
    yield (make(5), make(4, 3), make(3, 5)), {"beta": 0}


@addmv.samples
def _(make):
    yield make(4), make(4, 3), make(3)


@addr.samples
def _(make):
    yield make(4, 3), make(4), make(3)


@baddbmm.samples
def _(make):
    yield make(2, 4, 5), make(2, 4, 3), make(2, 3, 5)
    yield (make(4, 5), make(2, 4, 3), make(2, 3, 5)), {"beta": 2.0, "alpha": 0.5}


@addbmm.samples
def _(make):
    yield make(4, 5), make(2, 4, 3), make(2, 3, 5)


@addmm.error_samples
def _(make):
    yield make(4, 5), make(4, 3), make(4, 5)
    yield make(3), make(4, 3), make(3, 5)


@baddbmm.error_samples
def _(make):
    yield make(2, 4, 5), make(2, 4, 3), make(3, 3, 5)


@tensordot.samples
def _(make):
    yield make(2, 3, 4), make(3, 4, 5)
    yield make(2, 3, 4), make(4, 2), ([0, 2], [1, 0])
    yield make(2, 3), make(4), 0


@multi_dot.samples
def _(make):
    yield ([make(2, 3), make(3, 4), make(4, 2)],)
    yield ([make(3), make(3, 4), make(4)],)


@kron.samples
def _(make):
    yield make(2, 3), make(4, 2)
    yield make(3), make(2, 2)


@bilinear.samples
def _(make):
    yield make(2, 3), make(2, 4), make(5, 3, 4), make(5)


@linalg_cross.samples
def _(make):
    yield make(2, 3), make(2, 3)


@trace.samples
def _(make):
    yield (make(3, 4),)
    yield (make(3, 3, dtype=torch.int64),)


@grouped_mm.samples
def _(make):
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    yield (make(8, 4), make(3, 4, 12)), {"offs": ends}
    yield (make(4, 8), make(8, 4)), {"offs": ends}
    yield make(3, 4, 8), make(3, 8, 4)


@grouped_mm.error_samples
def _(make):
    yield make(8, 4), make(3, 4, 12)


@_grouped_mm.samples
def _(make):
    ends = torch.tensor([4, 16], dtype=torch.int32)
    yield make(2, 8, 16), make(2, 16, 8)
    yield make(16, 8), make(2, 8, 16), ends
    yield make(8, 16), make(16, 8), ends
    yield make(2, 8, 8), make(8, 16), ends


@_grouped_mm.error_samples
def _(make):
    yield make(8, 16), make(2, 16, 8)
